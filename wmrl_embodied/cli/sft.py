"""`wmrl-sft`: demonstrations and behaviour cloning, the start that reinforcement learning needs."""

from __future__ import annotations

from omegaconf import DictConfig

from wmrl_embodied.cli.command import command


@command("sft")
def main(config: DictConfig) -> None:
    """Collect (or open) demonstrations, clone, save."""
    from wmrl_embodied.runtime.cloning import run_cloning

    print(f"done: {run_cloning(config)}")


if __name__ == "__main__":
    main()
