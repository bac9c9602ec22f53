"""MiniVLA: one image, proprioception and an instruction in; a Gaussian over a chunk of actions out.

Three parts, because reinforcement learning treats them differently: the vision encoder (frozen then, so its
features are what a world model predicts), the instruction encoder and the trunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from einops import rearrange
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn

from wmrl_embodied.policies.mini_vla.configuration_mini_vla import MiniVLAConfig
from wmrl_embodied.policies.mini_vla.processor_mini_vla import build_vocabulary

ACTION_LIMIT = 1.0


class VisionEncoder(nn.Module):
    """Convolutions to `keypoints` maps, and of each map where it is (expected x, y) and how present.

    Image coordinates instead of a pooled vector: where the hand and the object are is what manipulation needs,
    and a spatial softmax states it by construction (Levine et al. 2016, arXiv 1504.00702).
    """

    def __init__(self, keypoints: int) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(64, keypoints, 1),
        )
        self.sharpness = nn.Parameter(torch.zeros(keypoints))

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) in [0, 1] -> (B, 3 * keypoints): x and y in [-1, 1], presence in log units."""
        maps = self.maps((2 * image - 1).contiguous(memory_format=torch.channels_last))
        height, width = maps.shape[-2:]
        logits = rearrange(maps, "b k h w -> b k (h w)") * self.sharpness.exp()[:, None]
        weights = logits.softmax(-1)
        y, x = torch.meshgrid(
            torch.linspace(-1, 1, height, device=image.device),
            torch.linspace(-1, 1, width, device=image.device),
            indexing="ij",
        )
        where = weights @ torch.stack([x.flatten(), y.flatten()], -1)
        presence = torch.logsumexp(logits, -1) - math.log(height * width)
        return torch.cat([where.flatten(1), torch.tanh(presence / 4)], -1)


