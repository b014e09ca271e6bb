"""What a report says: where the time went, and what to try."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.report import html
from ddprun.report.digest import digest_run
from ddprun.report.sentences import ending_problem_sentence, hook_cost_benefit, sentences_by_stage
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import PARTS
from tests.report.made_up import make, over_a_link
from tests.report.pages import everything, observed, page_of, rewrite, with_hooks, words

HANG = {
    "why": "late",
    "ranks": [0],
    "step": 21,
    "collective": "all_reduce",
    "carries": "gradient bucket 0",
    "activities": ["is in forward of step 21, for 10.1 s, at train.py:91 in forward"],
}


def test_sentences_say_where_the_time_went_and_what_to_try(tmp_path: Path) -> None:
    """On made-up runs: one with a late rank, one without."""
    late = sentences_by_stage(digest_run(RecordedRun(make(tmp_path / "late", ranks=4, late=1))))
    assert late[""] == [
        "A step took 10.0 ms on average: 68% forward, backward and optimizer, 22% exposed communication (0% "
        "on the wire, 22% waiting for the last rank, 0% launching collectives or in hooks), 5% loading data, "
        "4% between steps, and 1% elsewhere.",
        "Rank 1 was 3.0 ms late in backward, before bucket 1 (1.weight, 1.bias), in steps 1 to 20, and the "
        "others waited for it.",
        "To try first, since nothing is lost: `loader.balance`, which gives slow ranks fewer samples (saves "
        "at most 25% of a step); a look at the layers of that bucket, and at what else runs on the late "
        "rank's cores or GPU (saves at most 22% of a step).",
    ]
    assert sentences_by_stage(digest_run(RecordedRun(make(tmp_path / "even"))))[""][1:] == [
        "No rank was late for long enough to be named.",
        "Communication is hidden or small. `compile: true` may make steps faster, and changes only "
        "rounding; more ranks, a larger `loader.batch_size` and `precision: bf16` change training.",
    ]
    assert sentences_by_stage(digest_run(RecordedRun(make(tmp_path / "alone", ranks=1))))[""][1] == (
        "There was one rank, so no rank waited for another."
    )


def test_more_workers_are_advised_once(tmp_path: Path) -> None:
    """A rank that is late with its data waits for it, and the others for that rank: both would be saved."""
    folder = make(tmp_path / "run", late=1)

    def grow(record: dict[str, Any]) -> None:
        late = record["rank"] == 1
        record["data_us"] += 7000 if late else 4000
        record["exposed_wait_us"] += 0 if late else 3000
        record["step_us"] += 7000

    rewrite(folder, "steps", grow)
    summary = json.loads((folder / "summary.json").read_text())
    summary["stragglers"][0] |= {"cause": "data", "bucket": None, "params": []}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert sentences_by_stage(digest_run(RecordedRun(folder)))[""][-1] == (
        "To try first, since nothing is lost: more `loader.workers`, or a look at the late rank's disk, "
        "since the training thread waits for its data (saves at most 53% of a step); `loader.balance`, which "
        "gives slow ranks fewer samples (saves at most 22% of a step)."
    )


def test_a_run_without_records_says_why(tmp_path: Path) -> None:
    """Its steps were too few for `timings.every`."""
    short = digest_run(RecordedRun(make(tmp_path / "short", steps=50, every=100)))
    assert sentences_by_stage(short)[""] == [
        "The run has no step records, so it is unknown where its time went.",
        "It took 50 steps: `timings.every` is larger than that, or no record could be written.",
    ]
    assert (short.samples_per_s, short.steps_per_s) == (None, 100)
    assert "A step took" not in words(page_of(short, short))


def test_records_of_one_of_two_hosts_are_not_taken_for_all(tmp_path: Path) -> None:
    """The other's are not here before a checkpoint; events name its rank already."""
    folder = make(tmp_path / "run", late=1)
    for kind in ("steps", "buckets"):
        (folder / kind / "rank-00001.jsonl").unlink()
    (folder / "summary.json").unlink()
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"hosts": ["a", "a"]', '"hosts": ["a", "b"]'))
    found = digest_run(RecordedRun(folder))
    assert (found.samples_per_s, found.steps_per_s) == (None, 100)
    told = sentences_by_stage(found)[""]
    assert told[1].startswith("Rank 1 was 3.0 ms late in backward")
    assert told[2].startswith("To try first, since nothing is lost: a look at the layers of that bucket")
    here = "The run is still running, or was killed; the last recorded step is 20. "
    here += "Records of 1 of 2 ranks are here"
    come = "those of other hosts come at checkpoints and at the ends of stages"
    assert ending_problem_sentence(found.run) == f"{here}: {come}."
    events.write_text(events.read_text().replace('"digest": "0"', '"digest": ""'))
    assert ending_problem_sentence(RecordedRun(folder)) == f"{here}.", "of a script they come when it ends"


