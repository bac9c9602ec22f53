"""The report of an experiment: one HTML page that needs nothing else, summary.json, and a table for the terminal.

Turns a summary and figures into words and markup; all numbers come from `summary.py`, all drawings from `plots.py`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from wmrl_embodied.evaluation import plots, statistics
from wmrl_embodied.evaluation.animation import rollouts_gif
from wmrl_embodied.evaluation.runs import Run, find_runs
from wmrl_embodied.evaluation.summary import (
    BASELINE,
    SEEDS_FOR_A_CLAIM,
    by_arm,
    median_run,
    summarise_runs,
    write_summary,
)

ARM_NOTES = {
    "wmrl": "predictions debiased online, anchors weighted by noise",
    "fused": "least estimated error of all mixes",
    "rectified": "predictions as a control variate",
    "debias": "anchors, and predictions debiased online",
    "denoise": "anchors weighted by noise, and predictions",
    "mixed": "anchors and predictions, uncorrected",
    "raw": "predictions only, uncorrected",
    "real_small": "the anchors alone, executed",
    "real": "every group executed",
}
"""What each known arm learns from, in a few words."""

LIMIT_BYTES = 8_000_000
_MEDIA_SHARE = 0.75  # of the limit; the rest is for text and plots
_GIF_BYTES = 1_500_000
_NONE = "–"


@dataclass(frozen=True)
class Written:
    """What `write_report` left on disk, and the summary that both files show."""

    report: Path
    summary_file: Path
    summary: dict[str, Any]


def write_report(
    folder: str | Path,
    bootstrap_seed: int = 0,
    resamples: int = statistics.RESAMPLES,
    limit_bytes: int = LIMIT_BYTES,
) -> Written:
    """Read the runs in `folder`; write report.html, summary.json and success.png (for a README or a paper) into it.

    Args:
        folder: an experiment folder, one arm's folder or a run folder.
        bootstrap_seed: of the resampling, so that the report repeats.
        resamples: for every interval.
        limit_bytes: of report.html; films are left out, and said to be, where they do not fit.

    Raises:
        NoRunError: no such folder, or no run in it.
        OSError: the files cannot be written.
    """
    folder = Path(folder)
    runs = find_runs(folder)
    summary = summarise_runs(runs, np.random.default_rng(bootstrap_seed), resamples)
    page = render(summary, runs, folder.absolute().name, limit_bytes)
    summary_file = write_summary(summary, folder / "summary.json")
    report = folder / "report.html"
    temporary = report.with_name(f".report.html.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(report)
    arms = by_arm(runs)
    figure = plots.success_against_executions(summary, arms, plots.ArmStyle(list(arms)))
    if figure is not None:
        figure.savefig(folder / "success.png", dpi=110, facecolor=plots.PAPER)
    return Written(report, summary_file, summary)


def render(
    summary: Mapping[str, Any],
    runs: Sequence[Run],
    name: str,
    limit_bytes: int = LIMIT_BYTES,
    now: datetime | None = None,
) -> str:
    """The page as HTML.

    Args:
        summary: of these runs, from `summarise_runs`.
        runs: whose figures and films to show.
        name: of the experiment.
        limit_bytes: of the page.
        now: when it was made; the present if None.
    """
    arms = by_arm(runs)
    style = plots.ArmStyle(list(arms))
    said_before = {run.name: set(run.notes) for run in runs}
    films, left_out = _films(summary, arms, int(limit_bytes * _MEDIA_SHARE))
    unreadable = [f"{r.name}: {note}." for r in runs for note in r.notes if note not in said_before[r.name]]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "count": count,
        "number": _number,
        "duration": duration,
    }
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        name=name,
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        s=summary,
        verdict=verdict(summary),
        tiles=_tiles(summary),
        notes=ARM_NOTES,
        colours={arm: plots.THEME[style.colour(arm)] for arm in arms},
        whisker=_whisker,
        figures={
            "success": _inline(plots.success_against_executions(summary, arms, style)),
            "calibration": _inline(plots.calibration(summary, style)),
            "auc": _inline(plots.auc_over_steps(arms, style)),
            "seconds": _inline(plots.seconds_by_part(summary)),
            "training": _inline(plots.training(arms, style)),
        },
        parts=_parts(summary),
        part_names={part: label for part, (label, _) in plots.PARTS.items()},
        films=films,
        runs=[
            {
                "name": run.name,
                "steps": run.metrics[-1]["step"] if run.metrics else 0,
                "command": run.provenance.get("command"),
                "commit": run.provenance.get("commit"),
                "machine": run.provenance.get("machine"),
            }
            for members in arms.values()
            for run in members
        ],
        configs={
            arm: OmegaConf.to_yaml(OmegaConf.create(members[0].config))
            for arm, members in arms.items()
            if members[0].config
        },
        missing=[*summary["missing"], *unreadable, *left_out],
    )


# ---------------------------------------------------------------------------------------------------- words


def percent(estimate: Mapping[str, Any] | float | None) -> str:
    """Text such as "81 %", or with an interval "81 % [74, 87]"; a dash if unknown."""
    if estimate is None or (isinstance(estimate, Mapping) and estimate["value"] is None):
        return _NONE
    if not isinstance(estimate, Mapping):
        return f"{100 * estimate:.0f} %"
    interval = ""
    if estimate.get("low") is not None:
        interval = f" [{100 * estimate['low']:.0f}, {100 * estimate['high']:.0f}]"
    return f"{100 * estimate['value']:.0f} %{interval}"


def points(estimate: Mapping[str, Any] | None) -> str:
    """A difference of two shares in percentage points: "+46 [+38, +54]"; a dash if unknown."""
    if estimate is None or estimate["value"] is None:
        return _NONE
    value, low, high = (estimate[k] for k in ("value", "low", "high"))
    interval = "" if low is None else f" [{_signed(low)}, {_signed(high)}]"
    return f"{_signed(value)}{interval}"


def _signed(share: float) -> str:
    rounded = round(100 * share)
    return "0" if rounded == 0 else f"{rounded:+d}".replace("-", "−")


def count(value: float | None) -> str:
    """A count with thousands separated; a dash if unknown."""
    return _NONE if value is None else f"{value:,.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds in the unit that reads best: "0.6 ms", "42 s", "6.4 min", "2.1 h"; a dash if unknown."""
    if seconds is None:
        return _NONE
    if seconds == 0:
        return "0 s"
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 180:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """The result in a few sentences that say no more than the intervals allow."""
    lead = _lead(summary)
    arm = summary["arms"][lead]
    sft, final, gain = summary["sft"], arm["success"], arm["gain_over_sft"]
    if final["value"] is None:
        return [f"{lead} has no held-out evaluation after training began, so there is no result yet."]
    sentences = []
    spent = arm["executions"]["mean"]
    cost = f" with {count(spent)} real executions" if spent is not None else ""
    imagined = arm["imagined"]["mean"]
    cost += f" and {count(imagined)} imagined rollouts" if cost and imagined else ""
    if gain["value"] is None:
        sentences.append(f"{lead} ends at {percent(final)} of held-out states{cost}.")
    elif gain["low"] > 0:
        sentences.append(
            f"{lead} raises success on held-out states from {percent(sft['value'])} to {percent(final['value'])}"
            f"{cost}: {points(gain)} percentage points on the same {gain['states']} states."
        )
    elif gain["high"] < 0:
        sentences.append(
            f"{lead} lowers success on held-out states from {percent(sft['value'])} to {percent(final['value'])}"
            f"{cost}: {points(gain)} percentage points on the same {gain['states']} states."
        )
    else:
        sentences.append(
            f"{lead} ends at {percent(final['value'])} of held-out states, from {percent(sft['value'])}{cost}. "
            f"The difference of {points(gain)} percentage points may be chance."
        )
    if summary["baseline"] not in (None, lead):
        sentences += _against_baseline(summary, lead)
    if final["seeds"] < SEEDS_FOR_A_CLAIM:
        seeds = "One seed describes" if final["seeds"] == 1 else f"{final['seeds']} seeds describe"
        sentences.append(
            f"{seeds} these runs, not the method; {SEEDS_FOR_A_CLAIM} are the least for a claim."
        )
    return sentences


