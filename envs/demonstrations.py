"""Scripted-expert demonstrations, as a LeRobotDataset that LeRobot's own tools open.

The action of a frame is the one that was executed, noise included: whoever learns the consequences of actions
from the dataset learns the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lerobot.datasets.lerobot_dataset import LeRobotDataset
from tqdm import tqdm

from wmrl_embodied.envs.metaworld import ACTION_DIM, PROPRIO_DIM, instructions
from wmrl_embodied.envs.pool import Demonstration, SimulatorPool
from wmrl_embodied.envs.splits import DEMONSTRATION

SIMULATOR_STEPS_PER_SECOND = 80


class ExpertFailed(RuntimeError):
    """The scripted expert did not succeed often enough to collect the demonstrations that were asked for."""


def demonstrations(
    pool: SimulatorPool, tasks: Sequence[str], per_task: int, noise: float, seed: int, max_attempts: int = 20
) -> Iterator[Demonstration]:
    """Yield `per_task` successful demonstrations of every task, from listed demonstration states in order.

    Args:
        noise: standard deviation added to the executed hand displacement, in action units.
        max_attempts: attempts allowed per demonstration wanted.

    Raises:
        ExpertFailed: names the task and how often its expert succeeded.
    """
    for task in tasks:
        kept = tried = 0
        while kept < per_task:
            batch = [
                (task, DEMONSTRATION[tried + slot]) for slot in range(min(pool.workers, per_task - kept))
            ]
            tried += len(batch)
            for episode in pool.demonstrate(batch, noise, seed):
                if episode.success:
                    kept += 1
                    yield episode
            if tried >= max_attempts * per_task and kept < per_task:
                raise ExpertFailed(
                    f"task={task!r}: the expert succeeded in {kept} of {tried} attempts with noise={noise}; "
                    f"lower the noise or raise the horizon ({pool.settings.horizon} actions)"
                )


def collect_dataset(
    pool: SimulatorPool, tasks: Sequence[str], per_task: int, noise: float, seed: int, root: Path
) -> LeRobotDataset:
    """Write `per_task` demonstrations of every task into a new LeRobotDataset in folder `root` and open it.

    Features: `observation.image` (H, W, 3), `observation.state` (4,), `action` (4,); the task is its instruction.
    """
    settings = pool.settings
    fps = SIMULATOR_STEPS_PER_SECOND // settings.action_repeat
    dataset = LeRobotDataset.create(
        repo_id=f"wmrl/{root.name}",
        root=root,
        fps=fps,
        use_videos=False,
        features={
            "observation.image": {
                "dtype": "image",
                "shape": (settings.image_size, settings.image_size, 3),
                "names": ["height", "width", "channels"],
            },
            "observation.state": {"dtype": "float32", "shape": (PROPRIO_DIM,), "names": None},
            "action": {"dtype": "float32", "shape": (ACTION_DIM,), "names": None},
        },
    )
    episodes = demonstrations(pool, tasks, per_task, noise, seed)
    for episode in tqdm(episodes, total=per_task * len(tasks), desc="demonstrations", unit="episode"):
        for pixels, agent_pos, action in zip(episode.pixels, episode.agent_pos, episode.action, strict=True):
            dataset.add_frame(
                {
                    "observation.image": pixels,
                    "observation.state": agent_pos,
                    "action": action,
                    "task": instructions()[episode.task],
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return LeRobotDataset(repo_id=dataset.repo_id, root=root)
