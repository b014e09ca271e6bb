"""The examination: of this host alone, or of all hosts of a launch together."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddprun.doctor.findings import Finding, Report, pair_of
from ddprun.doctor.gpus import look_at_gpus
from ddprun.doctor.host import bad_variables, facts, look, loopback_variables
from ddprun.host.network import VARIABLES, address_towards, interface_towards
from ddprun.screen import say

if TYPE_CHECKING:
    from ddprun.doctor.host_group import HostGroup

_LOOKING_S = 60.0
"""Longest time for a host to look at itself: drivers of GPUs may need long to start."""

_PORTS_S = 30.0
_PARTING_S = 5.0
_MANY_PAIRS = 3

AGAIN = (
    "look at the other findings; run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL and "
    "TORCH_CPP_LOG_LEVEL=INFO set, which name the collective"
)


@dataclass(frozen=True, slots=True)
class Examined:
    """This host."""

    facts: dict[str, Any]
    findings: list[Finding]


def this_host(ranks: int | None) -> Examined:
    """Look at this host alone.

    Args:
        ranks: that a run would start on it; None: one for each GPU, or two.
    """
    gpus = look_at_gpus()
    seen = facts(gpus, ranks or len(gpus.names) or 2)
    return Examined(seen, look(seen, gpus, os.environ))


def all_hosts(
    here: Examined, timeout_s: float, store: Any = None, extra: Sequence[Finding] = ()
) -> tuple[Report | None, bool]:
    """Look at all hosts together, as a rank whose place is in the environment.

    Every rank has to call this; one of each host takes part.

    Args:
        here: this host.
        timeout_s: how long others may take to come, and a collective to end.
        store: that has been reached; None: by what the environment says.
        extra: what else there is to say of this host.

    Returns:
        The report, on rank 0 alone, and whether there is no problem.

    Raises:
        LostError, NetworkError, RuntimeError: hosts cannot be reached any more.
    """
    from ddprun.doctor.host_group import HostGroup, bounded
    from ddprun.parallel.ranks import Environment, Ranks

    loopbacks = loopback_variables(os.environ)
    found = [
        *extra,
        *(
            Finding(
                where=here.facts["name"],
                check="interfaces",
                level="problem",
                found=f"{name} is {value}, the loopback, through which no other host can be reached",
                do=f"unset {name}: ddprun takes the interface that leads to the other hosts",
            )
            for name, value in loopbacks.items()
        ),
    ]
    for name in {**loopbacks, **bad_variables(os.environ)}:  # what is measured is measured without
        del os.environ[name]
    environment = Environment.read()
    ranks = Ranks(environment, timedelta(seconds=timeout_s))
    with bounded(3 * timeout_s):
        ranks.connect(store)
        group = HostGroup.of(ranks, [here.facts["name"], here.facts["boot"]])
    report = None
    if group.index is not None:
        report = _between(group, Examined(here.facts, [*here.findings, *found]), timeout_s)
        if group.index == 0:
            group.tell("fit", report.fit)
    fit = bool(group.hear("fit"))
    group.part(environment.rank, environment.world_size, _PARTING_S)
    return (report if ranks.rank == 0 else None), fit


def _between(group: "HostGroup", here: Examined, timeout_s: float) -> Report:
    """Measure between hosts; gives all of them the report."""
    from ddprun.doctor.clocks import clock_findings, offset
    from ddprun.doctor.host_group import bounded
    from ddprun.doctor.ports import Doors, Open, closed, port_findings

    name = group.names[group.place]
    mine = [{**finding.plain(), "where": name} for finding in here.findings]
    address = address_towards(os.environ["MASTER_ADDR"])
    interface = os.environ.get(VARIABLES[0], "")
    told = group.gather("hosts", [{**here.facts, "name": name}, mine, interface], _LOOKING_S + timeout_s)
    seen = [one[0] for one in told]
    findings = [Finding(**plain) for one in told for plain in one[1]]
    findings += differences(seen)
    with bounded(2 * timeout_s * group.size):
        offsets = offset(group, timeout_s)
    clocks = group.gather("clocks", offsets, timeout_s * group.size)
    with Open(address) as listening:
        doors = [
            Doors(where, tuple(ports), token)
            for where, ports, token in group.gather(
                "doors", [address, listening.doors.ports, listening.doors.token], timeout_s
            )
        ]
        others = [None if index == group.place else one for index, one in enumerate(doors)]
        shut = group.gather("ports", closed(others), _PORTS_S + timeout_s)
    ways = group.gather(
        "ways", [None if one is None else interface_towards(one.address) for one in others], timeout_s
    )
    named = [one[2] for one in told]
    between = way_findings(group.names, named, ways)
    between += port_findings(group.names, doors, shut) + clock_findings(group.names, clocks)
    fenced = {
        (min(pair), max(pair))
        for pair in itertools.permutations(range(group.size), 2)
        if shut[pair[0]][pair[1]]
    }
    between += _links(group, seen, named, fenced, timeout_s)
    return Report(seen, findings + between)


def _links(
    group: "HostGroup",
    seen: Sequence[Mapping[str, Any]],
    interfaces: Sequence[str],
    fenced: set[tuple[int, int]],
    timeout_s: float,
) -> list[Finding]:
    """Measure the links between all hosts that can reach each other."""
    import torch

    from ddprun.doctor.links import Measured, link_findings, rounds

    kinds = [("gloo", torch.device("cpu"))]
    if all(one["gpus"] and one["versions"]["NCCL"] for one in seen):
        kinds.append(("nccl", torch.device("cuda", 0)))
    schedule = rounds(group.size)
    if group.index == 0 and len(schedule) > _MANY_PAIRS:
        say(f"ddprun doctor: measures links in {len(schedule)} rounds of seconds each")
    findings: list[Finding] = []
    for number, (pairs, (backend, device)) in enumerate(itertools.product(schedule, kinds)):
        pair = next((pair for pair in pairs if group.place in pair and pair not in fenced), None)
        found = None if pair is None else _measured(group, pair, backend, device, timeout_s)
        for (one, other), told in zip(pairs, _of_pairs(group, pairs, number, found, timeout_s), strict=True):
            names = group.names[one], group.names[other]
            if isinstance(told, str):
                findings.append(
                    Finding(
                        where=pair_of(*names),
                        check="bandwidth",
                        level="problem",
                        found=f"a collective over {backend} failed: {told}",
                        do=AGAIN,
                    )
                )
            elif told is not None:
                speeds = [_speed(seen[host], interfaces[host]) for host in (one, other)]
                findings += link_findings(*names, Measured(**told), speeds)
    if any(len(pairs) > 1 for pairs in schedule):
        findings.append(
            Finding(
                where=", ".join((group.names[0], group.names[-1])),
                check="bandwidth",
                level="note",
                found=f"{group.size} hosts: up to {group.size // 2} pairs were measured at the same time",
                do="give --nnodes 2 on two hosts to measure a slow link alone",
            )
        )
    return findings


def _measured(
    group: "HostGroup", pair: tuple[int, int], backend: str, device: Any, timeout_s: float
) -> dict[str, Any] | str:
    """What was measured, or why it could not be."""
    import torch.distributed as dist

    from ddprun.doctor.host_group import bounded
    from ddprun.doctor.links import LONGEST_S, measure

    store = dist.PrefixStore(f"link/{backend}/{pair[0]}-{pair[1]}", group.store)
    try:
        with bounded(LONGEST_S + 2 * timeout_s):
            return measure(store, pair.index(group.place), backend, device, timeout_s).plain()
    except (RuntimeError, ValueError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__


def _of_pairs(
    group: "HostGroup",
    pairs: Sequence[tuple[int, int]],
    number: int,
    found: dict[str, Any] | str | None,
    timeout_s: float,
) -> list[dict[str, Any] | str | None]:
    """What each pair has measured; an error of either counts."""
    from ddprun.doctor.links import LONGEST_S

    others_s = 2 * timeout_s + (0 if isinstance(found, str) else LONGEST_S)
    told = group.gather(f"links/{number}", found, others_s)
    return [
        next((told[host] for host in pair if isinstance(told[host], str)), told[pair[0]]) for pair in pairs
    ]


def way_findings(
    names: Sequence[str], used: Sequence[str], ways: Sequence[Sequence[str | None]]
) -> list[Finding]:
    """Which interfaces lead from host to host, and whether they are those that are used.

    Args:
        names: of the hosts.
        used: interface that Gloo uses on each; empty: it takes its own choice.
        ways: `ways[i][j]`: interface of host i on the way to host j; None: there is none.
    """
    findings = []
    for one, other in itertools.combinations(range(len(names)), 2):
        where, wrong = pair_of(names[one], names[other]), []
        for here, there in ((one, other), (other, one)):
            way = ways[here][there]
            if used[here] and way is not None and way not in used[here].split(","):
                wrong.append((here, there, way))
        findings += [
            Finding(
                where=where,
                check="interfaces",
                level="problem",
                found=f"{names[here]} uses {used[here]}, but {way} leads to {names[there]}",
                do=f"on {names[here]} unset {VARIABLES[0]} and {VARIABLES[1]}, or set them to {way}",
            )
            for here, there, way in wrong
        ]
        if not wrong:
            told = f"{names[one]} uses {used[one] or 'any'}, {names[other]} {used[other] or 'any'}"
            findings.append(Finding(where=where, check="interfaces", level="ok", found=told))
    return findings


def _speed(seen: Mapping[str, Any], interface: str) -> float | None:
    speeds = [one["mbit_per_s"] for one in seen["interfaces"] if one["name"] == interface]
    return speeds[0] if speeds else None


def differences(seen: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Versions that are not the same on all hosts."""
    findings = []
    where = pair_of(seen[0]["name"], seen[-1]["name"]) if len(seen) > 1 else seen[0]["name"]
    for what in seen[0]["versions"]:
        found = [one["versions"][what] for one in seen]
        if what == "python":
            found = [text.rpartition(".")[0] for text in found]
        if len(set(found)) > 1:
            listed = ", ".join(f"{one['name']} has {one['versions'][what] or 'none'}" for one in seen)
            mild = what in ("python", "NVIDIA driver")
            findings.append(
                Finding(
                    where=where,
                    check="versions",
                    level="warning" if mild else "problem",
                    found=f"{what}: {listed}",
                    do=f"install the same {what} on all hosts",
                )
            )
    return findings
