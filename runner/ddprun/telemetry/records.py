"""Step and bucket records: the fields, and how a step's time is divided (`docs/records.md`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Traffic:
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


def tail(flights: Sequence[Flight[int]], end_us: int) -> tuple[int, int]:
    """When a backward pass that ended at `end_us` only waited: its last bucket was handed over."""
    return max((_handed_over(flight) for flight in flights), default=end_us), end_us


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication that the training thread could not hide behind work of its own, in microseconds."""

    hook_us: int
    wait_us: int
    wire_us: int

    @property
    def total_us(self) -> int:
        """All of it."""
        return self.hook_us + self.wait_us + self.wire_us


def exposed(traffic: Traffic, all_ready_us: float) -> Exposed:
    """Divide what an exchange cost the training thread.

    `hook`: hooks that ran on the training thread, and hook work elsewhere while it waited. `wait`: the rest
    of its waiting until the last rank had its last payload ready. `wire`: the rest of its waiting after that.

    Args:
        traffic: what was sent and waited for.
        all_ready_us: when the last rank had its last payload ready, on this rank's clock.
    """
    hook = sum(_handed_over(flight) - flight.ready for flight in traffic.sent)
    pieces = [p for flight in traffic.landed for p in flight.slices if not p.on_training_thread]
    wait = wire = 0
    for start, end in traffic.waits:
        split = round(min(max(all_ready_us, start), end))
        before = sum(_overlap(piece.start, piece.done, start, split) for piece in pieces)
        after = sum(_overlap(piece.start, piece.done, split, end) for piece in pieces)
        hook += before + after
        wait += split - start - before
        wire += end - split - after
    return Exposed(hook, wait, wire)


def communication_us(flights: Sequence[Flight[int]]) -> int:
    """Time during which at least one bucket was under way, from ready to done, in microseconds."""
    total = 0
    covered: int | None = None
    for flight in sorted(flights, key=lambda flight: flight.ready):
        start, end = flight.ready, flight.done
        assert end is not None
        if covered is None or start > covered:
            total += end - start
            covered = end
        elif end > covered:
            total += end - covered
            covered = end
    return total


def launch_us(flight: Flight[int]) -> int:
    """When the first collective of a payload started; one that sends nothing starts when ready."""
    return flight.legs[0].start if flight.legs else flight.ready


def bucket_record(flight: Flight[int], *, rank: int, stage: int, step: int) -> dict[str, Any]:
    """One line of `buckets/rank-….jsonl`."""
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


def _overlap(start: int, end: int, low: int, high: int) -> int:
    return max(0, min(end, high) - max(start, low))
