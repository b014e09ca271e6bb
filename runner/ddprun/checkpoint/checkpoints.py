"""When checkpoints of a run are written, and what has become of them."""

from dataclasses import dataclass

from ddprun.checkpoint.writer import CheckpointWriter


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one run; `checkpoint` in the file."""

    writer: CheckpointWriter | None
    """None: none are taken (`keep: 0`)."""

    every: int
    """Steps from one to the next; 0: only at the end."""

    failed: str | None = None
    """Why the last one was not written; None: it was, or is being."""

    lost: str | None = None
    """On rank 0: why there is no checkpoint of the run's end; None: there is, or none is due."""

    def due(self, step: int) -> bool:
        """Whether one is taken after so many steps of the run; the same on all ranks."""
        return self.writer is not None and self.every > 0 and step % self.every == 0
