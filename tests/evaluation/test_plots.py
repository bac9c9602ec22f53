"""Figures show what they are given, and survive data that is not there."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure

from wmrl_embodied.evaluation import plots
from wmrl_embodied.evaluation.animation import rollouts_gif
from wmrl_embodied.evaluation.runs import Run, find_runs
from wmrl_embodied.evaluation.summary import by_arm, summarise


@pytest.fixture(scope="module")
def arms(experiment):
    return by_arm(find_runs(experiment))


@pytest.fixture(scope="module")
def summary(experiment):
    return summarise(experiment)


@pytest.fixture(scope="module")
def style(arms):
    return plots.ArmStyle(list(arms))


@pytest.fixture(scope="module")
def shown(arms):
    return arms["wmrl"][0]


def texts(figure: Figure) -> str:
    return " | ".join(t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")))


def test_success_curves(summary, arms, style):
    figure = plots.success_against_executions(summary, arms, style)
    wide, near = figure.axes  # 420 executions against 60: a second panel enlarges the first 60
    assert near.get_title(loc="left") == "The first 60" and near.get_xlim()[1] < 70
    bold = [line for line in wide.lines if line.get_linewidth() == 2]
    assert [list(line.get_xdata()) for line in bold] == [[20, 40, 60], [20, 220, 420]]
    np.testing.assert_allclose(bold[0].get_ydata(), [0.4, 0.6, 0.875])
    thin = [line for line in wide.lines if line.get_linewidth() < 1]
    assert len(thin) == 6  # one a seed
    assert "final success of real" in texts(figure) and "success on held-out states" in texts(figure)


def test_one_run_has_no_zoom_and_no_thin_lines(run_folder):
    arms = {"wmrl": [Run.load(run_folder)]}
    figure = plots.success_against_executions(summarise(run_folder), arms, plots.ArmStyle(["wmrl"]))
    assert len(figure.axes) == 1
    assert not [line for line in figure.axes[0].lines if line.get_linewidth() < 1]


def test_calibration(summary, style):
    figure = plots.calibration(summary, style)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["wmrl: 90 rollouts", "real: 90 rollouts"]
    np.testing.assert_allclose(figure.axes[0].collections[-1].get_offsets(), [[0.2, 0], [0.5, 1], [0.8, 0]])


def test_auc_windows_from_pairs_and_from_the_log(arms, run_folder):
    windows = plots.auc_by_window(arms["wmrl"], 5)
    assert len(windows) == 5 and [w[1] for w in windows] == [0.5] * 5
    (run_folder / "pairs.jsonl").unlink()
    logged = plots.auc_by_window([Run.load(run_folder)], 2)
    assert [w[0] for w in logged] == [3, 8] and [w[1:] for w in logged] == [
        pytest.approx((0.7, 0.8)),
        pytest.approx((0.7, 0.8)),
    ]


def test_seconds(summary):
    figure = plots.seconds_by_part(summary)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [20, 20, 10, 10, 5, 5]
    assert "real execution" in texts(figure) and "seconds a run" in texts(figure)


def test_training_has_a_panel_for_what_was_logged(arms, style):
    titles = [axes.get_title(loc="left") for axes in plots.training(arms, style).axes]
    assert titles == [
        "Training score: executed (solid), predicted (dotted)",
        "KL to the reference policy (nats)",
        "Share of clipped decisions",
        "Weight of an anchor",
    ]


def test_film_strips(shown):
    before, after = shown.media("rollouts_before"), shown.media("rollouts_after")
    figure = plots.film_strips(before, after, rollouts=2, frames=4)
    assert [len(axes.images) for axes in figure.axes] == [4] * 4
    assert texts(figure).count("no success") == 1  # the first before; all others succeed
    assert len(plots.film_strips(None, after).axes) == 3
    assert plots.film_strips(None, None) is None


def test_imagined(shown):
    figure = plots.imagined_beside_real(shown.media("imagined"))
    film, *traces, probability = figure.axes
    assert len(film.images) == 9 and len(traces) == 4
    assert all(len(axes.lines) == 5 + 1 + 1 for axes in traces)  # members, real, the step of success
    assert probability.get_ylabel() == "success\nprobability"
    assert "hand x" in texts(figure)


def test_imagined_that_never_succeeds_and_is_short(shown):
    media = dict(shown.media("imagined")) | {"success_step": np.array(-1)}
    media["imagined_proprio"] = media["imagined_proprio"][:, :7, :]
    media["real_frames"] = media["real_frames"][:1]
    figure = plots.imagined_beside_real(media)
    assert all(len(axes.lines) == 6 for axes in figure.axes[1:-1])


def test_imagined_with_one_probability_an_action(shown):
    """T actions join T + 1 states: the probability after action k belongs to state k + 1."""
    media = dict(shown.media("imagined"))
    media["success_probability"] = media["success_probability"][:, 1:]
    probability = plots.imagined_beside_real(media).axes[-1]
    assert list(probability.lines[0].get_xdata()) == list(range(1, 12))
    assert list(probability.lines[-1].get_xdata()) == [9, 9]  # success_step 8 is the action that succeeded


def test_nothing_to_draw(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    arms, summary = {"a": [Run.load(tmp_path)]}, summarise(tmp_path)
    summary["arms"] = {"a": next(iter(summary["arms"].values()))}
    style = plots.ArmStyle(["a"])
    assert plots.success_against_executions(summary, arms, style) is None
    assert plots.calibration(summary, style) is None and plots.seconds_by_part(summary) is None
    assert plots.auc_over_steps(arms, style) is None and plots.training(arms, style) is None


def test_svg_is_well_formed_themed_and_repeats(summary, arms, style):
    first, second = (
        plots.svg(plots.success_against_executions(summary, arms, style), themed=True) for _ in range(2)
    )
    assert first == second
    ElementTree.fromstring(first.replace("xlink:", ""))
    assert "var(--blue)" in first and "var(--ink)" in first and plots.INK not in first
    for figure in (plots.calibration(summary, style), plots.seconds_by_part(summary)):
        assert plots.INK in plots.svg(figure) and "var(" not in plots.svg(figure)


def test_svg_ids_are_all_referred_to(summary, style):
    text = plots.svg(plots.calibration(summary, style))
    ids = re.findall(r' id="([^"]+)"', text)
    assert ids and all(f"#{i}" in text for i in ids)


def test_png(summary):
    assert base64.b64decode(plots.png_base64(plots.seconds_by_part(summary))).startswith(b"\x89PNG")


def test_no_global_state(summary):
    plots.svg(plots.seconds_by_part(summary))
    assert not Gcf.figs  # pyplot's list of open figures


def test_styles_of_many_arms_differ():
    style = plots.ArmStyle(["wmrl", "mine", "yours", "real"])
    assert style.colour("wmrl") == plots.BLUE and style.colour("real") == plots.VERMILLION
    assert len({style.colour(a) for a in ("wmrl", "mine", "yours", "real")}) == 4


def test_animation_fits_its_limit(shown):
    before, after = shown.media("rollouts_before"), shown.media("rollouts_after")
    free = rollouts_gif(before, after, limit_bytes=10_000_000)
    assert free[:6] == b"GIF89a"
    tight = rollouts_gif(before, after, limit_bytes=len(free) // 3)
    assert len(tight) <= len(free) // 3
    assert rollouts_gif(before, after, limit_bytes=100) is None
    assert rollouts_gif(None, None, limit_bytes=10_000) is None