class InstructionEncoder(nn.Module):
    """Words -> one vector: embeddings, one transformer layer, mean over the words that are there."""

    def __init__(self, vocabulary: int, width: int, heads: int, max_words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(max_words, width))
        self.layer = _layer(width, heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) -> (B, width). Equal instructions are encoded once."""
        unique, which = torch.unique(tokens, dim=0, return_inverse=True)
        absent = unique == 0
        absent[:, 0] = False  # an empty instruction still has one (padding) word to attend to
        encoded = self.layer(self.embedding(unique) + self.position, src_key_padding_mask=absent)
        present = (~absent).to(encoded.dtype)[..., None]
        return ((encoded * present).sum(1) / present.sum(1))[which]


class Trunk(nn.Module):
    """A transformer over [instruction, image, image, proprioception, readout]; the readout becomes the chunk."""

    def __init__(self, config: MiniVLAConfig) -> None:
        super().__init__()
        width = config.width
        self.action_shape = (config.chunk_size, config.action_feature.shape[0])
        self.from_features = nn.Linear(config.feature_dim, 2 * width)
        self.from_proprio = nn.Linear(config.robot_state_feature.shape[0], width)
        self.readout = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Parameter(0.02 * torch.randn(5, width))
        self.layers = nn.ModuleList([_layer(width, config.heads) for _ in range(config.depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, math.prod(self.action_shape)))

    def forward(self, features: Tensor, proprio: Tensor, instruction: Tensor) -> Tensor:
        """(B, D), (B, P), (B, width) -> mean actions (B, K, A)."""
        return self.head[1](self.hidden(features, proprio, instruction)).unflatten(-1, self.action_shape)

    def hidden(self, features: Tensor, proprio: Tensor, instruction: Tensor) -> Tensor:
        """Same arguments -> (B, width), what the last linear layer makes the actions of."""
        tokens = torch.stack(
            [
                instruction,
                *self.from_features(features).chunk(2, -1),
                self.from_proprio(proprio),
                self.readout.expand(len(features), -1),
            ],
            dim=1,
        )
        tokens = tokens + self.position
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head[0](tokens[:, -1])


def _layer(width: int, heads: int) -> nn.TransformerEncoderLayer:
    # Without dropout: old and new log-probabilities of the same decision must be equal before an update.
    return nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def clipped_gaussian_log_prob(
    action: Tensor, mean: Tensor, std: float, limit: float = ACTION_LIMIT
) -> Tensor:
    """Log-probability of an action that was clipped to [-limit, limit] after sampling from a Gaussian.

    Inside the limits it is the Gaussian's density; at a limit it is the mass beyond it, since that is what the
    environment saw (Fujita & Maeda 2018, arXiv 1802.07564). Elementwise, same shape as `action`.
    """
    inside = -0.5 * ((action - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))
    above = torch.special.log_ndtr((mean - limit) / std)
    below = torch.special.log_ndtr((-limit - mean) / std)
    return torch.where(action >= limit, above, torch.where(action <= -limit, below, inside))


class MiniVLAPolicy(PreTrainedPolicy):
    """See the module. Batches hold LeRobot's names, after the preprocessor of `processor_mini_vla`.

    For reinforcement learning a decision is one action of a chunk, so a trajectory of C chunks has T = C * K
    decisions, and `Trajectory.steps` holds `features` (C, D), `proprio` (C, P), `tokens` (L,) and `action`
    (C, K, A).
    """

    config_class = MiniVLAConfig
    name = "mini_vla"

    def __init__(
        self, config: MiniVLAConfig, dataset_meta: LeRobotDatasetMetadata | None = None, **_: object
    ) -> None:
        super().__init__(config)
        if not config.vocabulary and dataset_meta is not None:  # a new policy of `lerobot-train`
            config.vocabulary = build_vocabulary(list(dataset_meta.tasks.index))
        config.validate_features()
        self.vision = VisionEncoder(config.keypoints)
        self.language = InstructionEncoder(
            max(2, len(config.vocabulary)), config.width, config.heads, config.max_words
        )
        self.trunk = Trunk(config)
        self.reset()

    def get_optim_params(self) -> Iterator[nn.Parameter]:
        """All parameters, for `lerobot-train`."""
        return self.parameters()

    def freeze_vision(self) -> None:
        """Stop gradients to the vision encoder, so that stored features stay valid."""
        self.vision.requires_grad_(False)

    def reset(self) -> None:
        """Forget the queued actions; call at every episode start."""
        self._queue: deque[Tensor] = deque(maxlen=self.config.n_action_steps)

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Image (B, 3, H, W) in [0, 1] -> features (B, D), without gradient."""
        return self.vision(image)

    def action_mean(self, features: Tensor, proprio: Tensor, tokens: Tensor) -> Tensor:
        """(B, D), (B, P), (B, L) -> (B, K, A)."""
        return self.trunk(features, proprio, self.language(tokens))

    def exploration_noise(self, size: int, chunks: int, generator: torch.Generator) -> Tensor:
        """Noise of `size` attempts of C chunks, (size, C * K, A) in standard deviations: a stationary AR(1) from action
        to action. Log-probabilities remain those of each action by itself, as in PPO with coloured noise
        (Hollenstein et al. 2024, arXiv 2312.11091).
        """
        actions, action_dim = self.trunk.action_shape
        fresh = torch.randn(size, chunks * actions, action_dim, generator=generator)
        correlation = self.config.noise_correlation
        noise = [fresh[:, 0]]
        for innovation in fresh[:, 1:].unbind(1):
            noise.append(correlation * noise[-1] + math.sqrt(1 - correlation**2) * innovation)
        return torch.stack(noise, 1)

    def act(
        self,
        features: Tensor,
        proprio: Tensor,
        tokens: Tensor,
        noise: Tensor | None = None,
        replay: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The actions to send, (B, K, A) within the limits, and their log-probability (B, K), nats.

        `noise` (B, K, A) is in standard deviations; `replay` (B, K, A) is sent instead where it is not NaN.
        """
        mean = self.action_mean(features, proprio, tokens)
        action = mean if noise is None else mean + self.config.action_std * noise
        action = action.clamp(-ACTION_LIMIT, ACTION_LIMIT)
        if replay is not None:
            action = torch.where(replay.isnan(), action, replay)
        return action, clipped_gaussian_log_prob(action, mean, self.config.action_std).sum(-1)

    def log_prob(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, C * K) log-probability of every action that was sent, nats; see the class for the batch."""
        size, chunks = batch["features"].shape[:2]
        instruction = self.language(batch["tokens"]).repeat_interleave(chunks, 0)
        mean = self.trunk(batch["features"].flatten(0, 1), batch["proprio"].flatten(0, 1), instruction)
        per_dimension = clipped_gaussian_log_prob(batch["action"].flatten(0, 1), mean, self.config.action_std)
        return rearrange(per_dimension.sum(-1), "(b c) k -> b (c k)", b=size, c=chunks)

    @torch.no_grad()
    def log_prob_gradient(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, (width + 1) * K * A) gradient of each trajectory's log-probability, weighted by `batch["mask"]`, with
        respect to weights and bias of the last layer; for `Trajectory.log_prob_gradient`.
        """
        size, chunks = batch["features"].shape[:2]
        instruction = self.language(batch["tokens"]).repeat_interleave(chunks, 0)
        hidden = self.trunk.hidden(
            batch["features"].flatten(0, 1), batch["proprio"].flatten(0, 1), instruction
        )
        mean = self.trunk.head[1](hidden).unflatten(-1, self.trunk.action_shape)
        with torch.enable_grad():
            mean.requires_grad_()
            log_prob = clipped_gaussian_log_prob(batch["action"].flatten(0, 1), mean, self.config.action_std)
            weighted = log_prob.sum(-1) * batch["mask"].reshape(size * chunks, -1)
            (slope,) = torch.autograd.grad(weighted.sum(), mean)
        seen = torch.cat([hidden, torch.ones_like(hidden[:, :1])], -1).unflatten(0, (size, chunks))
        return (seen.transpose(1, 2) @ slope.reshape(size, chunks, -1)).flatten(1)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning: mean squared error to the demonstrated chunk (B, K, A), padding left out."""
        features = self.vision(batch[self.config.image_key])
        mean = self.action_mean(features, batch[OBS_STATE], batch[OBS_LANGUAGE_TOKENS])
        error = (mean - batch[ACTION]).square().mean(-1)
        padded = batch.get("action_is_pad")
        weight = torch.ones_like(error) if padded is None else (~padded).to(error.dtype)
        loss = (error * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"mse": loss.item()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: object) -> Tensor:
        """Deterministic chunk (B, K, A)."""
        self.eval()
        features = self.encode(batch[self.config.image_key])
        return self.act(features, batch[OBS_STATE], batch[OBS_LANGUAGE_TOKENS])[0]

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: object) -> Tensor:
        """The next action (B, A); predicts a new chunk when the queue is empty."""
        if not self._queue:
            chunk = self.predict_action_chunk(batch)[:, : self.config.n_action_steps]
            self._queue.extend(chunk.transpose(0, 1))
        return self._queue.popleft()
