"""The one rule for everything that is chosen: `name` or `name: {options}`."""

import functools
import keyword
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ddprun.config import options as built_in
from ddprun.config import signatures, sources
from ddprun.config.errors import validate
from ddprun.config.faults import allowed_values, suggest
from ddprun.config.signatures import TorchKind
from ddprun.options import KeyPath, Validated, combine, expected, problem, unknown
from ddprun.plugins import HOOKS, SYNC, TRACKERS, Plugins, options_of
from ddprun_hooks.config.options import BUILT_IN as HOOK_OPTIONS
from ddprun_hooks.config.options import parse_spec
from ddprun_hooks.config.trust import IN_FOLDER, METHOD, NO_METHOD, takes_method, trust
from ddprun_hooks.errors import DottedNameError

FOLDER: ContextVar[Path | None] = ContextVar("FOLDER", default=None)
"""Of the pipeline file that is being read; None while there is none."""


@dataclass(frozen=True)
class Choice:
    """One thing that the file chooses, with its options checked as far as that goes without importing it."""

    kind: str
    """One of `KINDS`."""

    name: str
    """The built-in's name, torch's spelling of its class, the installed hook's name, or the dotted name."""

    options: Mapping[str, Any]
    """Those with `settings` have every default filled in, others are as the file gives them. Lists are lists,
    except that torch's tuples are tuples."""

    source: Literal["built-in", "torch", "dotted", "installed"]
    settings: BaseModel | None = field(default=None, compare=False, repr=False)
    """The options as their model: of a built-in, and of a plug-in that `check` may import; else None."""

    def plain(self) -> Any:
        """The choice as a file would hold it: `name`, or `{name: options}`."""
        return {self.name: dict(self.options)} if self.options else self.name


@dataclass(frozen=True)
class RunSchedule(Choice):
    """A schedule of the whole run, not of each stage: `{name: {options}, over: run}`."""

    def plain(self) -> Any:
        """As a file would hold it."""
        return {self.name: dict(self.options), "over": "run"}


@dataclass(frozen=True)
class ChoiceKind:
    """A family of choices."""

    name: str
    """As a message calls it: `unknown hook "fp61"`."""

    options: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Of the built-in ones, unless they are plug-ins."""

    torch: TorchKind | None = None
    dotted: str = ""
    """What a dotted name must stand for; empty if none is taken."""

    plugins: Plugins | None = None
    """What is found by a folder of modules and a group of entry points."""

    @property
    def built_in(self) -> Mapping[str, type[BaseModel]]:
        """The options of everything that is built in."""
        if self.plugins is None:
            return self.options
        return {**self.options, **{name: self.plugins.options(name) for name in self.plugins.built_in()}}

    def names(self) -> list[str]:
        """Every name without a dot that is known."""
        found = list(self.built_in)
        if self.torch == "loss":
            found += [signatures.functional_name(name) for name in signatures.names("loss")]
        elif self.torch:
            found += signatures.names(self.torch)
        return found + list(self.plugins.installed() if self.plugins else ())

    def allowed(self) -> list[str]:
        """What a message lists."""
        names, dotted = self.names(), "a dotted name such as package.module.name"
        return [*names, *([f"or {dotted}" if names else dotted] if self.dotted else [])]


KINDS: dict[str, ChoiceKind] = {
    kind.name: kind
    for kind in (
        ChoiceKind("model", built_in.MODELS, dotted="an nn.Module class or a function that returns a module"),
        ChoiceKind("data", built_in.DATA, dotted="a Dataset class or a function that returns a dataset"),
        ChoiceKind(
            "loss",
            built_in.LOSSES,
            "loss",
            "a function of (output, target), or a module class with such a forward",
        ),
        ChoiceKind("optimizer", {}, "optimizer", "an Optimizer class, called with the parameters first"),
        ChoiceKind("schedule", {}, "schedule", "an LRScheduler class, called with the optimizer first"),
        ChoiceKind("sync", plugins=SYNC),
        ChoiceKind("hook", HOOK_OPTIONS, dotted="a hook class or function", plugins=HOOKS),
        ChoiceKind(
            "mutate", built_in.MUTATIONS, dotted="a function of (model) that changes its weights in place"
        ),
        ChoiceKind(
            "update",
            built_in.UPDATES,
            dotted="a function of (model, closure) that changes the model's weights in place or sets their "
            "grad, where closure() is the loss of the weights as they are",
        ),
        ChoiceKind(
            "metric",
            built_in.METRICS,
            dotted="a function of (output, target), or with loss: model of (output, batch), that returns a "
            "number; or a class with update(output, target) and compute()",
        ),
        ChoiceKind(
            "collate", dotted="a function of (samples) that returns a batch, or a class of such objects"
        ),
        ChoiceKind(
            "sampler",
            dotted="a Sampler class, or a class or function that gives the indices of an epoch; it is called "
            "with the data set, as `dataset` or as its first argument",
        ),
        ChoiceKind(
            "weight",
            built_in.WEIGHTS,
            dotted="a function of (batch) that returns how much its mean loss counts: a number",
        ),
        ChoiceKind("tracker", plugins=TRACKERS),
    )
}


@dataclass(frozen=True)
class ObjectRef:
    """An object that the options of a dotted name ask for."""

    name: str
    """Its dotted name."""

    options: Mapping[str, Any] | None
    """The keyword arguments with which it is made; None: it is passed on as it is."""

    step: str
    """The key of the mapping that asks for it."""


def object_ref(value: Any) -> ObjectRef | None:
    """Read `{package.module.name: {options}}` or `{ref: package.module.name}`; None: it is a plain value."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((key, inside),) = value.items()
    if key == "ref" and isinstance(inside, str) and _is_dotted(inside):
        return ObjectRef(inside, None, key)
    if _is_dotted(key) and (inside is None or isinstance(inside, Mapping)):
        return ObjectRef(key, inside or {}, key)
    return None


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _refused_inside(value: Any, at: KeyPath) -> Iterator[ValidationError]:
    """Objects in the options of a dotted name that `DDPRUN_TRUSTED` does not allow."""
    if wanted := object_ref(value):
        at = (*at, wanted.step)
        refuse = functools.partial(problem, at=at, on_key=wanted.options is not None)
        try:
            _admit("", wanted.name, f'"{wanted.name}"', refuse)
        except ValidationError as error:
            yield error
        value = wanted.options
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _refused_inside(item, (*at, key))


