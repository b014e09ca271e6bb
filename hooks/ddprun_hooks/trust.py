"""Which packages a dotted name may reach: the environment variable `DDPRUN_TRUSTED`. Imports no torch.

Unset, a name may reach anything, and what holds the names is as trusted as a script. Set, it lists packages
and dotted prefixes (`torchvision,mylab.nets`), and a name is judged three times: by itself before anything is
imported, by where the object that it leads to really comes from (`logging.os.system` is not logging's), and
by its kind (a model is no `Popen`). Set and empty, nothing may be imported.
"""

import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddprun_hooks.errors import DottedNameError

VARIABLE = "DDPRUN_TRUSTED"

_OF_TORCH = ("torch.nn", "torch.optim", "torch.utils.data")
"""All that may be named of torch: the rest loads pickles, compiles and downloads code, starts processes."""


class UntrustedError(DottedNameError):
    """A name that leads to what is not trusted, or to something of another kind.

    `allowed` says what may stand there.
    """

    def __init__(self, problem: str, allowed: str) -> None:
        """Take the message in two parts."""
        super().__init__(problem)
        self.allowed = allowed


class TrustSettingError(ValueError):
    """`DDPRUN_TRUSTED` cannot be read; nothing is trusted then."""


@dataclass(frozen=True)
class Wanted:
    """The kind of object that a name must lead to."""

    words: str
    """For the message: `a model is an nn.Module class or a function that returns one`."""

    base: type | tuple[type, ...] | None = None
    """A class must be derived from it; None refuses every class."""

    methods: tuple[str, ...] = ()
    """A class that has one of these will do as well."""

    returns: type | None = None
    """A function whose annotation names another class is refused."""


@dataclass(frozen=True)
class Trust:
    """What `DDPRUN_TRUSTED` says."""

    prefixes: tuple[str, ...] | None
    """Packages and dotted prefixes; None sets no limit."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.prefixes is not None

    def allowed(self) -> str:
        """What may be named, for a message."""
        if not self.prefixes:
            return f"{VARIABLE} is empty, so only what is built in may be named"
        return f"{VARIABLE} allows {', '.join(self.prefixes)}"

    def roots(self) -> frozenset[str]:
        """The top-level packages of the prefixes."""
        return frozenset(prefix.partition(".")[0] for prefix in self.prefixes or ())

    def refusal(self, name: str) -> str | None:
        """Why a dotted name, or the full name of an object, is not trusted; None if it is."""
        if self.prefixes is None:
            return None
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names:
            return "Python's own library is never trusted"
        if not any(_below(name, prefix) for prefix in self.prefixes):
            return f'"{root}" is not trusted' if root not in self.roots() else "it is not trusted"
        if root == "torch" and not any(_below(name, prefix) for prefix in _OF_TORCH):
            return f"of torch only {', '.join(_OF_TORCH)} may be named"
        return None

    def admit_name(self, name: str) -> None:
        """Judge a name before anything is imported.

        Raises:
            UntrustedError: it is not trusted.
        """
        reason = self.refusal(name)
        if self.limited and any(part.startswith("__") for part in name.split(".")):
            reason = "a name with __ reaches into Python itself"
        if reason:
            raise UntrustedError(f'"{name}" may not be imported: {reason}', self.allowed())

    def admit(self, name: str, found: Any, wanted: Wanted | None) -> None:
        """Judge the object that a name has led to.

        Raises:
            UntrustedError: it comes from elsewhere, or is of another kind than wanted.
        """
        if self.prefixes is None:
            return
        for origin in origins(found):
            if reason := self.refusal(origin):
                raise UntrustedError(f'"{name}" is {origin}: {reason}', self.allowed())
        if wanted is not None and not _is_of_kind(found, wanted):
            raise UntrustedError(f'"{name}" is {next(origins(found))}', wanted.words)


def trust(environment: Mapping[str, str] = os.environ) -> Trust:
    """What the environment says.

    Raises:
        TrustSettingError: the variable holds something that is no package.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return Trust(None)
    prefixes = tuple(word.strip() for word in text.split(",") if word.strip())
    for prefix in prefixes:
        if not all(part.isidentifier() for part in prefix.split(".")):
            raise TrustSettingError(
                f'{VARIABLE}: "{prefix}" is no package; write packages or dotted prefixes with commas '
                "between them, as in torchvision,mylab.nets"
            )
    return Trust(prefixes)


def origins(found: Any) -> Iterator[str]:
    """Full names of what would run if the object were called, its own first: `posix.system`.

    The name under which it was found does not count: aliases, partials, methods, decorated functions and
    instances are followed to what they stand for.
    """
    if isinstance(found, types.ModuleType):
        yield found.__name__
    elif isinstance(found, functools.partial):
        yield from origins(found.func)
    elif isinstance(found, functools._lru_cache_wrapper):
        yield from origins(found.__wrapped__)
    elif isinstance(found, types.GenericAlias):
        yield from origins(found.__origin__)
    elif isinstance(found, types.MethodType):
        yield from origins(found.__func__)
        yield from origins(_class_of(found.__self__))
    elif isinstance(found, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = found.__self__
        if isinstance(owner, types.ModuleType) or owner is None:
            yield _full_name(found)
        else:
            yield f"{_full_name(_class_of(owner))}.{found.__name__}"
    elif isinstance(found, types.WrapperDescriptorType | types.MethodDescriptorType):
        yield f"{_full_name(found.__objclass__)}.{found.__name__}"
    elif isinstance(found, types.FunctionType):
        yield _full_name(found)
        if hasattr(found, "__wrapped__"):
            yield from origins(found.__wrapped__)
    elif isinstance(found, type):
        yield _full_name(found)
    else:
        yield _full_name(type(found))


def _class_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _full_name(found: Any) -> str:
    """`module.qualified_name`; what does not tell its module belongs to nobody who is trusted."""
    module = getattr(found, "__module__", None)
    if not isinstance(module, str) or not module:
        owner = getattr(found, "__self__", None)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else "builtins"
    return f"{module}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def _is_of_kind(found: Any, wanted: Wanted) -> bool:
    while isinstance(found, functools.partial):
        found = found.func
    if isinstance(found, type):
        by_class = wanted.base is not None and issubclass(found, wanted.base)
        return by_class or any(hasattr(found, method) for method in wanted.methods)
    if not callable(found):
        return False
    if wanted.returns is None:
        return True
    try:
        returned = inspect.signature(found).return_annotation
    except (TypeError, ValueError):
        return True  # written in C: what it returns is seen when it is called
    if returned is None:
        return False
    tells = isinstance(returned, type) and returned not in (inspect.Signature.empty, Any)
    return not tells or issubclass(returned, wanted.returns)


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
