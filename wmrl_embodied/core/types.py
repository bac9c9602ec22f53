"""The vocabulary shared by every part: contexts, trajectories, groups, scores and three protocols.

Knows nothing about simulators, robots or language models; a robot episode and a program that was
written and graded are the same thing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """What the attempts of one group share.

    Attributes:
        task: name of the task (robot) or of the research question.
        index: which listed initial state of that task; together with `task` it identifies the context.
        instruction: what the policy is told, in words.
    """

    task: str
    index: int
    instruction: str = ""


@dataclass(frozen=True)
class Score:
    """What a world model says of B trajectories: `mean` (B,) and `variance` (B,) of the executed score."""

    mean: Tensor
    variance: Tensor


@dataclass
class Trajectory:
    """One attempt, and all that a policy-gradient step needs of it.

    Attributes:
        steps: inputs of `Policy.log_prob`, each with its own leading time axis (T_k, ...).
        old_log_prob: (T,) log-probability of every decision under the policy that took it, nats.
        mask: (T,) weight of every decision in [0, 1]; 0 is padding. An imagined decision that is only
            reached with some probability carries that probability.
        executed: score of the real execution; NaN when it was not executed or the score is missing.
        predicted: the world model's mean for that score; NaN when nothing was predicted.
        predicted_variance: its variance.
        info: plain numbers, strings and arrays worth keeping in the ledger (success step, length, ...).
        log_prob_gradient: (K,) gradient of the trajectory's log-probability, summed over its decisions, with
            respect to those parameters for which it comes for free (the output's bias, say); None where nothing
            does. The ledger does not keep it. The estimator `fused` measures with it what a bias of the world model
            does to an update.
    """

    steps: dict[str, Tensor]
    old_log_prob: Tensor
    mask: Tensor
    executed: float = float("nan")
    predicted: float = float("nan")
    predicted_variance: float = float("nan")
    info: dict[str, Any] = field(default_factory=dict)
    log_prob_gradient: np.ndarray | None = None


@dataclass
class Group:
    """Attempts from one context. A group never mixes contexts; groups may differ in size.

    Attributes:
        context: what the members share.
        trajectories: the members, G of them.
        anchor: whether the group was chosen for real execution.
        inclusion_probability: the probability with which it was chosen, for importance weights.
    """

    context: Context
    trajectories: list[Trajectory]
    anchor: bool = False
    inclusion_probability: float = 1.0

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def executed(self) -> np.ndarray:
        """(G,) executed scores, NaN where missing."""
        return np.array([t.executed for t in self.trajectories], dtype=np.float64)

    @property
    def predicted(self) -> np.ndarray:
        """(G,) predicted scores, NaN where missing."""
        return np.array([t.predicted for t in self.trajectories], dtype=np.float64)

    @property
    def predicted_variance(self) -> np.ndarray:
        """(G,) predicted variances, NaN where missing."""
        return np.array([t.predicted_variance for t in self.trajectories], dtype=np.float64)

    @property
    def log_prob_gradient(self) -> np.ndarray | None:
        """(G, K) of all members, or None unless every member has one."""
        gradients = [t.log_prob_gradient for t in self.trajectories]
        return None if any(gradient is None for gradient in gradients) else np.stack(gradients)


@runtime_checkable
class Policy(Protocol):
    """Any torch module that can say how probable the decisions of a batch of trajectories are."""

    def log_prob(self, batch: dict[str, Tensor]) -> Tensor:
        """`batch` holds the padded `Trajectory.steps`, each (B, T_k, ...); returns (B, T) nats."""
        ...


@runtime_checkable
class WorldModel(Protocol):
    """Predicts scores, and learns from what was executed."""

    def score(self, trajectories: Sequence[Trajectory]) -> Score:
        """Mean and variance of the executed score, each (B,)."""
        ...

    def update(self, executed: Sequence[Group]) -> dict[str, float]:
        """Learn from newly executed groups; returns metrics."""
        ...


@runtime_checkable
class Task(Protocol):
    """One API for robots and for research agents. `step` keys the randomness: equal steps, equal draws."""

    def sample_contexts(self, n: int, rng: np.random.Generator) -> list[Context]:
        """N training contexts."""
        ...

    def imagine(self, policy: Policy, contexts: Sequence[Context], group_size: int, step: int) -> list[Group]:
        """Groups with predicted scores only; batched and cheap."""
        ...

    def execute(
        self,
        policy: Policy,
        contexts: Sequence[Context],
        group_size: int,
        step: int,
        should_stop: Callable[[], bool],
    ) -> Iterator[list[Group]]:
        """Groups with executed scores, those that were executed side by side in one list, yielded as soon as it is
        complete so that it can be recorded. Once `should_stop()` is true nothing more is started; what is under way is
        still yielded, for it is paid for.
        """
        ...

    def predict(self, policy: Policy, groups: Sequence[Group], step: int) -> None:
        """Fill in the predicted scores of executed groups, for the same trajectories."""
        ...

    def learn(self, executed: Sequence[Group], step: int) -> dict[str, float]:
        """Teach the world model the newly executed groups; returns metrics."""
        ...


def collate(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Stack trajectories of unequal length: every entry of `steps` padded with zeros to (B, max T_k, ...),
    plus `old_log_prob` and `mask`, both (B, max T).
    """
    if not trajectories:
        raise ValueError("collate: got no trajectories; skip the step instead")
    columns = {name: [t.steps[name] for t in trajectories] for name in trajectories[0].steps}
    columns["old_log_prob"] = [t.old_log_prob for t in trajectories]
    columns["mask"] = [t.mask for t in trajectories]
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad(values, batch_first=True) for name, values in columns.items()}
