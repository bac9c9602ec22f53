"""Checkpoints in and out, and one clear message for everything that is none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from wmrl_embodied.policies.loading import LoadedPolicy, PolicyNotFound, load_policy


@pytest.fixture
def checkpoint(untrained, tmp_path):
    folder = tmp_path / "pretrained_model"
    LoadedPolicy(*untrained).save(folder)
    return folder


def test_round_trip(checkpoint, untrained, dataset):
    loaded = load_policy(str(checkpoint))
    assert not loaded.policy.training
    for name, value in untrained[0].state_dict().items():
        torch.testing.assert_close(loaded.policy.state_dict()[name], value, rtol=0, atol=0)
    frame = dataset[5]
    batch = {key: frame[key] for key in ("observation.image", "observation.state", "task")}
    expected = untrained[2](untrained[0].predict_action_chunk(untrained[1](dict(batch))))
    got = loaded.postprocessor(loaded.policy.predict_action_chunk(loaded.preprocessor(dict(batch))))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_folder_is_what_lerobot_expects(checkpoint):
    names = {file.name for file in checkpoint.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "policy_preprocessor.json",
        "policy_postprocessor.json",
    }
    assert json.loads((checkpoint / "config.json").read_text())["type"] == "mini_vla"


def test_vision_of_a_loaded_policy_is_frozen(checkpoint):
    policy = load_policy(str(checkpoint)).policy
    assert not any(parameter.requires_grad for parameter in policy.vision.parameters())
    assert all(parameter.requires_grad for parameter in policy.trunk.parameters())
    assert all(parameter.requires_grad for parameter in policy.language.parameters())


def test_reference_is_a_frozen_copy(checkpoint):
    loaded = load_policy(str(checkpoint))
    reference = loaded.reference()
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    with torch.no_grad():
        for parameter in loaded.policy.parameters():
            parameter.add_(1.0)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def spoil_nothing_there(folder):
    return folder.parent / "no" / "such" / "folder"


def spoil_wrong_level(folder):
    return folder.parent


def spoil_config(folder):
    (folder / "config.json").write_text("{not json")
    return folder


def spoil_type(folder):
    (folder / "config.json").write_text('{"type": "act"}')
    return folder


def spoil_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    return folder


def spoil_weights_cut(folder):
    """As a full disk leaves them."""
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


def spoil_weights_foreign(folder):
    """Of a policy with other layers: none may be left at its random start unnoticed."""
    weights = load_file(folder / "model.safetensors")
    del weights["trunk.readout"]
    save_file(weights, folder / "model.safetensors")
    return folder


def spoil_config_no_object(folder):
    (folder / "config.json").write_text("[]")
    return folder


def spoil_weights_missing(folder):
    (folder / "model.safetensors").unlink()
    return folder


def spoil_processor(folder):
    (folder / "policy_preprocessor.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_nothing_there, "no such folder, and no config.json of that name on the Hugging Face hub"),
        (spoil_wrong_level, "no config.json there; give the folder `pretrained_model`"),
        (spoil_weights_cut, "a broken or foreign checkpoint"),
        (spoil_weights_foreign, "a broken or foreign checkpoint"),
        (spoil_config_no_object, "a policy of type None"),
        (spoil_config, "config.json is not JSON"),
        (spoil_type, "a policy of type 'act'; supported is 'mini_vla'"),
        (spoil_weights, "a broken or foreign checkpoint"),
        (spoil_weights_missing, "a broken or foreign checkpoint"),
        (spoil_processor, "a broken or foreign checkpoint"),
    ],
)
def test_whatever_is_no_policy_is_told_in_one_line(checkpoint, spoil, message):
    path = str(spoil(checkpoint))
    with pytest.raises(PolicyNotFound) as failure:
        load_policy(path)
    text = str(failure.value)
    assert text.startswith(f"policy.path={path}: ")
    assert message in text
    assert "\n" not in text
