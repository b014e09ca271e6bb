"""Making ranks equal outside of a sync policy, and auditing whether they are."""

from typing import Any

import torch

from ddprun.config import AverageStage, BroadcastStage, Evaluate, Save
from ddprun.engine.session import Session
from ddprun.sync.audit import DriftError, audit
from ddprun.sync.synchronizer import averaged_parameters
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.groups import Placement


def average(session: Session, stage: AverageStage) -> dict[str, Any]:
    """Run an average stage; gives its entry in the summary."""
    average_parameters(session)
    return _entry(session, stage, "every rank holds the mean of all ranks' parameters")


def broadcast(session: Session, stage: BroadcastStage) -> dict[str, Any]:
    """Run a broadcast stage; gives its entry in the summary."""
    runtime = session.runtime
    buckets = ParameterBuckets(dict(runtime.model.named_parameters()), runtime.exchanger.cap_bytes)
    with torch.no_grad():
        runtime.exchanger.broadcast(buckets, "parameters", stage.source)
    session.state.replicas.parameters = "common"
    return _entry(session, stage, f"every rank holds the parameters of rank {stage.source}")


def _entry(session: Session, stage: AverageStage | BroadcastStage, result: str) -> dict[str, Any]:
    runtime, step, reporter = session.runtime, session.state.step, session.reporter
    runtime.recorder.write_between_steps(stage.index, step)
    reporter.events.info(stage.name, stage=stage.index, step=step)
    reporter.note(f"{stage.name}: {result}")
    if runtime.loaded.pipeline.audit.every:
        audit_parameters(session, f"after {stage.path}", step, at_end=True)
    return {"step": step}


def average_parameters(session: Session) -> None:
    """Every rank's parameters become their mean, exactly: there is no common base, and no hook is used."""
    runtime = session.runtime
    buckets = ParameterBuckets(averaged_parameters(runtime.model), runtime.exchanger.cap_bytes)
    with torch.no_grad():
        runtime.exchanger.average(buckets, "parameters")
    session.state.replicas.parameters = "common"


def make_buffers_equal(session: Session, stage: Evaluate | Save) -> None:
    """What the stage reads or writes is to be the same on all ranks, unless the file says `never`."""
    runtime, state, reporter = session.runtime, session.state, session.reporter
    names = runtime.buffers.before_reading()
    runtime.recorder.write_between_steps(stage.index, state.step)
    if not names:
        return
    if runtime.buffers.plan.setting.when == "never":
        whose = "each rank measures with its own" if isinstance(stage, Evaluate) else "rank 0's are saved"
        reporter.note(f"{stage.name}: buffers differ between ranks (buffers: never): {whose}")
    else:
        reporter.events.info("buffers_sent", stage=stage.index, step=state.step, names=list(names))


def audit_parameters(session: Session, where: str, step: int, *, at_end: bool = False) -> None:
    """Compare the ranks' parameters, and report; `at_end` of a stage that has made them equal, if they are.

    Raises:
        DriftError: ranks that have to be equal are not.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, groups = runtime.ranks, None
    if state.replicas.parameters == "host":
        groups = Placement(ranks.rank, ranks.hosts, ranks.local_sizes).blocks(state.replicas.hosts)
    finding = audit(runtime.model, runtime.exchange, groups)
    reporter.events.info(
        "audit",
        step=step,
        where=where,
        expected=state.replicas.parameters,
        equal=not finding.farthest,
        largest_distance=finding.largest_distance,
        farthest=finding.farthest or None,
        differing=len(finding.differing),
    )
    if finding.differing and state.replicas.parameters != "apart":
        names, odd = finding.differing, ", ".join(map(str, finding.odd_ranks))
        more = f" and {len(names) - 1} more parameters differ" if len(names) > 1 else " differs"
        raise DriftError(
            f"{where} the ranks hold different parameters, which the sync policy does not allow: "
            f'"{names[0]}"{more} on rank {odd}; the largest difference is {finding.largest_distance:.3g}, '
            f'in "{finding.farthest}". Something changes weights on one rank only: code that acts by rank, a '
            "library that computes differently there, or failing memory"
        )
    state.last_audit = finding
    state.farthest_apart = max(state.farthest_apart, finding.largest_distance)
    reporter.audited(finding, step, at_end=at_end)
