"""Configuration of MiniVLA; a LeRobot `PreTrainedConfig`, so `config.json` and `--policy.type=mini_vla` work."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig


@PreTrainedConfig.register_subclass("mini_vla")
@dataclass
class MiniVLAConfig(PreTrainedConfig):
    """A vision-language-action policy small enough to train on two CPU cores.

    Attributes:
        chunk_size: actions predicted at once (K).
        n_action_steps: how many of them are executed before the policy looks again.
        keypoints: feature points of the vision encoder; it outputs three numbers a point (x, y, presence).
        width, depth, heads: of the transformer trunk.
        vocabulary: words of the instructions; index 0 is padding, 1 an unknown word.
        max_words: instruction length in tokens (L).
        action_std: standard deviation of the exploration noise, in action units.
        noise_correlation: of the noise of successive actions. White noise on every action averages out before
            the hand has gone anywhere; correlated noise tries to aim elsewhere, which is what can be learned from.
    """

    n_obs_steps: int = 1
    chunk_size: int = 5
    n_action_steps: int = 5
    keypoints: int = 32
    width: int = 128
    depth: int = 2
    heads: int = 4
    vocabulary: list[str] = field(default_factory=list)
    max_words: int = 12
    action_std: float = 0.2
    noise_correlation: float = 0.9
    optimizer_lr: float = 1e-3
    optimizer_weight_decay: float = 1e-4
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.IDENTITY,
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_std <= 0:
            raise ValueError(
                f"action_std={self.action_std}: must be above 0, or log-probabilities are infinite"
            )
        if not 0 <= self.noise_correlation < 1:
            raise ValueError(f"noise_correlation={self.noise_correlation}: must be in [0, 1)")
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise ValueError(
                f"n_action_steps={self.n_action_steps}: must be in [1, chunk_size={self.chunk_size}]"
            )

    @property
    def feature_dim(self) -> int:
        """Length D of the frozen image feature."""
        return 3 * self.keypoints

    @property
    def image_key(self) -> str:
        """The camera the policy looks through."""
        return next(iter(self.image_features))

    @property
    def observation_delta_indices(self) -> None:
        """One observation, the present one."""
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        """The K actions from now on."""
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        """No rewards are read."""
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        """AdamW, for `lerobot-train`."""
        return AdamWConfig(lr=self.optimizer_lr, weight_decay=self.optimizer_weight_decay)

    def get_scheduler_preset(self) -> None:
        """No schedule."""
        return None

    def validate_features(self) -> None:
        """Exactly one square camera, a state and an action.

        Raises:
            ValueError: says which of them is missing.
        """
        if len(self.image_features) != 1 or self.robot_state_feature is None or self.action_feature is None:
            raise ValueError(
                f"MiniVLA needs one camera, observation.state and action; got {sorted(self.input_features)} "
                f"and {sorted(self.output_features)}. Choose the camera with a feature mapping."
            )


def features_for(image_size: int, proprio_dim: int, action_dim: int) -> dict[str, dict[str, PolicyFeature]]:
    """`input_features` and `output_features` of a policy with one square camera."""
    return {
        "input_features": {
            "observation.image": PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size)),
            "observation.state": PolicyFeature(FeatureType.STATE, (proprio_dim,)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (action_dim,))},
    }
