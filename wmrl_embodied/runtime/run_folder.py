"""The folder of one run: what it was asked, what it measured, and checkpoints that appear whole or not at all.

Knows files, not training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

CONFIG = "config.yaml"
STATE = "training_state.pt"
POLICY = "pretrained_model"
_LOGS = ("metrics.jsonl", "evaluations.jsonl", "pairs.jsonl")


class NoCheckpoint(ValueError):
    """The folder is not a run that can be continued; the message says what is missing."""


class RunFolder:
    """See the module; `create` starts a run, `reopen` continues one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: DictConfig) -> RunFolder:
        """A new run in an empty or absent folder.

        Raises:
            FileExistsError: the folder holds a run already.
        """
        if (path / CONFIG).exists():
            raise FileExistsError(
                f"output_dir={path} holds a run already: continue it with resume={path}, or choose another folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        _write(path / CONFIG, OmegaConf.to_yaml(config, resolve=True).encode())
        return cls(path)

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """A run that was interrupted, cut back to its latest checkpoint.

        Raises:
            NoCheckpoint: there is no run, or no whole checkpoint in it.
        """
        if not (path / CONFIG).is_file():
            raise NoCheckpoint(f"resume={path}: no {CONFIG} there, so it is not a run folder of wmrl-train")
        run = cls(path)
        step = run.latest_step()
        if step is None:
            raise NoCheckpoint(
                f"resume={path}: the run has no checkpoint yet; start it anew in another folder"
            )
        for log in _LOGS:
            run._cut(path / log, step)
        return run

    @property
    def config(self) -> DictConfig:
        """The resolved configuration the run was started with."""
        return OmegaConf.load(self.path / CONFIG)

    def log(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to `name`.jsonl."""
        with (self.path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def checkpoint(self, step: int, write_policy: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Write `checkpoints/STEP/` with the policy and the training state; older ones lose their state only.

        Written beside, fsynced, then renamed: a crash leaves the previous checkpoint.
        """
        final = self._checkpoint(step)
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_policy(partial / POLICY)
        torch.save(state, partial / STATE)
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(final.parent)
        for older in self._steps():
            if older < step:
                (self._checkpoint(older) / STATE).unlink(missing_ok=True)
        return final

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint that can be continued from."""
        return max(
            (step for step in self._steps() if (self._checkpoint(step) / STATE).is_file()), default=None
        )

    def load_state(self, step: int) -> dict[str, Any]:
        """The training state of a checkpoint.

        Raises:
            NoCheckpoint: the file cannot be read.
        """
        file = self._checkpoint(step) / STATE
        try:
            return torch.load(file, weights_only=True)
        except Exception as error:  # torch raises a different class for every way a file can be broken
            raise NoCheckpoint(f"{file}: not a training state of wmrl-train ({error})") from error

    def policy_path(self, step: int) -> Path:
        """The `pretrained_model` folder of a checkpoint."""
        return self._checkpoint(step) / POLICY

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"{step:06d}"

    def _steps(self) -> list[int]:
        return sorted(int(folder.name) for folder in self.path.glob("checkpoints/*") if folder.name.isdigit())

    def _cut(self, log: Path, step: int) -> None:
        """Drop the lines of steps after the checkpoint: they will be written again."""
        if log.exists():
            lines = log.read_text().splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            _write(log, "".join(f"{line}\n" for line in kept).encode())


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    _sync(partial)
    partial.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
