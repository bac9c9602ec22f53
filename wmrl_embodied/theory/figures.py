"""Figures of `wmrl-bench theory`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from wmrl_embodied.theory.gradients import ESTIMATORS


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write error_grid.png and learning.png."""
    figures = {"error_grid": _error_grid(summary), "learning": _learning(summary)}
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


def _learning(summary: Mapping[str, Any]) -> Figure:
    """Where training ends against the bias of the model; and the way there, beside the 1/sqrt(T) of the bound."""
    figure = Figure(figsize=(10, 4))
    plateau, curve = figure.subplots(1, 2)
    monotone = [row for row in summary["learning"] if row["cell"]["bias"] == "monotone"]
    for learner in ("raw", "debias", "rectified", "fused"):
        rows = sorted((r for r in monotone if r["learner"] == learner), key=lambda r: r["squared_bias"])
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
    for row in strongest:
        curve.loglog(np.arange(1, len(row["curve"])), row["curve"][1:], label=row["learner"])
    steps = np.arange(1, len(strongest[0]["curve"]))
    curve.loglog(steps, strongest[0]["curve"][1] / np.sqrt(steps), "k:", label="1/√T, shape of the bound")
    curve.set(xlabel="step T", ylabel="J* - J", title="Strongest monotone bias")
    curve.legend(fontsize=7)
    return figure
