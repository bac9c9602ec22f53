"""A contextual softmax bandit whose gradient and optimum are known exactly, and world models with chosen faults.

The policy sees less than there is to see: contexts that look alike to it share a row of parameters, as states do
that a camera cannot tell apart. It has to trade them against each other, and that is where a wrong world model
costs something in the end. (A policy that could be optimal in every context loses nothing by predictions that
are wrong but in the right order.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from wmrl_embodied.core.types import Context, Group, Trajectory

Bias = Literal["none", "monotone", "context", "adversarial"]
BIASES: tuple[Bias, ...] = ("none", "monotone", "context", "adversarial")

_NOTHING = torch.zeros(1)


@dataclass(frozen=True)
class Bandit:
    """Contexts of a few appearances, actions with success rates; a policy softmax(W[:, appearance]), W (A, D).

    Attributes:
        appearance: (C,) int below D, all that the policy knows of a context; each equally frequent.
        success: (C, A) probability that an action's execution scores 1 and not 0.
    """

    appearance: np.ndarray
    success: np.ndarray

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        success_rate: float,
        appearances: int = 6,
        alike: int = 6,
        actions: int = 6,
    ) -> Bandit:
        """A random one, in which the uniform policy succeeds with `success_rate`.

        Every other action is sure (much the same in contexts that look alike), the rest are chancy: they succeed or
        fail by what the policy does not see.
        """
        appearance = np.repeat(np.arange(appearances), alike)
        hidden = np.where(np.arange(actions) % 2 == 0, 0.3, 4.0)
        logits = rng.normal(size=(appearances, actions))[appearance]
        logits += hidden * rng.normal(size=logits.shape)
        low, high = -60.0, 60.0
        for _ in range(60):  # bisection: the mean is monotone in the offset
            offset = (low + high) / 2
            success = 1 / (1 + np.exp(-(logits + offset)))
            low, high = (offset, high) if success.mean() < success_rate else (low, offset)
        return cls(appearance, success)

    @property
    def optimum(self) -> float:
        """The best expected score that a policy can have."""
        return self.limit(self.success)

    def limit(self, scores: np.ndarray) -> float:
        """Expected executed score of the policy that is best by `scores` (C, A): of each appearance the best action."""
        best = self._by_appearance(scores).argmax(axis=1)
        return float(self._by_appearance(self.success)[np.arange(len(best)), best].mean())

    def _by_appearance(self, values: np.ndarray) -> np.ndarray:
        """(D, ...) means of `values` (C, ...)."""
        seen = np.eye(int(self.appearance.max()) + 1)[self.appearance]
        return seen.T @ values / seen.sum(axis=0)[:, None]

    @property
    def start(self) -> np.ndarray:
        """(A, D) parameters of the uniform policy."""
        return np.zeros((self.success.shape[1], int(self.appearance.max()) + 1))

    def probabilities(self, parameters: np.ndarray) -> np.ndarray:
        """(C, A) of the actions."""
        logits = parameters.T[self.appearance]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def score(self, parameters: np.ndarray) -> float:
        """Expected executed score J of the policy."""
        return float((self.probabilities(parameters) * self.success).sum(axis=1).mean())

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        """(A D,) of J."""
        chosen = self.probabilities(parameters)
        gradients = self.log_prob_gradients(parameters)
        return np.einsum("ca,cak->k", chosen * self.success, gradients) / len(chosen)

    def log_prob_gradients(self, parameters: np.ndarray) -> np.ndarray:
        """(C, A, A D) gradient of log pi(a | context) with respect to the parameters."""
        chosen = self.probabilities(parameters)
        towards = np.eye(chosen.shape[1]) - chosen[:, None, :]
        seen = np.eye(parameters.shape[1])[self.appearance]
        return np.einsum("cab,cd->cabd", towards, seen).reshape(*chosen.shape, -1)


@dataclass(frozen=True)
class FaultyModel:
    """Predicted scores of a bandit: its success rates distorted, plus noise of every attempt's own.

    Attributes:
        bandit: what it predicts.
        bias: `none`; `monotone`, one lenient scale for all contexts (a quarter of the way earns three quarters of the
            score), which a monotone map can undo, and which makes a sure action look better than a chancy one;
            `context`, the prediction is an opinion of the model's own about that context and action;
            `adversarial`, the action that is worst over all contexts is predicted to succeed.
        noise: standard deviation of the noise.
        opinions: (2, C, A) in [0, 1], of the bias `context`, before and after they drifted.
        strength: share of the bias in every prediction.
        drift: share of the opinions that is exchanged over 100 steps.
    """

    bandit: Bandit
    bias: Bias
    noise: float
    opinions: np.ndarray
    strength: float = 1.0
    drift: float = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator, bandit: Bandit, **settings: Any) -> FaultyModel:
        """One with random opinions."""
        return cls(bandit, opinions=rng.uniform(size=(2, *bandit.success.shape)), **settings)

    def means(self, step: int = 0) -> np.ndarray:
        """(C, A) expected prediction."""
        truth = self.bandit.success
        if self.bias == "none":
            return truth
        if self.bias == "monotone":
            wrong = np.where(truth < 0.25, 3 * truth, 0.75 + (truth - 0.25) / 3)
        elif self.bias == "context":
            moved = min(1.0, self.drift * step / 100)
            wrong = (1 - moved) * self.opinions[0] + moved * self.opinions[1]
        else:
            wrong = truth.copy()
            wrong[:, truth.mean(axis=0).argmin()] = 1.0
        return (1 - self.strength) * truth + self.strength * wrong


def sample_groups(
    model: FaultyModel,
    parameters: np.ndarray,
    groups: int,
    group_size: int,
    anchors: int,
    rng: np.random.Generator,
    step: int = 0,
) -> list[Group]:
    """Groups of one step, `anchors` of them marked at random.

    All carry both scores, so that the same draws serve every estimator; only `real` looks at executed scores of
    others than anchors. The action is in `info["action"]`.
    """
    bandit = model.bandit
    chosen = bandit.probabilities(parameters)
    contexts = rng.integers(len(bandit.success), size=groups)
    uniform = rng.random((groups, group_size, 1))
    actions = (uniform > np.cumsum(chosen, axis=1)[contexts][:, None, :-1]).sum(axis=2)
    executed = rng.random(actions.shape) < bandit.success[contexts[:, None], actions]
    predicted = model.means(step)[contexts[:, None], actions] + model.noise * rng.normal(size=actions.shape)
    anchored = rng.permutation(groups) < anchors
    gradients = bandit.log_prob_gradients(parameters)
    result = []
    for index, context in enumerate(contexts.tolist()):
        members = [
            Trajectory(
                steps={},
                old_log_prob=_NOTHING,
                mask=_NOTHING,
                executed=float(score),
                predicted=guess,
                info={"action": action},
                log_prob_gradient=gradients[context, action],
            )
            for action, score, guess in zip(
                actions[index].tolist(), executed[index].tolist(), predicted[index].tolist(), strict=True
            )
        ]
        result.append(Group(Context("bandit", context), members, bool(anchored[index]), anchors / groups))
    return result
