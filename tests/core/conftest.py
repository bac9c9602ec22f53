"""Builders shared by the tests of the core; hypothesis draws the same examples in every run."""

from collections.abc import Callable, Sequence

import pytest
import torch

from wmrl_embodied.core.types import Context, Group, Trajectory

NAN = float("nan")


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """Builds a group of one-decision trajectories from its scores; None is a missing score."""

    def build(
        executed: Sequence[float | None] | None = None,
        predicted: Sequence[float | None] | None = None,
        variance: float = NAN,
        anchor: bool | None = None,
        index: int = 0,
        task: str = "toy",
    ) -> Group:
        size = len(executed if executed is not None else predicted)
        number = [NAN if s is None else s for s in (executed if executed is not None else [None] * size)]
        guess = [NAN if s is None else s for s in (predicted if predicted is not None else [None] * size)]
        members = [
            Trajectory({"x": torch.zeros(1, 1)}, torch.zeros(1), torch.ones(1), r, p, variance)
            for r, p in zip(number, guess, strict=True)
        ]
        return Group(Context(task, index), members, executed is not None if anchor is None else anchor)

    return build
