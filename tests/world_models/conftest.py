"""A small ensemble that fits the executed groups of the session."""

import pytest

from wmrl_embodied.world_models.dynamics import DynamicsEnsemble, DynamicsSettings


@pytest.fixture(scope="session")
def make_model(executed_groups):
    """Builds ensembles for the shapes of the executed groups."""
    steps = executed_groups[0].trajectories[0].steps

    def build(seed=0, **settings):
        return DynamicsEnsemble(
            feature_dim=steps["features"].shape[-1],
            proprio_dim=steps["proprio"].shape[-1],
            action_shape=tuple(steps["action"].shape[1:]),
            vocabulary=int(max(group.trajectories[0].steps["tokens"].max() for group in executed_groups)) + 1,
            settings=DynamicsSettings(**{"members": 3, "width": 24, "landmarks": 3, **settings}),
            seed=seed,
        )

    return build


@pytest.fixture(scope="session")
def attempts(executed_groups):
    """All executed attempts with a score, in order."""
    return [t for group in executed_groups for t in group.trajectories if t.executed == t.executed]
