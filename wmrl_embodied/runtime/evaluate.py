"""Success of a policy in the real simulator, on listed initial states; every row says which ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wmrl_embodied.adapters.rollout import ActingPolicy, rollout
from wmrl_embodied.adapters.simulator import Perception, SimulatorWorld
from wmrl_embodied.core.seeding import generator
from wmrl_embodied.core.types import Context
from wmrl_embodied.envs.metaworld import instructions
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.envs.splits import SPLITS

_AT_ONCE = 32


def evaluate(
    policy: ActingPolicy,
    pool: SimulatorPool,
    perception: Perception,
    tasks: Sequence[str],
    states: int,
    chunks: int,
    split: str = "held_out",
    deterministic: bool = True,
    to_the_horizon: bool = False,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """One row a task: `index`, `success_once`, `success_at_end` and `already_successful` of every state.

    Args:
        states: how many of the listed states of `split`, from the first.
        deterministic: act with the mean action; otherwise with exploration noise keyed by `seed` and state.
        to_the_horizon: act on after a success, which `success_at_end` needs; it is null otherwise.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: one of {', '.join(SPLITS)}")
    if not 1 <= states <= len(SPLITS[split]):
        raise ValueError(f"states={states}: must be in [1, {len(SPLITS[split])}]")
    for task in tasks:
        started = time.perf_counter()
        contexts = [Context(task, SPLITS[split][i], instructions()[task]) for i in range(states)]
        once: list[int] = []
        at_end: list[int | None] = []
        already: list[int] = []
        for start in range(0, states, _AT_ONCE):
            batch = contexts[start : start + _AT_ONCE]
            world = SimulatorWorld(pool, perception, stop_at_success=not to_the_horizon)
            noise = None
            if not deterministic:
                keys = (generator(seed, 0, f"evaluation {task}", context.index) for context in batch)
                noise = torch.cat([policy.exploration_noise(1, chunks, key) for key in keys])
            attempts = rollout(policy, world, batch, chunks, noise, stop_at_success=not to_the_horizon)
            once += [int(success) for success in world.success_once]
            at_end += [int(success) if to_the_horizon else None for success in world.success_at_end]
            already += [int(attempt.info["already_successful"]) for attempt in attempts]
        yield {
            "split": split,
            "task": task,
            "index": [context.index for context in contexts],
            "success_once": once,
            "success_at_end": at_end,
            "already_successful": already,
            "deterministic": deterministic,
            "seconds": time.perf_counter() - started,
        }
