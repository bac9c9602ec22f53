"""Complete, damaged and absent run folders."""

import json
import math

import numpy as np
import pytest

from wmrl_embodied.evaluation.runs import NoRunError, Run, find_runs


def test_reads_everything(run_folder):
    run = Run.load(run_folder)
    assert (run.arm, run.seed, run.name) == ("wmrl", 3, "wmrl/seed3")
    assert run.config["seed"] == 3
    assert run.provenance == {"command": "wmrl-train seed=3", "commit": "abc1234"}
    assert [row["step"] for row in run.metrics] == list(range(1, 11))
    assert [e.step for e in run.evaluations] == [0, 0, 5, 5, 10, 10]
    first = run.evaluations[0]
    assert (first.task, first.split, first.executions) == ("reach-v3", "held_out", 20)
    assert first.success_once.sum() == 5 and first.already_successful.sum() == 1
    assert len(run.pairs) == 10 and math.isnan(run.pairs[0].predicted_variance[1])
    assert run.media("imagined")["imagined_proprio"].shape == (5, 12, 4)
    assert run.missing == [] and run.notes == []


def test_a_torn_last_line_is_skipped_and_said(run_folder):
    with open(run_folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 11, "execu')
    run = Run.load(run_folder)
    assert len(run.metrics) == 10
    assert run.notes == ["metrics.jsonl: line 11 skipped, torn"]


def test_lines_that_are_not_what_they_should_be(run_folder):
    with open(run_folder / "evaluations.jsonl", "ab") as f:
        f.write(b'[1]\n{"step": 11}\n\xff\xfe\n')
        f.write(json.dumps(dict(step=11, split="train", task="a", index=[1, 2], success_once=[1])).encode())
    run = Run.load(run_folder)
    assert len(run.evaluations) == 6
    reasons = [note.removeprefix("evaluations.jsonl: line ") for note in run.notes]
    assert reasons[:3] == ["7 skipped, not an object", "8 skipped, no 'success_once'", "9 skipped, torn"]
    assert reasons[3].startswith("10 skipped, unequal lengths [2, 1, 1, 1] of index")


def test_a_step_written_again_after_a_resume_counts_once(run_folder):
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    again = json.loads(lines[4]) | {"imagined": 7}
    (run_folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(again)]))
    for name in ("evaluations.jsonl", "pairs.jsonl"):
        text = (run_folder / name).read_text()
        (run_folder / name).write_text(text + text)
    run = Run.load(run_folder)
    assert [row["step"] for row in run.metrics] == list(range(1, 11))
    assert run.metrics[4]["imagined"] == 7
    assert len(run.evaluations) == 6 and len(run.pairs) == 10


def test_an_empty_run_is_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("correction: wmrl\nseed: 4\n")
    run = Run.load(tmp_path)
    assert (run.arm, run.seed) == ("wmrl", 4)
    assert run.metrics == [] and run.evaluations == [] and run.pairs == []
    assert run.media("imagined") is None
    assert "metrics.jsonl" in run.missing and "media/imagined.npz" in run.missing


def test_broken_files_do_not_stop_the_report(run_folder):
    (run_folder / "config.yaml").write_text("a: [1\n")
    (run_folder / "provenance.json").write_text("{")
    (run_folder / "media" / "imagined.npz").write_bytes(b"PK torn")
    np.savez(run_folder / "media" / "rollouts_after.npz", frames=np.zeros(3))
    run = Run.load(run_folder)
    assert run.config == {} and run.provenance == {}
    assert run.media("imagined") is None and run.media("rollouts_after") is None
    assert len(run.notes) == 4


def test_command_and_commit_from_the_config(run_folder):
    (run_folder / "provenance.json").unlink()
    (run_folder / "config.yaml").write_text("command: [wmrl-train, seed=3]\ncommit: f00\n")
    assert Run.load(run_folder).provenance == {"command": "wmrl-train seed=3", "commit": "f00"}


def test_finds_arms_and_seeds_in_order(experiment):
    names = [run.name for run in find_runs(experiment)]
    assert names == [f"{arm}/seed{seed}" for arm in ("real", "wmrl") for seed in range(3)]
    assert [run.name for run in find_runs(experiment / "wmrl")] == [f"wmrl/seed{k}" for k in range(3)]
    assert [run.name for run in find_runs(experiment / "wmrl" / "seed1")] == ["wmrl/seed1"]


def test_no_folder_and_no_run(tmp_path):
    with pytest.raises(NoRunError, match="nowhere: no such folder"):
        find_runs(tmp_path / "nowhere")
    for load in (find_runs, Run.load):
        with pytest.raises(NoRunError, match=r"looked for config.yaml, metrics.jsonl.* or pairs.jsonl"):
            load(tmp_path)


def test_unknown_media(run_folder):
    with pytest.raises(KeyError):
        Run.load(run_folder).media("selfie")
