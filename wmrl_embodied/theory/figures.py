"""Figures of `wmrl-bench theory`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from wmrl_embodied.theory.gradients import ESTIMATORS, PATIENT


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write error_grid.png, noise.png and learning.png."""
    figures = {
        "error_grid": _error_grid(summary),
        "noise": _noise(summary),
        "learning": _learning(summary),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
    return paths


def _error_grid(summary: Mapping[str, Any]) -> Figure:
    """Squared error of each estimator in each cell, over that of the cell's best."""
    cells = summary["cells"]
    errors = np.array([[cell["estimators"][name]["error"][0] for name in ESTIMATORS] for cell in cells])
    figure = Figure(figsize=(9, 0.28 * len(cells) + 1.5))
    axes = figure.subplots()
    relative = np.log10(errors / errors.min(axis=1, keepdims=True))
    axes.imshow(relative, cmap="viridis_r", vmax=1.0, vmin=0.0, aspect="auto")
    for (row, column), value in np.ndenumerate(errors):
        colour = "white" if relative[row, column] > 0.5 else "black"
        axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(ESTIMATORS)), ESTIMATORS, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(cells)), [_label(cell["cell"]) for cell in cells], fontsize=7)
    axes.set_title(f"Squared error of the gradient over |g|² ({summary['seeds']} seeds)", fontsize=10)
    return figure


def _label(cell: Mapping[str, Any]) -> str:
    drift = ", drift" if cell["drift"] else ""
    return f"{cell['bias']}, {cell['anchors']} anchors, noise {cell['noise']}, success {cell['success_rate']}{drift}"


def _noise(summary: Mapping[str, Any]) -> Figure:
    """Variance of what mixes two streams over that of the executed one, against their ratio; unbiased models."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    cells = [cell["estimators"] for cell in summary["cells"] if cell["cell"]["bias"] == "none"]
    variance = {name: np.array([cell[name]["variance"][0] for cell in cells]) for name in ESTIMATORS}
    executed = variance["real_small"]
    ratio = variance["predicted"] / executed
    for name, marker in (
        ("mixed", "s"),
        ("wmrl", "v"),
        ("inverse_variance", "o"),
        ("rectified", "^"),
        ("fused", "D"),
    ):
        axes.loglog(ratio, variance[name] / executed, marker, label=name, alpha=0.8)
    if len(cells):
        x = np.geomspace(ratio.min() / 1.5, ratio.max() * 1.5, 50)
        axes.loglog(x, x / (1 + x), "k:", label="1 / (1 + V_E / V_WM), best of independent streams")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xlabel="V_WM / V_E, predicted over executed stream of a step",
        ylabel="variance over V_E",
        title=f"Noise, unbiased models ({summary['seeds']} seeds)",
    )
    figure.legend(fontsize=7, loc="outside right center")
    return figure


def _learning(summary: Mapping[str, Any]) -> Figure:
    """Where training ends against the bias of the model; and the way there, beside the 1/sqrt(T) of the bound, with
    the strongest monotone bias and with one that drifts.
    """
    figure = Figure(figsize=(15, 4), layout="constrained")
    plateau, curve, drift = figure.subplots(1, 3)
    monotone = [row for row in summary["learning"] if row["cell"]["bias"] == "monotone"]
    for learner in ("raw", "debias", "rectified", "fused", PATIENT):
        rows = sorted((r for r in monotone if r["learner"] == learner), key=lambda r: r["squared_bias"])
        if not rows:
            continue
        final = np.array([row["final"] for row in rows])
        x = [row["squared_bias"] for row in rows]
        whiskers = [final[:, 0] - final[:, 1], final[:, 2] - final[:, 0]]
        plateau.errorbar(x, final[:, 0], whiskers, marker="o", label=learner, capsize=2)
    limits = sorted((r["squared_bias"], r["limit"][0]) for r in monotone if r["learner"] == "raw")
    plateau.plot(*zip(*limits, strict=True), "k:", label="optimum of the predictions")
    plateau.set(
        xlabel="B², squared bias of the predictions", ylabel="J* - J at the end", title="Monotone bias"
    )
    plateau.legend(fontsize=8)
    strongest = [row for row in monotone if row["cell"]["strength"] == 1.0]
    drifting = [row for row in summary["learning"] if row["cell"]["drift"]]
    for axes, rows, title in (
        (curve, strongest, "Strongest monotone bias"),
        (drift, drifting, "Bias by context, drifting over the first 100 steps"),
    ):
        for place, row in enumerate(rows):
            line = "-" if place < 10 else "--"  # matplotlib has ten colours
            axes.loglog(np.arange(1, len(row["curve"])), row["curve"][1:], line, label=row["learner"])
        if rows:
            steps = np.arange(1, len(rows[0]["curve"]))
            axes.loglog(steps, rows[0]["curve"][1] / np.sqrt(steps), "k:", label="1/√T, shape of the bound")
        axes.set(xlabel="step T", ylabel="J* - J", title=title)
        axes.legend(fontsize=7)
    return figure
