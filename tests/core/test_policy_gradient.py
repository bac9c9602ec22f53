"""Clipped surrogate and KL by hand, masks that hide NaN, and the update of a small softmax policy."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wmrl_embodied.core.policy_gradient import (
    UpdateSettings,
    clipped_surrogate,
    kl_k3,
    masked_mean,
    update_policy,
)
from wmrl_embodied.core.seeding import generator
from wmrl_embodied.core.types import Trajectory, collate


class SoftmaxPolicy(nn.Module):
    """Three actions, two features, and dropout that must not disturb the ratio."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.5)
        self.sizes = []

    def log_prob(self, batch):
        self.sizes.append(len(batch["action"]))
        logits = self.linear(self.dropout(batch["features"]))
        return torch.log_softmax(logits, -1).gather(-1, batch["action"][..., None])[..., 0]


def make_policy(seed=0):
    torch.manual_seed(seed)
    return SoftmaxPolicy().train()


def act(policy, lengths, seed=0):
    """Trajectories of the given lengths, with log-probabilities computed one trajectory at a time."""
    draw = torch.Generator().manual_seed(seed)
    trajectories = []
    for length in lengths:
        steps = {
            "features": torch.randn(length, 2, generator=draw),
            "action": torch.randint(3, (length,), generator=draw),
        }
        policy.eval()
        with torch.no_grad():
            old = policy.log_prob({name: value[None] for name, value in steps.items()})[0]
        policy.train()
        trajectories.append(Trajectory(steps, old, torch.ones(length)))
    policy.sizes.clear()
    return trajectories


def update(policy, trajectories, advantages, reference=None, lr=0.1, seed=0, **settings):
    settings = {"kl_coefficient": 0.04 if reference is not None else 0.0} | settings
    optimizer = torch.optim.SGD(policy.parameters(), lr)
    return update_policy(
        policy,
        reference,
        trajectories,
        advantages,
        optimizer,
        UpdateSettings(**settings),
        generator(seed, 0, "x"),
    )


def parameters(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # below the clip with A > 0: the pessimistic branch is unclipped
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, expected):
    loss = clipped_surrogate(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1)
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_upper_bound_of_its_own():
    inputs = (torch.tensor([[math.log(1.5)]]), torch.zeros(1, 1), torch.tensor([2.0]), torch.ones(1, 1))
    assert clipped_surrogate(*inputs, clip_low=0.2, clip_high=0.28).item() == pytest.approx(-2.56)
    assert clipped_surrogate(*inputs, clip_low=0.3).item() == pytest.approx(-2.6)


def test_decisions_weigh_by_their_mask():
    # Ratios 1, losses -A: (1 * -1 + 0.5 * -1 + 1 * 3) / 2.5.
    mask = torch.tensor([[1.0, 0.5], [1.0, 0.0]])
    loss = clipped_surrogate(torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([1.0, -3.0]), mask)
    assert loss.item() == pytest.approx(0.6)


def test_case_masked_nan_times_zero():
    nan = float("nan")
    log_prob = torch.tensor([[nan, -1.0]], requires_grad=True)
    loss = clipped_surrogate(
        log_prob, torch.tensor([[nan, -1.0]]), torch.tensor([[nan, 1.0]]), torch.tensor([[0.0, 1.0]])
    )
    assert loss.item() == -1
    loss.backward()
    np.testing.assert_allclose(log_prob.grad, [[0, -1]])


def test_an_update_never_looks_at_masked_decisions():
    class NanWhereMasked(SoftmaxPolicy):
        def log_prob(self, batch):
            # Added, so that a gradient of NaN would reach the parameters.
            return super().log_prob(batch) + torch.where(batch["mask"] > 0, 0.0, float("nan"))

    torch.manual_seed(0)
    policy, other, reference = NanWhereMasked(), make_policy(), NanWhereMasked()
    policy.load_state_dict(other.state_dict())
    longer = act(other, [3])[0]
    shorter = Trajectory(
        {name: value[:2] for name, value in longer.steps.items()}, longer.old_log_prob[:2], torch.ones(2)
    )
    longer.old_log_prob[2] = float("nan")
    longer.mask[2] = 0
    assert update(policy, [longer], [1.0], reference) == pytest.approx(
        update(other, [shorter], [1.0], reference)
    )
    assert not torch.equal(parameters(policy), parameters(reference))
    torch.testing.assert_close(parameters(policy), parameters(other))


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([[float("nan")]]), torch.zeros(1, 1)).item() == 0


