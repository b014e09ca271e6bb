"""Comparing pipelines: turns, noise, and the table."""

import asyncio
import csv
import io
import json
import os
import random
import signal
import socket
import stat
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.compare import learning
from ddprun.compare import runs as compare
from ddprun.compare.runs import (
    SeedRun,
    TurnTimes,
    Variant,
    VariantRuns,
    comparison_rows,
    load_run_records,
    load_variant,
    make_variants,
    noise_factor,
    speed_ratio,
    speed_verdict,
)
from ddprun.compare.time_slices import TimeSliceScheduler
from ddprun.config import load
from ddprun.report.blocks import format_with_equal_decimals
from ddprun.report.digest import digest_run
from ddprun.telemetry.reader import RecordedRun
from tests.ranks import Running, ddprun
from tests.report.made_up import STEP_US, make
from tests.report.pages import rewrite

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [32], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {steps: 60}
launch: {nproc_per_node: 2}
checkpoint: {keep: 0}
"""


def side(folder: Path, name: str, turns_s: list[float], *, twin: bool = False, **made: Any) -> VariantRuns:
    """A variant with a run that came to its end, whose steps took so long in each turn; `made`: of `make`."""
    return seeded(folder, name, [made], turns_s, twin=twin)


def seeded(
    folder: Path, name: str, made: list[dict[str, Any]], turns_s: list[float], *, twin: bool = False
) -> VariantRuns:
    """A variant with a run for each seed."""
    runs = []
    for seed, options in enumerate(made):
        run = RecordedRun(make(folder / f"{name}-{seed}", **options))
        times = {turn: TurnTimes(step_s, step_s / 16) for turn, step_s in enumerate(turns_s, start=1)}
        runs.append(SeedRun(run.folder, seed, 0, digest_run(run), times))
    return VariantRuns(Variant(name, Path("p.yaml"), twin=twin), runs)


def noisy(seed: int, mean_s: float, spread: float, turns: int = 12) -> list[float]:
    draw = random.Random(seed)
    return [mean_s * (1 + spread * draw.uniform(-1, 1)) for _ in range(turns)]


def test_what_happens_in_few_turns_counts(tmp_path: Path) -> None:
    """A synchronisation every hundred steps: most turns are a little faster, and the whole is slower."""
    first = side(tmp_path, "first", [0.010] * 20)
    rare = side(tmp_path, "rare", [0.030 if turn % 5 == 0 else 0.009 for turn in range(20)])
    found = speed_ratio(first, rare)
    assert found is not None
    assert found.mean == pytest.approx(10 / (0.2 * 30 + 0.8 * 9))
    assert found.low < found.mean < found.high
    assert speed_verdict(first, rare, 1.02) != "faster"


def test_a_run_and_its_twin_say_what_is_noise(tmp_path: Path) -> None:
    """A difference that is not larger is none, however sure one is of its sign."""
    first = side(tmp_path, "first", noisy(1, 0.010, 0.02))
    twin = side(tmp_path, "twin", noisy(2, 0.0103, 0.02), twin=True)
    close = side(tmp_path, "close", noisy(3, 0.0098, 0.002))
    fast = side(tmp_path, "fast", noisy(4, 0.005, 0.02))
    slow = side(tmp_path, "slow", noisy(5, 0.020, 0.02))
    sides = [first, twin, close, fast, slow]
    factor = noise_factor(sides)
    assert factor is not None
    assert 1.03 < factor < 1.06
    assert speed_verdict(first, first, factor) == "the first"
    assert speed_verdict(first, twin, factor).startswith("noise: up to ")
    assert speed_verdict(first, close, factor) == "no difference beyond noise"
    assert speed_verdict(first, fast, factor) == "faster"
    assert speed_verdict(first, slow, factor) == "slower"
    found = speed_ratio(first, fast)
    assert found is not None
    assert 1.9 < found.low <= found.mean <= found.high < 2.1
    assert speed_verdict(first, side(tmp_path, "few", [0.001] * 5), factor) == "too few turns to tell"


def test_turns_of_a_moment_are_compared_with_each_other(tmp_path: Path) -> None:
    """A machine that becomes ten times slower in the middle changes no ratio."""
    drift = [1.0] * 6 + [10.0] * 6
    first = side(tmp_path, "first", [0.01 * d for d in drift])
    other = side(tmp_path, "other", [0.008 * d for d in drift])
    found = speed_ratio(first, other)
    assert found is not None
    assert (found.low, found.mean, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_speed_is_of_all_seeds(tmp_path: Path) -> None:
    """A mean over their turns."""
    fast, slow = (side(tmp_path, str(step_s), [step_s] * 8) for step_s in (0.01, 0.03))
    (row,) = comparison_rows([VariantRuns(fast.variant, [*fast.runs, *slow.runs])])
    assert row["samples_per_s"] == pytest.approx(50 * 16)


def test_speed_counts_the_samples_of_a_rank_without_records(tmp_path: Path) -> None:
    """It took as many as the others."""
    found = []
    for missing in (False, True):
        run = SeedRun(make(tmp_path / str(missing), steps=40))
        if missing:
            (run.folder / "steps" / "rank-00001.jsonl").unlink()
        load_run_records(run, 10)
        found.append(run.times_by_turn)
    assert found[0] == found[1] == dict.fromkeys((1, 2, 3), TurnTimes(STEP_US / 1e6, STEP_US / 16 / 1e6))


def test_losses_are_compared_after_equal_samples(tmp_path: Path) -> None:
    """The run that has seen fewest says after how many; a run that failed has none."""
    long, short = side(tmp_path, "long", [0.01] * 8, steps=40), side(tmp_path, "short", [0.01] * 8, steps=20)
    failed = VariantRuns(Variant("failed", Path("p.yaml")), [SeedRun(tmp_path / "failed", exit_code=1)])
    table = comparison_rows([long, short, failed])
    expected = (1 / 19 + 1 / 20) / 2 + 0.5  # the last tenth of 320 samples, of ranks that are 1 apart
    assert [row["loss"] for row in table] == [pytest.approx(expected), pytest.approx(expected), None]
    assert [row["loss_after_samples"] for row in table] == [320, 320, None]
    assert [row["verdict"] for row in table][2] == "failed"


def test_losses_are_compared_over_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely ranks exchange losses, and however many samples a step takes."""
    often, rarely = (side(tmp_path, name, [0.01] * 8, steps=40) for name in ("often", "rarely"))

    def exchange_rarely(record: dict[str, Any]) -> None:
        record["mean_loss"] = 9.0 if record["step"] == 32 else None

    rewrite(tmp_path / "rarely-0", "steps", exchange_rarely)
    first, row = comparison_rows([often, rarely])
    assert first["loss"] == row["loss"] == pytest.approx(statistics.fmean(1 / n for n in range(37, 41)) + 0.5)
    assert row["learning"] == "learns the same"
    rewrite(tmp_path / "often-0", "steps", lambda record: record.update(samples=12 - 8 * record["rank"]))
    weighted = learning.windowed_loss_at(often.digests[0].run, 40 * 16)
    assert weighted == pytest.approx(row["loss"] - 0.25)  # three quarters of a step's samples are rank 0's
    curve = [(40, 4.0, 40), (80, 2.0, 40), (120, 1.0, 40)]
    monkeypatch.setattr(learning, "_losses_by_samples_seen", lambda _: curve)
    assert learning.windowed_loss_at(often.digests[0].run, 100) == 1.0
    parts = learning.windowed_loss_at(often.digests[0].run, 84)
    assert parts == pytest.approx((4.4 * 2.0 + 4 * 1.0) / 8.4)


