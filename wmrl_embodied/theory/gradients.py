"""Bias, variance and squared error of every estimator's gradient, against the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wmrl_embodied.core.estimators import Estimator, make_estimator
from wmrl_embodied.core.seeding import rng
from wmrl_embodied.core.types import Group
from wmrl_embodied.theory.bandit import Bandit, Bias, FaultyModel, sample_groups

ESTIMATORS = (
    *("real", "real_small", "predicted", "raw", "mixed", "debias"),
    *("denoise", "inverse_variance", "wmrl", "rectified", "fused"),
)
"""Names of `correction=`, and two more: `predicted` is `raw` without the anchor groups, so that with `real_small` it
makes the two streams that `mixed` adds up; `inverse_variance` is `denoise` with measured weights."""

PATIENT, AVERAGED = "fused, horizon 30", "rectified, memory 0.8"
"""Learners that are no `correction=` of their own."""


@dataclass(frozen=True)
class Cell:
    """One place of the grid.

    Attributes:
        bias, strength, noise, drift: of the world model, see `FaultyModel`.
        success_rate: of the uniform policy, which is the one that the gradient is taken at.
        anchors: executed groups a step.
        groups, group_size: of a step.
    """

    bias: Bias = "context"
    noise: float = 0.2
    success_rate: float = 0.3
    anchors: int = 8
    strength: float = 0.5
    drift: float = 0.0
    groups: int = 64
    group_size: int = 8

    def problem(self, seed: int) -> FaultyModel:
        """Bandit and world model of a seed."""
        draw = rng(seed, 0, "theory")
        return FaultyModel.draw(
            draw,
            Bandit.draw(draw, self.success_rate),
            bias=self.bias,
            noise=self.noise,
            strength=self.strength,
            drift=self.drift,
        )


def estimator(name: str) -> Estimator:
    """As in training, but for two things without which a gradient has no exact counterpart or is not defined:
    no division by a group's standard deviation, and an isotonic map, because noise leaves [0, 1].
    """
    settings: dict[str, Any] = {"standardize": False, "debias": {"kind": "isotonic"}}
    if name == "inverse_variance":
        return make_estimator("denoise", denoise={"kind": "variance"}, **settings)
    if name == PATIENT:
        return make_estimator("fused", horizon=30, **settings)
    if name == AVERAGED:
        return make_estimator("rectified", memory=0.8, **settings)
    return make_estimator("raw" if name == "predicted" else name, **settings)


def gradient(estimate: Estimator, groups: Sequence[Group]) -> np.ndarray:
    """(K,) estimated gradient of J: advantages times gradients of log-probability.

    Divided by the total weight of the groups, as a weighted mean is. The published arms centre by the mean of all
    G members, which shrinks every gradient to (G - 1) / G of itself; that known factor is taken out.
    """
    weighted = estimate.advantages(groups)
    metrics = weighted.metrics
    total = metrics["executed_groups"] * metrics.get("anchor/weight", 1.0) + metrics["predicted_groups"]
    result = np.zeros_like(groups[0].trajectories[0].log_prob_gradient)
    for group, advantages in zip(groups, weighted.advantages, strict=True):
        size = len(group)
        own = 1.0 if estimate.name in ("rectified", "fused") else size / (size - 1)
        result += own * advantages @ group.log_prob_gradient / size
    for group, advantages in weighted.replayed:
        result += advantages @ group.log_prob_gradient / len(group)
    return result / total


def measure(cell: Cell, seed: int, warmup: int = 40, steps: int = 40) -> dict[str, dict[str, float]]:
    """Squared bias, variance and squared error of each estimator for one bandit, over |g|^2.

    The policy stands still. `warmup` steps teach maps, weights and moments; the next `steps` are counted. The squared
    bias is the mean product of the errors of *different* steps, which noise does not lift: it may come out negative.
    """
    model = cell.problem(seed)
    parameters = model.bandit.start
    exact = model.bandit.gradient(parameters)
    estimates = {name: estimator(name) for name in ESTIMATORS}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in ESTIMATORS}
    for step in range(warmup + steps):
        draw = rng(seed, step, "groups")
        groups = sample_groups(model, parameters, cell.groups, cell.group_size, cell.anchors, draw, step)
        anchors = [group for group in groups if group.anchor]
        for name, estimate in estimates.items():
            estimate.observe(anchors if estimate.uses_anchors else [])
            if step >= warmup:
                used = [g for g in groups if not g.anchor] if name == "predicted" else groups
                errors[name].append(gradient(estimate, used) - exact)
    size = exact @ exact
    result = {}
    for name, rows in errors.items():
        error = np.stack(rows)
        squared = float((error**2).sum(axis=1).mean())
        total = error.sum(axis=0)
        bias = float((total @ total - (error**2).sum()) / (steps * (steps - 1)))
        result[name] = {"error": squared / size, "bias": bias / size, "variance": (squared - bias) / size}
    return result
