"""The numbers behind every claim: intervals, bootstrap, Best@k, AUC, calibration.

Pure functions of arrays; knows no files, no plots and no simulator. Randomness comes in as `rng`. Missing
values are NaN: they are left out, never counted as failures. All intervals are at `confidence` (95 % unless
said).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats

from wmrl_embodied.core.ranking import ordered_pairs

Statistic = Callable[[np.ndarray], np.ndarray]
"""(..., N) values -> (...) one number for each row."""

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value and the interval around it; all NaN when there was nothing to estimate from."""

    value: float
    low: float
    high: float

    @classmethod
    def unknown(cls) -> Estimate:
        """The estimate from no data."""
        return cls(math.nan, math.nan, math.nan)


# ---------------------------------------------------------------------------------------------- proportions


def proportion_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """Clopper-Pearson interval of one proportion: it covers at least `confidence` of the time.

    20 of 20 gives [0.83, 1]. No trials give NaN.

    Raises:
        ValueError: not 0 <= successes <= trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes}, trials={trials}: needs 0 <= successes <= trials")
    if trials == 0:
        return Estimate.unknown()
    interval = stats.binomtest(int(successes), int(trials)).proportion_ci(confidence, method="exact")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


class EvaluationLike(Protocol):
    """What `success_rate` reads of an evaluation row: arrays (N,), one entry an episode, NaN = missing."""

    success_once: np.ndarray
    success_at_end: np.ndarray
    already_successful: np.ndarray


@dataclass(frozen=True)
class SuccessCount:
    """How many episodes counted, and how many were left out and why."""

    successes: float
    episodes: int
    already_successful: int
    missing: int

    @property
    def rate(self) -> float:
        """Share of successes among the episodes that count; NaN if none does."""
        return self.successes / self.episodes if self.episodes else math.nan

    def interval(self, confidence: float = CONFIDENCE) -> Estimate:
        """Clopper-Pearson interval over the episodes (the sum of graded scores is rounded)."""
        interval = proportion_interval(round(self.successes), self.episodes, confidence)
        return Estimate(self.rate, min(interval.low, self.rate), max(interval.high, self.rate))


def counted(row: EvaluationLike, at_end: bool = False) -> np.ndarray:
    """(N,) success of each episode, NaN where it must not count: already successful at reset, or missing."""
    success = np.asarray(row.success_at_end if at_end else row.success_once, dtype=np.float64)
    return np.where(np.asarray(row.already_successful, dtype=np.float64) > 0.5, np.nan, success)


def success_rate(rows: Iterable[EvaluationLike], at_end: bool = False) -> SuccessCount:
    """Pool rows into one count; episodes already successful at reset, and missing ones, only get counted."""
    successes, episodes, already, missing = 0.0, 0, 0, 0
    for row in rows:
        values = counted(row, at_end)
        solved_at_reset = int(np.sum(np.asarray(row.already_successful, dtype=np.float64) > 0.5))
        finite = np.isfinite(values)
        successes += float(values[finite].sum())
        episodes += int(finite.sum())
        already += solved_at_reset
        missing += len(values) - int(finite.sum()) - solved_at_reset
    return SuccessCount(successes, episodes, already, missing)


def best_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k attempts or more passes, from n with c passes: 1 - C(n-c, k) / C(n, k)."""
    _check_at_k(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def all_at_k(n: int, c: int, k: int) -> float:
    """Chance that all of k attempts pass, from n with c passes: C(c, k) / C(n, k)."""
    _check_at_k(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_at_k(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"c={c} passes of n={n} attempts: needs 0 <= c <= n")
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be in [1, n={n}]; make at least k attempts a state")


# ------------------------------------------------------------------------------------------------ bootstrap


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """(..., N) -> (...): mean of the middle half, as in rliable (a quarter cut at either end, floored)."""
    return stats.trim_mean(values, 0.25, axis=-1)


def stratified_bootstrap(
    scores: np.ndarray,
    rng: np.random.Generator,
    statistic: Statistic = interquartile_mean,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """`statistic` of all scores with a percentile interval; seeds are resampled within each task on its own.

    Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice". With one seed a task the interval
    has no width: it cannot speak of other seeds, so use `proportion_interval` over the episodes there.

    Args:
        scores: (seeds, tasks), NaN where a seed has no score for a task.
        rng: draws the resamples.
        statistic: of the flattened finite scores.
        resamples: how many.
        confidence: of the interval.
    """
    columns = _columns(scores)
    if not columns:
        return Estimate.unknown()
    value = float(statistic(np.concatenate(columns)))
    low, high = _percentiles(statistic(_resample(columns, rng, resamples)), confidence)
    return Estimate(value, low, high)


def probability_of_improvement(
    ours: np.ndarray,
    theirs: np.ndarray,
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Chance that a random seed of ours beats a random seed of theirs (a tie is half), averaged over tasks.

    Args:
        ours: (seeds, tasks), NaN where missing.
        theirs: (other seeds, the same tasks).
        rng: draws the resamples; both sides are resampled within each task.
        resamples: how many.
        confidence: of the interval.

    Raises:
        ValueError: the numbers of tasks differ.
    """
    ours, theirs = np.atleast_2d(ours), np.atleast_2d(theirs)
    if ours.shape[1] != theirs.shape[1]:
        raise ValueError(f"ours has {ours.shape[1]} tasks, theirs {theirs.shape[1]}: must be the same")
    values, draws = [], []
    for a, b in zip(ours.T, theirs.T, strict=True):
        a, b = a[np.isfinite(a)], b[np.isfinite(b)]
        if len(a) and len(b):
            values.append(_win_rate(a, b))
            draws.append(_win_rate(_resample([a], rng, resamples), _resample([b], rng, resamples)))
    if not values:
        return Estimate.unknown()
    low, high = _percentiles(np.mean(draws, axis=0), confidence)
    return Estimate(float(np.mean(values)), low, high)


def paired_difference(
    ours: np.ndarray,
    theirs: np.ndarray,
    strata: Sequence[object],
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Mean of ours - theirs over the same listed states; states are resampled within their stratum.

    When all differences are equal a bootstrap would claim certainty. Then the interval allows the share of
    states that a Clopper-Pearson bound cannot rule out to be as bad, or as good, as a score in [0, 1] can be.

    Args:
        ours: (N,) scores in [0, 1], entry i of both on the same state; NaN in either leaves the state out.
        theirs: (N,).
        strata: (N,) the task of each state.
        rng: draws the resamples.
        resamples: how many.
        confidence: of the interval.
    """
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    labels = np.array([str(s) for s in strata])
    columns = [c[np.isfinite(c)] for c in (difference[labels == label] for label in dict.fromkeys(labels))]
    columns = [c for c in columns if len(c)]
    if not columns:
        return Estimate.unknown()
    pooled = np.concatenate(columns)
    value = float(pooled.mean())
    if np.ptp(pooled) == 0:
        ruled_out = proportion_interval(len(pooled), len(pooled), confidence).low
        return Estimate(value, value * ruled_out - (1 - ruled_out), value * ruled_out + (1 - ruled_out))
    low, high = _percentiles(_resample(columns, rng, resamples).mean(axis=-1), confidence)
    return Estimate(value, low, high)


def _columns(scores: np.ndarray) -> list[np.ndarray]:
    """The finite scores of each task."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2:
        raise ValueError(f"scores has shape {scores.shape}: must be (seeds, tasks)")
    return [c for c in (column[np.isfinite(column)] for column in scores.T) if len(c)]


def _resample(columns: Sequence[np.ndarray], rng: np.random.Generator, resamples: int) -> np.ndarray:
    """(resamples, N): every column drawn with replacement from itself."""
    return np.concatenate([c[rng.integers(len(c), size=(resamples, len(c)))] for c in columns], axis=1)


def _percentiles(draws: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _win_rate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """P(a > b) + P(a = b) / 2 over the last axes, (..., M) against (..., N) -> (...)."""
    a, b = a[..., :, None], b[..., None, :]
    return np.mean((a > b) + 0.5 * (a == b), axis=(-2, -1))


# ------------------------------------------------------------------------------------ world model's quality


def in_group_auc_interval(
    groups: Iterable[tuple[np.ndarray, np.ndarray]],
    rng: np.random.Generator,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """`in_group_auc` with a bootstrap interval; whole mixed groups are resampled. Two or more are needed."""
    counts = [ordered_pairs(np.asarray(s, np.float64), np.asarray(y, np.float64)) for s, y in groups]
    counts = np.array([c for c in counts if c[1]], dtype=np.float64).reshape(-1, 2)
    if not len(counts):
        return Estimate.unknown()
    value = float(counts[:, 0].sum() / counts[:, 1].sum())
    if len(counts) == 1:
        return Estimate(value, math.nan, math.nan)
    right, pairs = counts[rng.integers(len(counts), size=(resamples, len(counts)))].sum(axis=1).T
    return Estimate(value, *_percentiles(right / pairs, confidence))


@dataclass(frozen=True)
class CalibrationBin:
    """One bin of predictions. `executed` has a Clopper-Pearson interval if all outcomes in it are 0 or 1."""

    predicted: float
    executed: Estimate
    count: int


def calibration_table(
    predicted: np.ndarray, executed: np.ndarray, bins: int = 10, confidence: float = CONFIDENCE
) -> list[CalibrationBin]:
    """Mean predicted against mean executed score in equal-width bins of the prediction, without empty ones.

    The bins span [0, 1], or further where predictions reach further.
    """
    predicted, executed = np.asarray(predicted, np.float64), np.asarray(executed, np.float64)
    known = np.isfinite(predicted) & np.isfinite(executed)
    predicted, executed = predicted[known], executed[known]
    if not len(predicted):
        return []
    edges = np.linspace(min(0.0, predicted.min()), max(1.0, predicted.max()), bins + 1)
    which = np.clip(np.digitize(predicted, edges) - 1, 0, bins - 1)
    table = []
    for b in np.unique(which):
        p, r = predicted[which == b], executed[which == b]
        if np.all((r == 0) | (r == 1)):
            estimate = proportion_interval(int(r.sum()), len(r), confidence)
        else:
            half = stats.norm.ppf((1 + confidence) / 2) * r.std() / math.sqrt(len(r))
            estimate = Estimate(float(r.mean()), float(r.mean() - half), float(r.mean() + half))
        table.append(CalibrationBin(float(p.mean()), estimate, len(r)))
    return table


@dataclass(frozen=True)
class PredictionError:
    """How predicted scores miss executed ones.

    Attributes:
        bias: mean of predicted - executed.
        rmse: root of the mean squared error.
        rank_correlation: Spearman's.
        variance_ratio: mean squared error over mean predicted variance; 1 is honest, above 1 overconfident.
        count: how many pairs.
    """

    bias: float
    rmse: float
    rank_correlation: float
    variance_ratio: float
    count: int


def prediction_error(predicted: np.ndarray, executed: np.ndarray, variance: np.ndarray) -> PredictionError:
    """Bias, size, ordering and honesty of predictions; each (N,), NaN left out."""
    predicted, executed, variance = (np.asarray(a, np.float64) for a in (predicted, executed, variance))
    known = np.isfinite(predicted) & np.isfinite(executed)
    error, variance = (predicted - executed)[known], variance[known]
    if not len(error):
        return PredictionError(math.nan, math.nan, math.nan, math.nan, 0)
    p, r = predicted[known], executed[known]
    ranked = stats.spearmanr(p, r).statistic if np.ptp(p) > 0 and np.ptp(r) > 0 else math.nan
    with_variance = np.isfinite(variance)
    mean_variance = float(variance[with_variance].mean()) if with_variance.any() else math.nan
    ratio = float(np.mean(error[with_variance] ** 2)) / mean_variance if mean_variance > 0 else math.nan
    return PredictionError(
        float(error.mean()), float(np.sqrt(np.mean(error**2))), float(ranked), ratio, len(error)
    )


# --------------------------------------------------------------------------------------------------- curves


def executions_to_reach(curve: Iterable[tuple[float, float]], level: float) -> float:
    """Real executions at which the curve first reaches `level`, interpolated linearly; inf if it never does.

    Args:
        curve: (executions, success) in the order of the training; points with NaN success are left out.
        level: success to reach.
    """
    previous: tuple[float, float] | None = None
    for x, y in curve:
        if not math.isfinite(y):
            continue
        if y >= level:
            if previous is None:
                return float(x)
            x0, y0 = previous
            return float(x0 + (level - y0) / (y - y0) * (x - x0))
        previous = (x, y)
    return math.inf


def success_at(curve: Iterable[tuple[float, float]], executions: float) -> float:
    """Success at a budget of real executions, by linear interpolation; NaN outside what the curve covers."""
    points = [(x, y) for x, y in curve if math.isfinite(y)]
    if not points:
        return math.nan
    x, y = np.array(points, dtype=np.float64).T
    return float(np.interp(executions, x, y, left=math.nan, right=math.nan))
