"""The pool: the same episodes on any number of workers, in order; a lost worker is an error, never a hang."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from wmrl_embodied.envs.metaworld import MetaWorldEnv, UnknownTask
from wmrl_embodied.envs.pool import SimulatorFailed, SimulatorPool, SimulatorSettings, describe

BUTTON, SLIDE = "button-press-topdown-v3", "plate-slide-v3"
CONTEXTS = [(BUTTON, 1), (SLIDE, 1), (BUTTON, 2), (BUTTON, 1), (SLIDE, 7)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def actions(rows, count=5, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (rows, count, 4)).astype(np.float32)


def roll(pool):
    """Three chunks of every context, the rows of the second chunk in another order and one row left out."""
    observation, infos = pool.reset(CONTEXTS)
    results = [(observation, infos)]
    for rows, seed in (([0, 1, 2, 3, 4], 0), ([4, 2, 0, 1], 1), ([0, 1, 2, 3, 4], 2)):
        results.append(pool.step(rows, actions(len(rows), seed=seed)))
    return results


def assert_equal(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        np.testing.assert_array_equal(one, other)


def test_results_do_not_depend_on_the_number_of_workers(pool, lone_worker):
    assert_equal(roll(pool), roll(lone_worker))


def test_rows_keep_their_order(pool):
    """Each row is the episode of its own context, as one environment alone would run it."""
    observation, infos = pool.reset(CONTEXTS)
    assert observation["pixels"].shape == (5, 64, 64, 3)
    assert [info["already_successful"] for info in infos] == [False] * 5
    stepped, *_ = pool.step([4, 0, 2], actions(3))
    envs = {task: MetaWorldEnv(task) for task in (BUTTON, SLIDE)}
    for row, (task, index) in enumerate(CONTEXTS):
        alone, _ = envs[task].reset(seed=index)
        np.testing.assert_array_equal(observation["pixels"][row], alone["pixels"])
        np.testing.assert_array_equal(observation["agent_pos"][row], alone["agent_pos"])
    for position, row in enumerate([4, 0, 2]):
        task, index = CONTEXTS[row]
        envs[task].reset(seed=index)
        alone, *_ = envs[task].step_chunk(actions(3)[position])
        np.testing.assert_array_equal(stepped["pixels"][position], alone["pixels"])
    for env in envs.values():
        env.close()


def test_more_workers_than_rows(pool):
    observation, infos = pool.reset([(SLIDE, 3)])
    assert observation["pixels"].shape[0] == len(infos) == 1
    assert len(pool.step([0], actions(1))[4]) == 1


def press(pool, stop_at_success):
    """The button's expert acted out in the pool; returns the infos and flags of every chunk."""
    shown = pool.demonstrate([(BUTTON, 5)], noise=0.0, seed=0)[0]
    plan = np.concatenate([shown.action, np.zeros((70 - len(shown.action), 4), np.float32)])
    pool.reset([(BUTTON, 5)], stop_at_success)
    return [pool.step([0], chunk[None])[1:] for chunk in plan.reshape(14, 5, 4)]


def test_an_episode_stops_at_its_first_success(pool):
    chunks = press(pool, stop_at_success=True)
    taken = [infos[0]["actions_taken"] for *_, infos in chunks]
    first = next(place for place, (_, terminated, _, _) in enumerate(chunks) if terminated[0])
    assert taken[:first] == [5] * first
    assert 1 <= taken[first] <= 5
    assert taken[first + 1 :] == [0] * (13 - first)
    assert not any(truncated[0] for _, _, truncated, _ in chunks)


def test_stop_at_success_false_acts_on_to_the_horizon(pool):
    chunks = press(pool, stop_at_success=False)
    assert [infos[0]["actions_taken"] for *_, infos in chunks] == [5] * 14
    assert not any(terminated[0] for _, terminated, _, _ in chunks)
    assert [bool(truncated[0]) for _, _, truncated, _ in chunks] == [False] * 13 + [True]
    once = [infos[0]["success_once"] for *_, infos in chunks]
    assert once[-1]
    assert once == sorted(once)  # once true, true for good
    # The setting belongs to the episode, not to the environment that is used again.
    assert press(pool, stop_at_success=True)[-1][3][0]["actions_taken"] == 0


