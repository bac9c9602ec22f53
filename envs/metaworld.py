"""Meta-World (MT50) as gymnasium environments that reset to listed initial states and render fast.

One `MetaWorldEnv` is one task. `reset(seed=i)` puts it into the i-th listed initial state, always the same
one; which lists train and which are held out is said in `splits.py`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from wmrl_embodied.envs.rendering import Camera, FastRenderer, hide_geom

import mujoco  # isort: skip  (after rendering, which chooses the OpenGL backend)
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # isort: skip
from metaworld.policies import ENV_POLICY_MAP  # isort: skip

ACTION_DIM = 4  # hand displacement x, y, z (1 = 1 cm a simulator step) and gripper effort, each in [-1, 1]
PROPRIO_DIM = 4  # hand position x, y, z in metres and gripper opening in [0, 1]

# Their meshes are 68k faces and 80 % of the render time; the wrist's own cylinders stand in for them.
_ARM_BODIES = frozenset(
    [
        "pedestal",
        "pedestal_feet",
        "controller_box",
        "torso",
        "head",
        "screen",
        "RetainingWall",
        "right_arm_base_link",
        "right_hand",
        "right_l0",
        "right_l1",
        "right_l2",
        "right_l3",
        "right_l4",
        "right_l5",
        "right_l6",
    ]
)
_WRIST_BODIES = frozenset(("right_l6", "right_hand"))
_WRIST_COLOUR = (0.5, 0.1, 0.1, 1.0)
_TABLE_BODIES = frozenset(("world", "tablelink"))
_TABLE_COLOUR = (0.45, 0.33, 0.26, 1.0)
_AMBIENT_LIGHT = 0.35


class UnknownTask(ValueError):
    """The task is not one of Meta-World's; the message names the nearest ones."""


@cache
def instructions() -> dict[str, str]:
    """Task name -> instruction for all of MT50, as LeRobot ships them (read without importing LeRobot)."""
    spec = importlib.util.find_spec("lerobot")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("lerobot is not installed: run `make setup`")
    config = Path(spec.submodule_search_locations[0]) / "envs" / "metaworld_config.json"
    return json.loads(config.read_text())["TASK_DESCRIPTIONS"]


def check_task(name: str) -> str:
    """`name` if it is an MT50 task.

    Raises:
        UnknownTask: it is not; names the nearest tasks.
    """
    known = instructions()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"the tasks are {', '.join(sorted(known))}"
        raise UnknownTask(f"task={name!r} is not a Meta-World task; {hint}")
    return name


def _simplify_looks(model: mujoco.MjModel) -> None:
    """Fewer vertices, a plain table, one light: several times the frames per second, the physics untouched."""
    model.light_active[1:] = 0
    model.vis.headlight.ambient[:] = _AMBIENT_LIGHT
    for geom in range(model.ngeom):
        body = model.body(model.geom_bodyid[geom]).name
        if body in _TABLE_BODIES:
            model.geom_matid[geom] = -1
            model.geom_rgba[geom] = _TABLE_COLOUR
        elif body in _WRIST_BODIES and model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_CYLINDER:
            model.geom_rgba[geom] = _WRIST_COLOUR
        elif body in _ARM_BODIES:
            hide_geom(model, geom)


