"""The docstrings under a class's fields, read from its source, since Python drops them."""

import ast
import functools
import sys
from pathlib import Path

from pydantic import BaseModel


def summary(model: type[BaseModel]) -> str:
    """A class's docstring as one line."""
    return " ".join((model.__doc__ or "").split())


def fields(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each documented field, inherited ones included, each as one line."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if base.__module__.startswith("ddprun") and file:
            found |= _by_class(Path(file)).get(base.__name__, {})
    return found


@functools.cache
def _by_class(path: Path) -> dict[str, dict[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: _of_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = " ".join(text.value.value.split())
    return found
