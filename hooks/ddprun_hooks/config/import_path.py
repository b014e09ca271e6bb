"""Import of what a dotted name means: the one place where a name of the user's becomes an object."""

import difflib
import importlib
from typing import Any

from ddprun_hooks.config.trust import Trust, Wanted, trust
from ddprun_hooks.errors import DottedNameError


def import_dotted(name: str, wanted: Wanted | None = None) -> Any:
    """Import `package.module.attribute` (the attribute may itself be dotted).

    Where `DDPRUN_TRUSTED` sets a limit, it must lead to the kind of object that is wanted.

    Raises:
        DottedNameError: no such module or attribute. What the module's own code raises passes through.
        UntrustedError: `DDPRUN_TRUSTED` does not allow it; nothing untrusted has been imported then.
        TrustSettingError: `DDPRUN_TRUSTED` cannot be read.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise DottedNameError(f'"{name}" is not a dotted name such as package.module.Name')
    limit = trust()
    limit.admit_name(name, wanted.kind if wanted is not None else "")
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
                raise DottedNameError(f'no module is named "{parts[0]}"') from None
            continue
        found = _attribute(found, module_name, parts[length:], limit)
        limit.admit(name, found, wanted)
        return found
    raise AssertionError("unreachable: the loop returns or raises at its last length")


def _attribute(found: Any, where: str, path: list[str], limit: Trust) -> Any:
    for part in path:
        limit.admit_step(found, where, part)
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise DottedNameError(f'"{where}" has no "{part}"{hint}')
        found = getattr(found, part)
        where = f"{where}.{part}"
    return found
