"""Where a dotted name leads, as far as source code shows: nothing is imported.

A run judges the object to which a name has led. `check` has no object, so it reads the files of the trusted
package: `mylab.nets.os.system` is `os.system` where nets.py says `import os`, and so is `mylab.nets.shell`
where it says `shell = os.system`. What a file computes is left to the run.
"""

import ast
import builtins
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ddprun_hooks.config.trust import Trust

_MAX_BYTES = 4_000_000
_MAX_STEPS = 100
"""Aliases and bases that are followed for one name."""

_WRAPPERS = frozenset({"functools.partial", "functools.lru_cache", "functools.cache"})
"""What these make of a function is the function, for a judgement."""

_Scope = ast.Module | ast.ClassDef
_Bound = tuple[ast.AST, ast.alias | None]
"""A statement that binds a name, and of an import the part of it."""


@dataclass(frozen=True)
class Origin:
    """What a name leads to."""

    name: str
    """The full name, in the module that defines it."""

    method: bool = False
    """It is called on an object."""


def origins(name: str, limit: Trust, folder: Path | None) -> tuple[Origin, ...]:
    """What a name may lead to: several where source code decides when it runs, none where it does not show.

    Only trusted packages are looked into; some may be in the pipeline file's folder.
    """
    return tuple(dict.fromkeys(_Reader(limit, folder).follow(tuple(name.split(".")))))


def only_in_folder(root: str, limit: Trust, folder: Path | None) -> bool:
    """Whether a package is in the pipeline file's folder and nowhere else, and may not come from there."""
    if folder is None or root in limit.folder_roots() or _installed(root) is not None:
        return False
    return PathFinder.find_spec(root, [str(folder)]) is not None


@dataclass
class _Reader:
    """Follows one name."""

    limit: Trust
    folder: Path | None
    steps: int = _MAX_STEPS

    def too_far(self) -> bool:
        """Count a step. Whether there were too many, as with two names that lead to each other."""
        self.steps -= 1
        return self.steps < 0

    def is_read(self, name: str) -> bool:
        """Whether what has this full name is looked for in source code."""
        return name.partition(".")[0] in self.limit.roots() - {"torch"}

    def follow(self, parts: Sequence[str]) -> Iterator[Origin]:
        """What a full name leads to."""
        if self.too_far():
            return
        spec = self._package(parts[0]) if self.is_read(parts[0]) else None
        if spec is None:
            yield Origin(".".join(parts))
            return
        taken = 1
        while taken < len(parts) - 1 and spec.submodule_search_locations is not None:
            name = ".".join(parts[: taken + 1])
            below = PathFinder.find_spec(name, list(spec.submodule_search_locations))
            if below is None:
                break
            spec, taken = below, taken + 1
        tree = _parse(spec.origin)
        if tree is None or taken == len(parts):
            yield Origin(".".join(parts))
            return
        package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
        yield from _Module(self, spec.name, package, tree).attribute(parts[taken:])

    def _package(self, root: str) -> ModuleSpec | None:
        spec = _installed(root)
        if spec is None and self.folder is not None and root in self.limit.folder_roots():
            spec = PathFinder.find_spec(root, [str(self.folder)])
        return spec


@dataclass(frozen=True)
class _Module:
    """One module's source."""

    reader: _Reader
    """Follows what leads out of it."""

    name: str
    package: str
    """What relative imports start from."""

    tree: ast.Module

    def attribute(self, path: Sequence[str]) -> Iterator[Origin]:
        """What an attribute of the module leads to."""
        if self.reader.too_far():
            return
        bound = list(_bindings(self.tree, path[0]))
        for statement, alias in bound:
            yield from self._bound(self.name, statement, alias, path)
        for statement, _ in () if bound else _bindings(self.tree, "*"):
            if isinstance(statement, ast.ImportFrom) and self.reader.is_read(self._source(statement)):
                yield from self.reader.follow((*self._source(statement).split("."), *path))

    def _bound(
        self, where: str, statement: ast.AST, alias: ast.alias | None, path: Sequence[str]
    ) -> Iterator[Origin]:
        """What a statement of the module, or of a class in it, binds; `path` begins with the bound name."""
        full, rest = f"{where}.{path[0]}", path[1:]
        if isinstance(statement, ast.ClassDef):
            yield from self._member(full, statement, rest) if rest else [Origin(full)]
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if not rest:
                yield Origin(full)
        elif isinstance(statement, ast.Import) and alias is not None:
            # `import a.b` binds a, `import a.b as c` binds a.b.
            target = alias.name if alias.asname else alias.name.partition(".")[0]
            yield from self.reader.follow((*target.split("."), *rest))
        elif isinstance(statement, ast.ImportFrom) and alias is not None:
            yield from self.reader.follow((*self._source(statement).split("."), alias.name, *rest))
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            yield from self._value(statement.value, rest)

    def _source(self, statement: ast.ImportFrom) -> str:
        """The module from which a statement imports."""
        if not statement.level:
            return statement.module or ""
        levels = self.package.split(".")
        package = levels[: len(levels) - statement.level + 1]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _value(self, value: ast.expr, rest: Sequence[str]) -> Iterator[Origin]:
        """What an expression of the module leads to."""
        if isinstance(value, ast.Call) and value.args and not rest:
            made_by = {origin.name for origin in self._value(value.func, ())}
            if made_by and made_by <= _WRAPPERS:
                yield from self._value(value.args[0], ())
        elif path := _dotted(value):
            yield from self.attribute((*path, *rest))
            if hasattr(builtins, path[0]) and not any(_bindings(self.tree, path[0])):
                yield Origin(".".join(("builtins", *path, *rest)))

    def _member(self, where: str, made: ast.ClassDef, path: Sequence[str]) -> Iterator[Origin]:
        """What an attribute of a class leads to: its own, or of a base."""
        own = list(_bindings(made, path[0]))
        for statement, alias in own:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                free = {"classmethod", "staticmethod"} & {
                    ast.unparse(mark) for mark in statement.decorator_list
                }
                yield Origin(f"{where}.{path[0]}", method=not free)
            else:
                yield from self._bound(where, statement, alias, path)
        if own:
            return
        for base in made.bases:
            if chain := _dotted(base):
                found = list(self.attribute((*chain, *path)))
                yield from found
                if found and all(self.reader.is_read(origin.name) for origin in found):
                    return


def _installed(root: str) -> ModuleSpec | None:
    """Where a top-level package is installed; finding it imports nothing."""
    try:
        return importlib.util.find_spec(root)
    except (ImportError, ValueError):  # a module that was made by hand has none
        return None


@functools.cache
def _parse(origin: str | None) -> ast.Module | None:
    """A module's source; None if there is none that can be read."""
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        data = Path(origin).read_bytes()
        return ast.parse(data) if len(data) <= _MAX_BYTES else None
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _bindings(scope: _Scope, name: str) -> Iterator[_Bound]:
    """The statements of a module or class that bind a name, also those under `if` and `try`."""
    waiting: list[ast.stmt] = list(scope.body)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if statement.name == name:
                yield statement, None
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    yield statement, alias
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield statement, None
        for field in ("body", "orelse", "finalbody"):
            waiting += getattr(statement, field, [])
        for handler in getattr(statement, "handlers", []):
            waiting += handler.body


def _dotted(value: ast.expr) -> tuple[str, ...]:
    """The parts of `a.b.c`; none for any other expression."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return (value.id, *reversed(parts)) if isinstance(value, ast.Name) else ()
