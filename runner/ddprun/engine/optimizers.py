"""The run's optimizer, over what some stage trains, and schedules; what they cannot do is refused here."""

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from ddprun.config import Choice, LoadedPipeline, length_option_to_fill
from ddprun.config.stages import better_values
from ddprun.config.torch_signatures import torch_options_model
from ddprun.engine.build import ChoiceBuilder
from ddprun.engine.feeds import Feeds
from ddprun.engine.model_with_loss import bare_model
from ddprun.engine.turns import Turns, check_groups_of_turns
from ddprun.engine.weights import build_parameter_groups, optimizer_has_train_eval
from ddprun.parallel.ddp import sparse_parameters
from ddprun.sync.buffers import trainable_parameters
from ddprun.sync.exchanger import initialize_optimizer_state, requires_closure
from ddprun.units import abbreviated_list


def build_optimizer(
    loaded: LoadedPipeline,
    model: nn.Module,
    turns: Turns,
    choice: Choice | None = None,
    path: str = "optimizer",
) -> Optimizer:
    """The optimizer over all parameters that require a gradient, in the file's groups, each of one turn; in
    training mode.
    """
    choice = choice or loaded.pipeline.optimizer
    chosen, others = ChoiceBuilder.from_key_path(loaded, path, choice), None
    if (other := choice.sibling_keys.get("others")) is None:
        options = [_group_options(loaded, index, chosen) for index in range(len(loaded.pipeline.groups))]
        vectors = [name for name, one in trainable_parameters(model).items() if one.dim() != 2]
        if chosen.source == "torch" and chosen.name == "Muon" and vectors:
            text = f"it takes matrices only, and not {abbreviated_list(vectors)}"
            raise chosen.error(text, "write others: {adamw: {…}} beside it, or freeze them")
        divided = build_parameter_groups(loaded, model, options, turns.params_of_partial_turns)
        params = _first_optimizer_argument(chosen, model, divided)
        optimizer: Any = chosen.construct(torch.optim, params, Optimizer)
    else:
        others = ChoiceBuilder.from_key_path(loaded, f"{path}.others", other)
        optimizer = _build_two_optimizers(loaded, model, turns, chosen, others)
    # Of timm's layer decay, which only its own schedules apply; groups of other packages are scaled already.
    scaled = [group for group in optimizer.param_groups if "lr_scale" in group and "lr" in group]
    if len({group["lr"] for group in scaled}) == 1:
        for group in scaled:
            group["lr"] *= group["lr_scale"]
    _check_step_and_state_dict(chosen, optimizer)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if missing := [name for name, param in trainable_parameters(model).items() if id(param) not in held]:
        text = f"it leaves out parameters that are trained: {abbreviated_list(missing)}"
        raise chosen.error(text, "freeze them, or have it take all that require a gradient")
    _check_sparse_gradients(loaded, model, [chosen, others or chosen], optimizer)
    check_groups_of_turns(loaded, turns, optimizer, chosen.error)
    if optimizer_has_train_eval(optimizer):
        if loaded.pipeline.ema is not None:
            text = f'"ema" clashes with "optimizer: {choice.name}", which averages the weights itself'
            raise loaded.error("ema", text, "remove one of the two")
        optimizer.train()
    return cast("Optimizer", optimizer)


def _group_options(loaded: LoadedPipeline, index: int, chosen: ChoiceBuilder) -> dict[str, Any]:
    """The options of a group of the file, for the optimizer that has it; lists become what torch takes."""
    own = dict(loaded.expand_env_and_folder(f"groups[{index}]", dict(loaded.pipeline.groups[index].options)))
    if chosen.source != "torch":
        return own
    try:
        read = torch_options_model("optimizer", chosen.name).model_validate({**chosen.options, **own})
    except ValidationError as error:  # of a group for both optimizers: `check` knows of no shapes
        text = f'it has parameters for "{chosen.name}", which does not take these options: '
        text += ", ".join(str(item["loc"][0]) for item in error.errors())
        hint = "write optimizer: others in a group of their own"
        raise loaded.error(f"groups[{index}]", text, hint) from None
    return {key: getattr(read, key) for key in own}


