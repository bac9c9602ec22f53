"""`wmrl-bench`: the product's claims, measured. `theory` on a synthetic problem, `embodied` on robots in simulation."""

from __future__ import annotations

import sys
from importlib import resources

from omegaconf import DictConfig, OmegaConf

from wmrl_embodied.cli.command import command

USAGE = """wmrl-bench: measure what the corrections are worth; goes on where it was interrupted.

  wmrl-bench theory     error and final score of every estimator where both are known exactly (minutes)
  wmrl-bench embodied   success against real executions on Meta-World (hours)

--quick makes either small. wmrl-bench theory --help shows the settings."""


def main() -> None:
    """Pick the benchmark by the first word; the rest are Hydra overrides of its configuration."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name not in BENCHMARKS:
        known = name in ("", "-h", "--help")
        print(USAGE if known else f"error: {name}: must be one of {', '.join(BENCHMARKS)}\n\n{USAGE}")
        raise SystemExit(0 if known else 2)
    if "--quick" in rest:
        file = resources.files("wmrl_embodied.configs") / f"bench_{name}.yaml"
        rest = [*OmegaConf.create(file.read_text()).quick, *(word for word in rest if word != "--quick")]
    sys.argv = [f"{sys.argv[0]} {name}", *rest]
    BENCHMARKS[name]()


@command("bench_embodied")
def _embodied(config: DictConfig) -> None:
    from wmrl_embodied.cli.demo import run

    run(config)


@command("bench_theory")
def _theory(config: DictConfig) -> None:
    from pathlib import Path

    from wmrl_embodied.theory.bench import all_jobs, run
    from wmrl_embodied.theory.figures import draw

    # One seed has no interval.
    for name, least in (("repeats", 2), ("workers", 1), ("learning_steps", 1)):
        if not isinstance(config[name], int) or config[name] < least:
            raise ValueError(f"{name}={config[name]}: must be a whole number of at least {least}")
    if not config.learning_rate > 0:
        raise ValueError(f"learning_rate={config.learning_rate}: must be above 0")
    folder = Path(config.output_dir)
    jobs = all_jobs(config.repeats)
    summary = run(folder, jobs, config.workers, config.learning_steps, config.learning_rate)
    for claim, value in summary["claims"].items():
        print(f"{claim}: {value}")
    print(f"\n{summary['seeds']} seeds; {folder / 'theory.json'}", *draw(summary, folder))


BENCHMARKS = {"embodied": _embodied, "theory": _theory}

if __name__ == "__main__":
    main()
