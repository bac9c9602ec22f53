"""Online debiasing: a monotone map from predicted to executed scores, refitted on the latest anchor pairs.

Knows pairs of numbers only, neither groups nor policies; what the calibrated scores are used for is not its
business.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.choices import unknown

logger = logging.getLogger(__name__)

Knots = tuple[np.ndarray, np.ndarray]
"""Strictly increasing x (K,) and non-decreasing y (K,) of a piecewise-linear map, constant outside."""


def _fit(
    x: ArrayLike, y: ArrayLike, weights: ArrayLike | None, cells: Callable[[np.ndarray], np.ndarray]
) -> Knots | None:
    """Mean of each cell of sorted x, then pool adjacent violators; None with fewer than two cells."""
    # Here, because it takes as long to import as torch, and every worker process imports this package.
    from sklearn.isotonic import isotonic_regression

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64)
    if not x.shape == y.shape == w.shape or x.ndim != 1:
        raise ValueError(f"x {x.shape}, y {y.shape} and weights {w.shape} must be 1-D and of equal length")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("x and y must be finite: leave pairs with a missing score out")
    if not (np.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("weights must be finite and not negative")
    # Relative to the largest, a weight this small changes no mean, but could underflow to a division by zero.
    kept = w > np.finfo(np.float64).eps ** 2 * w.max(initial=0.0)
    x, y, w = x[kept], y[kept], w[kept]
    if x.size == 0:
        return None
    # Sorting by all three makes every sum below, rounding included, independent of the order of the pairs.
    order = np.lexsort((w, y, x))
    x, y, w = x[order], y[order], w[order] / w.max()
    starts = np.flatnonzero(np.diff(cells(x), prepend=-1))
    if starts.size < 2:
        return None
    total = np.add.reduceat(w, starts)
    ends = np.append(starts[1:], x.size) - 1
    # A mean can round to just outside its own cell; clipped, the knots stay strictly increasing.
    knot_x = np.clip(np.add.reduceat(w * x, starts) / total, x[starts], x[ends])
    knot_y = isotonic_regression(np.add.reduceat(w * y, starts) / total, sample_weight=total)
    return knot_x, knot_y


def fit_binned(x: ArrayLike, y: ArrayLike, weights: ArrayLike | None = None, bins: int = 10) -> Knots | None:
    """Fit the map as published: equal-width bins over [0, 1], then pool adjacent violators on the bin means.

    Args:
        x: (N,) predicted scores; one outside [0, 1] falls into the nearest bin.
        y: (N,) executed scores.
        weights: (N,) weights of the pairs, not negative; ones by default, which weighs a bin by population.
        bins: number of bins.

    Returns:
        Bin means of x and pooled bin means of y, or None with fewer than two non-empty bins (arXiv
        2608.12564).

    Raises:
        ValueError: for unequal lengths, values that are not finite or negative weights.
    """
    return _fit(x, y, weights, lambda sorted_x: np.clip(np.floor(sorted_x * bins), 0, bins - 1))


def fit_isotonic(x: ArrayLike, y: ArrayLike, weights: ArrayLike | None = None) -> Knots | None:
    """Fit isotonic regression without bins, for scores of any range; ties in x are averaged first.

    Args:
        x: (N,) predicted scores.
        y: (N,) executed scores.
        weights: (N,) weights of the pairs, not negative; ones by default.

    Returns:
        Unique x and pooled y, or None with fewer than two distinct x.

    Raises:
        ValueError: for unequal lengths, values that are not finite or negative weights.
    """
    return _fit(x, y, weights, lambda sorted_x: np.cumsum(np.diff(sorted_x, prepend=sorted_x[:1]) > 0))


def interpolate(knots: Knots | None, x: ArrayLike) -> np.ndarray:
    """Value of the map at x (any shape), constant outside the knots; None is the identity, NaN stays NaN."""
    x = np.asarray(x, np.float64)
    if knots is None:
        return x.copy()
    knot_x, knot_y = knots
    right = np.searchsorted(knot_x, x, side="right")
    lower, upper = knot_y[np.maximum(right - 1, 0)], knot_y[np.minimum(right, knot_y.size - 1)]
    # Rounding may lift np.interp past a knot by one ulp, which would reorder two scores: hence the clip.
    return np.clip(np.interp(x, knot_x, knot_y), lower, upper)


FITS: dict[str, Callable[..., Knots | None]] = {"binned": fit_binned, "isotonic": fit_isotonic}


class MonotoneMap:
    """Monotone map, identity at first, refitted online on the latest anchor pairs (arXiv 2608.12564).

    It never reorders the members of a group, and it is not affine: group standardisation would cancel that.

    Attributes:
        knots: the fitted map, None while it is the identity.
        fits: number of successful fits.
        failed_fits: fits that found fewer than two distinct bins or values, and so changed nothing.
    """

    def __init__(
        self,
        kind: str = "binned",
        capacity: int = 5000,
        min_pairs: int = 200,
        refit_every: int = 64,
        bins: int = 10,
        strict: bool = False,
        half_life: float | None = None,
    ) -> None:
        """Create an identity map without pairs; the defaults are the published numbers.

        Args:
            kind: "binned" as published (scores in [0, 1]) or "isotonic" (any range).
            capacity: number of pairs that are kept, first in, first out.
            min_pairs: pairs before the first fit.
            refit_every: new pairs between two fits.
            bins: equal-width bins over [0, 1] of the binned kind.
            strict: refuse predicted scores outside [0, 1] in the binned kind, instead of warning once.
            half_life: newer pairs after which a pair counts half in a fit, so that the map follows a world model that
                drifts; None weighs all kept pairs alike, as published.

        Raises:
            ValueError: for an unknown kind or a number out of range.
        """
        if kind not in FITS:
            raise unknown("kind", kind, FITS)
        for name, value in (("min_pairs", min_pairs), ("refit_every", refit_every), ("bins", bins)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life={half_life}: must be above 0 pairs, or null for no forgetting")
        if capacity < min_pairs:
            raise ValueError(f"capacity={capacity}: must be at least min_pairs={min_pairs}")
        self.kind = kind
        self.min_pairs = min_pairs
        self.refit_every = refit_every
        self.bins = bins
        self.strict = strict
        self.half_life = half_life
        self.knots: Knots | None = None
        self.fits = 0
        self.failed_fits = 0
        self._ring = np.zeros((capacity, 2))  # the pair number i of all that were seen is in row i % capacity
        self._seen = 0
        self._fresh = 0
        self._warned_range = False

    def __len__(self) -> int:
        """Number of pairs that are kept."""
        return min(self._seen, len(self._ring))

    def __call__(self, predicted: ArrayLike) -> np.ndarray:
        """Calibrated scores, same shape as `predicted`; NaN passes through."""
        return interpolate(self.knots, predicted)

    def observe(self, predicted: ArrayLike, executed: ArrayLike) -> None:
        """Keep new anchor pairs, and refit when enough of them are new.

        Args:
            predicted: (N,) predicted scores as the world model gave them, not calibrated.
            executed: (N,) executed scores of the same trajectories. A pair with a missing side is ignored.

        Raises:
            ValueError: for unequal shapes; with `strict`, for predicted scores outside [0, 1].
        """
        x, y = np.asarray(predicted, np.float64), np.asarray(executed, np.float64)
        if x.shape != y.shape:
            raise ValueError(f"predicted {x.shape} and executed {y.shape} must have the same shape")
        both = np.isfinite(x) & np.isfinite(y)
        x, y = x[both], y[both]
        if self.kind == "binned":
            self._check_range(x)
        self._keep(np.stack([x.ravel(), y.ravel()], axis=1))
        self._fresh += x.size
        first = self.fits + self.failed_fits == 0
        if len(self) >= self.min_pairs and (first or self._fresh >= self.refit_every):
            self._refit()

    def metrics(self) -> dict[str, float]:
        """Counts, and the mean squared centred residual before and after the map over the kept pairs.

        `residual_explained` is 1 - after/before, 0 where there was nothing to explain. All three are
        in-sample: they describe the fit and are no test of it.
        """
        counts = {"pairs": float(len(self)), "fits": float(self.fits), "failed_fits": float(self.failed_fits)}
        if len(self) == 0:
            return counts
        x, y = self._pairs().T
        before, after = float(np.var(x - y)), float(np.var(self(x) - y))
        explained = 1 - after / before if before > 0 else 0.0
        return {**counts, "residual_before": before, "residual_after": after, "residual_explained": explained}

    def state_dict(self) -> dict[str, Any]:
        """State in plain lists and numbers, exact through JSON."""
        return {
            "pairs": self._pairs().tolist(),
            "knots": None if self.knots is None else [axis.tolist() for axis in self.knots],
            "fits": self.fits,
            "failed_fits": self.failed_fits,
            "fresh": self._fresh,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self._seen = 0
        self._keep(np.array(state["pairs"], np.float64).reshape(-1, 2))
        self.knots = None
        if state["knots"] is not None:
            knot_x, knot_y = (np.array(axis, np.float64) for axis in state["knots"])
            self.knots = knot_x, knot_y
        self.fits, self.failed_fits = int(state["fits"]), int(state["failed_fits"])
        self._fresh = int(state["fresh"])

    def _keep(self, pairs: np.ndarray) -> None:
        latest = pairs[-len(self._ring) :]
        rows = self._seen + len(pairs) - len(latest) + np.arange(len(latest))
        self._ring[rows % len(self._ring)] = latest
        self._seen += len(pairs)

    def _pairs(self) -> np.ndarray:
        """(N, 2) predicted and executed scores that are kept, the oldest first."""
        if self._seen <= len(self._ring):
            return self._ring[: self._seen]
        return np.roll(self._ring, -(self._seen % len(self._ring)), axis=0)

    def _refit(self) -> None:
        x, y = self._pairs().T
        weights = None
        if self.half_life is not None:
            weights = 2.0 ** (-np.arange(len(x))[::-1] / self.half_life)
        knots = FITS[self.kind](x, y, weights, **({"bins": self.bins} if self.kind == "binned" else {}))
        self._fresh = 0
        if knots is not None:
            self.knots = knots
            self.fits += 1
            return
        if self.failed_fits == 0:
            logger.warning(
                "no map fitted: %d pairs fall into fewer than two distinct %s; staying at %s",
                len(self),
                "bins" if self.kind == "binned" else "predicted scores",
                "the identity" if self.knots is None else "the last map",
            )
        self.failed_fits += 1

    def _check_range(self, x: np.ndarray) -> None:
        # The slack lets a float32 sigmoid or mean that rounds past 1 go by.
        outside = x[(x < -1e-6) | (x > 1 + 1e-6)]
        if outside.size == 0 or (self._warned_range and not self.strict):
            return
        message = (
            f"predicted score {outside[0]:g}: the binned map (as published) needs scores in [0, 1]; "
            "rescale the scores or use kind='isotonic', which takes any range"
        )
        if self.strict:
            raise ValueError(message)
        warnings.warn(message + " (now counted in the nearest bin)", stacklevel=3)
        self._warned_range = True