def test_how_soon_a_loss_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mean over a tenth of all samples, not by one lucky step, and not before a tenth of them."""
    run = RecordedRun(make(tmp_path / "run", steps=40))
    samples = 40 * 16
    early, late = learning.windowed_loss_at(run, samples // 2), learning.windowed_loss_at(run, samples)
    assert early is not None
    assert late is not None
    assert late < early
    soon = learning.samples_until_loss(run, early, samples)
    assert soon is not None
    assert samples // 2 <= soon < 0.6 * samples
    assert learning.samples_until_loss(run, late, samples) == samples
    assert learning.samples_until_loss(run, late, samples // 2) is None
    lucky = {1: 0.1, 50: 0.1}
    curve = [(10 * step, lucky.get(step, 2.0 - 0.01 * step), 10) for step in range(1, 101)]
    monkeypatch.setattr(learning, "_losses_by_samples_seen", lambda _: curve)
    assert learning.samples_until_loss(run, 1.2, 1000) == 850


def test_learning_is_judged_over_seeds(tmp_path: Path) -> None:
    """By the scatter of the differences under equal seeds; what is faster and learns worse is not chosen."""

    def under(name: str, step_s: float, *above: float) -> VariantRuns:
        made = [{"above": one, "evaluated": (20,)} for one in above]
        return seeded(tmp_path, name, made, [step_s] * 8)

    first = under("first", 0.010, 0.5, 0.7, 0.6)  # the seeds differ by more than the variants
    sides = [
        first,
        under("worse", 0.004, 0.60, 0.82, 0.69),
        under("unclear", 0.008, 0.60, 0.60, 0.65),
        under("same", 0.010, 0.5, 0.7, 0.6),
        under("better", 0.020, 0.41, 0.60, 0.52),
    ]
    table = comparison_rows(sides)
    assert [(row["verdict"], row["learning"]) for row in table] == [
        ("the first", ""),
        ("faster", "learns worse"),
        ("faster", "shows no clear difference in learning"),
        ("no difference beyond noise", "learns the same"),
        ("slower", "learns better"),
    ]
    worse = table[1]
    low, mean, high = (worse[f"held_out_loss_difference{end}"] for end in ("_low", "", "_high"))
    deviation = statistics.stdev((0.10, 0.12, 0.09))
    assert mean == pytest.approx(0.31 / 3)
    assert (low, high) == pytest.approx(
        (mean - 4.303 * deviation / 3**0.5, mean + 4.303 * deviation / 3**0.5)
    )
    assert [row["chosen"] for row in table] == [False, False, True, False, False]
    told = learning.comparison_sentences(table)
    assert told[0] == (
        "worse is faster (2.50 times as fast, 2.50 to 2.50), and learns worse: its held-out loss is 0.103 "
        "higher (+0.0654 to +0.141, 3 seeds)."
    )
    assert "and shows no clear difference in learning" in told[1]
    assert told[1].endswith(" seeds would confirm a difference of that size.")
    assert told[-1] == "Choose unclear: it is the fastest that does not learn worse."
    assert (
        learning.comparison_sentences(comparison_rows(sides[:2]))[-1]
        == "Stay with first: what is faster learns worse, or sends no gradients."
    )


def test_one_loss_decides_how_well_a_variant_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out loss if all have it, else the training loss; never whichever shows a difference."""

    def under(name: str, evaluated: tuple[int, ...], *above: float) -> VariantRuns:
        made = [{"above": one, "evaluated": evaluated} for one in above]
        return seeded(tmp_path, name, made, [0.01] * 8)

    first, unclear = under("first", (20,), 0.5, 0.7, 0.6), under("unclear", (20,), 0.6, 0.6, 0.6)
    trained = under("trained", (), 0.5, 0.7, 0.6)
    monkeypatch.setattr(
        learning, "windowed_loss_at", lambda run, _: 1.0 if "first" in run.folder.name else 0.5
    )
    (_, row) = comparison_rows([first, unclear])
    assert (row["decided_by"], row["learning"]) == ("held_out_loss", "shows no clear difference in learning")
    assert row["loss_difference_high"] < 0
    for row in comparison_rows([first, unclear, trained])[1:]:
        assert (row["decided_by"], row["learning"]) == ("loss", "learns better")


