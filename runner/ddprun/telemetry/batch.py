"""Steps that are settled together, and their records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddprun.telemetry.records import VERSION, Landed, bucket_record
from ddprun.telemetry.settle import Settled
from ddprun.telemetry.word import Word, Words
from ddprun.telemetry.writer import Writer, dumps
from ddprun_hooks.exchange import Posted
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Entry:
    """A step that is settled, or steps that are together."""

    step: int
    settled: Settled | None
    """None: the rest of a stage, whose steps are finished."""

    word: Word | None = None
    """What this rank tells of it; None: ranks have not met in it."""

    finders: Sequence[Flight[int]] = ()
    """Payloads in which something was found since the last word."""


@dataclass(slots=True)
class Batch:
    """Steps that are settled together."""

    entries: list[Entry] = field(default_factory=list)
    posted: Posted | None = None
    """Their words; None: none of them has one."""

    @property
    def last(self) -> int:
        """The newest step."""
        return self.entries[-1].step


class Unwritten:
    """Records that are written together.

    Args:
        rank: whose they are.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[bytes] = []
        self._payloads: list[bytes] = []

    def add_step(self, settled: Settled, words: Words | None) -> None:
        """The record of a step whose time is divided."""
        self._steps.append(dumps(step_record(settled, words, self._rank)))

    def add_payload(self, landed: Landed) -> None:
        """The record of a payload."""
        self._payloads.append(dumps(bucket_record(landed, self._rank)))

    def put(self, writer: Writer) -> None:
        """Have them written."""
        for kind, lines in (("steps", self._steps), ("buckets", self._payloads)):
            if lines:
                writer.put(f"{kind}/rank-{self._rank:05}.jsonl", b"".join(lines), len(lines))


def step_record(settled: Settled, words: Words | None, rank: int) -> dict[str, Any]:
    """One line of `steps/rank-….jsonl`, once the step's time is divided.

    Args:
        settled: the step.
        words: of all ranks about it; None: they have not met in it.
        rank: this one.
    """
    step = settled.step
    return {
        "v": VERSION,
        "rank": rank,
        "stage": step.stage,
        "step": step.number,
        "samples": settled.samples,
        "loss": settled.loss,
        "mean_loss": None if words is None else words.mean_loss,
        "start_us": settled.start_us,
        **settled.us,
        "step_us": settled.step_us,
        "laps": [[part.removesuffix("_us"), us] for part, us in settled.laps if us],
        "waits": [[start, end] for start, end in settled.waits if end > start],
    }
