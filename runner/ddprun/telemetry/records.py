"""The records of a run: the fields of a step's record and of a bucket's, and what the summary adds up.

`docs/records.md` explains each field. The recorder makes records of resolved steps once `steps.divide` has
split their waiting, and hands them to the writer (`writer.py`); reports read them back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddprun.telemetry.control_message import Numbers
from ddprun.telemetry.steps import PARTS, Ints, ResolvedSteps
from ddprun_hooks.comm.trace import BucketTrace

VERSION = 1

_LAPS = {part: part.removesuffix("_us") for part in PARTS} | {"": ""}


class StepRecord(NamedTuple):
    """A step's record, and what those of its buckets are made of."""

    record: dict[str, Any]
    traces: Sequence[BucketTrace[int]]
    all_ready_us: Sequence[int]
    """When the last rank had each trace's bucket ready, on this rank's clock; 0: not known."""

    gradients_us: Mapping[str, int]
    """When each parameter's gradient was complete; empty where that was not measured."""

    def buckets(self) -> Iterator[dict[str, Any]]:
        """The records of the step's buckets."""
        stage, step, rank = self.record["stage"], self.record["step"], self.record["rank"]
        for trace, ready in zip(self.traces, self.all_ready_us, strict=True):
            yield bucket_record(trace, ready or None, self.gradients_us, stage=stage, step=step, rank=rank)


def step_records(
    resolved: ResolvedSteps,
    mean_losses: Sequence[float | None],
    all_ready_us: Numbers,
    *,
    rank: int,
    every: int,
) -> Iterator[StepRecord]:
    """The records of steps whose waiting has been divided; can be asked for once.

    Args:
        resolved: the steps; their traces are taken out.
        mean_losses: over all ranks, of each step; None where ranks did not synchronise.
        all_ready_us: when the last rank had each trace's bucket ready, on this rank's clock; 0: not known.
        rank: this one.
        every: only every n-th step is wanted.
    """
    steps, times, us = resolved.steps, resolved.times, resolved.us.tolist()
    ended, durations = [_LAPS[part] for part in resolved.parts], resolved.durations.tolist()
    all_ready = np.rint(all_ready_us).astype(np.int64).tolist()
    waits = resolved.waits[1:].T.tolist()
    trace_bounds, wait_bounds = _bounds(resolved.landed, len(steps)), _bounds(resolved.waits, len(steps))
    for row, step in enumerate(steps):
        # Traces are let go as soon as they are recorded, while the processor has them in its caches.
        first_trace, end_trace = trace_bounds[row], trace_bounds[row + 1]
        traces = resolved.traces[: end_trace - first_trace]
        del resolved.traces[: end_trace - first_trace]
        if step.number % every:
            continue
        first, end = resolved.bounds[row], resolved.bounds[row + 1]
        laps = zip(ended[first + 1 : end], durations[first + 1 : end], strict=True)
        # In the order of `PARTS`; written out, since this is made for every step.
        data, forward, backward, exposed_hook, exposed_wait, exposed_wire, optimizer, sync, other = us[row]
        record = {
            "v": VERSION,
            "rank": rank,
            "stage": step.stage,
            "step": step.number,
            "samples": resolved.samples[row],
            "loss": resolved.loss(row),
            "mean_loss": mean_losses[row],
            "start_us": times[first],
            "data_us": data,
            "forward_us": forward,
            "backward_us": backward,
            "exposed_hook_us": exposed_hook,
            "exposed_wait_us": exposed_wait,
            "exposed_wire_us": exposed_wire,
            "optimizer_us": optimizer,
            "sync_us": sync,
            "other_us": other,
            "step_us": resolved.step_us[row],
            "laps": [lap for lap in laps if lap[1] > 0],
            "waits": [wait for wait in waits[wait_bounds[row] : wait_bounds[row + 1]] if wait[1] > wait[0]],
        }
        yield StepRecord(record, traces, all_ready[first_trace:end_trace], resolved.gradients[row])


def _bounds(table: Ints, steps: int) -> list[int]:
    """Where each step's entries begin in a table that is sorted by section, and where the last one's end."""
    bounds: list[int] = table[0].searchsorted(np.arange(0, 2 * steps + 2, 2)).tolist()
    return bounds


def bucket_record(
    trace: BucketTrace[int],
    all_ready_us: int | None,
    gradients_us: Mapping[str, int],
    *,
    stage: int,
    step: int,
    rank: int,
) -> dict[str, Any]:
    """One line of `buckets/rank-….jsonl`.

    Args:
        trace: of a bucket that has landed.
        all_ready_us: when the last rank had it ready, on this rank's clock; None: not known.
        gradients_us: when each parameter's gradient was complete; empty where that was not measured.
        stage: its index in `stages`.
        step: in the whole run.
        rank: this one.
    """
    encode = decode = wire_bytes = between_hosts = 0
    for span in trace.spans:
        if span.phase == "encode":
            encode += span.done - span.start
        else:
            decode += span.done - span.start
    legs, ready = [], trace.ready
    for leg in trace.collectives:
        wire_bytes += leg.wire_bytes
        between_hosts += leg.between_hosts_bytes
        legs.append(
            {
                "op": leg.op,
                "group": leg.group,
                "dtype": leg.dtype,
                "bytes": leg.bytes,
                "wire_bytes": leg.wire_bytes,
                "start_us": leg.start,
                "done_us": leg.done,
            }
        )
    record: dict[str, Any] = {
        "v": VERSION,
        "rank": rank,
        "stage": stage,
        "step": step,
        "kind": trace.kind,
        "bucket": trace.bucket,
        "params": [param.name for param in trace.params],
        "dtype": trace.dtype,
        "numel": trace.numel,
        "bytes": trace.bytes,
        "wire_bytes": wire_bytes,
        "between_hosts_bytes": between_hosts,
        "hooks": trace.hooks,
        "ready_us": ready,
        "all_ready_us": all_ready_us,
        # A bucket without a collective is launched when it is ready.
        "launch_us": legs[0]["start_us"] if legs else ready,
        "done_us": trace.done,
        "encode_us": encode,
        "decode_us": decode,
        "legs": legs,
    }
    if trace.kind == "gradient" and gradients_us:
        of_params = {param.name: gradients_us.get(param.name) for param in trace.params}
        known = {name: at for name, at in of_params.items() if at is not None}
        record["params_ready_us"] = list(of_params.values())
        record["completed_by"] = max(known, key=known.__getitem__, default=None)
    if trace.uncounted:
        record["uncounted"] = [{"hook": note.hook, "op": note.op} for note in trace.uncounted]
    if trace.fidelity is not None:
        record["fidelity"] = asdict(trace.fidelity)
    return record


@dataclass(slots=True)
class Totals:
    """What the summary adds up over all steps of this rank."""

    steps: int = 0
    samples: int = 0
    parts_us: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*PARTS, "step_us"), 0))
    communication_us: int = 0
    wire_bytes: int = 0

    def numbers(self) -> list[float]:
        """As checkpoints hold them and ranks gather them."""
        return [self.steps, self.samples, *self.parts_us.values(), self.communication_us, self.wire_bytes]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Totals":
        """From what `numbers` returned."""
        steps, samples, *parts, communication, wire = (int(number) for number in numbers)
        return cls(steps, samples, dict(zip((*PARTS, "step_us"), parts, strict=True)), communication, wire)
