"""Off-screen rendering that is fast on a CPU, and a probe that says what to install when it cannot work.

Mujoco chooses its OpenGL backend from `MUJOCO_GL` when it is first imported; here that is EGL unless the user says
otherwise, whoever imported mujoco first.
"""

from __future__ import annotations

import importlib
import os
import sys

_MUJOCO_CAME_FIRST = "mujoco" in sys.modules and "MUJOCO_GL" not in os.environ
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault(
    "LP_NUM_THREADS", "1"
)  # Mesa's software renderer: its threads cost more than 64 px need

from dataclasses import dataclass  # noqa: E402

import numpy as np  # noqa: E402

_HIDDEN_GROUP = 5  # mujoco draws geom groups 0-2 by default, so group 5 is simulated and never drawn

_PROBE_SCENE = "<mujoco><worldbody><geom type='sphere' size='.1' rgba='1 0 0 1'/></worldbody></mujoco>"

_INSTALL_HINT = (
    "Headless rendering needs EGL with a software or GPU driver. On Debian or Ubuntu: "
    "`apt-get install -y libegl1 libgl1 libgl1-mesa-dri`, or run `make setup` as root. "
    "Without EGL, `apt-get install -y libosmesa6` and `MUJOCO_GL=osmesa` work too, slower."
)


class RenderingUnavailable(RuntimeError):
    """No OpenGL context could be made; the message says what to install."""

    @classmethod
    def because(cls, reason: object) -> RenderingUnavailable:
        """The error with the backend, the reason and the way out."""
        return cls(f"MUJOCO_GL={os.environ['MUJOCO_GL']}: {reason}. {_INSTALL_HINT}")


try:
    import mujoco

    if _MUJOCO_CAME_FIRST:  # it would look for a display, and abort the process where there is none
        importlib.reload(sys.modules[mujoco.Renderer.__module__].gl_context)
except Exception as error:  # a missing library shows as whatever the OpenGL bindings stumble over first
    raise RenderingUnavailable.because(error) from error


@dataclass(frozen=True)
class Camera:
    """A free camera. `lookat` in metres, `distance` in metres, `azimuth` and `elevation` in degrees.

    The default stands near the work space: Meta-World's own cameras leave a button 3 pixels wide at 64 px.
    """

    lookat: tuple[float, float, float] = (0.0, 0.68, 0.13)
    distance: float = 0.95
    azimuth: float = 145.0
    elevation: float = -35.0

    def build(self) -> mujoco.MjvCamera:
        """The mujoco camera with these settings."""
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = self.lookat
        camera.distance = self.distance
        camera.azimuth = self.azimuth
        camera.elevation = self.elevation
        return camera


class FastRenderer:
    """Renders (size, size, 3) uint8 images without shadows, reflections, sky or antialiasing.

    One renderer serves every environment whose model has the same geometry, because all poses are read from
    the `MjData` that is passed in.

    Args:
        model: compiled model; its off-screen buffer settings are changed in place.
        size: image width and height in pixels.
        camera: where to look from.

    Raises:
        RenderingUnavailable: no OpenGL context could be made.
    """

    def __init__(self, model: mujoco.MjModel, size: int, camera: Camera) -> None:
        model.vis.global_.offwidth = size
        model.vis.global_.offheight = size
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        try:
            self._renderer = mujoco.Renderer(model, size, size)
        except Exception as error:  # mujoco raises whatever the OpenGL platform raises
            raise RenderingUnavailable.because(error) from error
        for flag in (
            mujoco.mjtRndFlag.mjRND_SHADOW,
            mujoco.mjtRndFlag.mjRND_REFLECTION,
            mujoco.mjtRndFlag.mjRND_SKYBOX,
        ):
            self._renderer.scene.flags[flag] = 0
        self._camera = camera.build()

    def __call__(self, data: mujoco.MjData) -> np.ndarray:
        """The image of the state in `data`."""
        self._renderer.update_scene(data, camera=self._camera)
        return self._renderer.render()

    def close(self) -> None:
        """Free the OpenGL context."""
        self._renderer.close()


def hide_geom(model: mujoco.MjModel, geom: int) -> None:
    """Leave a geom in the physics and out of the picture."""
    model.geom_group[geom] = _HIDDEN_GROUP


def probe() -> None:
    """Render one tiny picture and check that something is in it.

    Raises:
        RenderingUnavailable: rendering does not work here; the message names the packages to install.
    """
    model = mujoco.MjModel.from_xml_string(_PROBE_SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = FastRenderer(model, 16, Camera(lookat=(0, 0, 0), distance=0.5))
    try:
        image = renderer(data)
    finally:
        renderer.close()
    if not image.any():
        raise RenderingUnavailable.because("the pictures are black")
