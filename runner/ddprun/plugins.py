"""Plug-ins: hooks, sync policies, trackers and cluster backends, each one class in one file.

A built-in plug-in is a module in the package of its kind; the module's name is its name in a pipeline. An
installed package declares its class as an entry point in the kind's group (`docs/dev/extending.md`). Listing
the names imports nothing. A class is imported when a pipeline names it, or to list its options.
"""

import functools
import importlib
import pkgutil
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from ddprun_hooks.config.import_path import import_entry_point, installed_entry_points
from ddprun_hooks.config.options import ENTRY_POINT_GROUP
from ddprun_hooks.config.trust import ExpectedObject, TrustSettingError
from ddprun_hooks.errors import ImportPathError


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


def plugin_options_model(plugin: Any) -> type[BaseModel]:
    """The model of a plug-in's options: the class itself if it is one (a sync policy), else its `Options`."""
    model: type[BaseModel] = plugin if issubclass(plugin, BaseModel) else plugin.Options
    return model


@dataclass(frozen=True)
class PluginRegistry:
    """All plug-ins of one kind."""

    kind: str  # the kind's name in messages, such as `tracker`
    entry_point_group: str  # the group in which installed packages declare plug-ins of this kind
    base_class_name: str = ""
    """Dotted name of the class that all are derived from; empty for hooks, which only a run may import."""

    package: str = ""
    """The package whose modules are the built-in plug-ins; empty if they are registered elsewhere."""

    reserved_names_path: str = ""
    """Dotted name of what has the names that installed packages cannot use: a mapping, or a pydantic model,
    whose fields they are; empty if there are none."""

    @property
    def reserved_names(self) -> frozenset[str]:
        found = _import_attribute(self.reserved_names_path) if self.reserved_names_path else ()
        return frozenset(getattr(found, "model_fields", found))

    def built_in_names(self) -> tuple[str, ...]:
        return _module_names(self.package) if self.package else ()

    def installed_names(self) -> tuple[str, ...]:
        found = installed_entry_points(self.entry_point_group)
        return tuple(name for name in found if name not in self.reserved_names | {*self.built_in_names()})

    def names(self) -> tuple[str, ...]:
        return (*self.built_in_names(), *self.installed_names())

    def import_paths(self, name: str) -> tuple[str, ...]:
        """The import paths behind an installed plug-in's name: one, unless several packages claim it."""
        return installed_entry_points(self.entry_point_group)[name]

    def load(self, name: str) -> type[Any]:
        """Import a plug-in's class. Raises ImportPathError if the installed one cannot or may not
        (UntrustedError) be imported, or is of another kind, and TrustSettingError.
        """
        base = _import_attribute(self.base_class_name)
        if name in self.built_in_names():
            return _defined_in(f"{self.package}.{name}", base)
        words = f"a {self.kind} is a class derived from {self.base_class_name}"
        found = import_entry_point(self.entry_point_group, name, ExpectedObject(words, base, kind=self.kind))
        if not _is_derived(found, base):
            shown = f'the installed {self.kind} "{name}" ({self.import_paths(name)[0]})'
            raise ImportPathError(f"{shown} is not a class derived from {self.base_class_name}")
        return found  # type: ignore[no-any-return]

    def options_model(self, name: str) -> type[BaseModel]:
        """The model of a plug-in's options; raises as `load` does."""
        return plugin_options_model(self.load(name))

    def load_available(self) -> dict[str, type[Any]]:
        """Import all plug-ins that are trusted and can be imported; gives the classes by name."""
        found: dict[str, type[Any]] = {}
        for name in self.names() if self.base_class_name else ():
            with suppress(ImportPathError, TrustSettingError):
                found[name] = self.load(name)
        return found

    def options_of_installed(self) -> dict[str, type[BaseModel] | None]:
        """The options of everything that installed packages add; None for what `load_available` omits."""
        names = self.installed_names()
        known = self.load_available() if names else {}
        return {name: plugin_options_model(known[name]) if name in known else None for name in names}


@functools.cache
def _module_names(package: str) -> tuple[str, ...]:
    path = importlib.import_module(package).__path__
    return tuple(sorted(found.name for found in pkgutil.iter_modules(path)))


@functools.cache
def _defined_in(module: str, base: type) -> type[Any]:
    """The class derived from `base` that a module defines."""
    classes = vars(importlib.import_module(module)).values()
    own: type[Any] = next(one for one in classes if _is_derived(one, base) and one.__module__ == module)
    return own


def _import_attribute(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _is_derived(found: Any, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base)


# Base classes and packages are given by name, so that making a registry imports neither.
HOOKS = PluginRegistry(
    "hook", ENTRY_POINT_GROUP, reserved_names_path="ddprun_hooks.config.options.BUILT_IN_HOOKS"
)
SYNC_POLICIES = PluginRegistry(
    "sync policy", "ddprun.sync", "ddprun.sync.plan.SyncPolicy", "ddprun.sync.policies"
)
TRACKERS = PluginRegistry("tracker", "ddprun.trackers", "ddprun.track.Tracker", "ddprun.track.backends")
CLUSTERS = PluginRegistry(
    "cluster",
    "ddprun.clusters",
    "ddprun.cluster.Cluster",
    "ddprun.cluster.backends",
    reserved_names_path="ddprun.config.schema.Pipeline",  # a backend's name is a key of it, too
)
