"""The dynamics ensemble: a hand that moves as it is told, members that know nothing of each other."""

import pytest
import torch

from wmrl_embodied.world_models.dynamics import DynamicsEnsemble, EnsembleLinear, FreeMotion

# A hand in free space


def test_free_motion_by_hand():
    """One axis, gain 2, rate 1/2, limits [-1, 3]: 0 -> command 2, hand 1 -> command 3 (of 4), hand 2."""
    motion = FreeMotion(1, 1)
    with torch.no_grad():
        motion.gain.fill_(2.0), motion.rate.fill_(0.0), motion.low.fill_(-1.0), motion.high.fill_(3.0)
    command, hand = motion(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 2, 1))
    assert (command.item(), hand.item()) == (3.0, 2.0)
    command, hand = motion(command, hand, torch.tensor([[[-10.0]]]))
    assert (command.item(), hand.item()) == (-1.0, 0.5)


def test_gain_is_found_by_least_squares():
    generator = torch.Generator().manual_seed(0)
    gain = torch.tensor([[0.5, 0.0, 0.1], [0.0, -1.0, 0.0]])
    actions = torch.randn(30, 5, 2, generator=generator)
    motion = FreeMotion(2, 3)
    motion.fit_gain(actions, actions.sum(1) @ gain)
    torch.testing.assert_close(motion.gain.detach(), gain, atol=1e-5, rtol=1e-4)


def hand_paths(attempts):
    """Start (N, P), executed actions (N, C, K, A), the hand after every chunk (N, C, P) and which were run (N, C)."""
    chunks = max(len(attempt.steps["action"]) for attempt in attempts)
    rows = []
    for attempt in attempts:
        path = torch.cat([attempt.steps["proprio"], torch.as_tensor(attempt.info["final_proprio"])[None]])
        missing = chunks - len(attempt.steps["action"])
        action = torch.cat(
            [attempt.steps["action"], torch.zeros(missing, *attempt.steps["action"].shape[1:])]
        )
        after = torch.cat([path[1:], path[-1:].expand(missing, -1)])
        rows.append((path[0], action, after, torch.arange(chunks) < len(attempt.steps["action"])))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def test_free_motion_fits_real_hands(attempts):
    """From the first position and the actions alone, over whole attempts and on attempts it was not fitted to."""
    start, action, path, was_run = hand_paths(attempts)
    fitted = torch.arange(len(start)) % 4 != 0
    motion = FreeMotion(action.shape[-1], start.shape[-1])

    def imagine(rows):
        command = hand = start[rows]
        places = []
        for chunk in action[rows].unbind(1):
            command, hand = motion(command, hand, chunk)
            places.append(hand)
        return torch.stack(places, 1)

    def error(rows, imagined):
        return (imagined - path[rows])[..., :3].square().mean(-1)[was_run[rows]].mean()

    before = torch.cat([start[fitted, None], path[fitted, :-1]], 1)
    run = was_run[fitted]
    motion.fit_gain(action[fitted][run], (path[fitted] - before)[run])
    optimizer = torch.optim.Adam(motion.parameters(), lr=0.03)
    for _ in range(150):
        loss = error(fitted, imagine(fitted))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        stays = error(~fitted, start[~fitted, None].expand_as(path[~fitted]))
        learned = error(~fitted, imagine(~fitted))
    assert learned < 0.05 * stays


# The ensemble


def inputs(model, attempts, count=4, chunks=2):
    shortest = [a for a in attempts if len(a.steps["action"]) >= chunks][:count]
    first = [torch.stack([a.steps[name][0] for a in shortest]) for name in ("features", "proprio")]
    tokens = torch.stack([a.steps["tokens"] for a in shortest])
    return (*first, tokens), torch.stack([a.steps["action"][:chunks] for a in shortest])


def imagine(model, first, actions):
    belief, logits = model.start(*first), []
    for action in actions.unbind(1):
        belief, logit = model.step(belief, action)
        logits.append(logit)
    return belief, torch.stack(logits, -1)


def test_shapes(make_model, attempts):
    model = make_model(members=3, width=24, landmarks=5)
    first, actions = inputs(model, attempts)
    start = model.start(*first)
    belief, logits = imagine(model, first, actions)
    features, proprio = first[0].shape[-1], first[1].shape[-1]
    for state in (start, belief):
        assert state.hidden.shape == state.scene.shape == (3, 4, 24)
        assert state.features.shape == state.first_features.shape == (3, 4, features)
        assert state.proprio.shape == (3, 4, proprio)
        assert state.landmarks.shape == (3, 4, 5, 3)
        assert state.commanded.shape == state.free.shape == (4, proprio)
    assert logits.shape == (3, 4, 2)
    assert model.seen(belief).shape == (4, features)


