"""The timeline of a run in the Chrome trace format, which Perfetto opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Each
rank is a process with a track for the training thread, one for its waiting and one for every bucket; all on
rank 0's clock. Of a long run the last steps are taken.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddprun.run_files import replace_atomically
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import CheckpointWritten
from ddprun.telemetry.writer import encode_json_line
from ddprun.units import abbreviated_list

_MAX_EVENTS = 200_000  # in a trace, about: what a browser still opens at once
_SAMPLED_STEPS = 20  # of which the number of events in a step is estimated
_TRACKS_PER_PROCESS = 1_000_000
"""Unique over all processes, and none a process's: Perfetto would take it for that process's main thread."""

_RUN_PROCESS = 0  # the process for what concerns all ranks; rank 0's is 1
_STEPS_TRACK, _TRAINING_THREAD_TRACK, _WAITING_TRACK, _FIRST_BUCKET_TRACK = 1, 2, 3, 10
_EVENT_TRACK, _CHECKPOINT_TRACK = 1, 2
_FIRST_PROFILER_TRACK = 100_000
_FLOW_IDS_PER_RANK = 1_000_000_000
_BUCKET_KINDS = ("gradient", "delta", "parameters", "buffers", "optimizer")
_TRACKS_PER_KIND = 10_000
_EVENTS_WITHOUT_MARK = ("checkpoint_written", "clock_offsets")  # the first one is drawn
TraceEvent = dict[str, Any]


def write_chrome_trace(run: RecordedRun, target: Path, *, steps: tuple[int, int] | None = None) -> int:
    """Write a run's `trace.json`; gives how many steps of those recorded are in it. `steps` are the first and
    the last; None: all, or as many of the last as a browser opens.
    """
    chosen = _choose_steps(run) if steps is None else range(steps[0], steps[1] + 1)
    with replace_atomically(target.parent, target.name) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in _trace_events(run, chosen, with_run=steps is None):
            file.write(separator + encode_json_line(event))
            separator = b","
        file.write(b"]}\n")
    return sum(step in chosen for step in run.recorded_steps)


def _choose_steps(run: RecordedRun) -> set[int]:
    """As many of the last steps as a browser opens, and those that torch's profiler recorded."""
    sample = set(run.recorded_steps[-_SAMPLED_STEPS:])
    of_first_rank = sum(1 for rank in run.ranks[:1] for _ in _rank_events(run, rank, sample))
    room = len(sample) * _MAX_EVENTS // max(1, of_first_rank * len(run.ranks))
    return {*run.recorded_steps[-max(1, room) :], *run.profiled_steps}


def _trace_events(run: RecordedRun, chosen: range | set[int], *, with_run: bool) -> Iterator[TraceEvent]:
    """The events of these steps; and those of the run, of which most are far from a few steps."""
    yield from _process_and_track_names(run)
    for rank in run.ranks:
        yield from _rank_events(run, rank, chosen)
        yield from _profiler_events(run, rank, chosen)
    if with_run:
        yield from _run_events(run)


def _process_and_track_names(run: RecordedRun) -> Iterator[TraceEvent]:
    hosts = run.started.hosts
    yield from _metadata_events(_RUN_PROCESS, None, "run")
    yield from _metadata_events(_RUN_PROCESS, _EVENT_TRACK, "events")
    yield from _metadata_events(_RUN_PROCESS, _CHECKPOINT_TRACK, "checkpoints")
    for rank in run.ranks:
        host = f" on {hosts[rank]}" if rank < len(hosts) else ""
        yield from _metadata_events(rank + 1, None, f"rank {rank}{host}")
        yield from _metadata_events(rank + 1, _STEPS_TRACK, "steps")
        yield from _metadata_events(rank + 1, _TRAINING_THREAD_TRACK, "training thread")
        yield from _metadata_events(rank + 1, _WAITING_TRACK, "waiting")


def _metadata_events(process: int, track: int | None, name: str) -> Iterator[TraceEvent]:
    """The name of a track, or of a process (None); they are shown in the order of their numbers."""
    what, at = ("process", {"pid": process + 1}) if track is None else ("thread", _track_ids(process, track))
    index = process if track is None else track
    yield {"ph": "M", "name": f"{what}_name", **at, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **at, "args": {"sort_index": index}}


def _track_ids(process: int, track: int) -> dict[str, int]:
    """The process and track ids of an event. Processes count from 1, for Perfetto takes 0 as the idle one."""
    return {"pid": process + 1, "tid": (process + 1) * _TRACKS_PER_PROCESS + track}


