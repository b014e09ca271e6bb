"""The trace of one payload on its way over the ranks: when it was ready, what was sent, who worked when."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddprun_hooks.comm.uncounted import Uncounted
from ddprun_hooks.payload import Finding, Kind, ParamSlice

Mark = TypeVar("Mark")
"""A moment: microseconds of this rank's monotonic clock, or a `gpu.Mark` that becomes one later."""


def now_us() -> int:
    """Microseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class CollectiveTrace(Generic[Mark]):
    """One collective."""

    op: str
    group: str
    dtype: str
    bytes: int  # size of what is summed, gathered or exchanged, in bytes
    wire_bytes: int  # what this rank sends for it, in bytes
    between_hosts_bytes: int  # the part of `wire_bytes` that leaves this host
    start: Mark
    done: Mark | None = None


@dataclass(slots=True)
class Span(Generic[Mark]):
    """One stretch of hook work: from a coroutine's start or wake-up to its next collective or its end."""

    start: Mark
    done: Mark
    phase: str  # `encode` before the last collective, `decode` after it
    on_training_thread: bool


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A bucket's mean as the hooks gave it (h), against the exact mean over ranks (e)."""

    cosine: float
    """<h, e> / (|h| |e|), in [-1, 1]; 1 is the same direction. NaN if either is zero."""

    relative_l2: float  # |h - e| / |e|; 0 is the same
    norm_ratio: float  # |h| / |e|
    residual_norm: float
    """2-norm of what this rank has kept back of the bucket so far, in units of its share of the mean."""

    wire_bytes: int  # what this rank sent to know the exact mean


@dataclass(slots=True)
class BucketTrace(Generic[Mark]):
    """One payload on its way through a stack."""

    kind: Kind
    bucket: int
    hooks: tuple[str, ...]
    dtype: str
    numel: int
    bytes: int
    ready: Mark  # the payload was complete on this rank: the hook was entered
    done: Mark | None = None  # the mean was in the payload's memory
    handed_over: Mark | None = None
    """The hook returned to the caller (the backward pass) with a future in its hand."""

    collectives: list[CollectiveTrace[Mark]] = field(default_factory=list)
    spans: list[Span[Mark]] = field(default_factory=list)
    findings: Sequence[Finding] = ()  # what hooks found out on the way; complete when the trace is
    uncounted: list[Uncounted] = field(default_factory=list)
    """Collectives that hooks have issued by themselves: not in `collectives`."""

    params: Sequence[ParamSlice] = ()  # the parameters in it
    fidelity: Fidelity | None = None
    """How the mean that came back compares with the exact one, if somebody has looked."""

    def mapped(self, us: Callable[[Any], int]) -> "BucketTrace[int]":
        """The same trace with every mark turned into microseconds."""
        of: Any = self  # `replace` knows no other type parameter than that of its argument
        mapped: BucketTrace[int] = replace(
            of,
            ready=us(of.ready),
            done=us(of.done),
            handed_over=us(of.handed_over),
            collectives=[replace(one, start=us(one.start), done=us(one.done)) for one in of.collectives],
            spans=[replace(one, start=us(one.start), done=us(one.done)) for one in of.spans],
        )
        return mapped

    @property
    def wire_bytes(self) -> int:
        """What this rank sent for the payload, in bytes."""
        return sum(one.wire_bytes for one in self.collectives)

    @property
    def between_hosts_bytes(self) -> int:
        """The part of `wire_bytes` that left this host."""
        return sum(one.between_hosts_bytes for one in self.collectives)


def read_findings(traces: Sequence[BucketTrace[Any]]) -> None:
    """Make numbers of the codes of what hooks have found, in one reading; the traces are complete."""
    findings = [one for trace in traces for one in trace.findings if isinstance(one.code, Tensor)]
    if findings:
        codes = torch.stack([torch.as_tensor(one.code) for one in findings]).tolist()
        for finding, code in zip(findings, codes, strict=True):
            finding.code = code


def compare(given: Tensor, exact: Tensor, wire_bytes: int, residual_norm: float) -> Fidelity:
    """Compare a stack's mean with the exact one, both of shape (numel,), in fp64."""
    h, e = given.double(), exact.double()
    h_norm, e_norm = float(torch.linalg.vector_norm(h)), float(torch.linalg.vector_norm(e))
    error = float(torch.linalg.vector_norm(h - e))
    both = h_norm * e_norm
    return Fidelity(
        cosine=min(1.0, max(-1.0, float(h @ e) / both)) if both else math.nan,
        relative_l2=_ratio(error, e_norm),
        norm_ratio=_ratio(h_norm, e_norm),
        residual_norm=residual_norm,
        wire_bytes=wire_bytes,
    )


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 / 0 is 0 parts of nothing."""
    return part / whole if whole else (math.inf if part else 0.0)
