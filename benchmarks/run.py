"""`make bench`: what takes how long here, as medians of several repeats, into benchmarks/results/speed.json.

Ratios are measured side by side in one process tree, because absolute figures of shared cores drift by tens of
percent. Success of the arms is measured by `python -m wmrl_embodied.cli.demo` with more seeds (see the README).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = Path(__file__).parent / "results" / "speed.json"
TASK = "button-press-topdown-v3"
REPEATS = 5


def median_seconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall-clock time of a call, after one that does not count."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rendering() -> dict[str, float]:
    """Frames per second at 64 px: ours, and the same scene as LeRobot's Meta-World environment renders it."""
    from wmrl_embodied.envs.metaworld import MetaWorldEnv

    env = MetaWorldEnv(TASK)
    env.reset(seed=0)
    ours = median_seconds(lambda: [env.render() for _ in range(50)]) / 50
    env.close()

    from lerobot.envs.metaworld import MetaworldEnv

    theirs_env = MetaworldEnv(task=TASK, obs_type="pixels", observation_width=64, observation_height=64)
    theirs_env.reset(seed=0)
    theirs = median_seconds(lambda: [theirs_env.render() for _ in range(5)], 3) / 5
    theirs_env.close()
    return {"frames_per_second": 1 / ours, "lerobot_frames_per_second": 1 / theirs, "ratio": theirs / ours}


def rollouts() -> dict[str, float]:
    """Attempts per second of an untrained policy, executed by two simulator processes and imagined in batch."""
    import numpy as np
    import torch

    from wmrl_embodied.adapters.embodied import EmbodiedSettings, EmbodiedTask
    from wmrl_embodied.adapters.simulator import Perception
    from wmrl_embodied.envs.metaworld import instructions
    from wmrl_embodied.envs.pool import SimulatorPool
    from wmrl_embodied.policies.mini_vla import (
        MiniVLAConfig,
        MiniVLAPolicy,
        make_mini_vla_pre_post_processors,
    )
    from wmrl_embodied.policies.mini_vla.configuration_mini_vla import features_for
    from wmrl_embodied.policies.mini_vla.processor_mini_vla import build_vocabulary
    from wmrl_embodied.world_models.dynamics import DynamicsEnsemble
    from wmrl_embodied.world_models.learner import DynamicsLearner, LearnerSettings

    torch.set_num_threads(1)
    vocabulary = build_vocabulary([instructions()[TASK]])
    policy = MiniVLAPolicy(
        MiniVLAConfig(**features_for(64, 4, 4), vocabulary=vocabulary, device="cpu")
    ).eval()
    preprocessor, _ = make_mini_vla_pre_post_processors(policy.config)
    model = DynamicsEnsemble(policy.config.feature_dim, 4, (5, 4), len(vocabulary))
    settings = EmbodiedSettings((TASK,))
    learner = DynamicsLearner(model, settings.chunks, LearnerSettings())
    with SimulatorPool(workers=2) as pool:
        task = EmbodiedTask(settings, pool, Perception(policy, preprocessor), learner, seed=0)
        contexts = task.sample_contexts(32, np.random.default_rng(0))
        executed = median_seconds(lambda: list(task.execute(policy, contexts[:4], 8, 0)), 3) / 32
        imagined = median_seconds(lambda: task.imagine(policy, contexts, 8, 0)) / 256
    return {
        "executed_per_second": 1 / executed,
        "imagined_per_second": 1 / imagined,
        "ratio": executed / imagined,
    }


def correction() -> dict[str, float]:
    """Milliseconds to correct 64 groups of 64, six of them anchors, with 5000 pairs in the map; and the share of the
    demo's training time (benchmarks/results/demo.json) that correcting took.
    """
    import numpy as np
    import torch

    from wmrl_embodied.core import Context, Group, Trajectory, make_estimator

    rng = np.random.default_rng(0)

    def group(index: int) -> Group:
        steps, one = {"x": torch.zeros(1)}, torch.zeros(1)
        members = [
            Trajectory(steps, one, one + 1, float(rng.integers(2)), float(rng.random()), 0.01)
            for _ in range(64)
        ]
        return Group(Context("bench", index), members, anchor=index < 6)

    groups = [group(index) for index in range(64)]
    estimator = make_estimator("wmrl")
    for _ in range(14):
        estimator.observe(groups[:6])

    def correct() -> None:
        estimator.observe(groups[:6])
        estimator.advantages(groups)

    demo = json.loads(RESULTS.with_name("demo.json").read_text())["arms"]["wmrl"]["seconds"]
    training = sum(seconds for part, seconds in demo.items() if part != "evaluate")
    return {
        "milliseconds": 1e3 * median_seconds(correct, 20),
        "share_of_demo_training": demo["correction"] / training,
    }


def main() -> None:
    """Measure everything and write it down."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "command": "make bench",
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "repeats": REPEATS,
        "rendering": rendering(),
        "rollouts": rollouts(),
        "correction": correction(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
