"""Alarm when the world model gets worse: errors on fresh pairs leave the band of earlier ones.

Knows one number a step; what to do about it is said in the log line, and done by whoever runs the training.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


class DriftAlarm:
    """Compares the mean error of the latest steps with the steps before them.

    Attributes:
        score: latest mean minus earlier mean, in standard errors of that difference; 0 until both are known.
        alarms: number of alarms so far. After one, the band is learned anew.
    """

    def __init__(self, threshold: float | None = 5.0, recent: int = 4, before: int = 32) -> None:
        """Start without errors.

        Args:
            threshold: standard errors at which it goes off; None is off.
            recent: steps whose mean is compared.
            before: most steps that they are compared with; at least 8 are waited for.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if threshold is not None and not threshold > 0:
            raise ValueError(f"drift_threshold={threshold}: must be above 0, or null for no alarm")
        if recent < 1 or before < 8:
            raise ValueError(f"recent={recent}, before={before}: must be at least 1 and 8")
        self.threshold, self.recent = threshold, recent
        self.score, self.alarms = 0.0, 0
        self._errors: deque[float] = deque(maxlen=recent + before)

    def observe(self, error: float) -> None:
        """Count in the mean squared error of one step's fresh predictions, made before they were learned from."""
        self._errors.append(float(error))
        self.score = 0.0
        if self.threshold is None or len(self._errors) < self.recent + 8:
            return
        errors = np.array(self._errors)
        earlier, latest = errors[: -self.recent], errors[-self.recent :]
        spread = np.sqrt(earlier.var(ddof=1) * (1 / len(latest) + 1 / len(earlier)))
        rise = latest.mean() - earlier.mean()
        # An error that never varied has no band; what rounds differently is no drift.
        self.score = float(rise / max(spread, 1e-3 * earlier.mean(), np.finfo(np.float64).tiny))
        if self.score <= self.threshold:
            return
        self.alarms += 1
        logger.warning(
            "drift: squared error of fresh predictions rose from %.3g to %.3g (%.1f standard errors): the world model "
            "has lost the policy, or learned something wrong. Raise anchors.fraction or world_model.steps; a map "
            "follows faster with a shorter debias.half_life; correction=rectified trains on without its bias",
            earlier.mean(),
            latest.mean(),
            self.score,
        )
        self._errors = deque(latest.tolist(), maxlen=self._errors.maxlen)

    def state_dict(self) -> dict[str, Any]:
        """State in plain lists and numbers, exact through JSON."""
        return {"errors": list(self._errors), "score": self.score, "alarms": self.alarms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self._errors = deque(state["errors"], maxlen=self._errors.maxlen)
        self.score, self.alarms = float(state["score"]), int(state["alarms"])
