"""What the steps of each stage train: all of it at once, or in several turns."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddprun.config import LoadedPipeline
from ddprun.config.checks.model_and_data import find_evaluations
from ddprun.engine.data import ErrorFactory
from ddprun.engine.model_with_loss import bare_model
from ddprun.engine.weights import matches, matching_parameters, strip_compile_prefix
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.buffers import trainable_parameters
from ddprun.units import abbreviated_list
from ddprun_hooks.buckets import BucketLayout


@dataclass(slots=True, eq=False)
class Turn:
    """A part of a step: a loss, and the parameters that its gradients update."""

    name: str | None  # what the model's forward gets as `turn`; None: nothing, and it is the whole step
    params: Mapping[str, Tensor]  # by name; no others require gradients in it
    replica: DdpReplica | None = None  # the model under DDP, for these; None: their gradients are never sent

    @property
    def key(self) -> tuple[str | None, ...]:
        """Equal for turns that train the same parameters in the same way."""
        return self.name, *self.params


@dataclass(slots=True)
class Turns:
    """The turns of all stages. Stages that train the same parameters in the same way share them."""

    trained: Mapping[str, Tensor]  # what some stage trains, by name
    by_stage: dict[int, list[Turn]] = field(default_factory=dict)  # at least one for each that takes steps
    of_stage: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # what its turns train together
    _selected: Mapping[str, Tensor] | None = None  # what requires gradients now; None: all of `trained`

    def all(self) -> list[Turn]:
        """Each once, in the order in which the run comes to them."""
        return list(dict.fromkeys(turn for turns in self.by_stage.values() for turn in turns))

    def exchanging_turns(self, loaded: LoadedPipeline) -> list[Turn]:
        """Those in which ranks exchange gradients, each once, in the order of their buckets' numbers."""
        stages = loaded.pipeline.stages_and_settings()
        wanted = {turn for stage, one in stages if one.plan.gradients for turn in self.by_stage[stage.index]}
        return [turn for turn in self.all() if turn in wanted]

    @property
    def names(self) -> list[str | None]:
        """What forward passes of training get as `turn`, each once; None: nothing."""
        return list(dict.fromkeys(turn.name for turn in self.all()))

    @property
    def params_of_partial_turns(self) -> list[set[Tensor]]:
        """The parameters of each turn that is not a whole step."""
        return [set(turn.params.values()) for turn in self.all() if turn.name is not None]

    @property
    def buckets(self) -> list[BucketLayout]:
        """The buckets of gradients that ranks exchange, of all turns."""
        replicas = [turn.replica for turn in self.all() if turn.replica is not None]
        return [bucket for replica in replicas for bucket in replica.dispatcher.bucket_layouts]

    def set_trainable(self, params: Mapping[str, Tensor] | None) -> None:
        """Have only the parameters of a turn or stage require gradients; None: all that some stage trains."""
        if params is not self._selected:
            self._selected = params
            for name, param in self.trained.items():
                param.requires_grad_(params is None or name in params)

    def iterate_with_trainable(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Yield these turns, each while only its own parameters require gradients; at the end, all that some
        stage trains require them.
        """
        for turn in turns:
            self.set_trainable(turn.params)
            yield turn
        self.set_trainable(None)


def _turn_has_group(turn: Turn, group: Mapping[str, Any]) -> bool:
    return not {*map(id, turn.params.values())}.isdisjoint(map(id, group["params"]))


def parameter_group_names(
    loaded: LoadedPipeline, turns: Turns, optimizer: Optimizer, model: nn.Module
) -> list[str]:
    """What reports call the parameter groups: their turns and patterns, `others` of a second optimizer."""
    all_names, found = dict[int, list[str]](), list[str]()
    for name, param in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(param), []).append(strip_compile_prefix(name))
    for group in optimizer.param_groups:
        names = next((all_names[id(one)] for one in group["params"] if id(one) in all_names), [])
        parts = [f"turn {one.name}" for one in turns.all() if one.name and _turn_has_group(one, group)]
        given = loaded.pipeline.groups
        parts += next((one.match for one in given if any(matches(name, one.match) for name in names)), [])
        parts += ["others"] if group.get("others") else []
        found.append(", ".join(dict.fromkeys(parts)) or "the rest")
    return found


@contextmanager
def only_groups_of(turn: Turn, optimizer: Optimizer) -> Iterator[None]:
    """Inside, the optimizer has only the parameter groups of a turn, as the turn's own optimizer would; no
    group is of two turns of a stage (`check_groups_of_turns`).
    """
    everything = optimizer.param_groups
    optimizer.param_groups = [group for group in everything if _turn_has_group(turn, group)]
    try:
        yield
    finally:
        optimizer.param_groups = everything


def build_turns(loaded: LoadedPipeline, model: nn.Module) -> Turns:
    """The turns of every stage that takes steps, without replicas. A PipelineError if their patterns do not
    divide what the stage trains, or the model's forward does not take `turn`, or not leave it out.
    """
    found, known = Turns(trainable_parameters(model)), dict[tuple[str | None, ...], Turn]()

    def known_or_new(turn: Turn) -> Turn:
        return known.setdefault(turn.key, turn)

    for stage, settings in loaded.pipeline.stages_and_settings():
        frozen = matching_parameters(loaded, stage.key_path("freeze"), settings.freeze, model)
        left = {name: param for name, param in found.trained.items() if param not in frozen}
        if not settings.turns:
            found.by_stage[stage.index] = [whole := known_or_new(Turn(None, left))]
            found.of_stage[stage.index] = whole.params
            continue
        path, turns = f"{stage.path}.turns", list[Turn]()
        for index, turn in enumerate(settings.turns):
            wanted = matching_parameters(loaded, f"{path}[{index}].match", turn.match, model)
            params = {name: param for name, param in left.items() if param in wanted}
            if not params:
                text = "each parameter that it matches is frozen"
                raise loaded.error(f"{path}[{index}].match", text, "unfreeze some, or remove the turn")
            turns.append(known_or_new(Turn(turn.name, params)))
        often = Counter(name for turn in turns for name in turn.params)
        for count, what in ((0, "no turn updates"), (2, "more than one turn updates")):
            if names := [name for name in left if min(often[name], 2) == count]:
                hint = "match each trained parameter in one turn, or freeze it"
                raise loaded.error(path, f"{what} {abbreviated_list(names)}", hint)
        _check_forward_takes_turn(loaded, path, model)
        found.by_stage[stage.index], found.of_stage[stage.index] = turns, left
    return found


def _check_forward_takes_turn(loaded: LoadedPipeline, path: str, model: nn.Module) -> None:
    alone = bare_model(model)
    parameters = inspect.signature(alone.forward).parameters
    text, turn = f"the forward of {type(alone).__name__}", parameters.get("turn")
    if turn is None and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        text += " takes no argument called turn"
        raise loaded.error(path, text, "give it one, and return the loss of the turn of that name")
    pipeline = loaded.pipeline
    without = any(not settings.turns for _, settings in pipeline.stages_and_settings())
    if turn is not None and turn.default is turn.empty and (without or any(find_evaluations(pipeline))):
        text += " needs the argument turn, which evaluations and stages without turns do not pass"
        raise loaded.error(path, text, "give turn a default value")


def check_groups_of_turns(
    loaded: LoadedPipeline, turns: Turns, optimizer: Optimizer, make_error: ErrorFactory
) -> None:
    """Raise a PipelineError if a parameter group of the optimizer belongs to two turns of a stage, or its
    groups cannot be replaced by those of a turn.
    """
    if turns.params_of_partial_turns and isinstance(getattr(type(optimizer), "param_groups", None), property):
        text = "it does not let turns step their own parameter groups"
        raise make_error(text, "name an optimizer that holds its param_groups itself")
    for stage in loaded.pipeline.stages_with_steps():
        for group in optimizer.param_groups:
            if sum(_turn_has_group(turn, group) for turn in turns.by_stage[stage.index]) > 1:
                raise make_error("it makes groups that span turns", "name an optimizer that takes parameters")
