"""One rollout for every world: probabilities worked by hand in a tiny world, and the simulator against itself."""

import numpy as np
import pytest
import torch

from wmrl_embodied.adapters.imagination import ImaginedWorld
from wmrl_embodied.adapters.rollout import Observation, Outcome, rollout
from wmrl_embodied.adapters.simulator import Perception, SimulatorWorld
from wmrl_embodied.core.seeding import generator
from wmrl_embodied.core.types import Context, collate
from wmrl_embodied.envs.metaworld import MetaWorldEnv, instructions
from wmrl_embodied.world_models.dynamics import DynamicsEnsemble, DynamicsSettings

BUTTON, SLIDE = "button-press-topdown-v3", "plate-slide-v3"
K, A = 2, 1


class Clock:
    """A world with given hazards (C, E, N): features show (chunk, row), proprioception the last action."""

    def __init__(self, hazard, already=None, predicts=True, taken=None):
        self.hazard = torch.as_tensor(hazard)
        self.predicts = predicts
        rows = self.hazard.shape[2]
        self.already = torch.zeros(rows, dtype=torch.bool) if already is None else torch.tensor(already)
        self.taken = taken or {}
        self.calls = []

    def observe(self, proprio):
        rows = len(self.already)
        shown = torch.stack([torch.full((rows,), float(len(self.calls))), torch.arange(float(rows))], 1)
        return Observation(shown, proprio, torch.full((rows, 3), 7))

    def start(self, contexts):
        assert len(contexts) == len(self.already)
        return self.observe(torch.zeros(len(contexts), 1)), self.already

    def step(self, action, running):
        chunk = len(self.calls)
        self.calls.append((action.clone(), running.clone()))
        taken = torch.full((len(action),), K)
        for (at, row), count in self.taken.items():
            if at == chunk:
                taken[row] = count
        return Outcome(self.observe(action[:, -1]), self.hazard[chunk], taken)


class Counting:
    """A policy whose k-th action of chunk c in row r is 100 r + 10 c + k, plus the noise; its log-probability is minus
    the action.
    """

    def act(self, features, proprio, tokens, noise=None, replay=None):
        chunk, row = features[:, :1, None], features[:, 1:, None]
        action = 100 * row + 10 * chunk + torch.arange(float(K))[None, :, None]
        action = action if noise is None else action + noise
        action = action if replay is None else torch.where(replay.isnan(), action, replay)
        return action, -action.sum(-1)


def contexts(count):
    return [Context("clock", row) for row in range(count)]


# By hand


def test_scores_and_masks_are_survival_probabilities():
    """Row 0: judges see hazards (1/2, 0), (1/2, 1/4), (1, 1/2); row 1 is never successful."""
    hazard = [[[0.5, 0.0], [0.0, 0.0]], [[0.5, 0.0], [0.25, 0.0]], [[1.0, 0.0], [0.5, 0.0]]]
    first, never = rollout(Counting(), Clock(hazard), contexts(2), 3, None)
    # Reached with probability 1, mean(1/2, 1), mean(1/4, 3/4).
    assert first.mask.tolist() == pytest.approx([1, 1, 0.75, 0.75, 0.5, 0.5])
    # Success 1 and 1 - 3/8.
    assert first.predicted == pytest.approx((1 + 0.625) / 2)
    assert first.predicted_variance == pytest.approx(0.1875**2)
    assert never.mask.tolist() == [1.0] * 6
    assert (never.predicted, never.predicted_variance) == (0.0, 0.0)
    assert np.isnan([first.executed, never.executed]).all()


