"""Meta-World environments: the same listed state every time, Meta-World's own physics, actions checked and clipped."""

import mujoco
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from wmrl_embodied.envs.metaworld import MetaWorldEnv, UnknownTask, check_task, instructions
from wmrl_embodied.envs.rendering import Camera

BUTTON, SLIDE, REACH = "button-press-topdown-v3", "plate-slide-v3", "reach-v3"
# Tasks whose bodies, joints or goals Meta-World moves after its last forward pass of a reset.
MOVED_LATE = [REACH, "window-close-v3", "drawer-open-v3", "pick-out-of-hole-v3"]


@pytest.fixture
def make():
    """Environments that are closed after the test."""
    made = []

    def build(task=BUTTON, **arguments):
        made.append(MetaWorldEnv(task, **arguments))
        return made[-1]

    yield build
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def button():
    env = MetaWorldEnv(BUTTON)
    yield env
    env.close()


def snapshot(env):
    data = env._sim.data
    return np.concatenate([data.qpos, data.qvel, data.mocap_pos.ravel(), data.ctrl, env.state])


def plain_metaworld(task, index):
    """Meta-World itself in a listed initial state, with all of its looks."""
    env = ALL_V3_ENVIRONMENTS[task]()
    env._set_task_called = True
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env.seed(index)
    env.reset()
    return env


def random_actions(count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 4)).astype(np.float32)


@pytest.mark.filterwarnings("ignore:.*minimum value is -infinity", "ignore:.*maximum value is infinity")
@pytest.mark.filterwarnings("ignore:.*not within the observation space.*float64")
def test_is_a_gymnasium_environment(make):
    env = make(horizon=3)
    # `close` twice is checked too; `skip_render_check` would ask for an environment registered with an id.
    check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.render().shape == (64, 64, 3)


def test_same_listed_state_is_the_same_state_and_picture(button, make):
    first, _ = button.reset(seed=3)
    state = snapshot(button)
    for _ in range(5):
        button.step(button.expert_action())
    button.reset(seed=4)
    again, _ = button.reset(seed=3)
    np.testing.assert_array_equal(snapshot(button), state)
    np.testing.assert_array_equal(again["pixels"], first["pixels"])
    np.testing.assert_array_equal(again["agent_pos"], first["agent_pos"])

    other = make()
    elsewhere, _ = other.reset(seed=3)
    np.testing.assert_array_equal(snapshot(other), state)
    np.testing.assert_array_equal(elsewhere["pixels"], first["pixels"])


def test_different_listed_states_differ(button):
    pictures, states = zip(
        *[(button.reset(seed=index)[0]["pixels"], button.state.copy()) for index in range(4)], strict=True
    )
    assert len({state.tobytes() for state in states}) == 4
    assert len({picture.tobytes() for picture in pictures}) == 4


def test_reset_without_a_seed_is_state_zero(button):
    unseeded, _ = button.reset()
    zero, _ = button.reset(seed=0)
    np.testing.assert_array_equal(unseeded["pixels"], zero["pixels"])


@pytest.mark.parametrize("task", [BUTTON, SLIDE])
def test_lerobot_reaches_the_same_state_from_the_same_seed(make, task):
    from lerobot.envs.metaworld import MetaworldEnv

    theirs = MetaworldEnv(task)
    theirs._ensure_env()
    theirs._env.seed(7)
    theirs._env.reset(seed=7)
    env = make(task)
    env.reset(seed=7)
    np.testing.assert_array_equal(env._sim.data.qpos, theirs._env.data.qpos)
    np.testing.assert_array_equal(env._sim._target_pos, theirs._env._target_pos)
    theirs.close()


def check_first_moment(env, index):
    """Observation and picture at reset show the state that physics starts from."""
    observation, info = env.reset(seed=index)
    first_state, reached = env.state.copy(), env._sim.data
    mujoco.mj_forward(env._sim.model, reached)
    np.testing.assert_array_equal(env.render(), observation["pixels"])
    np.testing.assert_allclose(env._sim._get_curr_obs_combined_no_goal(), first_state[:18], atol=1e-12)
    np.testing.assert_array_equal(first_state[18:36], first_state[:18])
    return info


@pytest.mark.parametrize("task", MOVED_LATE)
def test_first_observation_shows_the_listed_state_itself(make, task):
    """Otherwise window-close is "solved" in every initial state, and the goal of reach is painted elsewhere."""
    assert not check_first_moment(make(task), 5)["already_successful"]


def test_goal_marker_is_painted_at_the_goal(make):
    env = make("pick-out-of-hole-v3")  # whose list of markers names the object's place instead
    for observe in (lambda: env.reset(seed=0), lambda: env.step(np.zeros(4))):
        observe()
        np.testing.assert_allclose(env._sim.data.site("goal").xpos, env._sim._target_pos)


