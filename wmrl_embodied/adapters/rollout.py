"""One rollout for every world: the simulator, a learned dynamics model, a robot.

A world is anything that starts from contexts and answers action chunks with the next observation and with how
likely the chunk was to succeed. Because the simulator and the model go through the same lines, a model that is
the simulator trains exactly like real execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from wmrl_embodied.core.types import Context, Trajectory


@dataclass(frozen=True)
class Observation:
    """What the policy sees in N attempts: `features` (N, D) of its frozen vision encoder, `proprio` (N, P)
    as the policy's preprocessor normalises it, `tokens` (N, L) of the instruction.
    """

    features: Tensor
    proprio: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a chunk led to.

    Attributes:
        observation: the next one; rows that are over keep their last.
        hazard: (E, N) probability, according to each of E judges, that the attempt succeeded during this chunk
            given that it had not before; the simulator is one judge and says 0 or 1.
        actions_taken: (N,) how many actions of the chunk were applied.
    """

    observation: Observation
    hazard: Tensor
    actions_taken: Tensor


class World(Protocol):
    """See the module. `predicts` says whether outcomes are predictions or the truth."""

    predicts: bool

    def start(self, contexts: Sequence[Context]) -> tuple[Observation, Tensor]:
        """Begin one attempt per row; returns the first observation and (N,) whether success was already true."""
        ...

    def step(self, action: Tensor, running: Tensor) -> Outcome:
        """Apply `action` (N, K, A) to the rows where `running` (N,) is true."""
        ...


class ActingPolicy(Protocol):
    """What a rollout asks of a policy."""

    def act(
        self,
        features: Tensor,
        proprio: Tensor,
        tokens: Tensor,
        noise: Tensor | None = None,
        replay: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The (N, K, A) actions to send and their (N, K) log-probabilities, nats. `noise` (N, K, A) is in standard
        deviations, None means the mean action; `replay` (N, K, A) is sent instead where it is not NaN.
        """
        ...

    def exploration_noise(self, size: int, chunks: int, generator: torch.Generator) -> Tensor:
        """(size, C * K, A), see `rollout`."""
        ...


@torch.no_grad()
def rollout(
    policy: ActingPolicy,
    world: World,
    contexts: Sequence[Context],
    chunks: int,
    noise: Tensor | None,
    replay: Sequence[Trajectory] | None = None,
    stop_at_success: bool = True,
) -> list[Trajectory]:
    """Attempt every context once, in lockstep.

    Args:
        chunks: horizon C in action chunks.
        noise: (N, C * K, A) exploration noise in standard deviations; None acts deterministically.
        replay: take the executed actions of these trajectories for as long as they last, the policy's own after
            that. A success ends an executed trajectory early; were the model scored on those few chunks alone,
            their number would give the result away.
        stop_at_success: whether attempts end at their first success; decisions after it never count.

    Returns:
        N trajectories. `executed` or (when the world predicts) `predicted` and `predicted_variance` hold the
        probability of success within the horizon. A decision's mask is the probability that it was reached.
        Attempts whose success was true at the start have no score and no decisions.
    """
    observation, already = world.start(contexts)
    running = ~already
    survival = torch.ones(1, len(contexts))
    record: dict[str, list[Tensor]] = {
        name: [] for name in ("features", "proprio", "action", "mask", "log_prob")
    }
    for chunk in range(chunks):
        action, log_prob = policy.act(
            observation.features,
            observation.proprio,
            observation.tokens,
            None if noise is None else noise.tensor_split(chunks, 1)[chunk],
            None if replay is None else _chunk_of(replay, chunk),
        )
        outcome = world.step(action, running)
        taken = torch.arange(action.shape[1]) < outcome.actions_taken[:, None]
        reached = survival.mean(0) * running
        for name, value in (
            ("features", observation.features),
            ("proprio", observation.proprio),
            ("action", action),
            ("mask", reached[:, None] * taken),
            ("log_prob", log_prob),
        ):
            record[name].append(value)
        survival = survival * (1 - outcome.hazard * running)
        observation = outcome.observation
        if stop_at_success:
            running = running & (survival.amax(0) > 0)
        if not running.any():
            break
    columns = {name: torch.stack(values, 1) for name, values in record.items()}
    success = 1 - survival
    mask, log_prob = columns.pop("mask"), columns.pop("log_prob")
    trajectories = []
    for row in range(len(contexts)):
        length = int((mask[row].sum(-1) > 0).sum())
        steps = {name: value[row, :length].clone() for name, value in columns.items()}
        trajectory = Trajectory(
            steps={**steps, "tokens": observation.tokens[row].clone()},
            old_log_prob=log_prob[row, :length].flatten().clone(),
            mask=mask[row, :length].flatten().clone(),
            info={"already_successful": bool(already[row])},
        )
        if not already[row]:
            trajectory = _with_score(trajectory, success[:, row], world.predicts)
        if not world.predicts:
            trajectory.info["final_features"] = observation.features[row].numpy().copy()
            trajectory.info["final_proprio"] = observation.proprio[row].numpy().copy()
        trajectories.append(trajectory)
    return trajectories


def _chunk_of(replay: Sequence[Trajectory], chunk: int) -> Tensor:
    """(N, K, A) that executed attempts sent then, NaN for those that had ended."""
    nothing = torch.full_like(next(t.steps["action"][0] for t in replay if len(t.steps["action"])), torch.nan)
    return torch.stack(
        [t.steps["action"][chunk] if chunk < len(t.steps["action"]) else nothing for t in replay]
    )


def _with_score(trajectory: Trajectory, success: Tensor, predicts: bool) -> Trajectory:
    """`success` (E,) as the trajectory's score."""
    if not predicts:
        return replace(trajectory, executed=float(success.mean()))
    return replace(
        trajectory,
        predicted=float(success.mean()),
        predicted_variance=float(success.var(correction=0)),
    )
