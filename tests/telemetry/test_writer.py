"""Records reach the disk on a thread of their own, and a bad disk costs records, not the run."""

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from ddprun.run_files import open_file
from ddprun.telemetry import writer as telemetry_writer
from ddprun.telemetry.writer import _MAX_WAITING_RECORDS, RecordWriter, encode_json_line, make_event_logger


def test_not_a_number_becomes_null() -> None:
    """JSON knows no NaN; readers in other languages stop at it."""
    line = encode_json_line({"loss": float("nan"), "parts": [float("inf"), 1.5]})
    assert json.loads(line) == {"loss": None, "parts": [None, 1.5]}


@pytest.mark.parametrize("value", ["/data/\udcff", 2**70, "a\u2028b\u0085c\x9b", [1, {"deep": 2**64}]])
def test_whatever_json_can_hold_is_one_line_of_ascii(value: Any) -> None:
    """A path that is not UTF-8, a number of more than 64 bits, what ends lines elsewhere; NaN beside it."""
    found = encode_json_line({"value": value, "loss": float("nan")}).decode("ascii")
    assert found.splitlines() == [found.removesuffix("\n")]
    assert json.loads(found) == {"value": value, "loss": None}


def test_a_disk_that_fails_is_noted_and_ends_only_the_writing(tmp_path: Path) -> None:
    """The folder is a file: nothing can be written, and nothing is raised."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    writer = RecordWriter(blocked)
    for _ in range(3):
        writer.put("x", b"line\n")
    writer.close()
    assert writer.failure is not None
    assert "Not a directory" in writer.failure or "File exists" in writer.failure


def test_a_stalled_disk_drops_lines_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded; `put` never waits. The disk does not answer yet when the file is opened."""
    answers = threading.Event()

    def late(*args: Any, **more: Any) -> IO[bytes]:
        assert answers.wait(60)
        return open_file(*args, **more)

    monkeypatch.setattr(telemetry_writer, "open_file", late)
    writer = RecordWriter(tmp_path)
    fit = _MAX_WAITING_RECORDS // 3
    for _ in range(fit + 9):
        writer.put("x", b"line\n" * 3, 3)
    assert writer.dropped == 27
    answers.set()
    writer.flush()
    writer.put("x", b"line\n")
    writer.close()
    assert (tmp_path / "x").read_text().count("line") == 3 * fit + 1


def test_events_are_one_json_object_a_line_through_the_writer(tmp_path: Path) -> None:
    """With what the logger is bound to, the level and both clocks."""
    writer = RecordWriter(tmp_path)
    log = make_event_logger(writer, dict, rank=0)
    log.info("started", world_size=2)
    log.warning("step_skipped", step=3)
    make_event_logger(None, dict, rank=1).info("unheard")
    writer.close()
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (first["event"], first["rank"], first["world_size"], first["level"]) == ("started", 0, 2, "info")
    assert second["level"] == "warning"
    assert first["monotonic_us"] <= second["monotonic_us"]
    assert first["time"].endswith("Z")


def test_lines_reach_the_file_while_more_keep_coming(tmp_path: Path) -> None:
    """A run that records without a pause can be watched, and a crash loses half a second, not a buffer."""
    writer, end = RecordWriter(tmp_path), time.monotonic() + 20
    while not ((tmp_path / "x").exists() and (tmp_path / "x").read_text()):
        assert time.monotonic() < end, "nothing was flushed"
        writer.put("x", b"line\n")
        time.sleep(0.001)
    writer.close()


def test_flushing_a_writer_that_is_closed_returns_at_once(tmp_path: Path) -> None:
    """Nobody is there any more to say that it is done; what has failed after the end may still ask."""
    writer = RecordWriter(tmp_path)
    writer.put("x", b"line\n")
    writer.close()
    thread = threading.Thread(target=writer.flush, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert (tmp_path / "x").read_text() == "line\n"
