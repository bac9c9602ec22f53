"""Maps of tasks: shrinkage by hand, monotone, and less error than one map where tasks differ."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmrl_embodied.core.debias import MonotoneMap
from wmrl_embodied.core.task_maps import TaskMaps, pairs_by_task

SETTINGS = {"kind": "isotonic", "min_pairs": 2, "refit_every": 1}


def test_shrinkage_by_hand():
    maps = TaskMaps(shrink_pairs=6, **SETTINGS)
    maps.observe({"a": ([0.0, 1.0], [0.0, 0.0]), "b": ([0.0, 1.0], [0.0, 1.0])})
    # Shared: 0 -> 0, 1 -> 1/2. Of task a with 2 pairs against 6: a quarter of 0 and three quarters of 1/2.
    np.testing.assert_allclose(maps([0.0, 1.0, np.nan], "a"), [0.0, 0.375, np.nan])
    np.testing.assert_allclose(maps([1.0], "b"), [0.625])
    np.testing.assert_allclose(maps([1.0], "unknown"), [0.5])
    assert maps.metrics()["tasks_fitted"] == 2


def test_without_shrink_pairs_it_is_the_shared_map():
    rng = np.random.default_rng(0)
    maps, single = TaskMaps(), MonotoneMap()
    for _ in range(10):
        x, y = rng.uniform(size=(2, 40))
        maps.observe({"a": (x[:20], y[:20]), "b": (x[20:], y[20:])})
        single.observe(x, y)
    grid = np.linspace(-1, 2, 50)
    np.testing.assert_array_equal(maps(grid, "a"), single(grid))
    assert not maps.tasks


@given(st.integers(0, 10**6), st.floats(0, 100))
def test_monotone_whatever_the_pairs(seed, shrink):
    rng = np.random.default_rng(seed)
    maps = TaskMaps(shrink_pairs=shrink, **SETTINGS)
    for task in "abc":
        maps.observe({task: rng.normal(size=(2, 12))})
    for task in "abc":
        assert (np.diff(maps(np.linspace(-4, 4, 80), task)) >= -1e-12).all()


def test_tasks_that_are_judged_differently_are_told_apart_and_a_new_one_leans_on_the_others():
    rng = np.random.default_rng(1)

    def draw(task, size):
        x = rng.uniform(size=size)
        chance = x**2 if task == "lenient" else np.sqrt(x)
        return x, (rng.uniform(size=size) < chance).astype(float)

    maps = TaskMaps(shrink_pairs=50)
    one = TaskMaps()
    for m in (maps, one):
        for _ in range(20):
            m.observe({task: draw(task, 64) for task in ("lenient", "strict")})
    x = np.linspace(0.05, 0.95, 50)
    for task, truth in (("lenient", x**2), ("strict", np.sqrt(x))):
        assert np.mean((maps(x, task) - truth) ** 2) < 0.3 * np.mean((one(x, task) - truth) ** 2)
    np.testing.assert_array_equal(maps(x, "new"), maps.shared(x))


def test_forgetting_follows_a_model_that_changes():
    rng = np.random.default_rng(2)
    forgetful, published = MonotoneMap(half_life=200.0), MonotoneMap()
    for step in range(60):
        x = rng.uniform(size=64)
        y = (rng.uniform(size=64) < (x if step < 50 else x**3)).astype(float)
        forgetful.observe(x, y)
        published.observe(x, y)
    grid = np.linspace(0.1, 0.9, 30)
    error = {m: np.mean((m(grid) - grid**3) ** 2) for m in (forgetful, published)}
    assert error[forgetful] < 0.3 * error[published]


def test_forgetting_weights_by_hand():
    single = MonotoneMap(kind="isotonic", min_pairs=3, refit_every=1, half_life=1.0)
    single.observe([0.0, 1.0, 1.0], [0.0, 0.0, 1.0])  # of the two at 1 the newer counts twice
    np.testing.assert_allclose(single([0.0, 1.0]), [0.0, 2 / 3])


def test_drift_is_measured_before_the_pairs_are_learned_and_after_the_first_fit():
    rng = np.random.default_rng(3)
    maps = TaskMaps(min_pairs=100)
    for step in range(80):
        x = rng.uniform(size=100)
        y = x if step < 60 else 1 - x
        maps.observe({"a": (x, y)})
    assert maps.drift.alarms == 1 and maps.metrics()["alarms"] == 1


def test_state_goes_through_json():
    rng = np.random.default_rng(4)
    maps, other = TaskMaps(shrink_pairs=10, min_pairs=20), TaskMaps(shrink_pairs=10, min_pairs=20)
    for _ in range(12):
        maps.observe({task: rng.uniform(size=(2, 30)) for task in "ab"})
    other.load_state_dict(json.loads(json.dumps(maps.state_dict())))
    more = {"a": rng.uniform(size=(2, 64)), "c": rng.uniform(size=(2, 64))}
    for m in (maps, other):
        m.observe(more)
    for task in "abc":
        np.testing.assert_array_equal(maps(np.linspace(0, 1, 9), task), other(np.linspace(0, 1, 9), task))
    assert maps.state_dict() == other.state_dict()


def test_pairs_by_task_and_no_pairs(make_group):
    groups = [make_group(executed=[0, 1], predicted=[0.2, 0.3], task=task) for task in "aba"]
    pairs = pairs_by_task(groups)
    assert list(pairs) == ["a", "b"] and pairs["a"][0].tolist() == [0.2, 0.3, 0.2, 0.3]
    maps = TaskMaps()
    maps.observe({})
    assert len(maps.shared) == 0


@pytest.mark.parametrize("settings", [{"shrink_pairs": -1.0}, {"half_life": 0.0}, {"drift_threshold": -2.0}])
def test_bad_settings_are_named(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TaskMaps(**settings)
