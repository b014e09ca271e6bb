"""The page about one run or several."""

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
import torch

from ddprun.cli import main
from ddprun.host.device import device_name
from ddprun.report.blocks import Table
from ddprun.report.digest import digest_run
from ddprun.report.sections import make_sections
from ddprun.telemetry.reader import RecordedRun
from tests.engine.running import run_pipeline
from tests.report.made_up import make
from tests.report.pages import Page, charts_in, everything, over_steps, page_of, words

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """No address but its own parts; every chart has a label, and can be reached without a mouse."""
    text = page_of(digest_run(RecordedRun(make(tmp_path / "run", late=1))))
    page = Page(text)
    assert page.addresses == ["data:,"]
    assert "default-src 'none'" in text
    assert "<code>trace.json</code>" in text
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.anchors) <= set(page.ids)
    charts = charts_in(text)
    assert {chart["id"] for chart in page.charts} == set(charts)
    assert all(chart["tabindex"] == "0" and chart["aria-label"] for chart in page.charts)
    drawn = [one for chart in charts.values() for one in chart.values()]
    assert all(one["data"] for one in drawn)
    assert len(text) < 2e6


def test_the_first_screen_says_where_the_time_went_before_any_table(tmp_path: Path) -> None:
    """Figures, bars, sentences and a timeline; then the configuration."""
    folder = make(tmp_path / "run", late=1)
    keys = "model: {mlp: {hidden: [8]}}  # line 1\nloader: {batch_size: 32}\n"
    keys += "optimizer: {SGD: {lr: 0.1}}\nseed: 7"
    (folder / "pipeline.yaml").write_text(f"{keys}\naccumulate: 2\n")
    text = page_of(digest_run(RecordedRun(folder)))
    order = ['class="facts"', 'id="where-the-time-went"', 'id="chart-0"', 'class="words"', 'id="chart-1"']
    order.append("<table")
    places = list(map(text.index, order))
    assert places == sorted(places)
    told = words(text)
    assert (
        "samples per second 1,600 steps per second 100 step, p50 / p95 / p99 10 / 10 / 10 ms wall time, s "
        "0.2 ranks 2 on 1 host, cpu over gloo mean loss, last known 0.05" in told
    )
    for row in (
        "model mlp: {hidden: [8]} loader batch_size: 32 optimizer SGD: {lr: 0.1} accumulate 2 seed 7",
        "buffers the model has no buffers: nothing is sent",
        f"pipeline.yaml {' '.join(keys.split())}",
    ):
        assert row in told


@pytest.mark.parametrize("text", ["model: [", "- a list", "a: &x [*x]", "\0"])
def test_a_pipeline_file_that_is_none_is_no_error(tmp_path: Path, text: str) -> None:
    """And one behind a link is not read."""
    folder = make(tmp_path / "run")
    (folder / "pipeline.yaml").write_text(text)
    found = digest_run(RecordedRun(folder))
    assert "<main" in page_of(found)
    facts = make_sections([("", found)], [])["The run"][0]
    assert isinstance(facts, Table)
    assert "model" not in [name for name, _ in facts.rows]
    (tmp_path / "secret").write_text("model: secret")
    (folder / "pipeline.yaml").unlink()
    (folder / "pipeline.yaml").symlink_to(tmp_path / "secret")
    assert "secret" not in words(page_of(digest_run(RecordedRun(folder))))


def test_runs_stand_side_by_side_under_names_that_tell_them_apart(tmp_path: Path) -> None:
    """And nothing of a run's own words is taken for HTML."""
    odd = "</script><b>&amp;"
    runs = [
        RecordedRun(make(tmp_path / "x" / "one", name=odd)),
        RecordedRun(make(tmp_path / "y" / "one", late=0)),
    ]
    text = page_of(*map(digest_run, runs))
    told = words(text)
    assert "x/one" in told
    assert "y/one" in told
    assert odd in told
    assert "Nothing went wrong." not in told, "the details of a run are on its own page"
    assert "Timeline of a step" not in told
    assert "<b>" not in text.partition("<script>")[0]
    loss = over_steps(charts_in(text))[0]
    assert {trace["name"] for trace in loss["data"] if "name" in trace} == {"x/one", "y/one"}


def test_a_run_that_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    """With all that the page of one run has."""
    folder = make(tmp_path / "run")
    assert main(["report", "--no-trace", str(folder), f"{folder}/"]) == 0
    assert "Timeline of a step" in words((folder / "report.html").read_text())


def test_a_run_without_records_has_a_page(tmp_path: Path) -> None:
    """One that ended before its first step."""
    folder = make(tmp_path / "run", steps=0)
    (folder / "summary.json").unlink()
    told = words(page_of(digest_run(RecordedRun(folder))))
    assert "The run has no step records" in told
    assert "still running, or killed" in told
    (folder / "events.jsonl").write_text("")
    assert "hosts" not in words(page_of(digest_run(RecordedRun(folder))))


