"""What all ranks know alike once they have read each other's control messages (`control_message.py`).

`StepRecorder.end` returns it some steps later. The loop stops, takes checkpoints and compares clocks by it,
on all ranks after the same step; the screen and the events show it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddprun.telemetry.control_message import (
    CHECKPOINT,
    COMPARE_CLOCKS,
    FINDING_AT,
    LOSS_AT,
    REQUESTS_AT,
    SAMPLES_AT,
    STOP,
    Numbers,
    Overflow,
    OwnMessages,
    mean_losses,
    overflow,
    own_losses,
)
from ddprun.telemetry.stragglers import Straggler, Stragglers


class GlobalStep(NamedTuple):
    """What is newly known about steps in which ranks synchronised, and about those before each."""

    steps: Sequence[int]
    """At least one, oldest first."""

    mean_losses: Sequence[float]
    """For each of them: the mean over all samples of all ranks since the ranks synchronised before."""

    rank_losses: Sequence[float]
    """Each rank's own mean in the newest."""

    stop: bool
    """Some rank asked to stop in one of them."""

    checkpoint: bool
    """Some rank was asked for a checkpoint."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    nonfinite: bool = False
    """Some rank's loss was not finite in one of the steps, or in one before them."""

    overflows: Sequence[tuple[int, Overflow]] = ()
    """Steps, and the first overflow of each."""

    straggler: Straggler | None = None
    """Who is late now; known on rank 0 alone."""

    straggler_changes: Sequence[tuple[int, Straggler | None]] = ()
    """Steps from which on a rank was found to be late, or nobody any more; known on rank 0 alone."""


def global_step(own: OwnMessages, messages: Numbers, stragglers: Stragglers | None) -> GlobalStep | None:
    """What the messages of all ranks come to; None if they are about no step of any rank.

    Args:
        own: this rank's.
        messages: those of all ranks about the same steps, shape (messages, ranks, numbers of a message).
        stragglers: looks for late ranks; on rank 0 alone.
    """
    count = len(own.steps)
    if count > len(own.rows) and not messages[-1, :, SAMPLES_AT].any():
        count -= 1  # no rank had a step left at the stage's end
    if not count:
        return None
    changes = [] if stragglers is None else stragglers.add(own.steps[: len(own.rows)], messages)
    overflows = list[tuple[int, Overflow]]()
    findings = messages[:count, :, FINDING_AT].astype(int)
    for message in np.flatnonzero(findings.any(1)).tolist():
        found = overflow(findings[message].tolist(), own.findings.get(message, ()))
        if found is not None:
            overflows.append((own.steps[message], found))
    requests = np.bitwise_or.reduce(messages[..., REQUESTS_AT].astype(int), axis=0)  # of each rank
    of_any_rank = int(np.bitwise_or.reduce(requests))
    return GlobalStep(
        steps=own.steps[:count],
        mean_losses=mean_losses(messages[:count]),
        rank_losses=own_losses(messages[count - 1]),
        stop=of_any_rank & STOP > 0,
        checkpoint=of_any_rank & CHECKPOINT > 0,
        compare_clocks=int(requests[0]) & COMPARE_CLOCKS > 0,
        nonfinite=not np.isfinite(messages[..., LOSS_AT]).all(),
        overflows=overflows,
        straggler=None if stragglers is None else stragglers.current,
        straggler_changes=changes,
    )