def test_picture_has_content_and_shows_where_the_goal_is(make):
    env = make(REACH)
    picture = env.reset(seed=0)[0]["pixels"]
    assert picture.dtype == np.uint8
    assert picture.shape == (64, 64, 3)
    assert 20 < picture.mean() < 200
    assert picture.std() > 10
    env._sim.model.site("goal").pos += [-0.1, 0, 0]
    mujoco.mj_kinematics(env._sim.model, env._sim.data)
    moved = np.abs(env.render().astype(int) - picture).max(-1) > 8
    assert 4 <= moved.sum() <= 200  # the old and the new place of a small marker, nothing else


def test_image_size_and_camera_are_settings(make):
    far = make(image_size=32, camera=Camera(distance=2.0)).reset(seed=0)[0]["pixels"]
    near = make(image_size=32).reset(seed=0)[0]["pixels"]
    assert far.shape == near.shape == (32, 32, 3)
    assert (far != near).any()


def test_a_shared_renderer_paints_the_same_picture(make):
    first, second = make(SLIDE), make(SLIDE)
    expected = second.reset(seed=9)[0]["pixels"]
    first.reset(seed=2)
    sharing = make(SLIDE, renderer=first.renderer)
    np.testing.assert_array_equal(sharing.reset(seed=9)[0]["pixels"], expected)
    sharing.close()
    first.render()  # closing the one that shares leaves the renderer open


