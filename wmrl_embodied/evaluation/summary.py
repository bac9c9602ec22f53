"""What an experiment found, as one plain dict: success with intervals, executions spent, world-model quality.

The report and summary.json both come from this dict, so that they cannot disagree. Knows no plots.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wmrl_embodied.core import ranking
from wmrl_embodied.evaluation import statistics
from wmrl_embodied.evaluation.runs import HELD_OUT, Evaluation, Run, find_runs, number
from wmrl_embodied.evaluation.statistics import Estimate

SEEDS_FOR_A_CLAIM = 5
BASELINE = "real"
"""The arm that executes every group: what the others are measured against."""

_ARM_ORDER = ("wmrl", "fused", "rectified", "debias", "denoise", "mixed", "raw", "real_small", BASELINE)
_OVER_SEEDS = "stratified bootstrap over seeds"
_OVER_EPISODES = "Clopper-Pearson over episodes"

State = tuple[str, int]


def summarise(
    folder: str | Path, bootstrap_seed: int = 0, resamples: int = statistics.RESAMPLES
) -> dict[str, Any]:
    """`summarise_runs` of the runs in `folder`.

    Raises:
        NoRunError: no folder, or no run in it.
    """
    return summarise_runs(find_runs(folder), np.random.default_rng(bootstrap_seed), resamples)


def write_summary(summary: Mapping[str, Any], path: str | Path) -> Path:
    """Write the summary as JSON, atomically. It holds no NaN: unknown is null."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)
    return path


def summarise_runs(
    runs: Sequence[Run], rng: np.random.Generator, resamples: int = statistics.RESAMPLES
) -> dict[str, Any]:
    """Everything the report says in numbers; unknown values are None.

    Success is that of held-out listed states, success at any step of the episode; states already successful at
    reset are left out and counted. With several seeds `value` is the interquartile mean over seeds and tasks, with
    a stratified bootstrap interval over seeds; with one seed, or where seeds do not differ, the interval is
    Clopper-Pearson over episodes (`interval` says which). `rate` is always the pooled share of episodes with its
    Clopper-Pearson interval: the first interval asks what other seeds would give, the second what other states
    would. "sft" is the policy that training started from, "success" that of the last evaluation.
    Curves are lists of points in the order of training. `executions_to_reach_baseline` is the number of real
    executions at which the curve of an arm first reaches the final success of `real`; None if it never does.
    """
    arms = by_arm(runs)
    deterministic = any(e.deterministic for run in runs for e in run.evaluations if e.split == HELD_OUT)
    tasks = sorted({e.task for run in runs for e in run.evaluations if e.split == HELD_OUT})
    summariser = _Summariser(tasks, deterministic, rng, resamples)
    sft = summariser.sft(runs)
    summary: dict[str, Any] = {
        "arm_names": list(arms),
        "seeds": sorted({run.seed for run in runs if run.seed is not None}),
        "tasks": tasks,
        "protocol": {
            "split": HELD_OUT,
            "score": "success at any step",
            "actions": "deterministic" if deterministic else "sampled",
            "confidence": statistics.CONFIDENCE,
            "seeds_for_a_claim": SEEDS_FOR_A_CLAIM,
        },
        "sft": summariser.success(sft),
        "arms": {name: summariser.arm(members, sft) for name, members in arms.items()},
    }
    summary["baseline"] = BASELINE if BASELINE in arms else None
    summary["comparisons"] = summariser.comparisons(arms)
    summary["equal_executions"] = summariser.equal_executions(arms)
    summary["pairs"] = summariser.pairs(arms)
    _add_executions_to_reach(summary)
    summary["missing"] = _missing(arms, summary)
    return _plain(summary)


