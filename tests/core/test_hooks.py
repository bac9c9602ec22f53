"""The corrections in others' loops: by hand, the same as in ours, and nothing executed but the anchors."""

import json

import numpy as np
import pytest

from wmrl_embodied.core import (
    AnchoredReward,
    AnchorSchedule,
    Context,
    Group,
    RewardCorrector,
    make_estimator,
)


def scores(seed=0, groups=8, size=4):
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(groups, size)), rng.integers(2, size=(groups, size)).astype(float)


def test_by_hand():
    corrector = RewardCorrector("mixed", AnchorSchedule(0.5))
    anchors = corrector.choose(2)
    assert anchors.sum() == 1 and corrector.choose(2).tolist() == anchors.tolist()
    predicted = np.array([[0.2, 0.4], [0.2, 0.4]])
    executed = np.where(anchors[:, None], [[1.0, 0.0]], np.nan)
    got = corrector(predicted, executed)
    place = int(anchors.argmax())
    np.testing.assert_array_equal(got.scores[place], [1, 0])
    np.testing.assert_array_equal(got.scores[1 - place], [0.2, 0.4])
    np.testing.assert_allclose(got.advantages[place], [1, -1], atol=1e-3)
    np.testing.assert_allclose(got.advantages[1 - place], [-1, 1], atol=2e-3)
    np.testing.assert_allclose(got.weights, 1, atol=2e-3)
    assert corrector.step == 1 and corrector.executions == 2


@pytest.mark.parametrize("correction", ["real", "real_small", "raw", "wmrl", "rectified", "fused"])
def test_advantages_are_those_of_the_estimator_and_weights_times_standardised_scores(correction, make_group):
    corrector = RewardCorrector(correction, AnchorSchedule(0.25), seed=3)
    estimator = make_estimator(correction)
    for step in range(30):
        predicted, truth = scores(step)
        anchors = corrector.choose(8)
        got = corrector(predicted, np.where(anchors[:, None], truth, np.nan))
        chance = 1.0 if correction == "real" else 0.25 if anchors.any() else 0.0
        groups = []
        for row in range(8):
            group = make_group(truth[row] if anchors[row] else None, predicted[row], index=row)
            groups.append(Group(Context("", row), group.trajectories, bool(anchors[row]), chance))
        estimator.observe([g for g in groups if g.anchor])
        np.testing.assert_array_equal(got.advantages, np.stack(estimator.advantages(groups).advantages))
    if correction in ("wmrl", "raw"):
        spread = got.scores.std(axis=1, keepdims=True)
        expected = got.weights[:, None] * (got.scores - got.scores.mean(axis=1, keepdims=True))
        np.testing.assert_allclose(got.advantages * np.maximum(spread, 1e-9), expected, atol=1e-6)


def test_missing_scores_do_not_contribute():
    corrector = RewardCorrector("mixed", AnchorSchedule(1.0))
    corrector.choose(2)
    executed = [[1.0, np.nan, 0.0], [np.nan, np.nan, 1.0]]
    with pytest.warns(UserWarning, match="NaN"):
        got = corrector(np.full((2, 3), 0.5), executed)
    assert got.advantages[0, 1] == 0 and not got.advantages[1].any() and got.weights[1] == 0
    assert np.isfinite(got.advantages).all() and np.isnan(got.scores[0, 1])


def test_state_goes_through_json():
    one = RewardCorrector("wmrl", AnchorSchedule(0.25))
    for step in range(20):
        predicted, truth = scores(step)
        one(predicted, np.where(one.choose(8)[:, None], truth, np.nan))
    other = RewardCorrector("wmrl", AnchorSchedule(0.25))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.choose(8).tolist() == one.choose(8).tolist()
    predicted, truth = scores(99)
    np.testing.assert_array_equal(one(predicted, truth).advantages, other(predicted, truth).advantages)


def test_the_budget_of_a_corrector():
    corrector = RewardCorrector("wmrl", AnchorSchedule(0.5, budget=20))
    for _ in range(4):
        anchors = corrector.choose(8, group_size=4)
        corrector(*[np.where(anchors[:, None], s, np.nan) for s in scores()])
    assert corrector.executions == 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(np.zeros((2, 3)), np.zeros((2, 4))), r"must both be \(m, G\)"),
        (lambda c: c(np.zeros((2, 3)), np.zeros((2, 3))), r"call choose\(2\) first"),
        (lambda c: RewardCorrector("wrml"), "wmrl"),
        (lambda c: RewardCorrector("wmrl", AnchorSchedule("auto")), "fraction=auto"),
        (lambda c: RewardCorrector("fused", memory=0.5), "memory=0.5"),
        (lambda c: AnchoredReward(None, None, 1), "group_size=1"),
    ],
)
def test_wrong_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(RewardCorrector())


class Graders:
    """Counts what is really executed."""

    def __init__(self):
        self.seen, self.taught = [], []

    def execute(self, prompts, completions, answer, **columns):
        self.seen += list(zip(prompts, completions, answer, strict=True))
        return [float(c == a) if c != "crash" else None for c, a in zip(completions, answer, strict=True)]

    def predict(self, prompts, completions, **columns):
        return [len(completion) / 10 for completion in completions]

    def learn(self, prompts, completions, rewards, **columns):
        self.taught += list(zip(completions, rewards, strict=True))


def test_a_reward_function_executes_the_anchors_alone_and_gives_centred_advantages():
    graders, logged = Graders(), {}
    reward = AnchoredReward(
        graders.execute, graders.predict, 4, RewardCorrector("wmrl", AnchorSchedule(0.25)), graders.learn
    )
    prompts = [f"p{i}" for i in range(4) for _ in range(4)]
    completions = ["a", "bb", "ccc", "dddd"] * 4
    got = reward(
        prompts=prompts,
        completions=completions,
        answer=["ccc"] * 16,
        log_metric=lambda name, value: logged.setdefault(name, value),
        trainer_state=object(),
    )
    assert reward.__name__ == "anchored_reward"
    assert len(graders.seen) == 4 and len({prompt for prompt, *_ in graders.seen}) == 1
    assert sorted(graders.taught) == [("a", 0.0), ("bb", 0.0), ("ccc", 1.0), ("dddd", 0.0)]
    np.testing.assert_allclose(np.reshape(got, (4, 4)).sum(axis=1), 0, atol=1e-6)
    assert logged["executed"] == 0.25 and logged["executions"] == 4
    assert logged["predicted"] == pytest.approx(0.25)


def test_a_reward_function_names_what_does_not_divide():
    reward = AnchoredReward(Graders().execute, Graders().predict, 4)
    with pytest.raises(ValueError, match="6 completions: must be a multiple of group_size=4"):
        reward(prompts=["p"] * 6, completions=["a"] * 6)
    short = AnchoredReward(Graders().execute, lambda **columns: [0.0], 2)
    with pytest.raises(ValueError, match="1 scores for 2 completions"):
        short(prompts=["p"] * 2, completions=["a"] * 2)
