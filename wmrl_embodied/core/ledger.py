"""Append-only record of every real execution: fsynced before anything uses it, whole again after any crash.

Knows groups and files, not what executed them; what a resumed run does with the groups is decided elsewhere.

A folder holds one safetensors file per group, complete in itself (its metadata carry the record), and
`ledger.jsonl` with the same record as one line per group. A group is on disk when its file has its final
name; a line that a crash cut short or prevented is written again from that file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from wmrl_embodied.core.types import Context, Group, Trajectory

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

logger = logging.getLogger(__name__)

VERSION = 1
_LINES = "ledger.jsonl"
_GROUP_FILE = re.compile(r"group-(\d{8,})\.safetensors")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class LedgerFull(OSError):
    """There is no space for the next executions; what is already recorded is safe."""


class LedgerLocked(RuntimeError):
    """Another process writes this ledger."""


class LedgerBroken(ValueError):
    """A line inside the ledger cannot be read, which no crash explains."""


@dataclass(frozen=True)
class _Entry:
    step: int
    size: int
    file: str
    offset: int


class Ledger:
    """Record of executed groups in a folder of its own; one writer at a time.

    Opening it repairs what a crash left: a last line cut short is replaced, a group whose line is missing is
    adopted, unfinished files are removed.
    """

    def __init__(self, folder: str | os.PathLike[str], read_only: bool = False) -> None:
        """Open a ledger, or create one.

        Args:
            folder: holds the ledger alone; created if needed.
            read_only: look at the ledger of a run that may be going on; no lock, no repair, no `append`.

        Raises:
            LedgerLocked: if another process writes it.
            LedgerBroken: if a line other than the last cannot be read.
            FileNotFoundError: if there is nothing to read.
        """
        self.folder = Path(folder)
        self.read_only = read_only
        self._entries: list[_Entry] = []
        self._lines: BinaryIO | None = None
        self._lock: BinaryIO | None = None
        self._next = 0
        if read_only:
            self._scan()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self._lines = open(self.folder / _LINES, "ab", buffering=0)  # noqa: SIM115
            _sync_folder(self.folder)
            _sync_folder(self.folder.parent)
            self._repair(self._scan())
        except BaseException:
            self.close()
            raise

    @property
    def executions(self) -> int:
        """Number of executed trajectories on record, those with a missing score included."""
        return sum(entry.size for entry in self._entries)

    def executions_of_step(self, step: int) -> int:
        """Number of executed trajectories of one step."""
        return sum(entry.size for entry in self._entries if entry.step == step)

    def __len__(self) -> int:
        """Number of groups on record."""
        return len(self._entries)

    def append(self, step: int, group: Group, seed: int | None = None, cost: float | None = None) -> None:
        """Record one executed group; when this returns it survives a power cut.

        Args:
            step: training step that it belongs to.
            group: with executed scores; whatever else it has, predicted scores for instance, is kept too.
            seed: seed of the run.
            cost: what the execution took, seconds.

        Raises:
            LedgerFull: if the disk is full. Append the group again once there is room; if the run ends
                instead and the group's file was already complete, the next opening adopts it.
            TypeError: if a trajectory's `info` holds something other than numbers, strings, arrays and lists
                or dicts of them.
            ValueError: if the ledger is closed or read-only.
        """
        self.extend(step, [group], seed, cost)

    def extend(
        self, step: int, groups: Sequence[Group], seed: int | None = None, cost: float | None = None
    ) -> None:
        """Record groups that were executed side by side, in one piece: a crash leaves all of their lines or none.

        How a network's numbers round depends on the batch they were computed in. Had a resumed run to execute one of
        two groups alone, it would part from an undisturbed run. Arguments and errors are those of `append`; `cost` is
        of every group.
        """
        if self._lines is None:
            raise ValueError(f"ledger {self.folder}: {'read-only' if self.read_only else 'closed'}")
        names = (f"group-{number:08d}.safetensors" for number in itertools.count(self._next))
        packed = [
            pack_group(step, group, name, seed, cost) for group, name in zip(groups, names, strict=False)
        ]
        added = [(record, json.dumps(record, allow_nan=False)) for record, _ in packed]
        try:
            for (record, text), (_, tensors) in zip(added, packed, strict=True):
                self._write_file(record["file"], text, tensors)
            self._append_lines(added)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._full(f"while writing groups of step {step}") from error
            raise
        # Counted last: a caller that tries again after an error replaces the files, and does not add any.
        self._next += len(added)

    def records(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Lines of the ledger, of one step or of all, in the order of execution; NaN is null."""
        entries = [entry for entry in self._entries if step is None or entry.step == step]
        with open(self.folder / _LINES, "rb") as lines:
            for entry in entries:
                lines.seek(entry.offset)
                yield json.loads(lines.readline())

    def groups(self, step: int | None = None) -> Iterator[Group]:
        """Recorded groups, of one step or of all, in the order of execution; tensors on the CPU."""
        for record in self.records(step):
            yield unpack_group(record, load_file(self.folder / record["file"]))

    def ensure_space(self, size: int) -> None:
        """Check before an execution that its record will fit.

        Args:
            size: bytes that must be free.

        Raises:
            LedgerFull: names what is free, what is needed and the way out.
        """
        if shutil.disk_usage(self.folder).free < size:
            raise self._full(f"{size / 1e6:,.1f} MB are needed for the next executions")

    def close(self) -> None:
        """Release the lock; the ledger can be opened again, here or by another process."""
        for file in (self._lines, self._lock):
            if file is not None:
                file.close()
        self._lines = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _full(self, what: str) -> LedgerFull:
        free = shutil.disk_usage(self.folder).free
        return LedgerFull(
            errno.ENOSPC,
            f"ledger: {what}, {free / 1e6:,.1f} MB are free; make room (or raise the quota) and resume the "
            "run, nothing that was recorded is lost",
            str(self.folder),
        )

    def _take_lock(self) -> BinaryIO:
        lock = open(self.folder / "lock", "a+b")  # noqa: SIM115
        if fcntl is None:
            logger.warning(
                "ledger %s: no file locks on this system; do not start two runs in it", self.folder
            )
            return lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().decode(errors="replace") or "unknown"
            lock.close()
            raise LedgerLocked(
                f"ledger {self.folder}: in use by another run (process {owner} or a worker that it left); "
                "end that one, or give this run a folder of its own"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        return lock

    def _scan(self) -> int:
        """Read the index; returns the length of the readable part of the lines, bytes."""
        path = self.folder / _LINES
        size = path.stat().st_size
        offset = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                end = offset + len(line)
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("cut short")
                    self._index(json.loads(line), offset)
                except (ValueError, KeyError, TypeError) as error:
                    if end < size:
                        raise LedgerBroken(
                            f"{path}, line {number}: {error!r}; restore it from a backup"
                        ) from error
                    logger.warning("%s: last line was cut short by a crash and is left out", path)
                    break
                offset = end
        return offset

    def _repair(self, length: int) -> None:
        """Undo what a crash left behind the last complete line, and adopt groups without a line."""
        if os.fstat(self._lines.fileno()).st_size > length:
            self._truncate(length)
        for unfinished in self.folder.glob("*.tmp"):
            unfinished.unlink()
        known = {entry.file for entry in self._entries}
        for path in sorted(self.folder.iterdir(), key=lambda path: (len(path.name), path.name)):
            match = _GROUP_FILE.fullmatch(path.name)
            if match is None:
                continue
            self._next = max(self._next, int(match[1]) + 1)
            if path.name in known:
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    text = file.metadata()["record"]
                record = json.loads(text)
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                logger.warning("%s: unreadable (%r), set aside as .broken", path, error)
                path.rename(f"{path}.broken")
                continue
            logger.warning("%s: had no line in the ledger, adopted", path)
            self._append_lines([(record, text)])

    def _write_file(self, name: str, text: str, tensors: dict[str, Tensor]) -> None:
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(save(tensors, metadata={"record": text}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)
            _sync_folder(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _append_lines(self, added: Sequence[tuple[dict[str, Any], str]]) -> None:
        offset = os.fstat(self._lines.fileno()).st_size
        lines = [text.encode() + b"\n" for _, text in added]
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                rest = rest[self._lines.write(rest) :]
            os.fsync(self._lines.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._truncate(offset)
            raise
        for (record, _), line in zip(added, lines, strict=True):
            self._index(record, offset)
            offset += len(line)

    def _index(self, record: dict[str, Any], offset: int) -> None:
        self._entries.append(
            _Entry(int(record["step"]), len(record["executed"]), str(record["file"]), offset)
        )

    def _truncate(self, length: int) -> None:
        os.ftruncate(self._lines.fileno(), length)
        os.fsync(self._lines.fileno())


def _sync_folder(folder: Path) -> None:
    """Make new and renamed names in a folder durable."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pack_group(
    step: int, group: Group, file: str, seed: int | None, cost: float | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record of a group in JSON's types, and its tensors by name."""
    tensors: dict[str, Tensor] = {}
    infos = []
    for member, trajectory in enumerate(group.trajectories):
        for name, value in trajectory.steps.items():
            tensors[f"{member}/steps/{name}"] = _own(value)
        tensors[f"{member}/old_log_prob"] = _own(trajectory.old_log_prob)
        tensors[f"{member}/mask"] = _own(trajectory.mask)
        infos.append(_encode(trajectory.info, f"{member}/info", tensors))
    context = group.context
    record = {
        "version": VERSION,
        "step": int(step),
        "file": file,
        "seed": None if seed is None else int(seed),
        "cost": _number(cost),
        "context": {"task": context.task, "index": int(context.index), "instruction": context.instruction},
        "anchor": bool(group.anchor),
        "inclusion_probability": _number(group.inclusion_probability),
        "executed": [_number(t.executed) for t in group.trajectories],
        "predicted": [_number(t.predicted) for t in group.trajectories],
        "predicted_variance": [_number(t.predicted_variance) for t in group.trajectories],
        "info": infos,
    }
    return record, tensors


def unpack_group(record: dict[str, Any], tensors: dict[str, Tensor]) -> Group:
    """What `pack_group` packed."""
    steps: list[dict[str, Tensor]] = [{} for _ in record["executed"]]
    for name, value in tensors.items():
        member, kind, *rest = name.split("/", 2)
        if kind == "steps":
            steps[int(member)][rest[0]] = value
    trajectories = [
        Trajectory(
            steps=steps[member],
            old_log_prob=tensors[f"{member}/old_log_prob"],
            mask=tensors[f"{member}/mask"],
            executed=_score(record["executed"][member]),
            predicted=_score(record["predicted"][member]),
            predicted_variance=_score(record["predicted_variance"][member]),
            info=_decode(info, tensors),
        )
        for member, info in enumerate(record["info"])
    ]
    probability = _score(record["inclusion_probability"])
    return Group(Context(**record["context"]), trajectories, record["anchor"], probability)


def _own(tensor: Tensor) -> Tensor:
    # A copy of its own: safetensors refuses tensors that share memory, as slices of one rollout do.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _number(value: float | None) -> Any:
    """A float for JSON: NaN is null (strict JSON has no NaN), infinities are words."""
    if value is None or math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else str(float(value))


def _score(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Info in JSON's types; arrays move to `tensors`, and what JSON lacks becomes a dict with a "__" key."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": str(value)}
    if isinstance(value, Tensor):
        # Numbered, because a path is not unique: {"a/b": x} and {"a": {"b": x}} have the same.
        name = f"{path.split('/')[0]}/info/{len(tensors)}"
        tensors[name] = _own(value)
        return {"__tensor__": name}
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return {"__strings__": value.ravel().tolist(), "shape": list(value.shape)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        native = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        return {"__array__": _encode(native, path, tensors)["__tensor__"]}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("__"):
                raise TypeError(f"{path}: key {key!r} must be a string that does not start with '__'")
        return {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    dtype = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise TypeError(
        f"{path}: cannot record a {type(value).__name__}{dtype}; "
        "give numbers, strings, arrays, or lists and dicts of them"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__array__" in value:
        return tensors[value["__array__"]].numpy()
    if "__strings__" in value:
        return np.array(value["__strings__"], dtype=str).reshape(value["shape"])
    return {key: _decode(item, tensors) for key, item in value.items()}
