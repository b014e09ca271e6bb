"""Folders from which code is loaded: that of the pipeline file, and those of libraries.

Libraries keep code there such as kernels that torch.compile has built. By default torch does so below the
folder of temporary files, under a name that everybody can guess, and unpickles what it finds there. Another
user of the host may have been there first.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from ddprun import InputError
from ddprun.host.rank_files import SHORT_PATH_PARENT, temporary_launcher_folder
from ddprun_hooks.config.trust import read_trust_policy

_CACHE_SUBFOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_HOME_CACHE_VARIABLES = ("TORCH_EXTENSIONS_DIR",)  # what is not set, torch looks for below the home
_MAX_PATH_BYTES = 72  # of a folder in which multiprocessing names a socket, of 107 bytes at most


class UnsafeFolderError(InputError):
    """Others than this user may put code into a folder; says which, and what to do."""


@contextmanager
def private_code_caches(scratch: Path) -> Iterator[None]:
    """Set the variables that say where libraries keep code, for this process and those that it starts.

    They name folders below `$XDG_CACHE_HOME/ddprun` (`~/.cache/ddprun`); where that cannot be written, below
    `scratch`, a folder of this run's own that is gone after it. Folders that the user has set are judged and
    kept. Temporary files go below `scratch` (if its path is too long for sockets, to a folder in `/tmp`), and
    with them what libraries look for there, whatever is set.
    Raises UnsafeFolderError if others may write to one of the folders, OSError if `scratch` cannot be
    written.
    """
    found: dict[str, str] = {}
    for name in (*_CACHE_SUBFOLDERS, *_HOME_CACHE_VARIABLES):
        if given := os.environ.get(name):
            found[name] = os.path.abspath(given)
            _make_private_folder(Path(found[name]), name)
    home = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "ddprun"
    # Of a user without a home `~` stays.
    if not (
        cache.is_absolute()
        and _make_private_folder(cache, "XDG_CACHE_HOME")
        and os.access(cache, os.W_OK | os.X_OK)
    ):
        cache = scratch
    for name, folder in _CACHE_SUBFOLDERS.items():
        if name not in found:
            _make_private_folder(cache / folder, name)
            found[name] = str(cache / folder)
    with ExitStack() as stack:
        if len(os.fsencode(scratch / "tmp")) > _MAX_PATH_BYTES:
            scratch = stack.enter_context(temporary_launcher_folder(SHORT_PATH_PARENT))
        temporary = scratch / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        before = {name: os.environ.get(name) for name in (*found, "TMPDIR")}
        os.environ |= {**found, "TMPDIR": str(temporary)}
        tempfile.tempdir = None  # what TMPDIR says counts again
        try:
            yield
        finally:
            tempfile.tempdir = None
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ |= {} if value is None else {name: value}
            shutil.rmtree(temporary, ignore_errors=True)


def _make_private_folder(folder: Path, variable: str) -> bool:
    """Make a folder that only this user may write to; False if it cannot be made. `variable` names it."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
    except OSError:
        return False  # whoever needs it says so
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link" if stat.S_ISLNK(found.st_mode) else "is not a folder"
    elif found.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written by other users"
    else:
        return True
    raise UnsafeFolderError(
        f"{folder} {problem}, and libraries load code from it: remove it, or set {variable} to a folder that "
        "only you can write"
    )


def add_import_folder(folder: Path) -> None:
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