def _build_two_optimizers(
    loaded: LoadedPipeline, model: nn.Module, turns: Turns, chosen: ChoiceBuilder, others: ChoiceBuilder
) -> "TwoOptimizers":
    """The first takes the matrices; groups with `optimizer` say themselves which of the two takes them."""
    groups, builders = loaded.pipeline.groups, [chosen, others]
    numbers = [{"group": index} for index in range(len(groups))]
    divided = build_parameter_groups(loaded, model, numbers, turns.params_of_partial_turns)
    found: list[list[dict[str, Any]]] = [[], []]
    for group in divided if groups or turns.params_of_partial_turns else [{"params": divided}]:
        index: Any = group.pop("group", None)
        parts: list[list[Tensor]] = [[], []]
        wanted = None if index is None else groups[index].optimizer
        for param in group["params"]:
            parts[param.dim() != 2 if wanted is None else wanted == "others"].append(param)
        for into, params, builder in zip(found, parts, builders, strict=True):
            if params:
                options = {} if index is None else _group_options(loaded, index, builder)
                into.append({"params": params, **options})
    made: list[Optimizer] = []
    for builder, own, name in zip(builders, found, ("first", "others"), strict=True):
        if not own:
            text = f'no parameter is left for "{builder.name}"'
            raise builder.error(text, f"a group can have optimizer: {name}")
        optimizer: Any = builder.construct(
            torch.optim, _first_optimizer_argument(builder, model, own), Optimizer
        )
        for refused, why in (
            (requires_closure(optimizer), "takes a closure"),
            (optimizer_has_train_eval(optimizer), "has the modes train() and eval()"),
            (_saves_its_own_state(optimizer), "has a state_dict or load_state_dict of its own"),
        ):
            if refused:
                raise builder.error(f"an optimizer that {why} must be the only one", "choose another")
        _check_step_and_state_dict(builder, optimizer)
        made.append(optimizer)
    return TwoOptimizers(*made)


def _saves_its_own_state(optimizer: Optimizer) -> bool:
    own = (getattr(type(optimizer), name) for name in ("state_dict", "load_state_dict"))
    return {*own} != {Optimizer.state_dict, Optimizer.load_state_dict}


class TwoOptimizers(Optimizer):
    """Two optimizers with one state and one list of parameter groups, where `others` marks the second's."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.both = first, second
        for others, optimizer in enumerate(self.both):
            for group in optimizer.param_groups:
                group["others"] = bool(others)
        super().__init__([*first.param_groups, *second.param_groups], {})
        for optimizer in self.both:
            self.state.update(optimizer.state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each what was loaded of its own: it may have to complete what an older torch has saved."""
        super().__setstate__(state)
        for optimizer, groups in zip(self.both, self._groups_of_both(), strict=True):
            own = {id(param) for group in groups for param in group["params"]}
            states = {param: of_param for param, of_param in self.state.items() if id(param) in own}
            optimizer.__setstate__({"state": states, "param_groups": groups})

    def step(self) -> None:  # type: ignore[override]
        """Take a step with each that has parameter groups: a turn has those of one, maybe."""
        for optimizer, groups in zip(self.both, self._groups_of_both(), strict=True):
            optimizer.state, optimizer.param_groups = self.state, groups
            if groups:
                optimizer.step()

    def _groups_of_both(self) -> list[list[dict[str, Any]]]:
        groups = self.param_groups
        return [[one for one in groups if one["others"] == others] for others in (False, True)]


def _first_optimizer_argument(chosen: ChoiceBuilder, model: nn.Module, params: list[Any]) -> Any:
    """What an optimizer is made over, by the name of its first argument: `model` or `model_or_params`,
    `named_parameters`, or anything else for parameters or their groups.
    """
    if chosen.source != "dotted":
        return params
    try:
        first = next(iter(inspect.signature(chosen.import_target()).parameters), "")
    except (TypeError, ValueError):  # written in C, or no function
        return params
    if first not in ("model", "model_or_params", "named_parameters"):
        return params
    pipeline = chosen.loaded.pipeline
    for key, given in (
        ("groups", pipeline.groups),
        ("optimizer.others", pipeline.optimizer.sibling_keys.get("others")),
    ):
        if given:
            text = f'"{chosen.name}" takes {first}, and makes groups of its own'
            hint = f"remove {key}, or name an optimizer that takes parameters"
            raise chosen.loaded.error(key, text, hint)
    return list(trainable_parameters(model).items()) if first == "named_parameters" else bare_model(model)


def _check_step_and_state_dict(chosen: ChoiceBuilder, optimizer: Optimizer) -> None:
    """Raise a PipelineError if an optimizer's step takes arguments, or checkpoints would miss its state."""
    try:
        inspect.signature(optimizer.step).bind(*([abs] if requires_closure(optimizer) else []))
    except TypeError as error:
        raise chosen.error(f"its step() is called without arguments: {error}") from None
    if not chosen.loaded.pipeline.checkpoint.keep:
        return
    if not {"state", "param_groups"}.issubset(held := optimizer.state_dict()):
        has = f"its state_dict() holds {', '.join(map(str, held)) or 'nothing'}"
        raise chosen.error(has, "a checkpoint needs torch's form: state and param_groups")
    own = type(optimizer).state_dict is not Optimizer.state_dict
    for name, inner in () if own else vars(optimizer).items():
        if isinstance(inner, Optimizer) and inner.state is not optimizer.state and _keeps_state(inner):
            text = f'a checkpoint would leave out the state of "{name}", the {type(inner).__name__} inside it'
            raise chosen.error(text, f"have its state_dict and load_state_dict pass on those of {name}")


