"""What a rank says of a hang: who is missing, by all status pages."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ddprun.run_files import replace_atomically
from ddprun.units import abbreviated_list
from ddprun.watchdog.rank_watchdog import WatchedCollective
from ddprun.watchdog.status_page import RankStatus
from ddprun_hooks.errors import format_ranks

_PARAMS_SHOWN = 12
_MAX_OTHER_WAITS_SHOWN = 3
_DOCTOR_ADVICE = "run ddprun doctor on all hosts, with the flags of the run: it tests the links between them"
_ACTIVITIES_KEPT = 8  # of the ranks at fault

# `late`: they have not come to the collective. `silent`: nobody can see whether they have. `circle`: they
# wait for each other. `network`: all have entered it, all are alive, and it does not complete.
HangCause = Literal["late", "silent", "circle", "network"]


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another rank is, as it said when it joined."""

    host: str
    status_page_path: str  # path of its status page, on its host
    status_server: str  # where its launcher's status server answers; empty if it has none


@dataclass(frozen=True, slots=True)
class HangReport:
    """What a rank has found out."""

    message: str  # for the screen
    details: str  # for the log, after the message
    headline: str
    facts: dict[str, Any] = field(default_factory=dict)  # for the event and the summary


class Diagnosis(NamedTuple):
    """What kind of hang it is, and which ranks cause it; for `network`, those of the collective."""

    cause: HangCause
    ranks: tuple[int, ...]


def diagnose(me: int, statuses: Mapping[int, RankStatus]) -> Diagnosis:
    """Follow who waits for whom, from a rank whose status is known, to those that wait for nobody."""
    late, silent, visited = [], [], [me]
    for rank in visited:  # grows as it goes
        status = statuses.get(rank)
        if status is None:
            silent.append(rank)
        elif rank != me and (status.is_unexpectedly_lifeless or not status.waits):
            late.append(rank)
        else:
            visited += [other for other in _awaited_ranks(status, statuses) if other not in visited]
    if late:
        return Diagnosis("late", tuple(sorted(late)))
    if silent:
        return Diagnosis("silent", tuple(sorted(silent)))
    if len(visited) > 1:
        return Diagnosis("circle", tuple(sorted(visited)))
    return Diagnosis("network", tuple(sorted(statuses[me].waits[0].ranks)))


def _awaited_ranks(status: RankStatus, statuses: Mapping[int, RankStatus]) -> list[int]:
    wait = status.waits[0]
    if wait.peers is not None:
        return list(wait.peers)
    others = [rank for rank in wait.ranks if rank != status.rank]
    known = {rank: statuses[rank] for rank in others if rank in statuses}
    late = [rank for rank, other in known.items() if other.issued_count(wait.index) < wait.number]
    unknown = [rank for rank in others if rank not in known]
    return late or unknown or [rank for rank, other in known.items() if other.is_unexpectedly_lifeless]


def build_report(
    rank: int,
    size: int,
    host: str,
    timeout_s: float,
    waits: Sequence[WatchedCollective],
    statuses: Mapping[int, RankStatus],
    peers: Mapping[int, PeerAddress],
) -> HangReport:
    """Say who is missing, as rank `rank` of `size` on `host` sees it; `waits`: what it waits for, oldest
    first; `statuses` has its own, too.
    """
    diagnosis = diagnose(rank, statuses)
    pending, own_status = waits[0], statuses[rank]
    waiting = [one for one, status in statuses.items() if status.waits and one not in diagnosis.ranks]
    describe = partial(_describe_rank, host=host, statuses=statuses, peers=peers)
    step = f"step {own_status.step}" if own_status.step else ""
    where = ", ".join(part for part in (own_status.stage, step) if part)
    head = diagnosis_headline(diagnosis, timeout_s)
    names = [param.name for param in pending.params]
    also_waits = [
        f"{_describe_collective(one)}, {' '.join(_contents_row(one))}"
        for one in waits[1 : 1 + _MAX_OTHER_WAITS_SHOWN]
    ]
    several_hosts = any(peer.host != host for peer in peers.values())
    rows = [
        ("collective", f"{_describe_collective(pending)}, among {format_ranks(pending.sequence.ranks)}"),
        _contents_row(pending),
        *((f"rank {one}", describe(one)) for one in diagnosis.ranks),
        ("waiting", format_ranks(waiting or [*statuses])),
        *(("also waits for", text) for text in also_waits),
        *([("next step", _DOCTOR_ADVICE)] if diagnosis.cause == "network" and several_hosts else []),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"ddprun: the run hangs ({where or 'before the first stage'}): {head}"]
    lines += [f"  {name:{width}}  {text}" for name, text in rows]
    details = [f"parameters of the bucket: {', '.join(names)}"] if len(names) > _PARAMS_SHOWN else []
    details += [f"rank {one} {describe(one)}" for one in range(size)]
    facts = {
        "why": diagnosis.cause,
        "ranks": list(diagnosis.ranks),
        "activities": [describe(one) for one in diagnosis.ranks[:_ACTIVITIES_KEPT]],
        "stage": own_status.stage,
        "step": own_status.step,
        "collective": pending.op,
        "line": pending.sequence.name,
        "number": pending.number,
        "kind": pending.kind,
        "bucket": None if pending.kind is None else pending.bucket,
        "params": names,
        "carries": pending.description,
        "timeout_s": timeout_s,
    }
    return HangReport("\n".join(lines), "\n".join(details), f"the run hangs: {head}", facts)


