"""Bad input ends with one clear message and a non-zero exit, before anything is executed."""

import json
import shutil

import pytest

NOWHERE = "policy.path=/nonexistent/policy"


def refused(result, *texts):
    """One error line that holds every text, exit code 2, no traceback."""
    [error] = [line for line in result.err.splitlines() if line.strip()]
    assert result.code == 2, result
    assert error.startswith("error: ")
    for text in texts:
        assert text in error


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("task.tasks=[buton-press-v3]", ["buton-press-v3", "button-press-v3"]),
        ("task.tasks=[]", ["task.tasks=[]", "at least one"]),
        ("anchors.fraction=1.4", ["anchors.fraction=1.4", "[0, 1]"]),
        ("anchors.fraction=-0.1", ["anchors.fraction=-0.1", "[0, 1]"]),
        ("anchors.fraction=nan", ["anchors.fraction=nan", "[0, 1]"]),
        ("trainer.group_size=1", ["trainer.group_size=1", "2"]),
        ("trainer.warmup_groups=0", ["trainer.warmup_groups=0", "1"]),
        ("task.workers=0", ["task.workers=0", "1"]),
        ("task.chunks=many", ["task.chunks=many"]),
        ("threads=0", ["threads=0", "1"]),
        ("eval.states=0", ["eval.states=0", "1"]),
        ("policy_update.learning_rate=0", ["policy_update.learning_rate=0"]),
        ("correction.name=wmlr", ["wmlr", "wmrl"]),
        ("wandb=bogus", ["wandb=bogus", "offline"]),
    ],
)
def test_settings_out_of_their_limits(command, tmp_path, override, texts):
    run = tmp_path / "run"
    refused(command("train", NOWHERE, f"output_dir={run}", override), *texts)
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("correction=wmlr", ["wmlr", "wmrl", "real_small"]),  # Hydra names the choices
        ("world_model=dynamic", ["dynamic", "dynamics", "simulator"]),
        ("anchor.fraction=0.1", ["anchor"]),
        ("anchors.share=0.1", ["share"]),
    ],
)
def test_unknown_choices_and_keys(command, tmp_path, override, texts):
    run = tmp_path / "run"
    result = command("train", NOWHERE, f"output_dir={run}", override)
    assert result.code not in (0, None)
    for text in texts:
        assert text in result.err
    assert not run.exists()


def test_no_policy(command, tmp_path):
    refused(command("train", f"output_dir={tmp_path / 'run'}"), "policy.path=null", "wmrl-sft")
    refused(command("eval"), "policy.path=null", "wmrl-sft")


def test_a_missing_policy(command, tmp_path):
    refused(command("train", NOWHERE, f"output_dir={tmp_path / 'run'}"), "/nonexistent/policy")
    refused(command("eval", NOWHERE), "/nonexistent/policy")


def test_a_foreign_checkpoint(command, tmp_path):
    folder = tmp_path / "act"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"type": "act"}))
    for name in ("train", "eval"):
        output = [f"output_dir={tmp_path / 'run'}"] if name == "train" else []
        refused(command(name, f"policy.path={folder}", *output), str(folder), "'act'", "mini_vla")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(command("eval", f"policy.path={empty}"), str(empty), "config.json")


def test_a_broken_checkpoint(command, cloned, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(cloned[0] / "pretrained_model", folder)
    (folder / "model.safetensors").write_bytes(b"not tensors")
    refused(command("eval", f"policy.path={folder}"), str(folder), "broken or foreign checkpoint")


def test_an_output_folder_that_cannot_be_used(command, policy, finished, tiny, tmp_path):
    taken = finished[0]
    before = sorted(path.name for path in taken.iterdir())
    refused(command("train", *tiny.train, policy, f"output_dir={taken}"), str(taken), f"resume={taken}")
    assert sorted(path.name for path in taken.iterdir()) == before
    file = tmp_path / "file"
    file.write_text("")
    refused(command("train", *tiny.train, policy, f"output_dir={file}"), str(file))


def test_resuming_what_cannot_be_resumed(command, finished, tmp_path):
    refused(command("train", f"resume={tmp_path}"), str(tmp_path), "config.yaml")
    broken = tmp_path / "broken"
    shutil.copytree(finished[0], broken, ignore=shutil.ignore_patterns("ledger", "wandb"))
    (broken / "checkpoints" / "000004" / "training_state.pt").write_bytes(b"not a state")
    refused(command("train", f"resume={broken}"), "training_state.pt")
    shutil.rmtree(broken / "checkpoints")
    refused(command("train", f"resume={broken}"), str(broken), "checkpoint")
    refused(command("train", f"resume={finished[0]}", "seed=3"), "seed=3", "steps")


def test_no_rendering(start, policy, tiny, tmp_path):
    run = tmp_path / "run"
    result = start("wmrl-train", *tiny.train, policy, f"output_dir={run}", MUJOCO_GL="bogus").result()
    assert result.code == 2
    assert "Traceback" not in result.err
    error = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "MUJOCO_GL" in error[0] and "bogus" in error[0]
    assert not (run / "ledger" / "ledger.jsonl").exists() or not (run / "ledger" / "ledger.jsonl").read_text()


def test_demonstrations_that_are_no_dataset(command, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(command("sft", f"demonstrations.path={empty}", f"output_dir={tmp_path / 'sft'}"), str(empty))
    refused(command("sft", "task.tasks=[reech-v3]", f"output_dir={tmp_path / 'sft'}"), "reech-v3", "reach-v3")


def test_a_report_of_nothing(command, tmp_path):
    refused(command("report", f"run={tmp_path}"), str(tmp_path))
