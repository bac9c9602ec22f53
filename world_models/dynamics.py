"""An ensemble that imagines a whole attempt from its first observation and the actions alone.

Every member integrates the executed action chunks in a recurrent state and reads three things off it: exact
proprioception, the policy's frozen image features, and the hazard, i.e. the probability that the attempt succeeds
during this chunk given that it has not before. Observations after the first never enter, so training is on
exactly what imagining needs, and nothing that happens after a success can leak into its score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DynamicsSettings:
    """Sizes of the ensemble.

    Attributes:
        members: E networks, each with its own initial weights and its own resampling of the data.
        width: of the recurrent state and the hidden layers.
        landmarks: points in the space of the hand that a member places by the first observation; the hazard and
            the recurrence see the hand relative to them, which is what contact and pressing depend on.
    """

    members: int = 5
    width: int = 96
    landmarks: int = 6


class EnsembleLinear(nn.Module):
    """E independent affine maps, (E, B, in) -> (E, B, out)."""

    def __init__(self, members: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        weight = torch.empty(members, inputs, outputs).uniform_(-bound, bound, generator=generator)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return torch.baddbmm(self.bias, x, self.weight)


@dataclass(frozen=True)
class Belief:
    """What the E members think of B attempts so far.

    Attributes:
        hidden: (E, B, W) recurrent state.
        features: (E, B, D), standardised; `first_features` (E, B, D) are those of the first observation.
        proprio: (E, B, P), normalised as the policy sees it.
        scene: (E, B, W) what was read off the first observation and the instruction.
        landmarks: (E, B, J, 3).
        commanded: (B, P) where the actions so far tell the hand to be, and `free` (B, P) where it would be had it
            touched nothing.
    """

    hidden: Tensor
    features: Tensor
    first_features: Tensor
    proprio: Tensor
    scene: Tensor
    landmarks: Tensor
    commanded: Tensor
    free: Tensor


class FreeMotion(nn.Module):
    """A position-controlled hand in free space: a command integrates the actions within limits, the hand follows.

    command <- clip(command + gain . action, low, high); hand <- hand + rate (command - hand), once an action.
    These few numbers are learned from a handful of attempts and are nearly exact until something is touched, so
    that the recurrent part is left with contact only.
    """

    def __init__(self, action_dim: int, proprio_dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(action_dim, proprio_dim))
        self.low = nn.Parameter(torch.full((proprio_dim,), -4.0))
        self.high = nn.Parameter(torch.full((proprio_dim,), 4.0))
        self.rate = nn.Parameter(torch.full((proprio_dim,), -0.7))

    def forward(self, commanded: Tensor, hand: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """(B, P), (B, P), (B, K, A) -> the command and the hand after the chunk."""
        moves, rate = action @ self.gain, torch.sigmoid(self.rate)
        for move in moves.unbind(1):
            commanded = torch.maximum(torch.minimum(commanded + move, self.high), self.low)
            hand = torch.lerp(hand, commanded, rate)
        return commanded, hand

    @torch.no_grad()
    def fit_gain(self, action: Tensor, moved: Tensor) -> None:
        """Least-squares start for the gain from chunks (N, K, A) and how far the hand moved in each (N, P)."""
        # In double precision: in single, the last bits depend on where the arrays lie in memory, and two runs with
        # the same seed part.
        self.gain.copy_(torch.linalg.lstsq(action.sum(1).double(), moved.double()).solution)


class DynamicsEnsemble(nn.Module):
    """See the module.

    Args:
        feature_dim: D of the policy's image feature.
        proprio_dim: P.
        action_shape: (K, A) of a chunk.
        vocabulary: number of instruction words.
        settings: sizes.
        seed: of the initial weights.
    """

    def __init__(
        self,
        feature_dim: int,
        proprio_dim: int,
        action_shape: tuple[int, int],
        vocabulary: int,
        settings: DynamicsSettings | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.settings = settings or DynamicsSettings()
        members, width, landmarks = self.settings.members, self.settings.width, self.settings.landmarks
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_std", torch.ones(feature_dim))

        def linear(inputs: int, outputs: int) -> EnsembleLinear:
            return EnsembleLinear(members, inputs, outputs, generator)

        chunk, actions = action_shape
        self.words = nn.Parameter(0.5 * torch.randn(vocabulary, width // 2, generator=generator))
        self.scene_in = linear(feature_dim + proprio_dim + width // 2, width)
        self.scene_out = linear(width, width)
        self.place = linear(width, 3 * landmarks)
        self.hidden_in = linear(width, width)
        relative = 4 * landmarks
        self.gates = linear(chunk * actions + 2 * proprio_dim + 2 * relative + width, 3 * width)
        self.gates_hidden = linear(width, 3 * width)
        self.move = linear(width, proprio_dim)
        self.free_motion = FreeMotion(actions, proprio_dim)
        self.change = linear(width, feature_dim)
        self.hazard_in = linear(2 * width + 3 * relative + 2 * proprio_dim, width)
        self.hazard_out = linear(width, 1)
        nn.init.constant_(self.hazard_out.bias, -3.0)  # success during a chunk is rare

    def start(self, features: Tensor, proprio: Tensor, tokens: Tensor) -> Belief:
        """Beliefs from a first observation: (B, D), (B, P), (B, L)."""
        present = (tokens > 0).to(features.dtype)[..., None]
        told = (self.words[tokens] * present).sum(1) / present.sum(1).clamp(min=1)
        features = (features - self.feature_mean) / self.feature_std
        first = proprio
        features, proprio, told = (self._all(value) for value in (features, proprio, told))
        scene = F.silu(self.scene_out(F.silu(self.scene_in(torch.cat([features, proprio, told], -1)))))
        return Belief(
            hidden=torch.tanh(self.hidden_in(scene)),
            features=features,
            first_features=features,
            proprio=proprio,
            scene=scene,
            landmarks=self.place(scene).unflatten(-1, (-1, 3)),
            commanded=first,
            free=first,
        )

    def step(self, belief: Belief, action: Tensor) -> tuple[Belief, Tensor]:
        """Imagine one chunk (B, K, A); returns the next belief and the hazard's logit (E, B)."""
        commanded, free = self.free_motion(belief.commanded, belief.free, action)
        order = self._all(commanded)
        before, wanted = _relative(belief.proprio, belief.landmarks), _relative(order, belief.landmarks)
        reset, update, candidate = self.gates(
            torch.cat([self._all(action.flatten(1)), order, belief.proprio, before, wanted, belief.scene], -1)
        ).chunk(3, -1)
        reset_h, update_h, candidate_h = self.gates_hidden(belief.hidden).chunk(3, -1)
        candidate = torch.tanh(candidate + torch.sigmoid(reset + reset_h) * candidate_h)
        hidden = torch.lerp(candidate, belief.hidden, torch.sigmoid(update + update_h))
        proprio = free + self.move(hidden)
        after = _relative(proprio, belief.landmarks)
        judged = torch.cat([hidden, belief.scene, proprio, order, before, after, wanted], -1)
        logit = self.hazard_out(F.silu(self.hazard_in(judged)))[..., 0]
        features = belief.first_features + self.change(hidden)
        following = Belief(
            hidden, features, belief.first_features, proprio, belief.scene, belief.landmarks, commanded, free
        )
        return following, logit

    def standardise_features(self, features: Tensor) -> None:
        """Set the scale on which features are read and predicted from a sample (N, D). Keypoints move by a few
        hundredths of the image; without this the error in them would weigh nothing.
        """
        self.feature_mean.copy_(features.mean(0))
        self.feature_std.copy_(features.std(0).clamp(min=1e-3))

    def seen(self, belief: Belief) -> Tensor:
        """(B, D) the members' mean prediction of the policy's features, on the policy's scale."""
        return belief.features.mean(0) * self.feature_std + self.feature_mean

    def _all(self, value: Tensor) -> Tensor:
        """(B, ...) -> (E, B, ...), the same for every member."""
        return value.expand(self.settings.members, *value.shape)


def _relative(proprio: Tensor, landmarks: Tensor) -> Tensor:
    """Hand (first three of P) relative to every landmark, and how near it is: (E, B, 4 J)."""
    offset = proprio[..., None, :3] - landmarks
    near = torch.exp(-offset.square().sum(-1))
    return torch.cat([offset.flatten(-2), near], -1)
