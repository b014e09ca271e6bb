"""The one rule for everything that is chosen: `name` or `name: {options}`."""

import functools
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ddprun.config import built_in_options, torch_signatures
from ddprun.config.built_in_options import parse_batch_key
from ddprun.config.faults import allowed_values, closest_match
from ddprun.config.torch_signatures import TorchKind
from ddprun.config.tree import SIBLING_KEYS
from ddprun.config.validation_errors import validate
from ddprun.options import CustomValidator, KeyPath, combine, expected, problem, unknown_name_error
from ddprun.plugins import HOOKS, SYNC_POLICIES, TRACKERS, PluginRegistry
from ddprun_hooks.config.options import BUILT_IN_HOOKS as HOOK_OPTIONS
from ddprun_hooks.config.options import parse_hook_spec
from ddprun_hooks.config.trust import read_trust_policy
from ddprun_hooks.errors import ImportPathError

_REDUCE_LR_ON_PLATEAU = "ReduceLROnPlateau"  # torch's schedule that goes by a metric

RESERVED_METRIC_NAMES = frozenset(
    ("event", "level", "time", "monotonic_us", "rank", "stage", "step", "loss", "self", "method_name")
)
"""What the event `evaluated` has besides metrics, and the names of structlog's own arguments."""


@dataclass(frozen=True)
class Choice:
    """One thing that the file chooses, with its options checked as far as that goes without importing it."""

    kind: str  # one of `CHOICE_KINDS`
    name: str  # a built-in's, torch's spelling of its class, an installed hook's, or the import path
    # Plain data. If there are `settings`, all defaults are filled in; else as the file gives them. Lists are
    # lists, but for torch's tuples.
    options: Mapping[str, Any]
    source: Literal["built-in", "torch", "dotted", "installed"]
    # The options as their model: of a built-in, and of a plug-in that `check` may import; else None.
    settings: BaseModel | None = field(default=None, compare=False, repr=False)
    sibling_keys: Mapping[str, Any] = field(default_factory=dict)  # of `SIBLING_KEYS`, what the file has

    def optimizers(self) -> list[str]:
        """Of an optimizer: its name, and that of the optimizer of others."""
        others = self.sibling_keys.get("others")
        return [self.name] if others is None else [self.name, others.name]

    def to_plain_data(self) -> Any:
        """The choice as a file would hold it: `name`, or `{name: options}` and what is beside it."""
        beside = {
            key: value.to_plain_data() if isinstance(value, Choice) else value
            for key, value in self.sibling_keys.items()
        }
        return {self.name: dict(self.options), **beside} if self.options or beside else self.name


@dataclass(frozen=True)
class ChoiceKind:
    name: str  # as a message calls it: `unknown hook "fp61"`
    dotted_description: str = ""  # what an import path must name, for messages; empty: the kind takes none
    built_in_option_models: Mapping[str, type[BaseModel]] = field(
        default_factory=dict
    )  # of built-ins that are no plug-ins
    torch_kind: TorchKind | None = None
    plugins: PluginRegistry | None = None  # plug-ins of this kind, built in and installed

    def built_in_names(self) -> list[str]:
        return [*self.built_in_option_models, *(self.plugins.built_in_names() if self.plugins else ())]

    def built_in_options_of(self, name: str) -> type[BaseModel] | None:
        """The options of what is built in under this name; None if nothing is."""
        if self.plugins is not None and name in self.plugins.built_in_names():
            return self.plugins.options_model(name)
        return self.built_in_option_models.get(name)

    def named_option_models(self) -> Iterator[tuple[str, type[BaseModel] | None, str]]:
        """What can be named: its name, its options (None: they may not be imported), and its source."""
        for name in self.built_in_names():
            yield name, self.built_in_options_of(name), "built-in"
        if self.torch_kind:
            for name in torch_signatures.offered_class_names(self.torch_kind):
                yield name, torch_signatures.torch_options_model(self.torch_kind, name), "torch"
        if self.plugins:
            for name, model in self.plugins.options_of_installed().items():
                yield name, model, "installed"

    def names(self) -> list[str]:
        """Every name without a dot that is known, as a file may write it."""
        found = self.built_in_names()
        if self.torch_kind:
            found += torch_signatures.offered_class_names(self.torch_kind)
        return found + list(self.plugins.installed_names() if self.plugins else ())

    def names_for_message(self) -> list[str]:
        names, dotted = self.names(), "an import path such as package.module.name"
        return [*names, *([f"or {dotted}" if names else dotted] if self.dotted_description else [])]


