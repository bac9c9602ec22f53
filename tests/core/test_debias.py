"""Monotone maps: published numbers by hand, order independence, the online schedule and the odd inputs."""

import itertools
import json
import logging
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.debias import FITS, MonotoneMap, fit_binned, fit_isotonic, interpolate

unit = st.floats(0, 1, allow_subnormal=False)
wide = st.floats(-1e6, 1e6, allow_subnormal=False)
pairs = st.lists(st.tuples(unit, unit), min_size=1, max_size=40)


def test_binned_fit_by_hand():
    # Bins of width 0.5: {0.1, 0.3} has means (0.2, 0.5); {0.6, 0.8, 1.0} has means (0.8, 2/3).
    knot_x, knot_y = fit_binned([0.1, 0.6, 0.3, 0.8, 1.0], [1.0, 0.0, 0.0, 1.0, 1.0], bins=2)
    np.testing.assert_allclose(knot_x, [0.2, 0.8])
    np.testing.assert_allclose(knot_y, [0.5, 2 / 3])
    # Halfway between the knots, and constant outside.
    np.testing.assert_allclose(interpolate((knot_x, knot_y), [0.5, 0.0, 1.0]), [7 / 12, 0.5, 2 / 3])


def test_binned_fit_pools_violators_by_population():
    # Bin means 0.9 (one pair) and 0.3 (two pairs) violate the order: pooled to (0.9 + 2 * 0.3) / 3 = 0.5.
    knot_x, knot_y = fit_binned([0.05, 0.15, 0.15, 0.25], [0.9, 0.2, 0.4, 0.8])
    np.testing.assert_allclose(knot_x, [0.05, 0.15, 0.25])
    np.testing.assert_allclose(knot_y, [0.5, 0.5, 0.8])


def test_bins_are_half_open_and_the_last_one_closed():
    # 0.1 belongs to the second of ten bins, 0.95 and 1.0 both to the last.
    knot_x, knot_y = fit_binned([0.09, 0.1, 0.95, 1.0], [0.0, 0.2, 0.4, 0.8])
    np.testing.assert_allclose(knot_x, [0.09, 0.1, 0.975])
    np.testing.assert_allclose(knot_y, [0.0, 0.2, 0.6])


def test_case_isotonic_ties():
    x, y = np.array([0, 1, 1, 2, 3.0]), np.array([0, 0, 1, 0, 1.0])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 3, 1, 4]):
        knots = fit_isotonic(x[order], y[order])
        np.testing.assert_allclose(interpolate(knots, [0, 1, 2, 3]), [0, 1 / 3, 1 / 3, 1])
    repeated_minimum = fit_isotonic([0, 0, 0, 1], [1, 0, 0, 1])
    np.testing.assert_allclose(interpolate(repeated_minimum, [0, 1]), [1 / 3, 1])
    zero_weight = fit_isotonic([0, 0, 1, 2], [0, 9, 1, -9], weights=[1, 0, 1, 0])
    np.testing.assert_allclose(zero_weight, [[0, 1], [0, 1]])
    assert fit_isotonic([0, 1], [0, 1], weights=[0, 0]) is None


def test_case_one_distinct_x(caplog):
    for kind in FITS:
        online = MonotoneMap(kind, min_pairs=3, refit_every=3)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            online.observe([0.4, 0.4, 0.4], [0, 1, 1])
            online.observe([0.4, 0.4, 0.4], [0, 1, 1])
        assert online.knots is None
        assert online(0.7) == 0.7
        assert online.metrics()["failed_fits"] == 2
        assert [r for r in caplog.messages if "no map fitted" in r and "identity" in r] == caplog.messages
        assert len(caplog.messages) == 1


def test_a_failed_fit_keeps_the_last_map():
    online = MonotoneMap(capacity=4, min_pairs=4, refit_every=4)
    online.observe([0.1, 0.3, 0.6, 0.9], [0, 0.2, 0.7, 1])
    last = online([0.2, 0.5])
    online.observe([0.4] * 4, [0, 1, 1, 0])
    assert online.metrics() | {"fits": 1.0, "failed_fits": 1.0} == online.metrics()
    np.testing.assert_array_equal(online([0.2, 0.5]), last)


