"""The summary of synthetic experiments whose answers are known."""

import json
import math
import shutil

import numpy as np
import pytest

from wmrl_embodied.evaluation import statistics
from wmrl_embodied.evaluation.runs import NoRunError, Run
from wmrl_embodied.evaluation.summary import median_run, success_curve, summarise, write_summary

TASKS = ["push-v3", "reach-v3"]


@pytest.fixture(scope="module")
def summary(experiment):
    return summarise(experiment)


def test_what_was_run(summary):
    assert summary["arm_names"] == ["wmrl", "real"]  # ours first, the baseline last
    assert summary["seeds"] == [0, 1, 2] and summary["tasks"] == TASKS
    assert summary["baseline"] == "real"


def test_one_sft_policy_counts_once_however_often_it_was_evaluated(summary):
    sft = summary["sft"]
    assert (sft["successes"], sft["episodes"], sft["already_successful"], sft["seeds"]) == (8, 20, 2, 1)
    expected = statistics.proportion_interval(8, 20)
    assert (sft["value"], sft["low"], sft["high"]) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert sft["interval"] == "Clopper-Pearson over episodes"


def test_final_success_over_seeds(summary):
    success = summary["arms"]["wmrl"]["success"]
    # .8 .8 .9 .9 .9 .9: a quarter of six, rounded down, is cut from either end.
    assert success["value"] == pytest.approx((0.8 + 0.9 * 3) / 4)
    assert success["interval"] == "stratified bootstrap over seeds"
    assert 0.8 <= success["low"] < success["value"] < success["high"] <= 0.9 + 1e-12
    assert (success["successes"], success["episodes"], success["seeds"]) == (52, 60, 3)
    pooled = statistics.proportion_interval(52, 60)
    assert (success["rate"], success["rate_low"], success["rate_high"]) == pytest.approx(
        (pooled.value, pooled.low, pooled.high)
    )
    assert set(success["per_task"]) == set(TASKS)
    push = success["per_task"]["push-v3"]
    assert (push["successes"], push["episodes"], push["already_successful"]) == (26, 30, 3)


def test_seeds_that_agree_do_not_make_the_interval_vanish(summary):
    success = summary["arms"]["real"]["success"]
    assert success["value"] == pytest.approx(0.8)
    assert success["interval"] == "Clopper-Pearson over episodes"
    assert success["low"] < 0.7 and success["high"] > 0.88


def test_gain_is_paired_by_state(summary):
    gain = summary["arms"]["real"]["gain_over_sft"]
    assert gain["value"] == pytest.approx(0.4) and gain["states"] == 20
    assert 0.1 < gain["low"] < 0.4 < gain["high"] < 0.7


def test_what_was_spent(summary):
    ours, real = summary["arms"]["wmrl"], summary["arms"]["real"]
    assert ours["executions"] == {"mean": 60, "per_seed": [60, 60, 60]}
    assert real["executions"]["mean"] == 420 and ours["imagined"]["mean"] == 1000
    assert ours["seconds"] == {"execute": 20, "imagine": 10, "policy": 5}
    assert ours["seconds_total"] == 35
    assert ours["seconds_per_execution"] == pytest.approx(20 / 40)  # 20 were made before training
    assert ours["seconds_per_imagined"] == pytest.approx(10 / 1000)


def test_world_model_quality(summary):
    ours = summary["arms"]["wmrl"]
    assert (ours["auc_in_group"], ours["mixed_groups"], ours["groups"]) == (0.5, 30, 30)
    assert ours["auc_pooled"] == pytest.approx(0.5) and ours["auc_source"] == "pairs.jsonl"
    assert ours["prediction_error"]["bias"] == pytest.approx(0.5 - 1 / 3)
    assert [b["count"] for b in ours["calibration"]] == [30, 30, 30]


def test_curve_and_executions_to_reach_the_baseline(summary):
    curve = summary["arms"]["wmrl"]["curve"]
    assert [(p["step"], p["executions"]) for p in curve] == [(0, 20), (5, 40), (10, 60)]
    # Halfway between 4 and 8 or 9 of 10 is 6 of 10 (6.5 rounds to 6): 0.6 at 40 executions, 0.875 at 60.
    assert [p["value"] for p in curve] == pytest.approx([0.4, 0.6, 0.875])
    reached = summary["arms"]["wmrl"]["executions_to_reach_baseline"]
    assert reached == pytest.approx(40 + 20 * (0.8 - 0.6) / 0.275)
    assert summary["arms"]["real"]["executions_to_reach_baseline"] == pytest.approx(420)