def _describe_rank(
    rank: int, host: str, statuses: Mapping[int, RankStatus], peers: Mapping[int, PeerAddress]
) -> str:
    status, peer = statuses.get(rank), peers.get(rank)
    if status is not None:
        elsewhere = f" (on {peer.host})" if peer is not None and peer.host != host else ""
        return describe_activity(status) + elsewhere
    if peer is None:
        return "has not joined, as far as can be seen from here"
    if not peer.status_server and peer.host != host:
        why = "no status server of ddprun's launcher runs there"
        return f"is on {peer.host}, whose ranks cannot be asked: {why}"
    return f"is on {peer.host}, which does not answer: the host or the link to it is down"


def _describe_collective(pending: WatchedCollective) -> str:
    return f"{pending.op} {pending.number} of {pending.sequence.name}"


def _contents_row(pending: WatchedCollective) -> tuple[str, str]:
    if pending.kind is None:
        return "for", pending.description
    names = [param.name for param in pending.params]
    shown = abbreviated_list(names, _PARAMS_SHOWN) or "the exact mean"
    return "bucket", f"{pending.bucket} ({pending.kind}): {shown}"


def diagnosis_headline(diagnosis: Diagnosis, timeout_s: float) -> str:
    """The diagnosis in one line."""
    who = format_ranks(diagnosis.ranks)
    words: dict[HangCause, str] = {
        "late": f"did not arrive within {timeout_s:g} s",
        "silent": f"did not arrive within {timeout_s:g} s, or cannot be reached",
        "circle": f"have waited for each other for {timeout_s:g} s, in different collectives",
        "network": f"have all entered a collective that has not completed for {timeout_s:g} s",
    }
    return f"{who} {words[diagnosis.cause]}"


def describe_activity(status: RankStatus) -> str:
    """What a rank is doing."""
    where = f" of step {status.step}" if status.step else ""
    stage = f" ({status.stage})" if status.stage else ""
    if status.state in ("Z", "gone") and status.is_unexpectedly_lifeless:
        return f"has ended; last seen in {status.phase}{where}{stage}"
    if status.is_suspended:
        state = f"its process ({status.pid}) is stopped, by SIGSTOP or a debugger; it was"
    elif status.is_unexpectedly_lifeless:
        state = f"its process ({status.pid}) gives no sign of life (state {status.state}); it was"
    else:
        state = "is"
    text = f"{state} in {status.phase}{where}{stage}, for {status.phase_age_s:.1f} s"
    if status.waits and not status.is_unexpectedly_lifeless:
        wait = status.waits[0]
        text += f", and waits in {wait.op} {wait.number} of {wait.name} ({wait.what})"
    return text + (f", at {status.code_location}" if status.code_location else "")


_RECORDERS = {
    "flight-recorder": "_dump_fr_trace_json",
    "flight-recorder-nccl": "_dump_nccl_trace_json",  # only torch with CUDA has it
}


def dump_flight_recorders(folder: Path, rank: int) -> None:
    """Keep what torch's flight recorders have of this rank, as JSON, if they have anything. There are two:
    one of Gloo's collectives, whose end it does not note, and one of NCCL's.
    """
    from torch._C import _distributed_c10d

    for name, dump in _RECORDERS.items():
        with suppress(AttributeError, OSError, ValueError, RuntimeError):
            trace: bytes = getattr(_distributed_c10d, dump)()
            if json.loads(trace).get("entries"):
                with replace_atomically(folder, f"{name}-{rank:05}.json") as file:
                    file.write(trace)
