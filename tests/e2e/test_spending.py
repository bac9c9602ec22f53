"""Where executions go, from the command line: uncertain anchors, a share that adapts, and a budget that holds."""

import json

import pytest


@pytest.mark.usefixtures("one_pool")
def test_a_budget_is_spent_where_the_world_model_is_unsure_and_what_is_left_is_said(
    command, policy, tiny, logs, tmp_path
):
    run = tmp_path / "run"
    settings = [
        "anchors.strategy=uncertain",
        "anchors.fraction=auto",
        "anchors.budget=57",
        "correction=fused",
        "correction.horizon=10",
        "correction.memory=0.5",
        "correction.debias.shrink_pairs=50",
    ]
    result = command("train", *tiny.train, policy, *settings, f"output_dir={run}")
    assert result.code == 0, result.err
    rows = logs.lines(run, "metrics")
    assert rows[0]["executions"] == 32  # the warm-up
    assert rows[-1]["executions"] <= 57 - 1 and rows[-1]["budget_left"] == 57 - rows[-1]["executions"]
    assert f"{rows[-1]['executions']} executions, {rows[-1]['budget_left']} of the budget left" in result.out
    assert all({"anchors/share", "anchors/correlation", "anchors/cost_ratio"} <= row.keys() for row in rows)
    # All groups of a step after the first are imagined, to see where the world model is unsure.
    assert rows[-1]["imagined"] == 3 * 32
    pairs = [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()]
    assert all(v is not None for row in pairs for v in row["predicted_variance"])

    result = command("train", f"resume={run}", "steps=5")
    assert result.code == 0, result.err
    assert len(logs.lines(run, "metrics")) == 5 and logs.lines(run, "metrics")[:4] == rows


def test_a_strategy_that_does_not_exist_is_named_before_anything_starts(command, policy, tmp_path):
    result = command("train", policy, "anchors.strategy=unsure", f"output_dir={tmp_path / 'run'}")
    assert result.code == 2
    assert "anchors.strategy=unsure: must be one of random, uncertain, gate" in result.err
    assert not (tmp_path / "run").exists()


def test_words_of_the_limits_are_those_of_the_core():
    from wmrl_embodied.core.anchors import STRATEGIES
    from wmrl_embodied.core.debias import FITS
    from wmrl_embodied.core.denoise import WEIGHTS
    from wmrl_embodied.runtime.limits import LIMITS

    words = {
        "anchors.strategy": STRATEGIES,
        "correction.debias.kind": FITS,
        "correction.denoise.kind": WEIGHTS,
    }
    for key, known in words.items():
        assert LIMITS[key].among == tuple(known), key
