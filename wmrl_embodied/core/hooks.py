"""The corrections in training code of others: scores in, corrected scores and weights out.

Knows arrays and callables only. `RewardCorrector` is for any loop; `AnchoredReward` is a reward function as TRL's
GRPOTrainer calls it, and runs without TRL too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from wmrl_embodied.core.anchors import AnchorSchedule
from wmrl_embodied.core.estimators import make_estimator
from wmrl_embodied.core.seeding import rng
from wmrl_embodied.core.types import Context, Group, Trajectory


@dataclass(frozen=True)
class Corrected:
    """What the corrections make of the scores of one step.

    Attributes:
        scores: (m, G) executed scores where there are any, elsewhere predicted ones through the map; NaN where missing.
        weights: (m,) root mean square of a group's advantages; 0 for one without a gradient. With the published
            corrections, `advantages` are `weights` times the standardised `scores`, for a loop that does that.
        advantages: (m, G) for the policy gradient, weights included; 0 for who does not contribute. Do not standardise
            them again.
        metrics: for the log.
    """

    scores: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    metrics: dict[str, float]


class RewardCorrector:
    """Which groups to execute, and what to make of executed and predicted scores.

    corrector = RewardCorrector("wmrl", AnchorSchedule(0.1))
    for prompts in loader:
        anchors = corrector.choose(len(prompts))
        ...                                         # predict all, execute the anchors, NaN elsewhere
        corrected = corrector(predicted, executed)  # (m, G) each
        loss = -(corrected.advantages * log_probs).mean()
    """

    def __init__(
        self, correction: str = "wmrl", schedule: AnchorSchedule | None = None, seed: int = 0, **settings: Any
    ) -> None:
        """Start before the first step.

        Args:
            correction: a key of `ESTIMATORS`.
            schedule: how many groups are executed, and which; a tenth of them, drawn at random, by default.
            seed: of the draws.
            **settings: of the estimator.

        Raises:
            ValueError: for an unknown correction or a setting out of range.
        """
        self.estimator = make_estimator(correction, **settings)
        self.schedule = schedule or AnchorSchedule(0.1)
        if self.schedule.fraction == "auto":
            raise ValueError("fraction=auto: only the trainer measures costs; give RewardCorrector a number")
        if settings.get("memory"):
            raise ValueError(
                f"memory={settings['memory']}: arrays of one step cannot carry earlier anchors; use Trainer"
            )
        self.seed = seed
        self.step = 0
        self.executions = 0
        self._chosen: tuple[np.ndarray, np.ndarray] | None = None

    def choose(self, groups: int, group_size: int = 1, uncertainty: ArrayLike | None = None) -> np.ndarray:
        """(m,) bool: the groups of this step to execute. Asked again in the same step, it answers the same.

        Args:
            groups: m.
            group_size: attempts that one of them executes, for the budget.
            uncertainty: (m,) of the predictions, for the strategies that ask for it.
        """
        if self.estimator.executes_all:
            self._chosen = np.ones(groups, bool), np.ones(groups)
        elif not self.estimator.uses_anchors:
            self._chosen = np.zeros(groups, bool), np.zeros(groups)
        else:
            draws = rng(self.seed, self.step, "anchors")
            self._chosen = self.schedule.choose(groups, draws, self.executions, group_size, uncertainty)
        return self._chosen[0].copy()

    def __call__(
        self,
        predicted: ArrayLike,
        executed: ArrayLike,
        tasks: Sequence[str] | None = None,
        variance: ArrayLike | None = None,
        log_prob_gradient: ArrayLike | None = None,
    ) -> Corrected:
        """Correct the scores of one step, learn from its anchors, and go on to the next.

        Args:
            predicted: (m, G) predicted scores of all groups, NaN where missing.
            executed: (m, G) executed scores of the anchors, NaN elsewhere and where an execution failed to give one.
            tasks: (m,) names, for maps of tasks.
            variance: (m, G) of the predicted scores.
            log_prob_gradient: (m, G, K) of each attempt's log-probability, in any fixed K directions; `fused` measures
                the bias of the predictions with it.

        Raises:
            ValueError: for unequal shapes, or without a call of `choose` for as many groups before.
        """
        predicted, executed = np.asarray(predicted, np.float64), np.asarray(executed, np.float64)
        if predicted.ndim != 2 or predicted.shape != executed.shape:
            raise ValueError(
                f"predicted {predicted.shape} and executed {executed.shape}: must both be (m, G)"
            )
        if self._chosen is None or len(self._chosen[0]) != len(predicted):
            raise ValueError(f"{len(predicted)} groups: call choose({len(predicted)}) first")
        anchors, probability = self._chosen
        names = tasks if tasks is not None else [""] * len(predicted)
        sizes = np.broadcast_to(
            np.nan if variance is None else np.asarray(variance, np.float64), predicted.shape
        )
        gradients = None if log_prob_gradient is None else np.asarray(log_prob_gradient, np.float64)
        groups = []
        for place, name in enumerate(names):
            members = [
                _attempt(
                    executed[place, member] if anchors[place] else np.nan,
                    predicted[place, member],
                    sizes[place, member],
                    None if gradients is None else gradients[place, member],
                )
                for member in range(predicted.shape[1])
            ]
            groups.append(
                Group(
                    Context(name, place),
                    members,
                    anchor=bool(anchors[place]),
                    inclusion_probability=float(probability[place]),
                )
            )
        self.estimator.observe([group for group in groups if group.anchor])
        weighted = self.estimator.advantages(groups)
        self.step += 1
        self.executions += int(anchors.sum()) * predicted.shape[1]
        self._chosen = None
        calibrated = np.stack([self.estimator.calibrate(g.predicted, g.context.task) for g in groups])
        scores = np.where(anchors[:, None], executed, calibrated)
        advantages = np.stack(weighted.advantages)
        return Corrected(scores, _weights(scores, advantages), advantages, weighted.metrics)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON's types."""
        return {"step": self.step, "executions": self.executions, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the settings stay those of the constructor."""
        self.step, self.executions = int(state["step"]), int(state["executions"])
        self.estimator.load_state_dict(state["estimator"])


class AnchoredReward:
    """A reward function for TRL's GRPOTrainer that executes only the anchors for real.

    It returns advantages. Let the trainer neither scale nor mask them: `GRPOConfig(scale_rewards="none")`; the mean of
    a group is 0 already. In TRL's logs `reward` is therefore about 0; what was executed and predicted is logged beside
    it. For one process: with several, each would need its own anchors.

    Attributes:
        corrector: see there; its state belongs into a checkpoint.
        last: what the last call made of its scores.
    """

    def __init__(
        self,
        execute: Callable[..., Sequence[float | None]],
        predict: Callable[..., Sequence[float | None]],
        group_size: int,
        corrector: RewardCorrector | None = None,
        learn: Callable[..., None] | None = None,
    ) -> None:
        """Wrap two reward functions into one.

        Args:
            execute: TRL reward function, expensive and true; called with the anchors alone. None is a missing score.
            predict: TRL reward function, cheap; called with everything.
            group_size: `num_generations`.
            corrector: the correction, `wmrl` with a tenth of anchors by default.
            learn: called with the anchors and `rewards=` after they were executed, to teach the predictor.

        Raises:
            ValueError: `group_size` is below 2.
        """
        if group_size < 2:
            raise ValueError(f"group_size={group_size}: a group of one has no advantage; must be at least 2")
        self.__name__ = "anchored_reward"  # TRL's name of the reward in its logs
        self.corrector = corrector or RewardCorrector()
        self.last: Corrected | None = None
        self._execute, self._predict, self._learn, self._size = execute, predict, learn, group_size

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Advantages of the completions, `group_size` of one prompt next to each other, as TRL passes them.

        Raises:
            ValueError: if they do not divide into groups.
        """
        if not prompts or len(prompts) % self._size:
            raise ValueError(
                f"{len(prompts)} completions: must be a multiple of group_size={self._size}; choose a batch size "
                "that is a multiple of num_generations"
            )
        shape = (len(prompts) // self._size, self._size)
        predicted = _numbers(self._predict(prompts=prompts, completions=completions, **columns), shape)
        anchors = self.corrector.choose(len(predicted), self._size)
        executed = np.full(shape, np.nan)
        if anchors.any():
            rows = np.flatnonzero(np.repeat(anchors, self._size))
            own = {
                "prompts": [prompts[row] for row in rows],
                "completions": [completions[row] for row in rows],
                **{
                    name: [value[row] for row in rows] if isinstance(value, list) else value
                    for name, value in columns.items()
                },
            }
            rewards = self._execute(**own)
            executed[anchors] = _numbers(rewards, (int(anchors.sum()), self._size))
            if self._learn is not None:
                self._learn(rewards=rewards, **own)
        self.last = self.corrector(predicted, executed)
        log = columns.get("log_metric")
        if log is not None:
            for name, value in (("executed", executed), ("predicted", predicted)):
                if np.isfinite(value).any():
                    log(name, float(np.nanmean(value)))
            log("executions", float(self.corrector.executions))
        return self.last.advantages.ravel().tolist()


def _attempt(executed: float, predicted: float, variance: float, gradient: np.ndarray | None) -> Trajectory:
    nothing = torch.zeros(0)
    attempt = Trajectory({}, nothing, nothing, float(executed), float(predicted), float(variance))
    attempt.log_prob_gradient = gradient
    return attempt


def _numbers(scores: Sequence[float | None], shape: tuple[int, int]) -> np.ndarray:
    values = np.array([np.nan if score is None else score for score in scores], np.float64)
    if values.size != shape[0] * shape[1]:
        raise ValueError(
            f"{values.size} scores for {shape[0] * shape[1]} completions: one each, None if missing"
        )
    return values.reshape(shape)


def _weights(scores: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    members = np.maximum(np.isfinite(scores).sum(axis=1), 1)
    return np.sqrt((advantages**2).sum(axis=1) / members)
