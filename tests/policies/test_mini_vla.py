"""MiniVLA: exact log-probabilities of what was sent, checkpoints that act the same, words it does not know."""

import math

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_TOKENS, OBS_STATE

from wmrl_embodied.core.policy_gradient import UpdateSettings, update_policy
from wmrl_embodied.core.types import Trajectory, collate
from wmrl_embodied.envs.metaworld import instructions
from wmrl_embodied.policies.mini_vla import MiniVLAConfig, MiniVLAPolicy, make_mini_vla_pre_post_processors
from wmrl_embodied.policies.mini_vla.configuration_mini_vla import features_for
from wmrl_embodied.policies.mini_vla.modeling_mini_vla import clipped_gaussian_log_prob
from wmrl_embodied.policies.mini_vla.processor_mini_vla import InstructionWords, build_vocabulary, words

VOCABULARY = build_vocabulary(["press the button", "push the puck to the goal"])
STATS = {OBS_STATE: {"mean": torch.tensor([0.0, 0.6, 0.2, 0.5]), "std": torch.tensor([0.1, 0.1, 0.1, 0.3])}}


def configuration(**overrides):
    return MiniVLAConfig(
        **features_for(32, 4, 4),
        **{"vocabulary": VOCABULARY, "device": "cpu", "keypoints": 8, "width": 32, **overrides},
    )


def small(seed=0, **overrides):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MiniVLAPolicy(configuration(**overrides)).eval()


@pytest.fixture(scope="module")
def policy():
    return small()


