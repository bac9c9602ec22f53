"""The anchor schedule: shares, limits, the budget and uniform draws."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.anchors import AnchorSchedule, ShareRule, inclusion_probabilities, systematic_sample


def count(schedule, n_groups, **spending):
    return int(schedule.choose(n_groups, np.random.default_rng(0), **spending)[0].sum())


@pytest.mark.parametrize(
    ("settings", "n_groups", "expected"),
    [
        ({"fraction": 0.1}, 20, 2),
        ({"fraction": 0.25}, 8, 2),
        ({"fraction": 0.1}, 3, 1),  # 0.3 of a group: the floor
        ({"fraction": 0.5, "floor": 0}, 1, 1),  # halves go up
        ({"fraction": 0.5, "floor": 0}, 3, 2),
        ({"fraction": 0.1, "floor": 0}, 3, 0),
        ({"fraction": 0.1, "floor": 4}, 3, 3),  # never more than there are
        ({"fraction": 1.0}, 7, 7),
        ({"fraction": 1.0, "cap": 5}, 7, 5),
        ({"fraction": 0.0, "floor": 2}, 7, 0),  # no anchors means none
        ({"fraction": 0.3}, 0, 0),
    ],
)
def test_number_of_anchors(settings, n_groups, expected):
    assert count(AnchorSchedule(**settings), n_groups) == expected


def test_only_whole_groups_are_bought_within_the_budget():
    schedule = AnchorSchedule(0.5, floor=1, budget=30)
    assert count(schedule, 8, spent=0, group_size=8) == 3  # 30 // 8, though the share is 4
    assert count(schedule, 8, spent=10, group_size=8) == 2
    assert count(schedule, 8, spent=23, group_size=8) == 0  # even the floor gives way
    assert count(schedule, 8, spent=99, group_size=8) == 0
    assert count(schedule, 8, spent=29) == 1


@given(
    st.floats(0, 1),
    st.integers(0, 5),
    st.none() | st.integers(5, 10),
    st.none() | st.integers(0, 50),
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(0, 30),
)
def test_limits_hold_and_probabilities_match(fraction, floor, cap, budget, spent, group_size, n_groups):
    schedule = AnchorSchedule(fraction, floor, cap, budget)
    chosen, probability = schedule.choose(n_groups, np.random.default_rng(spent), spent, group_size)
    assert chosen.shape == probability.shape == (n_groups,)
    assert chosen.sum() == pytest.approx(probability.sum())
    assert cap is None or chosen.sum() <= cap
    if budget is not None and chosen.any():
        assert spent + chosen.sum() * group_size <= budget
    if budget is None and fraction > 0:
        assert chosen.sum() >= min(floor, n_groups)


def test_every_group_is_drawn_with_its_stated_probability():
    schedule = AnchorSchedule(0.25)
    rng = np.random.default_rng(1)
    draws = np.mean([schedule.choose(8, rng)[0] for _ in range(4000)], axis=0)
    np.testing.assert_allclose(draws, schedule.choose(8, rng)[1], atol=0.03)


def test_equal_generators_draw_equal_anchors():
    schedule = AnchorSchedule(0.5)
    one, other = (schedule.choose(20, np.random.default_rng(3))[0] for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, schedule.choose(20, np.random.default_rng(4))[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.4}, r"anchor_fraction=1.4: must be in \[0, 1\]"),
        ({"fraction": float("nan")}, r"anchor_fraction=nan: must be in \[0, 1\]"),
        ({"fraction": -0.1}, "anchor_fraction=-0.1"),
        ({"fraction": 0.1, "floor": -1}, "anchor_floor=-1"),
        ({"fraction": 0.1, "floor": 2, "cap": 1}, "anchor_cap=1: must be at least anchor_floor=2"),
        ({"fraction": 0.1, "budget": -5}, "anchor_budget=-5"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AnchorSchedule(**settings)


@pytest.mark.parametrize("wrong", [{"n_groups": -1}, {"n_groups": 2, "group_size": 0}])
def test_impossible_steps_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        AnchorSchedule(0.5).choose(rng=np.random.default_rng(0), **wrong)


def test_probabilities_proportional_to_size_by_hand():
    np.testing.assert_allclose(inclusion_probabilities([1, 1, 2], 2), [0.5, 0.5, 1])
    np.testing.assert_allclose(inclusion_probabilities([1, 1, 8], 2), [0.5, 0.5, 1])  # 8 would be 1.6
    np.testing.assert_allclose(inclusion_probabilities([0, 3, 1], 1), [0, 0.75, 0.25])
    np.testing.assert_allclose(inclusion_probabilities([0, 3, 1], 2), [0, 1, 1])
    np.testing.assert_allclose(inclusion_probabilities([1, 2], 0), [0, 0])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.data())
def test_draws_have_a_fixed_size_and_probabilities_in_bounds(sizes, data):
    count = data.draw(st.integers(0, len(sizes)))
    probability = inclusion_probabilities(sizes, count)
    assert ((probability >= 0) & (probability <= 1)).all() and probability.sum() == pytest.approx(count)
    assert systematic_sample(probability, np.random.default_rng(count)).sum() == count


def test_groups_are_drawn_as_often_as_their_probability_says():
    uncertainty = np.array([0.0, 0.1, 0.2, 0.7, 3.0, np.nan])
    schedule = AnchorSchedule(1 / 3, strategy="uncertain", uniform_share=0.3)
    rng, drawn = np.random.default_rng(0), np.zeros(6)
    for _ in range(20_000):
        chosen, probability = schedule.choose(6, rng, uncertainty=uncertainty)
        assert chosen.sum() == 2
        drawn += chosen
    np.testing.assert_allclose(drawn / 20_000, probability, atol=4 * 0.5 / np.sqrt(20_000))
    assert probability[0] == pytest.approx(2 * 0.3 / 6)  # the uniform share alone
    assert (np.diff(probability[:5]) > 0).all() and probability[5] == probability[4]


def test_gate_executes_all_it_doubts_and_nothing_else():
    uncertainty = [0.05, 0.3, 0.1, 0.2]
    chosen, probability = AnchorSchedule(0.1, strategy="gate").choose(
        4, np.random.default_rng(0), uncertainty=uncertainty
    )
    assert chosen.tolist() == [False, True, False, True] and probability.tolist() == [0, 1, 0, 1]
    capped = AnchorSchedule(0.1, cap=1, strategy="gate")
    chosen, probability = capped.choose(4, np.random.default_rng(0), uncertainty=uncertainty)
    assert chosen.sum() == 1 and probability.tolist() == [0, 0.5, 0, 0.5]
    broke = AnchorSchedule(0.1, budget=10, strategy="gate")
    assert not broke.choose(4, np.random.default_rng(0), 9, 8, uncertainty)[0].any()


def test_a_model_without_uncertainty_is_said_to_be_one():
    with pytest.raises(ValueError, match="no predicted_variance; use strategy=random"):
        AnchorSchedule(0.1, strategy="gate").choose(2, np.random.default_rng(0), uncertainty=[np.nan] * 2)
    with pytest.raises(ValueError, match=r"uncertainty \(3,\): must be \(2,\)"):
        AnchorSchedule(0.1, strategy="gate").choose(2, np.random.default_rng(0), uncertainty=[1, 2, 3])
    with pytest.raises(ValueError, match="random"):
        AnchorSchedule(0.1, strategy="randon")


@pytest.mark.parametrize(("noise", "share"), [(1.02, 0.1), (0.484, 0.048)])
def test_share_of_the_square_root_rule(noise, share):
    """rho = 0.7 and 0.9 with executions a hundred times as dear: 10 % and 5 %."""
    rng, rule = np.random.default_rng(0), ShareRule(half_life=1e9)
    rule.spend("execute", 100.0, 10)
    rule.spend("imagine", 100.0, 1000)
    for _ in range(500):
        truth = rng.normal(size=64)
        rule.observe([(truth + noise * rng.normal(size=64), truth)])
    assert rule.cost_ratio == pytest.approx(100)
    assert rule.share == pytest.approx(share, rel=0.1)
    assert AnchorSchedule("auto").choose(100, rng, share=rule.share)[0].sum() == round(100 * rule.share)


def test_share_of_a_useless_or_unknown_model():
    rule = ShareRule(start=0.2)
    assert rule.share == 0.2 and np.isnan(rule.cost_ratio)
    rule.spend("execute", 1.0, 1)
    rule.spend("imagine", 1.0, 10)
    rule.observe([(np.array([1.0, 1.0]), np.array([0.0, 1.0]))] * 8)
    assert rule.correlation == 0 and rule.share == 1.0  # nothing to gain from imagining
    other = ShareRule()
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert other.state_dict() == rule.state_dict() and other.share == 1.0
    with pytest.raises(ValueError, match="fraction=auto"):
        AnchorSchedule("auto").choose(4, np.random.default_rng(0))
