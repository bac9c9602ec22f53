"""What all console commands share: Hydra, one clear line for an expected error, exit codes that scripts can use.

0 done, 2 bad input or surroundings, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from wmrl_embodied.runtime.limits import check_limits

# Before torch is imported: simulator workers and torch would otherwise take every core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Turn a function of the configuration into a command."""

    def decorate(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        def guarded(config: DictConfig) -> None:
            logging.getLogger().setLevel(
                logging.ERROR
            )  # libraries warn in pages of what does not matter here
            logging.getLogger("wmrl_embodied").setLevel(logging.WARNING)
            try:
                check_limits(config)  # at once, not after the seconds that importing torch takes
                function(config)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise SystemExit(130) from None
            except (ValueError, OSError, RuntimeError, FloatingPointError, KeyError) as error:
                if os.environ.get("WMRL_TRACEBACK"):
                    raise
                message = error.args[0] if isinstance(error, KeyError) and error.args else error
                interrupted = type(error).__name__ == "Interrupted"  # importing its class would import torch
                text = " ".join(str(message).split())  # libraries write whole paragraphs
                print(text if interrupted else f"error: {text}", file=sys.stderr)
                raise SystemExit(130 if interrupted else 2) from error

        return hydra.main(
            version_base=None, config_path="pkg://wmrl_embodied.configs", config_name=config_name
        )(guarded)

    return decorate
