"""Policies in and out: LeRobot `pretrained_model` folders and hub ids, with their processors."""

from __future__ import annotations

import copy
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import draccus
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from safetensors.torch import load_model

from wmrl_embodied.policies.mini_vla import MiniVLAPolicy


class PolicyNotFound(ValueError):
    """The path is no policy that can be trained here; the message says why."""


@dataclass
class LoadedPolicy:
    """A policy with the pipelines that its checkpoint came with."""

    policy: MiniVLAPolicy
    preprocessor: PolicyProcessorPipeline
    postprocessor: PolicyProcessorPipeline

    def save(self, folder: Path) -> None:
        """Write a LeRobot `pretrained_model` folder: configuration, weights and both pipelines."""
        self.policy.save_pretrained(folder)
        self.preprocessor.save_pretrained(folder)
        self.postprocessor.save_pretrained(folder)

    def reference(self) -> MiniVLAPolicy:
        """A frozen copy of the policy as it is now."""
        return copy.deepcopy(self.policy).requires_grad_(False).eval()


def load_policy(path: str) -> LoadedPolicy:
    """Open a policy from a folder or a hub id, its vision encoder frozen.

    Raises:
        PolicyNotFound: nothing there, another policy type, or a broken checkpoint.
    """
    if Path(path).is_dir() and not (Path(path) / CONFIG_NAME).is_file():
        raise PolicyNotFound(
            f"policy.path={path}: no {CONFIG_NAME} there; give the folder `pretrained_model` of wmrl-sft or wmrl-train"
        )
    config = _file(path, CONFIG_NAME)
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise PolicyNotFound(f"policy.path={path}: {CONFIG_NAME} is not JSON ({error})") from error
    kind = content.get("type") if isinstance(content, dict) else None
    if kind != MiniVLAPolicy.name:
        raise PolicyNotFound(
            f"policy.path={path}: a policy of type {kind!r}; supported is {MiniVLAPolicy.name!r}, which wmrl-sft makes"
        )
    try:
        # LeRobot's own `from_pretrained` leaves a temporary file behind and takes weights that are missing for fine.
        policy = MiniVLAPolicy(draccus.decode(PreTrainedConfig, content))
        load_model(policy, _file(path, SAFETENSORS_SINGLE_FILE), strict=True)
        processors = make_pre_post_processors(policy.config, pretrained_path=path)
    except PolicyNotFound:
        raise
    except Exception as error:  # draccus, torch, safetensors and the processors raise many kinds
        reason = textwrap.shorten(str(error.__cause__ or error), 300)
        raise PolicyNotFound(
            f"policy.path={path}: a broken or foreign checkpoint ({reason}); restore it, or clone anew with wmrl-sft"
        ) from error
    policy.to(policy.config.device).freeze_vision()
    return LoadedPolicy(policy.eval(), *processors)


def _file(path: str, name: str) -> Path:
    """One file of a checkpoint, downloaded if `path` is a hub id."""
    if Path(path).exists():
        return Path(path) / name
    try:
        return Path(hf_hub_download(path, name))
    except Exception as error:  # offline, unknown, private, or no valid id
        reason = textwrap.shorten(str(error), 160)
        raise PolicyNotFound(
            f"policy.path={path}: no such folder, and no {name} of that name on the Hugging Face hub ({reason})"
        ) from error
