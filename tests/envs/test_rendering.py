"""Rendering: works headless whoever imported mujoco first, and says what to install where it cannot."""

import ctypes.util
import os
import subprocess
import sys

import pytest

from wmrl_embodied.envs.rendering import Camera, probe

PROBE = "from wmrl_embodied.envs.rendering import probe\nprobe()\nprint('rendered')"


def python(code, **variables):
    surroundings = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=surroundings | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_rendering_works_here():
    probe()


@pytest.mark.parametrize("first", ["", "import mujoco\n", "import gymnasium\nimport metaworld\n"])
def test_rendering_is_headless_by_default_whoever_imports_mujoco_first(first):
    result = python(first + PROBE)
    assert result.stdout == "rendered\n", result.stderr


@pytest.mark.parametrize("backend", ["osmesa", "glfw", "nonsense"])
def test_no_rendering_names_the_backend_and_the_packages(backend):
    if backend == "osmesa" and ctypes.util.find_library("OSMesa"):
        pytest.skip("this machine has OSMesa, so rendering works")
    result = python(PROBE, MUJOCO_GL=backend)
    assert result.returncode != 0
    message = result.stderr.splitlines()[-1]
    assert "RenderingUnavailable: MUJOCO_GL=" + backend in message
    for package in ("libegl1", "libgl1-mesa-dri", "libosmesa6", "make setup"):
        assert package in message


def test_no_rendering_is_told_before_a_pool_starts_workers():
    code = (
        "from wmrl_embodied.envs.pool import SimulatorPool\n"
        "if __name__ == '__main__':\n"
        "    with SimulatorPool(workers=1) as pool:\n"
        "        pool.reset([('reach-v3', 0)])\n"
    )
    result = python(code, MUJOCO_GL="nonsense")
    assert result.returncode != 0
    assert "libegl1" in result.stderr.splitlines()[-1]


def test_camera_is_built_as_it_says():
    camera = Camera(lookat=(1.0, 2.0, 3.0), distance=4.0, azimuth=5.0, elevation=6.0).build()
    assert [*camera.lookat, camera.distance, camera.azimuth, camera.elevation] == [1, 2, 3, 4, 5, 6]
