"""The synthetic problem: its gradient, its optimum, and what its models do to a policy."""

import numpy as np
import pytest

from wmrl_embodied.theory.bandit import Bandit, FaultyModel, sample_groups
from wmrl_embodied.theory.gradients import Cell, estimator, gradient, measure
from wmrl_embodied.theory.learning import train


def test_gradient_is_that_of_finite_differences():
    bandit = Bandit.draw(np.random.default_rng(0), 0.3, appearances=2, alike=3, actions=3)
    parameters = np.random.default_rng(1).normal(size=bandit.start.shape)
    step = 1e-6
    numeric = np.zeros(parameters.size)
    for index in range(parameters.size):
        move = np.zeros(parameters.size)
        move[index] = step
        move = move.reshape(parameters.shape)
        numeric[index] = (bandit.score(parameters + move) - bandit.score(parameters - move)) / (2 * step)
    np.testing.assert_allclose(bandit.gradient(parameters), numeric, atol=1e-8)


def test_optimum_and_limit_by_hand():
    # The sure action is worth 0.5; the chancy one 0.9 and 0.3, on average 0.6. A model that ranks within each context
    # correctly, but leniently, makes the policy choose the sure one.
    bandit = Bandit(np.array([0, 0]), np.array([[0.5, 0.9], [0.5, 0.3]]))
    assert bandit.optimum == pytest.approx(0.6)
    assert bandit.limit(np.array([[0.9, 1.0], [0.9, 0.4]])) == pytest.approx(0.5)


@pytest.mark.parametrize("rate", [0.04, 0.3, 0.5])
def test_the_uniform_policy_succeeds_as_often_as_asked(rate):
    bandit = Bandit.draw(np.random.default_rng(2), rate)
    assert bandit.score(bandit.start) == pytest.approx(rate, abs=1e-9)


def test_monotone_bias_keeps_the_order():
    draw = np.random.default_rng(3)
    bandit = Bandit.draw(draw, 0.3)
    model = FaultyModel.draw(draw, bandit, bias="monotone", noise=0.0)
    order = np.argsort(bandit.success, axis=None)
    assert (np.diff(model.means().ravel()[order]) >= 0).all()


def test_only_real_looks_at_executed_scores_of_other_groups():
    model = Cell(bias="context").problem(0)
    groups = sample_groups(model, model.bandit.start, 32, 4, 8, np.random.default_rng(0))
    before, after = {}, {}
    for result in (before, after):
        for name in ("real", "real_small", "mixed", "wmrl", "rectified", "fused"):
            estimate = estimator(name)
            estimate.observe([group for group in groups if group.anchor and estimate.uses_anchors])
            result[name] = gradient(estimate, groups)
        for group in groups:
            if not group.anchor:
                for trajectory in group.trajectories:
                    trajectory.executed = 1.0 - trajectory.executed
    assert not np.array_equal(before.pop("real"), after.pop("real"))
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_measured_errors_add_up_and_inverse_variance_is_below_its_streams():
    result = measure(Cell(bias="none", groups=32, anchors=8), seed=0, warmup=20, steps=20)
    for parts in result.values():
        assert parts["error"] == pytest.approx(parts["bias"] + parts["variance"])
    streams = min(result["predicted"]["error"], result["real_small"]["error"])
    assert result["inverse_variance"]["error"] < streams


def test_training_on_a_lenient_model_ends_at_the_optimum_of_its_predictions():
    cell = Cell(bias="monotone", noise=0.05, strength=1.0)
    model = cell.problem(0)
    limit = model.bandit.optimum - model.bandit.limit(model.means())
    assert limit > 0.02
    assert train("raw", cell, 0, 150, 15.0)[-1] == pytest.approx(limit, abs=0.02)
    assert train("real", cell, 0, 150, 15.0)[-1] < limit / 3
