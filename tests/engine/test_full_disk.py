"""A disk that is full when a run comes to its end: what is lost is told in a line, and the rest is there."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddprun.cli import main
from ddprun.config import load
from ddprun.telemetry.writer import RecordWriter
from tests.checkpoint.test_damage import small_disk
from tests.engine.running import summary, to_its_end
from tests.ranks import as_processes
from tests.report.made_up import make

FILLING = """
import os
from pathlib import Path

import torch


def fill():
    \"\"\"Leave no room at all on the disk of the run.\"\"\"
    handle = os.open("disk/filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 16, 1 << 10, 1):
        try:
            while True:
                os.write(handle, bytes(size))
        except OSError:
            pass
    os.close(handle)


class Samples(torch.utils.data.Dataset):
    def __init__(self, when="full", rank=0):
        self.full, self.count = when == "full", 0
        if when == "at once":
            fill()
        if when == "no records" and int(os.environ["RANK"]) == rank:
            Path("disk/run/steps").write_text("")  # in the place of the folder

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.count += 1
        if self.full and self.count == 41:  # 16 are read for checkpoints, before step 1
            fill()
        return torch.ones(64), index % 10
"""

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [8], outputs: 10}}
data: {train: {filling.Samples: {when: WHEN}}}
loader: {batch_size: 4, shuffle: false}
optimizer: adam
checkpoint: {keep: KEEP, every: 1000}
stages: [{train: {epochs: 1}}LAST]
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as disk:
        yield disk


def _work(file: Path, run_dir: Path, told: Path) -> int:
    return to_its_end(load(file), run_dir, told)


def run(
    disk: Path, *, when: str = "full", keep: int = 0, last: str = "", ranks: int = 1
) -> tuple[list[int], str]:
    """The ranks' exit codes, and what they have said."""
    folder = disk.parent
    (folder / "filling.py").write_text(FILLING)
    text = PIPELINE.replace("WHEN", when).replace("KEEP", str(keep)).replace("LAST", last)
    (folder / "p.yaml").write_text(text)
    codes = as_processes(ranks, _work, folder / "p.yaml", disk / "run", folder / "told", cwd=folder)
    said = (folder / "told").read_text()
    assert "Traceback" not in said
    return codes, said


def fill(disk: Path) -> None:
    """Leave no room on it."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))


def test_a_disk_that_is_full_before_the_first_step_is_told_in_a_line(disk: Path) -> None:
    codes, said = run(disk, when="at once")
    assert codes == [2]
    assert said == f"ddprun: cannot write into the run folder {disk / 'run'}: No space left on device\n"
    assert "Traceback" not in said


def test_a_summary_that_is_lost_is_told_and_the_table_is_shown(disk: Path) -> None:
    codes, said = run(disk)
    assert codes == [1]
    assert ("ddprun: not all of the run could be written: summary.json: No space left on device\n") in said
    assert "mean loss, last known" in said
    assert "the records of rank 0 are incomplete: No space left on device" in said
    assert not (disk / "run" / "summary.json").exists()
    assert not list((disk / "run").glob(".summary*"))


def test_a_last_checkpoint_that_is_lost_is_a_failure_of_all_ranks(disk: Path) -> None:
    """Its launcher would take any rank's word for the run's."""
    codes, said = run(disk, keep=3, ranks=2)
    assert codes == [1, 1]
    (line,) = [line for line in said.splitlines() if line.startswith("ddprun: not all of the run")]
    assert "the checkpoint of step 8, the last one: rank" in line
    assert "No space left on device" in line


def test_a_file_of_weights_that_is_lost_is_a_failure_in_one_line(disk: Path) -> None:
    codes, said = run(disk, last=", save")
    assert codes == [1]
    (line,) = [line for line in said.splitlines() if line.startswith("ddprun: stages[1].save: cannot write")]
    assert "No space left on device" in line
    assert not list((disk / "run").glob("*model.safetensors*"))


def test_records_that_are_lost_are_told_and_the_run_is_done(disk: Path) -> None:
    codes, said = run(disk, when="no records", keep=1, last=", save")
    assert codes == [0]
    assert said.count("the records of rank 0 are incomplete: steps is not a folder") == 1
    assert summary(disk / "run")["status"] == "done"
    assert summary(disk / "run")["records_failure"] == "steps is not a folder"


def test_a_writer_that_cannot_bring_out_the_rest_says_so_and_ends(disk: Path) -> None:
    """What it held back did not fit when its file was closed: a traceback of its thread."""
    writer = RecordWriter(disk)
    writer.put("x", b"first\n")
    writer.flush()
    fill(disk)
    writer.put("x", b"line" * 1500)  # less than a buffer holds, and more than is left of the file's block
    writer.put("y", b"line\n")
    writer.close()
    assert writer.failure == "No space left on device"


def test_a_report_that_does_not_fit_names_its_file(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was "cannot write None"; what there was before stays."""
    folder = make(disk / "run")
    (folder / "report.html").write_text("before")
    fill(disk)
    assert main(["report", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"ddprun: cannot write {folder / 'report.html'}: No space left on device")
    assert (folder / "report.html").read_text() == "before"
    assert main(["report", str(folder), "--output", str(disk / "page.html")]) == 2
    assert f"cannot write {disk / 'page.html'}: No space left on device" in capsys.readouterr().err


def test_a_timeline_that_does_not_fit_names_its_file(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(disk / "run")
    fill(disk)
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 2
    assert f"cannot write {folder / 'trace.json'}: No space left on device" in capsys.readouterr().err
    assert not list(folder.glob("*trace.json*"))
