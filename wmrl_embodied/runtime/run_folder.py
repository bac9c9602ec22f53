"""The folder of one run: what it was asked, what it measured, and checkpoints that appear whole or not at all.

Knows files, not training.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
STATE = "training_state.pt"
POLICY = "pretrained_model"
_LOGS = ("metrics.jsonl", "evaluations.jsonl", "pairs.jsonl")


class NoCheckpoint(ValueError):
    """The folder is not a run that can be continued; the message says what is missing."""


class RunFolder:
    """See the module; `create` starts a run, `reopen` continues one.

    A folder is a run once `config.yaml` is in it, which appears with the first checkpoint: every run can be continued.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A folder for a new run, made if it is absent.

        Raises:
            FileExistsError: the folder holds a run already.
            OSError: the folder cannot be made or written to.
        """
        if (path / CONFIG).exists():
            raise FileExistsError(
                f"output_dir={path} holds a run already: continue it with resume={path}, or choose another folder"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise OSError(
                f"output_dir={path} cannot be written to ({error.strerror}): choose another folder"
            ) from error
        return cls(path)

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """A run that was interrupted.

        Raises:
            NoCheckpoint: there is no run, or no whole checkpoint in it.
        """
        if not (path / CONFIG).is_file():
            raise NoCheckpoint(f"resume={path}: no {CONFIG} there, so it is not a run folder of wmrl-train")
        run = cls(path)
        if run.latest_step() is None:
            raise NoCheckpoint(
                f"resume={path}: no checkpoints/STEP/{STATE} there to continue from; start anew in another folder"
            )
        try:
            run.config  # noqa: B018
        except Exception as error:  # YAML and OmegaConf raise many kinds
            raise NoCheckpoint(f"resume={path}: {CONFIG} cannot be read ({error})") from error
        return run

    def begin(self, config: DictConfig) -> None:
        """Make the folder a run. Its first checkpoint is there, and whoever calls this holds the ledger."""
        _write(self.path / PROVENANCE, (json.dumps(provenance(), indent=2) + "\n").encode())
        self.config = config

    def cut_back(self) -> None:
        """Drop from the logs what will be written again: all after the latest checkpoint, and the first judgement
        if that is the first one. Only whoever holds the ledger may do this.
        """
        step = self.latest_step()
        for log in _LOGS:
            self._cut(self.path / log, step or -1)

    @property
    def config(self) -> DictConfig:
        """The resolved configuration the run was started with, and what was changed when it was resumed."""
        return OmegaConf.load(self.path / CONFIG)

    @config.setter
    def config(self, config: DictConfig) -> None:
        _write(self.path / CONFIG, OmegaConf.to_yaml(config, resolve=True).encode())

    def log(self, name: str, row: dict[str, Any]) -> None:
        """Append one JSON line to `name`.jsonl."""
        path = self.path / f"{name}.jsonl"
        with _named(path), path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def checkpoint(self, step: int, write_policy: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Write `checkpoints/STEP/` with the policy and the training state; older ones lose their state only.

        Written beside, fsynced, then renamed: a crash leaves the previous checkpoint.

        Raises:
            OSError: it cannot be written, and the previous checkpoint is still there.
        """
        final = self._checkpoint(step)
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for log in _LOGS:
                if (self.path / log).exists():
                    _sync(self.path / log)
            partial.mkdir(parents=True)
            write_policy(partial / POLICY)
            torch.save(state, partial / STATE)
            for file in partial.rglob("*"):
                _sync(file)
            _sync(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(final.parent)
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch's and safetensors' words for a full disk
            free = shutil.disk_usage(self.path).free
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"{final}: checkpoint not written, {free / 1e6:,.1f} MB are free ({error}); make room and continue "
                f"with resume={self.path}, what was executed is in the ledger"
            ) from error
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
            state = torch.load(file, weights_only=True)
            if state["step"] != step:
                raise ValueError(f"of step {state['step']}")
        except Exception as error:  # torch raises a different class for every way a file can be broken
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise NoCheckpoint(
                f"{file}: not a training state of wmrl-train ({reason}); restore it from a copy, or start anew in "
                "another folder"
            ) from error
        return state

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


def provenance() -> dict[str, str]:
    """How this process was started: `command`, `commit` (or the version, if installed without one) and `machine`."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "mujoco", "lerobot"))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {versions}"
    return {"command": command, "commit": _commit(), "machine": machine}


def _commit() -> str:
    """Of the source this file is tracked in; an installed package may lie inside somebody else's repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        for question in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty"]):
            answer = subprocess.run([*git, *question], capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"version {metadata.version('wmrl-embodied')}"


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with _named(path):
        partial.write_bytes(content)
        _sync(partial)
        partial.rename(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of writing name the file; the system's own do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
