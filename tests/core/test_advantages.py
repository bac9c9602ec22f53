"""Group advantages: the published formula by hand, its invariances, and groups that carry no gradient."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.advantages import group_advantages

groups = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=10)
NAN = np.nan


def test_published_formula_by_hand():
    # Mean 0.5; population variance (0.25 + 0.25 + 0.25 + 0.25) / 4.
    result = group_advantages([0, 1, 1, 0])
    np.testing.assert_allclose(result.values, np.array([-0.5, 0.5, 0.5, -0.5]) / 0.5001)
    assert (result.status, result.missing) == ("ok", 0)
    # Mean 2, population variance 14/4: the unbiased 14/3 would give other numbers.
    np.testing.assert_allclose(
        group_advantages([0, 1, 2, 5], eps=0).values, np.array([-2, -1, 0, 3]) / np.sqrt(3.5)
    )


def test_centring_only():
    np.testing.assert_allclose(group_advantages([0, 1, 5], standardize=False).values, [-2, -1, 3])


def test_case_missing_scores():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = group_advantages([None, 1.0, 0.0, None])
    np.testing.assert_allclose(result.values, [NAN, 0.9998, -0.9998, NAN], atol=1e-6)
    assert (result.status, result.missing) == ("ok", 2)
    for gap in (NAN, np.inf, -np.inf):
        with pytest.warns(UserWarning, match="the grader of task 'reach'.*missing"):
            broken = group_advantages(np.array([gap, 1.0, 0.0, gap]), source="the grader of task 'reach'")
        np.testing.assert_array_equal(broken.values, result.values)
        assert broken.missing == 2


def test_case_lone_survivor():
    result = group_advantages([None, None, 0.7, None])
    assert (result.status, result.missing) == ("skipped", 3)
    assert np.isnan(result.values).all()


@pytest.mark.parametrize("standardize", [True, False])
def test_case_group_of_one(standardize):
    assert group_advantages([0.7], standardize=standardize).status == "skipped"
    assert group_advantages([], standardize=standardize).status == "skipped"


@pytest.mark.parametrize("standardize", [True, False])
def test_case_almost_equal(standardize):
    for scores in ([1.0, 1.0, 1.000000001], [1e9, 1e9, 1e9 + 1], [0.1 + 0.2, 0.3, 0.3], [0, 0, 1e-12]):
        result = group_advantages(scores, standardize)
        assert result.status == "degenerate"
        np.testing.assert_array_equal(result.values, [0, 0, 0])
    # Float32 noise on a constant is noise; a difference well above it is signal.
    noisy = np.float32(0.7) + np.array([0, 6e-8, -6e-8])
    assert group_advantages(noisy).status == "degenerate"
    assert group_advantages([0.7, 0.7, 0.7001]).status == "ok"


def test_degenerate_group_keeps_missing_members_missing():
    np.testing.assert_array_equal(group_advantages([0.5, None, 0.5]).values, [0, NAN, 0])


@given(groups, st.booleans())
def test_advantages_are_centred_bounded_and_ordered_like_the_scores(scores, standardize):
    result = group_advantages(scores, standardize)
    present = np.array([s is not None for s in scores])
    assert result.missing == (~present).sum()
    if result.status == "skipped":
        assert present.sum() < 2 and np.isnan(result.values).all()
        return
    np.testing.assert_array_equal(np.isnan(result.values), ~present)
    kept, values = np.array([s for s in scores if s is not None]), result.values[present]
    assert abs(values.sum()) < 1e-6
    assert np.all(np.diff(values[np.argsort(kept, kind="stable")]) >= 0)
    if standardize:
        assert np.abs(values).max() <= np.sqrt(kept.size)  # the largest z-score there is
        assert values.std() <= 1 + 1e-9


@given(groups, st.floats(-10, 10), st.randoms())
def test_advantages_ignore_a_shift_and_follow_the_members(scores, shift, random):
    result = group_advantages(scores)
    moved = group_advantages([None if s is None else s + shift for s in scores])
    order = random.sample(range(len(scores)), len(scores))
    reordered = group_advantages([scores[i] for i in order])
    assert reordered.status == result.status
    np.testing.assert_allclose(reordered.values, result.values[order], atol=1e-9)
    spread = np.ptp([s for s in scores if s is not None] or [0])
    if spread > 1e-3 or spread == 0:
        np.testing.assert_allclose(moved.values, result.values, atol=1e-6)


@given(groups, st.floats(1, 100))
def test_standardised_advantages_ignore_the_scale(scores, scale):
    if np.ptp([s for s in scores if s is not None] or [0]) < 1e-3:
        return
    scaled = group_advantages([None if s is None else s * scale for s in scores], eps=0)
    np.testing.assert_allclose(scaled.values, group_advantages(scores, eps=0).values, atol=1e-9)


def test_a_batch_of_groups_is_refused():
    with pytest.raises(ValueError, match="one group at a time"):
        group_advantages(np.zeros((2, 3)))
