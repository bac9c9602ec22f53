"""Reads what training leaves in a run folder: metrics, evaluations, pairs, media, configuration.

Read-only, and patient: an interrupted run has files that are missing, short or torn, and all that is readable
counts. What had to be skipped is said in `Run.notes`. Knows no statistics and no plots.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

RUN_FILES = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "pairs.jsonl")
"""A folder that holds one of these is a run folder."""

MEDIA = {
    "rollouts_before": ("frames", "task", "success"),
    "rollouts_after": ("frames", "task", "success"),
    "imagined": (
        "real_frames",
        "real_proprio",
        "imagined_proprio",
        "success_probability",
        "success_step",
        "task",
    ),
}
"""Name of each media file -> the arrays it must hold."""

HELD_OUT = "held_out"


class NoRunError(FileNotFoundError):
    """The folder does not exist or holds no run; the message says what was looked for."""


@dataclass(frozen=True)
class Evaluation:
    """One line of evaluations.jsonl: one task, N episodes from listed initial states.

    Attributes:
        step: training steps before this evaluation; 0 is the policy that training started from (SFT).
        executions: real executions spent on training until then.
        split: "held_out" or "train".
        task: its name.
        index: (N,) listed initial state of every episode; a state rolled out K times is listed K times.
        success_once: (N,) success at any step of the episode, NaN where missing.
        success_at_end: (N,) success at the last step.
        already_successful: (N,) 1 if the state was a success at reset, before the policy did anything.
        deterministic: whether actions were the policy's mean (True) or sampled.
        seconds: wall-clock time that the evaluation took.
    """

    step: int
    executions: float
    split: str
    task: str
    index: np.ndarray
    success_once: np.ndarray
    success_at_end: np.ndarray
    already_successful: np.ndarray
    deterministic: bool
    seconds: float


@dataclass(frozen=True)
class Pairs:
    """One line of pairs.jsonl: an executed group, and what had been predicted for it before learning.

    Attributes:
        step: training step that executed it.
        task: name of its context's task.
        index: listed initial state of its context.
        executed: (G,) executed scores, NaN where missing.
        predicted: (G,) predicted means.
        predicted_variance: (G,) predicted variances.
    """

    step: int
    task: str
    index: int
    executed: np.ndarray
    predicted: np.ndarray
    predicted_variance: np.ndarray


@dataclass
class Run:
    """A run folder, read lazily: each property reads its file once, and is empty if the file is not there.

    Attributes:
        folder: where it lies.
        arm: which method it ran (the folder above `seed<k>`, or the configured `correction`).
        seed: of the run; None if unknown.
        notes: what was skipped while reading, in words. Grows as properties are read.
    """

    folder: Path
    arm: str
    seed: int | None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """The run in `folder`.

        Raises:
            NoRunError: the folder does not exist, or holds none of `RUN_FILES`.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise NoRunError(f"{folder}: no such folder")
        if not _is_run(folder):
            raise NoRunError(f"{folder}: no run here; looked for {_listed(RUN_FILES)}")
        run = cls(folder, arm="", seed=None)
        # The absolute path, so that `.` has a name too; symbolic links keep the name the user gave them.
        place = folder.absolute()
        match = re.fullmatch(r"seed[_-]?(\d+)", place.name)
        run.arm = place.parent.name if match else str(_correction(run.config) or place.name)
        run.seed = int(match[1]) if match else _whole(run.config.get("seed"))
        return run

    @property
    def name(self) -> str:
        """`arm/seed<k>`, as the folder is laid out."""
        return self.arm if self.seed is None else f"{self.arm}/seed{self.seed}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return {}
        try:
            content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except Exception as error:  # YAML and OmegaConf raise many kinds
            self.notes.append(f"config.yaml cannot be read: {str(error).splitlines()[0]}")
            return {}
        return {str(k): v for k, v in content.items()} if isinstance(content, dict) else {}

    @cached_property
    def provenance(self) -> dict[str, str]:
        """How it was run, as recorded: `command`, `commit` and more, from provenance.json or else config.yaml."""
        path, found = self.folder / "provenance.json", {}
        if path.is_file():
            try:
                found = json.loads(path.read_text())
            except ValueError:
                self.notes.append("provenance.json cannot be read")
        if not isinstance(found, dict):
            found = {}
        for key in ("command", "commit", "machine"):
            if key not in found and self.config.get(key) is not None:
                found[key] = self.config[key]
        return {str(k): " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in found.items()}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a training step, in order; where a resumed run wrote a step again, the last row counts."""
        rows = {}
        for line, row in self._lines("metrics.jsonl"):
            step = _whole(row.get("step"))
            if step is None:
                self.notes.append(f"metrics.jsonl: line {line} skipped, no step")
            else:
                rows[step] = row
        return [rows[step] for step in sorted(rows)]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """All evaluations in order of their step; of equal ones (same step, task, states) the last counts."""
        rows = {}
        for line, row in self._lines("evaluations.jsonl"):
            try:
                evaluation = _evaluation(row)
            except (KeyError, TypeError, ValueError) as error:
                self.notes.append(f"evaluations.jsonl: line {line} skipped, {_reason(error)}")
                continue
            e = evaluation
            rows[e.step, e.split, e.task, e.deterministic, tuple(e.index)] = evaluation
        return sorted(rows.values(), key=lambda e: e.step)

    @cached_property
    def pairs(self) -> list[Pairs]:
        """All executed groups with their predictions, in order of their step."""
        rows = {}
        for line, row in self._lines("pairs.jsonl"):
            try:
                arrays = [_floats(row[k]) for k in ("executed", "predicted")]
                variance = row.get("predicted_variance")
                arrays.append(_floats(variance) if variance is not None else np.full(len(arrays[0]), np.nan))
                _check_equal_lengths(arrays, "executed, predicted, predicted_variance")
                pairs = Pairs(int(row["step"]), str(row["task"]), int(row["index"]), *arrays)
            except (KeyError, TypeError, ValueError) as error:
                self.notes.append(f"pairs.jsonl: line {line} skipped, {_reason(error)}")
                continue
            rows.setdefault((pairs.step, pairs.task, pairs.index), []).append(pairs)
        # A resumed run may write the same group again: identical lines are one group.
        unique = [g for same in rows.values() for g in _without_repeats(same)]
        return sorted(unique, key=lambda g: g.step)

    def media(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of `media/<name>.npz`, or None if it is missing or cannot be read.

        Raises:
            KeyError: `name` is none of `MEDIA`.
        """
        path, needed = self.folder / "media" / f"{name}.npz", MEDIA[name]
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {key: archive[key] for key in needed}
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            note = f"media/{name}.npz cannot be read: {_reason(error)}"
            if note not in self.notes:
                self.notes.append(note)
            return None

    @property
    def missing(self) -> list[str]:
        """The documented files that are not there."""
        names = [*RUN_FILES, *(f"media/{name}.npz" for name in MEDIA)]
        return [name for name in names if not (self.folder / name).is_file()]

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, object) of each readable line; others are skipped and noted.

        A killed process leaves its last line torn, and a resumed one may write right behind it.
        """
        path = self.folder / name
        if not path.is_file():
            return
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:  # also UnicodeDecodeError
                self.notes.append(f"{name}: line {number} skipped, torn")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                self.notes.append(f"{name}: line {number} skipped, not an object")


def find_runs(folder: str | Path) -> list[Run]:
    """The runs of an experiment folder, `<arm>/seed<k>/`, sorted; or the folder itself if it is a run.

    `seed<k>/` right below (one arm's folder) is found too.

    Raises:
        NoRunError: the folder does not exist or holds no run; says what was looked for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    below = [p for pattern in ("seed*", "*/seed*") for p in folder.glob(pattern) if p.is_dir() and _is_run(p)]
    if below:
        runs = [Run.load(p) for p in below]
        return sorted(runs, key=lambda r: (r.arm, -1 if r.seed is None else r.seed))
    if _is_run(folder):
        return [Run.load(folder)]
    raise NoRunError(
        f"{folder}: no run in it; looked for {_listed(RUN_FILES)} here, in seed<k>/ and in <arm>/seed<k>/"
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


def _correction(config: dict[str, Any]) -> Any:
    value = config.get("correction")
    return value.get("name") if isinstance(value, dict) else value


def _evaluation(row: dict[str, Any]) -> Evaluation:
    once = _floats(row["success_once"])
    at_end = _floats(row["success_at_end"]) if row.get("success_at_end") is not None else once * np.nan
    already = row.get("already_successful")
    already = np.nan_to_num(_floats(already)) if already is not None else np.zeros(len(once))
    index = np.asarray(row["index"], dtype=np.int64)
    names = "index, success_once, success_at_end, already_successful"
    _check_equal_lengths([index, once, at_end, already], names)
    return Evaluation(
        step=int(row["step"]),
        executions=number(row.get("executions")),
        split=str(row["split"]),
        task=str(row["task"]),
        index=index,
        success_once=once,
        success_at_end=at_end,
        already_successful=already,
        deterministic=bool(row.get("deterministic", True)),
        seconds=number(row.get("seconds")),
    )


def number(value: Any) -> float:
    """A JSON value as a float; null and whatever is no number become NaN."""
    return float(value) if isinstance(value, int | float) else math.nan


def _whole(value: Any) -> int | None:
    value = number(value)
    return int(value) if math.isfinite(value) else None


def _floats(values: Any) -> np.ndarray:
    if not isinstance(values, list):
        raise TypeError(f"expected a list, got {type(values).__name__}")
    return np.array([number(v) for v in values], dtype=np.float64)


def _check_equal_lengths(arrays: list[np.ndarray], names: str) -> None:
    if len({len(a) for a in arrays}) > 1:
        raise ValueError(f"unequal lengths {[len(a) for a in arrays]} of {names}")


def _without_repeats(groups: list[Pairs]) -> list[Pairs]:
    kept: list[Pairs] = []
    for g in groups:
        if not any(
            np.array_equal(g.executed, k.executed, equal_nan=True)
            and np.array_equal(g.predicted, k.predicted, equal_nan=True)
            for k in kept
        ):
            kept.append(g)
    return kept


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
