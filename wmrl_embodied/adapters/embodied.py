"""Robots: a policy that acts, a simulator that executes, a dynamics ensemble that imagines.

Implements `core.types.Task`. Imagined attempts start from real initial states; executed attempts are scored by
the world model on the same actions, which gives the pairs that the corrections are learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wmrl_embodied.adapters.imagination import ImaginedWorld
from wmrl_embodied.adapters.rollout import ActingPolicy, Observation, World, rollout
from wmrl_embodied.adapters.simulator import Perception, SimulatorWorld
from wmrl_embodied.core.ranking import ranking_metrics
from wmrl_embodied.core.seeding import generator
from wmrl_embodied.core.types import Context, Group, Trajectory, collate
from wmrl_embodied.envs.metaworld import check_task, instructions
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.envs.splits import TRAIN
from wmrl_embodied.world_models.learner import DynamicsLearner


@dataclass(frozen=True)
class EmbodiedSettings:
    """What is attempted.

    Attributes:
        tasks: Meta-World names.
        chunks: horizon C in action chunks.
        train_states: how many of the listed training states of each task are used.
        groups_at_once: groups that the simulator runs side by side.
    """

    tasks: tuple[str, ...]
    chunks: int = 14
    train_states: int = 512
    groups_at_once: int = 4

    def __post_init__(self) -> None:
        """Check names and sizes.

        Raises:
            ValueError: no task, an unknown one, or more training states than there are.
        """
        if not self.tasks:
            raise ValueError("tasks=[]: name at least one, such as tasks=[button-press-topdown-v3]")
        for task in self.tasks:
            check_task(task)
        if not 1 <= self.train_states <= len(TRAIN):
            raise ValueError(f"train_states={self.train_states}: must be in [1, {len(TRAIN)}]")


class EmbodiedTask:
    """See the module.

    Args:
        settings: what is attempted.
        pool: runs the simulator.
        perception: the policy's view of it; its vision encoder must stay frozen.
        learner: the world model and what it learns from; None puts the simulator in its place, which costs as
            much as execution and must train exactly like it.
        seed: of the exploration noise.
    """

    def __init__(
        self,
        settings: EmbodiedSettings,
        pool: SimulatorPool,
        perception: Perception,
        learner: DynamicsLearner | None,
        seed: int,
    ) -> None:
        self.settings = settings
        self.learner = learner
        self._pool = pool
        self._perception = perception
        self._seed = seed
        self._first: dict[Context, tuple[Observation, Tensor]] = {}

    def sample_contexts(self, n: int, rng: np.random.Generator) -> list[Context]:
        """N training contexts, as evenly over the tasks as n allows, no context twice."""
        tasks = rng.permutation(self.settings.tasks).tolist()
        names = [tasks[position % len(tasks)] for position in range(n)]
        if n > self.settings.train_states * len(tasks):
            raise ValueError(f"groups={n}: only {self.settings.train_states} train_states a task")
        states = {task: rng.permutation(self.settings.train_states) for task in tasks}
        return [
            Context(task, int(TRAIN[states[task][position // len(tasks)]]), instructions()[task])
            for position, task in enumerate(names)
        ]

    def imagine(
        self, policy: ActingPolicy, contexts: Sequence[Context], group_size: int, step: int
    ) -> list[Group]:
        """Groups rolled out in the world model, all in one batch."""
        if self.learner is None:
            batches = self._simulate(policy, contexts, group_size, step, predicts=True)
            return [group for batch in batches for group in batch]
        return self._attempt(policy, self._imagined_world(), contexts, group_size, step)

    def execute(
        self,
        policy: ActingPolicy,
        contexts: Sequence[Context],
        group_size: int,
        step: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Group]]:
        """Groups rolled out in the simulator, `groups_at_once` of them together."""
        batches = self._simulate(policy, contexts, group_size, step, predicts=False)
        while not should_stop() and (batch := next(batches, None)) is not None:
            yield batch

    @torch.no_grad()
    def predict(self, policy: ActingPolicy, groups: Sequence[Group], step: int) -> None:
        """Let the world model imagine the executed actions, and the policy go on where they end.

        Also gives every trajectory its `log_prob_gradient`, where the policy offers one.
        """
        replayed = [t for group in groups for t in group.trajectories]
        if not replayed:
            return
        _add_gradients(policy, replayed)
        if self.learner is None:
            for trajectory in replayed:
                trajectory.predicted, trajectory.predicted_variance = trajectory.executed, 0.0
            return
        rows = [group.context for group in groups for _ in group.trajectories]
        noise = torch.cat([self._noise(policy, g.context, len(g), step) for g in groups])
        imagined = rollout(policy, self._imagined_world(), rows, self.settings.chunks, noise, replay=replayed)
        for trajectory, guess in zip(replayed, imagined, strict=True):
            trajectory.predicted = guess.predicted
            trajectory.predicted_variance = guess.predicted_variance

    def learn(self, executed: Sequence[Group], step: int) -> dict[str, float]:
        """How well the executed groups were ranked before they were learned from; then learn from them."""
        ranking = ranking_metrics(executed)
        return ranking if self.learner is None else ranking | self.learner.update(executed)

    def _imagined_world(self) -> ImaginedWorld:
        return ImaginedWorld(self.learner.model, self._look)

    def _simulate(
        self, policy: ActingPolicy, contexts: Sequence[Context], group_size: int, step: int, predicts: bool
    ) -> Iterator[list[Group]]:
        for start in range(0, len(contexts), self.settings.groups_at_once):
            batch = contexts[start : start + self.settings.groups_at_once]
            world = SimulatorWorld(self._pool, self._perception, predicts=predicts)
            yield self._attempt(policy, world, batch, group_size, step)

    def _attempt(
        self, policy: ActingPolicy, world: World, contexts: Sequence[Context], group_size: int, step: int
    ) -> list[Group]:
        rows = [context for context in contexts for _ in range(group_size)]
        noise = torch.cat([self._noise(policy, context, group_size, step) for context in contexts])
        attempts = rollout(policy, world, rows, self.settings.chunks, noise)
        return [
            Group(context, attempts[place * group_size : (place + 1) * group_size])
            for place, context in enumerate(contexts)
        ]

    def _noise(self, policy: ActingPolicy, context: Context, group_size: int, step: int) -> Tensor:
        """(G, C * K, A), a function of seed, step and context: model and simulator explore alike."""
        key = generator(self._seed, step, f"exploration {context.task}", context.index)
        return policy.exploration_noise(group_size, self.settings.chunks, key)

    def _look(self, contexts: Sequence[Context]) -> tuple[Observation, Tensor]:
        """First observations; a listed state is reset and rendered once in a run, and nothing is executed."""
        for context in dict.fromkeys(contexts):
            if context not in self._first:
                # One at a time: how a picture's features round depends on the batch it is encoded in, and a resumed
                # run, which has looked at fewer states, must see the same to the last bit.
                seen, already = SimulatorWorld(self._pool, self._perception).start([context])
                one = Observation(seen.features[0], seen.proprio[0], seen.tokens[0])
                self._first[context] = one, already[0]
        first = [self._first[context] for context in contexts]
        observation = Observation(
            torch.stack([one.features for one, _ in first]),
            torch.stack([one.proprio for one, _ in first]),
            torch.stack([one.tokens for one, _ in first]),
        )
        return observation, torch.stack([already for _, already in first])


def _add_gradients(policy: ActingPolicy, trajectories: Sequence[Trajectory]) -> None:
    """`log_prob_gradient` of every trajectory, where the policy offers it."""
    if hasattr(policy, "log_prob_gradient"):
        for trajectory, gradient in zip(
            trajectories, policy.log_prob_gradient(collate(trajectories)), strict=True
        ):
            trajectory.log_prob_gradient = gradient.double().numpy()
