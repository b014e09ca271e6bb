"""Everything that decides the next step: what a checkpoint holds and a resumed run goes on from.

`shared` is what all ranks have alike, so rank 0 has it written once; `own` is what each rank has for itself.
Which is which depends on the sync policy: under plain DDP parameters and optimizer state are shared, between
two averages of local SGD each rank has its own.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ddprun.checkpoint.tensors import DamagedError
from ddprun.engine import seeding
from ddprun.engine.finite import Nonfinite
from ddprun.engine.session import Session
from ddprun.sync.audit import Finding
from ddprun.telemetry.control_message import Accumulator
from ddprun.telemetry.steps import Totals


class StateError(ValueError):
    """State that does not fit the model or the pipeline."""


def state_of(session: Session) -> dict[str, Any]:
    """All of it, of this rank. Tensors are those that training goes on with, not copies."""
    runtime, state = session.runtime, session.state
    # First, because it waits for what is under way: until then hooks may still change what they keep.
    sync = state.synchronizer.state_dict() if state.synchronizer is not None else {}
    model = runtime.model
    return {
        "step": state.step,
        "position": state.cursor.state_dict(),
        "schedule": state.schedule.state_dict() if state.schedule is not None else None,
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "extra": _extra(model),
        "optimizer": runtime.optimizer.state_dict(),
        "precision": runtime.precision.state_dict(),
        "feed": runtime.feed.state_dict(),
        "hooks": runtime.stacks.state_dict(),
        "sync": sync,
        "together": state.replicas.state_list(),
        "outer_momentum": dict(state.outer_momentum),
        "buffers_seen": runtime.buffers.state_dict(),
        "telemetry": runtime.recorder.state_dict(),
        "told": _told(session),
        "generators": seeding.generator_state(runtime.device),
    }


_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "position": (dict,),
    "schedule": (dict, NoneType),
    "parameters": (dict,),
    "buffers": (dict,),
    "extra": (dict,),
    "optimizer": (dict,),
    "precision": (dict,),
    "feed": (dict,),
    "hooks": (dict,),
    "sync": (dict,),
    "together": (list,),
    "outer_momentum": (dict,),
    "buffers_seen": (dict,),
    "telemetry": (dict,),
    "told": (dict,),
    "generators": (dict,),
    "pipeline": (dict,),
    "world_size": (int,),
    "layout": (str,),
}


_STEP_KINDS = ("train", "forward")

_NOT_READ = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading something else than expected ends in."""


def check_fields(state: Mapping[str, Any]) -> None:
    """Make sure that what a checkpoint holds is what one holds.

    Raises:
        ValueError: something is not there, or of another kind.
    """
    for name, kinds in _FIELDS.items():
        if name not in state:
            raise ValueError(f"there is no {name} in it")
        if not isinstance(state[name], kinds):
            raise ValueError(f"its {name} is a {type(state[name]).__name__}")
    stages = state["pipeline"].get("stages")
    _check_position(state["position"], stages if isinstance(stages, list) else [])
    for name in ("epoch", "samples"):
        if not _is_count(value := state["feed"].get(name)):
            raise ValueError(f"its feed.{name} is {value!r:.40}")
    if state["schedule"] and not _is_count(value := state["schedule"].get("last_epoch"), state["step"]):
        raise ValueError(f"its schedule.last_epoch is {value!r:.40}")
    with reading("telemetry"):
        recorder = state["telemetry"]
        Totals.of(recorder["totals"])
        Accumulator.of(recorder["round"])
        math.isfinite(recorder["own_loss"])
    with reading("told"):
        told = state["told"]
        _finding(told), _nonfinite(told)
        for number in (told["loss"], told["farthest_apart"], *(told["metrics"] or {}).values()):
            if not isinstance(number, float | int | NoneType):
                raise TypeError(f"{number!r:.40} is no number")
        if not isinstance(told["told_apart"], bool):
            raise TypeError(f"told_apart is {told['told_apart']!r:.40}")


