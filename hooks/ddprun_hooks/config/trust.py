"""Which packages an import path may reach: the environment variable `DDPRUN_TRUSTED`. Imports no torch.

Unset, a name may reach anything, and what holds the names is as trusted as a script. Set, it lists packages
and prefixes of import paths (`torchvision,mylab.nets`), and a name is judged three times: by itself before
anything is imported, by where the object that it leads to really comes from (`logging.os.system` is not
logging's), and by its kind (a model is not a `Popen`). Set and empty, nothing may be imported.

Torch is too large to be trusted by a prefix: some of its functions and methods compile, download or write
what their options say. So are other well-known packages. Of these a few public places are open, and at each
of them one kind of object.
"""

import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddprun_hooks.errors import ImportPathError

TRUST_VARIABLE = "DDPRUN_TRUSTED"

FOLDER_PREFIX = "./"  # before a package in `DDPRUN_TRUSTED`: it may come from the pipeline file's own folder

# Kinds of choices that are called with the file's options and nothing else, so that a method's `self` is one
# of these; "" are objects in options. Methods of other kinds would be called on the model, or a batch.
_KINDS_CALLED_WITH_OPTIONS = ("", "model", "data")
_IS_METHOD_TEXT = "is a method, which is called on an object"
_METHOD_ALTERNATIVES_TEXT = (
    "name a class, a function (such as one that calls it), or a class method or static method"
)


class _AllowedNames(NamedTuple):
    """A module of a well-known package, and what in it may be named."""

    module: str
    name_pattern: str  # a regular expression for the whole name in the module
    words: str  # for messages
    kinds: tuple[str, ...]  # of choices for which they may be named

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def _allowed_names(
    module: str, pattern: str, what: str, *kinds: str, also: tuple[str, ...] = ()
) -> list[_AllowedNames]:
    """`what` has this pattern in a module, and `also` in submodules of it, of which messages say nothing."""
    modules = [module, *(f"{module}.{submodule}" for submodule in also)]
    return [_AllowedNames(place, pattern, f"{what} in {module}", kinds) for place in modules]


_MODULES = r"(?!((Uninitialized)?(Parameter|Buffer)|DataParallel|\w+Options)$)[A-Z]\w*"
_LOSSES = r"[a-z]\w*_loss|kl_div|cross_entropy|binary_cross_entropy(_with_logits)?"
_SCHEDULES = r"[A-Z]\w*LR|LRScheduler|ChainedScheduler|CosineAnnealingWarmRestarts|ReduceLROnPlateau"
_SAMPLERS = r"(Weighted|Subset)?RandomSampler|SequentialSampler"
_DTYPES = r"dtype|bool|b?float(16|32|64)|u?int(8|16|32|64)|complex(32|64|128)"
_MODELS, _TRANSFORMS = r"(?!Weights)[A-Za-z]\w*", r"[A-Z]\w*(\.[A-Z]\w*)?"
_MODEL_FOLDERS = ("detection", "segmentation", "video")
_DATASETS = r"((Iterable|Tensor|Stack|Concat|Chain)?Dataset|Subset)"
# All that may be named of well-known packages. What these classes and functions do with options is to
# compute, and to fetch weights and data that the package itself knows; data pipes, wrappers of modules,
# methods and everything elsewhere can do more.
_ALLOWED_NAMES = (
    *_allowed_names("torch.nn", _MODULES, "the modules", "model", "loss"),
    *_allowed_names("torch.nn.functional", _LOSSES, "the losses", "loss", "metric"),
    *_allowed_names("torch.optim", r"[A-Z]\w*", "the optimizers", "optimizer"),
    *_allowed_names("torch.optim.lr_scheduler", _SCHEDULES, "the schedules", "schedule"),
    *_allowed_names("torch.utils.data", _DATASETS, "the plain datasets", "data"),
    *_allowed_names("torch.utils.data", _SAMPLERS, "the samplers", "sampler"),
    *_allowed_names("torch.utils.data", "default_collate", "default_collate", "collate"),
    *_allowed_names("torch", _DTYPES, "the types of tensors"),
    *_allowed_names("torchvision.models", _MODELS, "the models", "model", also=_MODEL_FOLDERS),
    # LSUN unpickles a file that it finds among the images.
    *_allowed_names("torchvision.datasets", r"(?!LSUN)[A-Z]\w*", "the datasets", "data"),
    *_allowed_names("torchvision.ops", r"\w+_loss", "the losses", "loss", "metric"),
    *_allowed_names("torchvision.transforms", _TRANSFORMS, "the transforms", "transform", also=("v2",)),
    *_allowed_names("torchaudio.models", r"[A-Za-z]\w*", "the models", "model"),
    *_allowed_names("torchaudio.transforms", r"[A-Z]\w*", "the transforms"),
    *_allowed_names("timm", "create_model", "create_model", "model"),
    *_allowed_names("numpy", _DTYPES, "the types of numbers"),
)

