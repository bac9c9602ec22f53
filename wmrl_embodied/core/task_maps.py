"""A monotone map for every task, drawn towards the one that all share while the task has few pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.debias import MonotoneMap
from wmrl_embodied.core.drift import DriftAlarm
from wmrl_embodied.core.types import Group


class TaskMaps:
    """Online debiasing of the scores of several tasks.

    With n_t pairs of task t and k = `shrink_pairs`, the map of a task is n_t / (n_t + k) times its own plus the rest
    times the shared one: empirical Bayes with a prior worth k pairs. Convex, so it is as monotone as its parts.
    Without `shrink_pairs` there is the shared map alone, as published.

    Attributes:
        shared: of all pairs.
        tasks: name -> the map of its pairs.
        drift: alarm on the squared error of fresh calibrated predictions.
    """

    def __init__(
        self, shrink_pairs: float | None = None, drift_threshold: float | None = 5.0, **settings: Any
    ) -> None:
        """Start with identities.

        Args:
            shrink_pairs: see the class, None for no maps of tasks.
            drift_threshold: of `DriftAlarm`, None for no alarm.
            **settings: of every `MonotoneMap`.

        Raises:
            ValueError: for a number out of range.
        """
        if shrink_pairs is not None and not 0 <= shrink_pairs < np.inf:
            raise ValueError(
                f"shrink_pairs={shrink_pairs}: must be at least 0, or null for one map of all tasks"
            )
        self.shared = MonotoneMap(**settings)
        self.tasks: dict[str, MonotoneMap] = {}
        self.drift = DriftAlarm(drift_threshold)
        self._shrink = shrink_pairs
        self._settings = settings

    def __call__(self, predicted: ArrayLike, task: str = "") -> np.ndarray:
        """Calibrated scores of one task, same shape as `predicted`; NaN passes through."""
        shared, own = self.shared(predicted), self.tasks.get(task)
        if own is None or own.knots is None:
            return shared
        share = len(own) / (len(own) + self._shrink)
        return share * own(predicted) + (1 - share) * shared

    def observe(self, pairs: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> None:
        """Keep the new anchor pairs of one step, and refit where enough are new.

        Args:
            pairs: task -> (N,) predicted scores as the world model gave them and (N,) executed scores. A pair with a
                missing side is ignored.

        Raises:
            ValueError: as `MonotoneMap.observe`.
        """
        if not pairs:
            return
        if self.shared.fits:  # an identity of raw scores would be alarmed by the first fit, as a fall
            errors = [np.square(np.asarray(y) - self(x, task)).ravel() for task, (x, y) in pairs.items()]
            known = np.concatenate(errors)
            known = known[np.isfinite(known)]
            if known.size:
                self.drift.observe(known.mean())
        predicted, executed = (
            np.concatenate([np.ravel(np.asarray(pair[side], np.float64)) for pair in pairs.values()])
            for side in (0, 1)
        )
        self.shared.observe(predicted, executed)
        if self._shrink is None:
            return
        for task, pair in pairs.items():
            self.tasks.setdefault(task, MonotoneMap(**self._settings)).observe(*pair)

    def metrics(self) -> dict[str, float]:
        """Those of the shared map, the drift's score and alarms, and how many tasks have a map of their own."""
        values = {**self.shared.metrics(), "drift": self.drift.score, "alarms": float(self.drift.alarms)}
        if self._shrink is not None:
            values["tasks_fitted"] = float(sum(own.knots is not None for own in self.tasks.values()))
        return values

    def state_dict(self) -> dict[str, Any]:
        """State in JSON's types."""
        return {
            "shared": self.shared.state_dict(),
            "tasks": {task: own.state_dict() for task, own in self.tasks.items()},
            "drift": self.drift.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.shared.load_state_dict(state["shared"])
        self.tasks = {}
        for task, own in state["tasks"].items():
            self.tasks[task] = MonotoneMap(**self._settings)
            self.tasks[task].load_state_dict(own)
        self.drift.load_state_dict(state["drift"])


def pairs_by_task(groups: Sequence[Group]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Task -> predicted and executed scores of all members of its groups."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.context.task, []).append(group)
    return {
        task: (
            np.concatenate([group.predicted for group in own]),
            np.concatenate([group.executed for group in own]),
        )
        for task, own in found.items()
    }
