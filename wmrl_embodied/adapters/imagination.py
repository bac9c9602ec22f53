"""The learned dynamics ensemble as a world: attempts are imagined in batch from real initial states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wmrl_embodied.adapters.rollout import Observation, Outcome
from wmrl_embodied.core.types import Context
from wmrl_embodied.world_models.dynamics import DynamicsEnsemble

Look = Callable[[Sequence[Context]], tuple[Observation, Tensor]]


class ImaginedWorld:
    """Rolls the ensemble forward; the policy is shown the members' mean prediction.

    Args:
        model: the ensemble.
        look: first observations of contexts and whether success is already true; costs no execution.
    """

    predicts = True

    def __init__(self, model: DynamicsEnsemble, look: Look) -> None:
        self._model = model
        self._look = look

    def start(self, contexts: Sequence[Context]) -> tuple[Observation, Tensor]:
        """Look at the real initial states."""
        observation, already = self._look(contexts)
        self._belief = self._model.start(observation.features, observation.proprio, observation.tokens)
        self._tokens = observation.tokens
        return observation, already

    def step(self, action: Tensor, running: Tensor) -> Outcome:
        """Imagine a chunk for every row; E judges."""
        self._belief, logit = self._model.step(self._belief, action)
        observation = Observation(self._model.seen(self._belief), self._belief.proprio.mean(0), self._tokens)
        return Outcome(observation, torch.sigmoid(logit), torch.full((len(action),), action.shape[1]))
