"""Estimators beyond the published ones: `rectified` has no bias, `fused` the least estimated squared error.

Both are linear in advantages and cost no extra backward pass. Knows scores only, as the published estimators do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from wmrl_embodied.core.advantages import group_advantages
from wmrl_embodied.core.ledger import pack_group, unpack_group
from wmrl_embodied.core.streams import StreamMoments
from wmrl_embodied.core.task_maps import TaskMaps, pairs_by_task
from wmrl_embodied.core.types import Group
from wmrl_embodied.core.weighted import Weighted

logger = logging.getLogger(__name__)

_COUNTED = ("executed", "predicted", "skipped", "degenerate")


@dataclass(frozen=True)
class _Measured:
    """What earlier steps tell about the streams; independent, therefore, of the scores it is applied to.

    Attributes:
        spread: root mean square within-group standard deviation of executed scores, 0 before any was seen.
        groups: effective number of anchor groups behind the rest.
        variance, squared_bias: `covariances` and `squared_bias` of `StreamMoments`.
        sees_bias: whether the bias was measured.
    """

    spread: float
    groups: float
    variance: Mapping[str, float]
    squared_bias: float
    sees_bias: bool


class RectifiedEstimator:
    """Predictions as a control variate of the anchors (prediction-powered inference, arXiv 2301.09633).

    With m groups, e and p the leave-one-out advantages of a group by executed and by calibrated predicted scores,
    and pi the probability with which the group was chosen for execution, the estimate of the gradient is

        rectified   1/m [ sum_all lambda p + sum_anchors (e - lambda p) / pi ]
        fused       mix / m sum_all p + (1 - mix) rectified

    Any bias of the world model cancels out of `rectified` in expectation: anchors are drawn independently of its
    errors, and lambda, the scale and the map come from earlier steps. lambda = Cov(e, p) / Var(p) has the least
    variance. (With equal pi = n/m this is the form lambda' p / (m - n), (e - lambda' p) / n with
    lambda' = Cov / ((1 + n / (m - n)) Var).) It is shrunk by 1 - (1 - rho^2) / (rho^2 (N - 2)), N anchor groups
    seen, because a lambda from a few groups adds more noise than it removes.

    `fused` mixes in the plain predicted stream, biased but quiet, with the weight of least squared error

        mix = (R - c) / (A + R - 2 c),  R = V_e / n - C^2 (1/n - 1/m) / V_p,  A = h b^2 + V_p / m,  c = C / m

    from the running moments of `StreamMoments`. They see the bias b only through `Trajectory.log_prob_gradient`;
    without it `fused` stays `rectified`, and says so. h is the
    `horizon`: noise averages out over the steps of training and bias does not, so that over h steps it counts h times.

    With a `memory` a, the rectifier is a running average: the anchors of k steps ago are learned from again, by their
    old log-probabilities, with the share a^k / sum_k a^k of the second sum. Less noise, but as far as the policy or
    the world model moved since, the bias of a stale rectifier.

    Groups that are never executed (pi = 0, strategy `gate`) keep the bias that the map leaves them.

    Attributes:
        moments: of the anchors so far, in score units.
        map: monotone map of predicted scores; it lags one step.
    """

    executes_all = False
    uses_anchors = True
    uses_predictions = True

    def __init__(
        self,
        name: str,
        fuse: bool,
        standardize: bool = True,
        half_life: float = 64.0,
        min_groups: float = 8.0,
        horizon: float = 1.0,
        memory: float = 0.0,
        debias: Mapping[str, Any] | None = None,
    ) -> None:
        """Start with the anchors alone.

        Args:
            name: of the configuration.
            fuse: mix in the plain predicted stream.
            standardize: divide by the running within-group standard deviation of executed scores, one number for
                the whole batch. (A standard deviation of each group by itself is not linear; the bias would stay.)
            half_life: anchor groups after which what was measured counts half.
            min_groups: anchor groups before predictions are used at all.
            horizon: of `fused`, steps over which the error should be least. 1 is the least error of one step; about
                the number of steps in which the policy changes little is better for training (docs/theory.md).
            memory: see the class; in [0, 1), 0 is off. Steps whose share is below 1 % of the newest are forgotten.
            debias: settings of `TaskMaps` and its `MonotoneMap`s.

        Raises:
            ValueError: for a number out of range.
        """
        if not min_groups > 2:
            raise ValueError(
                f"min_groups={min_groups}: must be above 2, the shrinkage of lambda divides by N - 2"
            )
        if not 1 <= horizon < np.inf:
            raise ValueError(f"horizon={horizon}: must be finite and at least 1 step")
        if not 0 <= memory < 1:
            raise ValueError(f"memory={memory}: must be at least 0 and below 1")
        self.name = name
        self._memory = memory
        self._remembers = int(np.log(0.01) / np.log(memory)) if memory else 0  # steps
        self._steps: list[list[Group]] = []  # anchors of this step and of those before it, the newest first
        self._horizon = horizon
        self.map = TaskMaps(**(debias or {}))
        self.moments = StreamMoments(half_life)
        self._fuse = fuse
        self._standardize = standardize
        self._min_groups = min_groups
        self._decay = 2 ** (-1 / half_life)
        self._squares = self._squares_weight = 0.0
        self._pending: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._measured = self._measure()
        self._warned = False

    def observe(self, anchor_groups: Sequence[Group]) -> None:
        """Settle how this step's groups are combined from earlier steps, then measure its anchors for the next.

        Args:
            anchor_groups: the executed groups of one step, with both scores; missing ones are ignored.
        """
        self.map.observe(self._pending)
        self._measured = self._measure()
        self.moments.fade(len(anchor_groups))
        self._squares *= self._decay ** len(anchor_groups)
        self._squares_weight *= self._decay ** len(anchor_groups)
        inverse = [1 / group.inclusion_probability for group in anchor_groups]
        for group, weight in zip(anchor_groups, inverse, strict=True):
            executed, predicted, spread = self._streams(group, True)
            if executed is not None and predicted is not None:
                self.moments.observe(executed, predicted, group.log_prob_gradient, weight / np.mean(inverse))
            if spread > 0:
                self._squares += spread**2
                self._squares_weight += 1
        self._pending = pairs_by_task(anchor_groups)
        self._steps = [list(anchor_groups), *self._steps[: self._remembers]]

    def calibrate(self, predicted: ArrayLike, task: str = "") -> np.ndarray:
        """Predicted scores through the map; NaN stays NaN."""
        return self.map(predicted, task)

    def advantages(self, groups: Sequence[Group]) -> Weighted:
        """Weighted advantages of all groups of one step.

        Args:
            groups: groups of any sizes; those with `anchor` set were executed, with their inclusion probability.
        """
        shares = self._shares()
        control, mix = self._coefficients(groups, float(shares @ shares))
        streams = [self._streams(group, group.anchor) for group in groups]
        scale = self._scale([spread for *_, spread in streams])
        values, contributes = [], []
        count = Counter(dict.fromkeys(_COUNTED, 0))
        for group, (executed, predicted, _) in zip(groups, streams, strict=True):
            count["executed" if group.anchor else "predicted"] += 1
            value = np.zeros(len(group))
            if predicted is not None:
                # An anchor is rectified: its prediction's weight in the sum over all groups is taken off again.
                own = 1 - shares[0] / group.inclusion_probability if group.anchor else 1.0
                value += (mix + (1 - mix) * control * own) * predicted / scale
            if executed is not None:
                value += (1 - mix) * shares[0] * executed / (group.inclusion_probability * scale)
            if executed is None and predicted is None:
                count["skipped"] += 1
            elif not value.any():
                count["degenerate"] += 1
            values.append(value)
            contributes.append(value != 0)
        members = sum(int(used.sum()) for used in contributes)
        if groups and members == 0:
            logger.warning("no group carries a gradient, nothing to learn from this step: %s", dict(count))
        missing = sum(
            int((~np.isfinite(group.executed if group.anchor else group.predicted)).sum()) for group in groups
        )
        metrics = {
            **{f"{what}_groups": float(number) for what, number in count.items()},
            "missing_members": float(missing),
            "contributing_members": float(members),
            "control": control,
            "mix": mix,
            "scale": scale,
            "groups_measured": self._measured.groups,
            "correlation": _correlation(self._measured.variance),
            "squared_bias": self._measured.squared_bias,
            **{f"variance_{pair}": value for pair, value in self._measured.variance.items()},
            **{f"map/{key}": value for key, value in self.map.metrics().items()},
        }
        replayed = []
        for share, past in zip(shares[1:], self._steps[1:], strict=False):
            for group in past:
                executed, predicted, _ = self._streams(group, True)
                if executed is not None:
                    error = executed - (0.0 if predicted is None else control * predicted)
                    replayed.append(
                        (group, (1 - mix) * share * error / (group.inclusion_probability * scale))
                    )
        return Weighted(values, contributes, metrics, replayed)

    def state_dict(self) -> dict[str, Any]:
        """All that was measured, in JSON's types; with a memory also tensors of the anchors that are kept."""
        return {
            "memory": [
                [pack_group(0, group, "", None, None) for group in step]
                for step in self._steps[: self._remembers]
            ],
            "map": self.map.state_dict(),
            "moments": self.moments.state_dict(),
            "squares": [self._squares, self._squares_weight],
            "pending": {task: [side.tolist() for side in pair] for task, pair in self._pending.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.map.load_state_dict(state["map"])
        self.moments.load_state_dict(state["moments"])
        self._squares, self._squares_weight = state["squares"]
        self._pending = {
            task: (np.array(predicted), np.array(executed))
            for task, (predicted, executed) in state["pending"].items()
        }
        self._steps = [[unpack_group(*packed) for packed in step] for step in state["memory"]]
        self._measured = self._measure()

    def _streams(self, group: Group, anchor: bool) -> tuple[np.ndarray | None, np.ndarray | None, float]:
        """(G,) leave-one-out advantages by executed and by calibrated predicted scores, in score units, and the
        standard deviation of the executed ones. None for a stream of which fewer than two members have a score.

        The streams of an anchor are about the same members, so that their difference is an error of prediction.
        """
        predicted = self.calibrate(group.predicted, group.context.task)
        model = f"world model of task {group.context.task!r}"
        if not anchor:
            return None, _leave_one_out(predicted, model), 0.0
        executed = _leave_one_out(group.executed, f"grader of task {group.context.task!r}")
        if executed is None:
            return None, None, 0.0
        scored = np.isfinite(group.executed)
        control = _leave_one_out(predicted[scored], model)
        if control is not None:
            predicted[scored], predicted[~scored] = control, 0.0
        return executed, None if control is None else predicted, float(np.std(group.executed[scored]))

    def _shares(self) -> np.ndarray:
        """Of this step's anchors in the rectifier, and of those of the steps before it."""
        shares = np.array([self._memory**age * bool(step) for age, step in enumerate(self._steps)])
        return shares / shares.sum() if shares.any() else np.ones(1)

    def _coefficients(self, groups: Sequence[Group], averaging: float) -> tuple[float, float]:
        """`control` (lambda) and `mix` of the class's equations; `averaging` is what a memory leaves of the variance
        of a mean over anchors.
        """
        known = self._measured
        if known.groups < self._min_groups:
            return 0.0, 0.0
        variance, rho = known.variance, _correlation(known.variance)
        if rho <= 0 or variance["pp"] == 0:
            control = 0.0
        else:
            trusted = max(0.0, 1 - (1 - rho**2) / (rho**2 * (known.groups - 2)))
            control = float(np.clip(trusted * variance["ep"] / variance["pp"], 0, 1))
        if not self._fuse:
            return control, 0.0
        if not known.sees_bias:
            if not self._warned:
                logger.warning(
                    "fused: no log_prob_gradient, so the bias of the predicted gradient cannot be measured; this "
                    "is `rectified` until trajectories carry one"
                )
                self._warned = True
            return control, 0.0
        return control, _mix(
            known, [group.inclusion_probability for group in groups], self._horizon, averaging
        )

    def _scale(self, spreads: Sequence[float]) -> float:
        """What advantages are divided by; this step's own spread only before there was any other."""
        if not self._standardize:
            return 1.0
        own = [spread for spread in spreads if spread > 0]
        return self._measured.spread or (float(np.sqrt(np.mean(np.square(own)))) if own else 1.0)

    def _measure(self) -> _Measured:
        return _Measured(
            spread=float(np.sqrt(self._squares / self._squares_weight)) if self._squares_weight else 0.0,
            groups=self.moments.groups,
            variance=self.moments.covariances(),
            squared_bias=self.moments.squared_bias(),
            sees_bias=self.moments.sees_bias,
        )


def _leave_one_out(scores: np.ndarray, source: str) -> np.ndarray | None:
    """(G,) score minus the mean of the *other* members, which leaves the gradient unbiased; 0 where missing.

    None with fewer than two scores.
    """
    centred = group_advantages(scores, standardize=False, source=source)
    if centred.status == "skipped":
        return None
    members = len(scores) - centred.missing
    return np.nan_to_num(centred.values) * members / (members - 1)


def _correlation(variance: Mapping[str, float]) -> float:
    """Of the streams' gradients; 0 where one of them does not vary."""
    product = variance["ee"] * variance["pp"]
    return float(np.clip(variance["ep"] / np.sqrt(product), -1, 1)) if product > 0 else 0.0


def _mix(known: _Measured, inclusion: Sequence[float], horizon: float, averaging: float) -> float:
    """Weight in [0, 1] of the plain predicted stream with the least squared error of the sum."""
    groups = len(inclusion)
    possible = [probability for probability in inclusion if probability > 0]
    if not possible:
        return 1.0
    variance, one_anchor = known.variance, averaging * float(np.mean(np.reciprocal(possible))) / groups
    rectified = variance["ee"] * one_anchor
    if variance["pp"] > 0:
        rectified -= variance["ep"] ** 2 * max(0.0, one_anchor - 1 / groups) / variance["pp"]
    predicted = horizon * known.squared_bias + variance["pp"] / groups
    common = variance["ep"] / groups
    curvature = predicted + rectified - 2 * common
    return float(np.clip((rectified - common) / curvature, 0, 1)) if curvature > 0 else 0.0
