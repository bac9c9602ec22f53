import itertools
import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.estimators import make_estimator

SIZE = 4


def groups_of(make_group, rng, count, bias=0.0, noise=0.3, gradient=None):
    """Groups whose predicted scores err by `bias` (a function of the member) and noise; all have both scores."""
    groups = []
    for index in range(count):
        executed = rng.integers(0, 2, SIZE).astype(float)
        predicted = executed + bias * np.arange(SIZE) + noise * rng.normal(size=SIZE)
        group = make_group(executed.tolist(), predicted.tolist(), index=index)
        if gradient is not None:
            for member, trajectory in enumerate(group.trajectories):
                trajectory.log_prob_gradient = gradient[member]
        group.inclusion_probability = 0.25
        groups.append(group)
    return groups


def taught(make_group, name, rng, steps=12, horizon=1, **kind):
    more = {"horizon": horizon} if name == "fused" else {}
    estimator = make_estimator(name, debias={"kind": "isotonic"}, **more)
    for _ in range(steps):
        estimator.observe(groups_of(make_group, rng, 4, **kind))
    return estimator


def leave_one_out(scores):
    scores = np.asarray(scores)
    return (scores - scores.mean()) * len(scores) / (len(scores) - 1)


def over_all_draws(estimator, groups, anchors):
    """Mean advantages, (m, G), over every way to draw that many anchors."""
    total, draws = 0.0, list(itertools.combinations(range(len(groups)), anchors))
    for draw in draws:
        for index, group in enumerate(groups):
            group.anchor = index in draw
            group.inclusion_probability = anchors / len(groups)
        total = total + np.stack(estimator.advantages(groups).advantages)
    return total / len(draws)


@given(seed=st.integers(0, 2**32 - 1), bias=st.sampled_from([0.0, 0.4, -2.0]), anchors=st.integers(1, 5))
def test_rectified_has_no_bias_whatever_the_world_model_says(make_group, seed, bias, anchors):
    rng = np.random.default_rng(seed)
    estimator = taught(make_group, "rectified", rng, bias=bias)
    groups = groups_of(make_group, rng, 6, bias=bias)
    estimator.observe([])
    scale = estimator.advantages(groups).metrics["scale"]
    expected = np.stack([leave_one_out(group.executed) / scale for group in groups])
    np.testing.assert_allclose(over_all_draws(estimator, groups, anchors), expected, atol=1e-12)


def test_an_unequal_chance_to_be_executed_leaves_no_bias_either(make_group):
    rng = np.random.default_rng(3)
    estimator = taught(make_group, "rectified", rng, bias=1.0, noise=0.1)
    (group,) = groups_of(make_group, rng, 1, bias=1.0, noise=0.1)
    estimator.observe([])
    total = 0.0
    for chance in (0.1, 0.7):
        group.inclusion_probability, mean = chance, 0.0
        for anchor, probability in ((True, chance), (False, 1 - chance)):
            group.anchor = anchor
            mean = mean + probability * estimator.advantages([group]).advantages[0]
        total += 1
        np.testing.assert_allclose(
            mean, leave_one_out(group.executed) / estimator.advantages([group]).metrics["scale"], atol=1e-12
        )
    assert total == 2
    assert estimator.advantages([group]).metrics["control"] > 0.1


def test_lambda_is_the_regression_coefficient_shrunk(make_group):
    estimator = make_estimator("rectified", half_life=1e12, min_groups=3)
    # Advantages by execution (1, -1) and by prediction (.5, -.5) or (0, 0), in score units, leave-one-out:
    for _ in range(4):
        estimator.observe([make_group([1.0, 0.0], [0.75, 0.25]), make_group([1.0, 0.0], [0.5, 0.5])])
    metrics = estimator.advantages([]).metrics
    # Moments per group: |e|^2 = 2/4, |p|^2 = (.5/4 + 0) / 2, e.p = (1/4 + 0) / 2; the last step does not count yet.
    assert metrics["groups_measured"] == pytest.approx(6)
    assert metrics["correlation"] == pytest.approx(0.125 / np.sqrt(0.5 * 0.0625))
    squared = 0.125**2 / (0.5 * 0.0625)
    slope, trust = 0.125 / 0.0625, 1 - (1 - squared) / (squared * 4)
    assert metrics["control"] == pytest.approx(min(1.0, trust * slope))