CHOICE_KINDS: dict[str, ChoiceKind] = {
    kind.name: kind
    for kind in (
        ChoiceKind(
            "model", "an nn.Module class or a function that returns a module", built_in_options.MODEL_OPTIONS
        ),
        ChoiceKind(
            "data", "a Dataset class or a function that returns a dataset", built_in_options.DATA_OPTIONS
        ),
        ChoiceKind(
            "loss",
            "a function of (output, target), or a module class whose forward takes them",
            built_in_options.LOSS_OPTIONS,
            "loss",
        ),
        ChoiceKind("optimizer", "an Optimizer class, called with the parameters first", {}, "optimizer"),
        ChoiceKind("schedule", "an LRScheduler class, called with the optimizer first", {}, "schedule"),
        ChoiceKind("sync", plugins=SYNC_POLICIES),
        ChoiceKind("hook", "a hook class or function", HOOK_OPTIONS, plugins=HOOKS),
        ChoiceKind(
            "mutate",
            "a function of (model) that changes its weights in place",
            built_in_options.MUTATION_OPTIONS,
        ),
        ChoiceKind(
            "update",
            "a function of (model, closure) that changes the model's weights in place or sets their grad, "
            "where closure() is the loss of the weights as they are",
            built_in_options.UPDATE_OPTIONS,
        ),
        ChoiceKind(
            "metric",
            "a function of (output, target), or with loss: model of (output, batch), that returns a number; "
            "or a class with update(output, target) and compute()",
            built_in_options.METRIC_OPTIONS,
        ),
        ChoiceKind("transform", "a function of (batch) that returns a batch, or a class of such objects"),
        ChoiceKind("collate", "a function of (samples) that returns a batch, or a class of such objects"),
        ChoiceKind(
            "sampler",
            "a Sampler class, or a class or function that yields the indices of an epoch; it is called with "
            "the data set, as `dataset` or as its first argument",
        ),
        ChoiceKind(
            "weight",
            "a function of (batch) that returns the weight of its mean loss: a number",
            built_in_options.WEIGHT_BY_OPTIONS,
        ),
        ChoiceKind("tracker", plugins=TRACKERS),
    )
}


@dataclass(frozen=True)
class ObjectSpec:
    """An object that the options of an import path ask for."""

    name: str  # its import path
    options: Mapping[str, Any] | None  # keyword arguments to make it with; None: it is passed on as it is
    key: str  # the key of the mapping that asks for it


def parse_object_spec(value: Any) -> ObjectSpec | None:
    """Read `{package.module.name: {options}}` or `{ref: package.module.name}`; None: it is a plain value."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((key, inside),) = value.items()
    if key == "ref" and isinstance(inside, str) and is_dotted_name(inside):
        return ObjectSpec(inside, None, key)
    if is_dotted_name(key) and (inside is None or isinstance(inside, Mapping)):
        return ObjectSpec(key, inside or {}, key)
    return None


def is_dotted_name(name: str) -> bool:
    """Whether a word may be an import path such as `package.module.name`."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _untrusted_object_errors(value: Any, at: KeyPath) -> Iterator[ValidationError]:
    """Objects in the options of an import path that `DDPRUN_TRUSTED` does not allow."""
    if wanted := parse_object_spec(value):
        at = (*at, wanted.key)
        make_error = functools.partial(problem, at=at, on_key=wanted.options is not None)
        try:
            _require_trusted("", wanted.name, f'"{wanted.name}"', make_error)
        except ValidationError as error:
            yield error
        value = wanted.options
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _untrusted_object_errors(item, (*at, key))


