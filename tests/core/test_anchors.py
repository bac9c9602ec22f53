"""The anchor schedule: shares, limits, the budget and uniform draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.anchors import AnchorSchedule


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
