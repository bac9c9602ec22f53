"""Equal seeds give equal runs, whatever the number of workers; a world model that is the simulator trains like it."""

import pytest

pytestmark = pytest.mark.usefixtures("one_pool")


def test_the_simulator_as_world_model_trains_exactly_like_real_execution(
    command, policy, tiny, logs, tmp_path
):
    common = [*tiny.without_model, policy, "steps=3", "media=false", "eval.every=1"]
    perfect = ["world_model=simulator", "correction=raw", "anchors.fraction=0", "trainer.warmup_steps=0"]
    real, raw = tmp_path / "real", tmp_path / "raw"
    assert command("train", *common, "correction=real", f"output_dir={real}").code == 0
    assert command("train", *common, *perfect, f"output_dir={raw}").code == 0
    trained = 0
    for a, b in zip(logs.lines(real, "metrics"), logs.lines(raw, "metrics"), strict=True):
        of_policy = {name: value for name, value in a.items() if name.startswith("policy/")}
        assert of_policy == {name: value for name, value in b.items() if name.startswith("policy/")}
        assert (a["executions"], b["executions"]) == (b["imagined"], a["imagined"])
        assert a["executed_success"] == b["predicted_mean"]
        trained += not of_policy["policy/skipped"]
    assert trained == 3  # or nothing was compared
    for a, b in zip(logs.lines(real, "evaluations"), logs.lines(raw, "evaluations"), strict=True):
        assert a | {"executions": 0} == b
    assert logs.executed(raw) == [] and len(logs.executed(real)) == 24
    first, second = logs.weights(real, 3), logs.weights(raw, 3)
    assert all(first[name].equal(second[name]) for name in first)
    start = logs.weights(real, 0)
    assert any(not first[name].equal(start[name]) for name in first)


def test_an_equal_seed_gives_the_same_run_on_one_worker_in_another_process(
    command, policy, tiny, finished, logs, lone_worker, monkeypatch, tmp_path
):
    from contextlib import nullcontext

    from wmrl_embodied.runtime import training

    monkeypatch.setattr(training, "SimulatorPool", lambda settings, workers: nullcontext(lone_worker))
    run = tmp_path / "run"
    result = command("train", *tiny.train, policy, "task.workers=1", "media=false", f"output_dir={run}")
    assert result.code == 0, result.err
    logs.assert_same(run, finished[0])


def test_another_seed_gives_another_run(command, policy, tiny, finished, logs, tmp_path):
    run = tmp_path / "run"
    result = command("train", *tiny.train, policy, "seed=1", "steps=1", "media=false", f"output_dir={run}")
    assert result.code == 0, result.err
    assert logs.executed(run) != logs.executed(finished[0])[:8]
    assert logs.lines(run, "metrics")[0] != logs.lines(finished[0], "metrics")[0]


def test_the_start_of_the_world_model_does_not_depend_on_where_its_data_lies():
    """LAPACK in single precision rounds by the alignment of the arrays; two equal runs then part."""
    import torch

    from wmrl_embodied.world_models.dynamics import FreeMotion

    generator = torch.Generator().manual_seed(0)
    action, moved = torch.randn(333, 5, 4, generator=generator), torch.randn(333, 4, generator=generator)
    gains = []
    for shift in range(4):  # in floats, from the allocator's alignment
        room = torch.empty(shift + moved.numel())[shift:].view_as(moved).copy_(moved)
        model = FreeMotion(4, 4)
        model.fit_gain(action, room)
        gains.append(model.gain.detach())
    assert all(gain.equal(gains[0]) for gain in gains)