def test_belief_starts_at_the_first_observation(make_model, attempts):
    model = make_model()
    first, _ = inputs(model, attempts)
    start = model.start(*first)
    torch.testing.assert_close(start.proprio, first[1].expand(3, -1, -1))
    torch.testing.assert_close(model.seen(start), first[0])


def test_success_during_a_chunk_is_rare_before_anything_is_learned(make_model, attempts):
    model = make_model()
    _, logits = imagine(model, *inputs(model, attempts))
    assert torch.sigmoid(logits).max() < 0.3


def test_features_are_read_and_shown_on_the_policys_scale(make_model, attempts):
    model = make_model()
    first, actions = inputs(model, attempts)
    sample = torch.cat([attempt.steps["features"] for attempt in attempts])
    model.standardise_features(sample)
    start = model.start(*first)
    torch.testing.assert_close(start.features[0], (first[0] - sample.mean(0)) / sample.std(0).clamp(min=1e-3))
    torch.testing.assert_close(model.seen(start), first[0], atol=1e-5, rtol=1e-5)
    constant = torch.zeros(4, sample.shape[1])  # a keypoint that never moved must not blow up
    model.standardise_features(constant)
    assert model.start(*first).features.isfinite().all()


def test_rows_do_not_see_each_other(make_model, attempts):
    model = make_model()
    first, actions = inputs(model, attempts)
    together, logits = imagine(model, first, actions)
    for row in range(4):
        alone, logit = imagine(model, [value[[row]] for value in first], actions[[row]])
        torch.testing.assert_close(logit[:, 0], logits[:, row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone.proprio[:, 0], together.proprio[:, row], atol=1e-5, rtol=1e-5)


def test_members_are_independent(make_model, attempts):
    """Weights of one member reach its own outputs only; members start apart."""
    model = make_model()
    first, actions = inputs(model, attempts)
    before, logits = imagine(model, first, actions)
    assert logits.std(0).min() > 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, EnsembleLinear):
                module.weight[1] += 0.1
                module.bias[1] += 0.1
    after, changed = imagine(model, first, actions)
    for one, other in ((logits, changed), (before.proprio, after.proprio), (before.features, after.features)):
        torch.testing.assert_close(other[[0, 2]], one[[0, 2]], rtol=0, atol=0)
        assert (other[1] - one[1]).abs().max() > 1e-3


def test_gradients_of_a_member_stay_with_it(make_model, attempts):
    model = make_model()
    belief, logits = imagine(model, *inputs(model, attempts))
    (logits[2].sum() + belief.proprio[2].sum() + belief.features[2].sum()).backward()
    for module in model.modules():
        if isinstance(module, EnsembleLinear):
            assert not module.weight.grad[:2].any()
    assert model.scene_in.weight.grad[2].any()


def test_ensemble_linear_is_one_affine_map_a_member():
    layer = EnsembleLinear(2, 3, 4, torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 3)
    expected = torch.stack([x[m] @ layer.weight[m] + layer.bias[m] for m in range(2)])
    torch.testing.assert_close(layer(x), expected)


def test_seed_decides_the_weights(make_model):
    torch.rand(5)
    one, same, other = make_model(seed=4), make_model(seed=4), make_model(seed=5)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name], value, rtol=0, atol=0)
    assert not torch.equal(one.scene_in.weight, other.scene_in.weight)
    assert not torch.equal(one.words, other.words)


def test_instruction_and_every_action_matter(make_model, attempts):
    model = make_model()
    first, actions = inputs(model, attempts)
    _, reference = imagine(model, first, actions)
    features, proprio, tokens = first
    _, told_else = imagine(model, (features, proprio, torch.zeros_like(tokens)), actions)
    assert not torch.equal(told_else, reference)
    for chunk in range(2):
        for place in range(actions.shape[2]):
            moved = actions.clone()
            moved[:, chunk, place] += 0.5
            _, changed = imagine(model, first, moved)
            assert not torch.equal(changed[..., chunk], reference[..., chunk])
            torch.testing.assert_close(changed[..., :chunk], reference[..., :chunk], rtol=0, atol=0)


def test_padding_words_say_nothing():
    model = DynamicsEnsemble(2, 3, (1, 1), vocabulary=4)
    first = torch.zeros(1, 2), torch.zeros(1, 3)
    short = model.start(*first, torch.tensor([[2, 3]]))
    padded = model.start(*first, torch.tensor([[2, 3, 0, 0]]))
    torch.testing.assert_close(padded.scene, short.scene)
    assert model.start(*first, torch.tensor([[0, 0]])).scene.isfinite().all()


@pytest.mark.parametrize("extreme", [1.0, -1.0])
def test_long_extreme_attempts_stay_finite(make_model, attempts, extreme):
    model = make_model()
    first, actions = inputs(model, attempts)
    belief, logits = imagine(model, first, torch.full_like(actions[:, :1], extreme).expand(-1, 100, -1, -1))
    assert logits.isfinite().all()
    assert belief.proprio.isfinite().all()
