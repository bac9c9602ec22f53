"""Ctrl-C, kill -9 and a full disk in the middle of a run: nothing executed is lost or paid twice, and it goes on."""

import os
import signal
import subprocess
from pathlib import Path

import pytest


def test_a_killed_run_goes_on_as_if_nothing_had_been(start, policy, tiny, finished, logs, tmp_path):
    run = tmp_path / "run"
    process = start("wmrl-train", *tiny.train, policy, f"output_dir={run}")
    # Step 3 executes 4 groups, 2 at a time: kill when the first two of them are in the ledger.
    process.until(lambda: len(logs.executed(run)) > 8 + 4)
    process.interrupt(signal.SIGKILL)
    assert process.result().code == -signal.SIGKILL  # and no worker is left
    before = logs.executed(run)
    assert 8 + 4 < len(before) < 8 + 4 + 4, "killed outside of the executions of step 3"
    assert len(logs.lines(run, "metrics")) == 2

    result = start("wmrl-train", f"resume={run}").result()
    assert result.code == 0, result.err
    assert result.temporary == []
    logs.assert_same(run, finished[0])
    after = logs.executed(run)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)  # nothing was executed twice


@pytest.mark.usefixtures("one_pool")
def test_the_first_ctrl_c_ends_a_run_after_what_is_under_way(
    start, command, policy, tiny, finished, logs, tmp_path
):
    run = tmp_path / "run"
    process = start("wmrl-train", *tiny.train, policy, f"output_dir={run}")
    process.until(lambda: len(logs.executed(run)) > 8)
    process.interrupt(signal.SIGINT)
    result = process.result()
    assert result.code == 130
    said = [line for line in result.err.splitlines() if line.strip()]
    assert said == [
        "stopping after the executions under way; once more to stop at once",
        f"stopped in step {said[-1].split()[3].rstrip(';')}; what was executed is in {run}/ledger; resume={run} "
        "continues",
    ]
    assert "done" not in result.out
    assert result.temporary == []
    # Two groups run side by side: either both or none of them are in the ledger.
    before = logs.executed(run)
    assert len(before) % 2 == 0 and 8 < len(before) < len(logs.executed(finished[0]))

    result = command("train", f"resume={run}")
    assert result.code == 0, result.err
    logs.assert_same(run, finished[0])
    assert logs.executed(run)[: len(before)] == before


@pytest.mark.usefixtures("one_pool")
def test_a_run_that_was_stopped_before_its_first_step_can_be_resumed(
    command, policy, tiny, finished, logs, tmp_path, monkeypatch
):
    from wmrl_embodied.runtime.interrupt import StopRequest

    run = tmp_path / "run"
    monkeypatch.setattr(StopRequest, "__call__", lambda self: True)  # asked for while the start is judged
    result = command("train", *tiny.train, policy, f"output_dir={run}", "media=false")
    assert result.code == 130
    assert "stopped while judging step 0" in result.err
    assert logs.executed(run) == []
    monkeypatch.undo()
    assert command("report", f"run={run}").code == 0  # what there is can be looked at


def test_ctrl_c_ends_cloning(start, tiny, tmp_path):
    folder = tmp_path / "sft"
    process = start(
        "wmrl-sft", f"task.tasks=[{tiny.task}]", "demonstrations.per_task=500", f"output_dir={folder}"
    )
    process.until(lambda: list(folder.glob("demonstrations.partial/images/*/*/*.png")))
    process.interrupt(signal.SIGINT)
    result = process.result()
    assert result.code == 130
    assert result.err.rstrip().endswith("interrupted")
    assert "Traceback" not in result.err
    # Whatever has its final name is whole, so the same command can be given again.
    assert [path.name for path in folder.iterdir()] == ["demonstrations.partial"]
    assert result.temporary == []


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of so many MB, or makes the mounted one that large."""
    mounted = tmp_path / "disk"

    def size(megabytes: int) -> Path:
        if mounted.exists():
            subprocess.run(["mount", "-o", f"remount,size={megabytes}m", mounted], check=True)
            return mounted
        mounted.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", mounted]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("only root can mount a file system")
        return mounted

    yield size
    if os.path.ismount(mounted):
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.usefixtures("one_pool")
@pytest.mark.parametrize(
    ("megabytes", "groups", "message"),
    [
        (7, 0, "MB are needed for the next executions"),  # seen before anything is executed
        (13, 8, "checkpoint not written"),  # seen while the first step is saved
    ],
)
def test_a_full_disk_loses_no_execution(
    command, policy, tiny, finished, logs, small_disk, megabytes, groups, message
):
    run = small_disk(megabytes) / "run"
    result = command("train", *tiny.train, policy, "media=false", f"output_dir={run}")
    assert result.code == 2
    [error] = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert message in error and "MB are free" in error and "resume" in error
    assert "Traceback" not in result.err
    before = logs.executed(run)
    assert len(before) >= groups and before == logs.executed(finished[0])[: len(before)]

    small_disk(200)
    result = command("train", f"resume={run}")
    assert result.code == 0, result.err
    logs.assert_same(run, finished[0])
