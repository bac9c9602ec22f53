"""`wmrl-sft` without its command line: a configuration in, a dataset and a `pretrained_model` folder out."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from omegaconf import DictConfig

from wmrl_embodied.envs.demonstrations import collect_dataset
from wmrl_embodied.envs.metaworld import check_task
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.envs.rendering import probe
from wmrl_embodied.policies.cloning import CloningSettings, clone, load_frames, new_policy
from wmrl_embodied.policies.loading import LoadedPolicy
from wmrl_embodied.runtime.limits import check_limits
from wmrl_embodied.runtime.training import simulator_settings

IMAGE = "observation.image"


def run_cloning(config: DictConfig) -> Path:
    """Collect demonstrations unless there are some, clone a new MiniVLA, save it; returns its folder.

    Raises:
        ValueError, OSError, RuntimeError: bad settings, no rendering, an unreadable dataset.
    """
    check_limits(config)
    if config.policy.width % config.policy.heads:
        raise ValueError(
            f"policy.heads={config.policy.heads}: must divide policy.width={config.policy.width}"
        )
    torch.set_num_threads(config.threads)
    output = Path(config.output_dir)
    settings = CloningSettings(**config.cloning, seed=config.seed)
    for task in config.task.tasks:
        check_task(task)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"output_dir={output} cannot be made ({error.strerror}): choose another folder"
        ) from error
    if config.demonstrations.path is not None:
        dataset = _open(config.demonstrations.path)
    else:
        dataset = _collect(config, output / "demonstrations")
    frames = load_frames(dataset, IMAGE, config.policy.chunk_size)
    policy, preprocessor, postprocessor = new_policy(dataset, IMAGE, config.seed, **config.policy)
    clone(policy, preprocessor, frames, settings)
    folder = output / "pretrained_model"
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    LoadedPolicy(policy, preprocessor, postprocessor).save(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _collect(config: DictConfig, root: Path) -> LeRobotDataset:
    if root.exists():
        raise FileExistsError(
            f"{root} exists: use it with demonstrations.path={root}, or choose another output_dir"
        )
    probe()
    partial = root.with_name(f"{root.name}.partial")  # whatever has the final name is whole
    shutil.rmtree(partial, ignore_errors=True)
    settings = simulator_settings(config.task, config.policy.chunk_size)
    with SimulatorPool(settings, config.task.workers) as pool:
        wanted = config.demonstrations
        collect_dataset(pool, config.task.tasks, wanted.per_task, wanted.noise, config.seed, partial)
    partial.rename(root)
    return _open(str(root))


def _open(path: str) -> LeRobotDataset:
    """A dataset from a folder or the hub."""
    folder = Path(path)
    if folder.exists() and not (folder / "meta" / "info.json").is_file():
        raise ValueError(f"demonstrations.path={path}: no meta/info.json there, so it is no LeRobotDataset")
    try:
        if folder.exists():
            return LeRobotDataset(repo_id=f"local/{folder.name}", root=folder)
        return LeRobotDataset(repo_id=path)
    except Exception as error:  # the hub client and the readers of datasets raise many kinds
        where = (
            "a broken dataset"
            if folder.exists()
            else "no such folder, and no dataset on the Hugging Face hub"
        )
        raise ValueError(
            f"demonstrations.path={path}: {where} ({textwrap.shorten(str(error), 160)})"
        ) from error
