"""A run's folder that somebody else has made: nothing in it is followed, waited for, or believed."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.checkpoint import folder as checkpoints
from ddprun.checkpoint.codec import DamagedError, read_tensors, write_tensors
from ddprun.cli import main
from ddprun.config import load
from ddprun.engine.failures import append_to_rank_log
from ddprun.run_files import (
    WrongFileTypeError,
    check_folder_if_exists,
    names_in,
    open_file,
    parse_json,
    read_json_object,
    replace_atomically,
)
from ddprun.telemetry.reader import log_file
from ddprun.telemetry.records import Summary
from ddprun.telemetry.writer import RecordWriter, write_summary
from tests.engine.running import run_pipeline, summary, to_its_end
from tests.ranks import as_processes
from tests.report.made_up import make

TEXT = """
model: {mlp: {inputs: 64, hidden: [8], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {adamw: {lr: 0.01}}
checkpoint: {every: 2, keep: 3}
schedule: {StepLR: {step_size: 3}}
stages:
  - train: {steps: 4}
"""
KEPT = "of nobody's business"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, with the checkpoints of steps 2 and 4."""
    return run_pipeline(tmp_path_factory.mktemp("original"), TEXT, 1)


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it that its user has received."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def _go_on(run: Path, told: Path, steps: int) -> int:
    loaded = load(run / "pipeline.yaml", [f"stages[0].train.steps={steps}"])
    return to_its_end(loaded, run, told, resuming="yes")


def go_on(run: Path, steps: int = 6) -> tuple[int, str]:
    """The exit code of a resumed run, and what it says."""
    told = run.with_name("told")
    (code,) = as_processes(1, _go_on, run, told, steps)
    return code, told.read_text()


# Links, pipes and other things that are no files.


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("run.lock", "run.lock is a symbolic link, not a regular file"),
        ("events.jsonl", "events.jsonl is a symbolic link, not a regular file"),
        ("steps/rank-00000.jsonl", "rank-00000.jsonl is a symbolic link, not a regular file"),
        ("buckets", "buckets is a symbolic link, not a folder"),
        ("checkpoints", "checkpoints is a symbolic link, not a folder"),
        ("logs", "logs is a symbolic link, not a folder"),
        ("run.json", "run.json is a symbolic link, not a regular file"),
    ],
)
def test_a_link_is_refused_and_what_it_leads_to_stays(
    run: Path, tmp_path: Path, name: str, said: str
) -> None:
    """Records were cut, and the lock written, wherever a link led."""
    place, victim = run / name, tmp_path / "victim"
    if place.exists():
        place.rename(victim)
    else:
        victim.mkdir()
    if victim.is_dir():
        (victim / "rank-00000.jsonl").write_text('{"step": 9}\n')
        (victim / ".step-00000009.old").mkdir()
    elif name != "run.json":
        victim.write_text(KEPT)
    before = _listed(victim)
    place.symlink_to(victim)
    code, told = go_on(run)
    assert code == 2
    assert f"cannot resume in the run folder {run}: {said}" in told
    assert "Traceback" not in told
    assert _listed(victim) == before