def parse_choice(kind_name: str, value: Any, beside: Sequence[str] = ()) -> Choice:
    """Read `name` or `{name: options}`; raises a ValidationError, which `errors` words. `beside`: keys that
    there may be beside the name.
    """
    kind = CHOICE_KINDS[kind_name]
    if isinstance(value, Choice):
        return value
    if isinstance(value, dict) and len(value) > 1:
        shown, (first, *others) = ", ".join(f'"{key}"' for key in value), value
        hint = f'keep one, or indent {", ".join(others)} further, under "{first}"'
        hint += f"; beside it there may be {', '.join(beside)}" if beside else ""
        text = f"expected one {kind.name}, got {len(value)}: {shown}"
        raise problem(text, hint, at=others[0], on_key=True)
    name, options = parse_hook_spec(value, kind.names_for_message)
    make_error = problem if isinstance(value, str) else functools.partial(problem, at=name, on_key=True)
    return _resolve_choice(kind, name, options, make_error)


def parse_schedule(value: Any) -> Choice:
    """Read a schedule, with `over: run` or `metric` beside its name, or without."""
    if isinstance(value, dict) and value.get("over", "run") not in ("stage", "run"):
        raise unknown_name_error("span of a schedule", str(value["over"]), ("stage", "run"), at="over")
    choice = _parse_with_sibling_keys("schedule", value)
    beside = dict(choice.sibling_keys)
    if beside.get("over") == "stage":
        del beside["over"]
    if choice.name == _REDUCE_LR_ON_PLATEAU:
        beside.setdefault("metric", "loss")
    if not isinstance(beside.get("metric", "loss"), str):
        raise expected("the name of a metric", "write loss, or a metric of the stage's evaluate", at="metric")
    if "metric" in beside and choice.source == "torch" and choice.name != _REDUCE_LR_ON_PLATEAU:
        raise problem(
            f"{choice.name} goes by steps", f"remove it, or choose {_REDUCE_LR_ON_PLATEAU}", at="metric"
        )
    if {"metric", "over"} <= beside.keys():
        raise problem("a schedule that goes by a metric spans its stage", "remove it", at="over", on_key=True)
    return replace(choice, sibling_keys=beside)


def parse_optimizer(value: Any) -> Choice:
    """Read an optimizer, with `closure: true` or the optimizer of `others` beside its name, or without."""
    choice = _parse_with_sibling_keys("optimizer", value)
    if choice.sibling_keys.get("closure", True) is not True:
        raise expected("true", "or leave it out", at="closure", got=choice.sibling_keys["closure"])
    if "others" not in choice.sibling_keys:
        return choice
    if "closure" in choice.sibling_keys:
        raise problem("two optimizers take no closure", "remove it, or others", at="closure", on_key=True)
    try:
        others = parse_choice("optimizer", choice.sibling_keys["others"])
    except ValidationError as error:
        raise combine([error], at=("others",)) from None
    return replace(choice, sibling_keys={"others": others})


def parse_metric(value: Any) -> Choice:
    """Read a metric, with `name`, and `output` and `target` beside it, or without."""
    choice = _parse_with_sibling_keys("metric", value)
    if choice.name == "perplexity" and choice.sibling_keys:
        raise problem("perplexity is of the loss", "remove it", at=min(choice.sibling_keys), on_key=True)
    name, parts = metric_name(choice), {"output", "target"} & choice.sibling_keys.keys()
    if not (isinstance(name, str) and name and name.isprintable()) or name in RESERVED_METRIC_NAMES:
        hint = "write another, as in {mine.step: {}, name: my_step}"
        raise expected("a name for the metric that is not a field of its record", hint, at="name", got=name)
    if len(parts) == 1:
        missing = min({"output", "target"} - parts)
        raise problem(f'it has no "{missing}"', f"write {missing}, too: a key", at=min(parts), on_key=True)
    for key in parts:
        parse_batch_key(choice.sibling_keys[key], key)
    return choice


def metric_name(metric: Choice) -> str:
    """What a metric is called: by `name` beside it, else the last part of its import path."""
    name: str = metric.sibling_keys.get("name", metric.name.rpartition(".")[2])
    return name