def test_until_enough_groups_were_seen_it_is_the_anchors_alone(make_group):
    estimator = make_estimator("rectified")
    groups = [make_group([1.0, 0.0], [0.9, 0.1]), make_group(predicted=[0.8, 0.2], index=1)]
    groups[0].inclusion_probability = groups[1].inclusion_probability = 0.5
    estimator.observe(groups[:1])
    weighted = estimator.advantages(groups)
    np.testing.assert_allclose(weighted.advantages[0], [4.0, -4.0])  # (1, -1) / 0.5 chance / 0.5 spread
    assert not weighted.advantages[1].any()
    assert weighted.metrics["contributing_members"] == 2


@pytest.mark.parametrize(
    ("predicted", "why"), [([0.5, 0.5, 0.5, 0.5], "constant"), ([0.1, 0.2, 0.8, 0.9], "inverted")]
)
def test_a_useless_world_model_leaves_the_anchors_alone(make_group, predicted, why):
    estimator = make_estimator("fused", debias={"kind": "isotonic", "min_pairs": 8})
    for _ in range(40):
        estimator.observe([make_group([1, 1, 0, 0], predicted)])
    rest = make_group(predicted=predicted, index=1)
    weighted = estimator.advantages([make_group([1, 0, 0, 0], predicted), rest])
    assert weighted.metrics["control"] == 0, why
    assert weighted.metrics["correlation"] <= 0
    assert not weighted.advantages[1].any()
    assert weighted.advantages[0].any()


def test_anchors_without_any_success_correct_a_model_that_sees_differences(make_group):
    rng = np.random.default_rng(0)
    estimator = taught(make_group, "rectified", rng, noise=0.1)
    estimator.observe([])
    anchor = make_group([0.0, 0.0, 0.0, 0.0], [0.0, 0.3, 0.6, 0.9])
    anchor.inclusion_probability = 0.25
    assert estimator.advantages([anchor]).advantages[0][3] < -0.1
    nothing = make_group([0.0] * 4, [0.2] * 4)
    weighted = estimator.advantages([nothing])
    assert weighted.metrics["degenerate_groups"] == 1
    assert weighted.metrics["contributing_members"] == 0


def test_fused_trusts_an_unbiased_model_and_rectifies_a_biased_one(make_group):
    gradient, mixes = np.eye(SIZE), {}
    for bias in (0.0, 0.15, 3.0):
        rng = np.random.default_rng(1)
        # Without a map, which would remove part of the bias: it needs 200 pairs, and sees 192.
        estimator = taught(make_group, "fused", rng, bias=bias, noise=0.5, gradient=gradient)
        estimator.observe([])
        mixes[bias] = estimator.advantages(groups_of(make_group, rng, 16, gradient=gradient)).metrics["mix"]
    assert mixes[0.0] > 0.3  # 0.6 with exact moments
    assert mixes[0.0] > mixes[0.15] > mixes[3.0]
    assert mixes[3.0] < 0.1


