"""The page, the words and the terminal table."""

import json
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser

import numpy as np
import pytest

from wmrl_embodied.evaluation import report
from wmrl_embodied.evaluation.runs import NoRunError, find_runs
from wmrl_embodied.evaluation.summary import summarise

VOID = {"meta", "br", "img", "path", "circle", "use", "image", "rect", "input", "hr", "link"}


class Page(HTMLParser):
    """Visible text, sections, what is fetched, and whether all tags close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.ids, self.fetched, self.open = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.fetched += [v for k, v in attrs.items() if k in ("src", "href", "xlink:href", "data") and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of a page's time; for tests about words."""
    monkeypatch.setattr(report, "_inline", lambda figure: None)


@pytest.fixture(scope="module")
def written(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "demo"
    shutil.copytree(experiment, folder)
    return report.write_report(folder)


@pytest.fixture(scope="module")
def page(written):
    return Page(written.report.read_text())


def test_page_is_self_contained_and_well_formed(written, page):
    assert page.open == []
    assert page.fetched and all(f.startswith(("#", "data:image/")) for f in page.fetched)
    html = written.report.read_text()
    assert not re.search(r"@import|url\((?!#)|<script|<link", html)
    assert {f[1:] for f in page.fetched if f.startswith("#")} <= set(page.ids)
    assert written.report.stat().st_size < report.LIMIT_BYTES


def test_page_says_the_result(page):
    words = page.words
    assert "wmrl raises success on held-out states from 40 % to 88 % with 60 real executions" in words
    assert "1,000 imagined rollouts: +47 [" in words and "percentage points on the same 20 states" in words
    assert (
        "ends at 80 % with 420, a level it first reaches at 420; wmrl reaches it at 55, 7.7 times fewer"
        in words
    )
    assert "3 seeds describe these runs, not the method" in words
    assert "52 of 60" in words and "wmrl-train seed=0" in words and "abc1234" in words
    assert "a claim about the method needs 5 or more" in words


def test_page_has_its_sections_and_no_leaks(page):
    for section in ("result", "tasks", "films", "world-model", "cost", "training", "provenance", "missing"):
        assert section in page.ids
    assert not re.search(r"\b(None|nan|NaN|undefined)\b", page.words)


def test_summary_beside_the_page(written):
    assert json.loads(written.summary_file.read_text()) == written.summary
    assert sorted(p.name for p in written.report.parent.iterdir()) == [
        "real",
        "report.html",
        "success.png",
        "summary.json",
        "wmrl",
    ]


def test_page_repeats(run_folder):
    shutil.rmtree(run_folder / "media")
    runs, summary = find_runs(run_folder), summarise(run_folder)
    pages = [report.render(summary, runs, "demo", now=datetime(2026, 1, 2, tzinfo=UTC)) for _ in range(2)]
    assert pages[0] == pages[1] and "2026-01-02 00:00 UTC" in pages[0]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evaluations.jsonl", "pairs.jsonl", "config.yaml", "media"]
)
def test_page_without_some_file(run_folder, name):
    shutil.rmtree(run_folder / "media")
    if name != "media":
        (run_folder / name).unlink()
    page = Page(report.write_report(run_folder).report.read_text())
    assert page.open == [] and not re.search(r"\b(None|nan)\b", page.words)
    missing = page.words.split("What is missing")[-1]
    assert name in missing


def test_page_of_a_run_that_only_began(tmp_path):
    (tmp_path / "config.yaml").write_text("correction: {name: wmrl}\nseed: 1\n")
    written = report.write_report(tmp_path)
    page = Page(written.report.read_text())
    assert page.open == [] and not re.search(r"\b(None|nan)\b", page.words)
    assert "there is no result yet" in page.words and "No run logged a training step" in page.words
    assert report.text_table(written.summary).splitlines()[-1].split()[0] == "wmrl"


def test_success_at_end_that_was_not_measured(tmp_path, build, no_figures):
    row = build.evaluation(1, 8, "reach-v3", 4) | {"success_at_end": [None] * 11}
    build.write_lines(tmp_path / "evaluations.jsonl", [row])
    page = Page(report.write_report(tmp_path).report.read_text())
    assert "4 of 10; 1 left out" in page.words and "at the end" not in page.words.split("Reading")[
        0
    ].lower().replace("“at the end”", "")


def test_sampled_rollouts_get_their_table(tmp_path, build, no_figures):
    zeros = [0] * 8
    rows = [
        build.evaluation(step, step, "a", 0)
        | dict(
            index=[0, 0, 0, 0, 1, 1, 1, 1], success_once=once, success_at_end=zeros, already_successful=zeros
        )
        for step, once in ((0, zeros), (1, [1, 1, 1, 1, 1, 0, 0, 0]))
    ]
    build.write_lines(tmp_path / "evaluations.jsonl", rows)
    assert "best of k" in Page(report.write_report(tmp_path).report.read_text()).words


