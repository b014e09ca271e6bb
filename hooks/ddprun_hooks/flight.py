"""The record of one payload's journey over the ranks: when it was ready, what was sent, who worked when."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddprun_hooks.fidelity import Fidelity
from ddprun_hooks.payload import Finding, Kind, ParamSlice
from ddprun_hooks.uncounted import Uncounted

Mark = TypeVar("Mark")
"""A moment: microseconds of this rank's monotonic clock, or a CUDA event that becomes one later."""


def now_us() -> int:
    """Microseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class Leg(Generic[Mark]):
    """One collective."""

    op: str
    group: str
    dtype: str
    bytes: int
    """Size of what is summed, gathered or exchanged, in bytes."""

    wire_bytes: int
    """What this rank sends for it, in bytes."""

    between_hosts_bytes: int
    """The part of `wire_bytes` that leaves this host."""

    start: Mark
    done: Mark | None = None


@dataclass(slots=True)
class Slice(Generic[Mark]):
    """One stretch of hook work: from a coroutine's start or wake-up to its next collective or its end."""

    start: Mark
    done: Mark
    phase: str
    """`encode` before the last collective, `decode` after it."""

    on_training_thread: bool


@dataclass(slots=True)
class Flight(Generic[Mark]):
    """One payload's journey through a stack."""

    kind: Kind
    bucket: int
    hooks: tuple[str, ...]
    dtype: str
    numel: int
    bytes: int
    ready: Mark
    """The payload was complete on this rank: the hook was entered."""

    done: Mark | None = None
    """The mean was in its place."""

    handed_over: Mark | None = None
    """The hook returned to the caller (the backward pass) with a future in its hand."""

    legs: list[Leg[Mark]] = field(default_factory=list)
    slices: list[Slice[Mark]] = field(default_factory=list)
    findings: Sequence[Finding] = ()
    """What hooks found out on the way; complete when the flight is."""

    uncounted: list[Uncounted] = field(default_factory=list)
    """Collectives that hooks have issued by themselves: not in `legs`."""

    params: Sequence[ParamSlice] = ()
    """The parameters in it."""

    fidelity: Fidelity | None = None
    """How the mean that came back compares with the exact one, if somebody has looked."""

    def mapped(self, us: Callable[[Any], int]) -> "Flight[int]":
        """The same flight with every mark turned into microseconds."""
        return Flight(
            kind=self.kind,
            bucket=self.bucket,
            hooks=self.hooks,
            dtype=self.dtype,
            numel=self.numel,
            bytes=self.bytes,
            params=self.params,
            ready=us(self.ready),
            done=us(self.done),
            handed_over=us(self.handed_over),
            legs=[
                Leg(
                    g.op,
                    g.group,
                    g.dtype,
                    g.bytes,
                    g.wire_bytes,
                    g.between_hosts_bytes,
                    us(g.start),
                    us(g.done),
                )
                for g in self.legs
            ],
            slices=[Slice(us(s.start), us(s.done), s.phase, s.on_training_thread) for s in self.slices],
            findings=self.findings,
            uncounted=self.uncounted,
            fidelity=self.fidelity,
        )

    @property
    def wire_bytes(self) -> int:
        """What this rank sent for the payload, in bytes."""
        return sum(leg.wire_bytes for leg in self.legs)

    @property
    def between_hosts_bytes(self) -> int:
        """The part of `wire_bytes` that left this host."""
        return sum(leg.between_hosts_bytes for leg in self.legs)


def read_findings(flights: Sequence[Flight[Any]]) -> None:
    """Make numbers of the codes of what hooks have found, in one reading.

    Args:
        flights: that are complete, so that nothing is waited for.
    """
    unread = [
        (finding, finding.code)
        for flight in flights
        for finding in flight.findings
        if isinstance(finding.code, Tensor)
    ]
    if unread:
        codes = torch.stack([code for _, code in unread]).tolist()
        for (finding, _), code in zip(unread, codes, strict=True):
            finding.code = code


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
