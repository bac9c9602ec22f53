"""Session-scoped parts that run a simulator; nothing of them is imported before a test asks for it."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("repeatable")

TASKS = ("button-press-topdown-v3", "plate-slide-v3")


@pytest.fixture(scope="session")
def pool():
    """Two workers with the default settings."""
    from wmrl_embodied.envs.pool import SimulatorPool

    with SimulatorPool(workers=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def lone_worker():
    """One worker with the default settings."""
    from wmrl_embodied.envs.pool import SimulatorPool

    with SimulatorPool(workers=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def dataset(pool, tmp_path_factory):
    """Two noisy demonstrations of each of two tasks."""
    from wmrl_embodied.envs.demonstrations import collect_dataset

    return collect_dataset(pool, TASKS, 2, 0.2, 0, tmp_path_factory.mktemp("datasets") / "demonstrations")


@pytest.fixture
def untrained(dataset):
    """(policy, preprocessor, postprocessor) that fit the dataset, the same initial weights every time."""
    from wmrl_embodied.policies.cloning import new_policy

    return new_policy(dataset, seed=1)


@pytest.fixture(scope="session")
def scripted():
    """An acting policy that sends given actions (N, C, K, A) whatever it sees."""

    class Scripted:
        def __init__(self, actions):
            self.actions = actions
            self.seen = []

        def act(self, features, proprio, tokens, noise=None, replay=None):
            self.seen.append((features.clone(), proprio.clone()))
            action = self.actions[:, len(self.seen) - 1].clone()
            return action, torch.zeros(action.shape[:2])

    return Scripted


@pytest.fixture(scope="session")
def executed_groups(pool, dataset, scripted):
    """Eight groups of four attempts that were really executed: an expert's actions, more or less disturbed, so that
    some succeed and others do not. The first has an attempt without a score.
    """
    from wmrl_embodied.adapters.rollout import rollout
    from wmrl_embodied.adapters.simulator import Perception, SimulatorWorld
    from wmrl_embodied.core.types import Context, Group
    from wmrl_embodied.envs.metaworld import instructions
    from wmrl_embodied.policies.cloning import new_policy

    contexts = [Context(task, index, instructions()[task]) for task in TASKS for index in range(4)]
    chunks, size, attempts = 14, 5, 4
    generator = torch.Generator().manual_seed(0)
    actions = torch.zeros(len(contexts), attempts, chunks * size, 4)
    for start in range(0, len(contexts), pool.workers):
        batch = [(context.task, context.index) for context in contexts[start : start + pool.workers]]
        for row, shown in enumerate(pool.demonstrate(batch, noise=0.0, seed=0), start):
            actions[row, :, : len(shown.action)] = torch.from_numpy(shown.action)
    aim = torch.randn(len(contexts), attempts, 1, 3, generator=generator)
    actions[..., :3] += 0.1 * aim + 0.1 * torch.randn(*actions.shape[:3], 3, generator=generator)
    policy, preprocessor, _ = new_policy(dataset, seed=1)
    world = SimulatorWorld(pool, Perception(policy, preprocessor))
    rows = [context for context in contexts for _ in range(attempts)]
    plan = actions.clamp(-1, 1).view(len(rows), chunks, size, 4)
    done = rollout(scripted(plan), world, rows, chunks, None)
    groups = [
        Group(context, done[place * attempts : (place + 1) * attempts])
        for place, context in enumerate(contexts)
    ]
    mixed = sum(0 < group.executed.sum() < attempts for group in groups)
    assert mixed >= 5, "too few groups that have both; change the noise"
    groups[0].trajectories[-1].executed = float("nan")
    return groups