def test_demonstrations_hold_what_was_seen_and_executed(pool):
    shown = pool.demonstrate([(BUTTON, 5), (SLIDE, 6)], noise=0.3, seed=1)
    for episode, (task, index) in zip(shown, [(BUTTON, 5), (SLIDE, 6)], strict=True):
        assert (episode.task, episode.index) == (task, index)
        assert len(episode.pixels) == len(episode.agent_pos) == len(episode.action)
        assert np.abs(episode.action).max() <= 1
    assert_equal(
        [episode.action for episode in pool.demonstrate([(BUTTON, 5), (SLIDE, 6)], 0.3, 1)],
        [episode.action for episode in shown],
    )
    assert not np.array_equal(pool.demonstrate([(BUTTON, 5)], 0.3, 2)[0].action[:5], shown[0].action[:5])


def test_bad_input_is_refused_before_the_workers_hear_of_it(pool):
    with pytest.raises(UnknownTask, match="did you mean .*reach-v3"):
        pool.reset([(SLIDE, 0), ("reach-v2", 0)])
    with pytest.raises(ValueError, match="3 demonstrations at once, but there are 2 workers"):
        pool.demonstrate([(SLIDE, 0)] * 3, 0.0, 0)
    with pytest.raises(ValueError, match="workers=0: must be at least 1"):
        SimulatorPool(workers=0)


def test_a_worker_that_refuses_leaves_the_pool_usable(pool):
    """Also with several workers, one of which answered well: no answer may be left for the next question."""
    observation, _ = pool.reset(CONTEXTS)
    bad = actions(5)
    bad[1, 2, 0] = np.nan
    with pytest.raises(SimulatorFailed, match=f"{SLIDE}.*not finite"):
        pool.step([0, 1, 2, 3, 4], bad)
    again, _ = pool.reset(CONTEXTS)
    assert_equal(again, observation)


def test_ctrl_c_is_the_callers_to_handle(pool):
    pool.reset([(SLIDE, 0), (SLIDE, 1)])
    for process in pool._processes:
        os.kill(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    assert len(pool.step([0, 1], actions(2))[1]) == 2


def test_a_killed_worker_is_told_and_leaves_no_process():
    pool = SimulatorPool(SimulatorSettings(image_size=16, horizon=10), workers=2)
    processes = list(pool._processes)
    pool.reset([(SLIDE, 0), (SLIDE, 1)])
    os.kill(processes[1].pid, signal.SIGSTOP)  # so that it is killed with a question in its pipe
    pool._pipes[1].send(("step", ([0], actions(1))))
    os.kill(processes[1].pid, signal.SIGKILL)
    for _ in range(3):  # and stays told: never stale answers of the worker that lives
        with pytest.raises(SimulatorFailed, match="process died .*ledger, continue with resume="):
            pool.step([0, 1], actions(2))
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 5
    assert not any(alive(process.pid) for process in processes)


def test_context_manager_leaves_no_child_process():
    """Even when the caller fails and a worker hangs."""
    before = set(multiprocessing.active_children())
    threads = os.environ.get("OMP_NUM_THREADS")
    with pytest.raises(RuntimeError, match="of the caller"), SimulatorPool(workers=2) as pool:
        assert os.environ.get("OMP_NUM_THREADS") == threads
        assert pool.workers == 2
        children = list(pool._processes)
        os.kill(children[0].pid, signal.SIGSTOP)
        raise RuntimeError("of the caller")
    assert not any(alive(child.pid) for child in children)
    assert set(multiprocessing.active_children()) == before


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from wmrl_embodied.envs.pool import SimulatorPool\n"
        "if __name__ == '__main__':\n"
        "    pool = SimulatorPool(workers=1)\n"
        f"    pool.reset([({SLIDE!r}, 0)])\n"
        "    print(pool._processes[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL
    worker = int(result.stdout)
    deadline = time.monotonic() + 20
    while alive(worker) and not is_zombie(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def is_zombie(pid):
    """Ended, but nobody has collected it yet (in a container the first process may not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_settings_describe_themselves_in_plain_values():
    assert describe(SimulatorSettings(image_size=32)) == {
        "image_size": 32,
        "horizon": 70,
        "action_repeat": 2,
        "camera": {"lookat": (0.0, 0.68, 0.13), "distance": 0.95, "azimuth": 145.0, "elevation": -35.0},
    }