def test_names_are_escaped(tmp_path, build, no_figures):
    folder = build.write_run(tmp_path / "a<b>&c" / "seed0", 8, 4)
    (folder / "provenance.json").write_text(json.dumps({"command": "<script>alert(1)</script>"}))
    html = report.write_report(tmp_path).report.read_text()
    assert "<script" not in html and "a<b>" not in html and "a&lt;b&gt;&amp;c" in html


def test_films_give_way_to_the_limit(run_folder, no_figures):
    rng = np.random.default_rng(0)
    for when in ("before", "after"):
        noise = rng.integers(0, 255, size=(2, 8, 48, 48, 3), dtype=np.uint8)  # does not compress
        np.savez(run_folder / f"media/rollouts_{when}.npz", frames=noise, task=["a"] * 2, success=[1] * 2)
    written = report.write_report(run_folder, limit_bytes=60_000)
    assert written.report.stat().st_size < 60_000
    assert "did not fit into the page" in Page(written.report.read_text()).words


def test_broken_media_is_said(run_folder, no_figures):
    (run_folder / "media" / "imagined.npz").write_bytes(b"torn")
    words = Page(report.write_report(run_folder).report.read_text()).words
    assert "media/imagined.npz cannot be read" in words


def test_text_table(written):
    table = report.text_table(written.summary).splitlines()
    assert table[0].split("  ")[-1].strip() == "time a run"
    assert [line.split()[0] for line in table[2:]] == ["SFT", "wmrl", "real"]
    assert re.search(r"^wmrl +88 % \[\d\d, 90\] +\+47 \[\+\d\d, \+\d\d\] +60 +1,000 +3 +35 s$", table[3])
    assert all(line == line.rstrip() for line in table)


class TestWords:
    def test_percent(self):
        assert report.percent(0.5) == "50 %" and report.percent(None) == "–"
        assert report.percent({"value": 0.5, "low": 0.25, "high": 0.75}) == "50 % [25, 75]"
        assert report.percent({"value": 0.5, "low": None, "high": None}) == "50 %"
        assert report.percent({"value": None, "low": None, "high": None}) == "–"

    def test_points(self):
        assert report.points({"value": -0.052, "low": -0.1, "high": 0.001}) == "−5 [−10, 0]"
        assert report.points(None) == "–"

    def test_duration(self):
        texts = [report.duration(s) for s in (None, 0, 0.006, 42, 384, 7560, 14400)]
        assert texts == ["–", "0 s", "6 ms", "42 s", "6.4 min", "126.0 min", "4.0 h"]

    @pytest.mark.parametrize(
        ("low", "high", "said"),
        [(0.1, 0.3, "raises success"), (-0.1, 0.3, "may be chance"), (-0.3, -0.1, "lowers success")],
    )
    def test_verdict_says_no_more_than_the_interval(self, written, low, high, said):
        summary = json.loads(json.dumps(written.summary))
        summary["arms"]["wmrl"]["gain_over_sft"] |= {"low": low, "high": high}
        assert said in report.verdict(summary)[0]

    def test_verdict_when_the_baseline_was_not_reached(self, written):
        summary = json.loads(json.dumps(written.summary))
        summary["arms"]["wmrl"]["executions_to_reach_baseline"] = None
        assert "wmrl did not reach that." in report.verdict(summary)[1]


def run_command(*arguments, folder):
    command = [sys.executable, "-m", "wmrl_embodied.cli.report", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_command(run_folder):
    shutil.rmtree(run_folder / "media")
    (run_folder / "pairs.jsonl").unlink()
    done = run_command("run=seed3", "resamples=50", folder=run_folder.parent)
    assert done.returncode == 0, done.stderr
    assert "report   seed3/report.html" in done.stdout and "wmrl" in done.stdout
    assert sorted(p.name for p in run_folder.parent.iterdir()) == ["seed3"]  # no log files of Hydra's
    assert (run_folder / "summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run=."], "error: .: no run in it; looked for config.yaml"),
        ([], "error: run=null: name an experiment or run folder"),
    ],
)
def test_command_fails_with_one_clear_line(tmp_path, arguments, said):
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_command_explains_itself(tmp_path):
    done = run_command("--help", folder=tmp_path)
    assert done.returncode == 0
    assert "wmrl-report run=outputs/demo" in done.stdout and "limit_mb=8" in done.stdout


def test_no_run(tmp_path):
    with pytest.raises(NoRunError, match="nowhere: no such folder"):
        report.write_report(tmp_path / "nowhere")
