"""`wmrl-report`: what the runs in a folder found, as report.html, summary.json, success.png and a table."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from wmrl_embodied.cli.command import command


@command("report")
def main(config: DictConfig) -> None:
    """Report on `run`."""
    if config.run is None:
        raise ValueError("run=null: name an experiment or run folder, as in wmrl-report run=outputs/demo")
    if config.resamples < 1 or config.limit_mb <= 0:
        raise ValueError(f"resamples={config.resamples}, limit_mb={config.limit_mb}: both must be positive")
    report(config.run, config.bootstrap_seed, config.resamples, round(config.limit_mb * 1e6))


def report(
    folder: str | Path, bootstrap_seed: int = 0, resamples: int = 2000, limit_bytes: int = 8_000_000
) -> None:
    """Write report.html, summary.json and success.png into `folder`; print the result.

    Raises:
        NoRunError: no such folder, or no run in it.
    """
    from wmrl_embodied.evaluation.runs import find_runs

    find_runs(folder)  # a wrong folder is said at once, not after seconds of importing what draws
    from wmrl_embodied.evaluation.report import text_table, verdict, write_report

    written = write_report(folder, bootstrap_seed, resamples, limit_bytes)
    print(text_table(written.summary), end="\n\n")
    for sentence in verdict(written.summary):
        print(sentence)
    print(f"\nreport   {written.report}\nsummary  {written.summary_file}")


if __name__ == "__main__":
    main()