def test_comparison_with_the_baseline(summary):
    (comparison,) = summary["comparisons"]
    assert (comparison["arm"], comparison["against"]) == ("wmrl", "real")
    # Seeds of 8, 9, 9 against 8, 8, 8: (1/2 + 1 + 1) / 3 on either task.
    assert comparison["probability_of_improvement"]["value"] == pytest.approx(2.5 / 3)
    assert comparison["paired_difference"]["value"] == pytest.approx(2 / 30)
    (pair,) = summary["pairs"]
    assert (pair["arm"], pair["against"], pair["value"]) == ("wmrl", "real", pytest.approx(2 / 30))


def test_success_at_equal_budget(summary):
    equal = summary["equal_executions"]
    assert equal["executions"] == 60
    assert equal["arms"]["real"]["value"] == pytest.approx(0.4 + 0.2 * 40 / 200)
    assert equal["arms"]["wmrl"]["value"] == pytest.approx(0.875)


def test_says_that_three_seeds_prove_little(summary):
    assert "wmrl: 3 seeds; a claim about the method needs 5 or more." in summary["missing"]


def test_written_as_json_without_nan(summary, tmp_path):
    path = write_summary(summary, tmp_path / "summary.json")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]  # no temporary file stays

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == summary
    with pytest.raises(ValueError):
        write_summary({"a": math.nan}, tmp_path / "bad.json")


def test_repeats(experiment, summary):
    assert summarise(experiment) == summary


def test_a_single_run(run_folder):
    summary = summarise(run_folder)
    assert summary["arm_names"] == ["wmrl"] and summary["baseline"] is None
    success = summary["arms"]["wmrl"]["success"]
    assert (success["value"], success["seeds"]) == (0.8, 1)
    assert success["interval"] == "Clopper-Pearson over episodes"
    assert summary["comparisons"] == [] and summary["equal_executions"] is None
    assert summary["arms"]["wmrl"]["executions_to_reach_baseline"] is None


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evaluations.jsonl", "pairs.jsonl", "config.yaml", "media"]
)
def test_any_part_may_be_missing(run_folder, name):
    path = run_folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    summary = summarise(run_folder)
    assert any(name in said for said in summary["missing"])
    ours = summary["arms"]["wmrl"]
    if name == "evaluations.jsonl":
        assert ours["success"]["value"] is None and summary["sft"]["value"] is None and ours["curve"] == []
        assert ours["executions"]["mean"] == 60
    if name == "metrics.jsonl":
        assert ours["seconds"] == {} and ours["seconds_total"] is None and ours["imagined"]["mean"] is None
        assert ours["executions"]["mean"] == 60 and ours["success"]["value"] == 0.8
    if name == "pairs.jsonl":  # what the training log says instead; its first step is NaN
        assert ours["auc_in_group"] == pytest.approx(0.7) and ours["auc_pooled"] == pytest.approx(0.8)
        assert ours["mixed_groups"] == 20 and ours["auc_source"] == "metrics.jsonl"


def test_an_evaluation_cut_short_is_not_the_final_one(run_folder, build):
    with open(run_folder / "evaluations.jsonl", "a") as f:
        f.write(json.dumps(build.evaluation(15, 80, "reach-v3", 10)) + "\n")
    run = Run.load(run_folder)
    assert [step for step, _, _ in success_curve(run)] == [0, 5, 10]
    assert summarise(run_folder)["arms"]["wmrl"]["success"]["value"] == 0.8


def test_a_seed_that_stopped_early_is_said(tmp_path, build):
    for seed, steps in ((0, 10), (1, 5)):
        build.write_run(tmp_path / "wmrl" / f"seed{seed}", 8, 4, steps=steps, seed=seed)
    summary = summarise(tmp_path)
    assert "wmrl/seed1: stopped at step 5, other seeds reached step 10." in summary["missing"]
    assert [p["step"] for p in summary["arms"]["wmrl"]["curve"]] == [0, 5]