def frames(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "observation.image": torch.rand(count, 3, 32, 32, generator=generator),
        OBS_STATE: torch.rand(count, 4, generator=generator),
        "task": ["press the button", "push the puck to the goal"] * (count // 2)
        + ["press the button"] * (count % 2),
    }


def prepared(count, seed=0):
    return make_mini_vla_pre_post_processors(configuration(), STATS)[0](frames(count, seed))


def decisions(policy, attempts, chunks, seed=0, std=None):
    """What a rollout stores, with actions drawn from the policy."""
    generator = torch.Generator().manual_seed(seed)
    batch = prepared(attempts * chunks, seed)
    features = policy.encode(batch["observation.image"]).unflatten(0, (attempts, chunks))
    proprio = batch[OBS_STATE].unflatten(0, (attempts, chunks))
    tokens = batch[OBS_LANGUAGE_TOKENS].unflatten(0, (attempts, chunks))[:, 0]
    shape = policy.trunk.action_shape
    noise = torch.randn(attempts * chunks, *shape, generator=generator)
    with torch.no_grad():
        action, _ = policy.act(
            features.flatten(0, 1), proprio.flatten(0, 1), tokens.repeat_interleave(chunks, 0), noise
        )
    return {
        "features": features,
        "proprio": proprio,
        "tokens": tokens,
        "action": action.unflatten(0, (attempts, chunks)),
    }


# Log-probabilities


def test_density_inside_the_limits_is_the_gaussians():
    action = torch.linspace(-0.99, 0.99, 41)
    for mean, std in ((0.0, 0.2), (0.8, 0.05), (-1.5, 0.7)):
        expected = torch.distributions.Normal(mean, std).log_prob(action)
        got = clipped_gaussian_log_prob(action, torch.full_like(action, mean), std)
        torch.testing.assert_close(got, expected)


def test_a_limit_has_the_mass_beyond_it():
    normal = torch.distributions.Normal(torch.tensor(0.7), 0.2)
    limit, mean = torch.tensor([1.0, -1.0]), torch.tensor([0.7, 0.7])
    got = clipped_gaussian_log_prob(limit, mean, 0.2).exp()
    torch.testing.assert_close(got[0], 1 - normal.cdf(torch.tensor(1.0)))
    assert got[1] < 1e-15


@pytest.mark.parametrize("std", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("mean", [-1.3, 0.0, 0.7, 1.0])
def test_probability_of_everything_that_can_be_sent_is_one(mean, std):
    inside = torch.linspace(-1, 1, 40_001, dtype=torch.float64)[1:-1]
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64)

    def density(action):
        return clipped_gaussian_log_prob(action, torch.full_like(action, mean), std).exp()

    total = torch.trapezoid(density(inside), inside) + density(ends).sum()
    assert float(total) == pytest.approx(1.0, abs=1e-3)


def test_gradient_is_finite_however_far_the_mean_is():
    mean = torch.tensor([60.0, -60.0, 60.0, 0.0, 1.0], requires_grad=True)
    action = torch.tensor([1.0, 1.0, 0.5, -1.0, 1.0])
    log_prob = clipped_gaussian_log_prob(action, mean, 0.2)
    assert log_prob.isfinite().all()
    log_prob.sum().backward()
    assert mean.grad.isfinite().all()
    assert mean.grad[1] > 0  # towards the action that was sent


def test_log_prob_sums_the_dimensions_of_every_action(policy):
    batch = decisions(policy, attempts=2, chunks=3)
    batch["action"] = 0.9 * batch["action"].clamp(-1, 1)  # none at a limit
    with torch.no_grad():
        got = policy.log_prob(batch)
        assert got.shape == (2, 3 * 5)
        for attempt in range(2):
            for chunk in range(3):
                mean = policy.action_mean(
                    batch["features"][attempt, chunk][None],
                    batch["proprio"][attempt, chunk][None],
                    batch["tokens"][attempt][None],
                )[0]
                normal = torch.distributions.Normal(mean, policy.config.action_std)
                expected = normal.log_prob(batch["action"][attempt, chunk]).sum(-1)
                torch.testing.assert_close(
                    got[attempt, 5 * chunk : 5 * chunk + 5], expected, atol=1e-5, rtol=1e-5
                )


def test_case_ratio_one(policy):
    """Old and new log-probabilities agree to 1e-5 before an update, whatever batch they are computed in."""
    batch = decisions(policy, attempts=6, chunks=14)
    with torch.no_grad():
        together = policy.log_prob(batch)
        policy.train()  # no dropout, no batch statistics
        one_by_one = torch.cat([policy.log_prob({k: v[[row]] for k, v in batch.items()}) for row in range(6)])
        reverse = policy.log_prob({k: v.flip(0) for k, v in batch.items()}).flip(0)
        policy.eval()
        shorter = policy.log_prob({k: v if k == "tokens" else v[:, :3] for k, v in batch.items()})
    for other in (one_by_one, reverse):
        assert (other - together).abs().max() < 1e-5
    assert (shorter - together[:, :15]).abs().max() < 1e-5


def trajectories(policy, batch, advantage_of):
    with torch.no_grad():
        log_prob = policy.log_prob(batch)
    members = []
    for row in range(len(log_prob)):
        steps = {name: value[row] for name, value in batch.items()}
        members.append(Trajectory(steps, log_prob[row], torch.ones_like(log_prob[row])))
    return members, [advantage_of(row) for row in range(len(log_prob))]


def test_an_update_raises_the_probability_of_what_did_better_and_leaves_vision_alone():
    """Case ratio-one, second half: with more epochs and a high learning rate something is clipped."""
    policy = small()
    policy.freeze_vision()
    batch = decisions(policy, attempts=8, chunks=2)
    members, advantages = trajectories(policy, batch, lambda row: 1.0 if row % 2 else -1.0)
    vision = {name: value.clone() for name, value in policy.vision.state_dict().items()}
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    metrics = update_policy(
        policy, small(), members, advantages, optimizer, UpdateSettings(epochs=4), torch.Generator()
    )
    with torch.no_grad():
        gain = policy.log_prob(batch) - collate(members)["old_log_prob"]
    assert gain[1::2].mean() > gain[::2].mean()
    assert metrics["clip_fraction"] > 0
    for name, value in policy.vision.state_dict().items():
        torch.testing.assert_close(value, vision[name], rtol=0, atol=0)


def test_the_gradient_of_the_last_layer_is_that_of_autograd(policy):
    batch = decisions(policy, attempts=3, chunks=2)
    batch["action"][0, 0, 0] = 1.0  # at a limit
    batch["mask"] = torch.rand(3, 10, generator=torch.Generator().manual_seed(0))
    gradient = policy.log_prob_gradient(batch)
    weight, bias = policy.trunk.head[1].weight, policy.trunk.head[1].bias
    for row in range(3):
        log_prob = (policy.log_prob(batch) * batch["mask"])[row].sum()
        by_weight, by_bias = torch.autograd.grad(log_prob, (weight, bias))
        expected = torch.cat([by_weight.T, by_bias[None]]).flatten()
        torch.testing.assert_close(gradient[row], expected, atol=1e-3, rtol=1e-4)


# Acting


def test_actions_stay_within_the_limits_and_equal_noise_gives_equal_actions(policy):
    batch = prepared(4)
    arguments = (policy.encode(batch["observation.image"]), batch[OBS_STATE], batch[OBS_LANGUAGE_TOKENS])
    noise = 20 * torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sent, _ = policy.act(*arguments, noise)
        torch.testing.assert_close(policy.act(*arguments, noise)[0], sent, rtol=0, atol=0)
        torch.testing.assert_close(policy.act(*arguments)[0], policy.act(*arguments, 0 * noise)[0])
    assert sent.abs().max() == 1


def test_acting_says_what_log_prob_says_also_of_replayed_actions(policy):
    attempts, chunks = 3, 2
    batch = decisions(policy, attempts, chunks)
    replay = batch["action"].clone()
    replay[1] = torch.nan  # there the policy goes on by itself
    with torch.no_grad():
        sent, log_prob = policy.act(
            batch["features"].flatten(0, 1),
            batch["proprio"].flatten(0, 1),
            batch["tokens"].repeat_interleave(chunks, 0),
            None,
            replay.flatten(0, 1),
        )
        expected = policy.log_prob({**batch, "action": sent.unflatten(0, (attempts, chunks))})
    torch.testing.assert_close(log_prob.reshape(attempts, -1), expected, atol=1e-5, rtol=1e-5)
    same = sent.unflatten(0, (attempts, chunks))[[0, 2]] == batch["action"][[0, 2]]
    assert same.all() and not sent.isnan().any()


def test_exploration_noise_is_standard_normal_and_correlated_as_configured():
    policy = small(noise_correlation=0.8)
    noise = policy.exploration_noise(2000, 3, torch.Generator().manual_seed(0))
    assert noise.shape == (2000, 3 * 5, 4)
    assert noise.std(0).sub(1).abs().max() < 0.06  # stationary: from the first action on
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean(0)
    assert neighbours.sub(0.8).abs().max() < 0.08
    again = policy.exploration_noise(2000, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(again, noise, rtol=0, atol=0)
    white = small(noise_correlation=0.0).exploration_noise(2000, 3, torch.Generator().manual_seed(0))
    assert (white[:, 1:] * white[:, :-1]).mean(0).abs().max() < 0.08


def test_select_action_works_through_a_chunk_then_looks_again():
    policy = small(n_action_steps=3)
    first, second = prepared(2, seed=1), prepared(2, seed=2)
    chunk, later = policy.predict_action_chunk(first), policy.predict_action_chunk(second)
    assert chunk.shape == (2, 5, 4)
    policy.reset()
    sent = [policy.select_action(first)] + [policy.select_action(second) for _ in range(3)]
    torch.testing.assert_close(torch.stack(sent[:3], 1), chunk[:, :3])
    torch.testing.assert_close(sent[3], later[:, 0])
    policy.reset()  # a new episode must not begin with the old one's actions
    torch.testing.assert_close(policy.select_action(first), chunk[:, 0])


def test_image_state_and_instruction_all_matter(policy):
    batch = prepared(2)
    reference = policy.predict_action_chunk(batch)
    for key in ("observation.image", OBS_STATE, OBS_LANGUAGE_TOKENS):
        other = {**batch, key: batch[key].flip(0)}
        assert (policy.predict_action_chunk(other) - reference).abs().max() > 1e-4


# Training


def test_padded_actions_do_not_enter_the_loss(policy):
    batch = prepared(2)
    batch[ACTION] = torch.zeros(2, 5, 4)
    batch["action_is_pad"] = torch.tensor([[False] * 5, [False, False, True, True, True]])
    loss, metrics = policy(batch)
    batch[ACTION] = batch[ACTION] + 1e3 * batch["action_is_pad"][..., None]
    changed, _ = policy(batch)
    assert changed.item() == loss.item() == metrics["mse"]
    with torch.no_grad():
        mean = policy.action_mean(
            policy.vision(batch["observation.image"]), batch[OBS_STATE], batch[OBS_LANGUAGE_TOKENS]
        )
    errors = mean.square().mean(-1)
    assert loss.item() == pytest.approx((errors[0].sum() + errors[1, :2].sum()).item() / 7, rel=1e-5)


def test_frozen_vision_gets_no_gradient():
    policy = small()
    policy.freeze_vision()
    policy(prepared(2) | {ACTION: torch.zeros(2, 5, 4)})[0].backward()
    assert all(parameter.grad is None for parameter in policy.vision.parameters())
    rest = [p for part in (policy.language, policy.trunk) for p in part.parameters()]
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in rest)


# Configuration and checkpoints


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"action_std": 0.0}, "action_std=0.0: must be above 0"),
        ({"action_std": -1.0}, "action_std=-1.0: must be above 0"),
        ({"noise_correlation": 1.0}, r"noise_correlation=1.0: must be in \[0, 1\)"),
        ({"n_action_steps": 6}, r"n_action_steps=6: must be in \[1, chunk_size=5\]"),
        ({"n_action_steps": 0}, "n_action_steps=0"),
    ],
)
def test_bad_settings_are_named_with_their_limits(overrides, message):
    with pytest.raises(ValueError, match=message):
        configuration(**overrides)


