"""The sync policies by name: one a file in `policies/`, and those of installed packages."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property

from ddprun.sync import policies
from ddprun.sync.policy import SyncPolicy


class _BuiltIn(Mapping[str, type[SyncPolicy]]):
    """Each by the name of its file; read when somebody asks, since a policy may be imported first."""

    @cached_property
    def _found(self) -> dict[str, type[SyncPolicy]]:
        found = {}
        for file in pkgutil.iter_modules(policies.__path__):
            module = importlib.import_module(f"{policies.__name__}.{file.name}")
            (found[file.name],) = (
                one
                for one in vars(module).values()
                if isinstance(one, type) and issubclass(one, SyncPolicy) and one.__module__ == module.__name__
            )
        return found

    def __getitem__(self, name: str) -> type[SyncPolicy]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


BUILT_IN: Mapping[str, type[SyncPolicy]] = _BuiltIn()
