"""Making ranks equal outside of a sync policy, and looking whether they are."""

from typing import Any

import torch

from ddprun.config import AverageStage, BroadcastStage, Evaluate, Save
from ddprun.engine.session import Session
from ddprun.sync.audit import DriftError, Finding, audit
from ddprun.sync.policy import averaged_parameters
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.groups import Placement


def average(session: Session, stage: AverageStage) -> dict[str, Any]:
    """Run an average stage; gives its entry in the summary."""
    session.where = stage.path
    make_equal(session)
    return _told(session, stage.index, stage.name, "every rank holds the mean of all ranks' parameters")


def broadcast(session: Session, stage: BroadcastStage) -> dict[str, Any]:
    """Run a broadcast stage; gives its entry in the summary."""
    session.where = stage.path
    buckets = ParameterBuckets(dict(session.model.named_parameters()), session.exchanger.cap_bytes)
    with torch.no_grad():
        session.exchanger.broadcast(buckets, "parameters", stage.source)
    session.together = "common"
    return _told(session, stage.index, stage.name, f"every rank holds the parameters of rank {stage.source}")


def make_equal(session: Session) -> None:
    """Every rank's parameters become their mean, exactly: there is no common base, and no hook is used."""
    buckets = ParameterBuckets(averaged_parameters(session.model), session.exchanger.cap_bytes)
    with torch.no_grad():
        session.exchanger.average(buckets, "parameters")
    session.together = "common"


def make_buffers_equal(session: Session, stage: Evaluate | Save) -> None:
    """What the stage reads or writes is to be the same on all ranks, unless the file says `never`."""
    names = session.buffers.before_reading()
    session.recorder.write_aside(stage.index, session.step)
    if not names:
        return
    if session.buffers.setting.when == "never":
        whose = "each rank measures with its own" if isinstance(stage, Evaluate) else "rank 0's are saved"
        session.screen.note(f"{stage.name}: buffers differ between ranks (buffers: never): {whose}")
    else:
        session.events.info("buffers_sent", stage=stage.index, step=session.step, names=list(names))


def look(session: Session, where: str, step: int, *, at_end: bool = False) -> Finding:
    """Audit the parameters, and tell.

    Args:
        session: of the run.
        where: for the message.
        step: that the ranks have finished.
        at_end: a stage has just made the ranks equal, if they are.

    Raises:
        DriftError: ranks that have to be equal are not.
    """
    layout = Placement(session.ranks.rank, session.ranks.hosts, session.ranks.local_sizes)
    groups: list[list[int]] | None = None
    if session.together == "host":
        groups = layout.blocks(session.host_count)
    finding = audit(session.model, session.exchange, groups)
    session.events.info(
        "audit",
        step=step,
        where=where,
        expected=session.together,
        equal=not finding.farthest,
        largest_distance=finding.largest_distance,
        farthest=finding.farthest or None,
        differing=len(finding.differing),
    )
    if finding.differing and session.together != "apart":
        raise DriftError(_drift(finding, where))
    session.audited(finding, step, at_end=at_end)
    return finding


def _drift(finding: Finding, where: str) -> str:
    names, ranks = finding.differing, ", ".join(map(str, finding.odd_ranks))
    more = f" and {len(names) - 1} more parameters differ" if len(names) > 1 else " differs"
    return (
        f"{where} the ranks hold different parameters, which the sync policy does not allow: "
        f'"{names[0]}"{more} on rank {ranks}; the largest difference is {finding.largest_distance:.3g}, in '
        f'"{finding.farthest}". Something changes weights on one rank only: code that acts by rank, a '
        "library that computes differently there, or failing memory"
    )


def _told(session: Session, index: int, name: str, result: str) -> dict[str, Any]:
    session.recorder.write_aside(index, session.step)
    session.events.info(name, stage=index, step=session.step)
    session.screen.note(f"{name}: {result}")
    if session.loaded.pipeline.audit.every:
        look(session, f"after stages[{index}].{name}", session.step, at_end=True)
    return {"step": session.step}
