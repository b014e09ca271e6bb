"""torch's profiler on chosen steps; its events become records of this rank, on this rank's clock.

The loop starts and stops it between steps (`timings.profile`); the writer gets its records directly.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ddprun.telemetry.records import RECORDS_VERSION, ProfilerRecord
from ddprun.telemetry.writer import PROFILE_FOLDER, RecordWriter, encode_json_line, record_file

_KINETO_LOG_LEVEL = "6"  # otherwise Kineto says on every rank's screen that it starts and stops
_SLICES, _FLOWS = "X", "sf"
"""Phases of the Chrome trace format that are kept: what took time, and arrows between them."""


class Profiler:
    """Profiles some steps of a run, the first to the last
    (https://docs.pytorch.org/docs/stable/profiler.html).

    Starting and stopping takes up to seconds. That is done between steps, on all ranks alike.
    """

    def __init__(self, first_and_last: Sequence[int], writer: RecordWriter, rank: int) -> None:
        self._first, self._last = first_and_last
        self._writer, self._rank = writer, rank
        self._running: torch.profiler.profile | None = None
        self._first_profiled_step = 0
        self._clock_offset_us = 0.0  # of this rank's monotonic clock: the profiler's is the time of day

    def toggles_before(self, step: int) -> bool:
        """Whether the profiler has to start or to stop before step `step` of the run."""
        return (self._first <= step <= self._last) != (self._running is not None)

    def toggle(self, step: int) -> None:
        """Start or stop the profiler before step `step`."""
        if self._running is not None:
            self.stop(step - 1)
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_LOG_LEVEL)
        self._running = torch.profiler.profile(record_shapes=True)
        self._running.start()
        self._first_profiled_step = step
        self._clock_offset_us = (time.time_ns() - time.monotonic_ns()) / 1000

    def stop(self, step: int) -> None:
        """Stop; `step` was the last step."""
        if self._running is None:
            return
        profile, self._running = self._running, None
        profile.stop()
        if step < self._first_profiled_step:
            return  # no step came after all
        # Encoded here: on the writer's thread that would slow down the steps that follow.
        lines = b"".join(map(encode_json_line, self._records(profile, step)))
        self._writer.put(record_file(PROFILE_FOLDER, self._rank), lines)

    def _records(self, profile: torch.profiler.profile, step: int) -> Iterator[ProfilerRecord]:
        with tempfile.TemporaryDirectory(prefix="ddprun-") as scratch:
            path = Path(scratch) / "trace.json"
            profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        base_us = trace.get("baseTimeNanoseconds", 0) / 1000 - self._clock_offset_us
        events = trace["traceEvents"]
        tracks = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        for event in events:
            at = event.get("pid"), event.get("tid")
            if event["ph"] not in _SLICES + _FLOWS or at not in tracks or event.get("cat") == "Trace":
                continue
            yield ProfilerRecord(
                v=RECORDS_VERSION,
                rank=self._rank,
                step=step,
                first_step=self._first_profiled_step,
                track=tracks[at],
                ph=event["ph"],
                name=event["name"],
                cat=event["cat"],
                start_us=round(event["ts"] + base_us, 3),
                us=event["dur"] if event["ph"] in _SLICES else None,
                id=event["id"] if event["ph"] in _FLOWS else None,
                args=event.get("args", {}),
            )
