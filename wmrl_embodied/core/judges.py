"""Several noisy judges of the same attempts, combined into one score with a variance. Plain arrays in and out.

Knows nothing of groups and policies: a judge is a column of numbers, be it a world model, a metric or a language
model's grade.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.choices import unknown
from wmrl_embodied.core.debias import Knots, fit_isotonic, interpolate

logger = logging.getLogger(__name__)

KINDS = ("gls", "inverse_variance")


def simplex_weights(moments: ArrayLike) -> np.ndarray:
    """The weights w >= 0, sum 1, with the least w' S w: generalised least squares without negative weights.

    A negative weight would bet on how the errors of two judges cancel, which a few hundred pairs do not show.

    Args:
        moments: (K, K) second moments S of the judges' errors, or (K,) their diagonal, which gives 1 / S_k.

    Returns:
        (K,) weights.

    Raises:
        ValueError: for another shape, a value that is not finite, or a judge whose own moment is not positive.
    """
    moments = np.asarray(moments, np.float64)
    if moments.ndim == 1:
        moments = np.diag(moments)
    if moments.ndim != 2 or moments.shape[0] != moments.shape[1] or not moments.size:
        raise ValueError(f"moments {moments.shape}: must be (K, K) or (K,), K at least 1")
    if not np.isfinite(moments).all() or not (np.diag(moments) > 0).all():
        raise ValueError(
            f"moments with diagonal {np.diag(moments)}: must be finite, each judge's own above 0"
        )
    from sklearn.linear_model import LinearRegression

    # For any s, the w >= 0 with the least w' S w + s^2 (sum w - 1)^2 is the wanted one up to a factor: non-negative
    # least squares with the rows of S^(1/2) and one row of s.
    value, vector = np.linalg.eigh(moments / np.mean(np.diag(moments)))
    root = np.sqrt(np.maximum(value, 0))[:, None] * vector.T
    rows, target = np.vstack([root, np.ones(len(moments))]), np.append(np.zeros(len(moments)), 1.0)
    found = LinearRegression(fit_intercept=False, positive=True).fit(rows, target).coef_
    return found / found.sum()


class JudgePanel:
    """K judges, each through its own monotone map, averaged with the weights of least squared error.

    Errors are measured on the latest pairs and cross-fitted: each on pairs that its map was not fitted on. A judge
    that says no more about the executed scores than their mean does, by one standard error, gets weight 0: a constant
    one, one that gives NaN, an inverted one (the best increasing map of which is a constant).

    Attributes:
        weights: (K,) at least 0; equal ones before there are `min_pairs` pairs, all 0 if no judge is of use.
        moments: (K, K) second moments of the errors in score units squared, NaN where unknown.
    """

    def __init__(
        self,
        judges: int,
        kind: str = "gls",
        capacity: int = 5000,
        min_pairs: int = 50,
        folds: int = 5,
    ) -> None:
        """Start without pairs: identity maps, equal weights.

        Args:
            judges: K.
            kind: "gls", generalised least squares with the errors' covariance, or "inverse_variance", as if errors
                of different judges were independent.
            capacity: pairs that are kept, first in, first out.
            min_pairs: pairs before anything is fitted.
            folds: of the cross-fit.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        if judges < 1:
            raise ValueError(f"judges={judges}: must be at least 1")
        if folds < 2:
            raise ValueError(f"folds={folds}: must be at least 2")
        if not 2 * folds <= min_pairs <= capacity:
            raise ValueError(
                f"min_pairs={min_pairs}: must be in [2 * folds, capacity] = [{2 * folds}, {capacity}]"
            )
        self.kind, self.folds, self.min_pairs, self.capacity = kind, folds, min_pairs, capacity
        self._pairs = np.zeros((0, judges + 1))
        self._reset()

    def observe(self, predicted: ArrayLike, executed: ArrayLike) -> None:
        """Keep new pairs and fit maps and weights again.

        Args:
            predicted: (N, K) scores as the judges gave them, NaN or infinite where one gave none.
            executed: (N,) executed scores of the same attempts; a row without one is ignored.

        Raises:
            ValueError: for other shapes.
        """
        predicted = self._columns(predicted)
        executed = np.asarray(executed, np.float64)
        if executed.shape != predicted.shape[:1]:
            raise ValueError(f"executed {executed.shape}: must be ({len(predicted)},), one for each row")
        rows = np.column_stack([predicted, executed])[np.isfinite(executed)]
        self._pairs = np.concatenate([self._pairs, rows])[-self.capacity :]
        self._fit()

    def __call__(self, predicted: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Combined scores and their error variances.

        Where some judges gave no score the others are weighted anew. With no judge of use it is the mean of the
        executed scores, which ranks nothing.

        Args:
            predicted: (N, K), NaN or infinite where missing.

        Returns:
            (N,) scores, NaN where no judge gave one, and (N,) variances, NaN where there are no pairs yet.

        Raises:
            ValueError: for another shape.
        """
        predicted = self._columns(predicted)
        mapped = np.column_stack([interpolate(k, x) for k, x in zip(self._maps, predicted.T, strict=True)])
        score, variance = np.full((2, len(predicted)), np.nan)
        there = np.isfinite(predicted)
        for pattern in np.unique(there, axis=0):
            rows = (there == pattern).all(axis=1)
            if not pattern.any():
                continue
            weights = self._weights_of(pattern)
            if weights.any():
                score[rows] = np.where(pattern, mapped[rows], 0.0) @ weights
                variance[rows] = (
                    weights @ np.where(weights[:, None] * weights > 0, self.moments, 0.0) @ weights
                )
            elif self.fitted:
                score[rows], variance[rows] = self._pairs[:, -1].mean(), self._pairs[:, -1].var()
        return score, variance

    @property
    def fitted(self) -> bool:
        """Whether there were enough pairs."""
        return len(self._pairs) >= self.min_pairs

    def state_dict(self) -> dict[str, Any]:
        """State in plain lists, exact through JSON; NaN is null."""
        return {"pairs": [[x if np.isfinite(x) else None for x in row] for row in self._pairs.tolist()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self._pairs = np.array(state["pairs"], np.float64).reshape(-1, self._pairs.shape[1])
        self._reset()
        self._fit()

    def _reset(self) -> None:
        judges = self._pairs.shape[1] - 1
        self._maps: list[Knots | None] = [None] * judges
        self._useful = np.ones(judges, bool)
        self.moments = np.full((judges, judges), np.nan)
        self.weights = np.full(judges, 1 / judges)

    def _columns(self, predicted: ArrayLike) -> np.ndarray:
        predicted = np.asarray(predicted, np.float64)
        judges = self._pairs.shape[1] - 1
        if predicted.ndim != 2 or predicted.shape[1] != judges:
            raise ValueError(f"predicted {predicted.shape}: must be (N, {judges}), a column for each judge")
        return np.where(np.isfinite(predicted), predicted, np.nan)

    def _fit(self) -> None:
        if not self.fitted:
            return
        *columns, truth = self._pairs.T
        fold = np.arange(len(truth)) % self.folds
        others_mean = np.array([truth[fold != f].mean() for f in range(self.folds)])[fold]
        errors = np.column_stack([self._cross_fitted(x, truth, fold) for x in columns])
        self._maps = [fit_isotonic(x[np.isfinite(x)], truth[np.isfinite(x)]) for x in columns]
        useful = np.array([_beats(error, truth - others_mean) for error in errors.T])
        both = np.isfinite(errors)
        together = both.T.astype(np.float64) @ both
        known = np.where(both, errors, 0.0)
        with np.errstate(invalid="ignore"):
            self.moments = np.where(together > 0, known.T @ known / np.maximum(together, 1), np.nan)
        if (self._useful & ~useful).any():
            logger.warning(
                "judges %s say no more about the executed scores than their mean does: weight 0; look at their inputs, "
                "or whether high means bad",
                np.flatnonzero(~useful).tolist(),
            )
        self._useful = useful
        self.weights = self._weights_of(np.ones(len(columns), bool))

    def _cross_fitted(self, x: np.ndarray, truth: np.ndarray, fold: np.ndarray) -> np.ndarray:
        """(N,) mapped score minus truth, each by a map that has not seen it; NaN where the judge gave no score."""
        there, error = np.isfinite(x), np.full(len(x), np.nan)
        for f in range(self.folds):
            seen, new = there & (fold != f), there & (fold == f)
            knots = fit_isotonic(x[seen], truth[seen])
            if knots is not None:
                error[new] = interpolate(knots, x[new]) - truth[new]
            elif seen.any():  # one distinct score: the best map of it is the mean
                error[new] = truth[seen].mean() - truth[new]
        return error

    def _weights_of(self, there: np.ndarray) -> np.ndarray:
        """(K,) weights of the judges that are there, 0 for the others and for those of no use."""
        weights = np.zeros(len(there))
        used = np.flatnonzero(there & self._useful)
        if not self.fitted:
            weights[used] = 1 / len(used)
            return weights
        if not len(used):
            return weights
        moments = self.moments[np.ix_(used, used)]
        if self.kind == "inverse_variance":
            moments = np.diag(np.diag(moments))
        # A judge without any error, or two that never judged the same attempt.
        floor = np.finfo(np.float64).eps * max(1.0, float(self._pairs[:, -1].var()))
        moments = np.nan_to_num(moments) + floor * np.eye(len(used))
        weights[used] = simplex_weights(moments)
        return weights


def _beats(error: np.ndarray, baseline: np.ndarray) -> bool:
    """Whether squared errors are below those of the baseline by more than their standard error."""
    there = np.isfinite(error)
    if there.sum() < 2:
        return False
    gain = baseline[there] ** 2 - error[there] ** 2
    return bool(gain.mean() > gain.std(ddof=1) / np.sqrt(there.sum()))