def test_one_seed_does_not_tell_how_well_a_variant_learns(tmp_path: Path) -> None:
    """Unless its losses are equal; the option that would tell is named."""
    first = side(tmp_path, "first", [0.01] * 8, above=0.01)
    other = side(tmp_path, "other", [0.005] * 8, above=0.005)
    (_, row) = table = comparison_rows([first, other])
    assert row["learning"] == "one seed cannot tell"
    assert row["loss_difference"] == pytest.approx(-0.005)
    assert row["loss_difference_low"] is None
    assert learning.overall_verdict(row) == "faster; one seed cannot tell how well it learns"
    assert learning.comparison_sentences(table)[-1] == (
        "other is the fastest; before you choose it, compare again with `--seeds 5`, to see whether it "
        "learns as well."
    )


def test_too_few_turns_say_how_many_more_it_takes(tmp_path: Path) -> None:
    """And what they have shown so far; nothing is chosen from them."""
    turns_s = [0.01, 0.011, 0.009, 0.01]
    first = side(tmp_path, "first", turns_s)
    twin = side(tmp_path, "twin", turns_s, twin=True)
    other = side(tmp_path, "other", [seconds / 2 for seconds in turns_s])
    failed = side(tmp_path, "none", [])
    table = comparison_rows([first, twin, other, failed])
    assert [row["turns_needed"] for row in table[1:]] == [2, 2, 6]
    assert table[1]["verdict"] == "noise: not known yet"
    assert learning.overall_verdict(table[2]).startswith("too few turns to tell, 2 more needed")
    told = learning.comparison_sentences(table)
    assert len(told) == 3
    assert told[0].startswith(
        "other needs 2 more turns to tell how fast it is (so far 2.00 times as fast, 2.00 to 2.00)"
    )
    assert told[1].startswith("none needs 6 more turns to tell how fast it is")
    assert told[-1] == (
        "There is nothing to choose yet: compare again with more `--steps`, or a smaller `--turn`."
    )


