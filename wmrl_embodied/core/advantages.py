"""Group-relative advantages from scores, with missing scores, lone survivors and equal scores in mind.

Knows one group at a time; which scores a group is judged by is decided elsewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# A standard deviation below this share of the score scale is rounding, not signal (float32 has 1e-7).
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group.

    Attributes:
        values: (G,) advantages, NaN for a member without a score; all NaN in a skipped group.
        status: "ok"; "skipped" with fewer than two scores; "degenerate" with equal scores, all advantages 0.
        missing: number of members without a score.
    """

    values: np.ndarray
    status: Literal["ok", "skipped", "degenerate"]
    missing: int


def group_advantages(
    scores: Sequence[float | None] | np.ndarray,
    standardize: bool = True,
    eps: float = 1e-4,
    source: str = "scores",
) -> GroupAdvantages:
    """A = (r - mean) / (std + eps) over the members that have a score; population std (arXiv 2608.12564).

    Scores count as equal when their standard deviation is at most 1e-6 * max(1, largest |score|).

    Args:
        scores: (G,) scores. None is a known gap; NaN and infinities are gaps too, but warned about.
        standardize: divide by the standard deviation; otherwise centre only.
        eps: added to the standard deviation, in score units.
        source: the grader that gave the scores, for the warning.

    Raises:
        ValueError: if `scores` is not one-dimensional.
    """
    numbers = isinstance(scores, np.ndarray) and scores.dtype != object
    known_gaps = 0 if numbers else sum(score is None for score in scores)
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"scores {scores.shape}: one group at a time, (G,)")
    present = np.isfinite(scores)
    missing = scores.size - int(np.count_nonzero(present))
    if missing > known_gaps:
        # The text holds no counts, so that Python's filter shows it once per grader and not at every step.
        warnings.warn(f"{source}: NaN or infinite scores are treated as missing", stacklevel=2)
    values = np.full(scores.shape, np.nan)
    kept = scores[present]
    if kept.size < 2:
        return GroupAdvantages(values, "skipped", missing)
    centred = kept - kept.sum() / kept.size
    std = math.sqrt(centred @ centred / kept.size)
    if std <= RELATIVE_TOLERANCE * max(1.0, np.abs(kept).max()):
        values[present] = 0.0
        return GroupAdvantages(values, "degenerate", missing)
    values[present] = centred / (std + eps) if standardize else centred
    return GroupAdvantages(values, "ok", missing)
