"""Audits of a run: whether ranks hold the same parameters, and buffers that are not sent."""

from torch import Tensor

from ddprun.engine.session import Session
from ddprun.sync.audit import audit_tensors
from ddprun_hooks.errors import DisagreementError, format_ranks

_CAUSES = (
    "Something changes weights on one rank only: a forward pass that sets them from its data (set them in "
    "`forward: {steps: 1}` before a `broadcast` stage, or in the constructor), code that acts by rank, "
    "reentrant checkpointing of a module that is called twice (write use_reentrant=False), a library that "
    "computes differently there, or failing memory"
)
_CAUSE_OF_BUFFERS = (
    "buffers: auto sends only what the passes before step 1 changed. If training changes others, write "
    "buffers: every_forward, which sends all as DDP does"
)
_CAUSE_BY_MUTATE = ". Another cause is mutate, on each rank for itself"


def audit_parameters(
    session: Session, where: str, step: int, *, at_end: bool = False, recorded: bool = True
) -> None:
    """Compare the ranks' parameters, and buffers that `auto` takes to be equal, at the moment `where`, after
    `step` steps; called by all ranks together.

    `at_end`: a stage has just made them equal. `recorded`: it is one of the file's own `audit`, if that asks
    for any, and is reported. Raises DisagreementError if ranks wrongly differ and the file says `stop`.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    wanted = runtime.loaded.pipeline.audit
    recorded = recorded and wanted.every > 0
    if runtime.ranks.size == 1 and not recorded:
        return
    groups, exempt = None, frozenset[str]()
    if state.replicas.parameters == "host":
        groups = runtime.ranks.placement.split_by_host(state.replicas.hosts)
        exempt = frozenset(runtime.frozen.parameters)  # made equal where all ranks synchronise
    buffers, last = dict[str, Tensor](), state.synchronizer
    if state.replicas.parameters == "common" and last is not None and not last.plan.never_exchanges:
        buffers = runtime.buffers.buffers_not_synchronized()
    compared = {**dict(runtime.model.named_parameters()), **buffers}
    result = audit_tensors(compared, runtime.exchange.control, groups, exempt, measure_allowed=recorded)
    drifted = bool(result.differing) and state.replicas.parameters != "apart"
    if not (drifted or recorded):
        return
    reporter.events.info(
        "audit",
        step=step,
        where=where,
        expected=state.replicas.parameters,
        equal=not result.farthest,
        largest_distance=result.largest_distance,
        farthest=result.farthest or None,
        differing=len(result.differing),
    )
    state.results.last_audit = result
    state.results.farthest_apart = max(state.results.farthest_apart, result.largest_distance)
    if not drifted:
        reporter.report_audit(result, step, at_end=at_end)
        return
    names = result.differing
    kind, causes = ("buffers", _CAUSE_OF_BUFFERS) if names[0] in buffers else ("parameters", _CAUSES)
    if kind == "buffers" and any(one.mutate for _, one in runtime.loaded.pipeline.stages_and_settings()):
        causes += _CAUSE_BY_MUTATE
    alike = [name for name in names if (name in buffers) == (kind == "buffers")]
    more = f" and {len(alike) - 1} more {kind} differ" if len(alike) > 1 else " differs"
    text = (
        f"{where} the ranks hold different {kind}, which the sync policy does not allow: "
        f'"{names[0]}"{more} on {format_ranks(result.odd_ranks)}; the largest difference is '
        f'{result.largest_distance:.3g}, in "{result.farthest}". {causes}'
    )
    if wanted.on_drift == "stop":
        raise DisagreementError(text)
    reporter.warn_ranks_differ_once(text)