def test_what_sends_nothing_or_diverges_is_not_chosen(tmp_path: Path) -> None:
    """However fast it is."""
    first = side(tmp_path, "first", [0.01] * 8)
    nothing = side(tmp_path, "nothing", [0.001] * 8, hooks=("noop",))
    diverged = side(tmp_path, "diverged", [0.002] * 8)
    summary = tmp_path / "diverged-0" / "summary.json"
    summary.write_text(summary.read_text().replace('"steps":', '"nonfinite": {"step": 3}, "steps":', 1))
    table = comparison_rows([first, nothing, diverged])
    assert [row["verdict"] for row in table] == ["the first", "faster", "faster"]
    assert learning.overall_verdict(table[2]) == "faster, and its loss is not finite"
    assert [row["chosen"] for row in table] == [True, False, False]


def test_what_has_no_loss_to_compare_is_not_chosen(tmp_path: Path) -> None:
    """However fast it is; and the first is not left for it if the first has none."""
    first, unknown = side(tmp_path, "first", [0.01] * 8), side(tmp_path, "unknown", [0.005] * 8)
    other = side(tmp_path, "other", [0.008] * 8)
    rewrite(tmp_path / "unknown-0", "steps", lambda record: record.update(loss=None))
    table = comparison_rows([first, unknown, other])
    assert [row["chosen"] for row in table] == [False, False, True]
    said = "unknown is faster (2.00 times as fast, 2.00 to 2.00), and how well it learns is not known: "
    assert learning.comparison_sentences(table)[0] == f"{said}there is no loss to compare."
    rewrite(tmp_path / "first-0", "steps", lambda record: record.update(loss=None))
    table = comparison_rows([first, unknown, other])
    assert [row["chosen"] for row in table] == [True, False, False]
    stay = "Stay with first: what is faster learns worse, or sends no gradients, or has no loss to compare."
    assert learning.comparison_sentences(table)[-1] == stay


