"""Several arms and seeds from one cloned policy, in one folder: OUTPUT/ARM/seedK. Goes on where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from wmrl_embodied.core.trainer import Interrupted
from wmrl_embodied.runtime.cloning import run_cloning
from wmrl_embodied.runtime.run_folder import RunFolder
from wmrl_embodied.runtime.training import train


def compare(config: DictConfig, should_stop: Callable[[], bool] = lambda: False) -> Path:
    """Clone once, train every arm with every seed; returns the experiment folder.

    Args:
        config: of `configs/demo.yaml`.
        should_stop: asked between executions.
    """
    output = Path(config.output_dir)
    task = [f"task.tasks=[{','.join(config.tasks)}]", f"task.workers={config.workers}"]
    policy = output / "sft" / "pretrained_model"
    if not (policy / "policy_postprocessor.json").is_file():  # the last file that is written
        shutil.rmtree(output / "sft", ignore_errors=True)
        run_cloning(_compose("sft", [*task, f"output_dir={output / 'sft'}", *config.sft]))
    for seed in config.seeds:
        for arm in config.arms:
            if should_stop():
                raise Interrupted(f"stopped; the same command goes on in {output}")
            folder = output / arm / f"seed{seed}"
            if RunFolder(folder).latest_step() is None:
                shutil.rmtree(folder, ignore_errors=True)
                where = [f"correction={arm}", f"seed={seed}", f"policy.path={policy}", f"output_dir={folder}"]
                train(_compose("train", [*task, *where, *config.train]), should_stop=should_stop)
            else:
                train(_compose("train", [f"resume={folder}"]), should_stop=should_stop)
    return output


def _compose(name: str, overrides: list[str]) -> DictConfig:
    """The configuration of a command, as its command line would make it."""
    with hydra.initialize_config_module("wmrl_embodied.configs", version_base=None):
        return hydra.compose(name, overrides)
