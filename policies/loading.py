"""Policies in and out: LeRobot `pretrained_model` folders and hub ids, with their processors."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline

from wmrl_embodied.policies.mini_vla import MiniVLAConfig, MiniVLAPolicy


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
    folder = Path(path)
    if folder.exists():
        config = folder / "config.json"
        if not config.is_file():
            raise PolicyNotFound(
                f"policy.path={path}: no config.json there; give the folder `pretrained_model`"
            )
        try:
            kind = json.loads(config.read_text()).get("type")
        except ValueError as error:
            raise PolicyNotFound(f"policy.path={path}: config.json is not JSON ({error})") from error
        if kind != MiniVLAConfig.get_choice_name(MiniVLAConfig):
            raise PolicyNotFound(f"policy.path={path}: a policy of type {kind!r}; supported is 'mini_vla'")
    try:
        policy = MiniVLAPolicy.from_pretrained(path)
        processors = make_pre_post_processors(policy.config, pretrained_path=path)
    except Exception as error:  # the hub client and safetensors raise many kinds
        raise PolicyNotFound(f"policy.path={path}: cannot be opened: {error}".splitlines()[0]) from error
    policy.freeze_vision()
    return LoadedPolicy(policy.eval(), *processors)