def _parse_with_sibling_keys(kind: str, value: Any) -> Choice:
    """`parse_choice` of a mapping that may have more keys than the choice's name."""
    if not isinstance(value, dict):
        return parse_choice(kind, value)
    beside = {key: item for key, item in value.items() if key in SIBLING_KEYS[kind]}
    named = {key: item for key, item in value.items() if key not in beside}
    if beside and not named:
        raise expected(f"one {kind} beside {min(beside)}", "name one, too")
    return replace(parse_choice(kind, named, SIBLING_KEYS[kind]), sibling_keys=beside)


def choice_validator(
    kind: str, parse: Callable[[Any], Any] | None = None, definition: str = ""
) -> CustomValidator:
    """For `Annotated[Choice, …]`: a choice of this kind, or what `parse` reads and the schema calls so."""
    read = parse or functools.partial(parse_choice, kind)
    return CustomValidator(read, definition or kind)


_ErrorFactory = Callable[..., ValidationError]  # `problem` at the place of a choice's name


def _resolve_choice(
    kind: ChoiceKind, name: str, options: dict[str, Any], make_error: _ErrorFactory
) -> Choice:
    if "." in name:
        if not kind.dotted_description:
            raise make_error(f'"{name}" is not a built-in {kind.name}', allowed_values(kind.names()))
        if not is_dotted_name(name):
            raise make_error(f'"{name}" is not an import path', "write package.module.name")
        _require_trusted(kind.name, name, f'"{name}"', make_error)
        if errors := list(_untrusted_object_errors(options, (name,))):
            raise combine(errors)
        return Choice(kind.name, name, options, "dotted")
    if model := kind.built_in_options_of(name):
        settings = validate(model, options, name, owner=name, context=HOOK_VALIDATION_CONTEXT)
        return Choice(kind.name, name, settings.model_dump(mode="json"), "built-in", settings)
    if kind.torch_kind and (found := torch_signatures.find_class_name(kind.torch_kind, name)):
        if reason := torch_signatures.why_not_offered(kind.torch_kind, found):
            raise make_error(f"{found} is not offered: {reason}")
        checked = validate(
            torch_signatures.torch_options_model(kind.torch_kind, found), options, name, owner=name
        )
        return Choice(kind.name, found, {key: getattr(checked, key) for key in options}, "torch")
    if kind.plugins and name in kind.plugins.installed_names():
        if not kind.plugins.base_class_name:
            _require_trusted_plugin(kind.plugins, name, make_error)
            return Choice(kind.name, name, options, "installed")
        model = trusted_options_model(kind.plugins, name, make_error)
        settings = validate(model, options, name, owner=name)
        return Choice(kind.name, name, settings.model_dump(mode="json"), "installed", settings)
    text = f'unknown {kind.name} "{name}"'
    raise make_error(text, allowed_values(kind.names_for_message()), closest_match(name, kind.names()))


def _require_trusted(kind: str, name: str, shown: str, make_error: _ErrorFactory) -> None:
    """Refuse a written name that `DDPRUN_TRUSTED` does not allow; a run judges the imported object, too."""
    trust = read_trust_policy()
    if reason := trust.why_not_importable(name, kind):
        raise make_error(f"{shown} may not be imported: {reason}", trust.allowed_message())


def _require_trusted_plugin(plugins: PluginRegistry, name: str, make_error: _ErrorFactory) -> None:
    """Refuse an installed plug-in that `DDPRUN_TRUSTED` does not allow; nothing is imported."""
    for target in () if name in plugins.built_in_names() else plugins.import_paths(name):
        shown = f'the installed {plugins.kind} "{name}" ({target})'
        _require_trusted(plugins.kind, target, shown, make_error)


def trusted_options_model(plugins: PluginRegistry, name: str, make_error: _ErrorFactory) -> type[BaseModel]:
    """Import a plug-in that is built in or trusted, for its options; raises a ValidationError."""
    _require_trusted_plugin(plugins, name, make_error)
    try:
        return plugins.options_model(name)
    except ImportPathError as error:
        raise make_error(str(error)) from None


def _read_hook(value: Any) -> tuple[str, Mapping[str, Any]]:
    hook = parse_choice("hook", value)
    return hook.name, hook.options


HOOK_VALIDATION_CONTEXT: dict[str, Any] = {"read_hook": _read_hook}
"""Validation context for the options of hooks: how to read a hook of a stack inside a hook's options."""
