"""The one rule for everything that is chosen: `name` or `name: {options}`."""

import functools
import keyword
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ddprun.config import options as built_in
from ddprun.config import signatures, sources
from ddprun.config.faults import listing, suggest
from ddprun.config.problems import located, validate
from ddprun.config.signatures import TorchKind
from ddprun.options import mismatch, problem, within
from ddprun.plugins import HOOKS, SYNC, TRACKERS, P, Plugins, options_of
from ddprun_hooks.config.options import BUILT_IN as HOOK_OPTIONS
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.config.trust import IN_FOLDER, METHOD, NO_METHOD, trust
from ddprun_hooks.errors import DottedNameError

Origin = Literal["built-in", "torch", "dotted", "installed"]

FOLDER: ContextVar[Path | None] = ContextVar("FOLDER", default=None)
"""Of the pipeline file that is being read; None while there is none."""


@dataclass(frozen=True)
class Choice:
    """One thing that the file chooses, with its options checked as far as that goes without importing it."""

    kind: str
    """`model`, `data`, `loss`, `optimizer`, `schedule`, `sync`, `hook`, `mutate`, `update`, `metric` or
    `tracker`."""

    name: str
    """The built-in's name, torch's spelling of its class, the installed hook's name, or the dotted name."""

    options: Mapping[str, Any]
    """Those with `settings` have every default filled in, others are as the file gives them. Lists are lists,
    except that torch's tuples are tuples."""

    source: Origin
    settings: BaseModel | None = field(default=None, compare=False, repr=False)
    """The options as their model: of a built-in, and of a plug-in that `check` may import; else None."""

    def plain(self) -> Any:
        """The choice as a file would hold it: `name`, or `{name: options}`."""
        return {self.name: dict(self.options)} if self.options else self.name