def test_decisions_after_a_certain_success_do_not_exist():
    hazard = [[[0.0, 0.0]], [[1.0, 0.0]], [[0.7, 1.0]], [[0.7, 0.3]]]
    world = Clock(hazard)
    first, second = rollout(Counting(), world, contexts(2), 4, None)
    assert first.mask.tolist() == [1.0] * 4
    assert second.mask.tolist() == [1.0] * 6
    assert len(first.steps["action"]) == 2
    assert first.old_log_prob.tolist() == [0.0, -1.0, -10.0, -11.0]
    assert [running.tolist() for _, running in world.calls] == [[True, True], [True, True], [False, True]]
    assert first.predicted == second.predicted == 1.0


def test_with_judges_that_disagree_the_attempt_goes_on():
    """Only when every judge is sure is it over."""
    world = Clock([[[1.0], [0.5]], [[0.9], [0.5]]])
    (attempt,) = rollout(Counting(), world, contexts(1), 2, None)
    assert attempt.mask.tolist() == pytest.approx([1, 1, 0.25, 0.25])
    assert attempt.predicted == pytest.approx((1 + 0.75) / 2)


def test_executed_and_predicted_go_into_their_own_places():
    hazard = [[[0.0, 0.0]], [[1.0, 0.0]]]
    done, failed = rollout(Counting(), Clock(hazard, predicts=False), contexts(2), 2, None)
    assert (done.executed, failed.executed) == (1.0, 0.0)
    assert np.isnan([done.predicted, done.predicted_variance, failed.predicted]).all()
    np.testing.assert_array_equal(done.info["final_features"], [2.0, 0.0])
    np.testing.assert_array_equal(failed.info["final_proprio"], [111.0])


def test_case_success_at_reset_has_no_score_and_no_decisions():
    world = Clock(torch.full((2, 2, 3), 0.5), already=[False, True, False])
    attempts = rollout(Counting(), world, contexts(3), 2, None)
    assert [attempt.info["already_successful"] for attempt in attempts] == [False, True, False]
    assert np.isnan([attempts[1].predicted, attempts[1].executed, attempts[1].predicted_variance]).all()
    assert len(attempts[1].mask) == len(attempts[1].old_log_prob) == len(attempts[1].steps["action"]) == 0
    assert attempts[0].predicted == attempts[2].predicted == pytest.approx(0.75)
    assert all(running.tolist() == [True, False, True] for _, running in world.calls)
    batch = collate(attempts)
    assert batch["mask"].sum(1).tolist() == pytest.approx([3, 0, 3])


def test_case_success_at_reset_of_every_row():
    attempts = rollout(Counting(), Clock(torch.zeros(3, 1, 2), already=[True, True]), contexts(2), 3, None)
    assert [len(attempt.mask) for attempt in attempts] == [0, 0]
    assert np.isnan([attempt.predicted for attempt in attempts]).all()


def test_actions_that_were_not_taken_weigh_nothing():
    """A success within a chunk: the rest of the chunk was never sent."""
    world = Clock([[[0.0]], [[1.0]]], predicts=False, taken={(1, 0): 1})
    (attempt,) = rollout(Counting(), world, contexts(1), 2, None)
    assert attempt.mask.tolist() == [1, 1, 1, 0]
    assert attempt.executed == 1.0


def test_what_is_recorded_is_what_was_seen_and_sent():
    world = Clock(torch.zeros(3, 1, 2))
    noise = torch.arange(2.0 * 3 * K).view(2, 3 * K, A) / 1000
    attempts = rollout(Counting(), world, contexts(2), 3, noise)
    for row, attempt in enumerate(attempts):
        sent = torch.stack([action[row] for action, _ in world.calls])
        torch.testing.assert_close(attempt.steps["action"], sent, rtol=0, atol=0)
        expected = 100 * row + torch.tensor([0.0, 1, 10, 11, 20, 21]) + noise[row, :, 0]
        torch.testing.assert_close(attempt.steps["action"].flatten(), expected)
        assert attempt.steps["features"].tolist() == [[chunk, row] for chunk in range(3)]
        torch.testing.assert_close(attempt.steps["proprio"][1:], sent[:-1, -1], rtol=0, atol=0)
        assert attempt.steps["proprio"][0].tolist() == [0.0]
        assert attempt.steps["tokens"].tolist() == [7, 7, 7]
        torch.testing.assert_close(attempt.old_log_prob, -sent.flatten(), rtol=0, atol=0)


