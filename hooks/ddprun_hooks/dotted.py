"""Import of what a dotted name means."""

import difflib
import importlib
from typing import Any


class DottedNameError(ValueError):
    """A dotted name that leads nowhere; the message says how far it led and what is there."""


def import_dotted(name: str) -> Any:
    """Import `package.module.attribute` (the attribute may itself be dotted).

    Raises:
        DottedNameError: no such module or attribute. What the module's own code raises passes through.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise DottedNameError(f'"{name}" is not a dotted name such as package.module.Name')
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Only the name's own prefix being absent means "look further up"; an import that fails inside
            # the user's module is the user's to see.
            if error.name is None or not (
                module_name == error.name or module_name.startswith(error.name + ".")
            ):
                raise
            if length == 1:
                raise DottedNameError(f'there is no module "{parts[0]}"') from None
            continue
        return _attribute(found, module_name, parts[length:])
    raise AssertionError("unreachable: the loop returns or raises at its last length")


def _attribute(found: Any, where: str, path: list[str]) -> Any:
    for part in path:
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise DottedNameError(f'"{where}" has no "{part}"{hint}')
        found = getattr(found, part)
        where = f"{where}.{part}"
    return found
