"""What all ranks come to know alike, from the words that they have told each other."""

from collections.abc import Sequence
from typing import NamedTuple

from ddprun.telemetry.accumulator import OwnMessages
from ddprun.telemetry.control_message import CHECKPOINT, COMPARE_CLOCKS, STOP, ControlMessages
from ddprun.telemetry.overflow import Overflow, overflow
from ddprun.telemetry.stragglers import Straggler, Stragglers


class GlobalStep(NamedTuple):
    """What all ranks newly know alike about steps in which they synchronised, and about those before each."""

    steps: Sequence[int]
    """One at least, oldest first."""

    mean_losses: Sequence[float]
    """For each of them: the mean over all samples of all ranks since the ranks synchronised before."""

    rank_losses: Sequence[float]
    """Each rank's own mean in the newest."""

    stop: bool
    """Some rank wanted to stop in one of them."""

    checkpoint: bool
    """Some rank was asked for a checkpoint."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    nonfinite: bool = False
    """Some rank's loss was not finite in one of the steps, or in one before them."""

    overflows: Sequence[tuple[int, Overflow]] = ()
    """In which step, and the first of it that is known."""

    straggler: Straggler | None = None
    """Who is late just now; known on rank 0 alone."""

    news: Sequence[tuple[int, Straggler | None]] = ()
    """When it was found who is late from then on, or that nobody is any more; known on rank 0 alone."""


def agree(own: OwnMessages, messages: ControlMessages, stragglers: Stragglers | None) -> list[GlobalStep]:
    """What several words come to; nothing if they are about no step of any rank.

    Args:
        own: of this rank.
        messages: of all ranks, about the same steps.
        stragglers: looks for late ranks; on rank 0 alone.
    """
    count = len(own.steps)
    if count > len(own.rows) and not messages.samples[-1]:
        count -= 1  # of the rest of a stage there is none on any rank
    if not count:
        return []
    late, news, overflows = None, list[tuple[int, Straggler | None]](), list[tuple[int, Overflow]]()
    if stragglers is not None:
        news = stragglers.add(own.steps[: len(own.rows)], messages)
        late = stragglers.now
    for place, codes in messages.codes.items():
        found = overflow(codes, own.finders.get(place, ()))
        if found is not None and place < count:
            overflows.append((own.steps[place], found))
    wishes = messages.wishes
    return [
        GlobalStep(
            steps=own.steps[:count],
            mean_losses=messages.mean_losses[:count],
            rank_losses=messages.rank_losses(count - 1),
            stop=wishes & STOP > 0,
            checkpoint=wishes & CHECKPOINT > 0,
            compare_clocks=wishes & COMPARE_CLOCKS > 0,
            nonfinite=messages.nonfinite,
            overflows=overflows,
            straggler=late,
            news=news,
        )
    ]
