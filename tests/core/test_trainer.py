"""The trainer on a bandit: several contexts, a softmax policy for each, a table as world model, a real ledger."""

import copy
import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from wmrl_embodied.core.anchors import AnchorSchedule
from wmrl_embodied.core.estimators import ARMS, make_estimator
from wmrl_embodied.core.ledger import Ledger, LedgerFull
from wmrl_embodied.core.policy_gradient import UpdateSettings
from wmrl_embodied.core.seeding import generator, rng
from wmrl_embodied.core.trainer import Interrupted, Trainer, TrainerSettings
from wmrl_embodied.core.types import Context, Group, Policy, Task, Trajectory

CONTEXTS, LEVERS = 6, 4
NAN = float("nan")


class SoftmaxPolicy(nn.Module):
    """One softmax over the levers for every context."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(CONTEXTS, LEVERS))

    def log_prob(self, batch):
        chosen = self.logits.log_softmax(-1)[batch["context"]]
        return chosen.gather(-1, batch["lever"][..., None])[..., 0]


class Bandit:
    """In context i, lever i mod LEVERS pays 1 and no other pays anything; `batch` attempts are under way together.

    The world model is a table of mean payments, half where nothing is known; `perfect` knows the rule.
    """

    def __init__(self, seed=0, batch=2, perfect=False, pays=None):
        self.seed, self.batch, self.perfect = seed, batch, perfect
        self.pays = pays or (lambda context, lever: float(lever == context.index % LEVERS))
        self.total, self.count = np.zeros((CONTEXTS, LEVERS)), np.zeros((CONTEXTS, LEVERS))
        self.executed = []  # (step, context) of every group that was really executed
        self.before = lambda step: None  # called before each batch of executions

    def sample_contexts(self, n, rng):
        return [Context("bandit", int(index)) for index in rng.permutation(CONTEXTS)[:n]]

    def execute(self, policy, contexts, group_size, step, should_stop):
        for start in range(0, len(contexts), self.batch):
            if should_stop():
                return
            self.before(step)
            for context in contexts[start : start + self.batch]:
                self.executed.append((step, context))
            groups = [
                self._attempt(policy, context, group_size, step)
                for context in contexts[start : start + self.batch]
            ]
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.executed = self.pays(group.context, int(trajectory.steps["lever"]))
            yield groups

    def imagine(self, policy, contexts, group_size, step):
        groups = [self._attempt(policy, context, group_size, step) for context in contexts]
        self.predict(policy, groups, step)
        return groups

    def predict(self, policy, groups, step):
        for group in groups:
            for trajectory in group.trajectories:
                lever = int(trajectory.steps["lever"])
                place = group.context.index, lever
                known = self.total[place] / self.count[place] if self.count[place] else 0.5
                trajectory.predicted = self.pays(group.context, lever) if self.perfect else known
                # Of the mean of that many coins, a priori of one
                trajectory.predicted_variance = 0.0 if self.perfect else 0.25 / (1 + self.count[place])

    def learn(self, executed, step):
        for group in executed:
            for trajectory in group.trajectories:
                if np.isfinite(trajectory.executed):
                    place = group.context.index, int(trajectory.steps["lever"])
                    self.total[place] += trajectory.executed
                    self.count[place] += 1
        return {"known": float((self.count > 0).sum())}

    @torch.no_grad()
    def _attempt(self, policy, context, group_size, step):
        draws = generator(self.seed, step, "levers", context.index)
        chances = policy.logits[context.index].softmax(-1)
        levers = torch.multinomial(chances, group_size, replacement=True, generator=draws)
        members = []
        for lever in levers:
            steps = {"context": torch.tensor([context.index]), "lever": lever[None]}
            members.append(Trajectory(steps, chances[lever].log()[None], torch.ones(1)))
        return Group(context, members)


Parts = namedtuple("Parts", "trainer task policy ledger")


@pytest.fixture
def build(tmp_path):
    """Builds a trainer on a bandit, its ledger in folder `name`; ledgers are closed at the end."""
    ledgers = []

    def make(
        arm,
        name="ledger",
        fraction=0.25,
        budget=None,
        warmup=0,
        groups=4,
        group_size=8,
        learning_rate=0.2,
        seed=0,
        stop=lambda: False,
        spending=None,
        **task,
    ):
        policy, task = SoftmaxPolicy(), Bandit(seed, **task)
        assert isinstance(policy, Policy) and isinstance(task, Task)
        reference = copy.deepcopy(policy).requires_grad_(False)
        ledger = Ledger(tmp_path / name)
        ledgers.append(ledger)
        trainer = Trainer(
            task,
            policy,
            reference,
            make_estimator(arm),
            AnchorSchedule(fraction, budget=budget, **(spending or {})),
            torch.optim.Adam(policy.parameters(), lr=learning_rate),
            ledger,
            TrainerSettings(groups, group_size, warmup),
            UpdateSettings(epochs=2, minibatch=16, kl_coefficient=0.01),
            seed,
            stop,
        )
        return Parts(trainer, task, policy, ledger)

    yield make
    for ledger in ledgers:
        ledger.close()


def run(parts, steps):
    """What each of `steps` steps measured, without the seconds."""
    rows = []
    for _ in range(steps):
        metrics = parts.trainer.step().metrics
        rows.append({name: value for name, value in metrics.items() if not name.startswith("seconds/")})
    return rows


def right_choice(policy):
    """Mean probability of the lever that pays."""
    chances = policy.logits.detach().softmax(-1)
    return float(np.mean([chances[index, index % LEVERS] for index in range(CONTEXTS)]))


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_that_is_told_the_truth_learns(build, arm):
    parts = build(arm, perfect=True, warmup=1, fraction=0.5, learning_rate=0.4)
    run(parts, 15)
    assert right_choice(parts.policy) > (0.6 if arm == "real_small" else 0.75)  # at the start it is 0.25


def test_a_world_model_that_learned_online_replaces_most_executions(build):
    real, wmrl = build("real", "real"), build("wmrl", "wmrl", warmup=1)
    run(real, 40)
    run(wmrl, 40)
    assert right_choice(wmrl.policy) > 0.9 * right_choice(real.policy)
    assert wmrl.trainer.executions == (4 + 39 * 1) * 8
    assert real.trainer.executions == 40 * 4 * 8


def test_predictions_that_are_the_truth_train_exactly_like_executions(build):
    real = build("real", "real")
    raw = build("raw", "raw", perfect=True, fraction=0.0)
    for a, b in zip(run(real, 8), run(raw, 8), strict=True):
        policy = {name: value for name, value in a.items() if name.startswith("policy/")}
        assert policy == {name: value for name, value in b.items() if name.startswith("policy/")}
        assert policy["policy/skipped"] == 0
    assert torch.equal(real.policy.logits, raw.policy.logits)
    assert raw.ledger.executions == raw.trainer.executions == 0
    assert raw.trainer.imagined == real.trainer.executions == 8 * 32


def test_equal_seeds_give_equal_runs_and_others_do_not(build):
    first, again, other = (build("wmrl", f"run{k}", warmup=1, seed=seed) for k, seed in enumerate((3, 3, 4)))
    rows = run(first, 6)
    assert rows == run(again, 6)
    assert rows != run(other, 6)
    assert torch.equal(first.policy.logits, again.policy.logits)


def test_counts_in_the_metrics_are_those_of_the_ledger(build):
    parts = build("mixed", warmup=2)
    rows = run(parts, 4)
    # 4 groups of 8 are executed in each of two warm-up steps, then a quarter of the groups
    assert [row["executions"] for row in rows] == [32, 64, 72, 80]
    assert [row["imagined"] for row in rows] == [0, 0, 24, 48]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert parts.ledger.executions == 80 and len(parts.ledger) == 10
    assert [parts.ledger.executions_of_step(step) for step in range(4)] == [32, 32, 8, 8]


def test_every_executed_group_is_in_the_ledger_as_it_was_trained_on(build):
    parts = build("real")
    result = parts.trainer.step()
    for group, recorded in zip(result.executed, parts.ledger.groups(0), strict=True):
        assert recorded.context == group.context
        assert recorded.executed.tolist() == group.executed.tolist()
        for one, other in zip(group.trajectories, recorded.trajectories, strict=True):
            assert torch.equal(one.old_log_prob, other.old_log_prob)
    assert [record["seed"] for record in parts.ledger.records()] == [0] * 4


def test_executed_groups_are_anchors_with_the_probability_of_their_choice(build):
    parts = build("wmrl", fraction=0.5)
    result = parts.trainer.step()
    assert [group.anchor for group in result.executed] == [True, True]
    assert [group.inclusion_probability for group in result.executed] == [0.5, 0.5]
    assert all(np.isfinite(group.predicted).all() for group in result.executed)  # for the corrections


def test_only_arms_that_predict_warm_up(build):
    for arm, executed in (("real_small", 8), ("raw", 32), ("wmrl", 32)):
        assert run(build(arm, arm, warmup=1), 1)[0]["executions"] == executed


def test_the_budget_is_never_passed(build):
    parts = build("real", budget=70)
    assert [row["executions"] for row in run(parts, 5)] == [32, 64, 64, 64, 64]  # 8 more would make 72
    wmrl = build("wmrl", "wmrl", budget=50, warmup=1)
    assert [row["executions"] for row in run(wmrl, 5)] == [32, 40, 48, 48, 48]
    assert wmrl.trainer.imagined == 24 + 24 + 32 + 32  # and training goes on in imagination


def test_what_is_left_of_the_budget_is_said(build):
    rows = run(build("wmrl", budget=20), 4)
    assert [row["budget_left"] for row in rows] == [12, 4, 4, 4]
    assert "budget_left" not in run(build("wmrl", "without"), 1)[0]


@pytest.mark.parametrize("arm", ["wmrl", "rectified", "fused"])
def test_uncertain_anchors_are_chosen_where_little_was_executed(build, arm):
    parts = build(arm, fraction=0.25, spending={"strategy": "uncertain", "uniform_share": 0.1})
    parts.task.count[: CONTEXTS // 2] = 1e6  # of these contexts the model is certain
    rows = run(parts, 12)
    unknown = [context.index >= CONTEXTS // 2 for _, context in parts.task.executed]
    assert len(unknown) == 12 and np.mean(unknown) > 0.6
    chance = {group.inclusion_probability for group in parts.trainer.step().executed}
    assert all(0 < p <= 1 for p in chance)
    assert all(
        row["executions"] == 8 * (i + 1) and row["imagined"] == 32 * (i + 1) for i, row in enumerate(rows)
    )


def test_gated_anchors_are_all_those_that_are_doubted(build):
    parts = build("wmrl", groups=4, spending={"strategy": "gate", "gate": 0.3})
    first = parts.trainer.step()
    assert first.metrics["executions"] == 32  # of nothing is anything known: sd 1/2
    parts.task.count[:] = 100
    assert parts.trainer.step().metrics["executions"] == 32  # now all is: sd 1/20
    assert len(parts.task.executed) == 4


def test_without_predictions_there_is_no_uncertainty_to_go_by(build):
    parts = build("real_small", spending={"strategy": "gate"})
    assert run(parts, 2)[-1]["executions"] == 16 and parts.trainer.imagined == 0


def test_the_share_adapts_to_costs_and_correlation(build):
    parts = build("fused", fraction="auto", groups=6, perfect=True)
    share = parts.trainer.share_rule
    rows = run(parts, 12)
    assert rows[0]["executions"] == 8  # a tenth of 6 groups
    assert rows[-1]["anchors/correlation"] == pytest.approx(1)
    assert rows[-1]["anchors/share"] == pytest.approx(0, abs=1e-3)  # a perfect model
    assert rows[-1]["executions"] == 12 * 8  # and the floor
    useless = {"moments": {"ee": 1.0, "pp": 1.0, "ep": 0.0}, "groups": 99}
    share.load_state_dict({**share.state_dict(), "correlation": useless})
    assert share.share == 1.0


def test_nothing_executed_has_no_mean(build):
    row = run(build("raw", perfect=True), 1)[0]
    assert row["executed_success"] is None
    assert 0 <= row["predicted_mean"] <= 1


def test_missing_scores_stay_out_of_means_and_gradients(build):
    parts = build("real", pays=lambda context, lever: NAN if lever == 0 else float(lever == 1))
    with pytest.warns(UserWarning, match="grader of task 'bandit'"):
        row = run(parts, 1)[0]
    scores = np.concatenate([group.executed for group in parts.ledger.groups()])
    assert np.isnan(scores).any()
    assert row["executed_success"] == np.nanmean(scores)
    assert row["correction/missing_members"] == np.isnan(scores).sum()
    assert all(value is None or np.isfinite(value) for value in row.values())
    assert torch.isfinite(parts.policy.logits).all()


def test_a_step_that_teaches_nothing_changes_nothing_and_says_so(build, caplog):
    parts = build("real", pays=lambda context, lever: 0.0)
    row = run(parts, 1)[0]
    assert row["policy/skipped"] == 1
    assert row["correction/degenerate_groups"] == 4
    assert torch.equal(parts.policy.logits, torch.zeros(CONTEXTS, LEVERS))
    assert "nothing to learn from this step" in caplog.text


def test_dead_anchors_do_not_drown_the_predicted_groups(build):
    parts = build("wmrl", pays=lambda context, lever: 0.0)  # a table that knows nothing yet says half for all
    parts.task.total, parts.task.count = np.tile([0.0, 1, 0, 0], (CONTEXTS, 1)), np.ones((CONTEXTS, LEVERS))
    row = run(parts, 1)[0]
    assert row["correction/degenerate_groups"] >= 1
    assert np.isfinite(row["correction/anchor/weight"])
    assert torch.isfinite(parts.policy.logits).all()


def test_a_stop_keeps_all_that_is_under_way_and_pays_for_nothing_twice(build):
    undisturbed = build("wmrl", "undisturbed", warmup=3)
    rows = run(undisturbed, 5)

    asked = []
    stopped = build("wmrl", "stopped", warmup=3, stop=lambda: bool(asked))
    assert run(stopped, 1) == rows[:1]
    # asked for while the first batch of two groups runs; a third and a fourth are then not started
    stopped.task.before = lambda step: asked.append(step)
    with pytest.raises(Interrupted, match="stopped in step 2"):
        stopped.trainer.step()
    assert len(stopped.task.executed) == 4 + 2
    assert [record["step"] for record in stopped.ledger.records()] == [0] * 4 + [1] * 2
    assert stopped.trainer.step_count == 1

    asked.clear()
    stopped.task.before = lambda step: None
    assert run(stopped, 4) == rows[1:]
    assert torch.equal(stopped.policy.logits, undisturbed.policy.logits)
    assert len(set(stopped.task.executed)) == len(stopped.task.executed) == len(stopped.ledger)


def test_a_stop_is_noticed_in_a_step_without_executions_too(build):
    parts = build("raw", perfect=True, stop=lambda: True)
    with pytest.raises(Interrupted):
        parts.trainer.step()
    assert parts.trainer.imagined == 0


class Broken(Exception):
    """What goes wrong in these tests."""


@pytest.mark.parametrize("where", ["execute", "predict", "learn"])
def test_a_step_that_broke_off_is_repeated_without_paying_twice(build, where):
    undisturbed = build("wmrl", "undisturbed", warmup=1, fraction=1.0)
    rows = run(undisturbed, 4)

    broken = build("wmrl", "broken", warmup=1, fraction=1.0)
    assert run(broken, 2) == rows[:2]
    state = copy.deepcopy([broken.policy.state_dict(), broken.trainer.optimizer.state_dict()])
    estimator, table = broken.trainer.estimator.state_dict(), copy.deepcopy(broken.task.__dict__)

    def fail(*_):
        raise Broken

    if where == "execute":  # in the second of two batches
        calls = []
        broken.task.before = lambda step: fail() if len(calls) else calls.append(step)
    else:
        setattr(broken.task, where, fail)
    with pytest.raises(Broken):
        broken.trainer.step()
    assert len(broken.ledger) == 8 + (2 if where == "execute" else 4)
    broken.ledger.close()

    again = build("wmrl", "broken", warmup=1, fraction=1.0)  # the same ledger, as a new process opens it
    again.policy.load_state_dict(state[0])
    again.trainer.optimizer.load_state_dict(state[1])
    again.trainer.estimator.load_state_dict(estimator)
    again.task.total, again.task.count = table["total"], table["count"]
    again.trainer.step_count, again.trainer.executions, again.trainer.imagined = 2, 64, 0
    assert run(again, 2) == rows[2:]
    assert torch.equal(again.policy.logits, undisturbed.policy.logits)
    assert (
        again.task.executed[: 2 if where == "execute" else 0]
        == undisturbed.task.executed[10:12][: 2 if where == "execute" else 0]
    )
    assert again.ledger.executions == again.trainer.executions == 4 * 32


def test_without_disk_space_nothing_is_executed(build, monkeypatch):
    parts = build("real")
    run(parts, 1)
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(LedgerFull, match="6.4 MB are needed.*1.0 MB are free.*resume"):  # 32 of 200 kB
        parts.trainer.step()
    assert len(parts.task.executed) == 4
    monkeypatch.undo()
    assert run(parts, 1)[0]["executions"] == 64


def test_a_context_drawn_twice_is_refused(build):
    parts = build("real")
    parts.task.sample_contexts = lambda n, rng: [Context("bandit", 1)] * n
    with pytest.raises(ValueError, match="a context twice"):
        parts.trainer.step()


def test_a_step_draws_by_its_number_alone(build):
    late, early = build("real", "late"), build("real", "early")
    late.trainer.step_count = 7
    late.trainer.step()
    assert [c for _, c in late.task.executed] == early.task.sample_contexts(4, rng(0, 7, "contexts"))


def test_every_part_of_a_step_is_timed(build):
    metrics = build("wmrl").trainer.step().metrics
    parts = {name.removeprefix("seconds/") for name in metrics if name.startswith("seconds/")}
    assert parts == {"execute", "imagine", "predict", "correction", "policy", "world_model"}
    assert all(metrics[f"seconds/{part}"] >= 0 for part in parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 0}, r"groups=0: must be at least 1"),
        ({"group_size": 1}, r"group_size=1: a group of one has no advantage; must be at least 2"),
        ({"warmup_steps": -1}, r"warmup_steps=-1: must be at least 0"),
    ],
)
def test_sizes_out_of_their_limits_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainerSettings(**settings)
    assert dataclasses.asdict(TrainerSettings())  # the defaults are within them
