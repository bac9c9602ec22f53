"""What training must come to at the two ends of a world model's worth, where the optimum is known.

A perfect model knows the outcome itself. One that knows its chance does better than that for `mixed`, and worse for
`rectified`, whose few anchors then differ from their predictions by the luck of a coin.
"""

import numpy as np
import pytest

from wmrl_embodied.theory.gradients import Cell
from wmrl_embodied.theory.learning import train

SEEDS, STEPS, RATE = 3, 60, 15.0
CERTAIN = Cell(bias="none", noise=0.0, anchors=3, groups=32)
USELESS = Cell(bias="none", noise=50.0, anchors=3, groups=32)  # the truth is lost in noise


def final(name, cell, foresight=False):
    """Mean suboptimality at the end."""
    return np.mean([train(name, cell, seed, STEPS, RATE, foresight)[-1] for seed in range(SEEDS)])


@pytest.fixture(scope="module")
def bounds():
    """Suboptimality of full-batch and of anchors-only training, and before either."""
    start = np.mean([train("real", CERTAIN, seed, 0, RATE)[0] for seed in range(SEEDS)])
    return {"start": start, **{name: final(name, CERTAIN) for name in ("real", "real_small")}}


def test_the_problem_tells_the_ends_apart(bounds):
    assert bounds["real"] < 0.6 * bounds["real_small"] < 0.6 * bounds["start"]


@pytest.mark.parametrize("name", ["mixed", "debias", "wmrl", "rectified", "fused"])
def test_a_perfect_model_and_a_tenth_of_anchors_train_like_real(bounds, name):
    assert final(name, CERTAIN, foresight=True) < 1.15 * bounds["real"]


@pytest.mark.parametrize("name", ["rectified", "fused"])
def test_a_useless_model_trains_like_the_anchors_alone(bounds, name):
    assert final(name, USELESS) < 1.25 * bounds["real_small"]
