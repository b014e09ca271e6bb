"""Modules that stand beside a pipeline's file, which a job elsewhere has only if they travel with it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from ddprun.config import LoadedPipeline
from ddprun.config.choices import is_dotted_name
from ddprun.config.secrets import pipeline_strings


def used_local_modules(loaded: LoadedPipeline) -> dict[str, dict[str, Path]]:
    """The top-level modules that a pipeline names and Python finds in its folder alone, and those beside them
    that they import; of each its files, by their path in the folder. Nothing is imported.
    """
    folder = loaded.folder.resolve()
    found: dict[str, dict[str, Path]] = {}
    # Names of somebody else's code; also what options only seem to name.
    strings = (one.text for one in pipeline_strings(loaded.root.data()))
    wanted = [text.partition(".")[0] for text in strings if is_dotted_name(text)]
    while wanted:
        name = wanted.pop(0)
        if name in found or name in sys.stdlib_module_names:
            continue
        files = _module_files(folder, name)
        if files and not _is_importable_elsewhere(name, folder):
            found[name] = files
            wanted += [root for file in files.values() if file.suffix == ".py" for root in _imports(file)]
    return found


def _module_files(folder: Path, name: str) -> dict[str, Path]:
    """The files of a module or a package in a folder; none if there is neither."""
    package = folder / name
    if not package.is_dir():
        module = folder / f"{name}.py"
        return {module.name: module} if module.is_file() else {}
    found = {}
    for file in sorted(package.rglob("*")):
        path = file.relative_to(folder)
        hidden = any(part == "__pycache__" or part.startswith(".") for part in path.parts)
        if file.is_file() and file.suffix != ".pyc" and not hidden:
            found[path.as_posix()] = file
    return found if any(path.endswith(".py") for path in found) else {}


def _is_importable_elsewhere(name: str, folder: Path) -> bool:
    elsewhere = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(folder)]
    return PathFinder.find_spec(name, elsewhere) is not None


def _imports(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
