"""Figures of an experiment, each a matplotlib `Figure`, and their export as SVG or PNG text for a web page.

Only matplotlib's object interface: no pyplot, no global state, no display. A figure gets what it draws passed in;
it reads no files. Arms keep their colour, line and marker in every figure, so that no figure relies on colour.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from PIL import Image

from wmrl_embodied.core import ranking
from wmrl_embodied.evaluation.runs import Run, number
from wmrl_embodied.evaluation.summary import success_curve

INK, MUTED, GRID, PAPER = "#1f2328", "#636c76", "#d7dde3", "#ffffff"

# Okabe and Ito's palette, told apart with every common colour blindness; its yellow is too light for lines.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a939c",
)

THEME = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    BLUE: "--blue",
    VERMILLION: "--vermillion",
    GREEN: "--green",
    PURPLE: "--purple",
    ORANGE: "--orange",
    SKY: "--sky",
    GREY: "--grey",
}
"""Colour in a figure -> the CSS variable that `svg(..., themed=True)` writes for it."""

_ARM_COLOURS = {
    "wmrl": BLUE,
    "fused": GREEN,
    "rectified": PURPLE,
    "debias": SKY,
    "denoise": ORANGE,
    "mixed": GREY,
    "raw": ORANGE,
    "real_small": PURPLE,
    "real": VERMILLION,
}
_SPARE_COLOURS = (GREEN, PURPLE, ORANGE, SKY, BLUE, VERMILLION, GREY)
_LINES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.4, 1.2, 1.4)))
_MARKERS = "osD^vPX*"

PARTS = {
    "execute": ("real execution", VERMILLION),
    "imagine": ("imagination", BLUE),
    "predict": ("prediction of executed", SKY),
    "world_model": ("world-model learning", GREEN),
    "policy": ("policy learning", PURPLE),
    "correction": ("correction", ORANGE),
    "evaluate": ("evaluation", GREY),
}
"""Part of the training loop -> its name and colour."""

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"


class ArmStyle:
    """Colour, line and marker of every arm, the same in all figures of a report."""

    def __init__(self, arms: Sequence[str]) -> None:
        spare = iter(c for c in _SPARE_COLOURS * 4 if c not in {_ARM_COLOURS.get(a) for a in arms})
        taken: set[str] = set()
        self._style = {}
        for i, arm in enumerate(arms):
            colour = _ARM_COLOURS.get(arm)
            if colour is None or colour in taken:
                colour = next(spare, GREY)
            taken.add(colour)
            self._style[arm] = {
                "color": colour,
                "linestyle": _LINES[i % len(_LINES)],
                "marker": _MARKERS[i % len(_MARKERS)],
            }

    def __getitem__(self, arm: str) -> dict[str, Any]:
        return self._style[arm]

    def colour(self, arm: str) -> str:
        """The arm's colour."""
        return self._style[arm]["color"]


# --------------------------------------------------------------------------------------------------- export


