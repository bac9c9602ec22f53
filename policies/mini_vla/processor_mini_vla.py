"""From an environment's observation to MiniVLA's input: normalised state and instruction words as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from lerobot.configs import FeatureType, PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import (
    ObservationProcessorStep,
    PolicyProcessorPipeline,
    ProcessorStepRegistry,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS

from wmrl_embodied.policies.mini_vla.configuration_mini_vla import MiniVLAConfig

PADDING, UNKNOWN = "<pad>", "<unk>"


def words(instruction: str) -> list[str]:
    """Lower-case words of an instruction."""
    return re.findall(r"[a-z0-9]+", instruction.lower())


def build_vocabulary(instructions: list[str]) -> list[str]:
    """Padding, unknown, then every word once, in alphabetical order."""
    return [PADDING, UNKNOWN, *sorted({word for instruction in instructions for word in words(instruction)})]


@dataclass
@ProcessorStepRegistry.register(name="mini_vla_instruction_words")
class InstructionWords(ObservationProcessorStep):
    """Puts `observation.language.tokens` (B, L) int64 beside the observation, from the `task` strings.

    Words that are not in the vocabulary become the unknown token; the vocabulary travels with the checkpoint.
    """

    vocabulary: list[str] = field(default_factory=list)
    max_words: int = 12

    def __post_init__(self) -> None:
        self._index = {word: number for number, word in enumerate(self.vocabulary)}

    def tokens(self, instruction: str) -> list[int]:
        """L token numbers, padded with 0."""
        if not self.vocabulary:
            raise ValueError("vocabulary=[]: list the words of the instructions, see `build_vocabulary`")
        known = [self._index.get(word, self._index[UNKNOWN]) for word in words(instruction)][: self.max_words]
        return known + [0] * (self.max_words - len(known))

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Add the tokens of the transition's task."""
        task = (self.transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get("task")
        if task is None:
            raise ValueError(
                "MiniVLA needs an instruction: pass a batch with the key 'task' (a string or a list)"
            )
        tasks = [task] if isinstance(task, str) else list(task)
        return {**observation, OBS_LANGUAGE_TOKENS: torch.tensor([self.tokens(text) for text in tasks])}

    def get_config(self) -> dict[str, Any]:
        """What `policy_preprocessor.json` keeps."""
        return {"vocabulary": self.vocabulary, "max_words": self.max_words}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        """Declares the token feature."""
        tokens = PolicyFeature(FeatureType.LANGUAGE, (self.max_words,))
        features[PipelineFeatureType.OBSERVATION].setdefault(OBS_LANGUAGE_TOKENS, tokens)
        return features


def make_mini_vla_pre_post_processors(
    config: MiniVLAConfig, dataset_stats: dict[str, dict[str, torch.Tensor]] | None = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """The (pre, post) pipelines, as LeRobot's factory expects to find them."""
    steps = make_default_policy_processor_steps(config, dataset_stats)
    instruction = InstructionWords(config.vocabulary, config.max_words)
    return make_policy_processor_pipelines(
        input_steps=[
            steps.rename_observations,
            steps.add_batch_dim,
            instruction,
            steps.to_device,
            steps.normalize,
        ],
        output_steps=[steps.unnormalize, steps.to_cpu],
    )