def _listed(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {str(file): file.read_bytes() for file in files} | {str(one): b"" for one in path.glob("**/")}


def test_what_a_run_writes_anew_replaces_a_link(run: Path, tmp_path: Path) -> None:
    """The summary, and the sign by which hosts find out whether they share a disk, are written beside."""
    victim = tmp_path / "victim"
    victim.write_text(KEPT)
    planted = [run / name for name in (".summary.json", ".token", "report.html", "trace.json")]
    (run / "summary.json").unlink()
    for place in [*planted, run / "summary.json"]:
        place.symlink_to(victim)
    code, told = go_on(run)
    assert code == 0, told
    assert main(["report", str(run)]) == 0
    assert victim.read_text() == KEPT
    assert summary(run)["steps"] == 6
    assert not (run / "summary.json").is_symlink()
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize(
    "name", ["run.lock", "events.jsonl", "steps/rank-00000.jsonl", "buckets/rank-00000.jsonl"]
)
def test_a_file_with_hard_links_is_not_continued(run: Path, tmp_path: Path, name: str) -> None:
    """Such a link is no link to look at, and the lock was written over whatever else had its file."""
    victim = tmp_path / "victim"
    victim.write_text(KEPT)
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    os.link(victim, run / name)
    code, told = go_on(run)
    assert code == 2
    file = Path(name).name
    assert (
        f"{run}: {file} has hard links, and would change elsewhere, too; copy the folder with cp -r" in told
    )
    assert "Traceback" not in told
    assert victim.read_text() == KEPT


def test_a_copy_of_links_leaves_the_original_as_it_was(run: Path, tmp_path: Path) -> None:
    """`cp -al`: neither `resume` nor `report` writes into a file that both have."""
    (run / "logs").mkdir()
    (run / "logs" / "rank-00000.log").write_text(KEPT)
    assert main(["report", str(run)]) == 0
    before = _listed(run)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, copy_function=os.link)
    assert go_on(copy)[0] == 2
    append_to_rank_log(copy, 0, "a failure")
    assert main(["report", str(copy)]) == 0
    with open_file(copy, "pipeline.yaml", "wb") as file:
        file.write(b"anew")
    assert _listed(run) == before
    shutil.rmtree(copy)
    code, told = go_on(run)
    assert code == 0, told


def test_logs_and_records_are_not_written_through_links(run: Path, tmp_path: Path) -> None:
    """They are lost then, as on a full disk."""
    victim = tmp_path / "victim"
    victim.write_text(KEPT)
    (run / "logs").mkdir()
    (run / log_file(0)).symlink_to(victim)
    append_to_rank_log(run, 0, "a failure")
    shutil.rmtree(run / "steps")
    (tmp_path / "elsewhere").mkdir()
    (run / "steps").symlink_to(tmp_path / "elsewhere")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(victim)
    writer = RecordWriter(run)
    writer.put("steps/rank-00000.jsonl", b"{}\n")
    writer.flush()
    assert writer.failure is not None
    assert "steps is a symbolic link" in writer.failure
    writer.close()
    other = RecordWriter(run)
    other.put("events.jsonl", b"{}\n")
    other.close()
    assert other.failure is not None
    assert victim.read_text() == KEPT
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "shared.json", "shared.safetensors", "rank-00000.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_a_checkpoints_file_that_is_none_is_damage(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A named pipe in a manifest's place held `resume` for ever."""
    root = run / "checkpoints"
    place = root / checkpoints.checkpoint_name(4) / name
    place.rename(tmp_path / "whole")
    _put(kind, place, tmp_path / "whole")
    names = checkpoints.file_names(["shared", "rank-00000"])
    with pytest.raises(DamagedError, match=f"{name} is (a symbolic link, )?not a regular"):
        checkpoints.verify(checkpoints.open_checkpoint(root, 4), names)


def _put(kind: str, place: Path, target: Path) -> None:
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(target if kind == "link" else "/dev/zero")


