"""Rollouts as one small animated GIF: the policy before training on top, after training below.

Knows only arrays of frames; the page decides where the animation goes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

_GAP = 4
_BORDER = 3
_WON, _LOST, _PAPER = (0, 158, 115), (213, 94, 0), (255, 255, 255)
_HOLD_MS = 1600


def rollouts_gif(
    before: Mapping[str, np.ndarray] | None,
    after: Mapping[str, np.ndarray] | None,
    limit_bytes: int,
    rollouts: int = 6,
    size: int = 132,
    frames: int = 40,
    frame_ms: int = 90,
) -> bytes | None:
    """The first rollouts of both sides, playing together and then held, framed green (success) or orange.

    Args:
        before: `frames` (N, T, H, W, 3) uint8 and `success` (N,); None if missing.
        after: the same; rollout i starts from the same state as rollout i before.
        limit_bytes: of the result; frames and size are reduced until it fits.
        rollouts: how many columns at most.
        size: height of one rollout in pixels at most.
        frames: how many at most, evenly spaced over the rollout.
        frame_ms: how long each is shown.

    Returns:
        The GIF, or None if there is nothing to show or it cannot be made to fit.
    """
    sides = [s for s in (before, after) if s is not None and s["frames"].ndim == 5 and s["frames"].size]
    if not sides:
        return None
    columns = min(rollouts, max(len(s["frames"]) for s in sides))
    while size >= 40 and frames >= 4:
        data = _encode(_canvases(sides, columns, size, frames), frame_ms)
        if len(data) <= limit_bytes:
            return data
        size, frames = int(size * 0.85), max(4, int(frames * 0.85))
    return None


def _canvases(
    sides: list[Mapping[str, np.ndarray]], columns: int, size: int, frames: int
) -> list[Image.Image]:
    """Every frame of the animation; the last one has the rollouts framed by their outcome."""
    height, width = sides[0]["frames"].shape[2:4]
    tile = (round(size * width / height), size)
    length = max(s["frames"].shape[1] for s in sides)
    moments = np.unique(np.linspace(0, length - 1, min(frames, length)).round().astype(int))
    step_x, step_y = tile[0] + _GAP, tile[1] + _GAP
    canvases = []
    for moment in [*moments, None]:
        canvas = Image.new("RGB", (columns * step_x - _GAP, len(sides) * step_y - _GAP), _PAPER)
        for row, side in enumerate(sides):
            for column, film in enumerate(side["frames"][:columns]):
                index = len(film) - 1 if moment is None else min(int(moment), len(film) - 1)
                image = Image.fromarray(film[index]).resize(tile, Image.Resampling.LANCZOS)
                if moment is None:
                    framed = Image.new("RGB", tile, _WON if side["success"][column] > 0.5 else _LOST)
                    inner = image.crop((_BORDER, _BORDER, tile[0] - _BORDER, tile[1] - _BORDER))
                    framed.paste(inner, (_BORDER, _BORDER))
                    image = framed
                canvas.paste(image, (column * step_x, row * step_y))
        canvases.append(canvas)
    return canvases


def _encode(canvases: list[Image.Image], frame_ms: int) -> bytes:
    """One palette for all frames, so that what does not move costs nothing."""
    middle, last = canvases[len(canvases) // 2], canvases[-1]
    sample = Image.new("RGB", (last.width, 2 * last.height))
    sample.paste(middle, (0, 0))
    sample.paste(last, (0, last.height))
    palette = sample.quantize(128, method=Image.Quantize.MEDIANCUT)
    first, *rest = [c.quantize(palette=palette, dither=Image.Dither.NONE) for c in canvases]
    buffer = io.BytesIO()
    durations = [frame_ms] * len(rest) + [_HOLD_MS]
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=False)
    return buffer.getvalue()