def median_run(runs: Sequence[Run], deterministic: bool | None = None) -> Run:
    """The run whose final held-out success is the median one (the lower of two): shown, so that none is picked."""
    scores = [statistics.success_rate(_final(run, HELD_OUT, deterministic)).rate for run in runs]
    order = sorted(range(len(runs)), key=lambda i: (math.isnan(scores[i]), scores[i], i))
    known = sum(not math.isnan(s) for s in scores)
    return runs[order[(max(known, 1) - 1) // 2]]


def success_curve(run: Run, deterministic: bool | None = None) -> list[tuple[int, float, float]]:
    """(step, executions, mean success over tasks) of each complete held-out evaluation of a run."""
    curve = []
    for step in _complete_steps(run, HELD_OUT, deterministic):
        rows = _rows(run, HELD_OUT, deterministic, step)
        rates = [
            statistics.success_rate([r for r in rows if r.task == t]).rate for t in {r.task for r in rows}
        ]
        rates = [r for r in rates if math.isfinite(r)]
        executions = [r.executions for r in rows if math.isfinite(r.executions)]
        if rates and executions:
            curve.append((step, max(executions), float(np.mean(rates))))
    return curve


def seconds_by_part(run: Run) -> dict[str, float]:
    """Seconds spent on each part of the loop, in total."""
    total: dict[str, float] = defaultdict(float)
    for row in run.metrics:
        for key, value in row.items():
            part = key.removeprefix("seconds/")
            if part != key and part not in ("total", "step") and math.isfinite(number(value)):
                total[part] += number(value)
    return dict(total)


class _Summariser:
    """The shared settings of all estimates in one summary."""

    def __init__(
        self, tasks: list[str], deterministic: bool, rng: np.random.Generator, resamples: int
    ) -> None:
        self.tasks, self.deterministic, self.rng, self.resamples = tasks, deterministic, rng, resamples

    def sft(self, runs: Sequence[Run]) -> list[list[Evaluation]]:
        """Step-0 evaluations of each policy that training started from.

        Arms of one seed start from the same policy, so a seed counts once; and seeds that show the very same
        outcomes are one policy, not evidence about several.
        """
        by_seed: dict[Any, list[Evaluation]] = {}
        for position, run in enumerate(runs):
            rows = _rows(run, HELD_OUT, self.deterministic, step=0)
            key = run.seed if run.seed is not None else f"run {position}"
            if len(rows) > len(by_seed.get(key, [])):
                by_seed[key] = rows
        unique = {_outcome(rows): rows for rows in by_seed.values()}
        return list(unique.values())

    def success(self, policies: Sequence[list[Evaluation]]) -> dict[str, Any]:
        """Success of several policies (seeds), each given by its evaluations; with intervals, also by task."""
        rows = [row for policy in policies for row in policy]
        scores = self._scores(policies)
        rate = statistics.success_rate(rows).interval()
        estimate, interval = rate, _OVER_EPISODES
        if len(policies) > 1:
            estimate = self._bootstrap(scores)
            if _varies(scores):
                interval = _OVER_SEEDS
            else:
                value = estimate.value
                estimate = Estimate(value, min(rate.low, value), max(rate.high, value))
        return {
            **dataclasses.asdict(estimate),
            "interval": interval,
            "rate": rate.value,
            "rate_low": rate.low,
            "rate_high": rate.high,
            "seeds": int(np.isfinite(scores).any(axis=1).sum()) if scores.size else 0,
            "per_seed": [
                float(np.mean(row[np.isfinite(row)])) if np.isfinite(row).any() else None for row in scores
            ],
            **_counts(rows),
            "at_k": self._at_k(policies),
            "per_task": {
                task: {
                    **dataclasses.asdict(statistics.success_rate(own).interval()),
                    "interval": _OVER_EPISODES,
                    **_counts(own),
                }
                for task in self.tasks
                if (own := [row for row in rows if row.task == task])
            },
        }

    def arm(self, runs: Sequence[Run], sft: Sequence[list[Evaluation]]) -> dict[str, Any]:
        """All numbers of one arm."""
        finals = [f for f in (_final(run, HELD_OUT, self.deterministic) for run in runs) if f]
        train = [f for f in (_final(run, "train", self.deterministic) for run in runs) if f]
        seconds = _mean_by_key([seconds_by_part(run) for run in runs])
        return {
            "seeds": [run.seed for run in runs],
            "success": self.success(finals),
            "success_on_train_states": self.success(train) if train else None,
            "gain_over_sft": self._paired(finals, sft),
            "steps": _spread([len(run.metrics) and run.metrics[-1]["step"] for run in runs]),
            "executions": _spread([_last(run, "executions") for run in runs]),
            "imagined": _spread([_last(run, "imagined") for run in runs]),
            "seconds": seconds,
            "seconds_total": sum(seconds.values()) if seconds else None,
            "seconds_per_execution": _unit_cost(runs, "seconds/execute", "executions"),
            "seconds_per_imagined": _unit_cost(runs, "seconds/imagine", "imagined"),
            **self._world_model(runs),
            "curve": self._curve(runs),
        }

    def comparisons(self, arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
        """Every other arm against the baseline, at each one's last evaluation."""
        if BASELINE not in arms:
            return []
        finals, found = self._finals(arms), []
        for name in arms:
            if name == BASELINE or not finals[name] or not finals[BASELINE]:
                continue
            ours, theirs = self._scores(finals[name]), self._scores(finals[BASELINE])
            improvement = statistics.probability_of_improvement(ours, theirs, self.rng, self.resamples)
            found.append(
                {
                    "arm": name,
                    "against": BASELINE,
                    "probability_of_improvement": dataclasses.asdict(improvement),
                    "paired_difference": self._paired(finals[name], finals[BASELINE]),
                }
            )
        return found

    def pairs(self, arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
        """Paired difference of every two arms on the same states, at each one's last evaluation."""
        finals = {name: policies for name, policies in self._finals(arms).items() if policies}
        return [
            {"arm": one, "against": other, **self._paired(finals[one], finals[other])}
            for one, other in itertools.combinations(finals, 2)
        ]

    def _finals(self, arms: Mapping[str, Sequence[Run]]) -> dict[str, list[list[Evaluation]]]:
        return {
            name: [f for f in (_final(run, HELD_OUT, self.deterministic) for run in runs) if f]
            for name, runs in arms.items()
        }

    def equal_executions(self, arms: Mapping[str, Sequence[Run]]) -> dict[str, Any] | None:
        """Success of every arm at the largest number of real executions that all runs reached."""
        ends = [curve[-1][1] for runs in arms.values() for run in runs if (curve := self._run_curve(run))]
        if len(arms) < 2 or not ends:
            return None
        budget, found = min(ends), {}
        for name, runs in arms.items():
            rows = []
            for run in runs:
                steps = _complete_steps(run, HELD_OUT, self.deterministic)
                evaluations = [_rows(run, HELD_OUT, self.deterministic, step) for step in steps]
                curves = [[(_executions(e), _rate(e, task)) for e in evaluations] for task in self.tasks]
                rows.append([statistics.success_at(curve, budget) for curve in curves])
            scores = np.array(rows, dtype=np.float64).reshape(len(runs), len(self.tasks))
            estimate = self._bootstrap(scores)
            if not _varies(scores):
                estimate = Estimate(estimate.value, math.nan, math.nan)
            found[name] = dataclasses.asdict(estimate)
        return {"executions": budget, "arms": found}

    def _scores(self, policies: Sequence[list[Evaluation]]) -> np.ndarray:
        """(policies, tasks) success rates."""
        rates = [[_rate(policy, task) for task in self.tasks] for policy in policies]
        return np.array(rates, dtype=np.float64).reshape(len(policies), len(self.tasks))

    def _run_curve(self, run: Run) -> list[tuple[int, float, float]]:
        return success_curve(run, self.deterministic)

    def _curve(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Success over training, at the steps where every run that was evaluated at all has an evaluation.

        The interval is over seeds; with one seed, over its episodes.
        """
        steps = [set(s) for run in runs if (s := _complete_steps(run, HELD_OUT, self.deterministic))]
        points = []
        for step in sorted(set.intersection(*steps)) if steps else []:
            policies = [rows for run in runs if (rows := _rows(run, HELD_OUT, self.deterministic, step))]
            estimate = (
                self._bootstrap(self._scores(policies))
                if len(policies) > 1
                else statistics.success_rate(policies[0]).interval()
            )
            executions = np.mean([_executions(rows) for rows in policies])
            points.append({"step": step, "executions": executions, **dataclasses.asdict(estimate)})
        return points

    def _paired(
        self, ours: Sequence[list[Evaluation]], theirs: Sequence[list[Evaluation]]
    ) -> dict[str, float]:
        """Mean difference over the listed states that both were evaluated on; seeds are averaged first."""
        a, b = _by_state(ours), _by_state(theirs)
        states = [state for state in a if state in b]
        estimate = statistics.paired_difference(
            np.array([a[s] for s in states]),
            np.array([b[s] for s in states]),
            [task for task, _ in states],
            self.rng,
            self.resamples,
        )
        return {**dataclasses.asdict(estimate), "states": len(states)}

    def _world_model(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Quality of the predictions for executed groups, made before the world model learned from them."""
        groups = [g for run in runs for g in run.pairs if np.isfinite(g.predicted).any()]
        if not groups:
            return _world_model_from_metrics(runs)
        predicted, executed, variance = (
            np.concatenate([getattr(g, k) for g in groups])
            for k in ("predicted", "executed", "predicted_variance")
        )
        scored = [(g.predicted, g.executed) for g in groups]
        in_group, mixed = ranking.in_group_auc(scored)
        interval = statistics.in_group_auc_interval(scored, self.rng, self.resamples)
        return {
            "auc_in_group": in_group,
            "auc_in_group_interval": [interval.low, interval.high],
            "mixed_groups": mixed,
            "groups": len(groups),
            "auc_pooled": ranking.auc(predicted, executed),
            "auc_source": "pairs.jsonl",
            "prediction_error": dataclasses.asdict(
                statistics.prediction_error(predicted, executed, variance)
            ),
            "calibration": [
                {"predicted": b.predicted, "executed": dataclasses.asdict(b.executed), "count": b.count}
                for b in statistics.calibration_table(predicted, executed)
            ],
        }

    def _at_k(self, policies: Sequence[list[Evaluation]]) -> dict[str, Any] | None:
        """Average, Best@k and All@k over states rolled out k times or more; None if none was."""
        attempts: dict[tuple[int, State], list[float]] = defaultdict(list)
        for position, policy in enumerate(policies):
            for state, value in _episodes(policy):
                attempts[position, state].append(value)
        k = min((len(v) for v in attempts.values()), default=0)
        if k < 2:
            return None
        names: dict[str, Callable[[int, int, int], float]] = {
            "average": lambda n, c, k: c / n,
            "best": statistics.best_at_k,
            "all": statistics.all_at_k,
        }
        found: dict[str, Any] = {"k": k}
        for name, formula in names.items():
            by_task: dict[str, list[float]] = defaultdict(list)
            for (_, (task, _)), values in attempts.items():
                by_task[task].append(formula(len(values), round(sum(values)), k))
            scores = np.full((max(map(len, by_task.values())), len(by_task)), np.nan)
            for column, values in enumerate(by_task.values()):
                scores[: len(values), column] = values
            found[name] = dataclasses.asdict(self._bootstrap(scores, lambda x: x.mean(axis=-1)))
        return found

    def _bootstrap(
        self, scores: np.ndarray, statistic: statistics.Statistic = statistics.interquartile_mean
    ) -> Estimate:
        return statistics.stratified_bootstrap(scores, self.rng, statistic, self.resamples)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by arm, ours first and the baseline last."""
    arms: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        arms[run.arm].append(run)
    unknown = _ARM_ORDER.index("real_small") - 0.5
    place = {name: float(i) for i, name in enumerate(_ARM_ORDER)}
    return {name: arms[name] for name in sorted(arms, key=lambda n: (place.get(n, unknown), n))}


def _rows(run: Run, split: str, deterministic: bool | None, step: int) -> list[Evaluation]:
    return [
        e
        for e in run.evaluations
        if e.split == split and e.step == step and deterministic in (None, e.deterministic)
    ]


def _complete_steps(run: Run, split: str, deterministic: bool | None) -> list[int]:
    """The steps whose evaluation covers all tasks that the run was ever evaluated on."""
    tasks: dict[int, set[str]] = defaultdict(set)
    for e in run.evaluations:
        if e.split == split and deterministic in (None, e.deterministic):
            tasks[e.step].add(e.task)
    everything = set().union(*tasks.values())
    return sorted(step for step, seen in tasks.items() if seen == everything)


def _final(run: Run, split: str, deterministic: bool | None = None) -> list[Evaluation]:
    """The last complete evaluation after training began; empty if there is none."""
    steps = [s for s in _complete_steps(run, split, deterministic) if s > 0]
    return _rows(run, split, deterministic, steps[-1]) if steps else []


def _rate(rows: Iterable[Evaluation], task: str) -> float:
    return statistics.success_rate([row for row in rows if row.task == task]).rate


def _counts(rows: Sequence[Evaluation]) -> dict[str, Any]:
    once, at_end = statistics.success_rate(rows), statistics.success_rate(rows, at_end=True)
    return {
        "successes": once.successes,
        "episodes": once.episodes,
        "already_successful": once.already_successful,
        "missing_episodes": once.missing,
        "at_end": at_end.rate,
    }


def _executions(rows: Sequence[Evaluation]) -> float:
    known = [row.executions for row in rows if math.isfinite(row.executions)]
    return max(known) if known else math.nan


def _varies(scores: np.ndarray) -> bool:
    """Whether two seeds differ on some task: without that, resampling seeds finds no uncertainty at all."""
    return any(len(c) > 1 and np.ptp(c) > 0 for c in (column[np.isfinite(column)] for column in scores.T))


def _outcome(rows: Sequence[Evaluation]) -> tuple[Any, ...]:
    return tuple(sorted((r.task, tuple(r.index), r.success_once.tobytes()) for r in rows))


def _episodes(rows: Iterable[Evaluation]) -> Iterable[tuple[State, float]]:
    """(state, success) of every episode that counts."""
    for row in rows:
        for index, value in zip(row.index, statistics.counted(row), strict=True):
            if math.isfinite(value):
                yield (row.task, int(index)), float(value)


def _by_state(policies: Sequence[list[Evaluation]]) -> dict[State, float]:
    """Mean success of each state over policies and repeated rollouts."""
    values: dict[State, list[float]] = defaultdict(list)
    for policy in policies:
        for state, value in _episodes(policy):
            values[state].append(value)
    return {state: float(np.mean(v)) for state, v in values.items()}


def _last(run: Run, key: str) -> float:
    """The largest value of a cumulative count, from metrics or evaluations; NaN if never written."""
    values = [number(row.get(key)) for row in run.metrics]
    if key == "executions":
        values += [e.executions for e in run.evaluations]
    values = [v for v in values if math.isfinite(v)]
    return max(values) if values else math.nan


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds, and each seed's value."""
    known = [v for v in values if math.isfinite(v)]
    return {"mean": float(np.mean(known)) if known else math.nan, "per_seed": list(values)}


def _mean_by_key(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the runs that measured anything; a part that a run lacks took it no time."""
    rows = [row for row in rows if row]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: float(np.mean([row.get(key, 0.0) for row in rows])) for key in keys}


def _unit_cost(runs: Sequence[Run], seconds: str, count: str) -> float:
    """Seconds that one execution, or one imagined rollout, took in training."""
    spent, made = 0.0, 0.0
    for run in runs:
        rows = [row for row in run.metrics if math.isfinite(number(row.get(count)))]
        start = 0.0 if count == "imagined" else _executions([e for e in run.evaluations if e.step == 0])
        if rows and math.isnan(start):  # unknown what was executed before the first row, so count from it
            start, rows = number(rows[0][count]), rows[1:]
        if rows:
            spent += sum(s for row in rows if math.isfinite(s := number(row.get(seconds))))
            made += number(rows[-1][count]) - start
    return spent / made if made > 0 and spent > 0 else math.nan


def _world_model_from_metrics(runs: Sequence[Run]) -> dict[str, Any]:
    """What the training log alone says of the world model: the mean over steps, weighted by mixed groups."""
    rows = [row for run in runs for row in run.metrics]
    keys = ("world_model/auc_in_group", "world_model/mixed_groups", "world_model/auc_pooled")
    table = np.array([[number(row.get(k)) for k in keys] for row in rows], dtype=np.float64).reshape(-1, 3)
    in_group, mixed, pooled = table.T
    known = np.isfinite(in_group) & (mixed > 0)
    known_pooled = pooled[np.isfinite(pooled)]
    return {
        "auc_in_group": float(np.average(in_group[known], weights=mixed[known])) if known.any() else math.nan,
        "auc_in_group_interval": [math.nan, math.nan],
        "mixed_groups": int(np.nansum(mixed)),
        "groups": None,
        "auc_pooled": float(known_pooled.mean()) if len(known_pooled) else math.nan,
        "auc_source": "metrics.jsonl" if known.any() or len(known_pooled) else None,
        "prediction_error": None,
        "calibration": [],
    }


def _add_executions_to_reach(summary: dict[str, Any]) -> None:
    baseline = summary["baseline"]
    level = summary["arms"][baseline]["success"]["value"] if baseline else math.nan
    for arm in summary["arms"].values():
        points = [(p["executions"], p["value"]) for p in arm["curve"]]
        reached = statistics.executions_to_reach(points, level) if math.isfinite(level) else math.nan
        arm["executions_to_reach_baseline"] = reached


def _missing(arms: Mapping[str, Sequence[Run]], summary: Mapping[str, Any]) -> list[str]:
    """What a reader has to know is not there, in words."""
    said = []
    for name, runs in arms.items():
        if len(runs) < SEEDS_FOR_A_CLAIM:
            seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
            said.append(f"{name}: {seeds}; a claim about the method needs {SEEDS_FOR_A_CLAIM} or more.")
        steps = [run.metrics[-1]["step"] if run.metrics else 0 for run in runs]
        for run, step in zip(runs, steps, strict=True):
            if step < max(steps):
                said.append(f"{run.name}: stopped at step {step}, other seeds reached step {max(steps)}.")
            if not _final(run, HELD_OUT):
                said.append(f"{run.name}: no held-out evaluation after training began.")
            # An arm that imagines nothing has no imagination to film.
            films = [] if _last(run, "imagined") > 0 or not run.metrics else ["media/imagined.npz"]
            absent = [name for name in run.missing if name not in films]
            if absent:
                said.append(f"{run.name}: no {', '.join(absent)}.")
            said += [f"{run.name}: {note}." for note in run.notes]
    if not summary["sft"]["episodes"]:
        said.append("No held-out evaluation at step 0: the policy that training started from is unknown.")
    if summary["sft"]["missing_episodes"] or any(
        a["success"]["missing_episodes"] for a in summary["arms"].values()
    ):
        said.append("Some episodes have no result (infrastructure failures); they are left out of all rates.")
    return said


def _plain(value: Any) -> Any:
    """The same value in JSON's own types; NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
