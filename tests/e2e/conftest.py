"""The installed commands, driven as a user drives them, and one tiny policy and one tiny run that many tests look at.

A process that imports LeRobot takes many seconds to start, so what need not be a process of its own calls the same
commands in this one.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

TASK = "plate-slide-v3"  # a policy cloned in seconds solves a third of its states
TIMEOUT = 400  # seconds; generous, since the cores may be shared

# Four steps: one that executes all 8 groups, then 4 of 8; the simulator runs 2 groups at a time.
TINY = [
    f"task.tasks=[{TASK}]",
    "task.train_states=16",
    "task.groups_at_once=2",
    "steps=4",
    "trainer.groups=8",
    "trainer.group_size=4",
    "trainer.warmup_groups=null",
    "anchors.fraction=0.5",
    "policy.action_std=0.3",  # so that most groups are mixed
    "world_model.steps=4",
    "world_model.members=2",
    "world_model.width=32",
    "eval.states=4",
    "eval.every=2",
]
WITHOUT_MODEL = [text for text in TINY if not text.startswith("world_model.")]


class Result(NamedTuple):
    """What a command left: exit code, standard output and error, and names in its temporary folder."""

    code: int
    out: str
    err: str
    temporary: list[str] = []


class Process:
    """An installed command in a session of its own, as a terminal would start it."""

    def __init__(self, scratch: Path, name: str, *overrides: str, **environment: str):
        self.temporary = scratch / "temporary"
        self.temporary.mkdir(parents=True)
        self.out, self.err = scratch / "out", scratch / "err"
        settings = {
            "TMPDIR": str(self.temporary),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / name, *overrides],
                cwd=scratch,
                env=os.environ | settings,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # A test run in a shell's background ignores SIGINT, and so would every process it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def interrupt(self, number: int) -> None:
        """Send a signal to the whole process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, number)

    def until(self, condition) -> None:
        """Wait for a condition while the command runs."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.process.poll() is None, f"ended too early: {self.err.read_text()}"
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.002)

    def left(self) -> list[str]:
        """Command lines of the processes of this session that are alive."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def result(self) -> Result:
        """Wait for the end; nothing may be left running after it."""
        code = self.process.wait(TIMEOUT)
        deadline = time.monotonic() + 20  # workers notice the end of their parent
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left running: {left}"
        # PyTorch keeps the cache of its compiler there, for the next process
        temporary = [n for n in os.listdir(self.temporary) if not n.startswith("torchinductor_")]
        return Result(code, self.out.read_text(), self.err.read_text(), temporary)


@pytest.fixture(scope="session")
def tiny():
    """The task, and overrides of wmrl-train with the learned world model (`train`) or without one (`without_model`)."""
    return SimpleNamespace(task=TASK, train=TINY, without_model=WITHOUT_MODEL)


@pytest.fixture(scope="session")
def logs():
    """What run folders hold: `lines`, `executed`, `weights` and `assert_same`, see there."""
    return SimpleNamespace(lines=lines, executed=executed, weights=weights, assert_same=assert_same_run)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Starts an installed command; whatever still runs at the end is killed."""
    started = []

    def run(name: str, *overrides: str, **environment: str) -> Process:
        process = Process(tmp_path_factory.mktemp(name), name, *overrides, **environment)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.process.poll() is None:
            process.process.kill()


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls the function behind an installed command, in this process."""

    def call(name: str, *overrides: str) -> Result:
        module = importlib.import_module(f"wmrl_embodied.cli.{name}")
        monkeypatch.setattr(sys, "argv", [f"wmrl-{name}", *overrides])
        levels = {logger: logging.getLogger(logger).level for logger in (None, "wmrl_embodied")}
        capsys.readouterr()
        try:
            module.main()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            for logger, level in levels.items():
                logging.getLogger(logger).setLevel(level)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def one_pool(pool, monkeypatch):
    """Runs in this process share the simulator processes of the session, which take seconds to start."""
    from wmrl_embodied.runtime import judging, training

    def lend(settings, workers):
        assert settings == pool.settings and workers == pool.workers
        return nullcontext(pool)

    for module in (training, judging):
        monkeypatch.setattr(module, "SimulatorPool", lend)


@pytest.fixture(scope="session")
def cloned(start, tmp_path_factory):
    """(folder of wmrl-sft, what the command said): two demonstrations, twenty steps."""
    folder = tmp_path_factory.mktemp("cloned")
    overrides = [f"task.tasks=[{TASK}]", "demonstrations.per_task=2", "cloning.steps=20"]
    process = start("wmrl-sft", *overrides, f"output_dir={folder}")
    result = process.result()
    assert result.code == 0, result.err
    return folder, result


@pytest.fixture(scope="session")
def policy(cloned):
    """The override that names the cloned policy."""
    return f"policy.path={cloned[0] / 'pretrained_model'}"


@pytest.fixture(scope="session")
def finished(start, policy, tmp_path_factory):
    """(run folder, what the command said) of a run that nothing disturbed, tracked offline."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = start("wmrl-train", *TINY, policy, f"output_dir={folder}", "wandb=offline").result()
    assert result.code == 0, result.err
    return folder, result


def lines(run: Path, name: str) -> list[dict]:
    """The rows of a log without what a clock measured."""
    rows = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def executed(run: Path) -> list[tuple[int, str, int]]:
    """(step, task, state) of every group in the ledger."""
    path = run / "ledger" / "ledger.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(r["step"], r["context"]["task"], r["context"]["index"]) for r in records]


def weights(run: Path, step: int) -> dict:
    """Tensors of the policy in a checkpoint."""
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / f"{step:06d}" / "pretrained_model" / "model.safetensors")


def assert_same_run(one: Path, other: Path, step: int = 4) -> None:
    """Metrics, evaluations, pairs, executions and weights of two runs are equal, to the last bit."""
    import torch

    for name in ("metrics", "evaluations", "pairs"):
        for row, same in zip(lines(one, name), lines(other, name), strict=True):
            assert row == same, {k: (row[k], same.get(k)) for k in row if row[k] != same.get(k)}
    assert executed(one) == executed(other)
    first, second = weights(one, step), weights(other, step)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