# Packages of which open places may be named and nothing else.
WELL_KNOWN_PACKAGES = frozenset(place.package for place in _ALLOWED_NAMES)


class UntrustedError(ImportPathError):
    """A name that leads to what is not trusted, or to another kind; `allowed` says what may be named."""

    def __init__(self, problem: str, allowed: str) -> None:
        super().__init__(problem)
        self.allowed = allowed


class TrustSettingError(ValueError):
    """`DDPRUN_TRUSTED` cannot be read; nothing is trusted then."""


@dataclass(frozen=True)
class ExpectedObject:
    """The kind of object that a name must lead to."""

    description: str  # for the message: `expected an nn.Module class or a function that returns a module`
    base: type | tuple[type, ...] | None = None  # a class must be derived from it; None refuses every class
    methods: tuple[str, ...] = ()  # a class that has one of these will do as well
    returns: type | None = None  # a function whose annotation names another class is refused
    kind: str = ""  # of the choice, as `model`: decides what may be named of well-known packages; "" is any


@dataclass(frozen=True)
class TrustPolicy:
    """What `DDPRUN_TRUSTED` says."""

    prefixes: tuple[str, ...] | None  # packages and prefixes of import paths; None sets no limit
    in_folder: frozenset[str] = frozenset()  # prefixes of packages in the pipeline file's own folder

    @property
    def restricts_imports(self) -> bool:
        return self.prefixes is not None

    def allowed_message(self) -> str:
        """What may be named, for a message."""
        if not self.prefixes:
            return f"{TRUST_VARIABLE} is empty, so only what is built in may be named"
        listed = (FOLDER_PREFIX + prefix if prefix in self.in_folder else prefix for prefix in self.prefixes)
        return f"{TRUST_VARIABLE} allows {', '.join(listed)}"

    def why_not_trusted(self, name: str, kind: str = "") -> str | None:
        """Why a name, as a user wrote it or from `callable_full_names`, is not trusted; None if it is.
        `kind` is that of the choice for which it is named, as `model`; "" is any.
        """
        if self.prefixes is None:
            return None
        root = name.partition(".")[0]
        if name == "builtins.builtin_function_or_method":
            return "Python's own library is never trusted, nor a function written in C: wrap it in a def"
        if root in sys.stdlib_module_names:
            return "Python's own library is never trusted"
        if not any(f"{name}.".startswith(f"{prefix}.") for prefix in self.prefixes):
            known = {prefix.partition(".")[0] for prefix in self.prefixes}
            return "it is not trusted" if root in known else f'"{root}" is not trusted'
        return _why_not_allowed_in_package(name, kind) if root in WELL_KNOWN_PACKAGES else None

    def why_not_importable(self, name: str, kind: str = "") -> str | None:
        """Why a name that a user wrote may not be imported, as far as it tells by itself; None if it may."""
        if self.restricts_imports and any(part.startswith("_") for part in name.split(".")):
            return "a part that begins with _ is private"
        return self.why_not_trusted(name, kind)

    def check_name(self, name: str, kind: str = "") -> None:
        """Judge a name before anything is imported: raises UntrustedError if it is not trusted."""
        if reason := self.why_not_importable(name, kind):
            raise UntrustedError(f'"{name}" may not be imported: {reason}', self.allowed_message())

    def check_attribute(self, owner: Any, where: str, part: str, kind: str = "") -> None:
        """Judge one step of a name beyond the module that was imported, before the step is taken: from
        `owner`, to which the name `where` has led, to its attribute `part`.

        A name goes through modules and classes. It ends at a method that is called on an object only where
        the object is an option (`_KINDS_CALLED_WITH_OPTIONS`): `mutate: Model.save` would be called with the
        model.

        Raises UntrustedError if `owner` is another module than the name says and not trusted, or neither
        module nor class; or if the attribute is a method and cannot be one.
        """
        if not self.restricts_imports:
            return
        if isinstance(owner, types.ModuleType):
            # A module under another name than its own is an alias, and looking into it may run its code.
            # Looking into torch runs none of its code, and what is found there is judged by itself.
            alias = owner.__name__ != where and not (owner.__name__ + ".").startswith("torch.")
            if alias and (reason := self.why_not_trusted(owner.__name__)):
                raise UntrustedError(
                    f'"{where}" is the module {owner.__name__}: {reason}', self.allowed_message()
                )
        elif not isinstance(owner, type):
            raise UntrustedError(
                f'"{where}" is an object, and a name may go through modules and classes only',
                _METHOD_ALTERNATIVES_TEXT,
            )
        elif isinstance(inspect.getattr_static(owner, part, None), types.FunctionType):
            self._check_origins(f"{where}.{part}", getattr(owner, part), kind)
            if kind not in _KINDS_CALLED_WITH_OPTIONS:
                raise UntrustedError(f'"{where}.{part}" {_IS_METHOD_TEXT}', _METHOD_ALTERNATIVES_TEXT)

    def check_object(self, name: str, found: Any, expected: ExpectedObject | None) -> None:
        """Judge the object that a name has led to: raises UntrustedError by its origin and its kind."""
        if not self.restricts_imports:
            return
        self._check_origins(name, found, expected.kind if expected is not None else "")
        if isinstance(found, types.MethodType) and not isinstance(found.__self__, type):
            raise UntrustedError(f'"{name}" {_IS_METHOD_TEXT}', _METHOD_ALTERNATIVES_TEXT)
        if expected is not None and not _is_of_kind(found, expected):
            raise UntrustedError(f'"{name}" is {next(callable_full_names(found))}', expected.description)

    def _check_origins(self, name: str, found: Any, kind: str = "") -> None:
        for origin in callable_full_names(found):
            if reason := self.why_not_trusted(origin, kind):
                raise UntrustedError(f'"{name}" is {origin}: {reason}', self.allowed_message())


