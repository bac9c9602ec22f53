"""How well predicted scores rank executed ones. A policy gradient uses differences inside a group only, so that is
what counts; the pooled figure beside it mostly says which task or start is easy.

Knows groups that have both scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wmrl_embodied.core.types import Group


def ordered_pairs(predicted: np.ndarray, executed: np.ndarray) -> tuple[float, int]:
    """How many pairs of unequal executed score the prediction orders rightly (a tie is half), and of how many.

    Args:
        predicted: (N,), NaN where missing.
        executed: (N,), NaN where missing.
    """
    known = np.isfinite(predicted) & np.isfinite(executed)
    predicted, executed = predicted[known], executed[known]
    better = executed[:, None] > executed
    right = (predicted[:, None] > predicted) + 0.5 * (predicted[:, None] == predicted)
    return float(right[better].sum()), int(better.sum())


def ranking_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`auc_in_group` over all pairs inside groups, `auc_pooled` over all pairs, `mixed_groups` that have a pair.

    An area that no pair speaks for is left out. For scores of 0 and 1 it is the area under the ROC curve.
    """
    inside = [ordered_pairs(group.predicted, group.executed) for group in groups]
    metrics = {"mixed_groups": float(sum(pairs > 0 for _, pairs in inside))}
    if any(pairs for _, pairs in inside):
        metrics["auc_in_group"] = sum(right for right, _ in inside) / sum(pairs for _, pairs in inside)
    if groups:
        right, pairs = ordered_pairs(
            np.concatenate([group.predicted for group in groups]),
            np.concatenate([group.executed for group in groups]),
        )
        if pairs:
            metrics["auc_pooled"] = right / pairs
    return metrics
