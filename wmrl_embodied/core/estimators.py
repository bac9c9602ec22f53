"""From scored groups to weighted advantages: the names that `correction=` knows.

A new estimator implements `Estimator` in a module of its own and enters itself into `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wmrl_embodied.core.choices import unknown
from wmrl_embodied.core.published import ARMS, ArmEstimator
from wmrl_embodied.core.rectified import RectifiedEstimator
from wmrl_embodied.core.weighted import Estimator, Weighted

__all__ = ["ESTIMATORS", "Estimator", "Weighted", "make_estimator"]

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    **{name: partial(ArmEstimator, name) for name in ARMS},
    "rectified": partial(RectifiedEstimator, "rectified", fuse=False),
    "fused": partial(RectifiedEstimator, "fused", fuse=True),
}


def make_estimator(name: str, **settings: Any) -> Estimator:
    """Build the estimator of that name.

    Args:
        name: a key of `ESTIMATORS`; the `correction=` of the configuration.
        **settings: settings of that estimator; those of `ArmEstimator` for the published ones.

    Raises:
        ValueError: for an unknown name, with the one that was probably meant.
    """
    if name not in ESTIMATORS:
        raise unknown("correction", name, ESTIMATORS)
    return ESTIMATORS[name](**settings)