def test_replay_takes_the_executed_actions_then_the_policys_own():
    """Row 0 was executed for one chunk, row 1 for two, row 2 for none because it was done at the start."""
    real = Clock([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]], already=[False, False, True], predicts=False)
    noise = torch.full((3, 2 * K, A), 0.5)
    executed = rollout(Counting(), real, contexts(3), 2, noise)
    assert [len(attempt.steps["action"]) for attempt in executed] == [1, 2, 0]

    imagined = Clock(torch.full((3, 1, 3), 0.5), already=[False, False, True])
    guesses = rollout(Counting(), imagined, contexts(3), 3, None, replay=executed)
    sent = torch.stack([action for action, _ in imagined.calls], 1)[..., 0]
    assert sent[0].tolist() == [[0.5, 1.5], [10, 11], [20, 21]]
    assert sent[1].tolist() == [[100.5, 101.5], [110.5, 111.5], [120, 121]]
    assert [guess.predicted for guess in guesses[:2]] == pytest.approx([0.875, 0.875])
    assert np.isnan(guesses[2].predicted)


def test_replay_leaves_the_executed_attempts_as_they_are():
    executed = rollout(Counting(), Clock(torch.zeros(2, 1, 1), predicts=False), contexts(1), 2, None)
    before = {name: value.clone() for name, value in executed[0].steps.items()}
    rollout(Counting(), Clock(torch.full((2, 1, 1), 0.5)), contexts(1), 2, None, replay=executed)
    for name, value in before.items():
        torch.testing.assert_close(executed[0].steps[name], value, rtol=0, atol=0)
    assert np.isnan(executed[0].predicted)


def test_trajectories_do_not_share_memory():
    attempts = rollout(Counting(), Clock(torch.zeros(2, 1, 2)), contexts(2), 2, None)
    attempts[0].steps["action"].zero_()
    attempts[0].mask.zero_()
    assert attempts[1].steps["action"].any()
    assert attempts[1].mask.all()


def test_stop_at_success_false_acts_on_but_later_decisions_never_count():
    world = Clock([[[1.0]], [[0.0]], [[0.0]]], predicts=False)
    (attempt,) = rollout(Counting(), world, contexts(1), 3, None, stop_at_success=False)
    assert len(world.calls) == 3
    assert all(running.tolist() == [True] for _, running in world.calls)
    assert attempt.mask.tolist() == [1, 1]
    assert attempt.executed == 1.0


# The simulator


CHUNKS = 6


@pytest.fixture(scope="module")
def parts(dataset):
    from wmrl_embodied.policies.cloning import new_policy

    policy, preprocessor, _ = new_policy(dataset, seed=1)
    return policy.eval(), Perception(policy, preprocessor)


@pytest.fixture(scope="module")
def rows():
    return [
        Context(task, index, instructions()[task]) for task, index in [(BUTTON, 1), (SLIDE, 2), (SLIDE, 3)]
    ]


def attempt(parts, pool, rows, seed=0, **world):
    policy, perception = parts
    noise = policy.exploration_noise(len(rows), CHUNKS, generator(seed, 0, "test"))
    return rollout(policy, SimulatorWorld(pool, perception, **world), rows, CHUNKS, noise)


@pytest.fixture(scope="module")
def executed(parts, pool, rows):
    return attempt(parts, pool, rows)


def assert_same_attempt(one, other):
    assert one.steps.keys() == other.steps.keys()
    for name, value in one.steps.items():
        torch.testing.assert_close(other.steps[name], value, rtol=0, atol=0)
    torch.testing.assert_close(other.old_log_prob, one.old_log_prob, rtol=0, atol=0)
    torch.testing.assert_close(other.mask, one.mask, rtol=0, atol=0)