def test_sampled_rollouts_give_best_and_all_at_k(tmp_path, build):
    def rows(step, passes):  # each state rolled out 4 times
        index = [i for i in range(len(passes)) for _ in range(4)]
        once = [int(k < c) for c in passes for k in range(4)]
        zeros = [0] * len(once)
        return build.evaluation(step, 0, "a", 0) | dict(
            index=index,
            success_once=once,
            success_at_end=zeros,
            already_successful=zeros,
            deterministic=False,
        )

    build.write_lines(tmp_path / "evaluations.jsonl", [rows(0, [0, 0, 2, 0]), rows(1, [4, 0, 2, 2])])
    summary = summarise(tmp_path)
    assert summary["protocol"]["actions"] == "sampled"
    at_k = summary["arms"][tmp_path.name]["success"]["at_k"]
    assert at_k["k"] == 4
    assert [at_k[name]["value"] for name in ("average", "best", "all")] == pytest.approx([0.5, 0.75, 0.25])
    assert summary["sft"]["at_k"]["best"]["value"] == pytest.approx(0.25)
    assert summary["arms"][tmp_path.name]["gain_over_sft"]["value"] == pytest.approx(0.375)
    assert summary["arms"][tmp_path.name]["success"]["at_end"] == 0


def test_missing_episodes_are_left_out_and_said(tmp_path, build):
    row = build.evaluation(1, 0, "a", 2, states=4)
    row["success_once"] = [1, 1, None, 0, 1]
    build.write_lines(tmp_path / "evaluations.jsonl", [row])
    summary = summarise(tmp_path)
    success = summary["arms"][tmp_path.name]["success"]
    assert (success["successes"], success["episodes"], success["missing_episodes"]) == (2, 3, 1)
    assert any("infrastructure" in said for said in summary["missing"])


def test_states_of_training_are_apart_from_held_out_ones(run_folder, build):
    with open(run_folder / "evaluations.jsonl", "a") as f:
        f.write(json.dumps(build.evaluation(10, 60, "reach-v3", 10, split="train")) + "\n")
    ours = summarise(run_folder)["arms"]["wmrl"]
    assert ours["success"]["value"] == 0.8
    assert ours["success_on_train_states"]["per_task"]["reach-v3"]["value"] == 1


def test_the_run_shown_is_the_median_one(tmp_path, build):
    runs = [
        Run.load(build.write_run(tmp_path / "wmrl" / f"seed{seed}", final, 4, seed=seed))
        for seed, final in enumerate((9, 5, 7, 10))
    ]
    assert median_run(runs).seed == 2 and median_run(runs[:3]).seed == 2 and median_run(runs[:1]).seed == 0
    (runs[2].folder / "evaluations.jsonl").unlink()
    assert median_run([Run.load(r.folder) for r in runs]).seed == 0


def test_no_run(tmp_path):
    with pytest.raises(NoRunError):
        summarise(tmp_path)


def test_unit_cost_when_the_start_is_unknown(run_folder):
    (run_folder / "evaluations.jsonl").unlink()
    # From the first row on: 9 rows of 2 s for 36 executions.
    assert summarise(run_folder)["arms"]["wmrl"]["seconds_per_execution"] == pytest.approx(18 / 36)
    assert np.isclose(summarise(run_folder)["arms"]["wmrl"]["seconds_per_imagined"], 0.01)


def test_an_arm_that_predicts_nothing_has_no_world_model(run_folder, build):
    lines = (run_folder / "pairs.jsonl").read_text().splitlines()
    unknown = dict(predicted=[None] * 3, predicted_variance=[None] * 3)
    build.write_lines(run_folder / "pairs.jsonl", [json.loads(line) | unknown for line in lines])
    build.write_lines(run_folder / "metrics.jsonl", [dict(step=1, executions=24, imagined=0)])
    ours = summarise(run_folder)["arms"]["wmrl"]
    assert ours["auc_in_group"] is None and ours["auc_source"] is None and ours["mixed_groups"] == 0
    assert ours["calibration"] == [] and ours["prediction_error"] is None


def test_an_arm_that_imagines_nothing_misses_no_film_of_it(run_folder, build):
    (run_folder / "media" / "imagined.npz").unlink()
    assert any("imagined.npz" in said for said in summarise(run_folder)["missing"])
    build.write_lines(run_folder / "metrics.jsonl", [dict(step=1, executions=24, imagined=0)])
    assert not any("imagined.npz" in said for said in summarise(run_folder)["missing"])
