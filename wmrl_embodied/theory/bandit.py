"""A contextual softmax bandit whose gradient and optimum are known exactly, and world models with chosen faults.

Contexts share the policy's parameters, as the states of a robot do: what is learnt in one context moves all others,
and so does what a wrong world model teaches in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize

from wmrl_embodied.core.types import Context, Group, Trajectory

Bias = Literal["none", "monotone", "context", "adversarial"]
BIASES: tuple[Bias, ...] = ("none", "monotone", "context", "adversarial")

_NOTHING = torch.zeros(1)


@dataclass(frozen=True)
class Bandit:
    """Contexts with features, actions with success rates; a policy softmax(W x), W (A, D).

    Attributes:
        features: (C, D) of the contexts, the first one constant.
        success: (C, A) probability that an action's execution scores 1 and not 0.
    """

    features: np.ndarray
    success: np.ndarray

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        success_rate: float,
        contexts: int = 16,
        actions: int = 6,
        dimensions: int = 4,
    ) -> Bandit:
        """A random one, in which the uniform policy succeeds with `success_rate`.

        Half of what decides success is linear in the features, the other half is not: the policy has to trade
        contexts against each other, as a network does. (Could it be optimal everywhere at once, then a monotone
        error of the world model, which moves no context's best action, would cost nothing in the end.)
        """
        features = np.hstack([np.ones((contexts, 1)), rng.normal(size=(contexts, dimensions - 1))])
        logits = features @ rng.normal(size=(dimensions, actions))
        logits += np.sqrt(dimensions) * rng.normal(size=logits.shape)
        low, high = -60.0, 60.0
        for _ in range(60):  # bisection: the mean is monotone in the offset
            offset = (low + high) / 2
            success = 1 / (1 + np.exp(-(logits + offset)))
            low, high = (offset, high) if success.mean() < success_rate else (low, offset)
        return cls(features, success)

    @cached_property
    def optimum(self) -> float:
        """The best expected score that the policy can have."""
        return self.score(self.maximise(self.success))

    def maximise(self, scores: np.ndarray) -> np.ndarray:
        """(A, D) parameters with the greatest expected `scores` (C, A), best of a few starts of L-BFGS."""

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            chosen = self.probabilities(flat.reshape(self.start.shape))
            value = (chosen * scores).sum(axis=1, keepdims=True)
            slope = (chosen * (scores - value)).T @ self.features / len(scores)
            return -float(value.mean()), -np.ravel(slope)

        starts = np.random.default_rng(0).normal(size=(5, self.start.size))
        starts[0] = 0
        found = [minimize(loss, start, jac=True, method="L-BFGS-B") for start in starts]
        return min(found, key=lambda result: result.fun).x.reshape(self.start.shape)

    @property
    def start(self) -> np.ndarray:
        """(A, D) parameters of the uniform policy."""
        return np.zeros((self.success.shape[1], self.features.shape[1]))

    def probabilities(self, parameters: np.ndarray) -> np.ndarray:
        """(C, A) of the actions."""
        logits = self.features @ parameters.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def score(self, parameters: np.ndarray) -> float:
        """Expected executed score J of the policy."""
        return float((self.probabilities(parameters) * self.success).sum(axis=1).mean())

    def gradient(self, parameters: np.ndarray) -> np.ndarray:
        """(A D,) of J."""
        chosen = self.probabilities(parameters)
        advantage = self.success - (chosen * self.success).sum(axis=1, keepdims=True)
        return np.ravel((chosen * advantage).T @ self.features) / len(self.features)

    def log_prob_gradients(self, parameters: np.ndarray) -> np.ndarray:
        """(C, A, A D) gradient of log pi(a | context) with respect to the parameters."""
        chosen = self.probabilities(parameters)
        towards = np.eye(chosen.shape[1]) - chosen[:, None, :]
        return np.einsum("cab,cd->cabd", towards, self.features).reshape(*chosen.shape, -1)


@dataclass(frozen=True)
class FaultyModel:
    """Predicted scores of a bandit: its success rates distorted, plus noise of every attempt's own.

    Attributes:
        bandit: what it predicts.
        bias: `none`; `monotone`, one convex function of the truth for all contexts, which a monotone map can undo;
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
            wrong = truth**3
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
    contexts = rng.integers(len(bandit.features), size=groups)
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
