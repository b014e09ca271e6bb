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


@dataclass(slots=True)
class Backward:
    """The last micro-step's backward pass, in microseconds of this rank's clock."""

    end_us: int
    flights: Sequence[Flight[int]]

    @property
    def tail_start_us(self) -> int:
        """From here on the training thread only waits: its last bucket is handed over."""
        return max((_handed_over(flight) for flight in self.flights), default=self.end_us)

    @property
    def last_ready_us(self) -> int:
        """When this rank had its last bucket ready."""
        return max((flight.ready for flight in self.flights), default=self.end_us)


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


def exposed(backward: Backward, all_ready_us: float) -> Exposed:
    """Divide what the exchange cost the training thread in backward.

    `hook`: hooks that ran on the training thread, and hook work elsewhere while it waited. `wait`: the rest
    of its waiting until the last rank had its last bucket ready. `wire`: the rest of its waiting after that.

    Args:
        backward: the pass, on this rank's clock.
        all_ready_us: when the last rank had its last bucket ready, on this rank's clock.
    """
    start, end = backward.tail_start_us, backward.end_us
    split = round(min(max(all_ready_us, start), end))
    inside = sum(_handed_over(flight) - flight.ready for flight in backward.flights)
    before = after = 0
    for flight in backward.flights:
        for piece in flight.slices:
            if not piece.on_training_thread:
                before += _overlap(piece.start, piece.done, start, split)
                after += _overlap(piece.start, piece.done, split, end)
    return Exposed(inside + before + after, split - start - before, end - split - after)


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


def bucket_record(
    flight: Flight[int], params: Sequence[str], *, rank: int, stage: int, step: int
) -> dict[str, Any]:
    """One line of `buckets/rank-….jsonl`."""
    fidelity = {"fidelity": asdict(flight.fidelity)} if flight.fidelity is not None else {}
    return {
        "v": VERSION,
        "rank": rank,
        "stage": stage,
        "step": step,
        "kind": flight.kind,
        "bucket": flight.bucket,
        "params": list(params),
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