def read_trust_policy() -> TrustPolicy:
    """What the environment says; raises TrustSettingError if that is not a list of packages."""
    text = os.environ.get(TRUST_VARIABLE)
    if text is None:
        return TrustPolicy(None)
    names = {word: word.removeprefix(FOLDER_PREFIX) for word in map(str.strip, text.split(",")) if word}
    for word, name in names.items():
        if not all(part.isidentifier() for part in name.split(".")):
            raise TrustSettingError(
                f'{TRUST_VARIABLE}: "{word}" is not a package; write packages or prefixes of import paths '
                f"with commas between them, as in torchvision.models,mylab.nets; {FOLDER_PREFIX}mylab is one "
                "in the pipeline's folder"
            )
    in_folder = frozenset(name for word, name in names.items() if word != name)
    return TrustPolicy(tuple(dict.fromkeys(names.values())), in_folder)


def callable_full_names(found: Any) -> Iterator[str]:
    """Full names of what would run if the object were called, its own first: `subprocess.run`.

    The name under which it was found does not count: aliases, partials, methods, decorated functions and
    instances are followed to what they stand for. Whatever is written in C is taken for Python's own: the
    class of such a function is in `builtins`.
    """
    if isinstance(found, types.ModuleType):
        yield found.__name__
    elif isinstance(found, functools.partial):
        yield from callable_full_names(found.func)
    elif isinstance(found, functools._lru_cache_wrapper):
        yield from callable_full_names(found.__wrapped__)
    elif isinstance(found, types.MethodType):
        yield from callable_full_names(found.__func__)
        yield from callable_full_names(_class_of(found.__self__))
    elif isinstance(found, types.FunctionType):
        yield _full_name(found)
        if not _public_name(found) and hasattr(found, "__wrapped__"):
            yield from callable_full_names(found.__wrapped__)
    else:
        yield _full_name(_class_of(found))


def _class_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _full_name(found: Any) -> str:
    """`module.name`, or the public name in a well-known package; what tells no module is nobody's."""
    if public := _public_name(found):
        return public
    module = getattr(found, "__module__", None)
    if not isinstance(module, str) or not module:
        module = "builtins"
    return f"{module}.{found.__qualname__}"


def _is_of_kind(found: Any, expected: ExpectedObject) -> bool:
    while isinstance(found, functools.partial):
        found = found.func
    if isinstance(found, type):
        by_class = expected.base is not None and issubclass(found, expected.base)
        # Every class is called itself, so that `hasattr` would find `__call__` in all of them.
        return by_class or any(method in vars(base) for base in found.__mro__ for method in expected.methods)
    if not callable(found):
        return False
    if expected.returns is None:
        return True
    try:
        returned = inspect.signature(found).return_annotation
    except (TypeError, ValueError):
        return True  # written in C: what it returns is seen when it is called
    if returned is None:
        return False
    if not isinstance(returned, type) or returned in (inspect.Signature.empty, Any):
        return True
    return issubclass(returned, expected.returns)


def _why_not_allowed_in_package(name: str, kind: str) -> str | None:
    """Why something of a well-known package may not be named; None if it may."""
    root = name.partition(".")[0]
    allowed = [one for one in _ALLOWED_NAMES if one.package == root and (not kind or kind in one.kinds)]
    if any(re.fullmatch(rf"{re.escape(place.module)}\.({place.name_pattern})", name) for place in allowed):
        return None
    if not allowed:
        return f"nothing of {root} may be named here"
    *others, final = dict.fromkeys(place.words for place in allowed)
    return f"of {root} only {', '.join(others)}{' and ' if others else ''}{final} may be named here"


def _public_name(found: Any) -> str | None:
    """The name under which a class or function of a well-known package may be named; None: there is none."""
    if not isinstance(found, type | types.FunctionType):
        return None
    name, root = found.__name__, str(found.__module__).partition(".")[0]
    for place in _ALLOWED_NAMES:
        module = sys.modules.get(place.module)
        known = place.package == root and module is not None and vars(module).get(name) is found
        if known and re.fullmatch(place.name_pattern, name):
            return f"{place.module}.{name}"
    return None
