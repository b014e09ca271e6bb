"""Steps that are settled together, and their records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddprun.telemetry.records import VERSION, Landed, bucket_record
from ddprun.telemetry.settle import Settled
from ddprun.telemetry.word import Words
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Posted
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Entry:
    """A step that is settled, or steps that are together."""

    step: int
    settled: Settled | None
    """None: the rest of a stage, whose steps are finished."""

    finders: Sequence[Flight[int]] | None
    """Payloads in which something was found since the last word; None: there is no word about this step."""


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


@dataclass(slots=True)
class Unwritten:
    """Records that are written together."""

    rank: int
    steps: list[tuple[Settled, Words | None]] = field(default_factory=list)
    payloads: list[Landed] = field(default_factory=list)

    def put(self, writer: Writer) -> None:
        """Have them written; they become text on the writer's thread."""
        rank, steps, payloads = self.rank, self.steps, self.payloads
        if steps:
            file = f"steps/rank-{rank:05}.jsonl"
            writer.put(file, lambda: [step_record(*one, rank) for one in steps], len(steps))
        if payloads:
            file = f"buckets/rank-{rank:05}.jsonl"
            writer.put(file, lambda: [bucket_record(one, rank) for one in payloads], len(payloads))


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
