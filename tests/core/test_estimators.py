"""The published arms: which scores judge which group, the corrections, and inputs that carry no signal."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.advantages import group_advantages
from wmrl_embodied.core.estimators import ESTIMATORS, make_estimator
from wmrl_embodied.core.published import ARMS, spread_weight

QUICK = {"debias": {"min_pairs": 4, "refit_every": 4}, "denoise": {"min_observations": 1}}
EXECUTED, PREDICTED = [0.0, 1.0, 1.0, 0.0], [0.1, 0.2, 0.8, 0.9]
A_EXECUTED = group_advantages(EXECUTED).values
A_PREDICTED = group_advantages(PREDICTED).values


def mixed_step(make_group):
    """One anchor whose two scores disagree, and one group with predicted scores only."""
    return [make_group(EXECUTED, PREDICTED), make_group(None, PREDICTED, index=1)]


@pytest.mark.parametrize(
    ("name", "anchor", "other"),
    [
        ("real_small", A_EXECUTED, None),
        ("raw", A_PREDICTED, A_PREDICTED),
        ("mixed", A_EXECUTED, A_PREDICTED),
        ("debias", A_EXECUTED, A_PREDICTED),  # identity map and weight 1 before any observation
        ("denoise", A_EXECUTED, A_PREDICTED),
        ("wmrl", A_EXECUTED, A_PREDICTED),
    ],
)
def test_which_scores_judge_which_group(make_group, name, anchor, other):
    result = make_estimator(name).advantages(mixed_step(make_group))
    np.testing.assert_allclose(result.advantages[0], anchor)
    np.testing.assert_allclose(result.advantages[1], np.zeros(4) if other is None else other)
    assert result.contributes[0].all()
    assert result.contributes[1].all() == (other is not None)
    assert result.metrics["unused_groups"] == (other is None)
    assert result.metrics["contributing_members"] == (4 if other is None else 8)


def test_real_judges_every_group_by_its_executed_scores(make_group):
    groups = [make_group(EXECUTED, PREDICTED, anchor=False), make_group(EXECUTED, anchor=True)]
    result = make_estimator("real").advantages(groups)
    for values in result.advantages:
        np.testing.assert_allclose(values, A_EXECUTED)
    assert result.metrics["executed_groups"] == 2


@pytest.mark.parametrize(
    ("name", "executes_all", "uses_anchors", "uses_predictions"),
    [
        ("real", True, False, False),
        ("real_small", False, True, False),
        ("raw", False, False, True),
        *[(name, False, True, True) for name in ("mixed", "debias", "denoise", "wmrl")],
    ],
)
def test_what_the_trainer_has_to_provide(name, executes_all, uses_anchors, uses_predictions):
    estimator = make_estimator(name)
    assert estimator.name == name
    needs = (estimator.executes_all, estimator.uses_anchors, estimator.uses_predictions)
    assert needs == (executes_all, uses_anchors, uses_predictions)


def test_debias_judges_predicted_groups_by_calibrated_scores(make_group):
    estimator = make_estimator("debias", **QUICK)
    # Bins at 0.15, 0.45 and 0.85 with executed means 0, 0.9 and 1.
    estimator.observe([make_group([0, 0, 0.9, 0.9, 1], [0.12, 0.18, 0.45, 0.45, 0.85])])
    predicted = [0.15, 0.45, 0.65, np.nan]
    np.testing.assert_allclose(estimator.calibrate(predicted), [0, 0.9, 0.95, np.nan])
    result = estimator.advantages([make_group(None, [0.15, 0.45, 0.65])])
    np.testing.assert_allclose(result.advantages[0], group_advantages([0, 0.9, 0.95]).values)
    assert result.metrics["map/fits"] == 1


def test_denoise_multiplies_the_anchors_alone(make_group):
    estimator = make_estimator("denoise", **QUICK)
    estimator.observe([make_group([0, 1], [0.25, 0.75])])  # disagreement 0.25, so c = 4
    estimator.observe([make_group([0, 1], [0.0, 1.0])])
    weight = 1 + 4 * 0.25 * 2 ** (-1 / 64)
    result = estimator.advantages(mixed_step(make_group))
    np.testing.assert_allclose(result.advantages[0], weight * A_EXECUTED)
    np.testing.assert_allclose(result.advantages[1], A_PREDICTED)
    assert result.metrics["anchor/weight"] == pytest.approx(weight)


def test_pairs_reach_the_map_before_the_disagreement_is_measured(make_group):
    estimator = make_estimator("wmrl", debias={"kind": "isotonic", "min_pairs": 4}, denoise=QUICK["denoise"])
    # Raw scores disagree (s2 > 0), but the map fitted on these very pairs leaves no residual.
    estimator.observe([make_group([0, 1, 0, 1], [0.4, 0.6, 0.4, 0.6])])
    assert estimator.anchor_weight.average == 0
    raw = make_estimator("denoise", **QUICK)
    raw.observe([make_group([0, 1, 0, 1], [0.4, 0.6, 0.4, 0.6])])
    assert raw.anchor_weight.average == pytest.approx(0.64)


def test_cross_fitted_disagreement_is_measured_before_the_map_sees_the_pairs(make_group):
    settings = {
        "debias": {"kind": "isotonic", "min_pairs": 4},
        "denoise": QUICK["denoise"],
        "cross_fit": True,
    }
    estimator = make_estimator("wmrl", **settings)
    estimator.observe([make_group([0, 1, 0, 1], [0.4, 0.6, 0.4, 0.6])])
    assert estimator.anchor_weight.average == pytest.approx(0.64)  # by the identity
    np.testing.assert_allclose(estimator.calibrate([0.4, 0.6], "toy"), [0, 1])


def test_centring_only(make_group):
    result = make_estimator("mixed", standardize=False).advantages([make_group([0, 1, 5])])
    np.testing.assert_allclose(result.advantages[0], [-2, -1, 3])


def test_case_missing_scores(make_group):
    with pytest.warns(UserWarning, match="grader of task 'toy'"):
        result = make_estimator("mixed").advantages([make_group([None, 1.0, 0.0, None])])
    np.testing.assert_allclose(result.advantages[0], [0, 0.9998, -0.9998, 0], atol=1e-6)
    np.testing.assert_array_equal(result.contributes[0], [False, True, True, False])
    assert result.metrics["missing_members"] == 2


@pytest.mark.filterwarnings("ignore:grader of task")
@pytest.mark.parametrize("scores", [[None, None, 0.7, None], [0.7], [None]])
def test_case_lone_survivor_and_group_of_one(make_group, scores):
    result = make_estimator("mixed").advantages([make_group(scores), make_group(EXECUTED)])
    np.testing.assert_array_equal(result.advantages[0], np.zeros(len(scores)))
    assert not result.contributes[0].any()
    assert result.metrics["skipped_groups"] == 1
    assert result.metrics["contributing_members"] == 4


def test_case_almost_equal(make_group):
    result = make_estimator("mixed").advantages([make_group([1.0, 1.0, 1.000000001])])
    np.testing.assert_array_equal(result.advantages[0], [0, 0, 0])
    assert result.metrics["degenerate_groups"] == 1


def test_case_predicted_spread_without_truth(make_group):
    predicted = [0.02, 0.05, 0.03, 0.04]  # variance 1.25e-4
    uncertain = make_group(None, predicted, variance=0.02**2)
    published = make_estimator("wmrl").advantages([uncertain])
    assert np.abs(published.advantages[0]).max() > 1  # a full-size update from nothing

    result = make_estimator("wmrl", spread_gate=1.0).advantages([uncertain])
    np.testing.assert_array_equal(result.advantages[0], np.zeros(4))
    assert not result.contributes[0].any()
    assert (result.metrics["gated_groups"], result.metrics["predicted_weight"]) == (1, 0)

    sure = make_group(None, predicted, variance=1.25e-5)
    half = make_estimator("wmrl", spread_gate=1.0).advantages([sure])
    np.testing.assert_allclose(half.advantages[0], 0.9 * group_advantages(predicted).values)

    # Without any gate, the map learns from the failed anchors that this spread means nothing.
    taught = make_estimator("wmrl", **QUICK)
    with_low_and_high = [make_group([0, 0, 0, 0], predicted), make_group([0, 1], [0.15, 0.95])]
    taught.observe(with_low_and_high)
    np.testing.assert_array_equal(taught.advantages([uncertain]).advantages[0], np.zeros(4))


def test_case_constant_world_model(make_group):
    constant = [0.5, 0.5, 0.5, 0.5]
    for name in ARMS:
        estimator = make_estimator(name, spread_gate=1.0, **QUICK)
        anchor, other = make_group([0, 1, 1, 0], constant), make_group(None, constant, 0.1)
        estimator.observe([anchor])
        groups = [anchor] if name == "real" else [anchor, other]
        result = estimator.advantages(groups)
        assert all(np.isfinite(list(result.metrics.values())))
        if name == "raw":
            assert result.metrics["contributing_members"] == 0
        else:
            weight = 2 if ARMS[name].denoise else 1
            np.testing.assert_allclose(result.advantages[0], weight * group_advantages([0, 1, 1, 0]).values)
            assert not np.any(result.advantages[1:])
            assert result.metrics["degenerate_groups"] == (name not in ("real", "real_small"))


def test_case_dead_anchors(make_group, caplog):
    dead = [make_group([0, 0, 0, 0], PREDICTED, index=i) for i in range(2)]
    estimator = make_estimator("wmrl", **QUICK)
    estimator.observe(dead)
    result = estimator.advantages([*dead, make_group(None, [0.5] * 4)])
    assert result.metrics["anchor/weight"] == 1
    assert result.metrics["degenerate_groups"] == 3
    assert result.metrics["contributing_members"] == 0
    assert any("no group carries a gradient" in message for message in caplog.messages)
    alive = make_estimator("mixed").advantages([*dead, make_group(None, PREDICTED)])
    np.testing.assert_allclose(alive.advantages[2], A_PREDICTED)


@pytest.mark.parametrize("kind", ["binned", "isotonic"])
def test_case_inverted_world_model(make_group, kind):
    predicted = [0.9, 0.8, 0.2, 0.1]
    estimator = make_estimator("wmrl", **(QUICK | {"debias": {"min_pairs": 4, "kind": kind}}))
    anchor = make_group([0, 0, 1, 1], predicted)
    estimator.observe([anchor])
    result = estimator.advantages([anchor, make_group(None, predicted)])
    np.testing.assert_array_equal(result.advantages[1], np.zeros(4))
    assert not result.contributes[1].any()
    assert np.all(result.advantages[0][2:] > 0)


def test_ragged_groups_and_no_groups(make_group):
    estimator = make_estimator("mixed")
    result = estimator.advantages([make_group([0, 1]), make_group(None, [0.1, 0.2, 0.9])])
    assert [len(values) for values in result.advantages] == [2, 3]
    empty = estimator.advantages([])
    assert empty.advantages == [] and empty.metrics["contributing_members"] == 0
    estimator.observe([])


score = st.none() | st.floats(0, 1)
drawn_groups = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(score, score), min_size=1, max_size=5)), max_size=6
)


@given(drawn_groups, st.sampled_from(sorted(ARMS)), st.booleans(), st.sampled_from([0.0, 0.5]), st.randoms())
def test_no_nan_and_the_order_of_groups_and_members_does_not_matter(
    make_group, drawn, name, standardize, gate, random
):
    def build(anchor, members):
        executed, predicted = zip(*members, strict=True)
        return make_group(executed, predicted, 0.01, anchor)

    estimator = make_estimator(name, standardize=standardize, spread_gate=gate, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = [build(*group) for group in drawn]
        estimator.observe([group for group in groups if group.anchor])
        result = estimator.advantages(groups)
        order = random.sample(range(len(drawn)), len(drawn))
        inner = [random.sample(range(len(drawn[i][1])), len(drawn[i][1])) for i in order]
        shuffled = [
            build(drawn[i][0], [drawn[i][1][j] for j in js]) for i, js in zip(order, inner, strict=True)
        ]
        moved = estimator.advantages(shuffled)
    for values, used in zip(result.advantages, result.contributes, strict=True):
        assert np.isfinite(values).all()
        assert np.all(values[~used] == 0)
        assert abs(values.sum()) < 1e-6
    for values, i, js in zip(moved.advantages, order, inner, strict=True):
        np.testing.assert_allclose(values, result.advantages[i][js], atol=1e-9)
    assert moved.metrics == pytest.approx(result.metrics)


@given(drawn_groups, st.sampled_from(["debias", "denoise", "wmrl"]))
def test_state_round_trip_through_json(make_group, drawn, name):
    groups = [make_group(*zip(*members, strict=True)) for _, members in drawn]
    one, other = make_estimator(name, **QUICK), make_estimator(name, **QUICK)
    one.observe(groups)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    one.observe(groups)
    other.observe(groups)
    assert one.state_dict() == other.state_dict()
    np.testing.assert_array_equal(one.calibrate([0.1, 0.5, 0.9]), other.calibrate([0.1, 0.5, 0.9]))


def test_spread_weight_by_hand():
    scores = np.array([0.0, 1.0, np.nan])  # variance 0.25 of the two that are there
    variance = np.array([0.04, 0.06, 9.0])  # mean 0.05 of those two
    assert spread_weight(scores, variance, 0) == 1
    assert spread_weight(scores, variance, 1) == pytest.approx(0.8)
    assert spread_weight(scores, variance, 2) == pytest.approx(0.2)
    assert spread_weight(scores, variance, 3) == 0
    assert spread_weight(scores, np.full(3, np.nan), 3) == 1
    assert spread_weight(np.array([0.5, 0.5]), np.array([0.1, 0.1]), 1) == 0


def test_unknown_names_are_met_with_the_likely_one():
    with pytest.raises(
        ValueError, match="correction='wmlr': unknown; did you mean 'wmrl'.* one of real, real_small"
    ):
        make_estimator("wmlr")
    with pytest.raises(ValueError, match="correction='xyz': unknown; one of real"):
        make_estimator("xyz")


@pytest.mark.parametrize("name", sorted(ARMS))
def test_a_gate_out_of_range_is_named_in_every_arm(name):
    with pytest.raises(ValueError, match="spread_gate=-1: must be"):
        make_estimator(name, spread_gate=-1)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_wrong_kind_of_map_is_named_in_every_estimator(name):
    with pytest.raises(ValueError, match="kind='spline'"):
        make_estimator(name, debias={"kind": "spline"})


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_state_of_a_run_is_read_back_as_weights_only(make_group, name, tmp_path):
    """As a checkpoint is: numpy's scalars, which JSON lets pass, are refused there."""
    estimator = make_estimator(name)
    for step in range(12):
        group = make_group([0, 1, 1], [0.2, 0.5, 0.6], index=step)
        for trajectory in group.trajectories:
            trajectory.log_prob_gradient = np.ones(2)
        estimator.observe([group, make_group([0, 1], [0.4, 0.1])])
    torch.save(estimator.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state == estimator.state_dict()
