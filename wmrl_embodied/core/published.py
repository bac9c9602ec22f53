"""The published estimators (arXiv 2608.12564): executed and predicted scores mixed as one row of a table says.

Knows scores only; the policy, and how groups come about, are not its business.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.advantages import group_advantages
from wmrl_embodied.core.denoise import make_anchor_weight
from wmrl_embodied.core.task_maps import TaskMaps, pairs_by_task
from wmrl_embodied.core.types import Group
from wmrl_embodied.core.weighted import Weighted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """One row of the published comparison.

    Attributes:
        executes: which groups are judged by their executed scores.
        predicts: whether the other groups are judged by their predicted scores, or thrown away.
        debias: whether predicted scores go through the monotone map.
        denoise: whether anchors weigh more by the running disagreement.
    """

    executes: Literal["all", "anchors", "none"]
    predicts: bool = False
    debias: bool = False
    denoise: bool = False


ARMS = {
    "real": Arm("all"),
    "real_small": Arm("anchors"),
    "raw": Arm("none", predicts=True),
    "mixed": Arm("anchors", predicts=True),
    "debias": Arm("anchors", predicts=True, debias=True),
    "denoise": Arm("anchors", predicts=True, denoise=True),
    "wmrl": Arm("anchors", predicts=True, debias=True, denoise=True),
}


# What happens to a group, each a metric: which stream judges it, and why it carries no gradient.
_COUNTED = ("executed", "predicted", "unused", "skipped", "degenerate", "gated")


class ArmEstimator:
    """The published estimators (arXiv 2608.12564), each one row of `ARMS`."""

    def __init__(
        self,
        name: str,
        standardize: bool = True,
        eps: float = 1e-4,
        spread_gate: float = 0.0,
        cross_fit: bool = False,
        debias: Mapping[str, Any] | None = None,
        denoise: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the estimator of one arm.

        Args:
            name: a key of `ARMS`.
            standardize: divide by the group's standard deviation; otherwise centre only.
            eps: added to that standard deviation, in score units.
            spread_gate: number of predicted standard deviations that the spread of a predicted group must
                exceed to count; see `spread_weight`. 0 is off, as published.
            cross_fit: measure the anchors' disagreement by the map as it was before it saw their pairs. A map looks
                better on the pairs it was fitted on than it is; as published it is measured on them.
            debias: settings of `TaskMaps` and its `MonotoneMap`s.
            denoise: settings of `DisagreementWeight`, or with `kind="variance"` of `VarianceWeight`.

        Raises:
            ValueError: if `spread_gate` is negative or not finite.
        """
        if not 0 <= spread_gate < np.inf:
            raise ValueError(f"spread_gate={spread_gate}: must be finite and at least 0 (0 is off)")
        self.name = name
        self.standardize = standardize
        self.eps = eps
        self.spread_gate = spread_gate
        self.cross_fit = cross_fit
        self._arm = ARMS[name]
        self.executes_all = self._arm.executes == "all"
        self.uses_anchors = self._arm.executes == "anchors"
        self.uses_predictions = self._arm.predicts
        # Built in every arm, so that a typing error in their settings shows in every arm.
        self.map = TaskMaps(**(debias or {}))
        self.anchor_weight = make_anchor_weight(standardize=standardize, **(denoise or {}))

    def observe(self, anchor_groups: Sequence[Group]) -> None:
        """Push the pairs of all anchors into the map, then measure the disagreement that is left.

        Args:
            anchor_groups: the executed groups of one step, with both scores; missing ones are ignored.
        """
        if self._arm.denoise and self.cross_fit:
            self.anchor_weight.observe_groups(anchor_groups, self.calibrate)
        if self._arm.debias:
            self.map.observe(pairs_by_task(anchor_groups))
        if self._arm.denoise and not self.cross_fit:
            self.anchor_weight.observe_groups(anchor_groups, self.calibrate)

    def calibrate(self, predicted: ArrayLike, task: str = "") -> np.ndarray:
        """Predicted scores through the map where the arm debiases, else as they are; NaN stays NaN."""
        return self.map(predicted, task) if self._arm.debias else np.array(predicted, dtype=np.float64)

    def advantages(self, groups: Sequence[Group]) -> Weighted:
        """Weighted advantages of all groups of one step.

        Args:
            groups: groups of any sizes. Those with `anchor` set count as executed where the arm uses anchors.
        """
        advantages = [np.zeros(len(group)) for group in groups]
        contributes = [np.zeros(len(group), dtype=bool) for group in groups]
        count = Counter(dict.fromkeys(_COUNTED, 0))
        missing, predicted_weights = 0, []
        calibrated = self._calibrated(groups)
        for place, (group, values, used) in enumerate(zip(groups, advantages, contributes, strict=True)):
            stream = self._stream(group)
            count[stream] += 1
            if stream == "unused":
                continue
            scores, grader = (
                (group.executed, "grader") if stream == "executed" else (calibrated[place], "world model")
            )
            source = f"{grader} of task {group.context.task!r}"
            result = group_advantages(scores, self.standardize, self.eps, source)
            missing += result.missing
            if result.status != "ok":
                count[result.status] += 1
                continue
            weight = self._weight(stream, scores, group)
            if stream == "predicted":
                predicted_weights.append(weight)
            if weight == 0:
                count["gated"] += 1
                continue
            used[:] = np.isfinite(result.values)
            values[used] = weight * result.values[used]
        members = sum(int(used.sum()) for used in contributes)
        if groups and members == 0:
            logger.warning("no group carries a gradient, nothing to learn from this step: %s", dict(count))
        metrics = {
            **{f"{what}_groups": float(number) for what, number in count.items()},
            "missing_members": float(missing),
            "contributing_members": float(members),
            "predicted_weight": float(np.mean(predicted_weights)) if predicted_weights else 0.0,
        }
        if self._arm.debias:
            metrics |= {f"map/{key}": value for key, value in self.map.metrics().items()}
        if self._arm.denoise:
            metrics |= {f"anchor/{key}": value for key, value in self.anchor_weight.metrics().items()}
        return Weighted(advantages, contributes, metrics)

    def state_dict(self) -> dict[str, Any]:
        """State of the map and of the anchor weight, in JSON's types."""
        return {"map": self.map.state_dict(), "anchor_weight": self.anchor_weight.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.map.load_state_dict(state["map"])
        self.anchor_weight.load_state_dict(state["anchor_weight"])

    def _calibrated(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Calibrated predicted scores of every group; one pass through the map for each task."""
        found: list[np.ndarray] = [np.zeros(0)] * len(groups)
        for task in dict.fromkeys(group.context.task for group in groups):
            places = [place for place, group in enumerate(groups) if group.context.task == task]
            own = [groups[place].predicted for place in places]
            ends = np.cumsum([len(scores) for scores in own])[:-1]
            for place, part in zip(
                places, np.split(self.calibrate(np.concatenate(own), task), ends), strict=True
            ):
                found[place] = part
        return found

    def _stream(self, group: Group) -> Literal["executed", "predicted", "unused"]:
        if self.executes_all or (self.uses_anchors and group.anchor):
            return "executed"
        return "predicted" if self._arm.predicts else "unused"

    def _weight(self, stream: str, scores: np.ndarray, group: Group) -> float:
        if stream == "executed":
            return self.anchor_weight.weight if self._arm.denoise else 1.0
        return spread_weight(scores, group.predicted_variance, self.spread_gate)


def spread_weight(calibrated: np.ndarray, variance: np.ndarray, gate: float) -> float:
    """Weight in [0, 1] of a predicted group whose spread may be no more than the world model's uncertainty.

    The spread of predicted scores is signal plus noise. Shrinkage towards no signal (James and Stein,
    positive part) leaves 1 - gate^2 * mean(variance) / var(calibrated): near 1 for a clear ranking, 0 for a
    spread of up to `gate` predicted standard deviations. Without a predicted variance there is nothing to
    hold the spread against, and the weight is 1.

    Args:
        calibrated: (G,) calibrated predicted scores, NaN where missing.
        variance: (G,) predicted variances, NaN where missing.
        gate: number of predicted standard deviations; 0 is off.
    """
    scored = np.isfinite(calibrated)
    known = scored & np.isfinite(variance)
    if gate == 0 or not known.any():
        return 1.0
    spread = np.var(calibrated[scored])
    if spread == 0:
        return 0.0
    return float(np.clip(1 - gate**2 * np.mean(variance[known]) / spread, 0, 1))
