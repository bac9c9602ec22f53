"""Inverse-variance denoising: how much heavier an anchor group weighs than a predicted one.

As published, from how much scores disagree (`DisagreementWeight`), or from measured variances (`VarianceWeight`).
Knows calibrated and executed scores of anchor groups; advantages are multiplied elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.advantages import group_advantages
from wmrl_embodied.core.choices import unknown
from wmrl_embodied.core.streams import GroupCorrelation, StreamMoments
from wmrl_embodied.core.types import Group

Calibrate = Callable[[ArrayLike, str], np.ndarray]
"""(G,) predicted scores and their task -> calibrated ones."""

logger = logging.getLogger(__name__)

# Below this variance of the executed scores a group has no spread to compare with (published).
MIN_VARIANCE = 1e-9
# A world model that agrees this well gives no scale to divide by; the weight then stays 1.
MIN_DISAGREEMENT = 1e-12


def disagreement(calibrated: ArrayLike, executed: ArrayLike) -> float | None:
    """Within-group disagreement of predicted and executed scores (arXiv 2608.12564).

    s2 = mean(((d - mean d) - (s - mean s))^2) / var(s), over the members that have both scores.

    Args:
        calibrated: (G,) calibrated predicted scores d, NaN where missing.
        executed: (G,) executed scores s, NaN where missing.

    Returns:
        s2, or None where var(s) < 1e-9: a group without spread says nothing.

    Raises:
        ValueError: for unequal shapes.
    """
    d, s = np.asarray(calibrated, np.float64), np.asarray(executed, np.float64)
    if d.shape != s.shape:
        raise ValueError(f"calibrated {d.shape} and executed {s.shape} must have the same shape")
    both = np.isfinite(d) & np.isfinite(s)
    d, s = d[both], s[both]
    if d.size < 2 or np.var(s) < MIN_VARIANCE:
        return None
    return float(np.var(d - s) / np.var(s))


class DisagreementWeight:
    """Weight of anchor advantages from the running disagreement, as published (arXiv 2608.12564).

    The average starts at the first observation and moves by 1 - 2^(-1/half_life) of each difference. Once
    `min_observations` groups were seen, c = (target - 1) / average is fixed for good, and the weight is
    clip(1 + c * average, 1, max_weight); before that it is 1. Should the average be zero at that moment (a
    perfect world model), c waits for the first group that disagrees.

    Attributes:
        average: running average of s2, None before the first observation.
        observations: number of groups that had a spread.
        scale: the constant c, None until it is fixed.
    """

    def __init__(
        self,
        half_life: float = 64.0,
        min_observations: int = 32,
        target: float = 2.0,
        max_weight: float = 4.0,
    ) -> None:
        """Start at weight 1; the defaults are the published numbers.

        Args:
            half_life: groups after which an observation counts half.
            min_observations: groups before the scale is fixed.
            target: weight at the moment when the scale is fixed.
            max_weight: upper limit of the weight.

        Raises:
            ValueError: for a number out of range.
        """
        if not half_life > 0:
            raise ValueError(f"half_life={half_life}: must be above 0 groups")
        if min_observations < 1:
            raise ValueError(f"min_observations={min_observations}: must be at least 1")
        if not 1 <= target <= max_weight:
            raise ValueError(f"target={target}: must be in [1, max_weight={max_weight}]")
        self.min_observations = min_observations
        self.target = target
        self.max_weight = max_weight
        self._rate = 1 - 2 ** (-1 / half_life)
        self.average: float | None = None
        self.observations = 0
        self.scale: float | None = None

    @property
    def weight(self) -> float:
        """Factor of the anchor advantages, in [1, max_weight]."""
        if self.scale is None or self.average is None:
            return 1.0
        return float(np.clip(1 + self.scale * self.average, 1, self.max_weight))

    def observe_groups(self, groups: Sequence[Group], calibrate: Calibrate) -> None:
        """Count the anchor groups of one step in, after their pairs went into the map."""
        for group in groups:
            self.observe(calibrate(group.predicted, group.context.task), group.executed)

    def observe(self, calibrated: ArrayLike, executed: ArrayLike) -> None:
        """Count one anchor group in; the arguments are those of `disagreement`.

        Push the group's pairs into the map first, so that the residual is the calibrated one.
        """
        s2 = disagreement(calibrated, executed)
        if s2 is None:
            return
        self.observations += 1
        self.average = s2 if self.average is None else self.average + self._rate * (s2 - self.average)
        ready = self.scale is None and self.observations >= self.min_observations
        if ready and self.average > MIN_DISAGREEMENT:
            self.scale = (self.target - 1) / self.average
            logger.info("anchor weight: c=%.4g fixed at disagreement %.4g", self.scale, self.average)

    def metrics(self) -> dict[str, float]:
        """Weight, running disagreement (0 before the first group), groups observed and the scale if fixed."""
        values = {
            "weight": self.weight,
            "average": self.average or 0.0,
            "observations": float(self.observations),
        }
        return values if self.scale is None else {**values, "scale": self.scale}

    def state_dict(self) -> dict[str, Any]:
        """State in plain numbers, exact through JSON."""
        return {"average": self.average, "observations": self.observations, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.average, self.scale = state["average"], state["scale"]
        self.observations = int(state["observations"])


class VarianceWeight:
    """Inverse-variance weight of an anchor group, V_p / V_e, from measured variances of both streams.

    V_e and V_p are the traces of the covariance of one group's gradient by executed and by predicted scores
    (`StreamMoments`; of its advantages where trajectories carry no gradient of their log-probability). So
    weighted, the mean of n_e anchor and n_p predicted groups has variance 1 / (n_e / V_e + n_p / V_p), less than
    either stream alone (the inverse-variance weighted mean). Unlike the published weight it may fall below 1: a
    world model that predicts expected scores is less noisy than a coin that lands 0 or 1. It does not look at bias.
    """

    def __init__(
        self,
        standardize: bool = True,
        half_life: float = 64.0,
        min_observations: int = 32,
        max_weight: float = 4.0,
    ) -> None:
        """Start at weight 1.

        Args:
            standardize: whether advantages are divided by their group's standard deviation.
            half_life: groups after which an observation counts half.
            min_observations: groups before the weight is anything but 1.
            max_weight: upper limit of the weight; its inverse is the lower limit.

        Raises:
            ValueError: for a number out of range.
        """
        _check(min_observations, max_weight)
        self.moments = StreamMoments(half_life)
        self.observations = 0
        self._standardize = standardize
        self._min_observations = min_observations
        self._max_weight = max_weight

    @property
    def weight(self) -> float:
        """Factor of the anchor advantages, in [1 / max_weight, max_weight]."""
        variance = self.moments.covariances()
        if self.observations < self._min_observations or variance["ee"] == 0:
            return 1.0
        return float(np.clip(variance["pp"] / variance["ee"], 1 / self._max_weight, self._max_weight))

    def observe_groups(self, groups: Sequence[Group], calibrate: Calibrate) -> None:
        """Count the anchor groups of one step in, after their pairs went into the map."""
        self.moments.fade(len(groups))
        for group in groups:
            task = f"of task {group.context.task!r}"
            predicted, executed = (
                group_advantages(scores, self._standardize, source=f"{grader} {task}")
                for scores, grader in (
                    (calibrate(group.predicted, group.context.task), "world model"),
                    (group.executed, "grader"),
                )
            )
            if "skipped" in (predicted.status, executed.status):
                continue
            self.moments.observe(
                np.nan_to_num(executed.values), np.nan_to_num(predicted.values), group.log_prob_gradient
            )
            self.observations += 1

    def metrics(self) -> dict[str, float]:
        """Weight, both variances and the groups observed."""
        variance = self.moments.covariances()
        return {
            "weight": self.weight,
            "variance_executed": variance["ee"],
            "variance_predicted": variance["pp"],
            "observations": float(self.observations),
        }

    def state_dict(self) -> dict[str, Any]:
        """State in plain numbers, exact through JSON."""
        return {"moments": self.moments.state_dict(), "observations": self.observations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.moments.load_state_dict(state["moments"])
        self.observations = int(state["observations"])


class CorrelationWeight:
    """Anchor weight 1 / kappa, kappa the correlation of calibrated and executed scores inside anchor groups.

    A standardised predicted advantage is about kappa A_E + sqrt(1 - kappa^2) noise: as much variance as an executed
    one, kappa times the signal. The error of their sum is least with weights proportional to signal over variance, 1
    for an anchor and kappa for a prediction. Needs no tuned target, and no gradients.
    """

    def __init__(self, half_life: float = 64.0, min_observations: int = 32, max_weight: float = 4.0) -> None:
        """Start at weight 1.

        Args:
            half_life: groups after which an observation counts half.
            min_observations: groups that differ inside before the weight is anything but 1.
            max_weight: upper limit of the weight, also that of a model that is wrong or says nothing.

        Raises:
            ValueError: for a number out of range.
        """
        _check(min_observations, max_weight)
        self.correlation = GroupCorrelation(half_life)
        self._min_observations, self._max_weight = min_observations, max_weight

    @property
    def weight(self) -> float:
        """Factor of the anchor advantages, in [1, max_weight]."""
        if self.correlation.groups < self._min_observations:
            return 1.0
        return 1 / max(self.correlation.value, 1 / self._max_weight)

    def observe_groups(self, groups: Sequence[Group], calibrate: Calibrate) -> None:
        """Count the anchor groups of one step in, after their pairs went into the map."""
        self.correlation.observe(
            [(calibrate(group.predicted, group.context.task), group.executed) for group in groups]
        )

    def metrics(self) -> dict[str, float]:
        """Weight, kappa and the groups observed."""
        return {
            "weight": self.weight,
            "kappa": self.correlation.value,
            "observations": float(self.correlation.groups),
        }

    def state_dict(self) -> dict[str, Any]:
        """State in plain numbers, exact through JSON."""
        return self.correlation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.correlation.load_state_dict(state)


def _check(min_observations: int, max_weight: float) -> None:
    if min_observations < 1:
        raise ValueError(f"min_observations={min_observations}: must be at least 1")
    if not max_weight >= 1:
        raise ValueError(f"max_weight={max_weight}: must be at least 1")


AnchorWeight = DisagreementWeight | VarianceWeight | CorrelationWeight
WEIGHTS = ("disagreement", "variance", "correlation")


def make_anchor_weight(kind: str = "disagreement", standardize: bool = True, **settings: Any) -> AnchorWeight:
    """The weight of that kind; settings are those of its class.

    Raises:
        ValueError: for an unknown kind or a number out of range.
    """
    if kind == "disagreement":
        return DisagreementWeight(**settings)
    if kind == "variance":
        return VarianceWeight(standardize, **settings)
    if kind == "correlation":
        return CorrelationWeight(**settings)
    raise unknown("denoise.kind", kind, WEIGHTS)