def test_the_table_has_four_forms(tmp_path: Path) -> None:
    """Text and Markdown for readers, CSV and JSON with every number."""
    first = side(tmp_path, "first", [0.01] * 8)
    other = side(tmp_path, "other", [0.005] * 8, late=0)
    other.variant = Variant("[bold]a|b", Path("p.yaml"))
    table = comparison_rows([first, other])
    lines = compare.render_rows(table, "markdown").splitlines()
    assert "|  | samples/s | times the first | exposed | sent per step | fidelity |  |" in lines
    cells = [r"[bold]a\|b", "3,200.0 ± 0.0", "2.00 (2.00 to 2.00)", "15%", "8 kB", "-"]
    assert f"| {' | '.join([*cells, 'faster, and learns the same'])} |" in lines
    assert "|  | seeds | loss | against the first |" in lines
    assert r"| [bold]a\|b | 1 | 0.5513 | +0 |" in lines
    assert lines[-1] == "- Choose [bold]a|b: it is the fastest that does not learn worse."
    lines = compare.render_rows(table, "text").splitlines()
    assert lines[:5] == [
        "Speed: over 8 turns, with 95% intervals.",
        "",
        "               samples/s      times the first  exposed  sent per step  fidelity",
        "first      1,600.0 ± 0.0  1.00 (1.00 to 1.00)       0%           8 kB         -  the first",
        "[bold]a|b  3,200.0 ± 0.0  2.00 (2.00 to 2.00)      15%           8 kB         -  "
        "faster, and learns the same",
    ]
    assert lines[8:11] == [
        "           seeds    loss  against the first",
        "first          1  0.5513                  -",
        "[bold]a|b      1  0.5513                 +0",
    ]
    assert lines[-1] == "Choose [bold]a|b: it is the fastest that does not learn worse."
    assert [row["variant"] for row in json.loads(compare.render_rows(table, "json"))] == [
        "first",
        "[bold]a|b",
    ]
    assert [row["turns"] for row in csv.DictReader(io.StringIO(compare.render_rows(table, "csv")))] == [
        "8",
        "8",
    ]


def test_turns_that_the_first_has_not_taken_are_not_counted(tmp_path: Path) -> None:
    """A longer run's further turns are compared with nothing."""
    table = comparison_rows([side(tmp_path, "first", [0.01] * 8), side(tmp_path, "longer", [0.005] * 20)])
    assert compare.render_rows(table, "text").startswith("Speed: over 8 turns,")


def test_all_combinations_are_named() -> None:
    """The twin stands behind the first, nothing sent at the end."""
    keys = [("hooks", ["[]", "[fp16]"]), ("seed", ["0", "1"])]
    found = make_variants([Path("a.yaml")], ["accumulate=2"], keys, noop=True, twin=True)
    assert [variant.name for variant in found] == [
        "hooks=[], seed=0",
        "hooks=[], seed=0 (twin)",
        "hooks=[], seed=1",
        "hooks=[fp16], seed=0",
        "hooks=[fp16], seed=1",
        "nothing sent (noop)",
    ]
    assert found[2].overrides == ("accumulate=2", "hooks=[]", "seed=1")
    assert found[5].overrides == ("accumulate=2", "hooks=[]", "seed=0")
    files = make_variants([Path("x/a.yaml"), Path("b.yaml")], [], [], noop=False, twin=False)
    assert [variant.name for variant in files] == ["a", "b"]
    alike = make_variants([Path("x/a.yaml"), Path("y/a.yaml")], [], [], noop=False, twin=False)
    assert [variant.name for variant in alike] == ["x/a.yaml", "y/a.yaml"]


def test_steps_and_noop_keep_what_a_stage_says(tmp_path: Path) -> None:
    """Its sync policy, its hooks; and there is nothing that a stage could send instead of nothing."""
    stage = "stages:\n  - train: {epochs: 3, sync: {local_sgd: {every: 4}}, hooks: [fp16]}\n  - evaluate\n"
    (tmp_path / "p.yaml").write_text(PIPELINE.partition("stages:")[0] + stage)
    for noop in (False, True):
        variant = Variant("v", tmp_path / "p.yaml", ("hooks=[noop]",), noop=noop)
        longer, loaded = load_variant(variant, 40)
        pipeline = load(longer.pipeline, longer.overrides).pipeline
        assert pipeline == loaded.pipeline
        (train,) = pipeline.train_stages()
        settings = train.effective_settings(pipeline)
        assert pipeline.stages[1].name == "evaluate"
        assert (settings.steps, settings.epochs, settings.sync.name) == (40, None, "local_sgd")
        assert [hook.name for hook in settings.hooks] == (["noop"] if noop else ["fp16"])


