"""Several arms and seeds from one cloned policy, in one folder: OUTPUT/ARM/seedK. Goes on where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from wmrl_embodied.core.trainer import Interrupted
from wmrl_embodied.runtime.cloning import run_cloning
from wmrl_embodied.runtime.limits import check_limits
from wmrl_embodied.runtime.run_folder import CONFIG
from wmrl_embodied.runtime.training import train


def compare(config: DictConfig, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Clone once, train every arm with every seed; returns the experiment folder.

    Args:
        config: of `configs/demo.yaml` or `configs/bench_embodied.yaml`. An arm is a correction, or has a
            `correction=` among its own overrides in `settings`.
        should_stop: asked between executions.

    Raises:
        ValueError: a setting of any of the runs, before the first of them starts.
    """
    check_limits(config)
    output = Path(config.output_dir)
    task = [f"task.tasks=[{','.join(config.tasks)}]", f"task.workers={config.workers}"]
    policy = output / "sft" / "pretrained_model"
    sft = _compose("sft", [*task, f"output_dir={output / 'sft'}", *config.sft])
    runs = []
    for seed in config.seeds:
        for arm in config.arms:
            folder = output / arm / f"seed{seed}"
            own = list(config.settings.get(arm, []))
            if not any(override.startswith("correction=") for override in own):
                own = [f"correction={arm}", *own]
            where = [f"seed={seed}", f"policy.path={policy}", f"output_dir={folder}"]
            begun = (folder / CONFIG).exists()
            fresh = [*task, *where, *config.train, *own]
            runs.append(_compose("train", [f"resume={folder}"] if begun else fresh))
    for part in (sft, *runs):
        check_limits(part)

    if not policy.exists():
        shutil.rmtree(output / "sft", ignore_errors=True)
        run_cloning(sft)
    for run in runs:
        if should_stop():
            raise Interrupted(f"stopped; the same command goes on in {output}")
        train(run, should_stop=should_stop)
    return output


def _compose(name: str, overrides: list[str]) -> DictConfig:
    """The configuration of a command, as its command line would make it."""
    with hydra.initialize_config_module("wmrl_embodied.configs", version_base=None):
        return hydra.compose(name, overrides)
