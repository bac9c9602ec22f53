"""Teaching the ensemble: what enters the loss and what must not, worked by hand and on executed groups."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from wmrl_embodied.core.types import Group
from wmrl_embodied.world_models.learner import DynamicsLearner, LearnerSettings, _within_group

CHUNKS = 14
NAN = float("nan")


@pytest.fixture
def make_learner(make_model):
    def build(seed=0, **settings):
        settings = LearnerSettings(**{"steps": 4, "groups_per_batch": 3, **settings})
        return DynamicsLearner(make_model(), CHUNKS, settings, seed)

    return build


# Cox's partial likelihood


def cox(logits, success, valid, sizes):
    """One ensemble member."""
    arguments = (torch.tensor(value, dtype=torch.float64) for value in (logits, valid, success))
    logit, valid, success = arguments
    return _within_group(logit[None], valid, success, sizes).item()


def test_within_group_by_hand_one_success():
    """The first attempt succeeds in the second chunk, where both are still trying."""
    got = cox([[0.3, 1.2], [0.7, -0.4]], success=[[0, 1], [0, 0]], valid=[[1, 1], [1, 1]], sizes=[2])
    assert got == pytest.approx(np.log(np.exp(1.2) + np.exp(-0.4)) - 1.2)


def test_within_group_by_hand_two_successes():
    """Who has succeeded is no longer at risk: alone, the second success is certain and costs nothing."""
    got = cox([[0.3, 9.0], [0.7, -0.4]], success=[[1, 0], [0, 1]], valid=[[1, 0], [1, 1]], sizes=[2])
    assert got == pytest.approx((np.log(np.exp(0.3) + np.exp(0.7)) - 0.3 + 0) / 2)


def test_within_group_by_hand_groups_are_strata():
    """A group without a success says nothing, and members of another group do not compete."""
    got = cox(
        [[0.1], [0.2], [5.0], [5.0], [1.0], [-1.0]],
        success=[[1], [0], [0], [0], [0], [1]],
        valid=[[1]] * 6,
        sizes=[2, 2, 2],
    )
    first = np.log(np.exp(0.1) + np.exp(0.2)) - 0.1
    third = np.log(np.exp(1.0) + np.exp(-1.0)) + 1.0
    assert got == pytest.approx((first + third) / 2)
    assert cox([[1.0], [2.0]], success=[[0], [0]], valid=[[1], [1]], sizes=[2]) == 0


def test_within_group_ignores_what_a_group_has_in_common():
    base = cox([[0.3, 1.2], [0.7, -0.4]], success=[[0, 1], [0, 0]], valid=[[1, 1], [1, 1]], sizes=[2])
    shifted = cox([[9.3, 5.2], [9.7, 3.6]], success=[[0, 1], [0, 0]], valid=[[1, 1], [1, 1]], sizes=[2])
    assert shifted == pytest.approx(base)


def test_within_group_averages_members_and_has_finite_gradients():
    logit = torch.tensor([[[0.3, 9.0], [0.7, -0.4]], [[1.3, 0.0], [0.7, 2.0]]], requires_grad=True)
    valid, success = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    together = _within_group(logit, valid, success, [2])
    alone = [_within_group(logit[[member]], valid, success, [2]) for member in range(2)]
    torch.testing.assert_close(together, (alone[0] + alone[1]) / 2)
    together.backward()
    assert logit.grad.isfinite().all()
    assert not logit.grad[:, 0, 1].any()  # after its success


# What enters


def test_groups_and_attempts_without_a_score_are_left_out(make_learner, executed_groups):
    learner = make_learner()
    unscored = Group(
        executed_groups[0].context,
        [dataclasses.replace(t, executed=NAN) for t in executed_groups[0].trajectories],
    )
    empty = Group(executed_groups[0].context, [])
    learner.remember([unscored, empty])
    assert learner.groups == 0
    assert learner.update([unscored]) == {}
    learner.remember(executed_groups)
    assert learner.groups == len(executed_groups)
    assert [len(group.valid) for group in learner._groups] == [3] + [
        4
    ] * 7  # one score of the first is missing


def test_a_member_that_was_done_at_the_start_is_left_out(make_learner, executed_groups):
    """No decision, no score: rollouts return it so (case success-at-reset)."""
    members = [copy.copy(t) for t in executed_groups[1].trajectories]
    steps = {name: v if name == "tokens" else v[:0] for name, v in members[0].steps.items()}
    members[0] = dataclasses.replace(members[0], steps=steps, executed=NAN)
    learner = make_learner()
    learner.remember([Group(executed_groups[1].context, members)])
    assert len(learner._groups[0].valid) == 3


def test_success_marks_the_last_executed_chunk(make_learner, executed_groups):
    learner = make_learner()
    learner.remember(executed_groups[1:2])
    (group,) = learner._groups
    for row, attempt in enumerate(executed_groups[1].trajectories):
        length = len(attempt.steps["action"])
        assert group.valid[row].tolist() == [1] * length + [0] * (CHUNKS - length)
        assert group.success[row].sum() == attempt.executed
        assert group.success[row, length - 1] == attempt.executed
        torch.testing.assert_close(group.action[row, :length], attempt.steps["action"], rtol=0, atol=0)
        torch.testing.assert_close(group.proprio[row, :length], attempt.steps["proprio"], rtol=0, atol=0)
        final = torch.as_tensor(attempt.info["final_features"])
        torch.testing.assert_close(group.features[row, length], final, rtol=0, atol=0)


def test_nothing_after_a_success_enters(make_learner, executed_groups):
    """Whatever stands behind the last executed chunk, every loss is the same."""
    assert any(
        t.executed == 1 and len(t.steps["action"]) < CHUNKS for g in executed_groups for t in g.trajectories
    )
    learner = make_learner()
    learner.remember(executed_groups)
    learner.model.standardise_features(torch.cat([group.features[:, 0] for group in learner._groups]))
    before = learner._losses(learner._groups)
    spoiled = []
    for group in learner._groups:
        behind = group.valid == 0
        after = torch.cat([torch.zeros(len(behind), 1, dtype=torch.bool), behind], 1)
        spoiled.append(
            dataclasses.replace(
                group,
                action=torch.where(behind[..., None, None], 0.7, group.action),
                features=torch.where(after[..., None], 123.0, group.features),
                proprio=torch.where(after[..., None], -45.0, group.proprio),
            )
        )
    after = learner._losses(spoiled)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0)


def test_hazard_loss_by_hand(make_learner, executed_groups):
    """With one logit b everywhere an attempt of n chunks costs n softplus(b), less b if the last one succeeded."""
    learner = make_learner()
    learner.remember(executed_groups)
    with torch.no_grad():
        learner.model.hazard_out.weight.zero_()
        learner.model.hazard_out.bias.fill_(-1.0)
    softplus = F.softplus(torch.tensor(-1.0)).item()
    costs = [
        len(t.steps["action"]) * softplus + t.executed
        for group in executed_groups
        for t in group.trajectories
        if t.executed == t.executed
    ]
    assert learner._losses(learner._groups)["hazard"].item() == pytest.approx(np.mean(costs), rel=1e-5)


def test_a_perfect_prediction_of_the_hand_costs_nothing(make_learner, executed_groups):
    """Proprioception and features are compared with the observation after the chunk, not before it."""
    learner = make_learner()
    still = []
    for attempt in executed_groups[1].trajectories:  # the same attempts, had nothing moved at all
        steps = dict(attempt.steps)
        for name in ("features", "proprio"):
            steps[name] = steps[name][:1].expand_as(steps[name])
        info = attempt.info | {f"final_{name}": steps[name][0] for name in ("features", "proprio")}
        still.append(dataclasses.replace(attempt, steps=steps, info=info))
    learner.remember([Group(executed_groups[1].context, still)])
    with torch.no_grad():
        for layer in (learner.model.move, learner.model.change):
            layer.weight.zero_(), layer.bias.zero_()
    losses = learner._losses(learner._groups)
    assert losses["features"].item() == pytest.approx(0, abs=1e-10)
    assert losses["proprio"].item() == pytest.approx(0, abs=1e-10)
    with torch.no_grad():
        learner.model.move.bias.fill_(0.5)
    assert learner._losses(learner._groups)["proprio"].item() == pytest.approx(0.25, rel=1e-4)


def test_minibatches_hold_a_share_of_the_newest(make_learner, executed_groups):
    learner = make_learner(groups_per_batch=8, newest_share=0.5, newest=4)
    for _ in range(5):
        learner.remember(executed_groups)
    drawn = np.stack([learner._draw(np.random.default_rng(seed)) for seed in range(50)])
    assert drawn.shape == (50, 8)
    assert set(drawn[:, -4:].ravel()) == {36, 37, 38, 39}
    assert len(set(drawn[:, :4].ravel())) > 25
    assert drawn.min() >= 0
    assert drawn.max() <= 39
    first = make_learner(groups_per_batch=8)
    first.remember(executed_groups[:1])
    assert set(first._draw(np.random.default_rng(0))) == {0}


# Learning


def test_losses_fall(make_learner, executed_groups):
    learner = make_learner(group_weight=0.1)
    first = learner.update(executed_groups, steps=5)
    for _ in range(2):
        last = learner.update([], steps=20)
    for name in ("loss_hazard", "loss_features", "loss_proprio"):
        assert last[name] < first[name], name
    assert last["loss_proprio"] < 0.8 * first["loss_proprio"]
    assert last["groups"] == 8


def weights(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def assert_same_weights(one, other):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0)


def test_same_seed_same_training(make_learner, executed_groups):
    runs = []
    for seed in (0, 0, 1):
        learner = make_learner(seed=seed)
        torch.rand(2), np.random.rand(2)  # global generators must not matter
        metrics = learner.update(executed_groups)
        runs.append((metrics, weights(learner)))
    assert runs[0][0] == runs[1][0]
    assert_same_weights(runs[0][1], runs[1][1])
    assert runs[2][0] != runs[0][0]


def test_a_restored_learner_continues_identically(make_learner, executed_groups, tmp_path):
    undisturbed = make_learner()
    undisturbed.update(executed_groups[:4])
    torch.save(undisturbed.state_dict(), tmp_path / "state.pt")
    undisturbed_metrics = [undisturbed.update(executed_groups[4:6]), undisturbed.update(executed_groups[6:])]

    restored = make_learner()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    restored.remember(executed_groups[:4])  # from the ledger
    assert [
        restored.update(executed_groups[4:6]),
        restored.update(executed_groups[6:]),
    ] == undisturbed_metrics
    assert_same_weights(weights(undisturbed), weights(restored))


def test_state_is_a_snapshot(make_learner, executed_groups):
    """Restoring must not tie two learners together, and scales are not fitted anew after a resume."""
    one = make_learner()
    one.update(executed_groups[:4])
    other = make_learner()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.remember(executed_groups[4:])
    before = weights(one)
    other.update([])
    assert_same_weights(before, weights(one))
    torch.testing.assert_close(other.model.feature_mean, one.model.feature_mean, rtol=0, atol=0)


def test_a_loss_that_is_not_finite_is_told_and_nothing_is_learned_from_it(make_learner, executed_groups):
    learner = make_learner()
    learner.update(executed_groups)
    before = weights(learner)
    members = []
    for attempt in executed_groups[1].trajectories:
        steps = attempt.steps | {"proprio": attempt.steps["proprio"] * NAN}
        members.append(dataclasses.replace(attempt, steps=steps))
    with pytest.raises(FloatingPointError, match="world model: loss nan; lower world_model.learning_rate"):
        learner.update([Group(executed_groups[1].context, members)] * 50, steps=20)
    assert all(value.isfinite().all() for value in learner.model.state_dict().values())
    assert before.keys() == learner.model.state_dict().keys()