def svg(figure: Figure, themed: bool = False) -> str:
    """The figure as an `<svg>` element to put inline into a page; the same figure gives the same text.

    Args:
        figure: any.
        themed: write colours as the CSS variables of `THEME`, so that the page decides between light and dark.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wmrl"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Ids that nothing refers to would repeat from figure to figure in one page.
    referred = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in referred else "", text)
    text = re.sub(r"'DejaVu Sans'[^\";]*", _FONT, text)
    if themed:
        for colour, variable in THEME.items():
            text = re.sub(f"{colour}(?![0-9a-f])", f"var({variable})", text, flags=re.IGNORECASE)
    return text.strip()


def png_base64(figure: Figure, dpi: int = 160) -> str:
    """The figure as PNG in base64, for `data:image/png;base64,...`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=PAPER, metadata={"Software": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


# -------------------------------------------------------------------------------------------------- figures


def success_against_executions(
    summary: Mapping[str, Any], arms: Mapping[str, Sequence[Run]], style: ArmStyle
) -> Figure | None:
    """Held-out success against real executions: IQM over seeds in bold, its 95 % band, each seed as a thin line.

    A second panel enlarges the smaller budget where budgets differ much. None without any evaluation.

    Args:
        summary: of the same arms.
        arms: name -> runs.
        style: of the arms.
    """
    curves = {arm: summary["arms"][arm]["curve"] for arm in arms}
    points = [p for curve in curves.values() for p in curve if p["executions"] is not None]
    if not points:
        return None
    deterministic = summary["protocol"]["actions"] == "deterministic"
    ends = [max(p["executions"] for p in curve) for curve in curves.values() if len(curve) > 1]
    zoom = len(ends) > 1 and max(ends) > 2.5 * min(ends)
    figure = _figure(9.2, 3.9)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=[1.45, 1]) if zoom else [figure.subplots()]
    for axes in panels:
        _clean(axes)
        for arm, runs in arms.items():
            singles = [success_curve(run, deterministic) for run in runs] if len(runs) > 1 else []
            _draw_curve(axes, curves[arm], singles, arm, style)
        baseline = summary.get("baseline")
        level = summary["arms"][baseline]["success"]["value"] if baseline else None
        if level is not None:
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.xaxis.set_major_formatter(_THOUSANDS)
        axes.set_xlabel("real executions spent on training")
    start = min(p["executions"] for p in points)
    end = max(p["executions"] for p in points)
    panels[0].set_xlim(start - 0.02 * (end - start), end + 0.03 * (end - start or 1))
    panels[0].set_ylabel("success on held-out states")
    if zoom:
        near = min(ends)
        panels[1].set_xlim(start - 0.03 * (near - start), near + 0.04 * (near - start))
        _title(panels[0], "All executions")
        _title(panels[1], f"The first {near:,.0f}")
    handles = _arm_handles(arms, style, markers=True)
    if level is not None:
        line = Line2D([], [], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        handles.append((line, f"final success of {baseline}"))
    _legend(figure, handles)
    return figure


def _draw_curve(
    axes: Axes,
    curve: Sequence[Mapping[str, Any]],
    singles: Sequence[Sequence[tuple[int, float, float]]],
    arm: str,
    style: ArmStyle,
) -> None:
    colour = style.colour(arm)
    for single in singles:
        x, y = [p[1] for p in single], [p[2] for p in single]
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.35)
    curve = [p for p in curve if p["executions"] is not None and p["value"] is not None]
    x = [p["executions"] for p in curve]
    low, high = (np.array([p[k] for p in curve], dtype=np.float64) for k in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, [p["value"] for p in curve], linewidth=2, markersize=5, zorder=3, **style[arm])


def calibration(summary: Mapping[str, Any], style: ArmStyle) -> Figure | None:
    """Executed against predicted score, one panel an arm; the area of a dot is its number of rollouts."""
    arms = {name: arm for name, arm in summary["arms"].items() if arm["calibration"]}
    if not arms:
        return None
    columns = min(4, len(arms))
    rows = math.ceil(len(arms) / columns)
    figure = _figure(max(3.4, 2.9 * columns), 3.1 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(arms) :]:
        axes.set_axis_off()
    for axes, (name, arm) in zip(grid.flat, arms.items(), strict=False):
        _clean(axes)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        bins = arm["calibration"]
        x = np.array([b["predicted"] for b in bins], dtype=np.float64)
        y, low, high = (
            np.array([b["executed"][k] for b in bins], dtype=np.float64) for k in ("value", "low", "high")
        )
        share = np.array([b["count"] for b in bins]) / max(b["count"] for b in bins)
        colour = style.colour(name)
        axes.vlines(x, low, high, color=colour, linewidth=1.4, alpha=0.55)
        axes.plot(x, y, color=colour, linewidth=1.2, alpha=0.6)
        axes.scatter(x, y, s=12 + 90 * share, color=colour, edgecolor=PAPER, linewidth=0.8, zorder=3)
        axes.set_xlim(-0.04, 1.04)
        axes.set_ylim(-0.04, 1.04)
        axes.set_aspect("equal")
        _title(axes, f"{name}: {sum(b['count'] for b in bins):,} rollouts")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean executed score")
    for axes in grid[-1]:
        axes.set_xlabel("mean predicted score")
    return figure


