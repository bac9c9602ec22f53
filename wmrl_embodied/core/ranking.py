"""How well predicted scores rank executed ones. A policy gradient uses differences inside a group only, so that is
what counts; the pooled figure beside it mostly says which task or start is easy.

Missing scores are NaN and left out; a tie counts half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from wmrl_embodied.core.types import Group


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a random positive scores above a random negative, a tie counting half; NaN with one class.

    Args:
        scores: (N,) predictions.
        labels: (N,) 0 or 1. Graded outcomes work too: then every two unequal outcomes are a pair to order.
    """
    right, pairs = ordered_pairs(np.asarray(scores, np.float64), np.asarray(labels, np.float64))
    return right / pairs if pairs else math.nan


def in_group_auc(groups: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[float, int]:
    """AUC within groups, which is all a group-relative advantage can use.

    Args:
        groups: (scores (G,), labels (G,)) of each group.

    Returns:
        The mean AUC of the mixed groups weighted by their pairs (NaN if there are none), and how many groups
        were mixed, that is: had unequal outcomes.
    """
    right, pairs, mixed = 0.0, 0, 0
    for scores, labels in groups:
        scores, labels = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
        group_right, group_pairs = ordered_pairs(scores, labels)
        right, pairs, mixed = right + group_right, pairs + group_pairs, mixed + (group_pairs > 0)
    return (right / pairs if pairs else math.nan), mixed


def ordered_pairs(scores: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """How many pairs with unequal labels the scores order rightly (a tie is half), and how many there are."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"scores {scores.shape} and labels {labels.shape}: both must be (N,)")
    known = np.isfinite(scores) & np.isfinite(labels)
    scores, labels = scores[known], labels[known]
    values, counts = np.unique(labels, return_counts=True)
    pairs = (len(labels) ** 2 - int(np.sum(counts**2))) // 2
    right = 0.0
    for value in values[1:]:
        above, below = scores[labels == value], np.sort(scores[labels < value])
        wins = np.searchsorted(below, above, side="left")
        ties = np.searchsorted(below, above, side="right") - wins
        right += float(np.sum(wins + 0.5 * ties))
    return right, pairs


def ranking_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`auc_in_group` over all pairs inside groups, `auc_pooled` over all pairs, and how many groups were mixed.

    An area that no pair speaks for is left out.
    """
    inside, mixed = in_group_auc((group.predicted, group.executed) for group in groups)
    nothing = [np.zeros(0)]
    pooled = auc(
        np.concatenate(nothing + [group.predicted for group in groups]),
        np.concatenate(nothing + [group.executed for group in groups]),
    )
    areas = {"auc_in_group": inside, "auc_pooled": pooled}
    return {"mixed_groups": float(mixed)} | {
        name: area for name, area in areas.items() if not math.isnan(area)
    }
