"""Final score of training a bandit's policy with every estimator, against its optimum."""

from __future__ import annotations

import numpy as np

from wmrl_embodied.core.seeding import rng
from wmrl_embodied.theory.bandit import sample_groups
from wmrl_embodied.theory.gradients import Cell, estimator, gradient


def train(
    name: str, cell: Cell, seed: int, steps: int, learning_rate: float, foresight: bool = False
) -> np.ndarray:
    """(steps + 1,) suboptimality J* - J of the policy, before the first step and after each.

    Plain gradient ascent, as in the published bound; a step is clipped to norm 10, far above what occurs. With
    `foresight` every prediction is the outcome itself: the perfect world model, whatever the cell says of it.
    """
    model = cell.problem(seed)
    bandit, parameters = model.bandit, model.bandit.start
    estimate = estimator(name)
    gap = [bandit.optimum - bandit.score(parameters)]
    for step in range(steps):
        groups = sample_groups(
            model, parameters, cell.groups, cell.group_size, cell.anchors, rng(seed, step, "groups"), step
        )
        if foresight:
            for trajectory in (t for group in groups for t in group.trajectories):
                trajectory.predicted = trajectory.executed
        estimate.observe([group for group in groups if group.anchor and estimate.uses_anchors])
        move = learning_rate * gradient(estimate, groups)
        parameters = parameters + (move * min(1.0, 10 / max(np.linalg.norm(move), 1e-12))).reshape(
            parameters.shape
        )
        gap.append(bandit.optimum - bandit.score(parameters))
    return np.array(gap)