def _rank_events(run: RecordedRun, rank: int, chosen: range | set[int]) -> Iterator[TraceEvent]:
    def to_rank0_us(at_us: float) -> int:
        # In whole microseconds: slices that lie inside one another on this rank's clock do so on rank 0's.
        return round(run.clocks.on_rank0_clock(rank, at_us))

    def slice_(track: int, name: str, start_us: float, end_us: float, **args: Any) -> TraceEvent:
        start = to_rank0_us(start_us)
        at = {**_track_ids(rank + 1, track), "ts": start, "dur": max(0, to_rank0_us(end_us) - start)}
        return {"ph": "X", "name": name, **at, "args": args}

    for line in run.step_records(rank, chosen.__contains__):
        start = line.start_us
        facts = {name: getattr(line, name) for name in ("stage", "samples", "loss", "mean_loss")}
        yield slice_(_STEPS_TRACK, f"step {line.step}", start, start + line.step_us, **facts)
        for part, us in line.laps:
            yield slice_(_TRAINING_THREAD_TRACK, part, start, start + us, step=line.step)
            start += us
        for begin, end in line.waits:
            yield slice_(_WAITING_TRACK, "wait", begin, end, step=line.step)
    named: set[int] = set()
    for bucket in run.bucket_records(rank, chosen.__contains__):
        track = _FIRST_BUCKET_TRACK + _TRACKS_PER_KIND * _BUCKET_KINDS.index(bucket.kind) + bucket.bucket
        name = f"{bucket.kind} {bucket.bucket}"
        if track not in named:
            named.add(track)
            yield from _metadata_events(rank + 1, track, name)
        facts = {"params": abbreviated_list(bucket.params, 8)}
        known = ("hooks", "bytes", "wire_bytes", "completed_by", "encode_us", "decode_us")
        facts |= {key: value for key in known if (value := getattr(bucket, key)) is not None}
        yield slice_(track, f"{name} of step {bucket.step}", bucket.ready_us, bucket.done_us, **facts)
        for param, at in zip(bucket.params, bucket.params_ready_us or (), strict=False):
            if at is not None:
                about = {**_track_ids(rank + 1, track), "ts": to_rank0_us(at)}
                yield {"ph": "i", "s": "t", "name": f"{param} ready", **about}
        all_ready = bucket.all_ready_us or 0
        for leg in bucket.legs:
            start, end = leg.start_us, leg.done_us
            facts = {key: getattr(leg, key) for key in ("group", "dtype", "bytes", "wire_bytes")}
            yield slice_(track, leg.op, start, end, **facts)
            if all_ready > start:
                yield slice_(track, "until the last rank is ready", start, min(all_ready, end))


def _profiler_events(run: RecordedRun, rank: int, chosen: range | set[int]) -> Iterator[TraceEvent]:
    """What torch's profiler recorded, in tracks of their own below the rank's others."""
    tracks: dict[str, int] = {}
    for line in run.profiler_records(rank):
        if not any(step in chosen for step in range(line.first_step, line.step + 1)):
            continue
        name = line.track
        if name not in tracks:
            tracks[name] = _FIRST_PROFILER_TRACK + len(tracks)
            yield from _metadata_events(rank + 1, tracks[name], f"torch: {name}")
        event: TraceEvent = {key: getattr(line, key) for key in ("ph", "name", "cat", "args")}
        start = run.clocks.on_rank0_clock(rank, line.start_us)
        event |= {**_track_ids(rank + 1, tracks[name]), "ts": round(start, 3)}
        if line.us is not None:
            yield event | {"dur": round(line.us, 3)}
        elif line.id is not None:
            # Perfetto takes whole numbers only, each once in a trace.
            yield event | {"id": rank * _FLOW_IDS_PER_RANK + line.id, "bp": "e"}


def _run_events(run: RecordedRun) -> Iterator[TraceEvent]:
    for written in run.events_of(CheckpointWritten):
        # Not a slice of a track: when it is reported, the next one may have begun.
        one = {"cat": "checkpoint", "id": written.step, **_track_ids(_RUN_PROCESS, _CHECKPOINT_TRACK)}
        name, at = f"checkpoint of step {written.step}", written.monotonic_us
        yield {"ph": "b", "name": name, "ts": round(at - written.seconds * 1e6), **one}
        yield {"ph": "e", "name": name, "ts": at, **one}
    for event in run.events:
        kind = event["event"]
        if kind not in _EVENTS_WITHOUT_MARK and "monotonic_us" in event:
            left_out = ("event", "level", "time", "monotonic_us", "rank")
            args = {key: value for key, value in event.items() if key not in left_out}
            about = {**_track_ids(_RUN_PROCESS, _EVENT_TRACK), "ts": event["monotonic_us"], "args": args}
            yield {"ph": "i", "s": "t", "name": kind.replace("_", " "), **about}