def _check_position(cursor: Mapping[str, Any], stages: list[Any]) -> None:
    for name in ("next", "stage", "first_step", "first_epoch", "steps"):
        value = cursor.get(name, "")
        if not (value is None and name in ("stage", "steps")) and not _is_count(value):
            raise ValueError(f"its position.{name} is {value!r:.40}")
    for name in ("seconds", "run_seconds"):
        if not _is_time(value := cursor.get(name, 0.0)):
            raise ValueError(f"its position.{name} is {value!r:.40}")
    entries = cursor.get("entries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("its position.entries are no list of entries")
    last = cursor["stage"]
    for place, entry in enumerate(entries):
        takes_steps = place == last or entry.get("kind") in _STEP_KINDS
        if not isinstance(entry.get("kind"), str) or (
            takes_steps and not (_is_count(entry.get("steps")) and _is_time(entry.get("seconds")))
        ):
            raise ValueError(f"its position.entries[{place}] is no entry of a stage")
    over = last is not None and last < cursor["next"]
    if not len(entries) <= cursor["next"] <= len(stages) or (over and last >= len(entries)):
        raise ValueError("its position is in none of its stages")


def _is_count(value: Any, most: int | None = None) -> bool:
    return type(value) is int and value >= 0 and (most is None or value <= most)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around what reads a part of a checkpoint, which may hold anything.

    Raises:
        DamagedError: it is not what such a part holds.
    """
    try:
        yield
    except (DamagedError, StateError, torch.OutOfMemoryError):
        raise
    except _NOT_READ as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DamagedError(f"its {what} cannot be read ({text:.200})") from error


def shared_keys(session: Session) -> frozenset[str]:
    """What all ranks have alike at this moment."""
    state = session.state
    if state.replicas.parameters != "common":
        return frozenset()
    return frozenset(["parameters", "optimizer"] if state.replicas.optimizer == "common" else ["parameters"])


def bring_back(session: Session, state: Mapping[str, Any]) -> None:
    """Go on from there, except for what belongs to the stage that was running: `bring_back_stage`.

    Raises:
        DamagedError: it is no state.
        StateError: it does not fit the model.
    """
    runtime = session.runtime
    session.state.step = state["step"]
    with reading("position"):
        session.state.cursor.load_state_dict(state["position"])
    with reading("parameters"):
        _copy(dict(runtime.model.named_parameters()), state["parameters"], "parameter")
    with reading("buffers"):
        _copy(dict(runtime.model.named_buffers()), state["buffers"], "buffer")
    with reading("extra"):
        if state["extra"]:
            runtime.model.load_state_dict(state["extra"], strict=False)
    _load_optimizer(session, state)
    with reading("precision"):
        runtime.precision.load_state_dict(state["precision"])
    with reading("feed"):
        runtime.feed.load_state_dict(state["feed"])
    with reading("hooks"):
        runtime.stacks.load_state_dict(state["hooks"])
    with reading("together"):
        session.state.replicas.load_state_list(state["together"])
    session.state.outer_momentum.clear()
    session.state.outer_momentum.update(state["outer_momentum"])
    with reading("buffers_seen"):
        runtime.buffers.load_state_dict(state["buffers_seen"])
    with reading("telemetry"):
        runtime.recorder.load_state_dict(state["telemetry"])
    with reading("told"):
        _bring_back_told(session, state["told"])
    bring_back_generators(session, state)


def _load_optimizer(session: Session, state: Mapping[str, Any]) -> None:
    """Optimizers take over whatever they are given, and fail in their next step."""
    runtime = session.runtime
    with reading("optimizer"):
        groups = zip(
            runtime.optimizer.state_dict()["param_groups"],
            state["optimizer"]["param_groups"],
            strict=True,
        )
        for place, (now, then) in enumerate(groups):
            _check_numbers(now, then, f"param_groups[{place}]", needed="lr")
        for of_param in state["optimizer"]["state"].values():
            if not isinstance(of_param, dict):
                raise TypeError(f"the state of a parameter is a {type(of_param).__name__}")
        runtime.optimizer.load_state_dict(state["optimizer"])


def _check_numbers(now: Mapping[str, Any], then: Mapping[str, Any], where: str, *, needed: str) -> None:
    """Make sure that what is a number now was one.

    Args:
        now: settings and counters of an object as it was built.
        then: the same in a checkpoint; another version of torch may have had fewer.
        where: for the message.
        needed: what every version has.
    """
    for key, value in now.items():
        was = then[key] if key == needed else then.get(key)
        if type(value) in (int, float) and not isinstance(was, int | float | Tensor | NoneType):
            raise TypeError(f"{where}.{key} is {was!r:.40}")


def bring_back_stage(session: Session, state: Mapping[str, Any], *, new_rates: bool) -> None:
    """Go on in the middle of a stage, whose policy has begun and whose schedule has been built.

    Args:
        session: of the run.
        state: as it was.
        new_rates: learning rates are others than they were, or fall over another number of steps.

    Raises:
        DamagedError: it is no state.
    """
    synchronizer, sync = session.state.synchronizer, state["sync"]
    assert synchronizer is not None
    with reading("sync"):
        if "sync_of_ranks" in state:
            sync = synchronizer.merge(state["sync_of_ranks"])
        if sync:
            synchronizer.load_state_dict(sync)
    if new_rates:
        _replay(session, (state["schedule"] or {}).get("last_epoch", 0))
    else:
        if session.state.schedule is not None:
            with reading("schedule"):
                now = session.state.schedule.state_dict()
                _check_numbers(now, state["schedule"], "schedule", needed="last_epoch")
                session.state.schedule.load_state_dict(state["schedule"])
        # The schedule, when it was built, has set the learning rates of a first step.
        _load_optimizer(session, state)
    bring_back_generators(session, state)


def _replay(session: Session, steps: int) -> None:
    """Follow a schedule that is another than in the checkpoint from the stage's start to here."""
    state = session.state
    if state.schedule is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped in between
            for _ in range(steps):
                state.schedule.step()


def bring_back_generators(session: Session, state: Mapping[str, Any]) -> None:
    """What is drawn next is what would have been drawn."""
    with reading("generators"):
        seeding.restore_generators(state["generators"], session.runtime.device)


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


def _told(session: Session) -> dict[str, Any]:
    """What the summary and the screen know."""
    runtime, state = session.runtime, session.state
    return {
        "loss": state.loss,
        "metrics": state.metrics,
        "audit": asdict(state.last_audit) if state.last_audit is not None else None,
        "farthest_apart": state.farthest_apart,
        "told_apart": session.reporter.apart_reported,
        "nonfinite": asdict(runtime.finite.found) if runtime.finite.found is not None else None,
    }


def _bring_back_told(session: Session, told: Mapping[str, Any]) -> None:
    state = session.state
    state.loss, state.metrics = told["loss"], told["metrics"]
    state.last_audit = _finding(told)
    state.farthest_apart, session.reporter.apart_reported = told["farthest_apart"], told["told_apart"]
    if (nonfinite := _nonfinite(told)) is not None:
        session.runtime.finite.found = nonfinite


def _finding(told: Mapping[str, Any]) -> Finding | None:
    return Finding(**told["audit"]) if told["audit"] is not None else None


def _nonfinite(told: Mapping[str, Any]) -> Nonfinite | None:
    nonfinite = told.get("nonfinite")
    return Nonfinite(**nonfinite) if nonfinite is not None else None
