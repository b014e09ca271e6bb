"""The one place where a name of the user's becomes an object: an import path, or an installed entry point."""

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ddprun_hooks.config import trust
from ddprun_hooks.config.messages import closest_match, format_message
from ddprun_hooks.errors import ImportPathError


def import_trusted(name: str, expected: trust.ExpectedObject | None = None) -> Any:
    """Import `package.module.attribute` (the attribute may itself be dotted).

    Where `DDPRUN_TRUSTED` sets a limit, it must lead to the kind of object that is `expected`.

    Raises:
        ImportPathError: no such module or attribute. What the module's own code raises passes through.
        trust.UntrustedError: `DDPRUN_TRUSTED` does not allow it; nothing untrusted has been imported then.
        trust.TrustSettingError: `DDPRUN_TRUSTED` cannot be read.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ImportPathError(f'"{name}" is not an import path such as package.module.Name')
    trust_policy = trust.read_trust_policy()
    kind = expected.kind if expected is not None else ""
    trust_policy.check_name(name, kind)
    for length in range(len(parts) - 1, 0, -1):
        where = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(where)
            break
        except ModuleNotFoundError as error:
            # Only the name's own prefix being absent means "look further up"; an import that fails inside
            # the user's module is the user's to see.
            if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
                raise
    else:
        raise ImportPathError(f'no module is named "{parts[0]}"')
    for part in parts[length:]:
        trust_policy.check_attribute(found, where, part, kind)
        if not hasattr(found, part):
            suggestion = closest_match(part, dir(found))
            raise ImportPathError(format_message(f'"{where}" has no "{part}"', suggestion=suggestion))
        found, where = getattr(found, part), f"{where}.{part}"
    trust_policy.check_object(name, found, expected)
    return found


@functools.cache
def installed_entry_points(group: str) -> Mapping[str, tuple[str, ...]]:
    """The names in a group of entry points, each with the import paths of all packages that add it; imports
    nothing.
    """
    found: dict[str, set[str]] = {}
    for point in _all_entry_points().select(group=group):
        found.setdefault(point.name, set()).add(f"{point.module}.{point.attr}")
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


# Those of all groups, since to read the metadata of all packages takes some milliseconds each time.
_all_entry_points = functools.cache(entry_points)


def import_entry_point(group: str, name: str, expected: trust.ExpectedObject) -> Any:
    """Import what an installed package adds under a name of `installed_entry_points(group)`. Raises
    ImportPathError if several do, or it cannot be imported; trust.UntrustedError; trust.TrustSettingError.
    """
    target, *others = installed_entry_points(group)[name]
    if others:
        sources = " and ".join((target, *others))
        raise ImportPathError(
            f'the {expected.kind} name "{name}" is claimed twice, by {sources}; uninstall one of them'
        )
    try:
        return import_trusted(target, expected)
    except (trust.UntrustedError, trust.TrustSettingError):
        raise
    except Exception as error:  # a stranger's module may raise anything
        raise ImportPathError(
            f'the installed {expected.kind} "{name}" ({target}) cannot be imported: {error}'
        ) from error