def test_a_run_that_does_not_tell_where_its_time_went_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take time, of which no part is known."""
    folder = make(tmp_path / "run")
    for file in (folder / "steps").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        nothing = dict.fromkeys(PARTS, 0)
        file.write_text("".join(json.dumps(line | nothing) + "\n" for line in lines))
    assert sentences_by_stage(digest_run(RecordedRun(folder)))[""][0] == (
        "A step took 10.0 ms on average; the records do not tell where the time went."
    )
    assert main(["report", str(folder)]) == 0, capsys.readouterr().err


def test_a_run_is_told_stage_by_stage(tmp_path: Path) -> None:
    """Advice, step time and communication of each; no mean is taken over two stages."""
    folder = everything(tmp_path / "run")
    slower = folder / "steps" / "rank-00000.jsonl"
    records = [json.loads(line) for line in slower.read_text().splitlines()]
    for record in records[20:40]:
        record["step_us"] += 10_000
        record["data_us"] += 10_000
    slower.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = digest_run(RecordedRun(folder))
    told = sentences_by_stage(found)
    assert list(told) == ["stage 0, train", "stage 1, train (int8)", "stage 2, train (int8)"]
    assert [told[name][0].split(" on average")[0] for name in told] == [
        "A step took 10.0 ms",
        "A step took 15.0 ms",
        "A step took 10.0 ms",
    ]
    assert told["stage 1, train (int8)"][2].startswith(
        "To try first, since nothing is lost: more `loader.workers`"
    )
    assert [[(sent.hooks, len(sent.steps)) for sent in stage.traffic] for stage in found.stages] == [
        [((), 20)],
        [(("int8",), 20)],
        [(("int8",), 20)],
    ]
    assert [us["steps"] for us in found.times.step_totals_by_rank] == [60, 60]
    page = words(page_of(found))
    assert "0 gradient none: all-reduce 100%" in page
    assert "1 gradient int8 100%" in page
    assert "stage 1, rank 0 10.5" in page


def test_what_tells_runs_apart_is_on_top(tmp_path: Path) -> None:
    """How each synchronises and through which hooks: the names of folders do not say it."""
    plain = make(tmp_path / "plain")
    told = words(
        page_of(*(digest_run(RecordedRun(folder)) for folder in (plain, everything(tmp_path / "several"))))
    )
    assert "stages that take steps train train; train (int8); train (int8)" in told


def test_episodes_of_a_late_rank_are_summed_up(tmp_path: Path) -> None:
    """In words and in a table, the single ones behind it; one that cost little is not what to try first."""
    run = make(tmp_path / "run", ranks=4, late=1)
    summary = json.loads((run / "summary.json").read_text())
    (whole,) = summary["stragglers"]

    def told(*episodes: dict[str, Any]) -> tuple[list[str], str]:
        (run / "summary.json").write_text(json.dumps({**summary, "stragglers": episodes}))
        found = digest_run(RecordedRun(run))
        return sentences_by_stage(found)[""], words(page_of(found))

    parts = [{**whole, "first_step": first, "last_step": first + 3} for first in (1, 11)]
    other = {**whole, "rank": 0, "cause": "data", "bucket": None, "params": []}
    some, page = told(*parts, {**other, "last_step": 2})
    assert some[1] == (
        "Rank 1 was 3.0 ms late in backward, before bucket 1 (1.weight, 1.bias), in 8 steps (2 episodes), "
        "and the others waited for it; 1 more episode of late ranks below."
    )
    assert "a look at the layers of that bucket" in some[2]
    assert (
        "rank late by, ms share of a step cause bucket parameters steps from step to step 1 3 30% backward"
        in page
    )
    assert "1.weight, 1.bias 8 1 14 0 3 30% data" in page
    assert "Each of 3 episodes" in page
    assert "Each of" not in told(whole, other)[1], "there is nothing to sum up"
    assert told({**whole, "last_step": 4})[0][2].startswith("To try, although it changes training"), (
        "one step in five"
    )


def test_words_of_records_do_not_command_a_terminal(tmp_path: Path) -> None:
    """Names of hooks are what the records say."""
    folder = with_hooks(over_a_link(tmp_path / "run"), 0.08)
    rewrite(folder, "buckets", lambda record: record.update(hooks=["\x1b[2Jint8"]))
    told = "\n".join(html.terminal_summary([("run", digest_run(RecordedRun(folder)))]))
    assert "Hooks (`\ufffd[2Jint8`) sent" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(("us_per_byte", "limit", "pay"), [(0.08, "300", True), (0.48, "50", False)])
def test_hooks_pay_over_links_slower_than_their_break_even(
    tmp_path: Path, us_per_byte: float, limit: str, pay: bool
) -> None:
    """Two hosts with 80 Mbit/s between them: where hooks pay, nobody is told to leave them out."""
    folder = with_hooks(over_a_link(tmp_path / "run"), us_per_byte)
    found = digest_run(RecordedRun(folder))
    balance = hook_cost_benefit(found, found.stages[0])
    assert balance is not None
    assert balance.break_even_bits_per_s == pytest.approx(24e6 / us_per_byte, rel=0.01)
    assert balance.sent_bits_per_s == pytest.approx(80e6, rel=0.01)
    (told,) = [text for text in sentences_by_stage(found)[""] if text.startswith("Hooks")]
    assert told.startswith(
        "Hooks (`int8`) sent 75% less than plain all-reduce, 4.88 MB a step and rank, and took"
    )
    went_through = "Here 80 Mbit/s went through, latency included."
    assert told.endswith(f"they save time over links slower than {limit} Mbit/s. {went_through}")

    def grow(record: dict[str, Any]) -> None:
        record["step_us"] += 100_000
        record["exposed_hook_us"] += 100_000

    advice = " ".join(sentences_by_stage(digest_run(RecordedRun(rewrite(folder, "steps", grow))))[""])
    assert ("no hooks, or cheaper ones" in advice) is not pay
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"hosts": ["a", "b"]', '"hosts": ["a", "a"]'))
    on_one_host = " ".join(sentences_by_stage(digest_run(RecordedRun(folder)))[""])
    assert "no hooks, or cheaper ones" in on_one_host
    assert f"slower than {limit} Mbit/s. Here all ranks are on one host." in on_one_host


def test_nothing_is_said_of_hooks_where_records_cannot_tell(tmp_path: Path) -> None:
    """Without any, within a part of the ranks, over another number of ranks, or with nothing saved."""
    plain = digest_run(RecordedRun(over_a_link(tmp_path / "plain")))
    assert hook_cost_benefit(plain, plain.stages[0]) is None
    changes: tuple[Callable[[dict[str, Any]], None], ...] = (
        lambda record: record["legs"][0].update(group="world across.0"),
        lambda record: record.update(encode_us=0, decode_us=0),
        lambda record: record.update(bytes=record["wire_bytes"]),
    )
    for number, change in enumerate(changes):
        folder = with_hooks(over_a_link(tmp_path / f"{number}"), 0.08)
        found = digest_run(RecordedRun(rewrite(folder, "buckets", change)))
        assert hook_cost_benefit(found, found.stages[0]) is None
    folder = with_hooks(over_a_link(tmp_path / "resumed"), 0.08)
    events = (folder / "events.jsonl").read_text()
    resumed = json.dumps({"event": "resumed", "world_sizes": [[1, 2], [2, 4]]})
    (folder / "events.jsonl").write_text(f"{events}{resumed}\n")
    found = digest_run(RecordedRun(folder))
    assert hook_cost_benefit(found, found.stages[0]) is None


@pytest.mark.parametrize(
    ("hosts", "bucket_bytes", "lossless"),
    [
        (
            "aa",
            2000,
            "`shared_memory` as the last hook, since all ranks are on one host",
        ),
        ("aabb", 2000, "the hook `hierarchical`, since hosts have several ranks"),
        (
            "ab",
            8 << 20,
            "`ddp: {bucket_cap_mb: 2}`, since all gradients are in one bucket and nothing overlaps",
        ),
        ("ab", 2000, None),
    ],
)
def test_advice_names_first_what_loses_nothing(
    tmp_path: Path, hosts: str, bucket_bytes: int, lossless: str | None
) -> None:
    """With what it gains at most; what changes training comes after it, and says so."""
    folder = make(tmp_path / "run", ranks=len(hosts))

    def wait_for_the_wire(record: dict[str, Any]) -> None:
        record["step_us"] += 10_000
        record["exposed_wire_us"] += 10_000

    rewrite(folder, "steps", wait_for_the_wire)
    if bucket_bytes > 2000:
        rewrite(folder, "buckets", lambda record: record.update(bucket=0, bytes=bucket_bytes))
    events = folder / "events.jsonl"
    names = json.dumps(list(hosts))
    events.write_text(
        events.read_text().replace(f'"hosts": {json.dumps(["a"] * len(hosts))}', f'"hosts": {names}')
    )
    *_, before, last = sentences_by_stage(digest_run(RecordedRun(folder)))[""]
    if lossless is None:
        assert before == "No rank was late for long enough to be named."
    else:
        gain = "saves at most 50% of a step"
        assert before == f"To try first, since nothing is lost: {lossless} ({gain})."
    next_ = "" if lossless is None else " next"
    assert last == (
        f"To try{next_}, although it changes training: sending less (`ddprun compare` with `--vary "
        "'hooks=[[], [fp16], [int8]]'`); "
        "synchronising less often (a larger `accumulate`, or `sync: {local_sgd: {every: 8}}`)."
    )


def test_every_warning_is_among_the_faults(tmp_path: Path) -> None:
    """And every error; but for stragglers, which have a part of their own."""
    folder = make(tmp_path / "run", late=1)
    assert "Nothing went wrong." in words(page_of(digest_run(RecordedRun(folder))))
    levels = {"resumed": "info", "hang": "error", "best_kept": "info"}
    kinds = [
        "checkpoint_left_out",
        "overflow",
        "step_skipped",
        "data_lost",
        "tracker_failed",
        "frozen_differ",
    ]
    with (folder / "events.jsonl").open("a") as file:
        for kind in (*levels, *kinds):
            event = {"event": kind, "level": levels.get(kind, "warning"), "reason": f"why-{kind}"}
            file.write(json.dumps(event) + "\n")
    page = words(page_of(digest_run(RecordedRun(folder))))
    assert "Nothing went wrong." not in page
    told = [kind for kind in (*levels, *kinds, "straggler") if f"reason: why-{kind}" in page]
    assert told == ["resumed", "hang", *kinds]


@pytest.mark.parametrize(
    ("status", "error", "log", "told"),
    [
        (
            "failed",
            {"rank": 1, "message": "ValueError: bad <sample>"},
            "Traceback",
            "The run failed after step 20, on rank 1: ValueError: bad <sample>. More is in "
            "`logs/rank-00001.log`.",
        ),
        ("failed", {"rank": -1}, "", "The run failed after step 20."),
        ("interrupted", None, "", "The run was interrupted after step 20."),
        (
            "failed",
            {"rank": 1, "message": "the run hangs: rank 0 did not arrive within 10 s", "hang": HANG},
            "the run hangs",
            "The run hung in step 21, in all_reduce (gradient bucket 0): rank 0 did not arrive within "
            "10 s. Rank 0 is in forward of step 21, for 10.1 s, at train.py:91 in forward. More is in "
            "`logs/rank-00001.log`.",
        ),
        (
            None,
            None,
            "RuntimeError",
            "The run is still running, or was killed; the last recorded step is 20. More is in "
            "`logs/rank-00001.log`.",
        ),
    ],
)
def test_how_a_run_ended_comes_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: str | None,
    error: dict[str, Any] | None,
    log: str,
    told: str,
) -> None:
    """On the page and on the terminal, of one run and of several; unless it ended well."""
    even, folder = make(tmp_path / "even"), make(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    if status is not None:
        (folder / "summary.json").write_text(json.dumps({**summary, "status": status, "error": error}))
    if log:
        (folder / "logs").mkdir()
        (folder / "logs" / "rank-00001.log").write_text(log)
    page, shown = words(page_of(digest_run(RecordedRun(folder)))), " ".join(told.replace("`", " ").split())
    assert page.index(shown) < page.index("samples per second")
    assert "Nothing went wrong." not in page
    assert main(["report", "--no-trace", str(folder)]) == 0
    assert capsys.readouterr().err.startswith(f"{told}\nsamples per second")
    assert main(["report", "--no-trace", str(even), str(folder)]) == 0
    assert capsys.readouterr().err == f"{tmp_path.name}/run: {told}\n"


@pytest.mark.parametrize(
    "part", ["data_us", "exposed_hook_us", "exposed_wait_us", "exposed_wire_us", "sync_us", "forward_us"]
)
def test_the_report_of_a_script_names_nothing_that_only_a_pipeline_has(tmp_path: Path, part: str) -> None:
    """Neither in advice nor elsewhere: what it names is in the script."""
    folder = observed(make(tmp_path / "run", hooks=("int8",) if part == "exposed_hook_us" else ()))

    def grow(record: dict[str, Any]) -> None:
        record["step_us"] += 10_000
        record[part] += 10_000

    rewrite(folder, "steps", grow)
    rewrite(folder, "buckets", lambda record: record.update(bucket=0, bytes=8 << 20))
    page = words(page_of(digest_run(RecordedRun(folder))))
    advice = {
        "data_us": "a larger num_workers of the DataLoader , since",
        "exposed_hook_us": "no hooks, or cheaper ones (saves",
        "exposed_wait_us": "synchronising less often (more backward passes under no_sync before",
        "exposed_wire_us": 'sending less ( hooks=["fp16"] in ddprun.observe )',
        "sync_us": "every=10 in ddprun.observe , since",
        "forward_us": "torch.compile may make steps faster",
    }
    assert advice[part] in page
    if part == "exposed_wire_us":
        assert "DistributedDataParallel(bucket_cap_mb=2) , since" in page
    of_pipelines = ("pipeline", "compare", "loader.", "accumulate", "local_sgd", "compile:", "ddp:", "audits")
    assert [name for name in of_pipelines if name in page] == []
