"""Teaches a `DynamicsEnsemble` from executed groups, online: every anchor group once it is there, the newest most.

Minibatches are whole groups, because a policy gradient uses only differences inside a group and the loss can be
told so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wmrl_embodied.core.types import Group
from wmrl_embodied.world_models.dynamics import DynamicsEnsemble


@dataclass(frozen=True)
class LearnerSettings:
    """How the ensemble is trained.

    Attributes:
        steps: minibatches per update.
        groups_per_batch: groups in a minibatch.
        learning_rate, weight_decay: of AdamW.
        newest_share: of every minibatch, the share drawn from the `newest` latest groups.
        newest: how many groups count as the newest.
        feature_weight, proprio_weight: of the squared prediction errors beside the hazard's cross-entropy.
        group_weight: of the within-group term (`_within_group`).
    """

    steps: int = 60
    groups_per_batch: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    newest_share: float = 0.25
    newest: int = 16
    feature_weight: float = 1.0
    proprio_weight: float = 1.0
    group_weight: float = 0.0


@dataclass(frozen=True)
class _Sequences:
    """One group as tensors: G attempts padded to C chunks. `success` (G, C) marks the chunk of the success."""

    features: Tensor  # (G, C + 1, D), the observation after the last chunk included
    proprio: Tensor  # (G, C + 1, P)
    tokens: Tensor  # (G, L)
    action: Tensor  # (G, C, K, A)
    valid: Tensor  # (G, C) chunks that were executed
    success: Tensor  # (G, C)


def _sequences(group: Group, chunks: int) -> _Sequences | None:
    """None when no attempt of the group has a score and at least one chunk."""
    attempts = [t for t in group.trajectories if np.isfinite(t.executed) and len(t.steps["action"])]
    if not attempts:
        return None
    valid = torch.zeros(len(attempts), chunks)
    success = torch.zeros(len(attempts), chunks)
    columns: dict[str, list[Tensor]] = {"features": [], "proprio": [], "action": []}
    for row, attempt in enumerate(attempts):
        length = len(attempt.steps["action"])
        valid[row, :length] = 1
        success[row, length - 1] = attempt.executed
        columns["action"].append(_padded(attempt.steps["action"], chunks))
        for name in ("features", "proprio"):
            final = torch.as_tensor(attempt.info[f"final_{name}"])[None]
            columns[name].append(_padded(torch.cat([attempt.steps[name], final]), chunks + 1))
    stacked = {name: torch.stack(values) for name, values in columns.items()}
    tokens = torch.stack([attempt.steps["tokens"] for attempt in attempts])
    return _Sequences(**stacked, tokens=tokens, valid=valid, success=success)


def _padded(value: Tensor, length: int) -> Tensor:
    """(T, ...) -> (length, ...), zeros behind."""
    return torch.cat([value, value.new_zeros(length - len(value), *value.shape[1:])])


class DynamicsLearner:
    """Owns the ensemble, its optimiser and the executed attempts it learns from.

    Args:
        model: the ensemble, trained in place.
        chunks: horizon C.
        settings: see there.
        seed: of the minibatches.
    """

    def __init__(
        self, model: DynamicsEnsemble, chunks: int, settings: LearnerSettings, seed: int = 0
    ) -> None:
        self.model = model
        self.chunks = chunks
        self.settings = settings
        self._seed = seed
        self._groups: list[_Sequences] = []
        self._updates = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    @property
    def groups(self) -> int:
        """How many groups are remembered."""
        return len(self._groups)

    def remember(self, executed: Sequence[Group]) -> None:
        """Keep executed groups for training; groups without any score teach nothing and are left out."""
        self._groups += [s for group in executed if (s := _sequences(group, self.chunks)) is not None]

    def update(self, executed: Sequence[Group], steps: int | None = None) -> dict[str, float]:
        """Remember `executed`, then train; returns the mean losses of this update.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        self.remember(executed)
        if not self._groups:
            return {}
        rng = np.random.default_rng([self._seed, self._updates])
        if self._updates == 0:
            self._fit_scales()
        self._updates += 1
        history = []
        for _ in range(self.settings.steps if steps is None else steps):
            batch = [self._groups[index] for index in self._draw(rng)]
            losses = self._losses(batch)
            loss = (
                losses["hazard"]
                + self.settings.feature_weight * losses["features"]
                + self.settings.proprio_weight * losses["proprio"]
                + self.settings.group_weight * losses["within_group"]
            )
            if not torch.isfinite(loss):
                raise FloatingPointError(f"world model: loss {loss.item()}; lower world_model.learning_rate")
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self._optimizer.step()
            history.append({name: value.item() for name, value in losses.items()})
        means = {f"loss_{name}": float(np.mean([row[name] for row in history])) for name in history[0]}
        return means | {"groups": float(len(self._groups))}

    def state_dict(self) -> dict:
        """All but the executed attempts, which the ledger holds."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict) -> None:
        """Inverse of `state_dict`."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    def _fit_scales(self) -> None:
        """Before the first step: the scale of the features and how far an action moves the hand."""
        was_run = [s.valid > 0 for s in self._groups]
        groups = list(zip(self._groups, was_run, strict=True))
        self.model.standardise_features(torch.cat([s.features[:, :-1][run] for s, run in groups]))
        self.model.free_motion.fit_gain(
            torch.cat([s.action[run] for s, run in groups]),
            torch.cat([s.proprio.diff(dim=1)[run] for s, run in groups]),
        )

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        wanted = min(self.settings.groups_per_batch, len(self._groups))
        recent = min(round(self.settings.newest_share * wanted), self.settings.newest)
        oldest_new = max(0, len(self._groups) - self.settings.newest)
        return np.concatenate(
            [
                rng.integers(0, len(self._groups), wanted - recent),
                rng.integers(oldest_new, len(self._groups), recent),
            ]
        )

    def _losses(self, batch: Sequence[_Sequences]) -> dict[str, Tensor]:
        names = ("features", "proprio", "tokens", "action", "valid", "success")
        features, proprio, tokens, action, valid, success = (
            torch.cat([getattr(sequences, name) for sequences in batch]) for name in names
        )
        belief = self.model.start(features[:, 0], proprio[:, 0], tokens)
        target = (features - self.model.feature_mean) / self.model.feature_std
        feature_error, proprio_error, logits = [], [], []
        for chunk in range(int(valid.sum(1).max())):
            belief, logit = self.model.step(belief, action[:, chunk])
            feature_error.append((belief.features - target[:, chunk + 1]).square().mean(-1))
            proprio_error.append((belief.proprio - proprio[:, chunk + 1]).square().mean(-1))
            logits.append(logit)
        length = len(logits)
        valid, success = valid[:, :length], success[:, :length]
        logit = torch.stack(logits, -1)  # (E, B, C)

        def mean(error: Tensor) -> Tensor:
            return (error * valid).sum(-1).mean() / valid.sum(-1).mean()

        hazard = F.binary_cross_entropy_with_logits(logit, success.expand_as(logit), reduction="none")
        sizes = [len(sequences.valid) for sequences in batch]
        return {
            "hazard": (hazard * valid).sum(-1).mean(),
            "features": mean(torch.stack(feature_error, -1)),
            "proprio": mean(torch.stack(proprio_error, -1)),
            "within_group": _within_group(logit, valid, success, sizes),
        }


def _within_group(logit: Tensor, valid: Tensor, success: Tensor, sizes: Sequence[int]) -> Tensor:
    """Cox's partial likelihood with the group as stratum: when a member succeeds at chunk c, how much more likely
    the model finds that than success of the other members that were still trying at c.

    It sees differences inside a group only, and nothing after a success. Shapes (E, B, C), (B, C), (B, C).
    """
    at_risk = logit.masked_fill(valid == 0, -torch.inf)
    loss, events = logit.new_zeros(()), success.sum().clamp(min=1)
    for scores, won in zip(at_risk.split(sizes, 1), success.split(sizes, 0), strict=True):
        if won.any():
            normaliser = torch.logsumexp(scores, 1, keepdim=True)
            loss = loss + torch.where(won > 0, normaliser - scores, 0.0).sum((1, 2)).mean()
    return loss / events
