"""Step and bucket records: their fields (`docs/records.md`), and what a run adds up."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddprun.run_files import names_in
from ddprun_hooks.comm.trace import BucketTrace

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


_FILE = re.compile(r"rank-(\d{5,9})\.jsonl")


def file_of(kind: str, rank: int) -> str:
    """The file of a rank's records, in the folder of the run."""
    return f"{kind}/rank-{rank:05}.jsonl"


def ranks_in(run_dir: Path, kind: str) -> list[int]:
    """The ranks of which there are records of a kind; what is called otherwise is none.

    Raises:
        NotPlainError: the records' folder is something else.
        OSError: it cannot be read.
    """
    try:
        names = names_in(run_dir, kind)
    except FileNotFoundError:
        return []
    found = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
    return sorted(rank for rank, name in found.items() if file_of(kind, rank) == f"{kind}/{name}")


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
        trace: of a payload that has arrived.
        all_ready_us: when the last rank had it ready, on this rank's clock; None: ranks have not told.
        gradients_us: when gradients were complete, by parameter; empty if nobody has looked.
        stage: in which.
        step: in which.
        rank: this one.
    """
    encode = decode = wire_bytes = between_hosts = 0
    for piece in trace.spans:
        if piece.phase == "encode":
            encode += piece.done - piece.start
        else:
            decode += piece.done - piece.start
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
        # What sends nothing starts when it is ready.
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
        """As a control message; `of` reads it back."""
        return [self.steps, self.samples, *self.parts_us.values(), self.communication_us, self.wire_bytes]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Totals":
        """From a control message."""
        steps, samples, *parts, communication, wire = (int(number) for number in numbers)
        return cls(steps, samples, dict(zip((*PARTS, "step_us"), parts, strict=True)), communication, wire)
