"""The docstrings under a class's fields, read from its source, since Python drops them.

Pydantic's `use_attribute_docstrings` would read them at each start of `ddprun`, which takes 30 ms.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise

from pydantic import BaseModel


def summary(model: type[BaseModel]) -> str:
    """A class's docstring as one line."""
    return " ".join((model.__doc__ or "").split())


def fields(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each documented field, inherited ones included, each as one line."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not base.__module__.startswith(("pydantic", "builtins")):
            found |= _of_module(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """The docstrings of a module's classes, by qualified name and field."""
    module = sys.modules.get(name)
    if getattr(module, "__file__", None) is None:  # made in an interpreter
        return {}
    return dict(_of_classes(ast.parse(inspect.getsource(sys.modules[name])).body))


def _of_classes(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    for made in body:
        if isinstance(made, ast.ClassDef):
            yield (
                prefix + made.name,
                {
                    field.target.id: " ".join(str(text.value.value).split())
                    for field, text in pairwise(made.body)
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                },
            )
            yield from _of_classes(made.body, f"{prefix}{made.name}.")
