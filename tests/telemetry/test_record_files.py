"""The records of a resumed run end with its checkpoint's step, in whole lines."""

import json
from pathlib import Path

import pytest

from ddprun.telemetry.writer import truncate_records, truncate_torn_event


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
