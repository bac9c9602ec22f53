"""Demonstrations: what is stored is what was executed, so that replaying it gives the stored states again."""

import itertools

import numpy as np
import pytest
import torch

from wmrl_embodied.envs.demonstrations import ExpertFailed, demonstrations
from wmrl_embodied.envs.metaworld import MetaWorldEnv, instructions
from wmrl_embodied.envs.pool import Demonstration, SimulatorSettings
from wmrl_embodied.envs.splits import DEMONSTRATION

TASKS = ("button-press-topdown-v3", "plate-slide-v3")  # those of the `dataset` fixture
NOISE, SEED = 0.2, 0


@pytest.fixture(scope="module")
def episodes(pool):
    return list(demonstrations(pool, TASKS, 2, NOISE, SEED))


def test_dataset_opens_with_lerobot(dataset, episodes):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    reopened = LeRobotDataset(repo_id=dataset.repo_id, root=dataset.root)
    assert reopened.num_episodes == 4
    assert len(reopened) == sum(len(episode.action) for episode in episodes)
    assert reopened.fps == 40
    assert set(reopened.meta.tasks.index) == {instructions()[task] for task in TASKS}
    frame = reopened[0]
    assert frame["observation.image"].shape == (3, 64, 64)
    assert frame["observation.state"].shape == frame["action"].shape == (4,)
    assert frame["task"] == instructions()[TASKS[0]]
    assert set(reopened.meta.stats) >= {"observation.image", "observation.state", "action"}


def test_dataset_holds_the_demonstrations_of_the_listed_states_in_order(dataset, episodes):
    assert [(episode.task, episode.index) for episode in episodes] == [
        (task, DEMONSTRATION[place]) for task in TASKS for place in range(2)
    ]
    frames = [dataset[row] for row in range(len(dataset))]
    stored = torch.stack([frame["action"] for frame in frames]).numpy()
    np.testing.assert_array_equal(stored, np.concatenate([episode.action for episode in episodes]))
    pixels = torch.stack([(frame["observation.image"] * 255).round().to(torch.uint8) for frame in frames])
    np.testing.assert_array_equal(
        pixels.permute(0, 2, 3, 1).numpy(), np.concatenate([episode.pixels for episode in episodes])
    )
    numbers = torch.stack([frame["episode_index"] for frame in frames]).tolist()
    assert numbers == [number for number, episode in enumerate(episodes) for _ in episode.action]


def test_stored_actions_replayed_from_the_listed_state_give_the_stored_states(dataset, episodes):
    rows = iter(range(len(dataset)))
    for number, episode in enumerate(episodes):
        frames = [dataset[row] for row in itertools.islice(rows, len(episode.action))]
        assert {int(frame["episode_index"]) for frame in frames} == {number}
        env = MetaWorldEnv(episode.task)
        observation, _ = env.reset(seed=episode.index)
        for frame in frames:
            np.testing.assert_array_equal(observation["agent_pos"], frame["observation.state"].numpy())
            image = (frame["observation.image"] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(observation["pixels"], image)
            observation, _, terminated, _, _ = env.step(frame["action"].numpy())
        assert terminated
        env.close()


def test_stored_actions_are_the_executed_not_the_intended_ones(episodes):
    episode = episodes[0]
    env = MetaWorldEnv(episode.task)
    env.reset(seed=episode.index)
    offsets = []
    for action in episode.action:
        offsets.append(action - env.expert_action())
        env.step(action)
    env.close()
    offsets = np.stack(offsets)
    assert np.abs(episode.action).max() <= 1
    assert 0.1 < offsets[:, :3].std() < 0.25  # the noise, less what the limits cut off
    assert not offsets[:, 3].any()  # the gripper is left alone


def test_demonstrations_do_not_depend_on_the_number_of_workers(lone_worker, episodes):
    again = list(demonstrations(lone_worker, TASKS[:1], 2, NOISE, SEED))
    for one, other in zip(again, episodes, strict=False):
        assert one.index == other.index
        np.testing.assert_array_equal(one.action, other.action)
        np.testing.assert_array_equal(one.pixels, other.pixels)


def test_an_expert_that_fails_is_named_with_the_way_out(pool):
    with pytest.raises(ExpertFailed) as failure:
        list(demonstrations(pool, ["assembly-v3"], 2, 30.0, 0, max_attempts=2))
    assert str(failure.value) == (
        "task='assembly-v3': the expert succeeded in 0 of 4 attempts with noise=30.0; "
        "lower the noise or raise the horizon (70 actions)"
    )


class FailingNowAndThen:
    """Stands in for a pool: every listed state whose number is odd fails."""

    workers, settings = 3, SimulatorSettings()

    def __init__(self):
        self.asked = []

    def demonstrate(self, contexts, noise, seed):
        self.asked += [index for _, index in contexts]
        empty = np.zeros((1, 4), np.float32)
        return [Demonstration(task, index, empty, empty, empty, index % 2 == 0) for task, index in contexts]


def test_failed_attempts_are_left_out_and_no_state_is_tried_twice():
    pool = FailingNowAndThen()
    kept = [episode.index for episode in demonstrations(pool, ["any"], 4, 0.0, 0)]
    first = DEMONSTRATION[0]
    assert kept == [first, first + 2, first + 4, first + 6]
    assert pool.asked == list(range(first, first + 7))