def _against_baseline(summary: Mapping[str, Any], lead: str) -> list[str]:
    baseline = summary["arms"][BASELINE]
    level, theirs = baseline["success"]["value"], baseline["executions_to_reach_baseline"]
    if level is None:
        return []
    reached = summary["arms"][lead]["executions_to_reach_baseline"]
    spent = count(baseline["executions"]["mean"])
    ends = f"{BASELINE}, which executes every group, ends at {percent(level)} with {spent}"
    if reached is None:
        return [f"{ends}; {lead} did not reach that."]
    if theirs is None:
        return [f"{ends}; {lead} first reaches that at {count(reached)}."]
    factor = theirs / reached if reached else 0.0
    fewer = f", {factor:.1f} times fewer" if factor >= 1.05 else ""
    return [
        f"{ends}, a level it first reaches at {count(theirs)}; {lead} reaches it at {count(reached)}{fewer}."
    ]


def _lead(summary: Mapping[str, Any]) -> str:
    """The arm that the page is about: the first, in an order that puts ours first and the baseline last."""
    return summary["arm_names"][0]


def text_table(summary: Mapping[str, Any]) -> str:
    """The headline table in plain text, for the terminal."""
    head = ("", "held-out success", "over SFT", "executions", "imagined", "seeds", "time a run")
    rows = [head]
    if summary["sft"]["value"] is not None:
        rows.append(("SFT", percent(summary["sft"]), "", "", "", str(summary["sft"]["seeds"]), ""))
    for name, arm in summary["arms"].items():
        judged, seeds = arm["success"]["seeds"], len(arm["seeds"])
        rows.append(
            (
                name,
                percent(arm["success"]),
                points(arm["gain_over_sft"]),
                count(arm["executions"]["mean"]),
                count(arm["imagined"]["mean"]),
                f"{judged} of {seeds}" if judged != seeds else str(seeds),
                duration(arm["seconds_total"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names and intervals to the left, counts to the right."""
    return [
        cell.ljust(width) if column < 3 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


# --------------------------------------------------------------------------------------------------- markup


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """The four numbers on top of the page."""
    lead = _lead(summary)
    arm = summary["arms"][lead]
    tiles = [
        {"label": "before: SFT", "value": percent(summary["sft"]["value"]), "note": _range(summary["sft"])},
        {
            "label": f"after: {lead}",
            "value": percent(arm["success"]["value"]),
            "note": _range(arm["success"]),
        },
        {"label": "real executions", "value": count(arm["executions"]["mean"]), "note": "a run, in training"},
    ]
    if arm["imagined"]["mean"]:
        one, real = duration(arm["seconds_per_imagined"]), duration(arm["seconds_per_execution"])
        tiles.append(
            {
                "label": "imagined rollouts",
                "value": count(arm["imagined"]["mean"]),
                "note": f"{one} each; a real one {real}",
            }
        )
    return tiles


def _range(estimate: Mapping[str, Any]) -> str:
    if estimate["low"] is None:
        return "no interval"
    return f"{100 * estimate['low']:.0f} to {100 * estimate['high']:.0f} %, 95 % interval"


def _whisker(estimate: Mapping[str, Any], colour: str) -> Markup:
    """A dot with its interval on a scale from 0 to 1, as a small SVG."""
    if estimate["value"] is None:
        return Markup("")
    x = {k: 4 + 132 * estimate[k] for k in ("value", "low", "high") if estimate[k] is not None}
    bar = ""
    if "low" in x:
        bar = f'<path d="M{x["low"]:.1f} 9H{x["high"]:.1f}" stroke="var({colour})" stroke-width="2.5"/>'
    return Markup(
        '<svg class="whisker" viewBox="0 0 140 18" width="140" height="18" aria-hidden="true">'
        '<path d="M4 9H136" stroke="var(--grid)"/>'
        '<path d="M4 5v8M37 7v4M70 5v8M103 7v4M136 5v8" stroke="var(--grid)"/>'
        f'{bar}<circle cx="{x["value"]:.1f}" cy="9" r="4" fill="var({colour})"/></svg>'
    )


def _inline(figure: Figure | None) -> Markup | None:
    return None if figure is None else Markup(plots.svg(figure, themed=True))


def _parts(summary: Mapping[str, Any]) -> list[str]:
    """The parts of the loop that took any time, in the order of the bars."""
    present = {part for arm in summary["arms"].values() for part in arm["seconds"]}
    return [p for p in plots.PARTS if p in present] + sorted(present - set(plots.PARTS))


def _films(
    summary: Mapping[str, Any], arms: Mapping[str, Sequence[Run]], budget: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Films of each arm's median run, within `budget` bytes of the page, and what had to be left out."""
    deterministic = summary["protocol"]["actions"] == "deterministic"
    films, left_out = [], []
    for position, (arm, runs) in enumerate(arms.items()):
        run = _filmed(runs, deterministic)
        if run is None:
            continue
        share = budget // (len(arms) - position)
        before, after, imagined = (run.media(m) for m in ("rollouts_before", "rollouts_after", "imagined"))
        entry: dict[str, Any] = {"arm": arm, "run": run.name, "both": None not in (before, after)}
        drawings = {
            "imagined": plots.imagined_beside_real(imagined) if imagined else None,
            "strips": plots.film_strips(before, after),
        }
        for kind, figure in drawings.items():
            entry[kind] = _inline(figure)
            if entry[kind] is not None and len(entry[kind]) > share:
                entry[kind] = None
                left_out.append(f"{run.name}: the {kind} film did not fit into the page and is left out.")
            share -= len(entry[kind] or "")
            budget -= len(entry[kind] or "")
        gif = rollouts_gif(before, after, min(_GIF_BYTES, share * 3 // 4))
        entry["gif"] = base64.b64encode(gif).decode("ascii") if gif else None
        if gif is None and (before or after):
            left_out.append(f"{run.name}: the animation did not fit into the page and is left out.")
        budget -= len(entry["gif"] or "")
        if before or after or entry["imagined"]:
            films.append(entry)
    return films, left_out


def _filmed(runs: Sequence[Run], deterministic: bool) -> Run | None:
    """The median run of those that were filmed."""
    filmed = [run for run in runs if (run.folder / "media").is_dir()]
    return median_run(filmed, deterministic) if filmed else None
