"""The timeline of a run in the Chrome trace format, which Perfetto opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. One
process stands for each rank, with a track each for the training thread, for its waiting and for every bucket;
all on rank 0's clock. Of a long run some stretches of steps are taken, evenly over the run.
"""

import json
import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ddprun.report.runs import Run, between
from ddprun.run_files import replacing
from ddprun.telemetry.writer import finite

_EVENTS = 200_000
"""In a trace at most, about: what a browser still opens at once."""

_STRETCH = 10
"""Steps that follow each other in a trace that leaves others out."""

_TRACKS = 1_000_000
"""Numbers of tracks are unique over all processes, and none is a process's: Perfetto would take it for the
main thread's.
"""

_RUN = 0  # place of the process for what concerns all ranks; rank 0's is 1
_STEPS, _THREAD, _WAITING, _FIRST_BUCKET = 1, 2, 3, 10
_EVENT_TRACK, _CHECKPOINTS = 1, 2
_PROFILER = 100_000
_FLOWS = 1_000_000_000
_KINDS = ("gradient", "delta", "parameters", "buffers", "optimizer")
_PER_KIND = 10_000
_TOLD = {
    "straggler": "straggler",
    "straggler_over": "straggler over",
    "checkpoint_taken": "checkpoint taken",
    "checkpoint_left_out": "checkpoint left out",
    "overflow": "overflow",
    "nonfinite": "not finite",
    "step_skipped": "step skipped",
    "audit": "audit",
    "hang": "hang",
    "resumed": "resumed",
    "reconciled": "ranks made equal",
    "average": "average",
    "broadcast": "broadcast",
    "evaluated": "evaluated",
    "stage_started": "stage",
}


def write(run: Run, target: Path, *, steps: tuple[int, int] | None = None) -> int:
    """Write `trace.json`; gives how many steps are in it.

    Args:
        run: whose.
        target: the file.
        steps: from and to, both included; None: a selection that is small enough.
    """
    chosen = _choose(run) if steps is None else range(steps[0], steps[1] + 1)
    with replacing(target.parent, target.name) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in _events(run, chosen, whole=steps is None):
            file.write(separator + json.dumps(finite(event), separators=(",", ":"), allow_nan=False).encode())
            separator = b",\n"
        file.write(b"\n]}\n")
    return len(chosen)