def connected(variable: str) -> socket.socket:
    """A connection to the scheduler that the environment variable names."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(json.loads(variable)["address"])
    return connection


def test_only_one_run_works_at_a_time() -> None:
    """Ranks come in any order; whoever connects and says nothing is not waited for; a run may end in its
    turn.
    """
    working: set[int] = set()
    seen: list[set[int]] = []
    ended: set[int] = set()

    def rank(variable: str, run: int, turns: int) -> None:
        with connected(variable) as connection:
            connection.sendall(f"{run} 2\n".encode())
            for _ in range(turns):
                connection.sendall(b"p")
                if connection.recv(1) != b"g":
                    return
                working.add(run)
                seen.append(set(working))
                time.sleep(0.02)
                working.discard(run)
        ended.add(run)

    async def take_turns() -> list[int]:
        order = []
        async with TimeSliceScheduler(turn_steps=5) as scheduler:
            silent = [connected(scheduler.environment_value(0)) for _ in range(40)]
            ranks = []
            for run, turns in enumerate((3, 5)):
                scheduler.add_run(run, lambda run=run: 0 if run in ended else None)  # type: ignore[misc]
                told = scheduler.environment_value(run)
                ranks += [asyncio.create_task(asyncio.to_thread(rank, told, run, turns)) for _ in range(2)]
            await asyncio.wait_for(scheduler.wait_until_all_idle(), 30)
            while left := list(scheduler.waiting_runs()):
                for run in left:
                    await scheduler.run_one_turn(run)
                    order.append(run)
            await asyncio.wait_for(asyncio.gather(*ranks), 20)
        for one in silent:
            assert one.recv(1) == b"", "no connection is left open"
            one.close()
        return order

    order = asyncio.run(take_turns())
    assert all(len(at_work) == 1 for at_work in seen)
    assert order == [0, 1, 0, 1, 0, 1, 1, 1]


def test_other_users_cannot_connect() -> None:
    """To the socket that runs of a comparison connect to, whatever TMPDIR is; afterwards it is gone."""

    async def look() -> Path:
        async with TimeSliceScheduler(turn_steps=5) as scheduler:
            path = Path(json.loads(scheduler.environment_value(0))["address"])
            assert path.is_socket()
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            return path

    assert not asyncio.run(look()).parent.exists()


def test_two_settings_are_compared(tmp_path: Path) -> None:
    """Real runs, in turns: the table, the page, what each has left; with the bits of a run of its own."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = ddprun(
        "compare",
        "p.yaml",
        "--vary=hooks=[[], [noop]]",
        "--turn=10",
        "--seeds=2",
        "--output=out",
        "--format=json",
        cwd=tmp_path,
    )
    assert done.code == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row["variant"] for row in table] == ["hooks=[]", "hooks=[] (twin)", "hooks=[noop]"]
    assert [row["turns"] for row in table] == [10, 10, 10], "the first of each seed warms up"
    assert [row["seeds"] for row in table] == [2, 2, 2]
    assert table[1]["learning"] == "learns the same"
    assert [row["chosen"] for row in table] == [True, False, False], "noop is nothing to choose"
    other = [line.loss for line in RecordedRun(tmp_path / "out" / "0-seed-1").step_records(0)]
    assert all(row["loss_after_samples"] == 60 * 16 for row in table)
    assert table[0]["loss"] == table[1]["loss"] != table[2]["loss"]
    assert table[0]["wire_bytes_per_step"] > 5000 > table[2]["wire_bytes_per_step"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 1e6
    alone = ddprun("p.yaml", "--run-dir=alone", cwd=tmp_path)
    assert alone.code == 0, alone.stderr
    of_turns, of_one = (
        [(line.step, line.loss) for line in RecordedRun(tmp_path / name).step_records(0)]
        for name in ("out/0-seed-0", "alone")
    )
    assert of_turns == of_one
    assert other != [loss for _, loss in of_one]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "everything else on this page of the first one" in page
    first_seeds = [SeedRun(tmp_path / "out" / f"{number}-seed-0") for number in range(3)]
    for one in first_seeds:
        load_run_records(one, turn_steps=10)
    speeds = format_with_equal_decimals(one.digest and one.digest.steps_per_s for one in first_seeds)
    assert "".join(f"<td>{speed}</td>" for speed in speeds) in page
    steps = list(RecordedRun(tmp_path / "out" / "0-seed-0").step_records(1))
    assert max(line.step_us for line in steps[1:]) < 2e6, "waiting for a turn is none of a step's time"


def test_a_run_that_fails_is_named_and_the_others_are_compared(tmp_path: Path) -> None:
    """Exit code 1, and where its own words are; also if the page cannot be written."""
    (tmp_path / "failing.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, fail):\n        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
        "        self.calls, self.fail = 0, fail\n        Path('out/report.html').mkdir(exist_ok=True)\n\n"
        "    def forward(self, inputs):\n        self.calls += 1\n"
        "        if self.fail and self.calls > 30:\n            raise ValueError('on purpose')\n"
        "        return super().forward(inputs)\n"
    )
    text = PIPELINE.replace("mlp: {inputs: 64, hidden: [32], outputs: 10}", "failing.Net: {fail: false}")
    text = text.replace("nproc_per_node: 2", "nproc_per_node: 1")
    (tmp_path / "p.yaml").write_text(text)
    vary = "--vary=model=[{failing.Net: {fail: false}}, {failing.Net: {fail: true}}]"
    flags = (vary, "--no-control", "--turn=10", "--output=out", "--format=csv")
    done = ddprun("compare", "p.yaml", *flags, cwd=tmp_path, fresh=True)
    assert done.code == 1, done.stderr
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["verdict"] for row in table] == ["the first", "failed"]
    assert "failed with exit code 1; see out/1.log" in done.stderr
    assert "ddprun: cannot write out/report.html: Is a directory\n" in done.stderr
    assert "on purpose" in (tmp_path / "out" / "1.log").read_text()


