"""Step and bucket records: the fields, and how a step's time is divided (`docs/records.md`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ddprun_hooks.flight import Flight

VERSION = 1

PARTS = (
    "data_us",
    "forward_us",
    "backward_us",
    "exposed_hook_us",
    "exposed_wait_us",
    "exposed_wire_us",
    "optimizer_us",
    "sync_us",
    "other_us",
)
"""The parts of a step: they add up to `step_us`."""


class Traffic(NamedTuple):
    """What the training thread sent and waited for in one part of a step, in microseconds of this rank's
    clock.
    """

    sent: Sequence[Flight[int]] = ()
    """What set out in this step."""

    landed: Sequence[Flight[int]] = ()
    """What was waited for in this step; it may have set out in an earlier one."""

    waits: Sequence[tuple[int, int]] = ()
    """When the training thread had nothing to do but wait: from, to."""

    @property
    def last_ready_us(self) -> int | None:
        """When this rank had the last of what landed ready."""
        return max((flight.ready for flight in self.landed), default=None)

    @property
    def in_hooks_us(self) -> int:
        """How long hooks ran on the training thread while payloads set out."""
        total = 0
        for flight in self.sent:
            total += _handed_over(flight) - flight.ready
        return total

    @property
    def waited_us(self) -> int:
        """All of the waiting."""
        total = 0
        for start, end in self.waits:
            total += end - start
        return total


def tail(flights: Sequence[Flight[int]], end_us: int) -> tuple[int, int]:
    """When a backward pass that ended at `end_us` only waited: its last bucket was handed over."""
    return max((_handed_over(flight) for flight in flights), default=end_us), end_us


class Exposed(NamedTuple):
    """Communication that the training thread could not hide behind work of its own, in microseconds."""

    hook_us: int
    wait_us: int
    wire_us: int

    @property
    def total_us(self) -> int:
        """All of it."""
        return self.hook_us + self.wait_us + self.wire_us


def exposed(traffic: Traffic, all_ready_us: Sequence[float]) -> Exposed:
    """Divide what an exchange cost the training thread.

    `hook`: hooks that ran on the training thread, and hook work elsewhere while it waited. `wire`: the rest
    of its waiting in which some payload that every rank had ready was under way, or all had arrived. `wait`:
    what is left: nothing could move, because some rank had not come so far.

    Args:
        traffic: what was sent and waited for.
        all_ready_us: of each payload that was waited for, when the last rank had it ready, on this rank's
            clock.
    """
    hook = traffic.in_hooks_us if traffic.sent else 0
    if not traffic.waits:
        return Exposed(hook, 0, 0)
    wait = wire = 0
    work = [
        (piece.start, piece.done)
        for flight in traffic.landed
        for piece in flight.slices
        if not piece.on_training_thread
    ]
    moving = [
        (round(ready), flight.done or 0) for flight, ready in zip(traffic.landed, all_ready_us, strict=True)
    ]
    last = round(max(all_ready_us, default=0.0))
    for start, end in traffic.waits:
        at_work = _covered(work, start, end)
        under_way = _covered([*work, *moving, (last, end)], start, end) - at_work
        hook += at_work
        wire += under_way
        wait += end - start - at_work - under_way
    return Exposed(hook, wait, wire)


def _covered(stretches: Iterable[tuple[int, int]], low: int, high: int) -> int:
    """How much of the time from `low` to `high` lies in at least one of the stretches."""
    total = 0
    for start, end in sorted(stretches):
        begin, until = start if start > low else low, end if end < high else high
        if begin < until:
            total += until - begin
            low = until
    return total


def communication_us(flights: Sequence[Flight[int]]) -> int:
    """Time during which at least one bucket was under way, from ready to done, in microseconds."""
    total, until = 0, 0
    for start, end in sorted([(flight.ready, flight.done or flight.ready) for flight in flights]):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def launch_us(flight: Flight[int]) -> int:
    """When the first collective of a payload started; one that sends nothing starts when ready."""
    return flight.legs[0].start if flight.legs else flight.ready


class Landed(NamedTuple):
    """A payload that has arrived, in a recorded step."""

    flight: Flight[int]
    all_ready_us: float | None
    """When the last rank had it ready, on this rank's clock; None: ranks have not told."""

    gradients_us: Mapping[str, int]
    """When gradients were complete, by parameter; empty if nobody has looked."""

    stage: int
    step: int


def bucket_record(landed: Landed, rank: int) -> dict[str, Any]:
    """One line of `buckets/rank-….jsonl`."""
    flight, all_ready_us, gradients_us, stage, step = landed
    gradients: dict[str, Any] = {}
    if flight.kind == "gradient" and gradients_us:
        ready = {param.name: gradients_us.get(param.name) for param in flight.params}
        known = {name: at for name, at in ready.items() if at is not None}
        gradients["params_ready_us"] = list(ready.values())
        gradients["completed_by"] = max(known, key=known.__getitem__, default=None)
    fidelity = {"fidelity": asdict(flight.fidelity)} if flight.fidelity is not None else {}
    return {
        "v": VERSION,
        "rank": rank,
        "stage": stage,
        "step": step,
        "kind": flight.kind,
        "bucket": flight.bucket,
        "params": [param.name for param in flight.params],
        "dtype": flight.dtype,
        "numel": flight.numel,
        "bytes": flight.bytes,
        "wire_bytes": flight.wire_bytes,
        "between_hosts_bytes": flight.between_hosts_bytes,
        "hooks": list(flight.hooks),
        "ready_us": flight.ready,
        "all_ready_us": None if all_ready_us is None else round(all_ready_us),
        "launch_us": launch_us(flight),
        "done_us": flight.done,
        "encode_us": sum(piece.done - piece.start for piece in flight.slices if piece.phase == "encode"),
        "decode_us": sum(piece.done - piece.start for piece in flight.slices if piece.phase == "decode"),
        "legs": [
            {
                "op": leg.op,
                "group": leg.group,
                "dtype": leg.dtype,
                "bytes": leg.bytes,
                "wire_bytes": leg.wire_bytes,
                "start_us": leg.start,
                "done_us": leg.done,
            }
            for leg in flight.legs
        ],
        **gradients,
        **fidelity,
    }


@dataclass(slots=True)
class Totals:
    """What the summary adds up over all steps of this rank."""

    steps: int = 0
    samples: int = 0
    parts_us: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*PARTS, "step_us"), 0))
    communication_us: int = 0
    wire_bytes: int = 0

    def numbers(self) -> list[float]:
        """As a control word; `of` reads it back."""
        return [self.steps, self.samples, *self.parts_us.values(), self.communication_us, self.wire_bytes]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Totals":
        """From a control word."""
        steps, samples, *parts, communication, wire = (int(number) for number in numbers)
        return cls(steps, samples, dict(zip((*PARTS, "step_us"), parts, strict=True)), communication, wire)


def _handed_over(flight: Flight[int]) -> int:
    assert flight.handed_over is not None, "a finished flight has been handed over"
    return flight.handed_over
