"""The examples run as they are, in the process of their reader."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example():
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_own_loop_learns_as_much_as_from_eight_times_the_executions(example, capsys):
    main = example("own_loop")
    little, ours, all_executed = (main(name) for name in ("real_small", "wmrl", "real"))
    assert little < ours and ours > 0.98 * all_executed
    assert "2,400 executions" in capsys.readouterr().out


def test_marked_lines_of_the_own_loop_are_the_twelve_that_are_promised():
    marked = [line for line in (EXAMPLES / "own_loop.py").read_text().splitlines() if line.endswith("# <")]
    assert len(marked) <= 12


def test_trl_trains_on_an_eighth_of_the_executions(example):
    _, executions = example("trl_grpo")(steps=5)
    assert executions == 5 * 8


@pytest.mark.slow
def test_trl_learns(example):
    reached, executions = example("trl_grpo")(steps=60)
    assert reached > 0.2 and executions == 480