def test_a_checkpoint_with_a_pipe_in_it_is_passed_by(run: Path) -> None:
    """And set aside, like any that is damaged; so is one that is a link, and what that leads to stays."""
    root = run / "checkpoints"
    manifest = root / checkpoints.checkpoint_name(4) / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    shutil.copytree(root / checkpoints.checkpoint_name(2), run.with_name("elsewhere"))
    (root / checkpoints.checkpoint_name(3)).symlink_to(run.with_name("elsewhere"))
    code, told = go_on(run)
    assert code == 0, told
    assert "manifest.json is not a regular file" in told
    assert "step-00000003 is a symbolic link" in told
    assert f"resuming after step 2 from {root / checkpoints.checkpoint_name(2)}" in told
    assert (root / f"{checkpoints.checkpoint_name(4)}.unused").is_dir()
    assert (run.with_name("elsewhere") / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["run.json", "pipeline.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_the_command_looks_before_it_opens(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    """What it has to know before there are ranks."""
    (run / name).rename(tmp_path / "whole")
    _put(kind, run / name, tmp_path / "whole")
    assert main(["resume", str(run)]) == 2
    link = "" if kind == "pipe" else "a symbolic link, "
    expected = f"ddprun: {run} is not the folder of a run: {name} is {link}not a regular file\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pipeline_folder": 3}', "[" * 900 + "]" * 900])
def test_the_command_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (run / "run.json").write_text(text)
    assert main(["resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert told == f"ddprun: {run} is not the folder of a run: its run.json is damaged\n"


@pytest.mark.parametrize(("folder", "missing"), [("nowhere", "nowhere"), ("", "run.json")])
def test_the_command_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, missing: str
) -> None:
    """The folder itself, or what each run has."""
    assert main(["resume", str(tmp_path / folder)]) == 2
    expected = f"{tmp_path / folder} is not the folder of a run: there is no {tmp_path / missing}"
    assert capsys.readouterr().err == f"ddprun: {expected}\n"


def test_pruning_and_clearing_delete_no_more_than_the_link(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text(KEPT)
    for name in ("step-00000001", ".step-00000007.1f0c", ".step-00000001.old", "step-00000002.unused"):
        (root / name).symlink_to(elsewhere)
    (root / "step-00000002").mkdir()
    checkpoints.set_aside(root, 2)
    checkpoints.recover_interrupted_writes(root)
    checkpoints.prune(root, 0)
    assert [path.name for path in root.iterdir()] == ["step-00000002.unused"]
    assert (elsewhere / "file").read_text() == KEPT


# Content that is not what it claims to be. Whoever made the folder has made the hashes, too.


def rewritten(run: Path, name: str, data: bytes, step: int = 4) -> None:
    """Put other data into a checkpoint's file, and its hash into the manifest."""
    place = run / "checkpoints" / checkpoints.checkpoint_name(step)
    (place / name).write_bytes(data)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest))


def deep(depth: int) -> str:
    return '{"a": ' * depth + "0" + "}" * depth


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": float("inf")}, "Infinity"),
        ({"world_size": 3_000_000}, "4 files for 3000000 ranks"),
        ({"world_size": 10**400}, "4 files for 1000"),
        ({"world_size": -1}, "world_size: Input should be greater than 0"),
        ({"world_size": 0}, "world_size: Input should be greater than 0"),
        ({"world_size": "1"}, "world_size: Input should be a valid integer"),
        ({"world_size": True}, "world_size: Input should be a valid integer"),
        ({"world_size": None}, "world_size: Input should be a valid integer"),
        ({"world_size": 2}, "it has no rank-00001"),
        ({"step": float("nan")}, "NaN"),
        ({"step": 1e999}, "Infinity"),
        ({"step": 5}, "it is of step 5"),
        ({"v": 99}, "version 99"),
        ({"nonfinite": 3}, "nonfinite: Input should be a valid string"),
        ({"files": []}, "files: Input should be a valid dictionary"),
        ({"files": {"../../x.json": {}, "x": {}}}, "files.../../x.json.[key]: String should match"),
        (
            {"files": {"shared.json": {"bytes": 1, "sha256": "0" * 63}, "x": 0}},
            "files.shared.json.sha256: String should match",
        ),
        (
            {"files": {"shared.json": {"bytes": -1, "sha256": "0" * 64}, "x": 0}},
            "files.shared.json.bytes: Input should be greater than or equal to 0",
        ),
        ({"files": {"shared.json": 7, "rank-00000.json": 7}}, "files.shared.json: Input should be a valid"),
    ],
)
def test_a_manifest_is_not_believed(run: Path, change: dict[str, Any], said: str) -> None:
    """Numbers of all kinds; nothing is made for ranks of which there are no files."""
    root = run / "checkpoints"
    path = root / checkpoints.checkpoint_name(4) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedError) as raised:
        checkpoints.open_checkpoint(root, 4)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "text", [deep(900), deep(101), "[" * 100_000, "{}{}", "[]", "\udcff", '{"a": 1e999}']
)
def test_a_states_json_is_not_believed(run: Path, text: str) -> None:
    rewritten(run, "shared.json", text.encode(errors="surrogateescape"))
    root = run / "checkpoints"
    with pytest.raises(DamagedError, match=r"shared\.json"):
        checkpoints.read_part(checkpoints.open_checkpoint(root, 4), "shared")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.zeros(()), torch.zeros(2, 3)],
)
def test_a_complex_tensor_that_is_none_is_damage(run: Path, tensor: torch.Tensor, tmp_path: Path) -> None:
    """Torch's own complaint was a traceback."""
    place = run / "checkpoints" / checkpoints.checkpoint_name(4)
    tree = json.loads((place / "shared.json").read_text()) | {"x": {"$": "complex", "name": "x"}}
    whole = read_tensors(place / "shared.safetensors", run)
    write_tensors(tmp_path / "t.safetensors", {**whole, "x": tensor})
    rewritten(run, "shared.json", json.dumps(tree).encode())
    rewritten(run, "shared.safetensors", (tmp_path / "t.safetensors").read_bytes())
    said = "view_as_complex is only|must have a last dimension of size 2|must have one or more dimensions"
    with pytest.raises(DamagedError, match=rf"shared\.json: the state is inconsistent: .*({said})"):
        checkpoints.read_part(checkpoints.open_checkpoint(run / "checkpoints", 4), "shared")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "counter", "items": [1, 2]},
        {"$": "mapping", "items": [[[], 1]]},
        {"$": "float", "value": "x"},
        {"$": "tuple"},
        {"$": "nothing"},
        {"$": []},
    ],
)
def test_a_tag_that_is_none_is_damage(run: Path, value: Any) -> None:
    place = run / "checkpoints" / checkpoints.checkpoint_name(4)
    tree = json.loads((place / "shared.json").read_text()) | {"x": value}
    rewritten(run, "shared.json", json.dumps(tree).encode())
    with pytest.raises(DamagedError, match=r"shared\.json: the state is inconsistent"):
        checkpoints.read_part(checkpoints.open_checkpoint(run / "checkpoints", 4), "shared")