def test_what_events_say_is_not_believed(tmp_path: Path) -> None:
    """A metric is a number; a policy may be anything; later evaluations of a step count."""
    folder = make(tmp_path / "run", evaluated=(5, 10))
    odd = [
        {"event": "stage_started", "stage": 0, "kind": "train", "sync": 5, "hooks": []},
        {
            "event": "evaluated",
            "stage": 0,
            "step": 5,
            "loss": 7.0,
            "accuracy": True,
            "huge": 10**30,
            "f1": "x",
        },
        {"event": "evaluated", "stage": 0, "step": "9", "loss": 1.0},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in odd)
    found = digest_run(RecordedRun(folder))
    assert found.run.evaluations == {(5, 0): {"loss": 7.0}, (10, 0): {"loss": 0.2, "accuracy": 0.9}}
    assert found.stages[0].name == "stage 0, train (5)"
    assert "<main" in page_of(found)


def test_the_speed_is_that_of_all_steps(tmp_path: Path) -> None:
    """Those that have a record may be slower than the rest, as all with an exchange are."""
    folder = make(tmp_path / "run", steps=50, every=5)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "steps_per_s": 400.0}))
    assert "samples per second 6,400 steps per second 400 " in words(page_of(digest_run(RecordedRun(folder))))
    (folder / "summary.json").unlink()
    assert "samples per second 1,600 steps per second 100 " in words(page_of(digest_run(RecordedRun(folder))))


def test_a_run_that_goes_on_meanwhile_has_a_page(tmp_path: Path) -> None:
    """Lines come while they are read; those of later steps are left for the next page."""
    run = RecordedRun(make(tmp_path / "run", late=1))
    run.__dict__["recorded_steps"] = range(1, 13)  # as it was when the reading began
    assert digest_run(run).recorded_steps == list(range(1, 13))
    assert "<main" in page_of(digest_run(run))


def test_a_real_run_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes the page and the trace, and says where."""
    text = """
