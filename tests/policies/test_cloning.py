"""Behaviour cloning: the right windows at episode ends, a loss that falls, runs that repeat."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from wmrl_embodied.policies.cloning import CloningSettings, clone, load_frames, new_policy

QUICK = CloningSettings(steps=25, batch_size=16, learning_rate=2e-3)


class TwoEpisodes:
    """Looks like a LeRobotDataset: episodes of three and two frames, the action numbers the frame."""

    root = "somewhere"
    features = {
        "camera": {"shape": (4, 4, 3)},
        "observation.state": {"shape": (1,)},
        "action": {"shape": (1,)},
    }

    def __len__(self):
        return 5

    def __getitem__(self, row):
        if not 0 <= row < 5:
            raise IndexError(row)
        return {
            "camera": torch.full((3, 4, 4), row / 255),
            "observation.state": torch.tensor([10.0 * row]),
            "action": torch.tensor([float(row)]),
            "episode_index": torch.tensor(int(row >= 3)),
            "task": "one" if row < 3 else "two",
        }


def test_windows_at_episode_ends_by_hand():
    frames = load_frames(TwoEpisodes(), "camera", chunk_size=3)
    assert len(frames) == 5
    assert frames.is_pad.tolist() == [
        [False, False, False],
        [False, False, True],
        [False, True, True],
        [False, False, True],
        [False, True, True],
    ]
    real = torch.where(frames.is_pad, -1.0, frames.chunk[..., 0])
    assert real.tolist() == [[0, 1, 2], [1, 2, -1], [2, -1, -1], [3, 4, -1], [4, -1, -1]]
    assert frames.image[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert frames.image.dtype == torch.uint8
    assert frames.state[:, 0].tolist() == [0, 10, 20, 30, 40]
    assert frames.instruction == ["one", "one", "one", "two", "two"]


def test_a_chunk_may_be_longer_than_an_episode():
    frames = load_frames(TwoEpisodes(), "camera", chunk_size=9)
    assert (~frames.is_pad).sum(1).tolist() == [3, 2, 1, 2, 1]


def test_windows_of_a_real_dataset(dataset):
    frames = load_frames(dataset, "observation.image", 5)
    lengths = torch.bincount(torch.stack([dataset[row]["episode_index"] for row in range(len(dataset))]))
    expected = torch.cat([torch.arange(int(length), 0, -1).clamp(max=5) for length in lengths])
    assert (~frames.is_pad).sum(1).tolist() == expected.tolist()
    torch.testing.assert_close(frames.chunk[3, 1], dataset[4]["action"], rtol=0, atol=0)


def test_missing_features_and_oblong_cameras_are_named(dataset):
    with pytest.raises(KeyError, match=r"no feature \['observation.wrist'\]; it has .*observation.image"):
        load_frames(dataset, "observation.wrist", 5)
    features = dataset.features | {"observation.image": {"shape": (48, 64, 3)}}
    oblong = SimpleNamespace(root="x", features=features, meta=dataset.meta)
    with pytest.raises(ValueError, match="observation.image is 48x64; MiniVLA needs square images"):
        new_policy(oblong)


@pytest.fixture(scope="module")
def frames(dataset):
    return load_frames(dataset, "observation.image", 5)


def cloned(dataset, frames, seed=0, settings=QUICK):
    policy, preprocessor, _ = new_policy(dataset, seed=seed, keypoints=8, width=32)
    losses = []
    clone(policy, preprocessor, frames, settings, lambda step, metrics: losses.append((step, metrics["mse"])))
    return policy, losses


@pytest.fixture(scope="module")
def once(dataset, frames):
    return cloned(dataset, frames)


def test_loss_falls(once):
    policy, losses = once
    assert [step for step, _ in losses] == list(range(QUICK.steps))
    first, last = (sum(loss for _, loss in part) / 5 for part in (losses[:5], losses[-5:]))
    assert last < 0.7 * first
    assert not policy.training


def test_what_was_learned_is_what_was_demonstrated(once, dataset, frames):
    """On the frames it was trained on the clone is nearer to the demonstrations than the mean action is."""
    policy, _ = once
    _, preprocessor, _ = new_policy(dataset, keypoints=8, width=32)
    batch = preprocessor(
        {
            "observation.image": frames.image.float() / 255,
            "observation.state": frames.state,
            "task": frames.instruction,
        }
    )
    error = (policy.predict_action_chunk(batch)[:, 0] - frames.chunk[:, 0]).square().mean()
    assert error < (frames.chunk[:, 0] - frames.chunk[:, 0].mean(0)).square().mean()


def test_same_seeds_give_the_same_weights(once, dataset, frames):
    torch.rand(3)  # the global generator must not matter
    again, losses = cloned(dataset, frames)
    assert losses == once[1]
    for name, value in once[0].state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)


def test_seeds_of_weights_and_of_minibatches_matter(once, dataset, frames):
    other_weights = cloned(dataset, frames, seed=1, settings=dataclasses.replace(QUICK, steps=1))[1]
    other_order = cloned(dataset, frames, settings=dataclasses.replace(QUICK, steps=1, seed=1))[1]
    assert len({once[1][0][1], other_weights[0][1], other_order[0][1]}) == 3


def test_a_new_policy_leaves_the_global_generator_alone(dataset):
    before = torch.random.get_rng_state()
    new_policy(dataset, seed=3, keypoints=8, width=32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_new_policy_fits_the_dataset(dataset):
    policy, preprocessor, _ = new_policy(dataset, keypoints=8, width=32, action_std=0.3)
    assert policy.config.action_std == 0.3
    assert policy.config.input_features["observation.image"].shape == (3, 64, 64)
    assert {"<pad>", "<unk>", "button", "plate"} <= set(policy.config.vocabulary)
    state = torch.stack([dataset[row]["observation.state"] for row in range(len(dataset))])
    scaled = preprocessor(
        {
            "observation.image": torch.zeros(len(state), 3, 64, 64),
            "observation.state": state,
            "task": ["press"] * len(state),
        }
    )["observation.state"]
    assert scaled.mean(0).abs().max() < 0.05
    assert scaled.std(0).sub(1).abs().max() < 0.05


def test_a_loss_that_is_not_finite_is_told_with_the_way_out(dataset, frames):
    broken = dataclasses.replace(frames, chunk=frames.chunk * float("nan"))
    with pytest.raises(FloatingPointError, match="loss nan at step 0; lower the learning rate"):
        cloned(dataset, broken)