def auc_over_steps(arms: Mapping[str, Sequence[Run]], style: ArmStyle, windows: int = 8) -> Figure | None:
    """In-group and pooled AUC of predictions for executed groups, over windows of training steps.

    From the pairs where there are any, seeds together, else from the training log.
    """
    lines = {arm: line for arm, runs in arms.items() if (line := auc_by_window(runs, windows))}
    if not lines:
        return None
    figure = _figure(9.2, 3.3)
    panels = figure.subplots(1, 2, sharey=True)
    lowest = 0.45
    for axes, column, title in zip(panels, (1, 2), ("Within groups", "All rollouts pooled"), strict=True):
        _clean(axes)
        axes.axhline(0.5, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        for arm, line in lines.items():
            x, y = np.array([(p[0], p[column]) for p in line if math.isfinite(p[column])]).reshape(-1, 2).T
            axes.plot(x, y, linewidth=2, markersize=5, **style[arm])
            lowest = min([lowest, *y])
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        _title(axes, title)
    panels[0].set_ylim(max(0, lowest - 0.05), 1.02)
    panels[0].set_ylabel("AUC of the world model")
    panels[0].annotate(
        "chance", (0, 0.5), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8
    ).set_color(MUTED)
    _legend(figure, _arm_handles(lines, style, markers=True))
    return figure


def auc_by_window(runs: Sequence[Run], windows: int) -> list[tuple[float, float, float]]:
    """(mean step, in-group AUC, pooled AUC) in windows of steps with about equally many groups each."""
    groups = [g for run in runs for g in run.pairs if np.isfinite(g.predicted).any()]
    groups.sort(key=lambda g: g.step)
    if groups:
        found = []
        for part in np.array_split(np.arange(len(groups)), min(windows, max(1, len(groups) // 4))):
            members = [groups[i] for i in part]
            in_group, _ = ranking.in_group_auc((g.predicted, g.executed) for g in members)
            pooled = ranking.auc(
                np.concatenate([g.predicted for g in members]), np.concatenate([g.executed for g in members])
            )
            found.append((float(np.mean([g.step for g in members])), in_group, pooled))
        return found
    keys = ("step", "world_model/auc_in_group", "world_model/auc_pooled", "world_model/mixed_groups")
    rows = np.array([[number(row.get(k)) for k in keys] for run in runs for row in run.metrics])
    rows = rows[np.isfinite(rows[:, 1:3]).any(axis=1)] if rows.size else rows
    if not len(rows):
        return []
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    found = []
    for part in np.array_split(rows, min(windows, max(1, len(rows) // 4))):
        step, in_group, pooled, mixed = part.T
        weight = np.where(np.isfinite(in_group), np.nan_to_num(mixed, nan=1.0), 0.0)
        mean = float(np.average(np.nan_to_num(in_group), weights=weight)) if weight.sum() > 0 else math.nan
        known = pooled[np.isfinite(pooled)]
        found.append((float(step.mean()), mean, float(known.mean()) if len(known) else math.nan))
    return found


def seconds_by_part(summary: Mapping[str, Any]) -> Figure | None:
    """Seconds a run spent on each part of the training loop, mean over seeds: one stacked bar an arm."""
    arms = {name: arm["seconds"] for name, arm in summary["arms"].items() if arm["seconds"]}
    if not arms:
        return None
    totals = {name: sum(seconds.values()) for name, seconds in arms.items()}
    unit, name_of_unit = time_unit(max(totals.values()))
    figure = _figure(9.2, 1.25 + 0.5 * len(arms))
    axes = figure.subplots()
    _clean(axes, grid="x")
    present = {part for seconds in arms.values() for part in seconds}
    parts = [p for p in PARTS if p in present] + sorted(present - set(PARTS))
    extra = dict(zip(sorted(present - set(PARTS)), (INK, MUTED, GRID) * 10, strict=False))
    handles = []
    left = np.zeros(len(arms))
    for part in parts:
        label, colour = PARTS.get(part, (part.replace("_", " "), extra.get(part, GRID)))
        width = np.array([seconds.get(part, 0.0) for seconds in arms.values()]) / unit
        axes.barh(
            range(len(arms)), width, left=left, height=0.62, color=colour, edgecolor=PAPER, linewidth=0.8
        )
        left += width
        handles.append((Rectangle((0, 0), 1, 1, color=colour, linewidth=0), label))
    for i, total in enumerate(totals.values()):
        axes.annotate(
            f"{total / unit:.3g}",
            (total / unit, i),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.set_yticks(range(len(arms)), list(arms), fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(totals.values()) / unit * 1.08 or 1)
    axes.set_xlabel(f"{name_of_unit} a run, mean over seeds")
    axes.spines["left"].set_visible(False)
    _legend(figure, handles)
    return figure


_TRAINING = {
    "policy/kl_reference": "KL to the reference policy (nats)",
    "policy/clip_fraction": "share of clipped decisions",
    "correction/anchor/weight": "weight of an anchor",
}
"""Metric -> the title of its panel in `training`."""


def training(arms: Mapping[str, Sequence[Run]], style: ArmStyle) -> Figure | None:
    """What the training log says, over steps: predicted against executed score, KL, clipping, anchor weight.

    Mean over seeds, smoothed over a twentieth of the training. Only metrics that some run logged get a panel.
    """
    single = {m: lines for m in _TRAINING if (lines := _metric_lines(arms, m))}
    executed, predicted = _metric_lines(arms, "executed_success"), _metric_lines(arms, "predicted_mean")
    panels_needed = bool(executed or predicted) + len(single)
    if not panels_needed:
        return None
    columns = min(2, panels_needed)
    rows = math.ceil(panels_needed / columns)
    figure = _figure(9.2 if columns == 2 else 6, 2.7 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    panels = iter(grid.flat)
    if executed or predicted:
        axes = next(panels)
        _clean(axes)
        for arm, (x, y) in executed.items():
            axes.plot(x, y, color=style.colour(arm), linewidth=2)
        for arm, (x, y) in predicted.items():
            axes.plot(x, y, color=style.colour(arm), linewidth=1.3, linestyle=(0, (2, 1.4)))
        axes.set_ylim(-0.02, 1.02)
        _title(axes, "Training score: executed (solid), predicted (dotted)")
    for metric, lines in single.items():
        axes = next(panels)
        _clean(axes)
        for arm, (x, y) in lines.items():
            axes.plot(x, y, color=style.colour(arm), linestyle=style[arm]["linestyle"], linewidth=1.8)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        _title(axes, _TRAINING[metric][0].upper() + _TRAINING[metric][1:])
    for axes in panels:
        axes.set_axis_off()
    for axes in grid.flat[max(0, panels_needed - columns) : panels_needed]:
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        axes.tick_params(labelbottom=True)
    _legend(figure, _arm_handles(arms, style, markers=False))
    return figure


def _metric_lines(arms: Mapping[str, Sequence[Run]], metric: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arm -> (steps, mean over seeds, smoothed) of a metric; arms that never logged it are left out."""
    lines = {}
    for arm, runs in arms.items():
        values: dict[int, list[float]] = {}
        for run in runs:
            for row in run.metrics:
                value = number(row.get(metric))
                if math.isfinite(value):
                    values.setdefault(int(row["step"]), []).append(value)
        if values:
            steps = np.array(sorted(values))
            mean = np.array([np.mean(values[step]) for step in steps])
            lines[arm] = (steps, _smooth(mean, max(1, len(mean) // 20)))
    return lines


def _smooth(values: np.ndarray, half_width: int) -> np.ndarray:
    """Running mean over `2 half_width + 1` values, fewer at the ends."""
    kernel = np.ones(min(2 * half_width + 1, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


# ---------------------------------------------------------------------------------------------- film strips


def film_strips(
    before: Mapping[str, np.ndarray] | None,
    after: Mapping[str, np.ndarray] | None,
    rollouts: int = 3,
    frames: int = 6,
) -> Figure | None:
    """The first rollouts of `rollouts_before.npz` and `rollouts_after.npz` as strips, side by side.

    Args:
        before: `frames` (N, T, H, W, 3) uint8, `task` (N,), `success` (N,); None if missing.
        after: the same.
        rollouts: how many of each, from the first on.
        frames: how many of each, evenly spaced from the first to the last.
    """
    sides = {"Before": before, "After": after}
    sides = {k: v for k, v in sides.items() if v is not None and v["frames"].ndim == 5 and v["frames"].size}
    if not sides:
        return None
    count = min(rollouts, max(len(v["frames"]) for v in sides.values()))
    width = 9.2 if len(sides) == 2 else 4.7
    height, across = next(iter(sides.values()))["frames"].shape[2:4]
    strip = width / len(sides) / frames * height / across * 0.97
    figure = _figure(width, (strip + 0.3) * count)
    grid = figure.subplots(count, len(sides), squeeze=False)
    for column, (side, media) in enumerate(sides.items()):
        for row in range(count):
            axes = grid[row, column]
            axes.set_axis_off()
            if row >= len(media["frames"]):
                continue
            strip = media["frames"][row]
            chosen = strip[np.linspace(0, len(strip) - 1, min(frames, len(strip))).round().astype(int)]
            height, width = chosen.shape[1:3]
            for i, frame in enumerate(chosen):
                axes.imshow(
                    _thumbnail(frame),
                    extent=(i * width * 1.03, i * width * 1.03 + width, 0, height),
                    aspect="equal",
                )
            axes.set_xlim(0, len(chosen) * width * 1.03)
            axes.set_ylim(0, height)
            won = bool(media["success"][row] > 0.5)
            mark, colour = ("success", GREEN) if won else ("no success", VERMILLION)
            axes.set_title(f"{side}: {media['task'][row]}", loc="left", fontsize=8.5, color=INK, pad=3)
            axes.set_title(mark, loc="right", fontsize=8.5, color=colour, pad=3, fontweight="bold")
    return figure


def imagined_beside_real(media: Mapping[str, np.ndarray], dimensions: int = 4, frames: int = 9) -> Figure:
    """One executed rollout and the ensemble's imagination of the same actions, on one time axis.

    Frames of the execution on top; below, the proprioception that moved most, real against every ensemble member;
    at the bottom the members' success probability, and when the execution succeeded.

    Args:
        media: `imagined.npz`: real_frames (T, H, W, 3), real_proprio (T, P), imagined_proprio (E, T, P),
            success_probability (E, T), success_step (-1: never), task. Where there is one probability less than
            there are states, the k-th is that of a success by state k + 1.
        dimensions: how many of the P to show at most.
        frames: how many of the T to show at most.
    """
    film, real = media["real_frames"], np.asarray(media["real_proprio"], dtype=np.float64)
    imagined = np.asarray(media["imagined_proprio"], dtype=np.float64)
    probability = np.asarray(media["success_probability"], dtype=np.float64)
    success_step = int(media["success_step"])
    offset = 1 if probability.shape[1] == len(real) - 1 else 0
    last = max(len(film), len(real), imagined.shape[1], probability.shape[1] + offset) - 1
    moved = np.argsort(-np.ptp(real, axis=0), kind="stable")[:dimensions] if len(real) else []
    shown = sorted(int(d) for d in moved)
    names = _proprio_names(real.shape[1])

    width, margin = 9.2, 1.0
    count = min(frames, len(film))
    aspect = film.shape[1] / film.shape[2]
    strip = (width - margin) / count * aspect * 0.96
    heights = [strip, *[0.72] * len(shown), 1.15]
    figure = _figure(width, sum(heights) + 0.9)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]

    axes, slot = panels[0], (last + 1) / count
    for i, k in enumerate(np.linspace(0, len(film) - 1, count).round().astype(int)):
        left = -0.5 + i * slot
        axes.imshow(_thumbnail(film[k]), extent=(left + 0.02 * slot, left + 0.98 * slot, 0, 1), aspect="auto")
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    for axes, d in zip(panels[1:-1], shown, strict=True):
        _clean(axes)
        for member in imagined[:, :, d]:
            axes.plot(member, color=BLUE, linewidth=0.9, alpha=0.55)
        axes.plot(real[:, d], color=INK, linewidth=2)
        axes.set_ylabel(names[d], rotation=0, ha="right", va="center")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    axes = panels[-1]
    _clean(axes)
    when = np.arange(probability.shape[1]) + offset
    for member in probability:
        axes.plot(when, member, color=BLUE, linewidth=0.9, alpha=0.4)
    axes.plot(when, probability.mean(axis=0), color=BLUE, linewidth=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("success\nprobability", rotation=0, ha="right", va="center")
    axes.set_xlabel("step of the rollout")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.5, last + 0.5)
    if success_step >= 0:
        for axes in panels[1:]:
            axes.axvline(success_step + offset, color=GREEN, linewidth=1.6, linestyle=(0, (4, 2)))
    handles = [
        (Line2D([], [], color=INK, linewidth=2), "executed"),
        (Line2D([], [], color=BLUE, linewidth=1.2), f"imagined, {len(imagined)} members"),
    ]
    if success_step >= 0:
        handles.append(
            (Line2D([], [], color=GREEN, linewidth=1.6, linestyle=(0, (4, 2))), "executed success")
        )
    _legend(figure, handles)
    return figure


def _thumbnail(frame: np.ndarray, side: int = 128) -> np.ndarray:
    """The frame, made smaller if need be, so that a page of them stays light."""
    image = Image.fromarray(np.ascontiguousarray(frame))
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image)


def _proprio_names(count: int) -> list[str]:
    if count == 4:
        return ["hand x", "hand y", "hand z", "gripper"]
    return [f"proprio {d}" for d in range(count)]


# --------------------------------------------------------------------------------------------------- helpers

_THOUSANDS = FuncFormatter(lambda x, _: f"{x:,.0f}" if float(x).is_integer() else f"{x:g}")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _clean(axes: Axes, grid: str = "y") -> None:
    axes.set_facecolor("none")
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(color=GRID, labelcolor=MUTED, labelsize=8.5, length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=6)


def _arm_handles(arms: Iterable[str], style: ArmStyle, markers: bool) -> list[tuple[Line2D, str]]:
    return [
        (Line2D([], [], linewidth=2, markersize=5, **(style[a] if markers else style[a] | {"marker": ""})), a)
        for a in arms
    ]


def _legend(figure: Figure, handles: Sequence[tuple[Any, str]]) -> None:
    figure.legend(
        [h for h, _ in handles],
        [label for _, label in handles],
        loc="outside upper left",
        ncols=_columns([label for _, label in handles], figure.get_figwidth()),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=2.2,
        columnspacing=1.6,
        borderaxespad=0.2,
    )


def _columns(labels: Sequence[str], width: float) -> int:
    """How many legend entries fit side by side into `width` inches; rows are kept about equally long."""
    widest = max(map(len, labels)) * 0.072 + 0.6
    rows = math.ceil(len(labels) / max(1, int(width / widest)))
    if sum(len(label) * 0.072 + 0.6 for label in labels) < width:
        rows = 1
    return math.ceil(len(labels) / rows)


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which `seconds` reads best, in seconds, and its name."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
