"""Run folders built by writing the documented files, with answers known in advance."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

TASKS = ("reach-v3", "push-v3")
STATES = 10  # held-out states a task


def write_lines(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(step, executions, task, successes, states=STATES, split="held_out", **more):
    """The first `successes` of `states` states succeed; one more is solved at reset and must not count."""
    once = [1] * successes + [0] * (states - successes)
    row = dict(step=step, executions=executions, split=split, task=task, index=[*range(states), states])
    row |= dict(success_once=[*once, 1], success_at_end=[*once, 1])
    row |= dict(already_successful=[0] * states + [1], deterministic=True, seconds=2.0)
    return row | more


def write_run(folder: Path, final: int, executions_a_step: int, steps: int = 10, seed: int = 0) -> Path:
    """SFT solves 4 of 10 states of each task; success rises evenly to `final` of 10 at the last step."""
    rng = np.random.default_rng([seed, executions_a_step])
    folder.mkdir(parents=True, exist_ok=True)
    config = f"seed: {seed}\ncorrection: {folder.parent.name}\ntask: {{names: [{', '.join(TASKS)}]}}\n"
    (folder / "config.yaml").write_text(config)
    provenance = {"command": f"wmrl-train seed={seed}", "commit": "abc1234"}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    write_lines(
        folder / "metrics.jsonl",
        [
            {
                "step": k,
                "executions": 20 + executions_a_step * k,
                "imagined": 100 * k,
                "executed_success": None if k == 3 else 0.04 * k + 0.4,
                "predicted_mean": 0.05 * k + 0.4,
                "seconds/execute": 2.0,
                "seconds/imagine": 1.0,
                "seconds/policy": 0.5,
                "world_model/auc_in_group": float("nan") if k == 1 else 0.7,
                "world_model/auc_pooled": 0.8,
                "world_model/mixed_groups": 2,
                "policy/kl_reference": 0.01 * k,
                "policy/clip_fraction": 0.1,
                "correction/anchor/weight": 1.5,
            }
            for k in range(1, steps + 1)
        ],
    )
    write_lines(
        folder / "evaluations.jsonl",
        [
            evaluation(step, 20 + executions_a_step * step, task, round(4 + (final - 4) * step / 10))
            for step in range(0, steps + 1, 5)
            for task in TASKS
        ],
    )
    write_lines(
        folder / "pairs.jsonl",
        [
            # Two pairs to order in each group, one of them rightly ordered: in-group AUC is 1/2.
            dict(
                step=k,
                task=TASKS[k % 2],
                index=int(rng.integers(1000)),
                executed=[1, 0, 0],
                predicted=[0.5, 0.2, 0.8],
                predicted_variance=[0.1, None, 0.1],
            )
            for k in range(1, steps + 1)
        ],
    )
    media = folder / "media"
    media.mkdir(exist_ok=True)
    frames = rng.integers(0, 255, size=(3, 12, 16, 16, 3), dtype=np.uint8)
    for name, success in (("before", [0, 1, 0]), ("after", [1, 1, 0])):
        tasks = np.array(["reach-v3"] * 3)
        np.savez(media / f"rollouts_{name}.npz", frames=frames, task=tasks, success=success)
    np.savez(
        media / "imagined.npz",
        real_frames=frames[0],
        real_proprio=rng.normal(size=(12, 4)),
        imagined_proprio=rng.normal(size=(5, 12, 4)),
        success_probability=rng.uniform(size=(5, 12)),
        success_step=8,
        task="reach-v3",
    )
    return folder


@pytest.fixture(scope="session")
def build() -> SimpleNamespace:
    """The builders above, for tests that need another folder."""
    return SimpleNamespace(write_lines=write_lines, evaluation=evaluation, write_run=write_run)


@pytest.fixture(scope="session")
def experiment(tmp_path_factory) -> Path:
    """Arm `wmrl` ends at 8, 9, 9 of 10 with 4 executions a step, arm `real` at 8, 8, 8 with 40. Read only."""
    folder = tmp_path_factory.mktemp("outputs") / "demo"
    for seed, final in enumerate((8, 9, 9)):
        write_run(folder / "wmrl" / f"seed{seed}", final, executions_a_step=4, seed=seed)
        write_run(folder / "real" / f"seed{seed}", 8, executions_a_step=40, seed=seed)
    return folder


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """One complete run, free to be damaged."""
    return write_run(tmp_path / "wmrl" / "seed3", 8, executions_a_step=4, seed=3)