def test_kl_k3_by_hand():
    p, q = torch.log(torch.tensor([0.2, 0.8])), torch.log(torch.tensor([0.5, 0.5]))
    values = kl_k3(p, q)
    np.testing.assert_allclose(values, [2.5 - math.log(2.5) - 1, 0.625 - math.log(0.625) - 1], rtol=1e-5)
    # Its expectation under p is the KL itself.
    assert (p.exp() * values).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=9))
def test_kl_k3_is_never_negative(pairs):
    p, q = torch.tensor(pairs, dtype=torch.float64).T
    assert (kl_k3(p, q) >= 0).all()
    assert (kl_k3(p, p) == 0).all()


def test_kl_k3_goes_on_as_its_tangent():
    p = torch.tensor([-1.0, -3.0, -5.0], dtype=torch.float64, requires_grad=True)
    values = kl_k3(p, torch.full_like(p, -1.0), linear_above=2.0)
    at_2 = math.exp(2) - 3
    np.testing.assert_allclose(values.detach(), [0, at_2, at_2 + 2 * (math.exp(2) - 1)])
    values.sum().backward()
    np.testing.assert_allclose(p.grad, [0, 1 - math.exp(2), 1 - math.exp(2)])


def test_a_decision_the_policy_lost_does_not_outweigh_the_batch():
    policy, reference = make_policy(0), make_policy(1)
    trajectories = act(policy, [4, 4, 4])
    reference.log_prob = lambda batch: policy.log_prob(batch).detach() + 50
    metrics = update(policy, trajectories, [1e-12] * 3, reference, kl_coefficient=1.0, kl_linear_above=2.0)
    assert metrics["kl_reference"] == pytest.approx(math.exp(2) - 3 + 48 * (math.exp(2) - 1), rel=1e-4)


def test_one_step_is_the_policy_gradient():
    policy, expected = make_policy(), make_policy()
    trajectories = act(policy, [2, 3])
    metrics = update(policy, trajectories, [1.0, -2.0], max_grad_norm=100.0)
    # At ratio 1 the gradient of the loss is the mean of -A * grad log_prob over the five decisions.
    expected.eval()
    log_prob = expected.log_prob(collate(trajectories))
    (-(log_prob[0, :2].sum() - 2 * log_prob[1].sum()) / 5).backward()
    gradient = torch.cat([p.grad.flatten() for p in expected.parameters()])
    torch.testing.assert_close(parameters(policy), parameters(expected) - 0.1 * gradient)
    assert metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert metrics["loss"] == metrics["surrogate"] == pytest.approx((-2 * 1 + 3 * 2) / 5)


def test_case_ratio_one():
    policy = make_policy()
    trajectories = act(policy, [1, 4, 2, 3])
    advantages = [1.0, -1.0, 2.0, -2.0]
    first = update(copy.deepcopy(policy), trajectories, advantages, epochs=1)
    assert first["first_log_ratio"] < 1e-5
    assert first["clip_fraction"] == 0
    assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert first["kl_old"] < 1e-9
    several = update(policy, trajectories, advantages, epochs=3, lr=5.0, max_grad_norm=100.0)
    assert several["first_log_ratio"] < 1e-5
    assert several["clip_fraction"] > 0
    assert several["ratio_max"] > 1.2