def _keeps_state(optimizer: Optimizer) -> bool:
    """Whether steps leave something in the state of parameters, as a trial step shows."""
    initialize_optimizer_state(optimizer)
    found = any(optimizer.state.values())
    optimizer.state.clear()
    return found


def takes_closure(loaded: LoadedPipeline, optimizer: Optimizer) -> bool:
    """Whether steps pass a closure: `step` requires one, or the file says `closure: true`."""
    return "closure" in loaded.pipeline.optimizer.sibling_keys or requires_closure(optimizer)


def check_closure(loaded: LoadedPipeline, optimizer: Optimizer) -> None:
    """Raise a PipelineError for what an optimizer that takes a closure does not go with."""
    if not takes_closure(loaded, optimizer):
        return
    name = f'"optimizer: {loaded.pipeline.optimizer.name}", which takes a closure'
    for stage, settings in loaded.pipeline.stages_and_settings():
        path = why = ""
        if settings.turns:
            path, why = f"{stage.path}.turns", "a closure is of one loss"
        elif settings.update is not None:
            path, why = f"{stage.path}.update", "the update makes the gradients"
        elif settings.has_backward and loaded.pipeline.precision.endswith("fp16"):
            path, why = "precision", "a loss scaler knows nothing of its passes; write bf16"
        elif settings.has_backward and not settings.averages_gradients:
            path, why = stage.key_path("sync"), "ranks that do not average all gradients decide differently"
        if path:
            raise loaded.error(path, f"it clashes with {name}: {why}")


def _check_sparse_gradients(
    loaded: LoadedPipeline, model: nn.Module, both: Sequence[ChoiceBuilder], optimizer: Optimizer
) -> None:
    """Raise a PipelineError for what torch cannot do with the sparse gradients of some embeddings."""
    sparse = {id(param) for param in sparse_parameters(model) if param.requires_grad}
    if sparse and takes_closure(loaded, optimizer):
        text = "it takes a closure, and an embedding of the model has sparse=True"
        raise both[0].error(text, "remove one of the two")
    for group in optimizer.param_groups:
        kinds, chosen = {id(param) in sparse for param in group["params"]}, both[group.get("others", False)]
        if True in kinds and chosen.source == "torch":
            # A step of a group like it, whose parameters are one number each.
            params = [nn.Parameter(torch.zeros(1, 1)) for _ in kinds]
            for param, kind in zip(params, kinds, strict=True):
                param.grad = torch.ones(1, 1).to_sparse(1) if kind else torch.ones(1, 1)
            trial = chosen.construct(torch.optim, [{**group, "params": params}], Optimizer)
            try:
                trial.step()
            except RuntimeError as error:
                text = "remove sparse=True from the embedding, or choose another optimizer, such as sgd"
                if both[0] is not both[1]:
                    text += "; a group with optimizer: others can have the embedding"
                raise chosen.error(str(error), text) from None
    for stage, settings in loaded.pipeline.stages_and_settings() if sparse else ():
        for key in ("clip_norm", "clip_value"):
            if getattr(settings, key) is not None:
                text = "torch clips no sparse gradients, and an embedding of the model has sparse=True"
                raise loaded.error(stage.key_path(key), text, "remove one of the two")