def choose(kind_name: str, value: Any) -> Choice:
    """Read `name` or `{name: options}`.

    Raises:
        pydantic.ValidationError: what is wrong, for `errors` to word.
    """
    kind = KINDS[kind_name]
    if isinstance(value, Choice):
        return value
    if isinstance(value, dict) and len(value) > 1:
        raise _two_choices(kind, list(value))
    name, options = parse_spec(value, kind.allowed)
    refuse = problem if isinstance(value, str) else functools.partial(problem, at=name, on_key=True)
    return _resolve(kind, name, options, refuse)


def choose_schedule(value: Any) -> Choice:
    """Read a schedule as `choose` does, with `over: run` beside its name, or without."""
    if not isinstance(value, dict) or "over" not in value:
        return choose("schedule", value)
    named = {key: item for key, item in value.items() if key != "over"}
    if not named:
        raise expected("a schedule beside over", "write {CosineAnnealingLR: {}, over: run}")
    if value["over"] not in ("stage", "run"):
        raise unknown("span of a schedule", str(value["over"]), ("stage", "run"), at="over")
    choice = choose("schedule", named)
    if value["over"] == "stage":
        return choice
    return RunSchedule(choice.kind, choice.name, choice.options, choice.source, choice.settings)


def one_of(kind: str) -> Validated:
    """For `Annotated[Choice, …]`: a choice of this kind."""
    return Validated(functools.partial(choose, kind), kind, KINDS[kind].allowed)


_Refuse = Callable[..., ValidationError]
"""`problem` at the place of a choice's name."""


