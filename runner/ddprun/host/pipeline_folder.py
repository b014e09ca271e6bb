"""Modules in the folder of the pipeline file."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from ddprun_hooks.config.trust import read_trust_policy


def prepare_imports(folder: Path) -> None:
    """Let import paths find modules in the folder of the pipeline file, after everything that is installed;
    those that read the command line when they are imported find no arguments, which are ddprun's own.

    Where `DDPRUN_TRUSTED` sets a limit, only the packages that it names with `./` are looked for there.
    Another one that it lists may not be installed, and what is installed may try to import more than that:
    either would be found in a stranger's folder. Raises TrustSettingError if the variable cannot be read.
    """
    del sys.argv[1:]
    path, trust_policy = str(folder), read_trust_policy()
    if not trust_policy.restricts_imports:
        if path not in sys.path:
            sys.path.append(path)
    elif trust_policy.in_folder and not any(
        isinstance(finder, _FolderFinder) and finder.folder == path for finder in sys.meta_path
    ):
        packages = frozenset(prefix.partition(".")[0] for prefix in trust_policy.in_folder)
        sys.meta_path.append(_FolderFinder(path, packages))


class _FolderFinder(MetaPathFinder):
    """Finds some top-level packages in one folder."""

    def __init__(self, folder: str, roots: frozenset[str]) -> None:
        self.folder = folder
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and fullname in self._roots:
            return PathFinder.find_spec(fullname, [self.folder], target)
        return None