def test_simulator_repeats_itself(parts, pool, lone_worker, rows, executed):
    for again in (attempt(parts, pool, rows), attempt(parts, lone_worker, rows)):
        for one, other in zip(executed, again, strict=True):
            assert_same_attempt(one, other)
            assert one.executed == other.executed
            np.testing.assert_array_equal(one.info["final_proprio"], other.info["final_proprio"])
    different = attempt(parts, pool, rows, seed=1)
    assert not torch.equal(different[0].steps["action"], executed[0].steps["action"])


def test_simulator_in_the_place_of_the_model_predicts_what_is_executed(parts, pool, rows, executed):
    predicted = attempt(parts, pool, rows, predicts=True)
    for one, other in zip(executed, predicted, strict=True):
        assert_same_attempt(one, other)
        assert other.predicted == one.executed
        assert other.predicted_variance == 0.0
        assert np.isnan(other.executed)


def test_executed_actions_replayed_give_the_executed_states(parts, pool, rows, executed):
    """Whoever replays them, also without exploration."""
    policy, perception = parts
    again = rollout(policy, SimulatorWorld(pool, perception), rows, CHUNKS, None, replay=executed)
    for one, other in zip(executed, again, strict=True):
        for name in ("features", "proprio", "action"):
            torch.testing.assert_close(other.steps[name], one.steps[name], rtol=0, atol=0)
        assert one.executed == other.executed


def test_recorded_actions_are_those_that_moved_the_robot(parts, rows, executed):
    """Case action-limits: the action that is trained on is the one that was sent."""
    _, perception = parts
    for context, done in zip(rows, executed, strict=True):
        assert done.steps["action"].abs().max() <= 1
        env = MetaWorldEnv(context.task)
        observation, _ = env.reset(seed=context.index)
        for chunk, action in enumerate(done.steps["action"]):
            seen = perception(
                observation["pixels"][None], observation["agent_pos"][None], [context.instruction]
            )
            torch.testing.assert_close(seen.proprio[0], done.steps["proprio"][chunk], rtol=0, atol=0)
            torch.testing.assert_close(seen.features[0], done.steps["features"][chunk], rtol=1e-4, atol=1e-5)
            observation, *_ = env.step_chunk(action.numpy())
        env.close()
        last = perception(observation["pixels"][None], observation["agent_pos"][None], [context.instruction])
        np.testing.assert_array_equal(last.proprio[0].numpy(), done.info["final_proprio"])


def test_case_ratio_one_for_executed_attempts(parts, executed):
    """As the policy update will see them: padded, together, before any step. To 1e-5 of their size, which is what is
    left of float32 when the rollout computed them chunk by chunk.
    """
    policy, _ = parts
    batch = collate(executed)
    with torch.no_grad():
        new = policy.log_prob(batch) * batch["mask"]
    torch.testing.assert_close(new, batch["old_log_prob"] * batch["mask"], rtol=1e-5, atol=1e-5)


def test_scores_and_lengths_of_executed_attempts_agree(executed_groups):
    """An attempt that succeeded ends there; one that failed runs to the horizon."""
    attempts = [t for group in executed_groups for t in group.trajectories]
    assert {t.executed for t in attempts if t.executed == t.executed} == {0.0, 1.0}
    for t in attempts:
        chunks = len(t.steps["action"])
        taken = t.mask.view(chunks, -1).sum(1)
        assert taken[:-1].tolist() == [5.0] * (chunks - 1)
        assert 1 <= taken[-1] <= 5
        if t.executed == 0.0:
            assert chunks == 14
            assert taken[-1] == 5