def test_case_outside_unit_interval():
    x, y = [-3.0, 0.0, 5.0, 12.0], [-1, 0, 2, 2]
    free = MonotoneMap("isotonic", min_pairs=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free.observe(x, y)
    np.testing.assert_allclose(free([-9, -3, -1.5, 2.5, 12, 99]), [-1, -1, -0.5, 1, 2, 2])

    published = MonotoneMap(min_pairs=4, refit_every=4)
    with pytest.warns(UserWarning, match=r"score -3.*\[0, 1\].*isotonic"):
        published.observe(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published.observe(x, y)
    # Lowest bin {-3, 0}, highest {5, 12}: the map stays finite and monotone.
    np.testing.assert_allclose(published([-3, -1.5, 8.5]), [-0.5, -0.5, 2])

    strict = MonotoneMap(strict=True)
    with pytest.raises(ValueError, match="isotonic"):
        strict.observe(x, y)
    assert len(strict) == 0


def test_rounding_past_one_is_not_outside():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MonotoneMap(strict=True).observe([1 + 1e-7, -1e-7], [1, 0])


def test_case_inverted_world_model():
    for kind in FITS:
        online = MonotoneMap(kind, min_pairs=4)
        online.observe([0.9, 0.8, 0.2, 0.1], [0, 0, 1, 1])
        assert online.knots is not None
        assert np.ptp(online([0.9, 0.8, 0.2, 0.1, 0.5, 0.0, 1.0])) == 0
        assert online(0.5) == 0.5


def test_schedule_identity_until_200_pairs_then_every_64():
    online = MonotoneMap()
    x = np.linspace(0, 1, 199)
    online.observe(x, x**2)
    np.testing.assert_array_equal(online(x), x)
    online.observe([0.5], [0.25])
    assert online.fits == 1
    assert online(0.9) == pytest.approx(0.81, abs=0.02)
    for _ in range(63):
        online.observe([0.5], [0.25])
    assert online.fits == 1
    online.observe([0.5], [np.nan])  # not a pair: not counted
    assert online.fits == 1
    online.observe([0.5], [0.25])
    assert online.fits == 2


def test_first_fit_uses_all_pairs_at_once_when_a_batch_crosses_the_threshold():
    rng = np.random.default_rng(0)
    x, y = rng.random(300), rng.random(300)
    online = MonotoneMap()
    online.observe(x, y)
    np.testing.assert_array_equal(online.knots, fit_binned(x, y))
    assert online.fits == 1


def test_oldest_pairs_leave_first():
    online = MonotoneMap("isotonic", capacity=2, min_pairs=2, refit_every=2)
    online.observe([0.0, 0.1, 0.2, 0.3], [9, 9, 0, 1])
    assert len(online) == 2
    np.testing.assert_allclose(online.knots, [[0.2, 0.3], [0, 1]])


def test_missing_sides_are_ignored_and_nan_passes_through():
    online = MonotoneMap("isotonic", min_pairs=2)
    online.observe([0.0, np.nan, 0.5, 1.0, np.inf], [0.0, 1.0, np.nan, 2.0, 1.0])
    assert len(online) == 2
    np.testing.assert_allclose(online([[0.5, np.nan]]), [[1.0, np.nan]])


def test_diagnostics_by_hand():
    online = MonotoneMap("isotonic", min_pairs=4)
    assert "residual_before" not in online.metrics()
    online.observe([0, 0, 1, 1], [0, 2, 2, 4])
    metrics = online.metrics()
    # Before: residuals 0, -2, -1, -3, variance 1.25. The map takes 0 to 1 and 1 to 3: residuals of +-1.
    assert metrics["residual_before"] == pytest.approx(1.25)
    assert metrics["residual_after"] == pytest.approx(1.0)
    assert metrics["residual_explained"] == pytest.approx(0.2)
    assert metrics["pairs"] == 4 and metrics["fits"] == 1


def test_a_constant_offset_is_no_centred_residual():
    online = MonotoneMap("isotonic", min_pairs=2)
    online.observe([0.0, 0.5], [0.25, 0.75])
    assert online.metrics()["residual_before"] == 0
    assert online.metrics()["residual_explained"] == 0


def test_rounding_reorders_no_scores():
    # By plain interpolation the score just below 1 would become 0, above the one at 1.
    below, at = interpolate((np.array([-1.0, 1.0]), np.array([-1.0, -1e-17])), [np.nextafter(1, 0), 1])
    assert below <= at == -1e-17


@pytest.mark.parametrize("kind", sorted(FITS))
def test_sums_do_not_depend_on_the_order_of_tied_pairs(kind):
    # 0.1 + 0.2 + 0.3 rounds in two ways.
    x, y = np.array([0.5, 0.5, 0.5, 0.9]), np.array([0.1, 0.2, 0.3, 1.0])
    expected = FITS[kind](x, y)
    for order in itertools.permutations(range(4)):
        np.testing.assert_array_equal(FITS[kind](x[list(order)], y[list(order)]), expected)


@given(pairs, st.sampled_from(sorted(FITS)), st.randoms())
def test_fit_is_independent_of_the_order_of_the_pairs(data, kind, random):
    shuffled = data.copy()
    random.shuffle(shuffled)
    one, other = FITS[kind](*zip(*data, strict=True)), FITS[kind](*zip(*shuffled, strict=True))
    assert (one is None) == (other is None)
    if one is not None:
        np.testing.assert_array_equal(one, other)


@given(pairs, st.sampled_from(sorted(FITS)), st.lists(unit, min_size=1, max_size=20))
def test_map_is_monotone_finite_and_within_the_executed_scores(data, kind, queries):
    x, y = zip(*data, strict=True)
    knots = FITS[kind](x, y)
    if knots is None:
        assert len(set(x)) == 1 or kind == "binned"
        return
    assert np.all(np.diff(knots[0]) > 0) and np.all(np.diff(knots[1]) >= 0)
    values = interpolate(knots, np.sort(queries + list(x)))
    assert np.all(np.diff(values) >= 0)
    assert min(y) - 1e-12 <= values.min() and values.max() <= max(y) + 1e-12


@given(st.lists(st.tuples(wide, wide, st.just(0.0) | st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_isotonic_fit_keeps_the_weighted_mean(data):
    x, y, w = (np.array(column) for column in zip(*data, strict=True))
    knots = fit_isotonic(x, y, w)
    if knots is None:
        assert len(set(x[w > 0])) < 2
        return
    fitted = interpolate(knots, x)
    np.testing.assert_allclose(np.sum(w * fitted), np.sum(w * y), atol=1e-6 * np.sum(w * np.abs(y)) + 1e-9)


@given(
    st.lists(st.tuples(unit, unit), min_size=1, max_size=60),
    st.integers(0, 60),
    st.sampled_from(sorted(FITS)),
)
def test_state_round_trip_through_json_continues_identically(data, cut, kind):
    undisturbed, first = (MonotoneMap(kind, capacity=30, min_pairs=5, refit_every=4) for _ in range(2))
    resumed = MonotoneMap(kind, capacity=30, min_pairs=5, refit_every=4)
    for pair in data[:cut]:
        undisturbed.observe(*([side] for side in pair))
        first.observe(*([side] for side in pair))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for pair in data[cut:]:
        undisturbed.observe(*([side] for side in pair))
        resumed.observe(*([side] for side in pair))
    assert resumed.state_dict() == undisturbed.state_dict()
    assert resumed.metrics() == undisturbed.metrics()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "isotonik"}, "did you mean 'isotonic'"),
        ({"kind": "spline"}, "one of binned, isotonic"),
        ({"bins": 0}, "bins=0: must be at least 1"),
        ({"refit_every": 0}, "refit_every=0"),
        ({"capacity": 100}, "capacity=100: must be at least min_pairs=200"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MonotoneMap(**settings)


@pytest.mark.parametrize(
    ("x", "y", "weights"), [([0, 1], [0], None), ([0, np.nan], [0, 1], None), ([0, 1], [0, 1], [1, -1])]
)
def test_fits_refuse_what_they_cannot_use(x, y, weights):
    with pytest.raises(ValueError, match="must be"):
        fit_isotonic(x, y, weights)


def test_observe_refuses_unequal_shapes():
    with pytest.raises(ValueError, match="same shape"):
        MonotoneMap().observe([0.1], [0.1, 0.2])


def test_weight_that_would_underflow_changes_nothing():
    with_tiny = fit_isotonic([0, 1, 1, 2], [0, 1, 5, 1], [1e3, 1e3, 1e-320, 1e3])
    without = fit_isotonic([0, 1, 2], [0, 1, 1])
    np.testing.assert_array_equal(with_tiny, without)
