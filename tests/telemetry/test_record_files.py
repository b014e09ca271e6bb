"""The records of a resumed run end with its checkpoint's step, in whole lines."""

import json
from pathlib import Path

import pytest

from ddprun.telemetry.writer import RecordCollector, record_file, truncate_records, truncate_torn_event
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.testing import run_ranks


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "loss": 1.5}).encode() + b"\n" for step in steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lines(1, 2, 2, 3, 4), lines(1, 2, 2)),
        (lines(1, 2) + b'{"step": 3, "lo', lines(1, 2)),
        (lines(1, 2) + b'{"step": 2, "lo', lines(1, 2)),
        (lines(1, 2), lines(1, 2)),
        (lines(3, 4), b""),
        (lines(*range(1, 50_000)), lines(1, 2)),
        (b'{"st', b""),
        (b"", b""),
        (lines(2, 1) + b"no json\n", lines(2, 1)),
    ],
)
def test_what_is_undone_or_torn_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    """All that is later than the step, however many lines that are."""
    for kind in ("steps", "buckets"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "rank-00001.jsonl").write_bytes(before)
    truncate_records(tmp_path, 2)
    for kind in ("steps", "buckets"):
        assert (tmp_path / kind / "rank-00001.jsonl").read_bytes() == after


def test_events_are_history(tmp_path: Path) -> None:
    """Only a torn last line goes."""
    truncate_torn_event(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(lines(1, 9) + b'{"eve')
    truncate_torn_event(tmp_path)
    truncate_records(tmp_path, 2)
    assert (tmp_path / "events.jsonl").read_bytes() == lines(1, 9)


def test_a_host_without_the_disk_keeps_records_in_a_folder_of_its_launch(tmp_path: Path) -> None:
    """A rank that fails has no time to remove them. What is collected reaches rank 0 once, and is gone."""

    def body(group: RankGroup) -> Path:
        control = ControlChannel(group.process_groups[0])
        own = tmp_path / f"disk-{group.rank}"
        own.mkdir()
        records = RecordCollector(own, control, [1], tmp_path)
        folder, name = records.writer.folder, record_file("steps", group.rank)
        for step in (1, 2):
            records.writer.put(name, lines(step))
            records.collect()
            assert group.rank == 0 or (folder / name).read_bytes() == b""
        records.close()
        return folder

    ours, theirs = run_ranks(2, body)
    assert ours == tmp_path / "disk-0"
    assert theirs.parent == tmp_path
    assert not theirs.exists()
    assert [(ours / record_file("steps", rank)).read_bytes() for rank in range(2)] == [lines(1, 2)] * 2
