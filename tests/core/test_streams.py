import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.streams import StreamMoments

FOREVER = 1e12


def test_moments_of_two_groups_by_hand():
    moments = StreamMoments(FOREVER)
    gradient = np.eye(2)
    moments.observe(np.array([2.0, 0.0]), np.array([2.0, 2.0]), gradient)  # e = (1, 0), p = (1, 1)
    moments.observe(np.array([2.0, 4.0]), np.array([0.0, 2.0]), gradient)  # e = (1, 2), p = (0, 1)
    assert moments.groups == pytest.approx(2)
    # Products of different groups: e1.e2 = 1, p1.p2 = 1, (e1.p2 + e2.p1) / 2 = (0 + 3) / 2.
    assert moments.means() == pytest.approx({"ee": 1.0, "pp": 1.0, "ep": 1.5})
    # Mean |e|^2 = (1 + 5) / 2 = 3, |p|^2 = (2 + 1) / 2, e.p = (1 + 2) / 2; less the squared means.
    assert moments.covariances() == pytest.approx({"ee": 2.0, "pp": 0.5, "ep": 0.0})
    assert moments.squared_bias() == 0.0  # 1 + 1 - 3 is noise, not less than no bias


def test_without_gradients_the_moments_are_those_of_the_advantages():
    moments = StreamMoments(FOREVER)
    moments.observe(np.array([1.0, -1.0]), np.array([0.5, -0.5]), None)
    assert not moments.sees_bias
    assert moments.covariances() == pytest.approx({"ee": 2 / 4, "pp": 0.5 / 4, "ep": 1 / 4})
    assert moments.squared_bias() == 0.0


def test_one_group_says_nothing_about_means():
    moments = StreamMoments()
    moments.observe(np.array([1.0, -1.0]), np.array([0.5, -0.5]), np.eye(2))
    assert not moments.sees_bias
    assert moments.means() == {"ee": 0.0, "pp": 0.0, "ep": 0.0}


def test_a_bias_is_found_in_noise_that_is_larger():
    rng, moments, bias = np.random.default_rng(0), StreamMoments(FOREVER), np.array([0.3, 0, 0, 0, 0])
    for _ in range(4000):
        executed = rng.normal(size=5)
        moments.observe(executed * 5, (executed + bias + rng.normal(size=5)) * 5, np.eye(5))
    assert moments.squared_bias() == pytest.approx(0.09, abs=0.03)
    assert moments.covariances() == pytest.approx({"ee": 5, "pp": 10, "ep": 5}, rel=0.06)


def test_old_groups_fade():
    moments = StreamMoments(half_life=1.0)
    for size in (8.0, 8.0, 8.0, 0.0, 0.0, 0.0):
        moments.fade(1)
        moments.observe(np.array([size, 0.0]), np.zeros(2), None)
    weights = 0.5 ** np.arange(5, -1, -1)
    assert moments.covariances()["ee"] == pytest.approx(16 * weights[:3].sum() / weights.sum())


def test_a_heavier_group_counts_as_several():
    heavy, several = StreamMoments(FOREVER), StreamMoments(FOREVER)
    rng = np.random.default_rng(1)
    groups = [(rng.normal(size=3), rng.normal(size=3)) for _ in range(4)]
    for number, (executed, predicted) in enumerate(groups):
        heavy.observe(executed, predicted, None, weight=1 + number)
        for _ in range(1 + number):
            several.observe(executed, predicted, None)
    assert heavy.covariances() == pytest.approx(several.covariances())


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_state_survives_json(seed, with_gradient):
    rng = np.random.default_rng(seed)
    moments, again = StreamMoments(3.0), StreamMoments(3.0)
    for _ in range(3):
        moments.observe(
            rng.normal(size=4), rng.normal(size=4), rng.normal(size=(4, 2)) if with_gradient else None
        )
    again.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    for both in (moments, again):
        both.fade(2)
        both.observe(np.ones(4), np.zeros(4), np.ones((4, 2)) if with_gradient else None)
    assert again.state_dict() == moments.state_dict()
    assert again.squared_bias() == moments.squared_bias()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="half_life=0: must be above 0"):
        StreamMoments(0)
    moments = StreamMoments()
    moments.observe(np.ones(2), np.ones(2), np.ones((2, 3)))
    with pytest.raises(ValueError, match="4 components, before it had 3"):
        moments.observe(np.ones(2), np.ones(2), np.ones((2, 4)))
