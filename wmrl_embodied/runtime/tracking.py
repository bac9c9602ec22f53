"""Optional tracking with Weights & Biases; `metrics.jsonl` is written either way."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

MODES = ("disabled", "offline", "online")


@contextmanager
def open_tracker(config: DictConfig, folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that takes one row of metrics a step.

    Args:
        config: of the run; its `wandb` is one of `MODES`.
        folder: of the run; an offline run is written below it.

    Raises:
        RuntimeError: wandb cannot start, not logged in for instance.
    """
    if config.wandb == "disabled":
        yield lambda row: None
        return
    import wandb  # slow to import, and not needed by most runs

    settings = OmegaConf.to_container(config, resolve=True)
    try:
        run = wandb.init(project="wmrl-embodied", dir=folder, mode=config.wandb, config=settings)
    except wandb.Error as error:
        raise RuntimeError(
            f"wandb={config.wandb}: {error}; or use wandb=offline and `wandb sync` later"
        ) from error
    try:
        yield lambda row: run.log(row, step=row["step"])
    finally:
        run.finish()
        wandb.teardown()  # its service process, which otherwise lives as long as this one
        for socket_folder in Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*"):
            with contextlib.suppress(OSError):
                socket_folder.rmdir()  # the service leaves it behind, empty
