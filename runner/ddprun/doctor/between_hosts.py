"""Examining all hosts of a launch together, and what is between them."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from ddprun.doctor import Finding, Level, Report, links, pair_label
from ddprun.doctor.host import unusable_interface_variables
from ddprun.host import network
from ddprun.launch.host_group import HostGroup, error_first_line, exit_on_timeout, leave_together
from ddprun.standard_streams import say

_PORT_CHECK_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 5.0
_MAX_UNANNOUNCED_LINKS = 3

RUN_AGAIN_ADVICE = (
    "see the other findings; run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL and "
    "TORCH_CPP_LOG_LEVEL=INFO set, which name the collective"
)


def examine_hosts(own_report: Report, info: RendezvousInfo, endpoint: str, timeout_s: float) -> Report:
    """Examine all hosts, which have met in a rendezvous at `endpoint`; gives all of them the report. Raises
    HostsError, NetworkError or RuntimeError if hosts are lost.

    A host may take `timeout_s` to answer, and a collective to end.
    """
    (facts,) = own_report.hosts
    for variable in unusable_interface_variables(several_hosts=True):  # what is measured is measured without
        del os.environ[variable]
    base: Any = info.store
    base = base.clone()  # the first connection is the rendezvous'
    base.set_timeout(timedelta(seconds=timeout_s))
    store = dist.PrefixStore("doctor", base)
    group = HostGroup(store, [f"host {index}" for index in range(info.world_size)], info.rank)
    places = group.gather(
        "places", [facts["name"], network.machine_id(), network.address_towards(endpoint)], timeout_s
    )
    known = [name for name, *_ in places]
    names = [name if known.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(known)]
    findings = [*own_report.findings]
    if facts["name"] in network.duplicate_host_names((name, where) for name, where, _ in places):
        found = f"{facts['name']} is another host's, too: runs tell hosts apart by it"
        findings.append(Finding(facts["name"], "hostname", "problem", found, network.HOST_NAME_ADVICE))
    group = HostGroup(store, names, info.rank)
    others = [address for index, (*_, address) in enumerate(places) if index != info.rank]
    network.choose_interface_together(
        names[info.rank], endpoint, others[0], lambda fault: group.gather("faults", fault, timeout_s)
    )
    address = network.address_towards(endpoint)
    report = _measure_between_hosts(group, facts, findings, address, timeout_s)
    leave_together(store, info.rank, info.world_size, _SHUTDOWN_TIMEOUT_S)
    return report


def _measure_between_hosts(
    group: HostGroup, facts: Mapping[str, Any], findings: Sequence[Finding], address: str, timeout_s: float
) -> Report:
    """Measure between hosts; gives all of them the report. `address` is where they reach this one."""
    size, name = len(group.names), group.names[group.index]
    mine = [{**asdict(finding), "where": name} for finding in findings]
    interface = os.environ.get(network.INTERFACE_VARIABLES[0], "")
    answers = group.gather("hosts", [{**facts, "name": name}, mine, interface], timeout_s)
    hosts, interfaces = [answer[0] for answer in answers], [answer[2] for answer in answers]
    found = [Finding(**plain) for answer in answers for plain in answer[1]] + version_findings(hosts)
    with exit_on_timeout(2 * timeout_s * size):
        offset = links.clock_offset(group.store, group.index, size, timeout_s)
    clocks = group.gather("clocks", offset, timeout_s * size)
    with links.listen_on_ports(address) as own:
        listening = [links.ListeningPorts(*one) for one in group.gather("listening", own, timeout_s)]
        closed = group.gather(
            "ports", links.find_unreachable_ports(listening), _PORT_CHECK_TIMEOUT_S + timeout_s
        )
    found += links.port_findings(group.names, listening, closed)
    found += links.clock_findings(group.names, clocks)
    return Report(hosts, found + _measure_links(group, hosts, interfaces, closed, timeout_s))


def _measure_links(
    group: HostGroup,
    hosts: Sequence[Mapping[str, Any]],
    interfaces: Sequence[str],
    closed: Sequence[Sequence[Sequence[Any]]],
    timeout_s: float,
) -> list[Finding]:
    kinds = [("gloo", torch.device("cpu"))]
    if all(host["gpus"] and host["versions"]["NCCL"] for host in hosts):
        kinds.append(("nccl", torch.device("cuda", 0)))
    pairs = links.pairs_to_measure(len(hosts))
    if group.index == 0 and len(pairs) > _MAX_UNANNOUNCED_LINKS:
        say(f"measuring {len(pairs)} links, each for a few seconds")
    findings: list[Finding] = []
    for number, ((one, other), (backend, device)) in enumerate(itertools.product(pairs, kinds)):
        if closed[one][other] or closed[other][one]:
            continue
        mine = None
        if group.index in (one, other):
            mine = _measure_pair(group, (one, other), backend, device, timeout_s)
        others_s = 2 * timeout_s + (0 if isinstance(mine, str) else links.MAX_MEASURING_S)
        results = group.gather(f"links/{number}", mine, others_s)
        names = group.names[one], group.names[other]
        if failed := [text for text in (results[one], results[other]) if isinstance(text, str)]:
            found = f"a collective over {backend} failed: {failed[0]}"
            findings.append(Finding(pair_label(*names), "bandwidth", "problem", found, RUN_AGAIN_ADVICE))
        else:
            speeds = [_interface_mbit_per_s(hosts[host], interfaces[host]) for host in (one, other)]
            findings += links.link_findings(*names, links.LinkMeasurement(**results[one]), speeds)
    if len(hosts) > links.MAX_HOSTS_FOR_ALL_PAIRS:
        where = pair_label(group.names[0], group.names[-1])
        found = f"{len(hosts)} hosts: of the links, only those of each host to the next one were measured"
        do = "give --nnodes 2 on two hosts to measure another link"
        findings.append(Finding(where, "bandwidth", "note", found, do))
    return findings


def _measure_pair(
    group: HostGroup, pair: tuple[int, int], backend: str, device: torch.device, timeout_s: float
) -> dict[str, Any] | str:
    store = dist.PrefixStore(f"link/{backend}/{pair[0]}-{pair[1]}", group.store)
    try:
        with exit_on_timeout(links.MAX_MEASURING_S + 2 * timeout_s):
            return asdict(links.measure_host_link(store, pair.index(group.index), backend, device, timeout_s))
    except (RuntimeError, ValueError) as error:
        return error_first_line(error)


def _interface_mbit_per_s(host: Mapping[str, Any], interface: str) -> float | None:
    return next((one["mbit_per_s"] for one in host["interfaces"] if one["name"] == interface), None)


def version_findings(hosts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Versions that are not the same on all hosts."""
    findings = []
    where = pair_label(hosts[0]["name"], hosts[-1]["name"]) if len(hosts) > 1 else hosts[0]["name"]
    for what in hosts[0]["versions"]:
        found = [host["versions"][what] for host in hosts]
        if what == "python":
            found = [text.rpartition(".")[0] for text in found]
        if len(set(found)) > 1:
            listed = ", ".join(f"{host['name']} has {host['versions'][what] or 'none'}" for host in hosts)
            level: Level = "warning" if what in ("python", "NVIDIA driver") else "problem"
            do = f"install the same {what} on all hosts"
            findings.append(Finding(where, "versions", level, f"{what}: {listed}", do))
    return findings
