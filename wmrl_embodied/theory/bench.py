"""`wmrl-bench theory`: the grid of gradient errors and the training curves; parallel, goes on where it stopped."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

from wmrl_embodied.theory.bandit import BIASES
from wmrl_embodied.theory.gradients import AVERAGED, ESTIMATORS, PATIENT, Cell, measure
from wmrl_embodied.theory.learning import train

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEARNERS = (*(name for name in ESTIMATORS if name != "predicted"), PATIENT, AVERAGED)
_SINGLE = ("real_small", "predicted", "raw", "debias", "rectified")


@dataclass(frozen=True)
class Job:
    """One measurement: the gradients of a cell, or the training of one `learner` in it."""

    cell: Cell
    seed: int
    learner: str = ""

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        return json.dumps(asdict(self))


def grid() -> list[Cell]:
    """Every kind of bias by anchors, and one by one noise, success rate and drift around the middle."""
    cells = []
    for bias in BIASES:
        middle = Cell(bias=bias)
        cells += [replace(middle, anchors=anchors) for anchors in (2, 8, 32)]
        cells += [replace(middle, noise=noise) for noise in (0.05, 0.5)]
        cells += [replace(middle, success_rate=rate) for rate in (0.04, 0.5)]
    return [*cells, replace(Cell(bias="context"), drift=1.0)]


def learning_cells() -> list[Cell]:
    """Where policies are trained: the monotone bias by strength, each other kind, and one that drifts."""
    sharp = Cell(bias="monotone", noise=0.05)
    others = [replace(sharp, bias=bias) for bias in BIASES if bias != "monotone"]
    drifting = replace(sharp, bias="context", drift=1.0)
    return [*(replace(sharp, strength=strength) for strength in STRENGTHS), *others, drifting]


def all_jobs(seeds: int) -> list[Job]:
    """What `wmrl-bench theory` measures."""
    jobs = [Job(cell, seed) for seed in range(seeds) for cell in grid()]
    return jobs + [
        Job(cell, seed, learner)
        for seed in range(seeds)
        for cell in learning_cells()
        for learner in LEARNERS
        if cell.bias != "monotone"
        or cell.strength == 1.0
        or learner in ("raw", "debias", "rectified", "fused", PATIENT)
    ]


def run(
    folder: Path, jobs: Sequence[Job], workers: int, learning_steps: int, learning_rate: float
) -> dict[str, Any]:
    """Measure what `folder` does not hold yet; returns the summary and writes it as theory.json."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"measured-{learning_steps}-{learning_rate:g}.jsonl"
    known = _read(file)
    left = [job for job in jobs if job.key not in known]
    # Spawned, as torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    work = partial(_work, steps=learning_steps, learning_rate=learning_rate)
    with ProcessPoolExecutor(workers, mp_context=context) as pool, file.open("a") as out:
        for job, result in zip(left, tqdm(pool.map(work, left), total=len(left), unit="job"), strict=True):
            known[job.key] = result
            out.write(json.dumps({"key": job.key, "result": result}) + "\n")
            out.flush()
    summary = summarise(jobs, known)
    (folder / "theory.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def summarise(jobs: Iterable[Job], known: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds with 95 % bootstrap intervals, and what they say about the claims."""
    errors: dict[Cell, list[Any]] = defaultdict(list)
    gaps: dict[tuple[Cell, str], list[Any]] = defaultdict(list)
    for job in jobs:
        if job.learner:
            gaps[job.cell, job.learner].append(known[job.key])
        else:
            errors[job.cell].append(known[job.key])
    cells = [
        {
            "cell": asdict(cell),
            "estimators": {
                name: {
                    part: interval([row[name][part] for row in rows])
                    for part in ("error", "bias", "variance")
                }
                for name in ESTIMATORS
            },
            **_fused_against_singles(rows),
        }
        for cell, rows in errors.items()
    ]
    learning = [
        {
            "cell": asdict(cell),
            "learner": name,
            "curve": np.mean([row["gap"] for row in rows], axis=0).round(5).tolist(),
            "final": interval([row["gap"][-1] for row in rows]),
            "limit": interval([row["limit"] for row in rows]),
            "squared_bias": float(np.mean([row["squared_bias"] for row in rows])),
        }
        for (cell, name), rows in gaps.items()
    ]
    covers = [c["estimators"]["rectified"]["bias"] for c in cells]
    unbiased = [c["estimators"] for c in cells if c["cell"]["bias"] == "none"]
    ratio = [c["fused_over_best"][0] for c in cells]
    claims = {
        "cells": len(cells),
        "rectified: interval of the squared bias covers 0": sum(low <= 0 <= high for _, low, high in covers),
        "unbiased cells": len(unbiased),
        "inverse_variance below both of its streams": sum(
            e["inverse_variance"]["error"][0] < min(e["predicted"]["error"][0], e["real_small"]["error"][0])
            for e in unbiased
        ),
        "fused within 5 % of the best single estimator": sum(r <= 1.05 for r in ratio),
        "fused below the best single estimator": sum(r < 1 for r in ratio),
    }
    seeds = min(map(len, errors.values()))
    return {"seeds": seeds, "claims": claims, "cells": cells, "learning": learning}


def interval(values: Iterable[float], resamples: int = 2000) -> tuple[float, float, float]:
    """Mean over at least two seeds, and its 95 % percentile-bootstrap interval."""
    array = np.asarray(list(values), np.float64)
    rng = np.random.default_rng(0)
    found = stats.bootstrap((array,), np.mean, n_resamples=resamples, method="percentile", rng=rng)
    return (float(array.mean()), *map(float, found.confidence_interval))


def _fused_against_singles(rows: list[Any]) -> dict[str, Any]:
    """The single estimator with the least mean error, and the error of `fused` over its."""
    mean = {name: float(np.mean([row[name]["error"] for row in rows])) for name in (*_SINGLE, "fused")}
    best = min(_SINGLE, key=lambda name: mean[name])
    ratios = [row["fused"]["error"] / row[best]["error"] for row in rows]
    _, low, high = interval(ratios)
    return {"best_single": best, "fused_over_best": (mean["fused"] / mean[best], low, high)}


def _work(job: Job, steps: int, learning_rate: float) -> dict[str, Any]:
    # With few anchors and a low success rate a step without any gradient is part of the problem, not worth a line.
    logging.getLogger("wmrl_embodied.core").setLevel(logging.ERROR)
    if not job.learner:
        return measure(job.cell, job.seed)
    model = job.cell.problem(job.seed)
    bandit = model.bandit
    return {
        "gap": train(job.learner, job.cell, job.seed, steps, learning_rate).tolist(),
        "limit": bandit.optimum - bandit.limit(model.means()),
        "squared_bias": float(((model.means() - bandit.success) ** 2).mean()),
    }


def _read(file: Path) -> dict[str, Any]:
    """Results so far; a line torn by a kill is measured again."""
    known: dict[str, Any] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        known[row["key"]] = row["result"]
    return known
