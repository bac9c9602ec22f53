"""The loop of the method, top to bottom; one step a call.

Knows the three protocols and nothing else, so robots and research agents train through the same lines. All
randomness is keyed by (seed, step): a step that is repeated after a crash draws the same contexts, anchors and
noise, finds what it already executed in the ledger, and pays for the rest only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from wmrl_embodied.core.anchors import AnchorSchedule, ShareRule
from wmrl_embodied.core.estimators import Estimator
from wmrl_embodied.core.ledger import Ledger
from wmrl_embodied.core.policy_gradient import UpdateSettings, update_policy
from wmrl_embodied.core.seeding import generator, rng
from wmrl_embodied.core.types import Context, Group, Policy, Task


@dataclass(frozen=True)
class TrainerSettings:
    """Sizes of a training step.

    Attributes:
        groups: groups m a step.
        group_size: attempts G a group.
        warmup_steps: first steps in which every group is executed, where the arm uses predictions: they teach
            the world model before it is believed, and count as executions. Arms with anchors train on them
            like on any anchor.
        warmup_groups: groups of such a step, None for `groups`. Imagined groups are cheap and may be many; these
            are not.
        disk_per_execution: bytes that must be free for each attempt before it is executed.
    """

    groups: int = 8
    group_size: int = 8
    warmup_steps: int = 0
    warmup_groups: int | None = None
    disk_per_execution: int = 200_000

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if self.groups < 1:
            raise ValueError(f"groups={self.groups}: must be at least 1")
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: a group of one has no advantage; must be at least 2"
            )
        if self.warmup_groups is not None and self.warmup_groups < 1:
            raise ValueError(
                f"warmup_groups={self.warmup_groups}: must be at least 1, or null for trainer.groups"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}: must be at least 0")


@dataclass(frozen=True)
class StepResult:
    """What a step did: `metrics` for the log, and the `executed` groups with both scores."""

    metrics: dict[str, float]
    executed: list[Group]


class Interrupted(RuntimeError):
    """The run was asked to stop; everything executed so far is in the ledger."""


class Trainer:
    """Trains `policy` in place.

    Args:
        task: contexts, imagined and executed groups, the world model.
        policy: learns; its parameters are those of `optimizer`.
        reference: frozen policy of the KL term, or None.
        estimator: how scores become advantages.
        schedule: which groups are executed.
        optimizer: of the policy.
        ledger: record of every execution.
        settings: sizes of a step.
        update: settings of the policy update.
        seed: of the run.
        should_stop: asked between executions; True ends the step with `Interrupted`.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        reference: Policy | None,
        estimator: Estimator,
        schedule: AnchorSchedule,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        settings: TrainerSettings,
        update: UpdateSettings,
        seed: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.task = task
        self.policy = policy
        self.reference = reference
        self.estimator = estimator
        self.schedule = schedule
        self.optimizer = optimizer
        self.ledger = ledger
        self.settings = settings
        self.update = update
        self.seed = seed
        self.should_stop = should_stop
        self.step_count = 0
        self.executions = 0
        self.imagined = 0
        self.share_rule = ShareRule()
        self._found = 0  # groups of this step that a crash had left in the ledger

    def step(self) -> StepResult:
        """One step of the method; raises `Interrupted` when asked to stop, `LedgerFull` without disk space."""
        step, settings, seconds = self.step_count, self.settings, {}
        warming_up = self.estimator.uses_predictions and step < settings.warmup_steps
        size = (settings.warmup_groups if warming_up else None) or settings.groups
        contexts = self.task.sample_contexts(size, rng(self.seed, step, "contexts"))
        if len(set(contexts)) < len(contexts):
            raise ValueError("sample_contexts gave a context twice; the ledger tells groups of a step by it")
        schedule = self._schedule(warming_up)
        guessed = None
        if schedule.looks:
            with _timed(seconds, "imagine"):
                guessed = self.task.imagine(self.policy, contexts, settings.group_size, step)
        anchors, probability = schedule.choose(
            size,
            rng(self.seed, step, "anchors"),
            self.executions,
            settings.group_size,
            None if guessed is None else [_uncertainty(group) for group in guessed],
            self.share_rule.share,
        )
        with _timed(seconds, "execute"):
            executed = self._execute(contexts, anchors, step)
        with _timed(seconds, "imagine"):
            imagined = self._imagine(contexts, anchors, guessed, step)
        chance = dict(zip(contexts, probability.tolist(), strict=True))
        groups = [
            replace(group, inclusion_probability=chance[group.context]) for group in executed + imagined
        ]
        executed = groups[: len(executed)]
        with _timed(seconds, "predict"):
            if self.estimator.uses_predictions:
                self.task.predict(self.policy, executed, step)

        with _timed(seconds, "correction"):
            self.estimator.observe(executed)
            weighted = self.estimator.advantages(groups)
        learned_from = [*zip(groups, weighted.advantages, strict=True), *weighted.replayed]
        with _timed(seconds, "policy"):
            policy_metrics = update_policy(
                self.policy,
                self.reference,
                [trajectory for group, _ in learned_from for trajectory in group.trajectories],
                np.concatenate([np.zeros(0), *(values for _, values in learned_from)]),
                self.optimizer,
                self.update,
                generator(self.seed, step, "minibatches"),
            )
        with _timed(seconds, "world_model"):
            learned = self.task.learn(executed, step) if self.estimator.uses_predictions else {}

        self.share_rule.observe([(group.predicted, group.executed) for group in executed])
        # A step that finds its executions in the ledger, after a crash, does not tell what they cost.
        if executed and not self._found:
            self.share_rule.spend("execute", seconds["execute"], sum(map(len, executed)))
        if imagined:
            self.share_rule.spend("imagine", seconds["imagine"], sum(map(len, guessed or imagined)))

        self.step_count += 1
        self.executions += sum(len(group) for group in executed)
        self.imagined += sum(map(len, guessed or imagined))
        metrics = {
            "step": self.step_count,
            "executions": self.executions,
            "imagined": self.imagined,
            "executed_success": _mean([group.executed for group in executed]),
            "predicted_mean": _mean([group.predicted for group in groups]),
            **{f"policy/{name}": value for name, value in policy_metrics.items()},
            **{f"correction/{name}": value for name, value in weighted.metrics.items()},
            **{f"world_model/{name}": value for name, value in learned.items()},
            **{f"seconds/{part}": value for part, value in seconds.items()},
        }
        if self.schedule.budget is not None:
            metrics["budget_left"] = max(self.schedule.budget - self.executions, 0)
        if self.schedule.fraction == "auto":
            metrics |= {f"anchors/{name}": value for name, value in self.share_rule.metrics().items()}
        return StepResult(metrics, executed)

    def _schedule(self, warming_up: bool) -> AnchorSchedule:
        """What decides on the anchors of this step."""
        if self.estimator.executes_all or warming_up:
            return AnchorSchedule(1.0, floor=0, budget=self.schedule.budget)
        if not self.estimator.uses_anchors:
            return AnchorSchedule(0.0)
        # Without predictions there is no uncertainty to go by.
        return self.schedule if self.estimator.uses_predictions else replace(self.schedule, strategy="random")

    def _imagine(
        self, contexts: Sequence[Context], anchors: np.ndarray, guessed: list[Group] | None, step: int
    ) -> list[Group]:
        """The groups that are not executed, in the order of `contexts`."""
        if not self.estimator.uses_predictions or anchors.all():
            return []
        if guessed is not None:
            return [group for group, anchor in zip(guessed, anchors, strict=True) if not anchor]
        rest = [context for context, anchor in zip(contexts, anchors, strict=True) if not anchor]
        return self.task.imagine(self.policy, rest, self.settings.group_size, step)

    def _execute(self, contexts: Sequence[Context], anchors: np.ndarray, step: int) -> list[Group]:
        """The anchor groups, in the order of `contexts`; each in the ledger before it is returned."""
        wanted = [context for context, anchor in zip(contexts, anchors, strict=True) if anchor]
        done = {group.context: group for group in self.ledger.groups(step)}
        self._found = len(done)
        missing = [context for context in wanted if context not in done]
        size = self.settings.group_size
        self.ledger.ensure_space(len(missing) * size * self.settings.disk_per_execution)
        self._check_stop()
        if missing:
            for batch in self.task.execute(self.policy, missing, size, step, self.should_stop):
                self.ledger.extend(step, batch, seed=self.seed)
                done.update((group.context, group) for group in batch)
            self._check_stop()
        return [replace(done[context], anchor=True) for context in wanted]

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Interrupted(
                f"stopped in step {self.step_count + 1}; what was executed is in {self.ledger.folder}"
            )


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started


def _uncertainty(group: Group) -> float:
    """Root mean predicted variance of the members that have one, NaN without any."""
    known = group.predicted_variance[np.isfinite(group.predicted_variance)]
    return float(np.sqrt(known.mean())) if known.size else float("nan")


def _mean(scores: Sequence[np.ndarray]) -> float | None:
    """Mean over all scores that are there; None where there are none."""
    known = np.concatenate([*scores, np.zeros(0)])
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else None
