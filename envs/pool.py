"""Many Meta-World episodes side by side, over worker processes; the policy stays in the caller's process.

Knows nothing about policies or learning. Episodes advance in lockstep, one action chunk at a time, so that the
caller can run its network on the whole batch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from wmrl_embodied.envs.metaworld import MetaWorldEnv, check_task
from wmrl_embodied.envs.rendering import Camera, FastRenderer, RenderingUnavailable


class SimulatorFailed(RuntimeError):
    """A worker process failed or died; its attempts have no score (missing, never 0)."""


@dataclass(frozen=True)
class SimulatorSettings:
    """What every environment of a pool is built with; see `MetaWorldEnv`. `horizon` counts actions."""

    image_size: int = 64
    horizon: int = 70
    action_repeat: int = 2
    camera: Camera = Camera()


@dataclass(frozen=True)
class Demonstration:
    """One expert episode: `pixels` (T, H, W, 3), `agent_pos` (T, 4), executed `action` (T, 4), `success`."""

    task: str
    index: int
    pixels: np.ndarray
    agent_pos: np.ndarray
    action: np.ndarray
    success: bool


class _Bench:
    """The environments of one process: as many of each task as were ever needed at once, one renderer a task."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self._settings = settings
        self._envs: dict[str, list[MetaWorldEnv]] = {}
        self._renderers: dict[str, FastRenderer] = {}
        self._rows: list[MetaWorldEnv] = []

    def _env(self, task: str, slot: int, stop_at_success: bool) -> MetaWorldEnv:
        envs = self._envs.setdefault(task, [])
        while len(envs) <= slot:
            env = MetaWorldEnv(
                task,
                image_size=self._settings.image_size,
                horizon=self._settings.horizon,
                action_repeat=self._settings.action_repeat,
                camera=self._settings.camera,
                renderer=self._renderers.get(task),
            )
            self._renderers[task] = env.renderer
            envs.append(env)
        envs[slot].stop_at_success = stop_at_success
        return envs[slot]

    def reset(self, contexts: list[tuple[str, int]], stop_at_success: bool) -> list[tuple]:
        used: dict[str, int] = {}
        self._rows, results = [], []
        for task, index in contexts:
            env = self._env(task, used.get(task, 0), stop_at_success)
            used[task] = used.get(task, 0) + 1
            self._rows.append(env)
            results.append(env.reset(seed=index))
        return results

    def step(self, rows: list[int], actions: np.ndarray) -> list[tuple]:
        return [self._rows[row].step_chunk(chunk) for row, chunk in zip(rows, actions, strict=True)]

    def demonstrate(self, task: str, index: int, noise: float, seed: int) -> Demonstration:
        env = self._env(task, 0, True)
        rng = np.random.default_rng([seed, index])
        observation, already = env.reset(seed=index)
        frames, over = [], False
        while not over:
            action = env.expert_action()
            action[:3] += noise * rng.standard_normal(3).astype(np.float32)
            action = np.clip(action, -1.0, 1.0)
            frames.append((observation["pixels"], observation["agent_pos"], action))
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        pixels, agent_pos, actions = (np.stack(column) for column in zip(*frames, strict=True))
        # Where success is true from the start nothing is demonstrated.
        success = terminated and not already["already_successful"]
        return Demonstration(task, index, pixels, agent_pos, actions, success)


def _work(pipe: Connection, settings: SimulatorSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    bench = _Bench(settings)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the parent closed the pool, or died
            return
        try:
            pipe.send((True, getattr(bench, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


class SimulatorPool:
    """Runs episodes on `workers` processes.

    Use as a context manager, or call `close`.

    Args:
        settings: how environments are built.
        workers: processes; one a core is right.
    """

    def __init__(self, settings: SimulatorSettings | None = None, workers: int = 2) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: must be at least 1")
        self.settings = settings or SimulatorSettings()
        self._pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")  # fork is unsafe once torch has started threads
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # inherited by the workers: physics of one process is serial anyway
        )
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self.settings), daemon=True)
                process.start()
                theirs.close()  # so that a dead worker reads as EOF
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def reset(
        self, contexts: Sequence[tuple[str, int]], stop_at_success: bool = True
    ) -> tuple[dict, list[dict]]:
        """Start one episode per (task, listed initial state); returns stacked observations and infos.

        Row i runs on worker i mod `workers`; results do not depend on which worker runs a row.
        """
        for task, _ in contexts:
            check_task(task)
        shares = [list(range(worker, len(contexts), len(self._pipes))) for worker in range(len(self._pipes))]
        self._place = {
            row: (worker, slot) for worker, share in enumerate(shares) for slot, row in enumerate(share)
        }
        calls = {
            worker: ("reset", ([contexts[row] for row in share], stop_at_success))
            for worker, share in enumerate(shares)
        }
        answers = self._call(calls)
        rows = [answers[worker][slot] for worker, slot in (self._place[row] for row in range(len(contexts)))]
        return _stack([row[0] for row in rows]), [row[1] for row in rows]

    def step(
        self, rows: Sequence[int], actions: np.ndarray
    ) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        """Apply a chunk of actions (R, K, 4) to R of the running episodes.

        Returns:
            observations (each (R, ...)), success now (R,), terminated (R,), truncated (R,), infos.
        """
        shares: dict[int, list[int]] = {}
        for position, row in enumerate(rows):
            shares.setdefault(self._place[row][0], []).append(position)
        answers = self._call(
            {
                worker: ("step", ([self._place[rows[p]][1] for p in share], np.asarray(actions)[share]))
                for worker, share in shares.items()
            }
        )
        results: list[Any] = [None] * len(rows)
        for worker, share in shares.items():
            for position, result in zip(share, answers[worker], strict=True):
                results[position] = result
        observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        return _stack(observations), np.array(rewards), np.array(terminated), np.array(truncated), list(infos)

    def demonstrate(
        self, contexts: Sequence[tuple[str, int]], noise: float, seed: int
    ) -> list[Demonstration]:
        """Expert episodes, one per context and at most one per worker at a time.

        `noise` is the standard deviation added to the executed hand displacement, in action units.
        """
        if len(contexts) > len(self._pipes):
            raise ValueError(
                f"{len(contexts)} demonstrations at once, but there are {len(self._pipes)} workers"
            )
        answers = self._call(
            {worker: ("demonstrate", (*context, noise, seed)) for worker, context in enumerate(contexts)}
        )
        return [answers[worker] for worker in range(len(contexts))]

    @property
    def workers(self) -> int:
        """Number of processes."""
        return len(self._pipes)

    def _call(self, calls: dict[int, tuple[str, tuple]]) -> dict[int, Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for worker, call in calls.items():
                self._pipes[worker].send(call)
            for worker in calls:
                answers[worker] = self._pipes[worker].recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise SimulatorFailed(
                "a simulator process died (out of memory, or killed?); what was executed before is in the "
                "ledger, continue with resume="
            ) from error
        for succeeded, answer in answers.values():
            if not succeeded:
                if isinstance(answer, RenderingUnavailable):
                    raise answer
                raise SimulatorFailed(f"a simulator process failed: {answer!r}") from answer
        return {worker: answer for worker, (_, answer) in answers.items()}

    def close(self) -> None:
        """Stop the workers; idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stack(observations: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}


def describe(settings: SimulatorSettings) -> dict[str, Any]:
    """The settings as plain values, for protocols and reports."""
    return asdict(settings)