def settings_of_stages(
    loaded: LoadedPipeline, model: nn.Module, turns: Turns, optimizer: Optimizer
) -> dict[int, list[dict[str, Any]]]:
    """The optimizer's settings in each stage that takes steps, by its index, for each parameter group: what
    constructors take, and what stages differ in. Whatever else a group holds is the optimizer's own state, as
    schedule-free ones count their steps there.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for stage, effective in loaded.pipeline.stages_and_settings():
        made = optimizer
        if "optimizer" in stage.model_fields_set and stage.optimizer is not None:
            made = build_optimizer(loaded, model, turns, stage.optimizer, f"{stage.path}.optimizer")
        found[stage.index] = [dict(group) for group in made.param_groups]
        if effective.warmup_steps and any(group.get("lr") is None for group in found[stage.index]):
            text = f'"{type(made).__name__}" has no learning rate that could rise: "lr" is null or not there'
            raise loaded.error(stage.key_path("warmup_steps"), text, "remove it, or give the optimizer an lr")
    kept = {"lr", "betas", "momentum"}  # which schedules change
    both = optimizer.both if isinstance(optimizer, TwoOptimizers) else (optimizer,)
    makers = (vars(base).get("__init__") for one in both for base in type(one).__mro__)
    kept.update(*(inspect.signature(make).parameters for make in makers if make is not None))
    for of_stages in zip(*found.values(), strict=True):  # a group's
        for key in of_stages[0]:
            if len({repr(settings.get(key)) for settings in of_stages}) > 1:
                kept.add(key)
    kept.discard("params")
    return {
        index: [
            {key: copy.deepcopy(value) for key, value in group.items() if key in kept} for group in groups
        ]
        for index, groups in found.items()
    }


_STATE_OF_OPTIONS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


def change_group_options(optimizer: Optimizer, group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Change options of a parameter group. Torch makes all of a parameter's state in its first step, so what
    an option needs that was off until now is made here: zeros, as before a first step.
    """
    for option, name in _STATE_OF_OPTIONS.items():
        for param in group["params"] if options.get(option) and not group.get(option) else ():
            if state := optimizer.state.get(param):
                state.setdefault(name, torch.zeros_like(param))
    group.update(options)


def try_schedules(
    loaded: LoadedPipeline,
    feeds: Feeds,
    optimizer: Optimizer,
    settings: Mapping[int, Sequence[Mapping[str, Any]]],
    *,
    begun: bool = False,
) -> dict[str, LRScheduler]:
    """Build the schedule of each stage, and take a first step with those of torch, on an optimizer that ends
    as it was: what is refused is told before step 1. Gives the schedules by their places. `settings` are of
    `settings_of_stages`; `begun`: the run was begun before, and stages that are over had other lengths.
    """
    held = [vars(optimizer), *(one for one in vars(optimizer).values() if isinstance(one, dict))]
    held += optimizer.param_groups  # beside these, dicts hold its state, and hooks on its steps
    before, found = [dict(one) for one in held], dict[str, LRScheduler]()
    for stage, effective in loaded.pipeline.stages_and_settings():
        of_run, path = effective.has_run_schedule, stage.key_path("schedule")
        steps = feeds.steps_of_run(loaded.pipeline) if of_run else feeds.steps_of(stage.index, effective)
        for group, own in zip(optimizer.param_groups, settings[stage.index], strict=True):
            group.pop("initial_lr", None)
            group.update(copy.deepcopy(own))  # a schedule changes a rate that is a tensor in place
        made = build_schedule(loaded, path, effective.schedule, optimizer, steps, trial=True, begun=begun)
        if made is not None:
            found[path] = made
    for one, content in zip(held, before, strict=True):
        one.clear()
        one.update(content)
    return found


def build_schedule(
    loaded: LoadedPipeline,
    path: str,
    choice: Choice | None,
    optimizer: Optimizer,
    steps: int | None,
    *,
    trial: bool = False,
    begun: bool = False,
) -> LRScheduler | None:
    """A schedule; a length that is left out becomes the `steps` of the stage, or of the run. `trial`,
    `begun`: of `try_schedules`.
    """
    if choice is None:
        return None
    chosen = ChoiceBuilder.from_key_path(loaded, path, choice)
    length = length_option_to_fill(chosen.name, chosen.options) if chosen.source == "torch" else None
    metric = choice.sibling_keys.get("metric")
    if metric and chosen.source == "torch":
        chosen.options.setdefault("mode", better_values(metric))
    if length is not None:
        if steps is None:
            text = f"{length} is left out, but the number of steps in an epoch of iterable data is not known"
            raise chosen.error(text, f"write {length}, or give the stage steps instead of epochs")
        chosen.options[length] = steps
    schedulers = torch.optim.lr_scheduler
    schedule = chosen.construct(schedulers, optimizer, LRScheduler, argument="optimizer")
    least = 0 if steps is None or begun else steps
    if isinstance(schedule, OneCycleLR) and schedule.total_steps < least:
        text = f"it ends after step {schedule.total_steps} of {steps}, and torch refuses to go on"
        raise chosen.error(text, "leave out total_steps, or epochs and steps_per_epoch")
    if not trial:
        return schedule
    given: list[Any] = [0.0] if metric else []
    try:
        inspect.signature(schedule.step).bind(*given)
    except TypeError as error:
        hint = "a schedule with metric: beside it gets that, any other no argument"
        raise chosen.error(f"its step(): {error}", hint) from None
    if chosen.source != "torch":
        return schedule  # its step may need what a step of training leaves, or what was measured
    try:
        with warnings.catch_warnings(action="ignore"):  # torch tells that the optimizer has taken no step
            schedule.step(*given)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise chosen.error(f"its step(): {error}") from None
    return schedule