def test_an_interrupt_ends_all_runs(tmp_path: Path) -> None:
    """Exit code 130, and no process is left."""
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("steps: 60", "steps: 1000000"))
    with Running("compare", "p.yaml", "--output=out", "--turn=10", cwd=tmp_path) as running:
        end = time.monotonic() + 60
        files = [tmp_path / "out" / name / "steps" / "rank-00000.jsonl" for name in ("0", "1")]
        while not all(file.exists() and file.stat().st_size for file in files) and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(running.process.pid, signal.SIGINT)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vary", "hooks"], "the override has no ="),
        (["--vary", "hooks=[fp16"], "--vary 1:1:"),
        (["--vary", "hooks=fp16"], "hooks: is not a list of values; write KEY=[A, B]"),
        (["--vary", "hooks=[[fp17]]"], 'did you mean "fp16"'),
        (["--vary", "seed=[0, 1]", "--seeds", "2"], "the runs already differ in their seed"),
        (["--turn", "1"], "1 is not in the range x>=2"),
        (["--output", "full"], "the folder full is not empty"),
        (["--output", "full/file/out"], "cannot write full/file/out: there is no folder full/file"),
        (["--set", "stages=[save, {train: {steps: 1}}]", "--output", "full"], "warning: stages[0]: "),
        (
            ["--vary", 'init=[null, "${env:DDPRUN_NOT_SET}.safetensors"]'],
            "the environment variable DDPRUN_NOT_SET is not set",
        ),
        (
            ["--nnodes=2"],
            "2 hosts need --rdzv-endpoint, and the same command on each; for this one, --nnodes 1",
        ),
        (["--set=launch.nnodes=3"], "3 hosts need --rdzv-endpoint"),
        (["--rdzv-endpoint=127.0.0.1:1"], "there is one host: set more with --nnodes"),
        (["--nnodes=2", "--rdzv-endpoint=127.0.0.1:x"], "'127.0.0.1:x' is not HOST:PORT"),
        (
            ["--steps", "9", "--set", "stages=[{train: {steps: 1}}, {train: {steps: 2}}]"],
            "2 stages take steps: --steps needs a pipeline with one",
        ),
        (["--nproc-per-node=zero"], "--nproc-per-node is 'zero'; it must be at least 1, or auto, gpu or cpu"),
        (
            ["--nnodes=2", "--rdzv-endpoint=127.0.0.1:29533", "--rdzv-conf=x"],
            "option 'x' must have a value specified",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """Exit code 2, no traceback, nothing made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["compare", "p.yaml", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