def test_simulator_with_no_row_running_stands_still(parts, pool, rows):
    """As when success is true in every row at the start."""
    world = SimulatorWorld(pool, parts[1], film=True)
    first, already = world.start(rows)
    assert not already.any()
    outcome = world.step(torch.ones(3, 5, 4), torch.zeros(3, dtype=torch.bool))
    torch.testing.assert_close(outcome.observation.proprio, first.proprio, rtol=0, atol=0)
    assert not outcome.hazard.any()
    assert not outcome.actions_taken.any()


def test_film_holds_the_frame_before_every_chunk_and_the_last(parts, pool, rows):
    policy, perception = parts
    world = SimulatorWorld(pool, perception, film=True)
    attempts = rollout(policy, world, rows, 2, None)
    assert len(world.frames) == 3
    assert all(frame.shape == (3, 64, 64, 3) for frame in world.frames)
    env = MetaWorldEnv(rows[0].task)
    np.testing.assert_array_equal(env.reset(seed=rows[0].index)[0]["pixels"], world.frames[0][0])
    env.step_chunk(attempts[0].steps["action"][0].numpy())
    np.testing.assert_array_equal(env.render(), world.frames[1][0])
    env.close()


def test_success_once_and_at_the_end(pool, parts, executed_groups, scripted):
    """Acted on to the horizon: a press is let go again, once stays once."""
    group = executed_groups[0]
    done = max(group.trajectories, key=lambda t: t.executed == 1.0)
    assert done.executed == 1.0
    plan = torch.cat([done.steps["action"], torch.zeros(14 - len(done.steps["action"]), 5, 4)])[None]
    plan[:, len(done.steps["action"]) :, :, 2] = 1.0  # up and away
    world = SimulatorWorld(pool, parts[1], stop_at_success=False)
    (again,) = rollout(scripted(plan), world, [group.context], 14, None, stop_at_success=False)
    assert world.success_once.tolist() == [True]
    assert world.success_at_end.shape == (1,)
    assert again.executed == 1.0
    assert len(again.steps["action"]) == len(done.steps["action"])


# The learned model


def test_imagined_attempts_follow_the_models_own_hazards(parts, executed):
    """Mask and score are those of stepping the ensemble by hand with the recorded actions."""
    policy, _ = parts
    start = Observation(
        *(torch.stack([done.steps[name][0] for done in executed]) for name in ("features", "proprio")),
        torch.stack([done.steps["tokens"] for done in executed]),
    )
    model = DynamicsEnsemble(
        start.features.shape[1], 4, (5, 4), len(policy.config.vocabulary), DynamicsSettings(2, 16, 2)
    )
    already = torch.tensor([False, True, False])
    world = ImaginedWorld(model, lambda _: (start, already))
    noise = policy.exploration_noise(3, CHUNKS, generator(0, 0, "test"))
    imagined = rollout(policy, world, contexts(3), CHUNKS, noise)
    for row in (0, 2):
        attempt = imagined[row]
        with torch.no_grad():
            belief = model.start(*(value[[row]] for value in (start.features, start.proprio, start.tokens)))
            survival = torch.ones(2)
            for chunk, action in enumerate(attempt.steps["action"]):
                seen = model.seen(belief)[0] if chunk else start.features[row]
                torch.testing.assert_close(attempt.steps["features"][chunk], seen, atol=1e-5, rtol=1e-4)
                expected = survival.mean().expand(5)
                torch.testing.assert_close(attempt.mask.view(-1, 5)[chunk], expected, atol=1e-5, rtol=1e-4)
                belief, logit = model.step(belief, action[None])
                survival = survival * (1 - torch.sigmoid(logit[:, 0]))
        assert len(attempt.steps["action"]) == CHUNKS
        assert attempt.predicted == pytest.approx((1 - survival).mean().item(), abs=1e-5)
        assert attempt.predicted_variance == pytest.approx((1 - survival).var(correction=0).item(), abs=1e-6)
        assert "final_features" not in attempt.info
    assert np.isnan(imagined[1].predicted)
    assert len(imagined[1].mask) == 0
