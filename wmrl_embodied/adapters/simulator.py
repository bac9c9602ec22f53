"""The simulator as a world: many Meta-World episodes in worker processes, seen through the policy's own encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lerobot.processor import PolicyProcessorPipeline
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor

from wmrl_embodied.adapters.rollout import Observation, Outcome
from wmrl_embodied.core.types import Context
from wmrl_embodied.envs.pool import SimulatorPool
from wmrl_embodied.policies.mini_vla import MiniVLAPolicy


class Perception:
    """From what an environment shows to what the policy's trunk and a world model work on.

    Args:
        policy: its frozen vision encoder makes the features.
        preprocessor: its LeRobot pipeline normalises proprioception and splits instructions into tokens.
    """

    def __init__(self, policy: MiniVLAPolicy, preprocessor: PolicyProcessorPipeline) -> None:
        self._policy = policy
        self._preprocessor = preprocessor

    def __call__(self, pixels: np.ndarray, agent_pos: np.ndarray, instructions: Sequence[str]) -> Observation:
        """(N, H, W, 3) uint8, (N, P) in metres, N strings."""
        image = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        batch = self._preprocessor(
            {
                self._policy.config.image_key: image,
                OBS_STATE: torch.from_numpy(np.asarray(agent_pos, np.float32)),
                "task": list(instructions),
            }
        )
        image = batch[self._policy.config.image_key]
        # Never a single image: the convolutions take another path for it, whose last bits differ, and a resumed run,
        # which looks at other numbers of images at once, would part from an undisturbed one.
        features = self._policy.encode(image if len(image) > 1 else image.repeat(2, 1, 1, 1))[: len(image)]
        return Observation(features, batch[OBS_STATE], batch[OBS_LANGUAGE_TOKENS])


class SimulatorWorld:
    """Executes attempts for real. With `predicts=True` it plays the part of a perfect world model.

    Args:
        pool: worker processes.
        perception: makes observations.
        stop_at_success: end an attempt at its first success; otherwise act on to the horizon and keep
            `success_at_end`.
        film: keep the rendered frame before every chunk, (N, H, W, 3) each, in `frames`.
    """

    def __init__(
        self,
        pool: SimulatorPool,
        perception: Perception,
        predicts: bool = False,
        stop_at_success: bool = True,
        film: bool = False,
    ) -> None:
        self.predicts = predicts
        self._pool = pool
        self._perception = perception
        self._stop_at_success = stop_at_success
        self._film = film

    def start(self, contexts: Sequence[Context]) -> tuple[Observation, Tensor]:
        """Reset every row to its listed initial state."""
        raw, infos = self._pool.reset([(c.task, c.index) for c in contexts], self._stop_at_success)
        self._instructions = [context.instruction for context in contexts]
        self._observation = self._perception(raw["pixels"], raw["agent_pos"], self._instructions)
        self.frames = [raw["pixels"].copy()] if self._film else []
        self.success_once = np.zeros(len(contexts), bool)
        self.success_at_end = np.zeros(len(contexts), bool)
        return self._observation, torch.tensor([info["already_successful"] for info in infos])

    def step(self, action: Tensor, running: Tensor) -> Outcome:
        """Apply a chunk to the running rows; one judge, whose hazard is 0 or 1."""
        rows = running.nonzero().flatten()
        hazard, taken = torch.zeros(1, len(running)), torch.zeros(len(running), dtype=torch.long)
        if not len(rows):  # every success was true from the start
            return Outcome(self._observation, hazard, taken)
        raw, success, _, _, infos = self._pool.step(rows.tolist(), action[rows].numpy())
        seen = self._perception(raw["pixels"], raw["agent_pos"], [self._instructions[row] for row in rows])
        features, proprio = self._observation.features.clone(), self._observation.proprio.clone()
        features[rows], proprio[rows] = seen.features, seen.proprio
        self._observation = Observation(features, proprio, self._observation.tokens)
        for row, now, info in zip(rows.tolist(), success, infos, strict=True):
            hazard[0, row] = info["success_once"] and not self.success_once[row]
            taken[row] = info["actions_taken"]
            self.success_once[row] = info["success_once"]
            self.success_at_end[row] = bool(now)
        if self._film:
            frame = self.frames[-1].copy()
            frame[rows.numpy()] = raw["pixels"]
            self.frames.append(frame)
        return Outcome(self._observation, hazard, taken)
