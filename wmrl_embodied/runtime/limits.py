"""What every number and choice in `configs/` may be; looked at before anything is built, let alone executed.

Knows names and limits, not what a setting is for. Limits that depend on another setting are checked elsewhere. Words
that `core` chooses by are repeated here, since it takes seconds to import, and `--help` reads this; a test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from wmrl_embodied.envs.splits import HELD_OUT, SPLITS, TRAIN
from wmrl_embodied.runtime.tracking import MODES


@dataclass(frozen=True)
class Number:
    """A finite number in [low, high], or in (low, high] when `low` itself is out; or a word in its place."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above_low: bool = False
    null: bool = False
    word: str | None = None

    def allows(self, value: Any) -> bool:
        """Whether a configured value is one of these."""
        if value is None:
            return self.null
        if isinstance(value, str):
            return value == self.word
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.whole and not isinstance(value, int):
            return False
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        if math.isfinite(self.low) and math.isfinite(self.high):
            kind += f" in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"
        elif math.isfinite(self.low):
            kind += f" {'above' if self.above_low else 'of at least'} {self.low:g}"
        return kind + (f", or {self.word}" if self.word else "") + (", or null" if self.null else "")


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    among: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        """Whether a configured value is one of these."""
        return isinstance(value, str) and value in self.among

    def __str__(self) -> str:
        return f"one of {', '.join(self.among)}"


@dataclass(frozen=True)
class Text:
    """Any text."""

    null: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a configured value is text."""
        return self.null if value is None else isinstance(value, str)

    def __str__(self) -> str:
        return "text" + (", or null" if self.null else "")


@dataclass(frozen=True)
class Switch:
    """True or false."""

    def allows(self, value: Any) -> bool:
        """Whether a configured value is one of the two."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Listed:
    """A list of at least one such item, none of them twice."""

    item: Number | Text
    example: str

    def allows(self, value: Any) -> bool:
        """Whether a configured value is such a list."""
        if not isinstance(value, list) or not value or not all(self.item.allows(item) for item in value):
            return False
        return len(set(value)) == len(value)

    def __str__(self) -> str:
        return f"a list of at least one and none twice, such as {self.example}"


def _whole(low: float, high: float = math.inf, null: bool = False) -> Number:
    return Number(low, high, whole=True, null=null)


_POSITIVE = Number(0, above_low=True)
_SHARE = Number(0, 1)
_TASKS = Listed(Text(), "[button-press-topdown-v3]")

LIMITS: dict[str, Number | Choice | Text | Switch | Listed] = {
    "output_dir": Text(),
    "resume": Text(null=True),
    "seed": _whole(0, 2**31 - 1),
    "steps": _whole(0),
    "threads": _whole(1),
    "media": Switch(),
    "checkpoint_every": _whole(1),
    "wandb": Choice(MODES),
    "task.tasks": _TASKS,
    "task.image_size": _whole(16),
    "task.action_repeat": _whole(1),
    "task.chunks": _whole(1),
    "task.train_states": _whole(1, len(TRAIN)),
    "task.workers": _whole(1),
    "task.groups_at_once": _whole(1),
    "trainer.groups": _whole(1),
    "trainer.group_size": _whole(2),
    "trainer.warmup_steps": _whole(0),
    "trainer.warmup_groups": _whole(1, null=True),
    "anchors.fraction": Number(0, 1, word="auto"),
    "anchors.floor": _whole(0),
    "anchors.cap": _whole(0, null=True),
    "anchors.budget": _whole(0, null=True),
    "anchors.strategy": Choice(("random", "uncertain", "gate")),
    "anchors.gate": Number(0),
    "anchors.uniform_share": Number(0, 1, above_low=True),
    "correction.name": Text(),
    "correction.standardize": Switch(),
    "correction.spread_gate": Number(0),
    "correction.cross_fit": Switch(),
    "correction.half_life": _POSITIVE,
    "correction.min_groups": Number(2, above_low=True),
    "correction.horizon": Number(1),
    "correction.memory": Number(0, 0.99),
    "correction.debias.kind": Choice(("binned", "isotonic")),
    "correction.debias.half_life": Number(0, above_low=True, null=True),
    "correction.debias.shrink_pairs": Number(0, null=True),
    "correction.debias.drift_threshold": Number(0, above_low=True, null=True),
    "correction.denoise.kind": Choice(("disagreement", "variance", "correlation")),
    "policy_update.learning_rate": _POSITIVE,
    "policy_update.epochs": _whole(1),
    "policy_update.minibatch": _whole(1, null=True),
    "policy_update.clip_low": Number(0, 1, above_low=True),
    "policy_update.clip_high": Number(0, above_low=True, null=True),
    "policy_update.kl_coefficient": Number(0),
    "policy_update.kl_linear_above": Number(0, above_low=True, null=True),
    "policy_update.max_grad_norm": _POSITIVE,
    "policy_update.kl_limit": Number(0, above_low=True, null=True),
    "eval.every": _whole(0),
    "eval.states": _whole(1, len(HELD_OUT)),
    "eval.deterministic": Switch(),
    "eval.to_the_horizon": Switch(),
    "world_model.kind": Choice(("dynamics", "simulator")),
    "world_model.members": _whole(1),
    "world_model.width": _whole(2),
    "world_model.landmarks": _whole(1),
    "world_model.steps": _whole(1),
    "world_model.groups_per_batch": _whole(1),
    "world_model.learning_rate": _POSITIVE,
    "world_model.weight_decay": Number(0),
    "world_model.newest_share": _SHARE,
    "world_model.newest": _whole(1),
    "world_model.feature_weight": Number(0),
    "world_model.proprio_weight": Number(0),
    "world_model.group_weight": Number(0),
    "policy.path": Text(null=True),
    "policy.action_std": Number(0, above_low=True, null=True),
    "policy.noise_correlation": Number(0, 0.999, null=True),
    "policy.chunk_size": _whole(1),
    "policy.n_action_steps": _whole(1),
    "policy.keypoints": _whole(1),
    "policy.width": _whole(2),
    "policy.depth": _whole(1),
    "policy.heads": _whole(1),
    "demonstrations.per_task": _whole(1),
    "demonstrations.noise": Number(0),
    "demonstrations.path": Text(null=True),
    "cloning.steps": _whole(1),
    "cloning.batch_size": _whole(1),
    "cloning.learning_rate": _POSITIVE,
    "cloning.weight_decay": Number(0),
    "split": Choice(tuple(SPLITS)),
    "states": _whole(1, len(HELD_OUT)),
    "deterministic": Switch(),
    "to_the_horizon": Switch(),
    "output": Text(null=True),
    "tasks": _TASKS,
    "arms": Listed(Text(), "[real_small,wmrl]"),
    "seeds": Listed(_whole(0, 2**31 - 1), "[0,1,2]"),
    "workers": _whole(1),
}


def check_limits(config: DictConfig) -> None:
    """Check every setting of a command that is in `LIMITS`.

    Raises:
        ValueError: names the key as it is typed, the value and the limit.
    """
    for key, limit in LIMITS.items():
        section, _, name = key.rpartition(".")
        holder = OmegaConf.select(config, section) if section else config
        if not isinstance(holder, DictConfig) or name not in holder:
            continue
        value = holder[name]
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if not limit.allows(value):
            raise ValueError(f"{key}={_typed(value)}: must be {limit}")


def _typed(value: Any) -> str:
    """As it would be typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
