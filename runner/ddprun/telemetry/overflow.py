"""Which hook's cast made a mean infinite though no rank's values were: ranks find out together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Kind

_KINDS: tuple[Kind, ...] = get_args(Kind)
_BUCKETS = 1_000_000
"""More than any model has: a bucket's number and its kind go into one number of the control message."""

_CODES = 3


@dataclass(frozen=True, slots=True)
class Overflow:
    """A bucket whose mean a hook's cast made infinite though no rank's values were."""

    kind: Kind
    bucket: int
    hook: str
    params: tuple[str, ...]


def first_finding(traces: Sequence[BucketTrace[int]]) -> int:
    """The first payload that did not come back finite, as a number for the control message.

    0: all did. Else its kind, its bucket, and 1: this rank's values were finite, or 2: they were not.

    Args:
        traces: whose findings have been read.
    """
    for trace in sorted(traces, key=lambda trace: (trace.kind, trace.bucket)):
        for finding in trace.findings:
            if finding.code:
                return _CODES * (_BUCKETS * _KINDS.index(trace.kind) + trace.bucket) + int(finding.code)
    return 0


def overflow(found: Sequence[int], traces: Sequence[BucketTrace[int]]) -> Overflow | None:
    """What all ranks' numbers come to; the same on every rank, since all get the same mean.

    Args:
        found: each rank's `first_finding`.
        traces: of this rank, that have found something.
    """
    if not any(found) or any(number % _CODES == 2 for number in found):
        return None
    kind, bucket = divmod(max(found) // _CODES, _BUCKETS)
    for trace in traces:
        if (trace.kind, trace.bucket) == (_KINDS[kind], bucket):
            # Here nothing may be lost of it, though it is on another rank: then any of its hooks will do.
            findings = sorted(trace.findings, key=lambda finding: not finding.code)
            hook = next((finding.hook for finding in findings), "")
            names = tuple(param.name for param in trace.params)
            return Overflow(trace.kind, bucket, hook, names)
    return None