@pytest.mark.parametrize("horizon", [1, 10])
def test_the_mix_minimises_the_squared_error_that_the_moments_predict(make_group, horizon):
    rng = np.random.default_rng(5)
    settings = {"bias": 0.1, "noise": 0.4, "gradient": np.eye(SIZE), "steps": 30, "horizon": horizon}
    estimator = taught(make_group, "fused", rng, **settings)
    estimator.observe([])
    groups = groups_of(make_group, rng, 16)
    for group in groups:
        group.inclusion_probability = 4 / 16
    metrics = estimator.advantages(groups).metrics
    ee, pp, ep = (metrics[f"variance_{pair}"] for pair in ("ee", "pp", "ep"))

    def squared_error(mix, control):
        """Of mix * mean_all(p) + (1 - mix) (mean_all(control p) + mean_anchors(e - control p)), 4 anchors of 16."""
        noise = np.array([[ee, ep], [ep, pp]])
        rest = np.array([0.0, mix + (1 - mix) * control]) / 16
        anchor = rest + (1 - mix) * np.array([1.0, -control]) / 4
        return (
            horizon * mix**2 * metrics["squared_bias"]
            + 4 * anchor @ noise @ anchor
            + 12 * rest @ noise @ rest
        )

    best = min(
        (squared_error(mix, control), mix)
        for mix in np.linspace(0, 1, 201)
        for control in np.linspace(0, 1.5, 151)
    )
    assert metrics["mix"] == pytest.approx(best[1], abs=0.006)


def test_without_gradients_fused_is_rectified_and_says_so(make_group, caplog):
    rng = np.random.default_rng(2)
    states = [np.random.default_rng(7), np.random.default_rng(7)]
    fused, rectified = (
        taught(make_group, name, state) for name, state in zip(("fused", "rectified"), states, strict=True)
    )
    groups = groups_of(make_group, rng, 4)
    with caplog.at_level(logging.WARNING):
        ours, plain = fused.advantages(groups), rectified.advantages(groups)
        fused.advantages(groups)
    np.testing.assert_array_equal(np.stack(ours.advantages), np.stack(plain.advantages))
    assert sum("no log_prob_gradient" in record.message for record in caplog.records) == 1


@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(["rectified", "fused"]))
def test_order_and_score_scale_change_nothing(make_group, seed, name):
    def final(shift, scale, order):
        rng = np.random.default_rng(seed)
        estimator = make_estimator(name, debias={"kind": "isotonic"})
        for step in range(4):
            groups = groups_of(make_group, rng, 4, bias=0.2, gradient=np.eye(SIZE))
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.executed = shift + scale * trajectory.executed
                    trajectory.predicted = shift + scale * trajectory.predicted
            if step < 3:
                estimator.observe([groups[i] for i in order])
        estimator.observe([])
        weighted = estimator.advantages([groups[i] for i in order]).advantages
        return np.stack([weighted[order.index(i)] for i in range(4)])

    plain = final(0.0, 1.0, [0, 1, 2, 3])
    np.testing.assert_allclose(final(0.0, 1.0, [2, 0, 3, 1]), plain, atol=1e-8)
    np.testing.assert_allclose(final(5.0, 1.0, [0, 1, 2, 3]), plain, atol=1e-8)
    np.testing.assert_allclose(final(0.0, 8.0, [0, 1, 2, 3]), plain, atol=1e-8)


def test_missing_scores_have_no_weight(make_group):
    estimator = taught(make_group, "rectified", np.random.default_rng(0))
    groups = [
        make_group([1.0, None, 0.0, None], [0.9, 0.5, 0.1, 0.2]),
        make_group([None, None, 1.0, None], [0.9, 0.5, 0.1, 0.2], index=1),
        make_group(predicted=[0.9, None, 0.1, 0.2], index=2),
    ]
    for group in groups:
        group.inclusion_probability = 0.5
    estimator.observe(groups[:2])
    weighted = estimator.advantages(groups)
    assert [used.tolist() for used in weighted.contributes] == [
        [True, False, True, False],
        [False] * 4,
        [True, False, True, True],
    ]
    assert weighted.metrics["missing_members"] == 2 + 3 + 1
    assert weighted.metrics["skipped_groups"] == 1
    assert all(np.isfinite(values).all() for values in weighted.advantages)