def test_missing_and_doubled_features_are_named():
    lacking = MiniVLAConfig(**features_for(32, 4, 4), vocabulary=VOCABULARY, device="cpu")
    del lacking.input_features[OBS_STATE]
    with pytest.raises(
        ValueError, match=r"needs one camera, observation.state and action; got .*observation.image"
    ):
        MiniVLAPolicy(lacking)
    two = MiniVLAConfig(**features_for(32, 4, 4), vocabulary=VOCABULARY, device="cpu")
    two.input_features["observation.wrist"] = two.input_features["observation.image"]
    with pytest.raises(ValueError, match="observation.wrist"):
        MiniVLAPolicy(two)


def save(policy, folder, pipelines):
    policy.save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)


@pytest.mark.parametrize("through", ["classes", "lerobot's factory"])
def test_a_saved_policy_acts_the_same(through, dataset, untrained, tmp_path):
    policy, preprocessor, postprocessor = untrained
    policy.config.action_std = 0.13
    save(policy, tmp_path, (preprocessor, postprocessor))
    if through == "classes":
        loaded = MiniVLAPolicy.from_pretrained(tmp_path)
    else:
        config = PreTrainedConfig.from_pretrained(tmp_path)
        assert isinstance(config, MiniVLAConfig)
        config.pretrained_path = tmp_path
        loaded = make_policy(config, ds_meta=dataset.meta)
    assert loaded.config.vocabulary == policy.config.vocabulary
    assert loaded.config.action_std == 0.13
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    pre, post = make_pre_post_processors(loaded.config, pretrained_path=str(tmp_path))
    frame = dataset[0]
    batch = {key: frame[key] for key in ("observation.image", OBS_STATE, "task")}
    policy.reset(), loaded.reset()
    for _ in range(7):  # more than a chunk
        expected = postprocessor(policy.select_action(preprocessor(dict(batch))))
        got = post(loaded.select_action(pre(dict(batch))))
        assert got.shape == (1, 4)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_lerobots_factory_makes_a_new_policy_with_the_datasets_words(dataset):
    config = MiniVLAConfig(device="cpu")
    policy = make_policy(config, ds_meta=dataset.meta)
    assert {"button", "plate", "<unk>"} <= set(policy.config.vocabulary)
    pre, post = make_pre_post_processors(policy.config, dataset_stats=dataset.meta.stats)
    frame = dataset[len(dataset) - 1]
    batch = pre({key: frame[key] for key in ("observation.image", OBS_STATE, "task")})
    assert post(policy.select_action(batch)).shape == (1, 4)
    assert not (batch[OBS_LANGUAGE_TOKENS] == 1).any()


