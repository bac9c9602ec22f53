"""Several judges: weights by hand, broken judges, and the promise of less error than the best of them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core import JudgePanel, simplex_weights


def noisy(seed=0, size=400, noise=(0.2, 0.4)):
    rng = np.random.default_rng(seed)
    truth = rng.uniform(size=size)
    return np.column_stack([truth + s * rng.normal(size=size) for s in noise]), truth


def test_weights_by_hand():
    np.testing.assert_allclose(simplex_weights([1.0, 4.0]), [0.8, 0.2])
    np.testing.assert_allclose(simplex_weights([[1.0, 0.5], [0.5, 1.0]]), [0.5, 0.5])
    # Unconstrained, S^-1 1 is (3, -1) / 2 up to a factor: the second only repeats the first with more noise.
    np.testing.assert_allclose(simplex_weights([[1.0, 1.5], [1.5, 3.0]]), [1.0, 0.0], atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_no_other_weights_on_the_simplex_have_less_error(seed, judges):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(judges, judges + 2))
    moments = root @ root.T
    weights = simplex_weights(moments)
    assert (weights >= 0).all() and weights.sum() == pytest.approx(1)
    for other in rng.dirichlet(np.ones(judges), 20):
        assert weights @ moments @ weights <= other @ moments @ other * (1 + 1e-9)


@given(st.integers(0, 10**6))
def test_the_order_of_the_judges_means_nothing(seed):
    predicted, truth = noisy(seed, 80, (0.2, 0.4, 0.3))
    order = np.random.default_rng(seed).permutation(3)
    panel, other = JudgePanel(3), JudgePanel(3)
    panel.observe(predicted, truth)
    other.observe(predicted[:, order], truth)
    np.testing.assert_allclose(panel.weights[order], other.weights, atol=1e-9)


@pytest.mark.parametrize("kind", ["gls", "inverse_variance"])
def test_a_panel_errs_less_than_its_best_judge(kind):
    panel = JudgePanel(2, kind)
    panel.observe(*noisy(0))
    predicted, truth = noisy(1, 4000)
    score, variance = panel(predicted)
    single = JudgePanel(1)
    single.observe(noisy(0)[0][:, :1], noisy(0)[1])
    error = np.mean((score - truth) ** 2)
    assert error < np.mean((single(predicted[:, :1])[0] - truth) ** 2)
    assert variance.mean() == pytest.approx(error, rel=0.25)  # measured without the truth of these


def test_two_copies_of_one_judge_count_once_with_gls_and_twice_without():
    predicted, truth = noisy(2)
    copies = predicted[:, [0, 0, 1]]
    gls, independent = JudgePanel(3), JudgePanel(3, "inverse_variance")
    for panel in (gls, independent):
        panel.observe(copies, truth)
    alone = JudgePanel(2)
    alone.observe(predicted, truth)
    assert gls.weights[:2].sum() == pytest.approx(alone.weights[0], abs=0.02)
    assert independent.weights[2] < alone.weights[1]


@pytest.mark.parametrize("kind", ["gls", "inverse_variance"])
@pytest.mark.parametrize(
    "broken",
    [
        lambda x: np.full_like(x, 0.7),
        lambda x: np.full_like(x, np.nan),
        lambda x: np.full_like(x, np.inf),
        lambda x: -x,
    ],
)
def test_a_broken_judge_ends_up_with_weight_0(kind, broken, caplog):
    predicted, truth = noisy(3)
    panel = JudgePanel(3, kind)
    panel.observe(np.column_stack([predicted[:, 0], broken(truth), predicted[:, 1]]), truth)
    assert panel.weights[1] == 0 and (panel.weights[[0, 2]] > 0).all()
    assert "judges [1] say no more" in caplog.text
    without = JudgePanel(2, kind)
    without.observe(predicted, truth)
    new = noisy(4)[0]
    np.testing.assert_allclose(
        panel(np.column_stack([new[:, 0], broken(new[:, 0]), new[:, 1]]))[0], without(new)[0], atol=1e-9
    )


def test_with_no_judge_of_use_nothing_is_ranked():
    truth = noisy(5)[1]
    panel = JudgePanel(2)
    panel.observe(np.column_stack([-truth, np.zeros_like(truth)]), truth)
    score, variance = panel(np.array([[0.1, 0.0], [0.9, 0.0]]))
    np.testing.assert_allclose(score, truth.mean())
    np.testing.assert_allclose(variance, truth.var())


def test_before_there_are_pairs_it_is_the_plain_mean_and_missing_judges_are_left_out():
    score, variance = JudgePanel(2)([[0.2, 0.6], [0.2, np.nan], [np.nan, np.nan]])
    np.testing.assert_allclose(score, [0.4, 0.2, np.nan])
    assert np.isnan(variance).all()


def test_rows_of_which_a_judge_is_missing_are_weighted_anew():
    predicted, truth = noisy(6)
    predicted[::3, 0] = np.nan
    panel = JudgePanel(2)
    panel.observe(predicted, truth)
    score, variance = panel([[0.5, 0.5], [np.nan, 0.5], [0.5, np.nan]])
    assert np.isfinite(score).all()
    assert variance[0] < variance[2] < variance[1]


def test_a_perfect_judge_takes_all_the_weight():
    predicted, truth = noisy(7)
    panel = JudgePanel(2)
    panel.observe(np.column_stack([predicted[:, 0], truth > 0.5]), truth > 0.5)
    assert panel.weights[1] == pytest.approx(1, abs=1e-6)


def test_state_goes_through_json():
    predicted, truth = noisy(8)
    predicted[0, 0] = np.nan
    panel, other = JudgePanel(2), JudgePanel(2)
    panel.observe(predicted, truth)
    other.load_state_dict(json.loads(json.dumps(panel.state_dict())))
    np.testing.assert_array_equal(panel.weights, other.weights)
    np.testing.assert_array_equal(panel(predicted), other(predicted))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judges": 0}, "judges=0"),
        ({"judges": 2, "kind": "gsl"}, "gls"),
        ({"judges": 2, "folds": 1}, "folds=1"),
        ({"judges": 2, "min_pairs": 3}, r"min_pairs=3.*\[10, 5000\]"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgePanel(**settings)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"predicted \(3,\): must be \(N, 2\)"):
        JudgePanel(2)([1, 2, 3])
    with pytest.raises(ValueError, match=r"executed \(3,\): must be \(1,\)"):
        JudgePanel(2).observe([[1, 2]], [1, 2, 3])
    with pytest.raises(ValueError, match="must be finite"):
        simplex_weights([0.0, 1.0])
    with pytest.raises(ValueError, match=r"moments \(2, 3\)"):
        simplex_weights(np.ones((2, 3)))