def test_a_policy_that_acted_at_another_temperature_is_noticed():
    policy = make_policy()
    trajectories = act(policy, [3, 3])
    for trajectory in trajectories:
        trajectory.old_log_prob -= 0.25
    assert update(policy, trajectories, [1.0, -1.0])["first_log_ratio"] == pytest.approx(0.25, abs=1e-5)


def test_the_clip_stops_the_gradient():
    policy = make_policy()
    trajectories = act(policy, [2])
    trajectories[0].old_log_prob -= 1  # every ratio is e, above the clip, with a positive advantage
    before = parameters(policy)
    metrics = update(policy, trajectories, [1.0])
    assert metrics["clip_fraction"] == 1 and metrics["grad_norm"] == 0
    torch.testing.assert_close(parameters(policy), before)


def test_kl_pulls_towards_the_reference():
    policy, reference = make_policy(0), make_policy(1)
    trajectories = act(policy, [4, 4, 4])
    tiny = [1e-12] * 3
    first = update(policy, trajectories, tiny, reference, kl_coefficient=1.0)
    update(policy, trajectories, tiny, reference, kl_coefficient=1.0, epochs=300, lr=0.5)
    last = update(policy, trajectories, tiny, reference, kl_coefficient=1.0)
    assert first["kl_reference"] > 0
    assert last["kl_reference"] < 0.01 * first["kl_reference"]
    assert last["loss"] == pytest.approx(last["kl_reference"], abs=1e-6)


def test_reference_is_asked_once_and_never_changed():
    policy, reference = make_policy(0), make_policy(1)
    trajectories = act(policy, [2, 3, 2, 3])
    before = parameters(reference)
    update(policy, trajectories, [1.0, -1.0, 1.0, -1.0], reference, epochs=5, minibatch=2)
    assert (reference.sizes, policy.sizes) == ([2] * 2, [2] * 10)  # once in chunks; five times in minibatches
    torch.testing.assert_close(parameters(reference), before)
    assert all(p.grad is None for p in reference.parameters())


def test_modes_are_restored_module_by_module():
    policy = make_policy()
    trajectories = act(policy, [2])
    policy.linear.eval()
    update(policy, trajectories, [1.0])
    assert (policy.training, policy.linear.training, policy.dropout.training) == (True, False, True)


def test_trajectories_without_advantage_are_dropped():
    policy, other = make_policy(), make_policy()
    trajectories = act(policy, [2, 5, 3])
    trajectories[1].steps["features"][:] = float("nan")  # would poison the loss if it were looked at
    metrics = update(policy, trajectories, np.array([1.0, 0.0, -1.0]), reference=make_policy(1))
    update(other, [trajectories[0], trajectories[2]], torch.tensor([1.0, -1.0]), reference=make_policy(1))
    assert metrics["trajectories"] == 2
    torch.testing.assert_close(parameters(policy), parameters(other))


def test_nothing_to_learn_is_skipped():
    policy = make_policy()
    trajectories = act(policy, [2, 2])
    before = parameters(policy)
    assert update(policy, trajectories, [0.0, 0.0]) == {"skipped": 1.0}
    assert update(policy, [], []) == {"skipped": 1.0}
    trajectories[0].mask[:] = 0
    assert update(policy, trajectories[:1], [1.0]) == {"skipped": 1.0}
    assert torch.equal(parameters(policy), before) and not policy.sizes


def test_minibatches_are_even_and_seeded():
    policies = [make_policy() for _ in range(3)]
    trajectories = act(policies[0], [2] * 9)
    advantages = np.linspace(-1, 1, 9) + 0.01
    runs = [
        update(policy, trajectories, advantages, minibatch=4, epochs=2, seed=seed)
        for policy, seed in zip(policies, (0, 0, 1), strict=True)
    ]
    assert runs[0]["optimizer_steps"] == 6
    assert policies[0].sizes == [3] * 6  # not 4 + 4 + 1
    assert runs[0]["epochs_run"] == 2
    assert runs[0] == runs[1]
    assert torch.equal(parameters(policies[0]), parameters(policies[1]))
    assert not torch.equal(parameters(policies[0]), parameters(policies[2]))


