"""From all ranks' status pages to the ranks that keep the others waiting, and the words for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddprun.watchdog.status_page import Seen, Wait

Why = Literal["late", "silent", "circle", "network"]
"""`late`: they have not come to the collective. `silent`: nobody can see whether they have. `group`: they
wait for each other. `network`: all have come, all are alive, and it does not get through."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whose fault it is."""

    why: Why
    ranks: tuple[int, ...]


def diagnose(me: int, seen: Mapping[int, Seen]) -> Diagnosis:
    """Follow who waits for whom, from this rank on, to those that wait for nobody.

    Args:
        me: a rank that waits; its status page is among those seen.
        seen: the status pages of the ranks that could be asked.
    """
    late, silent, visited = [], [], [me]
    for rank in visited:  # grows as it goes
        one = seen.get(rank)
        if one is None:
            silent.append(rank)
        elif rank != me and (one.lost or not one.waits):
            late.append(rank)
        else:
            visited += [other for other in _ahead(one, seen) if other not in visited]
    if late:
        return Diagnosis("late", tuple(sorted(late)))
    if silent:
        return Diagnosis("silent", tuple(sorted(silent)))
    if len(visited) > 1:
        return Diagnosis("circle", tuple(sorted(visited)))
    return Diagnosis("network", tuple(sorted(seen[me].waits[0].ranks)))


def _ahead(one: Seen, seen: Mapping[int, Seen]) -> list[int]:
    """The ranks that `one` waits for."""
    wait = one.waits[0]
    if wait.peers is not None:
        return list(wait.peers)
    others = [rank for rank in wait.ranks if rank != one.rank]
    late = [rank for rank in others if rank in seen and _count(seen[rank], wait) < wait.number]
    if late:
        return late
    unseen = [rank for rank in others if rank not in seen]
    return unseen or [rank for rank in others if seen[rank].lost]


def _count(seen: Seen, wait: Wait) -> int:
    """How many collectives of a line a rank has issued."""
    if wait.line < len(seen.issued):
        return seen.issued[wait.line]
    return 0


def headline(diagnosis: Diagnosis, timeout_s: float) -> str:
    """In one line, without the place."""
    who = named(diagnosis.ranks)
    match diagnosis.why:
        case "late":
            return f"{who} did not arrive within {timeout_s:g} s"
        case "silent":
            return f"{who} did not arrive within {timeout_s:g} s, or cannot be reached"
        case "circle":
            return f"{who} have waited for each other for {timeout_s:g} s"
        case "network":
            return f"{who} have all come to a collective, and for {timeout_s:g} s it does not get through"


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    told = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {told}"


def doing(one: Seen) -> str:
    """What a rank is at."""
    where = f" of step {one.step}" if one.step else ""
    stage = f" ({one.stage})" if one.stage else ""
    if one.state in ("Z", "gone") and one.lost:
        return f"has ended; its last turn was {one.phase}{where}{stage}"
    if one.stopped:
        state = f"its process ({one.pid}) is stopped, by SIGSTOP or a debugger; it was"
    elif one.lost:
        state = f"its process ({one.pid}) gives no sign of life (state {one.state}); it was"
    else:
        state = "is"
    told = f"{state} in {one.phase}{where}{stage}, for {one.phase_age_s:.1f} s"
    if one.waits and not one.lost:
        wait = one.waits[0]
        told += f", and waits in {wait.op} {wait.number} of {wait.name} ({wait.what})"
    return told + (f", at {one.at}" if one.at else "")
