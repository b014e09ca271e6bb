"""Losses and parameters that are not finite: found by all ranks together, said once, and what follows.

Control messages bring every rank's losses, so all ranks learn of one that is NaN or infinite after the same
step, and no step waits for it. Only then are parameters looked at. A parameter that is not finite never
becomes finite again, so with `on_nan: stop` the run ends there. A loss alone is no reason to end: a
GradScaler skips such a step, and a batch whose targets are all ignored has NaN for a mean and no gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from ddprun.checkpoint import folder
from ddprun.engine.finite import Nonfinite
from ddprun.engine.session import Session
from ddprun.run_files import resume_command
from ddprun.telemetry.recorder import GlobalStep


def stops(session: Session, known: Iterable[GlobalStep], on_nan: Literal["continue", "stop"]) -> bool:
    """Say the first loss that is not finite; whether the run is to stop. Called by all ranks after one step.

    Args:
        session: of the run.
        known: what all ranks newly know alike.
        on_nan: of the stage.
    """
    if not any(one.nonfinite for one in known) or (session.runtime.finite.found and on_nan == "continue"):
        return False
    return _compare(session, on_nan)


def stops_at_end(session: Session, places: Sequence[int], on_nan: Literal["continue", "stop"]) -> bool:
    """The same at a stage's end, where parameters have been looked at in any case.

    Args:
        session: of the run.
        places: `FiniteCheck.first` of every rank.
        on_nan: of the stage.
    """
    runtime = session.runtime
    rank = next((rank for rank, place in enumerate(places) if place), None)
    if rank is None:
        return False
    if runtime.finite.found is None:
        _tell(session, Nonfinite(session.state.step, rank, None, runtime.finite.name(places[rank])))
    runtime.finite.lost_parameter = runtime.finite.name(places[rank])
    return on_nan == "stop"


def _compare(session: Session, on_nan: Literal["continue", "stop"]) -> bool:
    runtime = session.runtime
    step, loss = runtime.recorder.nonfinite or (0, 0.0)
    told = runtime.exchange.control.all_gather(
        [step, loss, runtime.finite.first()], "losses that are not finite"
    ).tolist()
    places = [int(row[2]) for row in told]
    lost = next(filter(None, places), 0)
    if runtime.finite.found is None:
        own = [(int(row[0]), rank) for rank, row in enumerate(told) if row[0]]
        # A resumed run may have got a sum of losses from the checkpoint, of which no rank knows the step.
        first, rank = min(own, default=(session.state.step, 0))
        value = str(told[rank][1]) if own else "nan"
        _tell(session, Nonfinite(first, rank, value, runtime.finite.name(places[rank] or lost)))
    runtime.finite.lost_parameter = runtime.finite.name(lost)
    return bool(lost) and on_nan == "stop"


def _tell(session: Session, found: Nonfinite) -> None:
    reporter = session.reporter
    session.runtime.finite.found = found
    reporter.events.warning("nonfinite", **asdict(found))
    reporter.note(found.describe())


def failure(session: Session, root: Path) -> str:
    """Why the run has ended, and how to go on; on rank 0.

    Args:
        session: of the run.
        root: the folder of its checkpoints.
    """
    runtime = session.runtime
    assert runtime.finite.found is not None
    step = folder.last_finite(root)
    resume = resume_command(runtime.run_dir)
    lines = [f"{runtime.finite.lost_parameter} is not finite any more, and on_nan is stop"]
    if runtime.finite.found.value is not None:
        at = runtime.finite.found
        lines.append(f"  first     the loss of rank {at.rank} was {at.value} at step {at.step}")
    if step is None:
        lines.append("  go on     no finite checkpoint is left: start anew with a smaller learning rate,")
    else:
        lines.append(f"  go on     {resume} --set …, from step {step}, with a smaller learning rate,")
    lines.append(
        "            clip_norm or warmup_steps, or with bf16 in place of fp16; or, if it is meant to"
    )
    lines.append("            go on with what it has, on_nan: continue")
    return "\n".join(lines)
