"""No module needs another one that needs it: whichever is imported first finds what it imports."""

import ast
import graphlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOTS = [Path(__file__).parents[1] / root for root in ("runner", "hooks")]


def _modules() -> dict[str, Path]:
    """The files of all modules by their import paths; a package's name is that of its `__init__`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for root in _ROOTS
        for path in root.rglob("*.py")
    }


def _imports(body: list[ast.stmt]) -> Iterator[tuple[str, list[str]]]:
    """What is imported when a module is: not what stands in functions or under `TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _imports([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _imports(node.body)


def _needs(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for module, names in _imports(ast.parse(path.read_text(encoding="utf-8")).body):
        inner = {f"{module}.{one}" for one in names} & set(known)
        found |= inner
        if module in known and (len(inner) < len(names) or not names):
            found.add(module)
    return found - {name}


def _folder(module: str) -> str:
    """The folder, or the file beside folders, of `ddprun` or `ddprun_hooks` to which a module belongs."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("part", [str, _folder], ids=["modules", "folders"])
def test_no_circles(part: Callable[[str], str]) -> None:
    """Each module's imports come before it, in one order of all of them; and so it is with folders."""
    known = _modules()
    assert len(known) > 100
    needed: dict[str, set[str]] = {}
    for name, path in known.items():
        needed.setdefault(part(name), set()).update(map(part, _needs(name, path, known)))
    for name, others in needed.items():
        others.discard(name)
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