def _choose(run: Run) -> range | set[int]:
    """All steps, or stretches of steps that begin evenly over the run."""
    last = run.last_step
    if not run.ranks or not last:
        return range(0)
    every = _recorded_every(run)
    sample = range(1, last + 1) if last <= 3 * every else range(last - 3 * every + 1, last + 1)
    count = sum(1 for rank in run.ranks[:1] for _ in _of_rank(run, rank, sample))
    per_step = max(1.0, count / len(sample)) * len(run.ranks)
    room = max(_STRETCH * every, int(_EVENTS / per_step))
    if last <= room:
        return range(1, last + 1)
    stretches = max(1, room // (_STRETCH * every))
    starts = [
        1 + round(place * (last - _STRETCH * every) / max(1, stretches - 1)) for place in range(stretches)
    ]
    shown = chain.from_iterable(between(run.recorded, start, start + _STRETCH * every) for start in starts)
    return run.profiled.union(shown)


def _recorded_every(run: Run) -> int:
    """Every how manieth step is recorded."""
    first = [line["step"] for line in islice(run.steps(run.ranks[0]), 3)]
    return max(1, first[-1] - first[-2]) if len(first) > 1 else 1


def _events(run: Run, chosen: range | set[int], *, whole: bool) -> Iterator[dict[str, Any]]:
    yield from _names(run)
    low, high = math.inf, -math.inf
    for rank in run.ranks:
        for event in chain(_of_rank(run, rank, chosen), _profiled(run, rank, chosen)):
            if "ts" in event:
                low, high = min(low, event["ts"]), max(high, event["ts"])
            yield event
    for event in _of_run(run):  # outside of steps that somebody has chosen it would be far away
        if whole or low <= event["ts"] <= high:
            yield event


def _names(run: Run) -> Iterator[dict[str, Any]]:
    started = run.first("started") or {}
    hosts = started.get("hosts") or []
    yield _meta(_RUN, None, "process_name", name="run")
    yield _meta(_RUN, None, "process_sort_index", sort_index=0)
    yield _meta(_RUN, _EVENT_TRACK, "thread_name", name="events")
    yield _meta(_RUN, _CHECKPOINTS, "thread_name", name="checkpoints")
    for rank in run.ranks:
        host = f" on {hosts[rank]}" if rank < len(hosts) else ""
        yield _meta(rank + 1, None, "process_name", name=f"rank {rank}{host}")
        yield _meta(rank + 1, None, "process_sort_index", sort_index=rank + 1)
        for place, name in ((_STEPS, "steps"), (_THREAD, "training thread"), (_WAITING, "waiting")):
            yield _meta(rank + 1, place, "thread_name", name=name)
            yield _meta(rank + 1, place, "thread_sort_index", sort_index=place)


def _meta(process: int, track: int | None, what: str, **args: Any) -> dict[str, Any]:
    at = {"pid": process + 1} if track is None else _at(process, track)
    return {"ph": "M", "name": what, **at, "args": args}


def _at(process: int, track: int) -> dict[str, int]:
    """Where an event belongs; processes count from 1, since 0 is the idle one."""
    return {"pid": process + 1, "tid": (process + 1) * _TRACKS + track}


def _of_rank(run: Run, rank: int, chosen: range | set[int]) -> Iterator[dict[str, Any]]:
    def slice_(track: int, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        # Whole microseconds on both sides: what lies in another slice on this rank's clock does on rank 0's.
        begin, done = round(run.clocks.aligned(rank, start)), round(run.clocks.aligned(rank, end))
        return {
            "ph": "X",
            "name": name,
            **_at(rank + 1, track),
            "ts": begin,
            "dur": max(0, done - begin),
            "args": args,
        }

    def instant(track: int, name: str, at: float) -> dict[str, Any]:
        when = round(run.clocks.aligned(rank, at))
        return {"ph": "i", "s": "t", "name": name, **_at(rank + 1, track), "ts": when}

    for line in run.steps(rank, chosen.__contains__):
        start = line["start_us"]
        shown = {name: line[name] for name in ("stage", "samples", "loss", "mean_loss")}
        yield slice_(_STEPS, f"step {line['step']}", start, start + line["step_us"], **shown)
        for part, us in line.get("laps", ()):
            yield slice_(_THREAD, part, start, start + us, step=line["step"])
            start += us
        for begin, end in line.get("waits", ()):
            yield slice_(_WAITING, "wait", begin, end, step=line["step"])
    named: set[int] = set()
    for line in run.buckets(rank, chosen.__contains__):
        track = _FIRST_BUCKET + _PER_KIND * _KINDS.index(line["kind"]) + line["bucket"]
        name = f"{line['kind']} {line['bucket']}"
        if track not in named:
            named.add(track)
            yield _meta(rank + 1, track, "thread_name", name=name)
            yield _meta(rank + 1, track, "thread_sort_index", sort_index=track)
        yield slice_(
            track,
            f"{name} of step {line['step']}",
            line["ready_us"],
            line["done_us"],
            params=_some(line["params"]),
            hooks=line["hooks"],
            bytes=line["bytes"],
            wire_bytes=line["wire_bytes"],
            **({"completed_by": line["completed_by"]} if "completed_by" in line else {}),
            encode_us=line["encode_us"],
            decode_us=line["decode_us"],
        )
        for name, at in zip(line["params"], line.get("params_ready_us", ()), strict=False):
            if at is not None:
                yield instant(track, f"{name} ready", at)
        late = line.get("all_ready_us") or 0
        for leg in line["legs"]:
            told = {key: leg[key] for key in ("group", "dtype", "bytes", "wire_bytes")}
            yield slice_(track, leg["op"], leg["start_us"], leg["done_us"], **told)
            if late > leg["start_us"]:
                yield slice_(
                    track, "until the last rank is ready", leg["start_us"], min(late, leg["done_us"])
                )


def _profiled(run: Run, rank: int, chosen: range | set[int]) -> Iterator[dict[str, Any]]:
    """What torch's profiler saw, in tracks of their own below the rank's others."""
    tracks: dict[str, int] = {}
    for line in run.profile(rank):
        if not any(step in chosen for step in range(line["first_step"], line["step"] + 1)):
            continue
        name = line["track"]
        if name not in tracks:
            tracks[name] = _PROFILER + len(tracks)
            yield _meta(rank + 1, tracks[name], "thread_name", name=f"torch: {name}")
            yield _meta(rank + 1, tracks[name], "thread_sort_index", sort_index=tracks[name])
        begin = run.clocks.aligned(rank, line["start_us"])
        event = {key: line[key] for key in ("ph", "name", "cat", "args")}
        event |= {**_at(rank + 1, tracks[name]), "ts": round(begin, 3)}
        if "us" in line:
            yield event | {"dur": round(line["us"], 3)}
        else:
            # Perfetto takes whole numbers only, each once in a trace.
            yield event | {"id": rank * _FLOWS + line["id"], "bp": "e"}


def _of_run(run: Run) -> Iterator[dict[str, Any]]:
    for event in run.events:
        kind, at = event["event"], event.get("monotonic_us")
        if at is None:
            continue
        if kind == "checkpoint_written":
            # Not a slice of a track: when it is told of, the next one may be on its way.
            one = {"cat": "checkpoint", "id": event["step"], **_at(_RUN, _CHECKPOINTS)}
            name = f"checkpoint of step {event['step']}"
            yield {"ph": "b", "name": name, "ts": round(at - event["seconds"] * 1e6), **one}
            yield {"ph": "e", "name": name, "ts": at, **one}
        elif kind in _TOLD:
            left_out = ("event", "level", "time", "monotonic_us", "rank")
            args = {key: value for key, value in event.items() if key not in left_out}
            yield {
                "ph": "i",
                "s": "t",
                "name": _TOLD[kind],
                **_at(_RUN, _EVENT_TRACK),
                "ts": at,
                "args": args,
            }


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
