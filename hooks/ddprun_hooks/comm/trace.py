"""The trace of one payload on its way over the ranks: when it was ready, what was sent, who worked when."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ddprun_hooks.payload import Finding, ParamSlice, PayloadKind

TimeT = TypeVar("TimeT")  # microseconds of this rank's monotonic clock, or an unread `StreamTimestamp`


def now_us() -> int:
    """Microseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class CollectiveTrace(Generic[TimeT]):
    op: str
    group: str
    dtype: str
    bytes: int  # size of what is summed, gathered or exchanged, in bytes
    wire_bytes: int  # what this rank sends for it, in bytes
    between_hosts_bytes: int  # the part of `wire_bytes` that leaves this host
    start: TimeT
    done: TimeT | None = None


@dataclass(slots=True)
class HookSpan(Generic[TimeT]):
    """One stretch of hook work: from a coroutine's start or wake-up to its next collective or its end."""

    start: TimeT
    done: TimeT
    phase: str  # `encode` before the last collective, `decode` after it
    on_training_thread: bool


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A bucket's mean as the hooks gave it (h), against the exact mean over ranks (e)."""

    cosine: float  # <h, e> / (|h| |e|), in [-1, 1]; 1 is the same direction. NaN if either is zero.
    relative_l2: float  # |h - e| / |e|; 0 is the same
    norm_ratio: float  # |h| / |e|
    residual_norm: float  # 2-norm of what this rank has kept of the bucket, in units of its share of the mean
    wire_bytes: int  # what this rank sent to know the exact mean


@dataclass(slots=True)
class BucketTrace(Generic[TimeT]):
    """One payload on its way through a stack."""

    kind: PayloadKind
    bucket: int
    hooks: tuple[str, ...]
    dtype: str
    numel: int
    bytes: int
    ready: TimeT  # the payload was complete on this rank: the hook was entered
    done: TimeT | None = None  # the mean was in the payload's memory
    handed_over: TimeT | None = None  # the hook returned to the caller (backward), future in hand
    collectives: list[CollectiveTrace[TimeT]] = field(default_factory=list)
    spans: list[HookSpan[TimeT]] = field(default_factory=list)
    findings: Sequence[Finding] = ()  # what hooks found out on the way; complete when the trace is
    params: Sequence[ParamSlice] = ()  # the parameters in it
    fidelity: Fidelity | None = None  # how the mean compares with the exact one, if measured
    among_all: bool = True  # ranks of the queue, not those of a group

    def convert_times_to_us(self, to_us: Callable[[Any], int]) -> "BucketTrace[int]":
        """Turn every moment into microseconds by `to_us`, in place; gives this trace."""
        trace: BucketTrace[Any] = self
        parts: list[CollectiveTrace[Any] | HookSpan[Any]] = [*trace.collectives, *trace.spans]
        for one in parts:
            one.start, one.done = to_us(one.start), to_us(one.done)
        trace.ready, trace.done = to_us(trace.ready), to_us(trace.done)
        trace.handed_over = to_us(trace.handed_over)
        return trace

    @property
    def wire_bytes(self) -> int:
        """What this rank sent for the payload, in bytes."""
        return sum(one.wire_bytes for one in self.collectives)

    @property
    def between_hosts_bytes(self) -> int:
        """The part of `wire_bytes` that left this host."""
        return sum(one.between_hosts_bytes for one in self.collectives)


def read_finding_codes(traces: Sequence[BucketTrace[Any]]) -> None:
    """Replace the tensor codes in complete traces' findings by numbers, all in one reading."""
    findings = [one for trace in traces for one in trace.findings if isinstance(one.code, Tensor)]
    if findings:
        codes = torch.stack([torch.as_tensor(one.code) for one in findings]).tolist()
        for finding, code in zip(findings, codes, strict=True):
            finding.code = code


def compute_fidelity(approximate: Tensor, exact: Tensor, wire_bytes: int, residual_norm: float) -> Fidelity:
    """Compare a stack's mean with the exact one, both of shape (numel,), in fp64."""
    h, e = approximate.double(), exact.double()
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
