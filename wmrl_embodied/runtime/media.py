"""Films for the report: rollouts in the simulator, and an imagined one beside the real one with the same actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from wmrl_embodied.adapters.rollout import ActingPolicy, Observation, rollout
from wmrl_embodied.adapters.simulator import Perception, SimulatorWorld
from wmrl_embodied.core.types import Context, Trajectory
from wmrl_embodied.envs.metaworld import instructions
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.envs.splits import HELD_OUT
from wmrl_embodied.world_models.dynamics import DynamicsEnsemble

_STATES = 2


def film_rollouts(
    policy: ActingPolicy,
    pool: SimulatorPool,
    perception: Perception,
    tasks: Sequence[str],
    chunks: int,
    path: Path,
    model: DynamicsEnsemble | None = None,
) -> None:
    """Film the first held-out states of every task, mean actions, into `path` (npz).

    Holds `frames` (N, T, H, W, 3) uint8, one a chunk, `task` (N,) and `success` (N,). With a `model`, also writes
    `imagined.npz` beside it: the first rollout once more, imagined from its actions.
    """
    contexts = [Context(task, HELD_OUT[i], instructions()[task]) for task in tasks for i in range(_STATES)]
    world = SimulatorWorld(pool, perception, film=True)
    attempts = rollout(policy, world, contexts, chunks, noise=None)
    frames = np.stack(world.frames, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, frames=frames, task=np.array([c.task for c in contexts]), success=world.success_once
    )
    if model is not None and len(attempts[0].steps["action"]):
        length = len(attempts[0].steps["action"])
        np.savez_compressed(
            path.with_name("imagined.npz"),
            real_frames=frames[0, : length + 1],
            task=contexts[0].task,
            success_step=length - 1 if world.success_once[0] else -1,
            **_imagine_again(model, attempts[0]),
        )


@torch.no_grad()
def _imagine_again(model: DynamicsEnsemble, attempt: Trajectory) -> dict[str, np.ndarray]:
    """What each of E members imagines of an executed attempt of T chunks, from its first observation and its actions:
    `real_proprio` (T + 1, P), `imagined_proprio` (E, T + 1, P), `success_probability` (E, T) by the end of each chunk.
    """
    steps = attempt.steps
    first = Observation(steps["features"][:1], steps["proprio"][:1], steps["tokens"][None])
    belief = model.start(first.features, first.proprio, first.tokens)
    proprio, survival, success = [belief.proprio], torch.ones(model.settings.members, 1), []
    for action in steps["action"]:
        belief, logit = model.step(belief, action[None])
        survival = survival * (1 - torch.sigmoid(logit))
        proprio.append(belief.proprio)
        success.append(1 - survival)
    final = torch.as_tensor(attempt.info["final_proprio"])[None]
    return {
        "real_proprio": torch.cat([steps["proprio"], final]).numpy(),
        "imagined_proprio": torch.stack(proprio, 2)[:, 0].numpy(),
        "success_probability": torch.stack(success, 2)[:, 0].numpy(),
    }