def test_epochs_end_at_the_kl_limit():
    policy = make_policy()
    trajectories = act(policy, [4, 4])
    free = update(copy.deepcopy(policy), trajectories, [1.0, -1.0], epochs=10, lr=2.0)
    assert (free["epochs_run"], free["stopped_early"]) == (10, 0)
    limited = update(policy, trajectories, [1.0, -1.0], epochs=10, lr=2.0, kl_limit=1e-3)
    assert limited["stopped_early"] == 1
    assert 1 <= limited["epochs_run"] < 10
    assert limited["kl_old"] <= 1e-3


def test_a_policy_past_the_kl_limit_takes_no_step():
    policy = make_policy()
    trajectories = act(policy, [2])
    trajectories[0].old_log_prob -= 1
    before = parameters(policy)
    metrics = update(policy, trajectories, [-1.0], kl_limit=0.1)
    assert (metrics["skipped"], metrics["stopped_early"]) == (1, 1)
    assert metrics["kl_old"] == pytest.approx(math.e - 2, rel=1e-4)
    assert torch.equal(parameters(policy), before)


def test_gradient_norm_is_clipped():
    policy = make_policy()
    before = parameters(policy)
    metrics = update(policy, act(policy, [3, 3]), [50.0, -70.0], lr=1.0, max_grad_norm=0.5)
    assert metrics["grad_norm"] > 0.5
    assert (parameters(policy) - before).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_updates_raise_the_probability_of_better_actions():
    policy = make_policy()
    features = torch.ones(1, 2)
    group = [
        Trajectory(
            {"features": features, "action": torch.tensor([a])},
            policy.eval().log_prob({"features": features, "action": torch.tensor([a])}).detach(),
            torch.ones(1),
        )
        for a in range(3)
    ]
    update(policy, group, [-1.0, 2.0, -1.0], lr=0.5)
    policy.eval()
    after = [policy.log_prob(t.steps).item() for t in group]
    assert after[1] > group[1].old_log_prob.item()
    assert after[0] < group[0].old_log_prob.item()


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_no_step_is_taken_on_numbers_that_are_not_finite(broken):
    class Broken(SoftmaxPolicy):
        def log_prob(self, batch):
            log_prob = super().log_prob(batch)
            if broken == "loss":
                return log_prob + float("inf")
            # sqrt has an infinite slope at 0, where its value is finite.
            return log_prob + torch.sqrt((self.linear.bias - self.linear.bias).sum())

    policy = Broken().eval()
    trajectories = act(make_policy(), [2, 2])
    before = parameters(policy)
    with pytest.raises(FloatingPointError, match="no step taken.*loss="):
        update(policy, trajectories, [1.0, -1.0])
    assert torch.equal(parameters(policy), before)


def test_wrong_inputs_are_named():
    policy = make_policy()
    trajectories = act(policy, [2, 2])
    with pytest.raises(ValueError, match=r"advantages \(1,\): expected one for each of 2"):
        update(policy, trajectories, [1.0])
    with pytest.raises(ValueError, match=r"advantages\[1\] is not finite"):
        update(policy, trajectories, [1.0, float("nan")])
    with pytest.raises(ValueError, match=r"kl_coefficient=0.5: needs a reference"):
        update(policy, trajectories, [1.0, -1.0], kl_coefficient=0.5)
    policy.log_prob = lambda batch: torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(ValueError, match=r"gave \(2, 1\), expected \(B, T\) = \(2, 2\)"):
        update(policy, trajectories, [1.0, -1.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"minibatch": 0},
        {"clip_low": 1.0},
        {"clip_high": 0.0},
        {"kl_coefficient": -0.1},
        {"kl_coefficient": float("nan")},
        {"kl_linear_above": 0.0},
        {"max_grad_norm": 0.0},
        {"kl_limit": 0.0},
    ],
)
def test_settings_out_of_range_are_named(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be"):
        UpdateSettings(**wrong)
