"""What every estimator gives and offers: weighted advantages of the groups of one step.

Knows no estimator; the published ones are in `published.py`, ours in `rectified.py`, their names in `estimators.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.types import Group


@dataclass
class Weighted:
    """What an estimator makes of the groups of one step.

    Attributes:
        advantages: for each group (G,) weighted advantages, never NaN; 0 for who does not contribute.
        contributes: for each group (G,) bool, the members that carry a score in a group with a gradient.
        metrics: counts and weights, for the log.
        replayed: groups of earlier steps to learn from again in this one, each with (G,) advantages.
    """

    advantages: list[np.ndarray]
    contributes: list[np.ndarray]
    metrics: dict[str, float]
    replayed: list[tuple[Group, np.ndarray]] = field(default_factory=list)


class Estimator(Protocol):
    """Turns the groups of a step into advantages, and learns its corrections from the anchors.

    Attributes:
        name: the name in the configuration.
        executes_all: every group is executed; no schedule is asked.
        uses_anchors: the schedule picks groups to execute.
        uses_predictions: groups that are not executed take part with their predicted scores.
    """

    name: str
    executes_all: bool
    uses_anchors: bool
    uses_predictions: bool

    def observe(self, anchor_groups: Sequence[Group]) -> None:
        """Learn from the groups of one step that have both scores. Call it before `advantages`."""
        ...

    def calibrate(self, predicted: ArrayLike, task: str = "") -> np.ndarray:
        """Predicted scores of a task as this estimator corrects them, same shape; NaN stays NaN."""
        ...

    def advantages(self, groups: Sequence[Group]) -> Weighted:
        """Weighted advantages of all groups of one step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON's types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...
