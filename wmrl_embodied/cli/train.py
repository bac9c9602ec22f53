"""`wmrl-train`: post-train a policy with a world model."""

from __future__ import annotations

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
    print(f"done: {folder} (wmrl-report run={folder} makes the report)")


if __name__ == "__main__":
    main()
