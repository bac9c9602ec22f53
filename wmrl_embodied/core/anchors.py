"""Which groups are executed for real, and the budget of executions that the whole run may spend.

Draws at random, independently of any score: the rectified estimators need that to stay unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AnchorSchedule:
    """A fixed share of the groups of each step, as published: a floor, a cap, and never past the budget.

    Attributes:
        fraction: share of the groups, in [0, 1]; 0 means no anchors, whatever the floor.
        floor: least number of anchors per step, while the step has that many groups and the budget lasts.
        cap: largest number of anchors per step (what can be in flight at once), None for no limit.
        budget: executed trajectories that the whole run may spend, None for no limit.
    """

    fraction: float
    floor: int = 1
    cap: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if not 0 <= self.fraction <= 1:  # also catches NaN
            raise ValueError(f"anchor_fraction={self.fraction}: must be in [0, 1]")
        if self.floor < 0:
            raise ValueError(f"anchor_floor={self.floor}: must be at least 0")
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"anchor_cap={self.cap}: must be at least anchor_floor={self.floor}")
        if self.budget is not None and self.budget < 0:
            raise ValueError(
                f"anchor_budget={self.budget}: must be at least 0 executions, or null for no limit"
            )

    def choose(
        self, n_groups: int, rng: np.random.Generator, spent: int = 0, group_size: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the anchors of one step, uniformly without replacement.

        Args:
            n_groups: number of groups m of the step.
            rng: source of the draw; key it by seed and step.
            spent: executed trajectories of the run so far (`Ledger.executions`).
            group_size: trajectories that one anchor executes; only whole groups are bought.

        Returns:
            (m,) bool, the anchors; and (m,) float, the probability with which each group was one.

        Raises:
            ValueError: if `n_groups` is negative or `group_size` below 1.
        """
        if n_groups < 0:
            raise ValueError(f"n_groups={n_groups}: must be at least 0")
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: must be at least 1")
        count = 0
        if self.fraction > 0:
            # Halves go up: Python's round() would make 0.5 group no anchor and 1.5 groups two.
            count = max(int(self.fraction * n_groups + 0.5), self.floor)
        count = min(count, n_groups)
        if self.cap is not None:
            count = min(count, self.cap)
        if self.budget is not None:
            count = min(count, max(self.budget - spent, 0) // group_size)
        chosen = np.zeros(n_groups, dtype=bool)
        chosen[rng.choice(n_groups, size=count, replace=False)] = True
        return chosen, np.full(n_groups, count / max(n_groups, 1))