Change = Callable[[dict[str, Any]], object]


def _set(value: Any, *keys: str | int) -> Change:
    """Put a value into what a checkpoint holds."""

    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("pipeline", lambda tree: tree.pop("pipeline"), "its state cannot be read (KeyError: 'pipeline')"),
        ("position", _set({}, "position"), "its state cannot be read (KeyError"),
        ("telemetry", _set({}, "telemetry"), "its state cannot be read (KeyError: 'totals')"),
        ("groups", _set([], "groups"), "its state cannot be read (ValueError"),
        ("data", _set(5, "data"), "its state cannot be read (TypeError"),
        ("generators", _set({}, "generators", "python"), "its state cannot be read (KeyError"),
        ("optimizer", lambda tree: tree.update(json.loads(deep(900))), "nested more than 100 deep"),
    ],
)
def test_what_cannot_be_read_is_said_of_the_checkpoint(
    run: Path, key: str, change: Change, said: str
) -> None:
    """Its hashes are right, so it is what somebody wrote: the run ends, and names the checkpoint."""
    place = run / "checkpoints" / checkpoints.checkpoint_name(4)
    trees = {name: json.loads((place / name).read_text()) for name in ("shared.json", "rank-00000.json")}
    name = next(name for name, tree in trees.items() if key in tree)
    change(trees[name])
    rewritten(run, name, json.dumps(trees[name]).encode())
    code, told = go_on(run)
    assert code == 2, told
    assert "ddprun: the checkpoint of step 4 is damaged: " in told
    assert said in told
    assert "Traceback" not in told


# Reports of such a folder.


