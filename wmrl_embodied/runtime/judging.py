"""`wmrl-eval` without its command line: a policy and a `task` configuration in, rows of successes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig

from wmrl_embodied.adapters.simulator import Perception
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.envs.rendering import probe
from wmrl_embodied.evaluation.statistics import proportion_interval
from wmrl_embodied.policies.loading import load_policy
from wmrl_embodied.runtime.evaluate import evaluate
from wmrl_embodied.runtime.limits import check_limits
from wmrl_embodied.runtime.training import check_fit, embodied_settings, simulator_settings


def judge(config: DictConfig) -> Iterator[dict[str, Any]]:
    """The rows of `evaluate`, each with `text` that says it in words.

    Raises:
        ValueError: bad settings or policy.
    """
    if config.policy.path is None:
        raise ValueError(
            "policy.path=null: name a pretrained_model folder; wmrl-sft and wmrl-train write them"
        )
    check_limits(config)
    torch.set_num_threads(config.threads)
    loaded = load_policy(config.policy.path)
    check_fit(loaded, config.task)
    settings = embodied_settings(config.task)
    probe()
    with SimulatorPool(
        simulator_settings(config.task, loaded.policy.config.chunk_size), config.task.workers
    ) as pool:
        for row in evaluate(
            loaded.policy,
            pool,
            Perception(loaded.policy, loaded.preprocessor),
            settings.tasks,
            config.states,
            settings.chunks,
            config.split,
            config.deterministic,
            config.to_the_horizon,
            config.seed,
        ):
            yield row | {"text": _in_words(row)}


def _in_words(row: dict[str, Any]) -> str:
    counts = [
        once
        for once, already in zip(row["success_once"], row["already_successful"], strict=True)
        if not already
    ]
    estimate = proportion_interval(sum(counts), len(counts))
    text = f"{row['task']}: success {sum(counts)}/{len(counts)} = {estimate.value:.2f} "
    text += f"[{estimate.low:.2f}, {estimate.high:.2f}] on {row['split']} states"
    if None not in row["success_at_end"]:
        text += f", at the end {sum(row['success_at_end'])}/{len(counts)}"
    return text
