"""`wmrl-bench` from the command line."""

import json
import subprocess
import sys

import pytest

from wmrl_embodied.theory.bench import Job, interval, summarise
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
    result = bench("theory", "repeats=0")
    assert result.returncode == 2 and "repeats=0: must be a whole number of at least 1" in result.stderr


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
