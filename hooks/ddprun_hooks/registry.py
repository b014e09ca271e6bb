"""From a hook's name and options to the hook: built in, installed (entry point) or dotted."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ddprun_hooks.config import grammar
from ddprun_hooks.config.import_path import import_entry_point, import_trusted
from ddprun_hooks.config.messages import describe_value, format_option_errors
from ddprun_hooks.config.options import BUILT_IN_HOOKS, ENTRY_POINT_GROUP, HookSpec, validate_hook_spec
from ddprun_hooks.config.trust import ExpectedObject, TrustSettingError, UntrustedError
from ddprun_hooks.ddp_comm_hook import DdpCommHook
from ddprun_hooks.errors import HookSetupError, ImportPathError
from ddprun_hooks.hook import FunctionHook, Hook, not_async_message
from ddprun_hooks.stack import Stack

# What `make_stack` and `register` take for a hook: as in a pipeline file, or the thing itself.
AnyHook = HookSpec | Hook | Callable[..., Any]

_ACCEPTED_HOOK_FORMS = (
    "a hook is a name, {name: {options}}, a ddprun_hooks.Hook, or an async function of payload and comm"
)
_EXPECTED_HOOK = ExpectedObject(
    "a hook is a Hook class, a function that returns one, or an async function", Hook, kind="hook"
)


def make_hook(name: str, options: Mapping[str, Any] | None = None) -> Hook:
    """Make one hook; raises HookSetupError for wrong options, or what is none.

    `name` is a built-in name, one that an installed package adds under the entry point group `ddprun.hooks`,
    or an import path of a class, a factory, an `async def hook(payload, comm)` or a DDP communication hook,
    `def hook(state, bucket)`; `options` are keyword arguments. Of a name without a dot both are as
    `read_hook` gives them.
    """
    options = dict(options or {})
    if name in BUILT_IN_HOOKS:
        for level in grammar.HIERARCHICAL_LEVELS:
            if level in options:
                options[level] = Stack(_make_hooks(options[level], f"{name}.{level}"))
        made = pkgutil.resolve_name(f"ddprun_hooks.builtin.{BUILT_IN_HOOKS[name].implementation}")(**options)
        assert isinstance(made, Hook)
        return made
    try:
        if "." in name:
            target = import_trusted(name, _EXPECTED_HOOK)
        else:
            target = import_entry_point(ENTRY_POINT_GROUP, name, _EXPECTED_HOOK)
    except UntrustedError as error:
        raise HookSetupError(f"{error}; {error.allowed}") from None
    except (ImportPathError, TrustSettingError) as error:
        raise HookSetupError(str(error)) from None
    return _make_hook_from_callable(name, target, options)


def make_stack(hooks: AnyHook | Sequence[AnyHook]) -> Stack:
    """Make a stack from a list such as `["fp16", {"mylab.hooks.Mine": {"strength": 2}}]`, or from one hook.

    Each is a name or `{name: {options}}` as in a pipeline file, a `Hook`, a class or a factory of one that
    needs no arguments, or an async function. Raises HookSetupError: a line for each fault with its place, or
    a stack that cannot work.
    """
    chosen: list[Any] = list(hooks) if isinstance(hooks, list | tuple) else [hooks]
    named_hooks = _make_hooks(chosen, "hooks")
    # Ranks cannot compare what an object was made with, so its name stands for it.
    comparable = [
        hook if isinstance(hook, str | Mapping) else name
        for hook, (name, _) in zip(chosen, named_hooks, strict=True)
    ]
    return Stack(named_hooks, description=repr(comparable))


def _make_hooks(hooks: Sequence[Any], at: str) -> list[tuple[str, Hook]]:
    """Make each hook, and report the faults of all of them together."""
    named_hooks: list[tuple[str, Hook]] = []
    faults: list[str] = []
    for index, hook in enumerate(hooks):
        try:
            named_hooks.append(_make_named_hook(hook))
        except ValidationError as error:
            faults += format_option_errors(error, f"{at}[{index}]", BUILT_IN_HOOKS)
        except HookSetupError as error:
            faults += [f"{at}[{index}]: {line}" for line in str(error).splitlines()]
    if faults:
        raise HookSetupError("\n".join(faults))
    return named_hooks


def _make_named_hook(hook: AnyHook) -> tuple[str, Hook]:
    """The name by which a hook is called and keeps its state, and the hook."""
    if isinstance(hook, Hook):
        name = _qualified_name(type(hook))
        return name, _require_async_call(name, hook)
    if callable(hook):
        name = _qualified_name(hook)
        return name, _make_hook_from_callable(name, hook, {})
    if not isinstance(hook, str | Mapping):
        raise HookSetupError(
            f"expected a name, or `name: {{options}}`, got {describe_value(hook)}; {_ACCEPTED_HOOK_FORMS}"
        )
    name, options = validate_hook_spec(hook)
    return name, make_hook(name, options)


def _qualified_name(target: Any) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _make_hook_from_callable(name: str, target: Any, options: dict[str, Any]) -> Hook:
    if inspect.iscoroutinefunction(target):
        if options:
            raise HookSetupError(f'"{name}" is a plain function and takes no options')
        return FunctionHook(target)
    if not callable(target):
        raise HookSetupError(
            f'"{name}" is {type(target).__name__}, not a hook class, factory or async function'
        )
    takes_payload = not isinstance(target, type) and _accepts(target, None, None) and not _accepts(target)
    if takes_payload and not options:
        if list(inspect.signature(target).parameters)[1] == "bucket":  # so DDP wants it
            return DdpCommHook(target)
        if inspect.iscoroutinefunction(target.__call__):
            raise HookSetupError(f'"{name}" is no hook: derive its class from ddprun_hooks.Hook')
        raise HookSetupError(not_async_message(name, "it is a plain function"))
    try:
        inspect.signature(target).bind(**options)
    except TypeError as error:
        raise HookSetupError(f'options of hook "{name}": {error}') from None
    except ValueError:
        pass  # a callable without a signature (written in C) complains when it is called
    made = target(**options)
    if not isinstance(made, Hook):
        raise HookSetupError(f'"{name}" makes {type(made).__name__}, which is not a ddprun_hooks.Hook')
    return _require_async_call(name, made)


def _require_async_call(name: str, hook: Hook) -> Hook:
    """Refuse a hook whose `__call__` is a plain function; a decorated one shows only when it is called."""
    call = type(hook).__call__
    plain = inspect.isfunction(call) and not inspect.iscoroutinefunction(call)
    if plain and not hasattr(call, "__wrapped__"):
        raise HookSetupError(not_async_message(name, "its __call__ is a plain function"))
    return hook


def _accepts(target: Callable[..., Any], *arguments: None) -> bool:
    """Whether it can be called with so many arguments."""
    try:
        inspect.signature(target).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True
