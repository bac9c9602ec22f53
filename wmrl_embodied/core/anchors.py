"""Which groups are executed for real, and the budget of executions that the whole run may spend.

Whatever the strategy, every group's probability of being executed is known exactly: the rectified estimators need
that to stay unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.choices import unknown
from wmrl_embodied.core.streams import GroupCorrelation

STRATEGIES = ("random", "uncertain", "gate")


@dataclass(frozen=True)
class AnchorSchedule:
    """How many groups of a step are executed, and which; never past the budget.

    The strategies:
        random: uniform draws, as published.
        uncertain: with a probability that grows with the world model's uncertainty of the group. Where it errs
            most, truth is worth most.
        gate: only groups of which the world model is uncertain by more than `gate`, all of them if `cap` and budget
            allow. The others are never executed, so no estimator can see the model's bias on them.

    Attributes:
        fraction: share of the groups, in [0, 1]; 0 means no anchors, whatever the floor. "auto" takes the share that
            costs and correlation ask for (`ShareRule`). `gate` does not look at it.
        floor: least number of anchors per step, while the step has that many groups and the budget lasts; not of
            `gate`.
        cap: largest number of anchors per step (what can be in flight at once), None for no limit.
        budget: executed trajectories that the whole run may spend, None for no limit.
        strategy: one of the above.
        gate: root mean predicted variance, in score units, above which `gate` executes a group.
        uniform_share: of `uncertain`, the part of the probability that does not depend on uncertainty. It bounds the
            weight 1 / probability of a group that was thought certain.
    """

    fraction: float | Literal["auto"]
    floor: int = 1
    cap: int | None = None
    budget: int | None = None
    strategy: str = "random"
    gate: float = 0.1
    uniform_share: float = 0.5

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if self.fraction != "auto" and (isinstance(self.fraction, str) or not 0 <= self.fraction <= 1):
            raise ValueError(f"anchor_fraction={self.fraction}: must be in [0, 1], or auto")
        if self.floor < 0:
            raise ValueError(f"anchor_floor={self.floor}: must be at least 0")
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"anchor_cap={self.cap}: must be at least anchor_floor={self.floor}")
        if self.budget is not None and self.budget < 0:
            raise ValueError(
                f"anchor_budget={self.budget}: must be at least 0 executions, or null for no limit"
            )
        if self.strategy not in STRATEGIES:
            raise unknown("anchors.strategy", self.strategy, STRATEGIES)
        if not self.gate >= 0:
            raise ValueError(f"gate={self.gate}: must be at least 0")
        if not 0 < self.uniform_share <= 1:
            raise ValueError(f"uniform_share={self.uniform_share}: must be in (0, 1]")

    @property
    def looks(self) -> bool:
        """Whether groups must be imagined before the anchors are chosen."""
        return self.strategy != "random"

    def choose(
        self,
        n_groups: int,
        rng: np.random.Generator,
        spent: int = 0,
        group_size: int = 1,
        uncertainty: ArrayLike | None = None,
        share: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the anchors of one step, without replacement.

        Args:
            n_groups: number of groups m of the step.
            rng: source of the draw; key it by seed and step.
            spent: executed trajectories of the run so far (`Ledger.executions`).
            group_size: trajectories that one anchor executes; only whole groups are bought.
            uncertainty: (m,) root mean predicted variance of each group, score units; NaN counts as the largest.
                Needed unless the strategy is `random`.
            share: in place of `fraction` where that is "auto".

        Returns:
            (m,) bool, the anchors; and (m,) float, the probability with which each group was one.

        Raises:
            ValueError: if `n_groups` is negative, `group_size` below 1, or what the settings need is missing.
        """
        if n_groups < 0:
            raise ValueError(f"n_groups={n_groups}: must be at least 0")
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: must be at least 1")
        fraction = share if self.fraction == "auto" else self.fraction
        if fraction is None:
            raise ValueError("fraction=auto: give choose() the share, for instance of a ShareRule")
        if self.looks:
            uncertainty = self._known(uncertainty, n_groups)
        wanted = uncertainty if self.looks else np.ones(n_groups)
        if self.strategy == "gate":
            wanted = (wanted > self.gate).astype(np.float64)
            count = int(wanted.sum())
        else:
            # Halves go up: Python's round() would make 0.5 group no anchor and 1.5 groups two.
            none = self.fraction == 0
            count = 0 if none else min(max(int(fraction * n_groups + 0.5), self.floor), n_groups)
        if self.cap is not None:
            count = min(count, self.cap)
        if self.budget is not None:
            count = min(count, max(self.budget - spent, 0) // group_size)
        if self.strategy == "uncertain" and wanted.sum() > 0:
            uniform = np.full(n_groups, 1 / n_groups)
            wanted = self.uniform_share * uniform + (1 - self.uniform_share) * wanted / wanted.sum()
        elif self.strategy == "uncertain":
            wanted = np.ones(n_groups)
        probability = inclusion_probabilities(wanted, count)
        if self.looks:
            return systematic_sample(probability, rng), probability
        chosen = np.zeros(n_groups, dtype=bool)
        chosen[rng.choice(n_groups, size=count, replace=False)] = True
        return chosen, probability

    def _known(self, uncertainty: ArrayLike | None, n_groups: int) -> np.ndarray:
        known = np.full(n_groups, np.nan) if uncertainty is None else np.asarray(uncertainty, np.float64)
        if known.shape != (n_groups,):
            raise ValueError(f"uncertainty {known.shape}: must be ({n_groups},), one for each group")
        if n_groups and not np.isfinite(known).any():
            raise ValueError(
                f"strategy={self.strategy}: the world model gives no predicted_variance; use strategy=random"
            )
        return np.where(np.isfinite(known), known, np.nanmax(known)) if n_groups else known


def inclusion_probabilities(wanted: ArrayLike, count: int) -> np.ndarray:
    """Probabilities proportional to size, at most 1, that sum to `count` (Horvitz and Thompson 1952).

    Args:
        wanted: (m,) sizes, not negative; 0 is never drawn.
        count: number of draws, at most the number of sizes above 0.

    Returns:
        (m,) probabilities.
    """
    wanted = np.asarray(wanted, np.float64)
    probability = np.zeros(len(wanted))
    certain = np.zeros(len(wanted), bool)
    # What exceeds 1 is drawn for certain; the rest share what is left. Ends, for every round adds to the certain ones.
    while count > certain.sum():
        open_ = ~certain & (wanted > 0)
        left = count - certain.sum()
        probability = np.where(certain, 1.0, 0.0)
        probability[open_] = left * wanted[open_] / wanted[open_].sum()
        over = open_ & (probability >= 1)
        if not over.any():
            return probability
        certain |= over
    return np.where(certain, 1.0, 0.0)


def systematic_sample(probability: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(m,) bool: a draw of fixed size in which every element has exactly its probability (Madow 1949).

    In random order, so that with equal probabilities every set of that size is equally likely.
    """
    order = rng.permutation(len(probability))
    ends = np.cumsum(probability[order])
    # Rounding in the sum would now and then lose or add a draw.
    count = round(float(ends[-1])) if len(ends) else 0
    chosen = np.zeros(len(probability), bool)
    points = rng.uniform() + np.arange(count)
    chosen[order[np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1)]] = True
    return chosen


class ShareRule:
    """The share of executed groups with the least variance for the time it takes, from costs and correlation.

    With rho the correlation of executed and predicted advantages inside groups and c the seconds that an attempt
    takes, executed over imagined: of m groups sqrt((1 - rho^2) / (c rho^2)) m are executed, at most all. (Optimal
    allocation of a control variate with two costs: two-level Monte Carlo, Giles 2008.)

    Attributes:
        seconds: spent so far on executing and on imagining.
        attempts: executed and imagined so far.
    """

    def __init__(self, start: float = 0.1, half_life: float = 64.0, min_groups: int = 8) -> None:
        """Start with the share `start`, until `min_groups` groups that differ inside were seen by both.

        Args:
            start: share before anything is known.
            half_life: groups after which what was measured counts half.
            min_groups: see above.
        """
        self._start, self._min_groups = start, min_groups
        self._correlation = GroupCorrelation(half_life)
        self.seconds = {"execute": 0.0, "imagine": 0.0}
        self.attempts = {"execute": 0, "imagine": 0}

    def observe(self, executed: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Count in (predicted, executed) scores (G,) of the groups of one step."""
        self._correlation.observe(executed)

    def spend(self, part: Literal["execute", "imagine"], seconds: float, attempts: int) -> None:
        """Count in what a step's executing or imagining took."""
        self.seconds[part] += seconds
        self.attempts[part] += attempts

    @property
    def correlation(self) -> float:
        """rho, see the class; 0 while unknown."""
        return self._correlation.value

    @property
    def cost_ratio(self) -> float:
        """c, see the class; NaN while unknown."""
        if not all(self.attempts.values()) or not all(value > 0 for value in self.seconds.values()):
            return float("nan")
        return (
            self.seconds["execute"]
            / self.attempts["execute"]
            / (self.seconds["imagine"] / self.attempts["imagine"])
        )

    @property
    def share(self) -> float:
        """Of the groups to execute, in [0, 1]."""
        if self._correlation.groups < self._min_groups or not np.isfinite(self.cost_ratio):
            return self._start
        squared = max(self.correlation, 0.0) ** 2
        return min(1.0, float(np.sqrt((1 - squared) / (self.cost_ratio * squared)))) if squared else 1.0

    def metrics(self) -> dict[str, float]:
        """Share, correlation and cost ratio."""
        return {"share": self.share, "correlation": self.correlation, "cost_ratio": self.cost_ratio}

    def state_dict(self) -> dict[str, Any]:
        """State in JSON's types."""
        return {
            "correlation": self._correlation.state_dict(),
            "seconds": dict(self.seconds),
            "attempts": dict(self.attempts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self._correlation.load_state_dict(state["correlation"])
        self.seconds, self.attempts = dict(state["seconds"]), dict(state["attempts"])