def test_step_chunk_equals_step_by_step(button):
    actions = random_actions(5)
    button.reset(seed=1)
    chunk = button.step_chunk(actions)
    state = snapshot(button)
    button.reset(seed=1)
    for action in actions:
        single = button.step(action)
    np.testing.assert_array_equal(snapshot(button), state)
    np.testing.assert_array_equal(single[0]["pixels"], chunk[0]["pixels"])
    assert single[1:4] == chunk[1:4]
    assert chunk[4]["actions_taken"] == 5


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_physics_of_a_repeated_action_is_metaworlds_own(make, repeat):
    """With contact: the expert pushes the plate; hidden geoms, plain looks and skipped rewards change nothing."""
    env = make(SLIDE, action_repeat=repeat, horizon=40)
    env.reset(seed=2)
    theirs = plain_metaworld(SLIDE, 2)
    np.testing.assert_array_equal(env._sim.data.qpos, theirs.data.qpos)
    plate = env._sim.data.qpos.copy()
    for _ in range(60 // repeat):
        action = env.expert_action()
        *_, terminated, truncated, info = env.step(action)
        for _ in range(repeat):
            state, _, _, _, reported = theirs.step(action)
        np.testing.assert_array_equal(env._sim.data.qpos, theirs.data.qpos)
        np.testing.assert_array_equal(env._sim.data.qvel, theirs.data.qvel)
        np.testing.assert_array_equal(env.state[:18], state[:18])
        assert info["is_success"] == bool(reported["success"])
        if terminated or truncated:
            break
    assert np.abs(env._sim.data.qpos - plate)[9:].max() > 0.05  # the plate was moved


def test_only_looks_are_simplified(button):
    plain, ours = ALL_V3_ENVIRONMENTS[BUTTON]().model, button._sim.model
    button.reset(seed=0)
    looks = {"light_active", "geom_matid", "geom_rgba", "geom_group"}
    placed_at_reset = {"body_pos", "site_pos"}
    arrays = [
        name
        for name in dir(plain)
        if not name.startswith("_")
        and isinstance(getattr(plain, name), np.ndarray)
        and name not in placed_at_reset
    ]
    assert len(arrays) > 100
    changed = {
        name
        for name in arrays
        if not np.array_equal(getattr(plain, name), getattr(ours, name), equal_nan=True)
    }
    assert changed <= looks
    hidden = ours.geom_group != plain.geom_group
    assert hidden.sum() > 10


def test_actions_beyond_the_limits_are_clipped_once(button):
    outcomes = []
    for reach in (1.0, 1e6, 1e300):
        button.reset(seed=0)
        button.step(np.array([reach, -reach, reach, -reach]))
        outcomes.append(snapshot(button))
    np.testing.assert_array_equal(outcomes[1], outcomes[0])
    np.testing.assert_array_equal(outcomes[2], outcomes[0])


@pytest.mark.parametrize(
    "actions",
    [
        [[1e6, np.nan, 0.1, 0.2]],
        [[0.5, 0, 0, 0], [0, np.inf, 0, 0]],
        [[0, 0, 0, -np.inf]],
        [[0.5, 0, 0]],
        [[0.5, 0, 0, 0, 0]],
        0.5,
    ],
)
def test_case_action_limits(button, actions):
    button.reset(seed=0)
    before = snapshot(button)
    with pytest.raises(ValueError, match=BUTTON):
        button.step_chunk(actions)
    np.testing.assert_array_equal(snapshot(button), before)
    assert button.step_chunk(np.zeros((1, 4)))[4]["actions_taken"] == 1  # nothing of it counts


def at_the_goal(env):
    """Reach with the goal drawn around where the hand starts."""
    start = np.r_[0.2, 0.7, 0.02, env._sim.hand_init_pos]  # object (at least 15 cm from the goal), goal
    env._sim._random_reset_space = Box(start - 0.005, start + 0.005, dtype=np.float64)
    return env


def test_case_success_at_reset(make):
    env = at_the_goal(make(REACH))
    _, info = env.reset(seed=0)
    assert info == {"is_success": True, "success_once": True, "already_successful": True}
    before = snapshot(env)
    _, reward, terminated, truncated, info = env.step_chunk(random_actions(5))
    assert (terminated, truncated, info["actions_taken"]) == (True, False, 0)
    np.testing.assert_array_equal(snapshot(env), before)

    env.stop_at_success = False
    env.reset(seed=0)
    *_, terminated, _, info = env.step_chunk(np.ones((5, 4)))
    assert (terminated, info["actions_taken"], info["success_once"]) == (False, 5, True)


def test_ordinary_states_are_not_successful_at_reset(button):
    assert button.reset(seed=0)[1] == {
        "is_success": False,
        "success_once": False,
        "already_successful": False,
    }


def test_case_success_at_reset_length_one_episodes(make):
    env = make(horizon=1)
    env.reset(seed=0)
    *_, terminated, truncated, info = env.step_chunk(random_actions(5))
    assert (terminated, truncated, info["actions_taken"]) == (False, True, 1)
    before = snapshot(env)
    *_, truncated, info = env.step(random_actions(1)[0])
    assert (truncated, info["actions_taken"]) == (True, 0)
    np.testing.assert_array_equal(snapshot(env), before)
    env.reset(seed=0)
    assert env.step(np.zeros(4))[4]["actions_taken"] == 1


def test_an_episode_ends_at_the_first_success_within_a_chunk(make):
    env = make()
    env.reset(seed=0)
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step_chunk(
            np.repeat(env.expert_action()[None], 5, 0)
        )
        assert not truncated
    assert reward == 1.0
    assert info["success_once"]
    assert env.step_chunk(np.zeros((5, 4)))[4]["actions_taken"] == 0


def test_episodes_may_be_longer_than_metaworlds_own(make):
    env = make(horizon=520, action_repeat=1)
    env.reset(seed=0)
    *_, truncated, info = env.step_chunk(np.zeros((520, 4)))
    assert truncated
    assert info["actions_taken"] == 520


@pytest.mark.parametrize("bad", [{"horizon": 0}, {"action_repeat": 0}, {"horizon": -3}])
def test_sizes_below_one_are_refused(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least 1"):
        MetaWorldEnv(BUTTON, **bad)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("buton-press-topdown-v3", "button-press-topdown-v3"),
        ("button-press-topdown", "button-press-topdown-v3"),
        ("push", "push-v3"),
        ("reach-v2", "reach-v3"),
    ],
)
def test_an_unknown_task_is_named_with_what_was_probably_meant(wrong, meant):
    with pytest.raises(UnknownTask, match=f"task='{wrong}' is not a Meta-World task; did you mean .*{meant}"):
        MetaWorldEnv(wrong)
    assert issubclass(UnknownTask, ValueError)


def test_a_task_like_none_lists_them_all():
    with pytest.raises(UnknownTask, match="the tasks are assembly-v3, .*window-open-v3"):
        check_task("zzz")


def test_every_task_of_mt50_has_an_instruction_an_environment_and_an_expert():
    names = set(instructions())
    assert len(names) == 50
    assert names == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)
    assert all(len(text.split()) >= 3 for text in instructions().values())


@pytest.mark.parametrize("task", [BUTTON, SLIDE, "peg-insert-side-v3"])
def test_experts_succeed(make, task):
    env = make(task)
    assert env.task_description == instructions()[task]
    env.reset(seed=0)
    over = False
    while not over:
        action = env.expert_action()
        assert np.abs(action).max() <= 1
        _, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    assert terminated
    assert reward == 1.0


@pytest.mark.slow
def test_all_of_mt50(make):
    """The first moment is right everywhere, nothing starts solved, and the experts solve nearly all."""
    solved = []
    for task in sorted(instructions()):
        env = make(task)
        assert not check_first_moment(env, 2_000_000)["already_successful"], task
        over = False
        while not over:
            *_, terminated, truncated, _ = env.step(env.expert_action())
            over = terminated or truncated
        if terminated:
            solved.append(task)
        env.close()
    assert len(solved) >= 44