def test_a_restored_estimator_goes_on_as_the_old_one(make_group):
    rng = np.random.default_rng(4)
    estimator, again = (
        taught(make_group, "fused", rng, gradient=np.eye(SIZE)),
        make_estimator("fused", debias={"kind": "isotonic"}),
    )
    again.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    groups = groups_of(make_group, rng, 5, gradient=np.eye(SIZE))
    results = []
    for one in (estimator, again):
        one.observe(groups)
        results.append(np.stack(one.advantages(groups).advantages))
    np.testing.assert_array_equal(*results)
    assert estimator.state_dict() == again.state_dict()


def test_min_groups_has_a_limit():
    with pytest.raises(ValueError, match="min_groups=2: must be above 2"):
        make_estimator("rectified", min_groups=2)


def test_a_memory_replays_earlier_anchors_with_their_share(make_group):
    """Without a model, memory 1/2: this step's anchors weigh 4/7, those before 2/7 and 1/7."""
    estimator = make_estimator("rectified", memory=0.5, standardize=False)
    steps = [[make_group([0, 1], index=step)] for step in range(3)]
    for (group,) in steps:
        group.inclusion_probability = 0.5
        estimator.observe([group])
    result = estimator.advantages(steps[-1])
    np.testing.assert_allclose(result.advantages[0], np.array([-1, 1]) / 0.5 * 4 / 7)
    assert [group.context.index for group, _ in result.replayed] == [1, 0]
    for (_, values), share in zip(result.replayed, (2 / 7, 1 / 7), strict=True):
        np.testing.assert_allclose(values, np.array([-1, 1]) / 0.5 * share)
    # A step without anchors leaves the rectifier to those before.
    estimator.observe([])
    shares = [values[1] / 2 for _, values in estimator.advantages([]).replayed]
    np.testing.assert_allclose(shares, [4 / 7, 2 / 7, 1 / 7])


def test_without_a_memory_nothing_is_replayed(make_group):
    estimator = taught(make_group, "fused", np.random.default_rng(0), gradient=np.eye(SIZE))
    assert not estimator.advantages([]).replayed
    with pytest.raises(ValueError, match="memory=1"):
        make_estimator("fused", memory=1.0)


def test_a_memory_of_a_policy_at_rest_leaves_less_noise_and_no_bias(make_group):
    rng = np.random.default_rng(3)

    def total(memory, draws=400):
        estimator, found = make_estimator("rectified", memory=memory, standardize=False), []
        for _ in range(draws):
            groups = groups_of(make_group, rng, 6, bias=0.5, noise=0.3)
            for group in groups:
                group.inclusion_probability = 0.5
                group.anchor = False
            for group in groups[:3]:
                group.anchor = True
            estimator.observe(groups[:3])
            result = estimator.advantages(groups)
            found.append(sum([*result.advantages, *(values for _, values in result.replayed)]))
        return np.array(found[50:])

    plain, averaged = total(0.0), total(0.8)
    assert averaged.var(axis=0).sum() < 0.5 * plain.var(axis=0).sum()
    error = np.sqrt(plain.var(axis=0) / len(plain))
    assert (np.abs(averaged.mean(axis=0) - plain.mean(axis=0)) < 5 * error).all()


def test_a_memory_survives_a_checkpoint(make_group, tmp_path):
    import torch

    one, other = (make_estimator("fused", memory=0.5) for _ in range(2))
    rng = np.random.default_rng(4)
    for _ in range(10):
        one.observe(groups_of(make_group, rng, 4))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    new = groups_of(make_group, rng, 4)
    for estimator in (one, other):
        estimator.observe(new)
    first, second = one.advantages(new), other.advantages(new)
    np.testing.assert_array_equal(first.advantages, second.advantages)
    assert len(first.replayed) == len(second.replayed) == 4 * 6  # 2^-6 is above 1 %
    for (_, values), (_, same) in zip(first.replayed, second.replayed, strict=True):
        np.testing.assert_array_equal(values, same)