# Words


def test_instruction_words_by_hand():
    assert words("Press the Button-2, please!") == ["press", "the", "button", "2", "please"]
    vocabulary = build_vocabulary(["b a", "A c"])
    assert vocabulary == ["<pad>", "<unk>", "a", "b", "c"]
    step = InstructionWords(vocabulary, max_words=4)
    assert step.tokens("c B") == [4, 3, 0, 0]
    assert step.tokens("a zebra b") == [2, 1, 3, 0]
    assert step.tokens("a b c a b c") == [2, 3, 4, 2]
    assert step.tokens("") == [0, 0, 0, 0]


def test_unknown_and_empty_instructions_still_act(policy):
    pre, _ = make_mini_vla_pre_post_processors(configuration(), STATS)
    batch = pre(frames(2) | {"task": ["Juggle torches", ""]})
    assert batch[OBS_LANGUAGE_TOKENS].tolist() == [[1, 1] + [0] * 10, [0] * 12]
    assert policy.predict_action_chunk(batch).isfinite().all()


def test_equal_instructions_in_a_batch_mean_the_same_as_alone(policy):
    batch = prepared(5)
    tokens = batch[OBS_LANGUAGE_TOKENS]
    with torch.no_grad():
        together = policy.language(tokens)
        alone = torch.cat([policy.language(row[None]) for row in tokens])
    torch.testing.assert_close(together, alone)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_instructions_of_mt50_fit_and_stay_apart():
    texts = set(instructions().values())
    step = InstructionWords(build_vocabulary(list(texts)), MiniVLAConfig(device="cpu").max_words)
    assert len({tuple(step.tokens(text)) for text in texts}) == len(texts)


