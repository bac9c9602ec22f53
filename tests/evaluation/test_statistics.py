"""Hand-worked values, and properties that must hold for any data."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_embodied.core import ranking
from wmrl_embodied.evaluation import statistics as s


def rng(seed=0):
    return np.random.default_rng(seed)


def row(once, end=None, already=None):
    n = len(once)
    return SimpleNamespace(
        success_once=np.array(once, float),
        success_at_end=np.array(once if end is None else end, float),
        already_successful=np.array([0] * n if already is None else already, float),
    )


class TestProportions:
    def test_twenty_of_twenty_only_proves_83_percent(self):
        estimate = s.proportion_interval(20, 20)
        assert estimate.value == 1 and estimate.high == 1
        assert estimate.low == pytest.approx(0.025 ** (1 / 20))  # 0.8316

    def test_none_of_n_mirrors_all_of_n(self):
        assert s.proportion_interval(0, 20).high == pytest.approx(1 - 0.025 ** (1 / 20))

    def test_published_value(self):  # Clopper-Pearson of 10 / 100, in every table
        estimate = s.proportion_interval(10, 100)
        assert (estimate.low, estimate.high) == pytest.approx((0.0490, 0.1762), abs=5e-5)

    def test_nothing_is_unknown_not_zero(self):
        assert math.isnan(s.proportion_interval(0, 0).value)

    @pytest.mark.parametrize(("c", "n"), [(-1, 3), (4, 3)])
    def test_impossible_counts(self, c, n):
        with pytest.raises(ValueError, match=f"successes={c}, trials={n}"):
            s.proportion_interval(c, n)

    def test_success_rate_leaves_out_what_was_solved_or_missing(self):
        count = s.success_rate([row([1, 1, 0, 0], already=[1, 0, 0, 0]), row([1, math.nan])])
        assert count == s.SuccessCount(successes=2, episodes=4, already_successful=1, missing=1)
        assert count.rate == 0.5

    def test_success_at_end(self):
        assert s.success_rate([row([1, 1], end=[1, 0])], at_end=True).rate == 0.5

    def test_success_rate_of_nothing(self):
        assert math.isnan(s.success_rate([]).rate)
        assert math.isnan(s.success_rate([row([1], already=[1])]).rate)


class TestAtK:
    def test_by_hand(self):
        assert s.best_at_k(8, 2, 1) == pytest.approx(0.25)
        assert s.best_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)
        assert s.all_at_k(4, 2, 2) == pytest.approx(1 / 6)
        assert s.best_at_k(8, 0, 8) == 0 and s.best_at_k(8, 1, 8) == 1
        assert s.all_at_k(8, 7, 8) == 0 and s.all_at_k(8, 8, 8) == 1

    @given(st.data())
    def test_bounds_and_mirror(self, data):
        n = data.draw(st.integers(1, 30))
        c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
        best, everyone = s.best_at_k(n, c, k), s.all_at_k(n, c, k)
        assert 0 <= everyone <= c / n + 1e-12 and c / n - 1e-12 <= best <= 1
        assert best == pytest.approx(1 - s.all_at_k(n, n - c, k))

    @pytest.mark.parametrize(("n", "c", "k"), [(8, 9, 1), (8, 2, 9), (8, 2, 0)])
    def test_out_of_range(self, n, c, k):
        with pytest.raises(ValueError):
            s.best_at_k(n, c, k)


class TestBootstrap:
    def test_interquartile_mean_by_hand(self):
        assert s.interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -100])) == pytest.approx(3.5)
        assert s.interquartile_mean(np.array([0.0, 0.5, 1.0])) == pytest.approx(0.5)  # too few to cut

    def test_interval_holds_the_value_and_repeats(self):
        scores = rng(1).uniform(size=(5, 3))
        one, two = (s.stratified_bootstrap(scores, rng(7)) for _ in range(2))
        assert one == two and one.low <= one.value <= one.high

    def test_strata_never_mix(self):
        # Tasks differ, seeds do not: resampling within tasks finds no variation at all.
        estimate = s.stratified_bootstrap(np.tile([0.1, 0.5, 0.9], (4, 1)), rng())
        assert estimate == s.Estimate(estimate.value, estimate.value, estimate.value)
        assert estimate.value == pytest.approx(0.5)

    def test_two_seeds_by_enumeration(self):
        # One task, scores 0 and 1: the resampled mean is 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
        scores = np.array([[0.0], [1.0]])
        estimate = s.stratified_bootstrap(scores, rng(), statistic=lambda x: x.mean(axis=-1))
        assert estimate == s.Estimate(0.5, 0.0, 1.0)

    def test_missing_scores_are_left_out(self):
        scores = np.array([[0.2, np.nan], [0.4, np.nan]])
        assert s.stratified_bootstrap(scores, rng()).value == pytest.approx(0.3)
        assert math.isnan(s.stratified_bootstrap(np.full((2, 2), np.nan), rng()).value)

    def test_shape_is_checked(self):
        with pytest.raises(ValueError, match="seeds, tasks"):
            s.stratified_bootstrap(np.zeros(3), rng())

    def test_covers_the_truth_about_as_often_as_it_says(self):
        generator, hits = rng(3), 0
        for _ in range(200):
            sample = generator.normal(0.5, 0.1, size=(10, 2))
            estimate = s.stratified_bootstrap(sample, generator, resamples=300)
            hits += estimate.low <= 0.5 <= estimate.high
        assert 0.85 <= hits / 200 <= 1.0

    def test_probability_of_improvement_by_hand(self):
        ours, theirs = np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([[2.0, 0.0], [3.0, 0.0]])
        # Task one: (1<2, 1<3, 3>2, 3=3) = 1.5 / 4; task two: all ties = 1/2.
        assert s.probability_of_improvement(ours, theirs, rng()).value == pytest.approx((1.5 / 4 + 0.5) / 2)

    def test_probability_of_improvement_certain(self):
        estimate = s.probability_of_improvement(np.ones((3, 2)), np.zeros((4, 2)), rng())
        assert estimate == s.Estimate(1.0, 1.0, 1.0)

    def test_probability_of_improvement_needs_the_same_tasks(self):
        with pytest.raises(ValueError, match="2 tasks, theirs 3"):
            s.probability_of_improvement(np.ones((3, 2)), np.zeros((4, 3)), rng())

    def test_paired_difference_sees_what_unpaired_cannot(self):
        hard = rng(5).uniform(size=200)  # states differ much, ours is always a little better
        better = np.clip(hard + rng(6).uniform(0.01, 0.03, size=200), 0, 1)
        estimate = s.paired_difference(better, hard, ["a"] * 200, rng())
        assert 0 < estimate.low <= estimate.value <= estimate.high < 0.05

    def test_paired_difference_leaves_out_unpaired_states(self):
        estimate = s.paired_difference([1, np.nan, 0], [0, 0, np.nan], "abc", rng())
        assert estimate.value == 1.0

    def test_equal_differences_do_not_claim_certainty(self):
        estimate = s.paired_difference(np.ones(20), np.zeros(20), ["a"] * 20, rng())
        assert estimate.value == 1 and estimate.high == 1
        assert estimate.low == pytest.approx(2 * 0.025 ** (1 / 20) - 1)
        nothing = s.paired_difference(np.ones(20), np.ones(20), ["a"] * 20, rng())
        assert nothing.value == 0 and nothing.low == -nothing.high < -0.1


def brute_auc(scores, labels):
    both = list(zip(scores, labels, strict=True))
    pairs = [(a, b) for a, x in both for b, y in both if x > y]
    return np.mean([(a > b) + (a == b) / 2 for a, b in pairs]) if pairs else math.nan


class TestAuc:
    def test_by_hand(self):
        assert ranking.auc([0.9, 0.4, 0.5, 0.1], [1, 1, 0, 0]) == 0.75
        assert ranking.auc([0.5, 0.5], [1, 0]) == 0.5
        assert ranking.auc([0.1, 0.9], [1, 0]) == 0.0

    def test_one_class_is_unknown(self):
        assert math.isnan(ranking.auc([0.1, 0.2], [1, 1])) and math.isnan(ranking.auc([], []))

    @given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=12))
    def test_equals_counting_all_pairs(self, pairs):
        scores = np.array([p[0] for p in pairs], float)
        labels = np.array([p[1] for p in pairs], float)
        assert ranking.auc(scores, labels) == pytest.approx(brute_auc(scores, labels), nan_ok=True)

    @given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=2, max_size=12))
    def test_swapping_the_classes_mirrors_it(self, pairs):
        scores, labels = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs], float)
        assert ranking.auc(scores, labels) == pytest.approx(1 - ranking.auc(scores, 1 - labels), nan_ok=True)

    def test_missing_values_are_left_out(self):
        assert ranking.auc([0.9, np.nan, 0.1, 0.2], [1, 0, 0, np.nan]) == 1.0

    def test_in_group_weighs_by_pairs(self):
        groups = [
            ([0.9, 0.1], [1, 0]),  # 1 pair, right
            ([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0]),  # 4 pairs, all wrong
            ([0.1, 0.9], [1, 1]),  # not mixed
        ]
        value, mixed = ranking.in_group_auc(groups)
        assert (value, mixed) == (pytest.approx(1 / 5), 2)

    def test_in_group_interval(self):
        right, wrong, useless = ([0.9, 0.1], [1, 0]), ([0.1, 0.9], [1, 0]), ([0.1, 0.9], [1, 1])
        estimate = s.in_group_auc_interval([right] * 30 + [wrong] * 10 + [useless], rng())
        assert estimate.value == 0.75
        half = 1.96 * math.sqrt(0.75 * 0.25 / 40)  # normal approximation of a binomial
        assert (estimate.low, estimate.high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.03)
        assert math.isnan(s.in_group_auc_interval([right], rng()).low)
        assert math.isnan(s.in_group_auc_interval([useless], rng()).value)

    def test_in_group_ignores_what_only_tells_groups_apart(self):
        easy, hard = ([0.9, 0.9], [1, 0]), ([0.1, 0.1], [1, 0])
        assert ranking.in_group_auc([easy, hard])[0] == 0.5
        value, mixed = ranking.in_group_auc([])
        assert math.isnan(value) and mixed == 0


class TestCalibration:
    def test_by_hand(self):
        table = s.calibration_table([0.05, 0.15, 0.12, 0.95, 1.0], [0, 1, 0, 1, 1], bins=10)
        assert [b.count for b in table] == [1, 2, 2]
        assert [b.predicted for b in table] == pytest.approx([0.05, 0.135, 0.975])
        assert [b.executed.value for b in table] == pytest.approx([0, 0.5, 1])

    @given(st.lists(st.tuples(st.floats(-2, 2), st.floats(0, 1)), min_size=1), st.integers(1, 12))
    def test_keeps_every_pair_and_the_means(self, pairs, bins):
        predicted, executed = np.array(pairs).T
        table = s.calibration_table(predicted, executed, bins)
        assert sum(b.count for b in table) == len(pairs)
        assert sum(b.count * b.executed.value for b in table) == pytest.approx(executed.sum(), abs=1e-9)

    def test_nothing(self):
        assert s.calibration_table([np.nan], [1.0]) == []

    def test_prediction_error_by_hand(self):
        error = s.prediction_error([0.5, 1.0, 0.0], [0.0, 1.0, 0.5], [0.25, 0.25, np.nan])
        assert error.bias == pytest.approx(0) and error.count == 3
        assert error.rmse == pytest.approx(math.sqrt(0.5 / 3))
        assert error.variance_ratio == pytest.approx(0.125 / 0.25)

    def test_prediction_error_unknowns(self):
        error = s.prediction_error([0.5, 0.5], [0, 1], [0, 0])
        assert math.isnan(error.rank_correlation) and math.isnan(error.variance_ratio)
        assert s.prediction_error([], [], []).count == 0


class TestCurves:
    def test_interpolates(self):
        assert s.executions_to_reach([(0, 0.2), (100, 0.4), (200, 0.8)], 0.5) == pytest.approx(125)

    def test_first_time_counts(self):
        assert s.executions_to_reach([(0, 0.0), (10, 0.6), (20, 0.1), (30, 0.9)], 0.6) == 10

    def test_already_there(self):
        assert s.executions_to_reach([(5, 0.7), (10, 0.9)], 0.5) == 5

    def test_never_and_nothing(self):
        assert s.executions_to_reach([(0, 0.1), (9, 0.2)], 0.5) == math.inf
        assert s.executions_to_reach([], 0.0) == math.inf
        assert s.executions_to_reach([(0, math.nan)], 0.0) == math.inf

    @settings(max_examples=50)
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1))
    def test_a_higher_level_is_never_cheaper(self, successes, a, b):
        curve = [(10.0 * i, y) for i, y in enumerate(successes)]
        low, high = sorted((a, b))
        assert s.executions_to_reach(curve, low) <= s.executions_to_reach(curve, high)

    def test_success_at_a_budget(self):
        curve = [(10, 0.2), (20, math.nan), (30, 0.6)]
        assert s.success_at(curve, 20) == pytest.approx(0.4)
        assert math.isnan(s.success_at(curve, 31)) and math.isnan(s.success_at([], 1))
