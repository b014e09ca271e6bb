"""Everything that decides the next step: what a checkpoint holds and a resumed run goes on from.

`shared` is what all ranks have alike, so rank 0 has it written once; `own` is what each rank has for itself.
Which is which depends on the sync policy: under plain DDP parameters and optimizer state are shared, between
two averages of local SGD each rank has its own.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddprun.engine import seeding
from ddprun.sync.audit import Finding

if TYPE_CHECKING:
    from ddprun.engine.session import Session


class StateError(ValueError):
    """State that does not fit the model or the pipeline."""


def state_of(session: "Session") -> dict[str, Any]:
    """All of it, of this rank. Tensors are those that training goes on with, not copies."""
    # First, because it waits for what is under way: until then hooks may still change what they keep.
    sync = session.policy.state_dict() if session.policy is not None else {}
    model = session.model
    return {
        "step": session.step,
        "position": session.position.state_dict(),
        "schedule": session.schedule.state_dict() if session.schedule is not None else None,
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "extra": _extra(model),
        "optimizer": session.optimizer.state_dict(),
        "precision": session.precision.state_dict(),
        "feed": session.feed.state_dict(),
        "hooks": session.stacks.state_dict(),
        "sync": sync,
        "together": [session.together, session.state_together, session.state_hosts, session.mutated_at],
        "outer_momentum": dict(session.outer_momentum),
        "buffers_seen": session.buffers.state_dict(),
        "ledger": session.ledger.state_dict(),
        "told": _told(session),
        "generators": seeding.generator_state(session.place.device),
    }


def shared_keys(session: "Session") -> frozenset[str]:
    """What all ranks have alike at this moment."""
    if session.together != "common":
        return frozenset()
    return frozenset(["parameters", "optimizer"] if session.state_together == "common" else ["parameters"])


def bring_back(session: "Session", state: Mapping[str, Any]) -> None:
    """Go on from there, except for what belongs to the stage that was running: `bring_back_stage`.

    Raises:
        StateError: it does not fit the model.
    """
    session.step = state["step"]
    session.position.load_state_dict(state["position"])
    _copy(dict(session.model.named_parameters()), state["parameters"], "parameter")
    _copy(dict(session.model.named_buffers()), state["buffers"], "buffer")
    if state["extra"]:
        session.model.load_state_dict(state["extra"], strict=False)
    session.optimizer.load_state_dict(state["optimizer"])
    session.precision.load_state_dict(state["precision"])
    session.feed.load_state_dict(state["feed"])
    session.stacks.load_state_dict(state["hooks"])
    session.together, session.state_together, session.state_hosts, session.mutated_at = state["together"]
    session.outer_momentum.clear()
    session.outer_momentum.update(state["outer_momentum"])
    session.buffers.load_state_dict(state["buffers_seen"])
    session.ledger.load_state_dict(state["ledger"])
    _bring_back_told(session, state["told"])
    bring_back_generators(session, state)


def bring_back_stage(session: "Session", state: Mapping[str, Any], *, new_rates: bool) -> None:
    """Go on in the middle of a stage, whose policy has begun and whose schedule has been built.

    Args:
        session: of the run.
        state: as it was.
        new_rates: learning rates are others than they were, or fall over another number of steps.
    """
    assert session.policy is not None
    sync = session.policy.merge(state["sync_of_ranks"]) if "sync_of_ranks" in state else state["sync"]
    if sync:
        session.policy.load_state_dict(sync)
    if new_rates:
        _replay(session, (state["schedule"] or {}).get("last_epoch", 0))
    else:
        if session.schedule is not None:
            session.schedule.load_state_dict(state["schedule"])
        # The schedule, when it was built, has set the learning rates of a first step.
        session.optimizer.load_state_dict(state["optimizer"])
    bring_back_generators(session, state)


def _replay(session: "Session", steps: int) -> None:
    """Follow a schedule that is another than in the checkpoint from the stage's start to here."""
    if session.schedule is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
            for _ in range(steps):
                session.schedule.step()


def bring_back_generators(session: "Session", state: Mapping[str, Any]) -> None:
    """What is drawn next is what would have been drawn."""
    seeding.restore_generators(state["generators"], session.place.device)


def _extra(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside parameters and buffers (`get_extra_state`)."""
    return {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}


def _copy(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], what: str) -> None:
    if targets.keys() != values.keys():
        odd = min(targets.keys() ^ values.keys())
        raise StateError(f'{what} "{odd}" is only in {"the model" if odd in targets else "the checkpoint"}')
    with torch.no_grad():
        for name, target in targets.items():
            value = values[name]
            if target.shape != value.shape or target.dtype != value.dtype:
                raise StateError(
                    f'{what} "{name}" is {tuple(target.shape)} of {target.dtype}, in the checkpoint '
                    f"{tuple(value.shape)} of {value.dtype}"
                )
            target.copy_(value)


def _told(session: "Session") -> dict[str, Any]:
    """What the summary and the screen know."""
    return {
        "loss": session.loss,
        "metrics": session.metrics,
        "audit": asdict(session.last_audit) if session.last_audit is not None else None,
        "farthest_apart": session.farthest_apart,
        "told_apart": session.told_apart,
    }


def _bring_back_told(session: "Session", told: Mapping[str, Any]) -> None:
    session.loss, session.metrics = told["loss"], told["metrics"]
    session.last_audit = Finding(**told["audit"]) if told["audit"] is not None else None
    session.farthest_apart, session.told_apart = told["farthest_apart"], told["told_apart"]