@dataclass(frozen=True)
class Kind:
    """A family of choices."""

    name: str
    """As a message calls it: `unknown hook "fp61"`."""

    options: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Of the built-in ones, unless they are plug-ins."""

    torch: TorchKind | None = None
    dotted: str = ""
    """What a dotted name must stand for; empty if none is taken."""

    plugins: Plugins[Any] | None = None
    """What is found by a folder of modules and a group of entry points."""

    @property
    def built_in(self) -> Mapping[str, type[BaseModel]]:
        """The options of everything that is built in."""
        found = self.plugins.built_in() if self.plugins else ()
        return {**self.options, **{name: self.plugins.options(name) for name in found if self.plugins}}

    @property
    def installed(self) -> tuple[str, ...]:
        """Names that installed packages add."""
        return self.plugins.installed() if self.plugins else ()

    def options_of_installed(self) -> dict[str, type[BaseModel] | None]:
        """Of everything that installed packages add; None where a run alone may import it."""
        return self.plugins.options_of_installed() if self.plugins else {}


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("model", built_in.MODELS, dotted="an nn.Module class or a function that returns a module"),
        Kind("data", built_in.DATA, dotted="a Dataset class or a function that returns a dataset"),
        Kind(
            "loss",
            built_in.LOSSES,
            "loss",
            "a function of (output, target), or a module class with such a forward",
        ),
        Kind("optimizer", {}, "optimizer", "an Optimizer class, called with the parameters first"),
        Kind("schedule", {}, "schedule", "an LRScheduler class, called with the optimizer first"),
        Kind("sync", plugins=SYNC),
        Kind("hook", HOOK_OPTIONS, dotted="a hook class or function", plugins=HOOKS),
        Kind("mutate", built_in.MUTATIONS, dotted="a function of (model) that changes its weights in place"),
        Kind(
            "update",
            built_in.UPDATES,
            dotted="a function of (model, score) that changes the model's weights in place or sets their "
            "grad, where score() is the loss of the weights as they are",
        ),
        Kind("metric", built_in.METRICS, dotted="a function of (output, target) that returns a number"),
        Kind("tracker", plugins=TRACKERS),
    )
}


def names(kind: Kind) -> list[str]:
    """Every name without a dot that the kind knows."""
    found = list(kind.built_in)
    if kind.torch == "loss":
        found += [signatures.functional_name(name) for name in signatures.names("loss")]
    elif kind.torch:
        found += signatures.names(kind.torch)
    return [*found, *kind.installed]


def choose(kind_name: str, value: Any) -> Choice:
    """Read `name` or `{name: options}`.

    Raises:
        PydanticCustomError, pydantic.ValidationError: what is wrong, for `sentences` to tell.
    """
    kind = KINDS[kind_name]
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        return _resolve(kind, value, {}, ())
    if not isinstance(value, dict) or not value:
        raise mismatch("a name, or `name: {options}`", listing(_allowed(kind)))
    if len(value) > 1:
        raise _two_choices(kind, list(value))
    ((name, options),) = value.items()
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise within(mismatch(f"a mapping of {name}'s options"), name)
    return _resolve(kind, name, options, (name,))


@dataclass(frozen=True)
class OneOf:
    """Marks a field of a pydantic model as a choice of a kind."""

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by `choose`."""
        return core_schema.no_info_plain_validator_function(functools.partial(choose, self.kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Name the kind's definition, which `json_schema` writes out."""
        return {"definition": self.kind}


def _resolve(kind: Kind, name: str, options: dict[str, Any], path: tuple[str, ...]) -> Choice:
    """The choice; `path` is the name if it stands as a key."""
    where: Literal["value", "key"] = "key" if path else "value"
    if "." in name:
        if not kind.dotted:
            raise within(
                problem(f'"{name}" is no built-in {kind.name}', listing(names(kind)), where=where), *path
            )
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            text = f'"{name}" is no dotted name'
            raise within(problem(text, "write package.module.name", where=where), *path)
        _admit(kind.name, name, f'"{name}"', path, where)
        return Choice(kind.name, name, options, "dotted")
    if model := kind.built_in.get(name):
        settings = validate(model, options, name, owner=name, context=CONTEXT)
        return Choice(kind.name, name, _plain(settings), "built-in", settings)
    if kind.torch and (found := signatures.find(kind.torch, name)):
        if reason := signatures.refusal(kind.torch, found):
            raise within(problem(f"{found} is not offered: {reason}", where=where), *path)
        checked = validate(signatures.options_model(kind.torch, found), options, name, owner=name)
        given = {key: getattr(checked, key) for key in options}
        return Choice(kind.name, found, given, "torch")
    if kind.plugins and name in kind.installed:
        if not kind.plugins.base:
            _admit_targets(kind.plugins, name, path, where)
            return Choice(kind.name, name, options, "installed")
        model = options_of(installed_class(kind.plugins, name, path, where))
        settings = validate(model, options, name, owner=name)
        return Choice(kind.name, name, _plain(settings), "installed", settings)
    raise _refused(kind, name, path, where)


def _admit(kind: str, name: str, shown: str, path: tuple[str, ...], where: Literal["value", "key"]) -> None:
    """Refuse what `DDPRUN_TRUSTED` does not allow, by its name and by what source code says of it.

    A run judges what the name leads to.
    """
    limit, folder = trust(), FOLDER.get()
    if not limit.limited:
        return
    refused = f"{shown} may not be imported"
    if reason := limit.name_refusal(name, kind):
        raise within(problem(f"{refused}: {reason}", limit.allowed(), where=where), *path)
    root = name.partition(".")[0]
    if sources.only_in_folder(root, limit, folder):
        raise within(
            problem(
                f'{refused}: "{root}" is not installed, and the pipeline\'s folder is not searched for it',
                f"{limit.allowed()}, and {IN_FOLDER}{root} would name the one in the folder",
                where=where,
            ),
            *path,
        )
    found = sources.origins(name, limit, folder)
    reasons = [limit.refusal(origin.name, kind) for origin in found]
    if found and all(reasons):
        text = f"{shown} is {found[0].name}: {reasons[0]}"
        raise within(problem(text, limit.allowed(), where=where), *path)
    if found and all(origin.method for origin in found):
        raise within(problem(f"{shown} {METHOD}", NO_METHOD, where=where), *path)


def _admit_targets(
    plugins: Plugins[Any], name: str, path: tuple[str, ...], where: Literal["value", "key"]
) -> None:
    """Refuse an installed plug-in that `DDPRUN_TRUSTED` does not allow; nothing is imported."""
    for target in plugins.targets(name):
        _admit(plugins.kind, target, f'the installed {plugins.kind} "{name}" ({target})', path, where)


def installed_class(
    plugins: Plugins[P], name: str, path: tuple[str, ...] = (), where: Literal["value", "key"] = "key"
) -> type[P]:
    """Import an installed plug-in, once `DDPRUN_TRUSTED` has allowed it.

    Args:
        plugins: of its kind.
        name: one of `plugins.installed()`.
        path: below the value that is being validated.
        where: whether its name is a key there.

    Raises:
        pydantic.ValidationError: it is not trusted, or cannot be imported.
    """
    _admit_targets(plugins, name, path, where)
    try:
        return plugins.load(name)
    except DottedNameError as error:
        raise within(problem(str(error), where=where), *path) from None


def _read_stack(value: Any) -> tuple[HookSpec, ...]:
    """The hooks of one leg of `hierarchical`, each with its defaults filled in."""
    if not isinstance(value, list | tuple):
        raise mismatch("a list")
    read: list[HookSpec] = []
    faults: list[InitErrorDetails] = []
    for place, item in enumerate(value):
        try:
            read.append(choose("hook", item).plain())
        except PydanticCustomError as error:
            faults.append(InitErrorDetails(type=error, loc=(place,), input=item))
        except ValidationError as error:
            faults += located(error, place)
    if faults:
        raise ValidationError.from_exception_data("hooks", faults)
    return tuple(read)


CONTEXT: dict[str, Any] = {"stack": _read_stack}
"""What the options of hooks ask for: how a stack inside one is read."""


def _refused(kind: Kind, name: str, path: tuple[str, ...], where: Literal["value", "key"]) -> ValidationError:
    if kind.torch and signatures.torch_folder() is None:
        text = f'unknown {kind.name} "{name}": torch is not installed, so its names are unknown'
        return within(problem(text, "install torch", where=where), *path)
    near = suggest(name, names(kind)) or (suggest(name, signatures.names(kind.torch)) if kind.torch else None)
    return within(problem(f'unknown {kind.name} "{name}"', listing(_allowed(kind)), near, where), *path)


def _allowed(kind: Kind) -> list[str]:
    return names(kind) + (["or a dotted name such as package.module.name"] if kind.dotted else [])


def _two_choices(kind: Kind, keys: list[str]) -> Exception:
    shown = ", ".join(f'"{key}"' for key in keys)
    first, *others = keys
    hint = "keep one"
    if all(other in _option_names(kind, first) for other in others):
        hint = f'indent {", ".join(others)} further, under "{first}"'
    return within(problem(f"expected one {kind.name}, got {len(keys)}: {shown}", hint, where="key"), keys[1])


def _option_names(kind: Kind, name: str) -> set[str]:
    if model := kind.built_in.get(name):
        return set(model.model_fields)
    if kind.torch and (found := signatures.find(kind.torch, name)):
        return {parameter.name for parameter in signatures.signature(kind.torch, found).parameters}
    return set()


def _plain(settings: BaseModel) -> dict[str, Any]:
    """Checked options as plain data."""
    return settings.model_dump(mode="json")
