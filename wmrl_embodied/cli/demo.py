"""`make demo`: clone, train every arm from the same clone, report. Run again, it goes on where it stopped."""

from __future__ import annotations

from omegaconf import DictConfig

from wmrl_embodied.cli.command import command


@command("demo")
def main(config: DictConfig) -> None:
    """Run what is not done yet."""
    run(config)


def run(config: DictConfig) -> None:
    """Train all arms and seeds, then report on them; also what `wmrl-bench embodied` does."""
    from hydra.core.global_hydra import GlobalHydra

    from wmrl_embodied.runtime.comparison import compare
    from wmrl_embodied.runtime.interrupt import stop_on_signal

    GlobalHydra.instance().clear()  # this command's configuration is read; those of the parts are composed next
    with stop_on_signal() as stop:
        folder = compare(config, stop)

    from wmrl_embodied.cli.report import report

    report(folder)


if __name__ == "__main__":
    main()
