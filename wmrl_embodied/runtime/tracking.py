"""Optional tracking with Weights & Biases; `metrics.jsonl` is written either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

MODES = ("disabled", "offline", "online")


@contextmanager
def open_tracker(config: DictConfig, folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that takes one row of metrics a step.

    Raises:
        ValueError: `wandb` is not one of `MODES`.
    """
    if config.wandb not in MODES:
        raise ValueError(f"wandb={config.wandb!r}: one of {', '.join(MODES)}")
    if config.wandb == "disabled":
        yield lambda row: None
        return
    import wandb  # slow to import, and not needed by most runs

    settings = OmegaConf.to_container(config, resolve=True)
    run = wandb.init(project="wmrl-embodied", dir=folder, mode=config.wandb, config=settings)
    try:
        yield lambda row: run.log(row, step=row["step"])
    finally:
        run.finish()
