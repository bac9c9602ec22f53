"""`wmrl-train`: post-train a policy with a world model."""

from __future__ import annotations

import json

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from wmrl_embodied.cli.command import command


@command("train")
def main(config: DictConfig) -> None:
    """Start a run or resume one."""
    from wmrl_embodied.runtime.interrupt import stop_on_signal
    from wmrl_embodied.runtime.training import train

    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task)
    with stop_on_signal() as stop:
        folder = train(config, overrides, stop)
    log = folder / "metrics.jsonl"
    last = json.loads(log.read_text().splitlines()[-1]) if log.exists() else {"executions": 0}
    left = f", {last['budget_left']:,} of the budget left" if "budget_left" in last else ""
    print(
        f"done: {folder}, {last['executions']:,} executions{left} (wmrl-report run={folder} makes the report)"
    )


if __name__ == "__main__":
    main()
