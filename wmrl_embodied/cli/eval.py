"""`wmrl-eval`: success of a policy on listed initial states."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from wmrl_embodied.cli.command import command


@command("eval")
def main(config: DictConfig) -> None:
    """Evaluate, print one line a task, append the rows to `output`."""
    from wmrl_embodied.runtime.judging import judge

    for row in judge(config):
        print(row.pop("text"), flush=True)
        if config.output is not None:
            path = Path(config.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