def test_missing_instruction_and_vocabulary_are_named():
    pre, _ = make_mini_vla_pre_post_processors(configuration(), STATS)
    batch = frames(2)
    del batch["task"]
    with pytest.raises(ValueError, match="needs an instruction: pass a batch with the key 'task'"):
        pre(batch)
    with pytest.raises(ValueError, match=r"vocabulary=\[\]"):
        InstructionWords().tokens("press")


def test_state_is_normalised_with_the_datasets_statistics():
    batch = make_mini_vla_pre_post_processors(configuration(), STATS)[0](frames(3))
    expected = (frames(3)[OBS_STATE] - STATS[OBS_STATE]["mean"]) / STATS[OBS_STATE]["std"]
    torch.testing.assert_close(batch[OBS_STATE], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch["observation.image"], frames(3)["observation.image"])


# Vision


def test_a_keypoint_is_where_its_map_is_bright(policy):
    """With maps of the test's own in place of the convolutions, a blob gives its own coordinates."""
    encoder = small(keypoints=1).vision
    maps = torch.zeros(1, 1, 5, 9)
    maps[0, 0, 1, 6] = 60.0

    class Fixed(torch.nn.Module):
        def forward(self, _):
            return maps

    encoder.maps = Fixed()
    x, y, presence = encoder(torch.zeros(1, 3, 20, 36))[0].tolist()
    assert x == pytest.approx(-1 + 2 * 6 / 8, abs=1e-5)
    assert y == pytest.approx(-1 + 2 * 1 / 4, abs=1e-5)
    assert presence == pytest.approx(math.tanh((60 - math.log(45)) / 4), abs=1e-5)
