"""What installed packages add by an entry point: hooks here, and in ddprun trackers and cluster backends."""

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ddprun_hooks.config.import_path import import_dotted
from ddprun_hooks.config.trust import TrustSettingError, UntrustedError, Wanted
from ddprun_hooks.errors import DottedNameError


@functools.cache
def installed(group: str) -> Mapping[str, tuple[str, ...]]:
    """The names in a group of entry points, each with the dotted names that it stands for; imports nothing.

    A name stands for several if more than one package adds it.
    """
    found: dict[str, set[str]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, set()).add(f"{point.module}.{point.attr}")
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def import_installed(group: str, name: str, wanted: Wanted) -> Any:
    """Import what an installed package adds under a name.

    Args:
        group: of entry points.
        name: one of `installed(group)`.
        wanted: the kind of object that it must be; judged where `DDPRUN_TRUSTED` sets a limit.

    Raises:
        DottedNameError: several packages add the name, or it cannot be imported.
        UntrustedError: `DDPRUN_TRUSTED` does not allow it.
        TrustSettingError: `DDPRUN_TRUSTED` cannot be read.
    """
    target, *others = installed(group)[name]
    if others:
        sources = " and ".join((target, *others))
        raise DottedNameError(
            f'the {wanted.kind} name "{name}" is claimed twice, by {sources}; uninstall one of them'
        )
    try:
        return import_dotted(target, wanted)
    except (UntrustedError, TrustSettingError):
        raise
    except Exception as error:  # a stranger's module may raise anything
        raise DottedNameError(
            f'the installed {wanted.kind} "{name}" ({target}) cannot be imported: {error}'
        ) from error
