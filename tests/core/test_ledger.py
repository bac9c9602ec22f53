"""The ledger: exact round trips, and nothing lost by torn lines, full disks, kills or a second run."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core import ledger as module
from wmrl_embodied.core.ledger import Ledger, LedgerBroken, LedgerFull, LedgerLocked
from wmrl_embodied.core.types import Context, Group, Trajectory

NAN = float("nan")


def trajectory(length=2, executed=1.0, seed=0, **info):
    draw = torch.Generator().manual_seed(seed)
    steps = {
        "features": torch.randn(length, 3, generator=draw),
        "tokens": torch.randint(9, (length + 1,), generator=draw),
    }
    return Trajectory(steps, torch.randn(length, generator=draw), torch.ones(length), executed, info=info)


def small_group(index=0, size=2):
    return Group(
        Context("reach", index, "touch it"), [trajectory(seed=index * 9 + i) for i in range(size)], True, 0.1
    )


def same(one, other):
    """Deep equality in which NaN equals NaN and types count."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Trajectory | Group):
        return same(vars(one), vars(other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


number = st.floats(width=64)
leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | number
    | st.text(max_size=6)
    | st.sampled_from(
        [
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.array([[0.1, 2.0], [3.0, -1.0]])[:, 0],
            np.array(0.5, dtype=np.float32),
            np.zeros((0, 2), dtype=bool),
            np.array([["a", "bcd"], ["", "e"]]),
            np.zeros((2, 0), dtype=np.float16),
        ]
    )
    | st.sampled_from([torch.arange(3), torch.tensor(0.5, dtype=torch.bfloat16)])
)
key = st.text(max_size=4).filter(lambda text: not text.startswith("__"))
info = st.dictionaries(
    key,
    st.recursive(leaf, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(key, inner, max_size=2)),
    max_size=3,
)
drawn_trajectory = st.builds(
    lambda length, scores, info, seed: Trajectory(
        trajectory(length, seed=seed).steps, torch.randn(length), torch.rand(length), *scores, info
    ),
    st.integers(0, 3),
    st.tuples(number, number, number),
    info,
    st.integers(0, 9),
)
drawn_group = st.builds(
    Group,
    st.builds(Context, st.text(max_size=5), st.integers(0, 99), st.text(max_size=5)),
    st.lists(drawn_trajectory, max_size=3),
    st.booleans(),
    st.floats(0, 1),
)


@given(st.lists(st.tuples(st.integers(0, 3), drawn_group), max_size=3))
def test_every_field_survives_the_round_trip(appended):
    with tempfile.TemporaryDirectory() as folder:
        with Ledger(folder) as ledger:
            for step, group in appended:
                ledger.append(step, group)
            alive = list(ledger.groups())
        with Ledger(folder) as reopened:
            assert same(alive, [group for _, group in appended])
            assert same(list(reopened.groups()), alive)
            assert reopened.executions == sum(len(group) for _, group in appended)
            for wanted in range(4):
                groups = [group for step, group in appended if step == wanted]
                assert same(list(reopened.groups(wanted)), groups)
                assert reopened.executions_of_step(wanted) == sum(map(len, groups))


def test_slices_of_one_rollout_and_tensors_with_a_gradient_are_recorded(tmp_path):
    rollout = torch.randn(4, 3, 2, requires_grad=True)
    members = [Trajectory({"x": rollout[:, i]}, rollout[0, :, 0], rollout[0, :, 0]) for i in range(3)]
    with Ledger(tmp_path) as ledger:
        ledger.append(0, Group(Context("t", 0), members))
        (group,) = ledger.groups()
    torch.testing.assert_close(group.trajectories[2].steps["x"], rollout[:, 2].detach())
    assert not group.trajectories[0].old_log_prob.requires_grad


def test_equal_paths_in_info_do_not_collide(tmp_path):
    info = {"a/b": np.array([1, 2]), "a": {"b": np.array([3.0])}, "c": [np.array(True)]}
    with Ledger(tmp_path) as ledger:
        ledger.append(0, Group(Context("t", 0), [trajectory(**info), trajectory(**info)]))
        (group,) = ledger.groups()
    assert all(same(member.info, info) for member in group.trajectories)


def test_lines_are_strict_json_that_anyone_can_read(tmp_path):
    group = small_group()
    group.trajectories[0].executed = np.float32(0.5)
    group.trajectories[1].executed = NAN
    group.trajectories[1].info = {"success": np.bool_(True), "step": np.int64(3), "loss": NAN}
    with Ledger(tmp_path) as ledger:
        ledger.append(4, group, seed=11, cost=2.5)
        record = next(ledger.records(4))
    line = (tmp_path / "ledger.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == record
    assert record["executed"] == [0.5, None]
    assert (record["step"], record["seed"], record["cost"]) == (4, 11, 2.5)
    assert record["context"] == {"task": "reach", "index": 0, "instruction": "touch it"}
    assert record["info"][1]["success"] is True and record["info"][1]["step"] == 3
    assert (tmp_path / record["file"]).is_file()


@given(st.data())
def test_a_line_cut_anywhere_costs_no_group(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups = [small_group(i) for i in range(3)]
        with Ledger(folder) as ledger:
            for step, group in enumerate(groups):
                ledger.append(step, group)
        lines = folder / "ledger.jsonl"
        whole = lines.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        junk = data.draw(st.sampled_from([b"", b"\0\0\0", b"\0\n"]))
        lines.write_bytes(whole[:cut] + (junk if cut < len(whole) else b""))
        with Ledger(folder) as ledger:
            assert same(list(ledger.groups()), groups)
            assert [record["step"] for record in ledger.records()] == [0, 1, 2]
            ledger.append(3, groups[0])
            assert len(ledger) == 4
        assert lines.read_bytes().startswith(whole)


@pytest.mark.parametrize("missing", [1, 5])  # 1: all but the end of the line is there
def test_a_torn_line_is_said_and_a_reader_leaves_it_alone(tmp_path, caplog, missing):
    with Ledger(tmp_path) as ledger:
        ledger.append(0, small_group())
        ledger.append(1, small_group(1))
    lines = tmp_path / "ledger.jsonl"
    torn = lines.read_bytes()[:-missing]
    lines.write_bytes(torn)
    with Ledger(tmp_path, read_only=True) as reader:
        assert len(reader) == 1
    assert lines.read_bytes() == torn
    caplog.clear()
    with Ledger(tmp_path) as ledger:
        assert len(ledger) == 2
    assert any("cut short" in message for message in caplog.messages)
    assert any("adopted" in message for message in caplog.messages)


def test_a_broken_line_inside_is_an_error(tmp_path):
    with Ledger(tmp_path) as ledger:
        for step in range(3):
            ledger.append(step, small_group(step))
    lines = tmp_path / "ledger.jsonl"
    first, second, third = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(first + second[:9] + b"\n" + third)
    for _ in range(2):  # the failed opening gives the lock back
        with pytest.raises(LedgerBroken, match="line 2"):
            Ledger(tmp_path)


def test_leftovers_of_a_crash(tmp_path, caplog):
    with Ledger(tmp_path) as ledger:
        ledger.append(0, small_group())
    complete = (tmp_path / "group-00000000.safetensors").read_bytes()
    (tmp_path / "group-00000001.safetensors.tmp").write_bytes(complete[:50])
    (tmp_path / "group-00000002.safetensors").write_bytes(complete[:50])
    with caplog.at_level(logging.WARNING), Ledger(tmp_path) as ledger:
        assert len(ledger) == 1
        ledger.append(1, small_group(1))
        assert [record["file"] for record in ledger.records()][-1] == "group-00000003.safetensors"
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / "group-00000002.safetensors.broken").is_file()
    assert any("set aside" in message for message in caplog.messages)


def test_two_runs_cannot_share_a_folder(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(0, small_group())
        with pytest.raises(LedgerLocked, match=rf"in use by another run \(process {os.getpid()}"):
            Ledger(tmp_path)
        assert len(Ledger(tmp_path, read_only=True)) == 1
        ledger.append(1, small_group())
    with Ledger(tmp_path) as ledger:
        assert len(ledger) == 2


def test_closed_and_read_only_ledgers_refuse_to_append(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.close()
    ledger.close()
    with pytest.raises(ValueError, match="closed"):
        ledger.append(0, small_group())
    with pytest.raises(ValueError, match="read-only"):
        Ledger(tmp_path, read_only=True).append(0, small_group())
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "nothing", read_only=True)


def test_groups_executed_side_by_side_are_recorded_all_or_none(tmp_path, monkeypatch):
    pair = [small_group(1), small_group(2)]
    with Ledger(tmp_path) as ledger:
        ledger.append(0, small_group(0))

        written = ledger._lines.write
        sizes = []
        monkeypatch.setattr(
            ledger,
            "_lines",
            SimpleNamespace(
                write=lambda data: sizes.append(len(data)) or written(data),
                fileno=ledger._lines.fileno,
                close=ledger._lines.close,
            ),
        )
        ledger.extend(1, pair, seed=3)
        assert len(sizes) == 1  # one write: killed before it, none is on record, killed after it, both are
        assert same(list(ledger.groups(1)), pair) and len(ledger) == 3
        ledger.append(2, small_group(3))
    with Ledger(tmp_path) as ledger:
        assert same(list(ledger.groups()), [small_group(0), *pair, small_group(3)])
        assert [record["seed"] for record in ledger.records(1)] == [3, 3]
        with pytest.raises(TypeError):  # nothing of a batch is written before all of it can be
            ledger.extend(4, [small_group(4), Group(Context("t", 5), [trajectory(thing=object())])])
    with Ledger(tmp_path) as ledger:
        assert len(ledger) == 4


def test_ensure_space_names_free_needed_and_the_way_out(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage(9e9, 0, 2_500_000))
    with Ledger(tmp_path) as ledger:
        ledger.ensure_space(2_500_000)
        with pytest.raises(LedgerFull, match=r"300.0 MB are needed.*2.5 MB are free; make room") as caught:
            ledger.ensure_space(300_000_000)
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("failing_call", range(3))  # fsync of the file, of the folder, of the line
@pytest.mark.parametrize("try_again", [True, False])
def test_a_full_disk_leaves_a_ledger_that_goes_on(tmp_path, monkeypatch, failing_call, try_again):
    with Ledger(tmp_path) as ledger:
        ledger.append(0, small_group(0))
        calls = iter(range(99))
        fsync = os.fsync

        def full(handle):
            if next(calls) == failing_call:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(handle)

        monkeypatch.setattr(module.os, "fsync", full)
        with pytest.raises(LedgerFull, match="make room"):
            ledger.append(1, small_group(1))
        monkeypatch.undo()
        assert same(list(ledger.groups()), [small_group(0)])
        assert not list(tmp_path.glob("*.tmp"))
        if try_again:
            ledger.append(1, small_group(1))
    with Ledger(tmp_path) as ledger:
        # Without a second try the group is adopted if its file was complete: executions are dear.
        recorded = 2 if try_again or failing_call > 0 else 1
        assert same(list(ledger.groups()), [small_group(0), small_group(1)][:recorded])
        ledger.append(2, small_group(2))
        assert same(list(ledger.groups(2)), [small_group(2)])


def test_other_write_errors_are_passed_on(tmp_path, monkeypatch):
    def broken(handle):
        raise OSError(errno.EIO, "Input/output error")

    with Ledger(tmp_path) as ledger:
        monkeypatch.setattr(module.os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output") as caught:
            ledger.append(0, small_group())
        assert not isinstance(caught.value, LedgerFull)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "cannot record a object"),
        ({1: 2}, "must be a string"),
        ({"__float__": 1}, "does not start with '__'"),
        (np.array([None]), "ndarray of object"),
    ],
)
def test_info_that_cannot_be_recorded_is_named(tmp_path, value, message):
    with Ledger(tmp_path) as ledger:
        with pytest.raises(TypeError, match=f"0/info/thing: .*{message}"):
            ledger.append(0, Group(Context("t", 0), [trajectory(thing=value)]))
        assert len(ledger) == 0


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    script = """
        import sys, torch
        from wmrl_embodied.core.ledger import Ledger
        from wmrl_embodied.core.types import Context, Group, Trajectory

        ledger = Ledger(sys.argv[1])
        step = 0
        while True:
            x = torch.full((2000,), float(step))
            ledger.append(step, Group(Context("t", step), [Trajectory({"x": x}, x, x, executed=step)]))
            print(step, flush=True)
            step += 1
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    acknowledged = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in process.communicate()[0].splitlines()]
    with Ledger(tmp_path) as ledger:
        groups = list(ledger.groups())
    assert acknowledged == list(range(len(acknowledged)))
    assert len(groups) in (len(acknowledged), len(acknowledged) + 1)
    for step, group in enumerate(groups):
        assert group.executed.tolist() == [step]
        assert (group.trajectories[0].steps["x"] == step).all()
