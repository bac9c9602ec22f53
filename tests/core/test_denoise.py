"""The published anchor weight, by hand, and groups that must not move it."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.denoise import DisagreementWeight, VarianceWeight, disagreement, make_anchor_weight
from wmrl_embodied.core.types import Context, Group, Trajectory

scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8)
GOOD = ([0.25, 0.75], [0.0, 1.0])  # s2 = 0.25^2 / 0.25 = 0.25
BAD = ([1.0, 0.0], [0.0, 1.0])  # s2 = 1^2 / 0.25 = 4


def _as_it_is(predicted, task):
    return np.asarray(predicted)


def weight_after(*groups, **settings):
    weight = DisagreementWeight(**settings)
    for group in groups:
        weight.observe(*group)
    return weight


def test_disagreement_by_hand():
    assert disagreement(*GOOD) == pytest.approx(0.25)
    assert disagreement(*BAD) == pytest.approx(4)
    # d - s = (0.5, -0.5, 0, 0) about its mean 0: variance 0.125; var(s) = 0.25.
    assert disagreement([0.5, 0.5, 0.0, 1.0], [0, 1, 0, 1]) == pytest.approx(0.5)


@given(scores, st.floats(-5, 5), st.floats(0.1, 10), st.randoms())
def test_disagreement_ignores_offset_scale_and_order(pairs, offset, scale, random):
    d, s = np.array(pairs).T
    if np.var(s) < 1e-3:
        return
    order = random.sample(range(len(s)), len(s))
    expected = pytest.approx(disagreement(d, s), rel=1e-6, abs=1e-9)
    assert disagreement(d[order] * scale + offset, s[order] * scale) == expected


def test_missing_members_are_left_out():
    nan = np.nan
    assert disagreement([0.25, nan, 0.9, 0.75], [0.0, 0.4, nan, 1.0]) == disagreement(*GOOD)
    assert disagreement([0.25, nan], [0.0, 1.0]) is None


def test_weight_is_two_when_the_scale_is_fixed_and_follows_the_average_from_there():
    weight = weight_after(*[GOOD] * 31)
    assert weight.weight == 1 and weight.scale is None
    weight.observe(*GOOD)
    assert weight.scale == pytest.approx(4)  # (2 - 1) / 0.25
    assert weight.weight == pytest.approx(2)
    weight.observe(*BAD)
    average = 0.25 + (1 - 2 ** (-1 / 64)) * (4 - 0.25)
    assert weight.average == pytest.approx(average)
    assert weight.weight == pytest.approx(1 + 4 * average)
    assert weight.scale == pytest.approx(4)


def test_half_life_is_64_groups():
    weight = weight_after(BAD, *[GOOD] * 64)
    assert weight.average == pytest.approx(0.25 + (4 - 0.25) / 2)


def test_weight_stays_within_its_limits():
    assert weight_after(*[GOOD] * 32, *[BAD] * 500).weight == 4
    perfect = ([0.0, 1.0], [0.0, 1.0])
    assert 1 <= weight_after(*[BAD] * 32, *[perfect] * 5000).weight < 1.001


def test_case_dead_anchors():
    dead = ([0.3, 0.2, 0.1, 0.4], [0, 0, 0, 0])
    weight = weight_after(*[dead] * 100)
    assert weight.observations == 0
    assert weight.weight == 1
    assert all(np.isfinite(list(weight.metrics().values())))


def test_case_constant_world_model():
    constant = ([0.5, 0.5, 0.5, 0.5], [0, 1, 1, 0])
    assert disagreement(*constant) == 1  # all of the executed spread is unexplained
    assert weight_after(*[constant] * 32).weight == 2


def test_a_perfect_world_model_fixes_no_scale_until_it_errs():
    weight = weight_after(*[([0.0, 1.0], [0.0, 1.0])] * 40)
    assert weight.scale is None and weight.weight == 1
    weight.observe(*BAD)
    assert weight.weight == pytest.approx(2)


@given(st.lists(scores, max_size=20), st.integers(0, 20))
def test_state_round_trip_through_json_continues_identically(groups, cut):
    groups = [tuple(zip(*group, strict=True)) for group in groups]
    settings = {"min_observations": 4, "half_life": 3}
    resumed = DisagreementWeight(**settings)
    resumed.load_state_dict(json.loads(json.dumps(weight_after(*groups[:cut], **settings).state_dict())))
    for group in groups[cut:]:
        resumed.observe(*group)
    undisturbed = weight_after(*groups, **settings)
    assert resumed.state_dict() == undisturbed.state_dict()
    assert resumed.weight == undisturbed.weight


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"half_life": 0}, "half_life=0: must be above 0"),
        ({"min_observations": 0}, "min_observations=0"),
        ({"target": 5.0}, r"target=5.0: must be in \[1, max_weight=4.0\]"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DisagreementWeight(**settings)


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="same shape"):
        disagreement([0.1], [0.1, 0.2])


def _group(executed, predicted):
    nothing = torch.zeros(1)
    members = [
        Trajectory(steps={}, old_log_prob=nothing, mask=nothing, executed=e, predicted=p)
        for e, p in zip(executed, predicted, strict=True)
    ]
    return Group(Context("toy", 0), members, anchor=True)


def test_variance_weight_by_hand():
    # Centred scores are -+0.5 executed and -+0.25 predicted: a quarter of the variance, so a quarter of the weight.
    weight = VarianceWeight(standardize=False, min_observations=2)
    group = _group([0.0, 1.0], [0.25, 0.75])
    weight.observe_groups([group], _as_it_is)
    assert weight.weight == 1.0  # one group is too few
    weight.observe_groups([group], _as_it_is)
    assert weight.weight == pytest.approx(0.25)
    copy = VarianceWeight(standardize=False, min_observations=2)
    copy.load_state_dict(json.loads(json.dumps(weight.state_dict())))
    assert copy.metrics() == weight.metrics()


def test_variance_weight_is_limited_and_skips_groups_without_two_scores():
    weight = VarianceWeight(standardize=False, min_observations=1, max_weight=2.0)
    weight.observe_groups([_group([0.0, math.nan], [0.0, 1.0])], _as_it_is)
    assert weight.observations == 0
    weight.observe_groups([_group([0.0, 0.1], [0.0, 1.0])], _as_it_is)
    assert weight.weight == 2.0


def test_unknown_kind_of_weight_says_what_was_meant():
    with pytest.raises(ValueError, match="varience"):
        make_anchor_weight("varience")


def test_correlation_weight_by_hand():
    weight = make_anchor_weight("correlation", min_observations=2)
    one = _group([0.0, 0.5, 1.0], [0.0, 1.0, 0.5])  # correlation 1/2
    weight.observe_groups([one], _as_it_is)
    assert weight.weight == 1.0
    weight.observe_groups([one], _as_it_is)
    assert weight.weight == pytest.approx(2.0) and weight.metrics()["kappa"] == pytest.approx(0.5)
    other = make_anchor_weight("correlation", min_observations=2)
    other.load_state_dict(json.loads(json.dumps(weight.state_dict())))
    assert other.weight == weight.weight


@pytest.mark.parametrize("predicted", [[1.0, 0.5, 0.0], [0.3, 0.3, 0.3]])
def test_correlation_weight_of_a_wrong_or_silent_model_is_the_limit(predicted):
    weight = make_anchor_weight("correlation", min_observations=1, max_weight=3.0)
    weight.observe_groups([_group([0.0, 0.5, 1.0], predicted)], _as_it_is)
    assert weight.weight == pytest.approx(3.0)
    dead = make_anchor_weight("correlation", min_observations=1)
    dead.observe_groups([_group([1.0, 1.0, 1.0], predicted)], _as_it_is)
    assert dead.weight == 1.0  # nothing to compare with
    with pytest.raises(ValueError, match="max_weight=0.5"):
        make_anchor_weight("correlation", max_weight=0.5)
