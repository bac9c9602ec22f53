"""From demonstrations to the report through the installed commands, on Meta-World."""

import json
import time

import numpy as np
import pytest
import torch

PRETRAINED = {
    "config.json",
    "model.safetensors",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
}


@pytest.mark.parametrize("name", ["sft", "train", "eval", "report"])
def test_help_comes_at_once_and_explains_every_setting(start, name):
    began = time.monotonic()
    result = start(f"wmrl-{name}", "--help").result()
    assert result.code == 0
    assert time.monotonic() - began < 5  # an import of LeRobot alone takes longer
    assert f"wmrl-{name}: " in result.out  # a sentence that says what it does
    setting = {"sft": "per_task: 10", "train": "fraction: 0.1", "eval": "states: 50", "report": "run=FOLDER"}
    assert setting[name] in result.out
    if name == "train":
        assert (
            "correction: debias, denoise, fused, mixed, raw, real, real_small, rectified, wmrl" in result.out
        )
        assert "world_model: dynamics, simulator" in result.out


def test_cloning_writes_a_dataset_and_a_policy(cloned):
    folder, result = cloned
    assert f"done: {folder / 'pretrained_model'}" in result.out
    assert sorted(path.name for path in folder.iterdir()) == ["demonstrations", "pretrained_model"]
    assert {path.name for path in (folder / "pretrained_model").iterdir()} >= PRETRAINED
    info = json.loads((folder / "demonstrations" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 2
    assert info["features"]["observation.image"]["shape"] == [64, 64, 3]
    assert result.temporary == []


def test_a_run_folder_holds_what_the_architecture_says(finished, logs):
    run, result = finished
    assert f"done: {run}" in result.out and f"wmrl-report run={run}" in result.out
    assert "Traceback" not in result.err
    assert result.temporary == []
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "pairs.jsonl",
        "checkpoints",
        "ledger",
        "media",
        "wandb",
    }
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [f"00000{k}" for k in range(5)]
    assert {path.name for path in (run / "media").iterdir()} == {
        "rollouts_before.npz",
        "rollouts_after.npz",
        "imagined.npz",
    }
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["command"].startswith("wmrl-train 'task.tasks=[plate-slide-v3]'")
    assert provenance["commit"] and "torch" in provenance["machine"]
    # 8 groups of 4 attempts to warm up, then 4 of 8 groups
    metrics = logs.lines(run, "metrics")
    assert [row["executions"] for row in metrics] == [32, 48, 64, 80]
    assert [row["imagined"] for row in metrics] == [0, 16, 32, 48]
    assert all(row["policy/skipped"] == 0 for row in metrics)
    assert [step for step, *_ in logs.executed(run)] == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4
    assert [row["step"] for row in logs.lines(run, "evaluations")] == [0, 2, 4]
    pairs = logs.lines(run, "pairs")
    assert [row["step"] for row in pairs] == [1] * 8 + [2] * 4 + [3] * 4 + [4] * 4
    assert all(np.isfinite([row["executed"], row["predicted"]]).all() for row in pairs)
    recorded = [json.loads(line) for line in (run / "ledger" / "ledger.jsonl").read_text().splitlines()]
    assert [row["executed"] for row in pairs] == [record["executed"] for record in recorded]


def test_tracking_offline_writes_a_local_run(finished):
    run, result = finished
    assert list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert "Tracking run with wandb" in result.err


def test_the_encoder_is_frozen_and_the_rest_learns(finished, logs):
    before, after = logs.weights(finished[0], 0), logs.weights(finished[0], 4)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("vision."), name


def test_a_checkpoint_is_a_pretrained_model_that_lerobot_opens(finished, logs):
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import make_pre_post_processors

    from wmrl_embodied.policies.loading import load_policy
    from wmrl_embodied.policies.mini_vla import MiniVLAPolicy

    folder = finished[0] / "checkpoints" / "000004" / "pretrained_model"
    assert {path.name for path in folder.iterdir()} >= PRETRAINED
    config = PreTrainedConfig.from_pretrained(folder)
    assert config.type == "mini_vla"
    opened = MiniVLAPolicy.from_pretrained(folder, config=config)
    ours = load_policy(str(folder))
    for name, value in ours.policy.state_dict().items():
        assert torch.equal(value, opened.state_dict()[name])
    preprocessor, postprocessor = make_pre_post_processors(config, pretrained_path=str(folder))
    seen = {
        "observation.image": torch.zeros(1, 3, 64, 64),
        "observation.state": torch.zeros(1, 4),
        "task": ["slide the plate"],
    }
    action = postprocessor(opened.select_action(preprocessor(seen)))
    assert torch.equal(action, ours.postprocessor(ours.policy.select_action(ours.preprocessor(seen))))


def test_a_checkpoint_evaluates_as_the_run_logged(start, finished, logs, tiny, tmp_path):
    run, _ = finished
    output = tmp_path / "new" / "rows.jsonl"
    policy = f"policy.path={run}/checkpoints/000004/pretrained_model"
    overrides = [policy, f"task.tasks=[{tiny.task}]", "states=4", "to_the_horizon=false", f"output={output}"]
    result = start("wmrl-eval", *overrides).result()
    assert result.code == 0, result.err
    [row] = [json.loads(line) for line in output.read_text().splitlines()]
    logged = logs.lines(run, "evaluations")[-1]
    del row["seconds"], logged["step"], logged["executions"]
    assert row == logged
    solved = sum(row["success_once"])
    assert f"{tiny.task}: success {solved}/4 = {solved / 4:.2f} [" in result.out
    assert result.temporary == []


def test_the_report_reads_the_run(start, finished):
    run, _ = finished
    result = start("wmrl-report", f"run={run}").result()
    assert result.code == 0, result.err
    summary = json.loads((run / "summary.json").read_text())
    text = json.dumps(summary)
    assert "plate-slide-v3" in text and "wmrl" in text
    page = (run / "report.html").read_text()
    assert "plate-slide-v3" in page and "wmrl-train" in page  # the command that made it
    assert str(run / "report.html") in result.out