@pytest.mark.parametrize(
    "name", ["events.jsonl", "steps", "steps/rank-00001.jsonl", "buckets/rank-00000.jsonl"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_a_report_waits_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    folder = make(tmp_path / "run")
    (folder / name).rename(tmp_path / "whole")
    _put(kind, folder / name, tmp_path / "whole")
    assert main(["report", str(folder)]) == 2
    told = capsys.readouterr().err
    wrong = (
        "a symbolic link" if kind != "pipe" else "not a folder" if name == "steps" else "not a regular file"
    )
    assert f"{Path(name).name} is {wrong}" in told
    assert "Traceback" not in told


LINES = [
    b"",
    b"no json",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    b'{"step": 3}',
    deep(900).encode(),
    b"[" * 100_000,
]


def _mutated(record: dict[str, Any]) -> list[bytes]:
    """A record with each of its values replaced by each of these, and without it."""
    values: list[Any] = [None, "x", -1, 1e999, 10**15, 10**30, [], {}, [[]], [None], True, float("nan")]
    changed = [record | {key: value} for key in record for value in values]
    changed += [{name: item for name, item in record.items() if name != key} for key in record]
    return [json.dumps(one).encode() for one in changed]


@pytest.mark.parametrize("name", ["events.jsonl", "steps/rank-00000.jsonl", "buckets/rank-00000.jsonl"])
def test_a_report_passes_over_what_is_no_record(tmp_path: Path, name: str) -> None:
    """Lines without what a record has, or with other things in it: the page is made of the rest."""
    folder = make(tmp_path / "run", late=1)
    kinds: dict[Any, dict[str, Any]] = {}
    for line in (folder / name).read_text().splitlines():
        record = json.loads(line)
        kinds.setdefault(record.get("event"), record)
    strange = LINES + [line for record in kinds.values() for line in _mutated(record)]
    with (folder / name).open("ab") as file:
        file.writelines(line + b"\n" for line in strange)
    assert main(["report", str(folder)]) == 0
    json.loads((folder / "trace.json").read_text())


def test_a_report_passes_over_files_of_no_rank(tmp_path: Path) -> None:
    """`rank-x.jsonl` was a traceback; a number that is written otherwise is no rank's either."""
    folder = make(tmp_path / "run")
    for name in ("rank-x.jsonl", "rank-.jsonl", "rank-0.jsonl", "rank-000000.jsonl", "rank-٣٣٣٣٣.jsonl"):
        (folder / "steps" / name).write_text('{"step": 1}\n')
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize("text", ["", "[]", deep(900), '{"stages": 3, "metrics": [], "wire_bytes": "x"}'])
def test_a_report_does_not_believe_a_summary(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path / "run", late=1)
    for key in (None, *json.loads((folder / "summary.json").read_text())):
        (folder / "summary.json").write_text(text if key is None else json.dumps({key: ["x"]}))
        assert main(["report", str(folder), "--no-trace"]) == 0


# Files that take no room and hours to read, and many of them.

HUGE_BYTES = 300 << 30


def huge(path: Path, *, lines: bool = False) -> None:
    """Make a file of holes, or of lines that hold one each and are no longer than a record may be."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)
        for at in range(0, HUGE_BYTES if lines else 0, 50 << 20):
            os.pwrite(file.fileno(), b'}\n{"step": 1, ', at)


def junk(path: Path, kind: str) -> None:
    """Make a file that takes room, with nothing in it that is a record, or only its beginning."""
    path.parent.mkdir(exist_ok=True)
    made = {
        "noise": random.Random(3).randbytes(1 << 20) * 20,
        "empty lines": b"\n" * (1 << 17),
        "a beginning": b'{"step": 1' + b"\0" * (20 << 20) + b"}\n",
        "no records": b'{"step": 1, "v": 0}\n' * (1 << 15),
    }
    path.write_bytes(made[kind])


def bounded(*words: str | Path) -> tuple[int, str]:
    """A real command's exit code, and what it says; hours are no end."""
    command = [sys.executable, "-m", "ddprun", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "lines"),
    [("events.jsonl", False), ("steps/rank-00000.jsonl", True), ("buckets/rank-00000.jsonl", False)],
)
def test_a_report_reads_no_holes(tmp_path: Path, name: str, lines: bool) -> None:
    """In one line, with the name of the file."""
    folder = make(tmp_path / "run")
    huge(folder / name, lines=lines)
    code, said = bounded("report", folder)
    assert code == 2
    assert said == f"ddprun: {folder} cannot be read: more than 16 MiB of {Path(name).name} are not records\n"


@pytest.mark.parametrize("kind", ["noise", "empty lines", "a beginning", "no records"])
@pytest.mark.parametrize("name", ["events.jsonl", "steps/rank-00000.jsonl", "buckets/rank-00000.jsonl"])
def test_a_report_reads_little_that_is_no_record(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are there, too: gigabytes of them took minutes, and empty lines hours."""
    folder = make(tmp_path / "run")
    junk(folder / name, kind)
    assert main(["report", str(folder)]) == 2
    assert f"more than 16 MiB of {Path(name).name} are not records" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["noise", "empty lines", "a beginning"])
@pytest.mark.parametrize("name", ["steps/rank-00000.jsonl", "buckets/rank-00007.jsonl"])
def test_resuming_reads_little_that_is_no_record(run: Path, name: str, kind: str) -> None:
    junk(run / name, kind)
    code, told = go_on(run)
    assert code == 2
    assert (
        f"cannot resume in the run folder {run}: more than 16 MiB of {Path(name).name} are not records"
        in told
    )


def test_a_report_reads_a_thousand_ranks(tmp_path: Path) -> None:
    """Of the page and the timeline every rank is a part."""
    folder = make(tmp_path / "run")
    for rank in range(2, 3_000):
        (folder / "steps" / f"rank-{rank:05}.jsonl").touch()
    code, said = bounded("report", folder)
    assert code == 2
    assert f"{folder} has records of 3,000 ranks; at most 1,000 are read" in said


@pytest.mark.parametrize(
    ("name", "lines"),
    [("events.jsonl", False), ("steps/rank-00000.jsonl", True), ("buckets/rank-00007.jsonl", False)],
)
def test_resuming_reads_no_holes(run: Path, name: str, lines: bool) -> None:
    """To cut records off, their ends were looked for."""
    huge(run / name, lines=lines)
    code, told = go_on(run)
    assert code == 2
    file = Path(name).name
    assert f"cannot resume in the run folder {run}: more than 16 MiB of {file} are not records" in told
    assert "Traceback" not in told


def test_a_checkpoint_larger_than_memory_is_damaged(run: Path) -> None:
    """Its hash was computed first."""
    place = run / "checkpoints" / checkpoints.checkpoint_name(4)
    size = max(HUGE_BYTES, 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    os.truncate(place / "shared.safetensors", size)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["shared.safetensors"]["bytes"] = size
    (place / "manifest.json").write_text(json.dumps(manifest))
    code, told = go_on(run)
    assert code == 0, told
    assert "skipping the checkpoint of step 4: " in told
    assert f"shared.safetensors: {size:,} bytes, which is more than this host's memory" in told


def test_a_lost_tail_is_no_reason_to_refuse_a_file(run: Path) -> None:
    """As after a crash of the machine: a hole at the end, which is cut off."""
    place = run / "steps" / "rank-00000.jsonl"
    os.truncate(place, 1 << 20)
    assert main(["report", str(run)]) == 0
    code, told = go_on(run)
    assert code == 0, told
    assert [json.loads(line)["step"] for line in place.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


# What opens files.


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd"])
def test_a_name_stays_below_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "outside").write_text(KEPT)
    with pytest.raises(ValueError, match="is not below"):
        open_file(tmp_path / "in", name)


def test_a_folder_may_be_reached_through_links_and_what_is_in_it_may_not(tmp_path: Path) -> None:
    """`runs -> /scratch/runs` is the user's own word."""
    (tmp_path / "real" / "steps").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "link").symlink_to(tmp_path / "real" / "steps")
    with open_file(tmp_path / "run", "steps/x", "wb") as file:
        file.write(b"1")
    assert names_in(tmp_path / "run", "steps") == ["x"]
    for call in (
        lambda: names_in(tmp_path / "run", "link"),
        lambda: check_folder_if_exists(tmp_path / "run", "link"),
    ):
        with pytest.raises(WrongFileTypeError, match="link is a symbolic link, not a folder"):
            call()


def test_what_replaces_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    with pytest.raises(ValueError, match="half"), replace_atomically(tmp_path, "x") as file:
        file.write(int("half").to_bytes() if file.write(b"half") else b"")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "before")]
    with replace_atomically(tmp_path, "x") as file:
        file.write(b"after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "after")]


def test_a_summary_says_which_file_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        write_summary(tmp_path / "gone", Summary(status="done", steps=1))
    assert raised.value.filename == str(tmp_path / "gone")


def test_a_short_file_takes_no_room_for_a_long_one(tmp_path: Path) -> None:
    """A run that is short of memory reads manifests, too."""
    (tmp_path / "run.json").write_text("{}")
    tracemalloc.start()
    try:
        assert read_json_object(tmp_path, "run.json") == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_json_is_bounded() -> None:
    assert parse_json(deep(100).encode())
    assert parse_json(b"NaN", finite=False) != 0
    for text in (deep(101), "NaN", "-Infinity", "1e999", "1" * 5000):
        with pytest.raises(ValueError, match=r"nested|not JSON"):
            parse_json(text.encode())