class MetaWorldEnv(gymnasium.Env):
    """One Meta-World task with pixels and proprioception.

    Observations: `pixels` (size, size, 3) uint8 and `agent_pos` (4,) float32 (hand x, y, z in metres, gripper
    opening). Actions: (4,) in [-1, 1]; one action lasts `action_repeat` simulator steps of 12.5 ms, and success is
    looked at after each action.
    An episode ends at success (`terminated`, unless `stop_at_success=False`) or after `horizon` actions
    (`truncated`). `info` holds `is_success` (now), `success_once` and, at reset, `already_successful`.

    Args:
        task: MT50 name such as "button-press-topdown-v3".
        image_size: pixels a side.
        horizon: actions in an episode.
        action_repeat: simulator steps per action.
        stop_at_success: end the episode at the first success.
        camera: viewpoint.
        renderer: share the renderer of another environment of the same task instead of making one.

    Raises:
        UnknownTask: no such task.
        ValueError: `horizon` or `action_repeat` is below 1.
        RenderingUnavailable: no OpenGL here.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}
    render_mode = "rgb_array"

    def __init__(
        self,
        task: str,
        image_size: int = 64,
        horizon: int = 70,
        action_repeat: int = 2,
        stop_at_success: bool = True,
        camera: Camera | None = None,
        renderer: FastRenderer | None = None,
    ) -> None:
        for name, value in (("horizon", horizon), ("action_repeat", action_repeat)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.task = check_task(task)
        self.task_description = instructions()[task]
        self._max_episode_steps = self.horizon = horizon
        self.action_repeat = action_repeat
        self.stop_at_success = stop_at_success
        self._sim = ALL_V3_ENVIRONMENTS[task]()
        self._sim.max_path_length = horizon  # its own limit of 500 ends a longer episode with an error
        # What `set_task` does, without building the 50 pickled tasks of a Meta-World benchmark (1.3 s a task);
        # `seeded_rand_vec` makes the initial state a function of the seed.
        self._sim._set_task_called = True
        # The scripted expert reads the goal from the state (policies see pixels only); the observation space,
        # to which Meta-World clips that state, is cached with the goal hidden and must be made anew.
        self._sim._partially_observable = False
        self._sim.__dict__.pop("sawyer_observation_space", None)
        self._sim._freeze_rand_vec = False
        self._sim.seeded_rand_vec = True
        _simplify_looks(self._sim.model)
        self._owns_renderer = renderer is None
        self.renderer = renderer or FastRenderer(self._sim.model, image_size, camera or Camera())
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8),
                "agent_pos": gymnasium.spaces.Box(-np.inf, np.inf, (PROPRIO_DIM,), np.float32),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Go to listed initial state `seed` (0 when None)."""
        super().reset(seed=seed)
        self._sim.seed(int(seed or 0))
        self._sim.reset()
        # Meta-World moves bodies, joints and goals after its last forward pass: until positions are worked out
        # anew, pictures, states and the success flag are those of another layout (of all window-close states,
        # each was "solved"). This computes positions only and leaves the physics as it is.
        mujoco.mj_kinematics(self._sim.model, self._sim.data)
        self._sim._prev_obs = self._sim._get_curr_obs_combined_no_goal()
        self.state = self._sim._get_obs()
        self._steps = 0
        # Meta-World has no success flag at reset; evaluating the untouched state costs no simulator step.
        _, info = self._sim.evaluate_state(self.state, np.zeros(ACTION_DIM, np.float32))
        self._success = self._success_once = bool(info["success"])
        return self._observation(), self._info() | {"already_successful": self._success}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Apply one action (4,); the reward is 1 at success, else 0."""
        return self.step_chunk(np.asarray(action)[None])

    def step_chunk(self, actions: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Apply up to K actions (K, 4), rendering once at the end; stops early at the end of the episode.

        `info["actions_taken"]` says how many of them were applied.

        Raises:
            ValueError: an action is not finite or not of 4 numbers; none was applied.
        """
        actions = np.asarray(actions, dtype=np.float64)
        if actions.ndim != 2 or actions.shape[1] != ACTION_DIM:
            raise ValueError(f"{self.task}: actions of shape {actions.shape}; must be (K, {ACTION_DIM})")
        if not np.isfinite(actions).all():
            raise ValueError(f"{self.task}: action {actions.tolist()} is not finite; it was not applied")
        actions = np.clip(actions, -1.0, 1.0).astype(np.float32)
        taken = 0
        for action in actions:
            if self._over:
                break
            taken += 1
            self._steps += 1
            for _ in range(self.action_repeat - 1):
                # `step` without its observation and reward, which cost more than the physics
                self._sim.set_xyz_action(action[:3])
                self._sim.do_simulation([action[3], -action[3]], n_frames=self._sim.frame_skip)
            self.state, _, _, _, info = self._sim.step(action)
            self._success = bool(info["success"])
            self._success_once |= self._success
        terminated = self.stop_at_success and self._success_once
        truncated = not terminated and self._steps >= self.horizon
        info = self._info() | {"actions_taken": taken}
        return self._observation(), float(self._success), terminated, truncated, info

    def render(self) -> np.ndarray:
        """(size, size, 3) uint8."""
        return self.renderer(self._sim.data)

    def close(self) -> None:
        """Free the OpenGL context if this environment made it."""
        if self._owns_renderer:
            self.renderer.close()

    def expert_action(self) -> np.ndarray:
        """(4,) what Meta-World's scripted expert for this task does now, clipped to the limits."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # says that it asks for more than the limits, which is seen to here
            action = self._expert.get_action(self.state)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    @property
    def _expert(self) -> Any:
        if not hasattr(self, "_expert_policy"):
            self._expert_policy = ENV_POLICY_MAP[self.task]()
        return self._expert_policy

    @property
    def _over(self) -> bool:
        return self._steps >= self.horizon or (self.stop_at_success and self._success_once)

    def _info(self) -> dict[str, Any]:
        return {"is_success": self._success, "success_once": self._success_once}

    def _observation(self) -> dict[str, np.ndarray]:
        return {"pixels": self.render(), "agent_pos": self.state[:PROPRIO_DIM].astype(np.float32)}
