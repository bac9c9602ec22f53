"""Behaviour cloning of MiniVLA from a LeRobotDataset: the supervised start that reinforcement learning needs.

Knows datasets and the policy; nothing of simulators, so demonstrations may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.processor import PolicyProcessorPipeline
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor
from tqdm import tqdm

from wmrl_embodied.policies.mini_vla import MiniVLAConfig, MiniVLAPolicy, make_mini_vla_pre_post_processors
from wmrl_embodied.policies.mini_vla.configuration_mini_vla import features_for
from wmrl_embodied.policies.mini_vla.processor_mini_vla import build_vocabulary

LEAST_STATE_STD = 0.01  # in the units of the state (metres; gripper opening in [0, 1])


@dataclass(frozen=True)
class CloningSettings:
    """Adam with a cosine schedule to zero; the returned weights are those of the last step."""

    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    seed: int = 0


@dataclass(frozen=True)
class Frames:
    """A dataset held in memory: F frames, with what the policy is trained to answer to each.

    Attributes:
        image: (F, 3, H, W) uint8.
        state: (F, P) float32, as recorded.
        chunk: (F, K, A) the actions executed from this frame on; `is_pad` (F, K) marks those past the episode's end.
        instruction: F strings.
    """

    image: Tensor
    state: Tensor
    chunk: Tensor
    is_pad: Tensor
    instruction: list[str]

    def __len__(self) -> int:
        return len(self.state)


def load_frames(dataset: LeRobotDataset, image_key: str, chunk_size: int) -> Frames:
    """Decode the whole dataset once; a frame of 64 pixels costs 12 kB, so 100 000 of them fit into 1.2 GB.

    Raises:
        KeyError: the dataset lacks the camera, `observation.state` or `action`; names what it has.
    """
    missing = [key for key in (image_key, OBS_STATE, ACTION) if key not in dataset.features]
    if missing:
        raise KeyError(f"{dataset.root}: no feature {missing}; it has {sorted(dataset.features)}")
    rows = [
        dataset[index]
        for index in tqdm(range(len(dataset)), desc="reading frames", unit="frame", leave=False)
    ]
    action = torch.stack([row[ACTION] for row in rows])
    episode = torch.stack([row["episode_index"] for row in rows])
    ahead = torch.arange(len(rows))[:, None] + torch.arange(chunk_size)
    inside = ahead.clamp(max=len(rows) - 1)
    return Frames(
        image=torch.stack([(row[image_key] * 255).round().to(torch.uint8) for row in rows]),
        state=torch.stack([row[OBS_STATE] for row in rows]),
        chunk=action[inside],
        is_pad=(ahead >= len(rows)) | (episode[inside] != episode[:, None]),
        instruction=[row["task"] for row in rows],
    )


def new_policy(
    dataset: LeRobotDataset, image_key: str = "observation.image", seed: int = 0, **overrides: object
) -> tuple[MiniVLAPolicy, PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """An untrained MiniVLA that fits the dataset's shapes, words and statistics; `overrides` go to its config."""
    height, width, _ = dataset.features[image_key]["shape"]
    if height != width:
        raise ValueError(f"{dataset.root}: {image_key} is {height}x{width}; MiniVLA needs square images")
    config = MiniVLAConfig(
        **features_for(height, dataset.features[OBS_STATE]["shape"][0], dataset.features[ACTION]["shape"][0]),
        vocabulary=build_vocabulary(list(dataset.meta.tasks.index)),
        device="cpu",
        **overrides,
    )
    with torch.random.fork_rng(
        devices=[]
    ):  # weights are a function of the seed; the global state is untouched
        torch.manual_seed(seed)
        policy = MiniVLAPolicy(config)
    # A gripper that demonstrations never move has no spread; divided by it, its first movement would be millions.
    state = dataset.meta.stats[OBS_STATE]
    stats = dataset.meta.stats | {OBS_STATE: state | {"std": np.maximum(state["std"], LEAST_STATE_STD)}}
    return policy, *make_mini_vla_pre_post_processors(config, stats)


def clone(
    policy: MiniVLAPolicy,
    preprocessor: PolicyProcessorPipeline,
    frames: Frames,
    settings: CloningSettings,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> None:
    """Train `policy` in place on `frames`, with a progress bar.

    Raises:
        FloatingPointError: the loss is not finite; names the step.
    """
    prepared = preprocessor(
        {
            "observation.image": frames.image[:1].float() / 255,
            OBS_STATE: frames.state,
            "task": frames.instruction,
        }
    )
    state, tokens = prepared[OBS_STATE], prepared[OBS_LANGUAGE_TOKENS]
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    policy.train()
    bar = tqdm(range(settings.steps), desc="behaviour cloning", unit="step")
    for step, rows in zip(bar, _minibatches(len(frames), settings), strict=False):
        loss, metrics = policy(
            {
                policy.config.image_key: frames.image[rows].float() / 255,
                OBS_STATE: state[rows],
                OBS_LANGUAGE_TOKENS: tokens[rows],
                ACTION: frames.chunk[rows],
                "action_is_pad": frames.is_pad[rows],
            }
        )
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"behaviour cloning: loss {loss.item()} at step {step}; lower the learning rate"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(mse=f"{metrics['mse']:.4f}", refresh=False)
        if on_step is not None:
            on_step(step, metrics)
    policy.eval()


def _minibatches(size: int, settings: CloningSettings) -> Iterator[Tensor]:
    """Endless epochs of shuffled minibatches."""
    rng = np.random.default_rng(settings.seed)
    while True:
        order = torch.from_numpy(rng.permutation(size))
        yield from order.split(settings.batch_size)
