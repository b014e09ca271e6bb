"""Losses and parameters that are not finite: found by all ranks together, said once, and what follows.

Control messages bring every rank's losses, so all ranks learn of one that is NaN or infinite after the same
step, and no step waits for it. Only then are parameters looked at. A parameter that is not finite never
becomes finite again, so with `on_nan: stop` the run ends there. A loss alone is no reason to end: a
GradScaler skips such a step, and a batch whose targets are all ignored has NaN for a mean and no gradient.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import Apart
from ddprun.run_files import resume_command
from ddprun.telemetry.global_step import GlobalStep

if TYPE_CHECKING:
    from ddprun.engine.session import Session


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """What was the first of a run to be not finite."""

    step: int
    rank: int
    """Whose loss, or parameter, it was."""

    value: str | None
    """The loss: "nan", "inf" or "-inf"; None: every loss was finite."""

    parameter: str | None
    """The first that is not finite either, in the model's order; None: all were finite then."""

    def words(self) -> str:
        """For the screen."""
        if self.value is None:
            return (
                f"step {self.step}: {self.parameter} is not finite on rank {self.rank}, though every loss was"
            )
        then = (
            "all parameters are still finite"
            if self.parameter is None
            else f"{self.parameter} is the first parameter that is not finite"
        )
        return f"step {self.step}: the loss of rank {self.rank} is {self.value}; {then}"


class FiniteCheck:
    """Looks for parameters that are trained and not finite; for those that were finite at first.

    Args:
        model: before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        at_first = set(_not_finite(named))
        self._params: Mapping[str, Tensor] = {
            name: param for name, param in named.items() if name not in at_first
        }
        self.infinite_at_first = frozenset(at_first)
        self.found: Nonfinite | None = None
        """The first loss or parameter of the run that was not finite."""

        self.lost_parameter: str | None = None
        """A parameter that was not finite when it was looked at last."""

        self.failed = False
        """The run ends here because weights are not finite any more."""

    def first(self) -> int:
        """The place of the first, from 1, which `name` names; 0: all are finite. Waits for the device."""
        found = set(_not_finite(self._params))
        return next((place for place, name in enumerate(self._params, 1) if name in found), 0)

    def name(self, place: int) -> str | None:
        """Of the parameter at a place."""
        return list(self._params)[place - 1] if place else None


def _not_finite(named: Mapping[str, Tensor]) -> list[str]:
    if not named:
        return []
    flags = torch.stack([torch.isfinite(param.detach()).all().cpu() for param in named.values()]).tolist()
    return [name for name, finite in zip(named, flags, strict=True) if not finite]


def stops(session: "Session", words: Iterable[GlobalStep], on_nan: Literal["continue", "stop"]) -> bool:
    """Say the first loss that is not finite; whether the run is to stop. Called by all ranks after one step.

    Args:
        session: of the run.
        words: what ranks newly know alike.
        on_nan: of the stage.
    """
    if not any(word.nonfinite for word in words) or (session.runtime.finite.found and on_nan == "continue"):
        return False
    return _compare(session, on_nan)


def stops_at_end(session: "Session", places: Sequence[int], on_nan: Literal["continue", "stop"]) -> bool:
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


def _compare(session: "Session", on_nan: Literal["continue", "stop"]) -> bool:
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


def _tell(session: "Session", found: Nonfinite) -> None:
    reporter = session.reporter
    session.runtime.finite.found = found
    reporter.events.warning("nonfinite", **asdict(found))
    reporter.note(found.words())


def in_state(state: Apart, infinite_at_first: frozenset[str] = frozenset()) -> str | None:
    """What of a checkpoint's part is not finite: a parameter, the optimizer's state, `loss`; None: nothing.

    Args:
        state: taken apart.
        infinite_at_first: parameters that are meant to be so.
    """
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in ("parameters", "optimizer") or rest in infinite_at_first:
            continue
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            return rest if kind == "parameters" else name
    # `loss` of what was told: a number that JSON lacks is kept as a mapping.
    told: Any = state.tree.get("told")
    return folder.LOSS if isinstance(told, dict) and isinstance(told.get("loss"), dict) else None


def failure(session: "Session", root: Path) -> str:
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
