"""How far the wall clocks of hosts are apart."""

import itertools
import json
import time
from collections.abc import Sequence
from datetime import timedelta

from ddprun.doctor.findings import Finding, Level, pair_of
from ddprun.doctor.host_group import HostGroup

_ROUNDS = 10
_WARNING_S = 1.0

ELASTIC_S = 5.0
"""Elastic runs take a host for lost that has given no sign of life for so long, by its own wall clock
(`ddprun.launch.agent`)."""


def offset(group: HostGroup, within_s: float) -> tuple[float, float]:
    """How far this host's wall clock is ahead of the first host's, and the error bound, in seconds.

    Cristian's algorithm (Distributed Computing 3, 1989), through the store: of some exchanges the one with
    the shortest round trip counts, and half of it is the error bound. The first host answers one by one.

    Args:
        group: of the hosts.
        within_s: how long a host may take to begin.
    """
    store, wait = group.store, timedelta(seconds=within_s)
    if group.index == 0:
        for other, number in itertools.product(range(1, group.size), range(_ROUNDS)):
            store.wait([f"clock/{other}/{number}/asked"], wait)
            store.set(f"clock/{other}/{number}/told", json.dumps(time.time()))
        return 0.0, 0.0
    best = (0.0, float("inf"))
    for number in range(_ROUNDS):
        key, asked, began = f"clock/{group.index}/{number}", time.time(), time.monotonic()
        store.set(f"{key}/asked", "")
        store.wait([f"{key}/told"], timedelta(seconds=within_s * group.size))
        theirs, bound = json.loads(store.get(f"{key}/told")), (time.monotonic() - began) / 2
        if bound < best[1]:
            best = (asked + bound - theirs, bound)
    return best


def clock_findings(names: Sequence[str], offsets: Sequence[tuple[float, float]]) -> list[Finding]:
    """What there is to say of each pair of hosts.

    Args:
        names: of the hosts.
        offsets: as `offset` gave them, of each host.
    """
    return [
        _finding(
            names[one], names[other], offsets[other][0] - offsets[one][0], offsets[one][1] + offsets[other][1]
        )
        for one, other in itertools.combinations(range(len(names)), 2)
    ]


def _finding(one: str, other: str, ahead_s: float, within_s: float) -> Finding:
    """Args: how far the other's clock is ahead of the one's, and the error bound."""
    ahead, behind = (other, one) if ahead_s > 0 else (one, other)
    apart_s = abs(ahead_s)
    told = f"the clock of {ahead} is {length(apart_s)} ahead of that of {behind} (± {length(within_s)})"
    level: Level = "ok"
    if apart_s <= within_s:
        told = f"clocks are equal within {length(within_s)}"
    elif apart_s > _WARNING_S:
        level = "warning"
        told += "; logs and records of the two do not fit together"
        if apart_s > ELASTIC_S:
            level = "problem"
            told += f", and elastic runs (--max-restarts, --nnodes MIN:MAX) take {behind} for lost"
    do = (
        ""
        if level == "ok"
        else "let chrony or ntpd set the clocks on both: `chronyc makestep`, `timedatectl`"
    )
    value = {"ahead": ahead, "ahead_s": apart_s, "within_s": within_s}
    return Finding(where=pair_of(one, other), check="clock", level=level, found=told, do=do, value=value)


def length(seconds: float) -> str:
    """A time for a reader: three digits that count."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    raise AssertionError
