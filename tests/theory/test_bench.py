"""`wmrl-bench` from the command line."""

import json
import subprocess
import sys

import pytest

from wmrl_embodied.theory.bench import Job, interval, run, summarise
from wmrl_embodied.theory.figures import draw
from wmrl_embodied.theory.gradients import ESTIMATORS, Cell


def bench(*words):
    return subprocess.run(
        [sys.executable, "-m", "wmrl_embodied.cli.bench", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_benchmark_it_says_which_there_are():
    assert bench("--help").returncode == 0
    wrong = bench("theroy")
    assert wrong.returncode == 2 and "theroy: must be one of embodied, theory" in wrong.stdout


@pytest.mark.parametrize(("name", "setting"), [("theory", "repeats: 10"), ("embodied", "arms:")])
def test_help_of_each(name, setting):
    result = bench(name, "--help")
    assert result.returncode == 0 and setting in result.stdout


def test_bad_setting_is_named():
    result = bench("theory", "repeats=1")
    assert result.returncode == 2 and "repeats=1: must be a whole number of at least 2" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["settings.real=['trainer.groups=0']"], "groups=0: must be"),
        (
            ["arms=[long]", '+settings.long=["correction=fused","trainer.group_size=1"]'],
            "group_size=1: must be",
        ),
        (["--quick", "tasks=[reach-v4]"], "'reach-v4' is not a Meta-World task"),
    ],
)
def test_settings_of_an_arm_and_quick_ones_are_read_before_anything_starts(tmp_path, words, said):
    result = bench("embodied", *words, f"output_dir={tmp_path / 'out'}")
    assert result.returncode == 2 and said in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()


def test_summary_counts_claims_by_hand():
    cell = Cell(bias="none")
    parts = {name: {"error": 2.0, "bias": 0.0, "variance": 2.0} for name in ESTIMATORS}
    parts["fused"] = {"error": 1.0, "bias": 0.5, "variance": 0.5}
    jobs = [Job(cell, seed) for seed in range(3)]
    summary = summarise(jobs, {job.key: parts for job in jobs})
    assert summary["seeds"] == 3
    assert summary["claims"]["fused below the best single estimator"] == 1
    assert summary["claims"]["inverse_variance below both of its streams"] == 0  # equal is not below
    assert summary["cells"][0]["fused_over_best"][0] == 0.5
    json.dumps(summary)


def test_interval_of_equal_values_is_that_value():
    assert interval([3.0, 3.0]) == (3.0, 3.0, 3.0)


def test_measured_jobs_are_kept_and_a_torn_line_is_measured_again(tmp_path):
    cell = Cell(bias="monotone", strength=1.0, drift=False)
    learners = ("", "raw", "debias", "rectified", "fused")
    jobs = [Job(cell, seed, learner) for seed in range(2) for learner in learners]
    summary = run(tmp_path, jobs, workers=1, learning_steps=3, learning_rate=5.0)
    file = tmp_path / "measured-3-5.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == len(jobs) and summary["seeds"] == 2
    assert json.loads(json.dumps(summary)) == json.loads((tmp_path / "theory.json").read_text())

    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    before = file.stat().st_mtime_ns
    assert run(tmp_path, jobs, workers=1, learning_steps=3, learning_rate=5.0) == summary
    assert file.stat().st_mtime_ns > before
    assert [path.name for path in draw(summary, tmp_path)] == ["error_grid.png", "noise.png", "learning.png"]
    assert all(
        (tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("error_grid.png", "learning.png")
    )