model: {cnn: {channels: [4]}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
hooks: [int8]
timings: {fidelity_every: 2}
stages:
  - train: {steps: 6}
  - train: {steps: 6, sync: {local_sgd: {every: 3}}}
  - evaluate: {metrics: [accuracy]}
"""
    folder = run_pipeline(tmp_path, text, 2)
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / 'report.html'}\n"
    figures, *lines, traced = err.splitlines()
    assert figures.startswith("samples per second: ")
    assert traced == f"{folder / 'trace.json'}: 12 of 12 steps"
    assert [line.partition(":")[0] for line in lines if line.startswith("stage")] == [
        "stage 0, train (int8)",
        "stage 1, train (local_sgd, int8)",
    ]
    assert sum("ms on average" in line for line in lines) == 2
    told = words((folder / "report.html").read_text())
    for word in (
        "gradient",
        "delta",
        "int8",
        "held-out accuracy",
        "cosine",
        "running_mean",
        "Started once",
        "local_sgd: {every: 3",
        "loader batch_size: 8",
        "Resident memory of each rank's process",
        "Load average of each host",
        f"GPU or processor of rank 0 {device_name(torch.device('cpu')) or ''}",
    ):
        assert word.lower() in told.lower(), word


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ("6:11", "2 of 18 steps"),
        ("1:99999999999999999999", "6 of 18 steps"),
        ("400:500", "0 of 18 steps"),
    ],
)
def test_the_trace_has_the_recorded_steps_of_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str, count: str
) -> None:
    """No more are counted."""
    folder = make(tmp_path / "run", every=3)
    assert main(["report", str(folder), "--steps", steps]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"{folder / 'trace.json'}: {count}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not the folder of a run: it does not exist"),
        (["run", "--steps", "1:²"], '"1:²" is not a range of steps such as 100:200'),
        (["run", "--steps", "9:3"], '"9:3" is not a range of steps such as 100:200'),
        (
            ["run", "--output", "no/such/page.html"],
            "cannot write no/such/page.html: there is no folder no/such\n",
        ),
        ([], "missing argument 'RUN...'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Exit code 2, no traceback."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def browse(file: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What a browser makes of a page, and what it writes to its console."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome here")
def test_a_phone_scrolls_tables_and_not_the_page_and_values_have_a_log_scale(tmp_path: Path) -> None:
    """In a frame of 400 pixels: its width, what scrolls, and the scales before and after a click."""
    text = page_of(digest_run(RecordedRun(everything(tmp_path / "run"))))
    look = """
const frame = document.querySelector("iframe");
const wait = setInterval(function () {
  const page = frame.contentDocument;
  if (page.documentElement.dataset.drawn !== "yes") return;
  clearInterval(wait);
  for (const one of page.querySelectorAll("details")) one.open = true;
  const tables = [...page.querySelectorAll(".scroll")];
  const scale = () => page.querySelector("#chart-2")._fullLayout.yaxis.type;
  const found = [
    page.documentElement.scrollWidth, Math.max(...tables.map((one) => one.clientWidth)),
    Math.max(...tables.map((one) => one.scrollWidth)), scale(),
  ];
  page.querySelector('input[data-for="chart-2"]').click();
  setTimeout(() => { document.title = JSON.stringify([...found, scale()]); }, 500);
}, 100);
"""
    frame = f'<iframe width="400" height="800" style="border: 0" srcdoc="{escape(text)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html>{frame}<script>{look}</script>")
    title = re.search("<title>(.*?)</title>", browse(tmp_path / "frame.html", tmp_path).stdout)
    assert title is not None
    page_width, shown, widest, before, after = json.loads(title[1])
    assert (before, after) == ("linear", "log")
    assert page_width <= 400
    assert shown <= 400 < widest


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome here")
@pytest.mark.parametrize("runs", [1, 3])
def test_a_browser_draws_every_chart_and_asks_for_nothing(tmp_path: Path, runs: int) -> None:
    """Nothing on the console; each chart has its shapes."""
    digests = [digest_run(RecordedRun(everything(tmp_path / f"run-{n}"))) for n in range(runs)]
    file = tmp_path / "page.html"
    file.write_text(page_of(*digests))
    done = browse(file, tmp_path)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert 'data-drawn="yes"' in done.stdout
    pieces = re.split(r'<div class="chart', done.stdout)[1:]
    assert len(pieces) == len(charts_in(file.read_text()))
    for piece in pieces:
        assert "main-svg" in piece
        assert re.search(r'class="(scatterlayer|barlayer)[^"]*">\s*<g', piece) is not None
    drawn = set(re.findall(r"stroke-dasharray: ([^;]+);", done.stdout)) | {""}
    legends = set(re.findall(r'stroke-dasharray="([\d ]*)"', done.stdout))
    assert len(legends) > 2
    assert {", ".join(f"{length}px" for length in one.split() if length != "0") for one in legends} <= drawn


def test_shares_over_time(tmp_path: Path) -> None:
    """Each with its samples per second."""
    folder = make(tmp_path / "run", stages=((), ()))
    told = [(0, 1, [8, 8]), (0, 6, [12, 4]), (1, 11, [16, 16]), (1, 16, [24, 8])]
    with (folder / "events.jsonl").open("a") as file:
        for stage, step, samples in told:
            line = {"event": "shares", "stage": stage, "step": step, "samples": samples}
            file.write(json.dumps(line) + "\n")
    for rank in range(2):
        path = folder / "steps" / f"rank-{rank:05}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            *_, (_, _, samples) = (one for one in told if one[1] <= line["step"])
            line |= {"samples": samples[rank], "step_us": 8_000 if samples[0] > samples[1] else 10_000}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = make_sections([("", digest_run(RecordedRun(folder)))], [[]])["Shares of samples"]
    assert isinstance(table, Table)
    assert [[*row] for row in table.rows] == [
        [1, "8, 8", 5, 1600.0],
        [6, "12, 4", 5, 2000.0],
        [11, "16, 16", 5, 3200.0],
        [16, "24, 8", 5, 4000.0],
    ]


def test_held_out_metrics_are_charts_with_tables(tmp_path: Path) -> None:
    """The loss, too; of one evaluation the headline has the numbers."""
    found = digest_run(RecordedRun(make(tmp_path / "run", evaluated=(10, 20))))
    blocks = make_sections([("", found)], [])["Held-out data"]
    tables = [block for block in blocks if isinstance(block, Table)]
    assert [[*table.heads, *map(list, table.rows)] for table in tables] == [
        ["step", "held-out", [10, 0.2], [20, 0.1]],
        ["step", "held-out", [10, 0.9], [20, 0.9]],
    ]
    once = digest_run(RecordedRun(make(tmp_path / "once", evaluated=(10,))))
    assert make_sections([("", once)], [])["Held-out data"] == []
    assert "held-out loss 0.2 held-out accuracy 0.9" in words(page_of(once))


def test_a_second_evaluation_after_a_step_has_a_name_of_its_own(tmp_path: Path) -> None:
    """It may be of other data: it is no point of the curve, and takes none away from it."""
    folder = make(tmp_path / "run", evaluated=(10, 20))
    with (folder / "events.jsonl").open("a") as file:
        for stage, accuracy in ((1, 0.5), (2, 0.3), (2, 0.4)):  # the last is repeated by a resumed run
            event = {"event": "evaluated", "stage": stage, "step": 20, "accuracy": accuracy}
            file.write(json.dumps(event) + "\n")
    found = digest_run(RecordedRun(folder))
    assert {name: (one.steps, one.means) for name, one in found.held_out.items()} == {
        "loss": ([10, 20], [0.2, 0.1]),
        "accuracy": ([10, 20], [0.9, 0.9]),
        "accuracy of stage 1": ([20], [0.5]),
        "accuracy of stage 2": ([20], [0.4]),
    }
    told = "held-out accuracy 0.9 held-out accuracy of stage 1 0.5 held-out accuracy of stage 2 0.4"
    assert told in words(page_of(found))
