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

from ddprun_hooks.config.trust import WELL_KNOWN, TrustPolicy

_MAX_BYTES = 4_000_000
_MAX_STEPS = 100
"""Aliases and bases that are followed for one name."""

_WRAPPERS = frozenset({"functools.partial", "functools.lru_cache", "functools.cache"})
"""Calls that wrap a function: the wrapped function is judged."""

_Scope = ast.Module | ast.ClassDef
_Binding = tuple[ast.AST, ast.alias | None]
"""A statement that binds a name, and of an import the part of it."""


@dataclass(frozen=True)
class Origin:
    """What a name leads to."""

    name: str
    """The full name, in the module that defines it."""

    is_method: bool = False
    """It is a method, called on an object."""


def origins(name: str, trust: TrustPolicy, folder: Path | None) -> tuple[Origin, ...]:
    """What a name may lead to: several where source code decides when it runs, none where it does not show.

    Only trusted packages are looked into; some may be in the pipeline file's folder.
    """
    return tuple(dict.fromkeys(_NameResolver(trust, folder).follow(tuple(name.split(".")))))


def only_in_folder(root: str, trust: TrustPolicy, folder: Path | None) -> bool:
    """Whether a package is in the pipeline file's folder and nowhere else, and may not come from there."""
    if folder is None or root in trust.folder_packages() or _installed(root) is not None:
        return False
    return PathFinder.find_spec(root, [str(folder)]) is not None


@dataclass
class _NameResolver:
    """Follows one name."""

    trust: TrustPolicy
    folder: Path | None
    steps: int = _MAX_STEPS

    def step_limit_reached(self) -> bool:
        """Count one step; gives whether there were too many, as with two names that refer to each other."""
        self.steps -= 1
        return self.steps < 0

    def reads_source_of(self, name: str) -> bool:
        """Whether what has this full name is looked for in source code."""
        return name.partition(".")[0] in self.trust.top_level_packages() - WELL_KNOWN

    def follow(self, parts: Sequence[str]) -> Iterator[Origin]:
        """What a full name leads to."""
        if self.step_limit_reached():
            return
        spec = self._package(parts[0]) if self.reads_source_of(parts[0]) else None
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
        yield from _Module(self, spec.name, package, tree).follow_attribute(parts[taken:])

    def _package(self, root: str) -> ModuleSpec | None:
        spec = _installed(root)
        if spec is None and self.folder is not None and root in self.trust.folder_packages():
            spec = PathFinder.find_spec(root, [str(self.folder)])
        return spec


@dataclass(frozen=True)
class _Module:
    """One module's source."""

    resolver: _NameResolver
    """Follows what leads out of it."""

    name: str
    package: str
    """What relative imports start from."""

    tree: ast.Module

    def follow_attribute(self, path: Sequence[str]) -> Iterator[Origin]:
        """What an attribute of the module leads to."""
        if self.resolver.step_limit_reached():
            return
        bound = list(_bindings(self.tree, path[0]))
        for statement, alias in bound:
            yield from self._follow_binding(self.name, statement, alias, path)
        for statement, _ in () if bound else _bindings(self.tree, "*"):
            if isinstance(statement, ast.ImportFrom):
                module = self._imported_module(statement)
                if self.resolver.reads_source_of(module):
                    yield from self.resolver.follow((*module.split("."), *path))

    def _follow_binding(
        self, where: str, statement: ast.AST, alias: ast.alias | None, path: Sequence[str]
    ) -> Iterator[Origin]:
        """What a statement of the module, or of a class in it, binds; `path` begins with the bound name."""
        full, rest = f"{where}.{path[0]}", path[1:]
        if isinstance(statement, ast.ClassDef):
            yield from self._follow_class_attribute(full, statement, rest) if rest else [Origin(full)]
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if not rest:
                yield Origin(full)
        elif isinstance(statement, ast.Import) and alias is not None:
            # `import a.b` binds a, `import a.b as c` binds a.b.
            target = alias.name if alias.asname else alias.name.partition(".")[0]
            yield from self.resolver.follow((*target.split("."), *rest))
        elif isinstance(statement, ast.ImportFrom) and alias is not None:
            yield from self.resolver.follow((*self._imported_module(statement).split("."), alias.name, *rest))
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            yield from self._follow_expression(statement.value, rest)

    def _imported_module(self, statement: ast.ImportFrom) -> str:
        """The module from which a statement imports."""
        if not statement.level:
            return statement.module or ""
        levels = self.package.split(".")
        package = levels[: len(levels) - statement.level + 1]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _follow_expression(self, value: ast.expr, rest: Sequence[str]) -> Iterator[Origin]:
        """What an expression of the module leads to."""
        if isinstance(value, ast.Call) and value.args and not rest:
            made_by = {origin.name for origin in self._follow_expression(value.func, ())}
            if made_by and made_by <= _WRAPPERS:
                yield from self._follow_expression(value.args[0], ())
        elif path := _attribute_chain(value):
            yield from self.follow_attribute((*path, *rest))
            if hasattr(builtins, path[0]) and not any(_bindings(self.tree, path[0])):
                yield Origin(".".join(("builtins", *path, *rest)))

    def _follow_class_attribute(
        self, where: str, made: ast.ClassDef, path: Sequence[str]
    ) -> Iterator[Origin]:
        """What an attribute of a class leads to: its own, or of a base."""
        own = list(_bindings(made, path[0]))
        for statement, alias in own:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                free = {"classmethod", "staticmethod"} & {
                    ast.unparse(mark) for mark in statement.decorator_list
                }
                yield Origin(f"{where}.{path[0]}", is_method=not free)
            else:
                yield from self._follow_binding(where, statement, alias, path)
        if own:
            return
        for base in made.bases:
            if chain := _attribute_chain(base):
                found = list(self.follow_attribute((*chain, *path)))
                yield from found
                if found and all(self.resolver.reads_source_of(origin.name) for origin in found):
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


def _bindings(scope: _Scope, name: str) -> Iterator[_Binding]:
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


def _attribute_chain(value: ast.expr) -> tuple[str, ...]:
    """The parts of `a.b.c`; none for any other expression."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return (value.id, *reversed(parts)) if isinstance(value, ast.Name) else ()
