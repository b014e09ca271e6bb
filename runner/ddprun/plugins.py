"""Plug-ins: what is added as one class in one file, here or by an installed package.

A plug-in of ours is a module in the folder of its kind, and the module's name is the name in a pipeline. An
installed package declares its class as an entry point in the kind's group (`docs/extending.md`). Names are
found without importing anything; a class is imported when a pipeline names it, or to list its options.
"""

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from ddprun_hooks.config.import_path import import_installed, installed
from ddprun_hooks.config.options import BUILT_IN, ENTRY_POINT_GROUP
from ddprun_hooks.config.trust import TrustSettingError, Wanted
from ddprun_hooks.errors import DottedNameError


class Plugin:
    """Base of all plug-ins. `ddprun check` imports their modules, so they import heavy packages in methods.

    The docstring of a class is its line in `ddprun catalog` and in the JSON Schema.
    """

    Options: ClassVar[type[BaseModel]] = BaseModel
    """What may be written below its name in a pipeline, a docstring under each field."""

    def __init_subclass__(cls) -> None:
        """Describe the options by the docstring of their plug-in."""
        super().__init_subclass__()
        if "Options" not in vars(cls):
            cls.Options = type("Options", (cls.Options,), {"__module__": cls.__module__})
        cls.Options.__doc__ = cls.__doc__


def options_of(plugin: Any) -> type[BaseModel]:
    """The model of a plug-in's options: the class itself if it is one (a sync policy), else its `Options`."""
    model: type[BaseModel] = plugin if issubclass(plugin, BaseModel) else plugin.Options
    return model


@dataclass(frozen=True)
class Plugins:
    """All plug-ins of one kind."""

    kind: str
    """As messages call one: `tracker`."""

    group: str
    """Of the entry points by which installed packages add more."""

    base: str = ""
    """Dotted name of the class that all are derived from; empty if a run alone may import them, as hooks."""

    folder: str = ""
    """The package whose modules are the built-in ones; empty if they are found elsewhere."""

    taken: frozenset[str] = frozenset()
    """Names that no installed package can add."""

    def built_in(self) -> tuple[str, ...]:
        """Names of the built-in ones."""
        return _modules(self.folder) if self.folder else ()

    def installed(self) -> tuple[str, ...]:
        """Names that installed packages add."""
        found = installed(self.group)
        return tuple(name for name in found if name not in self.taken | {*self.built_in()}) if found else ()

    def names(self) -> tuple[str, ...]:
        """All names."""
        return (*self.built_in(), *self.installed())

    def targets(self, name: str) -> tuple[str, ...]:
        """The dotted names behind an installed one's name: one, unless several packages claim the name."""
        return installed(self.group)[name]

    def load(self, name: str) -> type[Any]:
        """Import a plug-in's class.

        Raises:
            DottedNameError: the installed one cannot be imported, is not of this kind, or may not be imported
                (UntrustedError).
            TrustSettingError: `DDPRUN_TRUSTED` cannot be read.
        """
        module, _, attribute = self.base.rpartition(".")
        base = getattr(importlib.import_module(module), attribute)
        if name in self.built_in():
            return _defined_in(f"{self.folder}.{name}", base)
        words = f"a {self.kind} is a class derived from {self.base}"
        found = import_installed(self.group, name, Wanted(words, base, kind=self.kind))
        if not _is_derived(found, base):
            shown = f'the installed {self.kind} "{name}" ({self.targets(name)[0]})'
            raise DottedNameError(f"{shown} is not a class derived from {self.base}")
        return found  # type: ignore[no-any-return]

    def options(self, name: str) -> type[BaseModel]:
        """The model of a plug-in's options; raises as `load` does."""
        return options_of(self.load(name))

    def loadable(self) -> dict[str, type[Any]]:
        """All that can be imported, by name; what is not trusted, or broken, is left out."""
        found: dict[str, type[Any]] = {}
        for name in self.names() if self.base else ():
            try:
                found[name] = self.load(name)
            except (DottedNameError, TrustSettingError):
                continue
        return found

    def options_of_installed(self) -> dict[str, type[BaseModel] | None]:
        """The options of everything that installed packages add; None for what `loadable` leaves out."""
        known = self.loadable() if self.installed() else {}
        return {name: options_of(known[name]) if name in known else None for name in self.installed()}


@functools.cache
def _modules(folder: str) -> tuple[str, ...]:
    return tuple(
        sorted(found.name for found in pkgutil.iter_modules(importlib.import_module(folder).__path__))
    )


@functools.cache
def _defined_in(module: str, base: type) -> type[Any]:
    """The class derived from `base` that a module defines."""
    classes = vars(importlib.import_module(module)).values()
    own: type[Any] = next(one for one in classes if _is_derived(one, base) and one.__module__ == module)
    return own


def _is_derived(found: Any, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base)


# Whoever makes one of these objects knows its base class; no file of a kind is imported here.
HOOKS = Plugins("hook", ENTRY_POINT_GROUP, taken=frozenset(BUILT_IN))
SYNC = Plugins("sync policy", "ddprun.sync", "ddprun.sync.plan.SyncPolicy", "ddprun.sync.policies")
TRACKERS = Plugins("tracker", "ddprun.trackers", "ddprun.track.Tracker", "ddprun.track.backends")
CLUSTERS = Plugins("cluster", "ddprun.clusters", "ddprun.cluster.Cluster", "ddprun.cluster.backends")