def _resolve(kind: ChoiceKind, name: str, options: dict[str, Any], refuse: _Refuse) -> Choice:
    if "." in name:
        if not kind.dotted:
            raise refuse(f'"{name}" is not a built-in {kind.name}', allowed_values(kind.names()))
        if not _is_dotted(name):
            raise refuse(f'"{name}" is not a dotted name', "write package.module.name")
        _admit(kind.name, name, f'"{name}"', refuse)
        if errors := list(_refused_inside(options, (name,))):
            raise combine(errors)
        return Choice(kind.name, name, options, "dotted")
    if model := kind.built_in.get(name):
        settings = validate(model, options, name, owner=name, context=CONTEXT)
        return Choice(kind.name, name, settings.model_dump(mode="json"), "built-in", settings)
    if kind.torch and (found := signatures.find(kind.torch, name)):
        if reason := signatures.refusal(kind.torch, found):
            raise refuse(f"{found} is not offered: {reason}")
        checked = validate(signatures.options_model(kind.torch, found), options, name, owner=name)
        return Choice(kind.name, found, {key: getattr(checked, key) for key in options}, "torch")
    if kind.plugins and name in kind.plugins.installed():
        if not kind.plugins.base:
            _admit_installed(kind.plugins, name, refuse)
            return Choice(kind.name, name, options, "installed")
        model = options_of(installed_class(kind.plugins, name, refuse))
        settings = validate(model, options, name, owner=name)
        return Choice(kind.name, name, settings.model_dump(mode="json"), "installed", settings)
    if kind.torch and signatures.torch_folder() is None:
        text = f'unknown {kind.name} "{name}": torch is not installed, so its names are unknown'
        raise refuse(text, "install torch")
    near = suggest(name, kind.names()) or (
        suggest(name, signatures.names(kind.torch)) if kind.torch else None
    )
    raise refuse(f'unknown {kind.name} "{name}"', allowed_values(kind.allowed()), near)


def _admit(kind: str, name: str, shown: str, refuse: _Refuse) -> None:
    """Refuse what `DDPRUN_TRUSTED` does not allow, by its name and by what source code says of it.

    A run judges what the name leads to.
    """
    limit, folder = trust(), FOLDER.get()
    if not limit.limited:
        return
    refused = f"{shown} may not be imported"
    if reason := limit.name_refusal(name, kind):
        raise refuse(f"{refused}: {reason}", limit.allowed())
    root = name.partition(".")[0]
    if sources.only_in_folder(root, limit, folder):
        raise refuse(
            f'{refused}: "{root}" is not installed, and the pipeline\'s folder is not searched for it',
            f"{limit.allowed()}, and {IN_FOLDER}{root} would name the one in the folder",
        )
    found = sources.origins(name, limit, folder)
    reasons = [limit.refusal(origin.name, kind) for origin in found]
    if found and all(reasons):
        raise refuse(f"{shown} is {found[0].name}: {reasons[0]}", limit.allowed())
    if found and all(origin.method for origin in found) and not takes_method(kind):
        raise refuse(f"{shown} {METHOD}", NO_METHOD)


def _admit_installed(plugins: Plugins, name: str, refuse: _Refuse) -> None:
    """Refuse an installed plug-in that `DDPRUN_TRUSTED` does not allow; nothing is imported."""
    for target in plugins.targets(name):
        _admit(plugins.kind, target, f'the installed {plugins.kind} "{name}" ({target})', refuse)


def installed_class(plugins: Plugins, name: str, refuse: _Refuse) -> type[Any]:
    """Import an installed plug-in, once `DDPRUN_TRUSTED` has allowed it.

    Raises:
        pydantic.ValidationError: it is not trusted, or cannot be imported.
    """
    _admit_installed(plugins, name, refuse)
    try:
        return plugins.load(name)
    except DottedNameError as error:
        raise refuse(str(error)) from None


def _read_hook(value: Any) -> tuple[str, Mapping[str, Any]]:
    hook = choose("hook", value)
    return hook.name, hook.options


CONTEXT: dict[str, Any] = {"read_hook": _read_hook}
"""What the options of hooks ask for: how a hook of a stack inside one is read."""


def _two_choices(kind: ChoiceKind, keys: list[str]) -> ValidationError:
    shown = ", ".join(f'"{key}"' for key in keys)
    first, *others = keys
    hint = "keep one"
    if set(others) <= _option_names(kind, first):
        hint = f'indent {", ".join(others)} further, under "{first}"'
    text = f"expected one {kind.name}, got {len(keys)}: {shown}"
    return problem(text, hint, at=keys[1], on_key=True)


def _option_names(kind: ChoiceKind, name: str) -> set[str]:
    if model := kind.built_in.get(name):
        return set(model.model_fields)
    if kind.torch and (found := signatures.find(kind.torch, name)):
        return {parameter.name for parameter in signatures.signature(kind.torch, found).parameters}
    return set()
