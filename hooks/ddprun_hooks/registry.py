"""From a hook's name and options to the hook: built in, installed (entry point) or dotted."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from ddprun_hooks.dotted import import_dotted
from ddprun_hooks.errors import DottedNameError, HookSetupError
from ddprun_hooks.hook import FunctionHook, Hook
from ddprun_hooks.options import BUILT_IN, ENTRY_POINT_GROUP, HookSpec, parse_spec, settings_of
from ddprun_hooks.stack import Stack
from ddprun_hooks.trust import TrustSettingError, UntrustedError, Wanted

_WANTED = Wanted("a hook is a Hook class, a function that returns one, or an async function", Hook)


def make_hook(name: str, options: Mapping[str, Any] | None = None) -> Hook:
    """Make one hook.

    Args:
        name: a built-in name, a name that an installed package adds under the entry point group
            `ddprun.hooks`, or a dotted name of a class, a factory or an `async def hook(payload, link)`.
        options: its keyword arguments.

    Raises:
        HookSetupError: no such hook, wrong options, or not a hook.
    """
    options = dict(options or {})
    if name in BUILT_IN:
        try:
            settings = settings_of(name, options)
        except ValueError as error:
            raise HookSetupError(str(error)) from None
        module, _, factory = settings.implementation.partition(":")
        made = getattr(importlib.import_module(module), factory)(**settings.model_dump())
        assert isinstance(made, Hook)
        return made
    try:
        target = import_dotted(name, _WANTED) if "." in name else _installed(name)
    except UntrustedError as error:
        raise HookSetupError(f"{error}; {error.allowed}") from None
    except (DottedNameError, TrustSettingError) as error:
        raise HookSetupError(str(error)) from None
    return _from_target(name, target, options)


def make_stack(specs: Sequence[HookSpec]) -> Stack:
    """Make a stack from a list such as `["fp16", {"mylab.hooks.Mine": {"strength": 2}}]`."""
    named: list[tuple[str, Hook]] = []
    for spec in specs:
        try:
            name, options = parse_spec(spec)
        except ValueError as error:
            raise HookSetupError(str(error)) from None
        named.append((name, make_hook(name, options)))
    return Stack(named, described=repr(list(specs)))


def installed_names() -> list[str]:
    """Names that installed packages add; nothing is imported."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def _installed(name: str) -> Any:
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not points:
        known = ", ".join([*BUILT_IN, *installed_names()])
        raise HookSetupError(f'there is no hook "{name}"; known are {known}, or give a dotted name')
    if len({point.value for point in points}) > 1:
        sources = " and ".join(point.value for point in points)
        raise HookSetupError(f'the hook name "{name}" is claimed twice, by {sources}; use the dotted name')
    try:
        return import_dotted(f"{points[0].module}.{points[0].attr}", _WANTED)
    except UntrustedError:
        raise
    except (ImportError, DottedNameError) as error:
        raise HookSetupError(
            f'the installed hook "{name}" ({points[0].value}) cannot be imported: {error}'
        ) from error


def _from_target(name: str, target: Any, options: dict[str, Any]) -> Hook:
    if inspect.iscoroutinefunction(target):
        if options:
            raise HookSetupError(f'"{name}" is a plain function and takes no options')
        return FunctionHook(target)
    if not callable(target):
        raise HookSetupError(
            f'"{name}" is {type(target).__name__}, not a hook class, factory or async function'
        )
    made = _call(name, target, options)
    if not isinstance(made, Hook):
        raise HookSetupError(f'"{name}" makes {type(made).__name__}, which is not a ddprun_hooks.Hook')
    return made


def _call(name: str, target: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        inspect.signature(target).bind(**options)
    except TypeError as error:
        raise HookSetupError(f'options of hook "{name}": {error}') from None
    except ValueError:
        pass  # a callable without a signature (written in C) tells when it is called
    return target(**options)
