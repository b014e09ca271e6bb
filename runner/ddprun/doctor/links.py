"""What is measured between two hosts: clocks, ports, latency and bandwidth.

The hosts of a launch are numbered from 0. Each part measures on one host, and turns what all hosts have
measured into findings about every pair of them.
"""

import itertools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddprun.doctor import Finding, Level, pair_label
from ddprun.host import network
from ddprun.units import format_bit_rate, format_duration

_CLOCK_ROUNDS = 10
_CLOCK_WARNING_S = 1.0

# Without a sign of life, by its own clock, elastic runs take a host for lost.
ELASTIC_HEARTBEAT_TIMEOUT_S = 5.0
_PORT_COUNT = 3  # a firewall may leave some ports open; so many are tried
_MAX_CONNECTIONS = 32
_MAX_PENDING = 1024  # connections from other hosts to one port

_FIRST_BYTES, _MAX_MESSAGE_BYTES = 64 << 10, 64 << 20
_REPEATS, _REPEATS_S = 5, 2.0
_LONG_TRANSFER_S = 0.2  # once a message has the link busy for so long, no longer ones are measured
# As many latencies as a gradient bucket: Gloo sends one or two numbers in half as many.
_SMALL_MESSAGE_NUMEL = 64
_WARM_UP_BARRIERS, _MOST_BARRIERS, _TOTAL_BARRIERS_S = 5, 200, 1.0
_MAX_CPU_SHARE = 0.25

MAX_MEASURING_S = 60.0  # what measuring a link takes at most, but for a collective that fails
_SLOW_MBIT, _HIGH_LATENCY_S = 1000.0, 2e-3
_MAX_GLOO_STREAM_MBIT = 10_000.0  # one stream of Gloo's is not to be expected faster, whatever the interface
_MIN_FRACTION_OF_SPEED = 0.3
_MAX_ASYMMETRY = 2.0
MAX_HOSTS_FOR_ALL_PAIRS = 8  # of so many hosts every pair is measured


def clock_offset(store: dist.Store, host: int, hosts: int, within_s: float) -> tuple[float, float]:
    """How far this host's wall clock is ahead of the first host's, and the error bound, in seconds.

    Cristian's algorithm (Distributed Computing 3, 1989), through the store: of some exchanges the one with
    the shortest round trip counts, and half of it is the error bound. The first host answers one by one, and
    waits `within_s` for each to begin.
    """
    if host == 0:
        for other, number in itertools.product(range(1, hosts), range(_CLOCK_ROUNDS)):
            store.wait([f"clock/{other}/{number}/asked"], timedelta(seconds=within_s))
            store.set(f"clock/{other}/{number}/answer", json.dumps(time.time()))
        return 0.0, 0.0
    best = (0.0, float("inf"))
    for number in range(_CLOCK_ROUNDS):
        key, asked, began = f"clock/{host}/{number}", time.time(), time.monotonic()
        store.set(f"{key}/asked", "")
        store.wait([f"{key}/answer"], timedelta(seconds=within_s * hosts))
        theirs, bound = json.loads(store.get(f"{key}/answer")), (time.monotonic() - began) / 2
        if bound < best[1]:
            best = (asked + bound - theirs, bound)
    return best


def clock_findings(names: Sequence[str], offsets: Sequence[tuple[float, float]]) -> list[Finding]:
    """How far the clocks of each pair are apart, from each host's `measure_clock_offset`."""
    findings = []
    for (one, (offset, bound)), (other, (others, others_bound)) in itertools.combinations(
        zip(names, offsets, strict=True), 2
    ):
        ahead, behind = (other, one) if others > offset else (one, other)
        apart_s, within_s = abs(others - offset), bound + others_bound
        apart, error = format_duration(apart_s), format_duration(within_s)
        found = f"the clock of {ahead} is {apart} ahead of that of {behind} (± {error})"
        level: Level = "ok"
        if apart_s <= within_s:
            found = f"clocks are equal within {error}"
        elif apart_s > _CLOCK_WARNING_S:
            level = "warning"
            found += "; times in their logs and records do not match"
            if apart_s > ELASTIC_HEARTBEAT_TIMEOUT_S:
                level = "problem"
                found += f", and elastic runs (--max-restarts, --nnodes MIN:MAX) consider {behind} lost"
        do = "let chrony or ntpd set the clocks on both: `chronyc makestep`, `timedatectl`"
        value = {"ahead": ahead, "ahead_s": apart_s, "within_s": within_s}
        where = pair_label(one, other)
        findings.append(Finding(where, "clock", level, found, "" if level == "ok" else do, value))
    return findings


class ListeningPorts(NamedTuple):
    """Where a host listens."""

    address: str
    ports: Sequence[int]


@contextmanager
def listen_on_ports(address: str) -> Iterator[ListeningPorts]:
    """Listen at an address of this host, at ports that the kernel chooses, until the block is left. Nobody
    accepts: the kernel completes connections by itself.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server((address, 0), family=family, backlog=_MAX_PENDING))
            for _ in range(_PORT_COUNT)
        ]
        yield ListeningPorts(address, tuple(int(one.getsockname()[1]) for one in listeners))


def find_unreachable_ports(hosts: Sequence[ListeningPorts]) -> list[list[tuple[int, str]]]:
    """For each host the ports at which it cannot be reached from here, and why."""
    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        found = [
            (one.ports, pool.map(partial(network.connection_problem, one.address), one.ports))
            for one in hosts
        ]
    return [[(port, why) for port, why in zip(*one, strict=True) if why] for one in found]


def port_findings(
    names: Sequence[str],
    hosts: Sequence[ListeningPorts],
    closed: Sequence[Sequence[Sequence[tuple[int, str]]]],
) -> list[Finding]:
    """Which ports each pair can reach; `closed[i][j]` are those of host j that host i cannot, and why."""
    findings = []
    for one, other in itertools.combinations(range(len(names)), 2):
        where = pair_label(names[one], names[other])
        faults = []
        for here, there in ((one, other), (other, one)):
            if not (ports := closed[here][there]):
                continue
            tried = len(hosts[there].ports)
            listed = ", ".join(f"{names[there]}:{port}" for port, _ in ports)
            some = "" if len(ports) == tried else f" (of {tried} tried)"
            whys = ", ".join(dict.fromkeys(why for _, why in ports))
            found = f"{names[here]} cannot connect to {listed}{some}: {whys}"
            do = (
                f"open all TCP ports on {names[there]} ({hosts[there].address}) for {names[here]} "
                f"({hosts[here].address}): Gloo and NCCL use ports of net.ipv4.ip_local_port_range "
                "that cannot be chosen; no collective was tried"
            )
            value = {"from": names[here], "to": names[there], "closed": [port for port, _ in ports]}
            faults.append(Finding(where, "ports", "problem", found, do, value))
        fine = Finding(where, "ports", "ok", f"{_PORT_COUNT} ports chosen by the kernel are open both ways")
        findings += faults or [fine]
    return findings


def pairs_to_measure(hosts: int) -> list[tuple[int, int]]:
    """Which pairs are measured, one after the other, so that nothing else is on the network: all of up to
    eight hosts; of more, which would take too long, each host and the next one.
    """
    if hosts <= MAX_HOSTS_FOR_ALL_PAIRS:
        return list(itertools.combinations(range(hosts), 2))
    return [(host, host + 1) for host in range(hosts - 1)]


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A link, by a process group of its two hosts alone; medians."""

    backend: str
    latency_s: float  # a small all-reduce
    there_mbit: float  # Megabits a second from the first host to the second, by a broadcast
    back_mbit: float
    both_mbit: float  # each way, by an all-reduce, which sends both ways at once
    nbytes: int  # of these messages, whose latency does not count
    # Bytes of an all-reduce, and Mbit/s each way, by increasing size: a link may carry long messages at
    # another rate than short ones.
    both_by_bytes: Sequence[tuple[int, float]]


def measure_host_link(
    store: dist.Store, rank: int, backend: str, device: torch.device, timeout_s: float
) -> LinkMeasurement:
    """Measure with the other host of a pair, which has to call this, too; both get the result.

    `store` is for this measurement alone, `rank` in the pair 0 or 1. Raises RuntimeError if a collective
    fails, or takes longer than `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        link = _LinkBenchmark(device)
        took = _median_s(link.time_calls(_WARM_UP_BARRIERS))
        count = max(_WARM_UP_BARRIERS, min(_MOST_BARRIERS, int(_TOTAL_BARRIERS_S / took)))
        latency_s = _median_s(link.time_calls(count))
        all_reduces = link.time_all_reduces(latency_s)
        *_, nbytes = all_reduces
        both = _mbit_per_s(nbytes, all_reduces[nbytes], 2 * latency_s)
        there, back = (
            # Each of its messages takes as long as one of the all-reduce's two.
            _mbit_per_s(
                nbytes, link.time_collective(partial(dist.broadcast, src=source), nbytes), 1.5 * latency_s
            )
            for source in (0, 1)
        )
        by_bytes = all_reduce_rates_by_bytes(all_reduces, latency_s, by_cpu=device.type == "cpu")
        return LinkMeasurement(backend, latency_s, there, back, both, nbytes, by_bytes)
    finally:
        dist.destroy_process_group()


class _CallTiming(NamedTuple):
    wall_s: float
    cpu_s: float  # processor time of all threads of the first host's process


def _median_s(calls: Sequence[_CallTiming]) -> float:
    return statistics.median(call.wall_s for call in calls)


class _LinkBenchmark:
    """Timed collectives between two hosts, both by the first one's times, so that they choose equal sizes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._small = torch.zeros(_SMALL_MESSAGE_NUMEL, device=device)
        self._memory = torch.empty(_MAX_MESSAGE_BYTES // self._small.element_size(), device=device).zero_()

    def time_calls(self, count: int, send: Callable[[], object] = lambda: None) -> list[_CallTiming]:
        """`count` calls of `send`, each followed by a small all-reduce."""
        times = []
        self._barrier()
        for _ in range(count):
            began, began_cpu = time.perf_counter(), time.process_time()
            send()
            self._barrier()
            times.append((time.perf_counter() - began, time.process_time() - began_cpu))
        found = torch.tensor(times, dtype=torch.float64, device=self._device)
        dist.broadcast(found, 0)
        return [_CallTiming(*one) for one in found.tolist()]

    def time_all_reduces(self, latency_s: float) -> dict[int, list[_CallTiming]]:
        """All-reduces by their size in bytes, each followed by a small one; the last has the link busy for
        long, and for longer than its latency, or is the largest.
        """
        found, nbytes, transfer_s = dict[int, list[_CallTiming]](), _FIRST_BYTES, 0.0
        while nbytes <= _MAX_MESSAGE_BYTES and transfer_s < max(_LONG_TRANSFER_S, latency_s):
            found[nbytes] = self.time_collective(dist.all_reduce, nbytes)
            transfer_s = _median_s(found[nbytes]) - 2 * latency_s
            nbytes *= 4
        return found

    def time_collective(self, collective: Callable[[torch.Tensor], object], nbytes: int) -> list[_CallTiming]:
        """Some calls of a collective, each followed by a small all-reduce."""
        message = self._memory[: -(-nbytes // self._memory.element_size())]
        calls = list[_CallTiming]()
        while len(calls) < _REPEATS and sum(call.wall_s for call in calls) < _REPEATS_S:
            calls += self.time_calls(1, lambda: collective(message))
        return calls

    def _barrier(self) -> None:
        dist.all_reduce(self._small)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _mbit_per_s(nbytes: int, calls: Sequence[_CallTiming], latency_s: float) -> float:
    """Median Mbit/s of so many bytes, without the latency as far as that is not most of the time."""
    took_s = _median_s(calls)
    return 8e-6 * nbytes / max(took_s - latency_s, took_s / 3)


def all_reduce_rates_by_bytes(
    all_reduces: Mapping[int, Sequence[_CallTiming]], latency_s: float, *, by_cpu: bool
) -> list[tuple[int, float]]:
    """Sizes in bytes, and the Mbit/s of all-reduces. Without those that mostly take latency or, where a CPU
    sends them, its work: they say more of the hosts than of the link, and so do shorter ones.
    """
    found = list[tuple[int, float]]()
    for nbytes, calls in all_reduces.items():
        # Disturbances add to both times: the least of some calls is the work itself.
        least_s, least_cpu_s = map(min, zip(*calls, strict=True))
        if by_cpu and least_cpu_s > _MAX_CPU_SHARE * least_s:
            found.clear()
        elif _median_s(calls) > 3 * latency_s:
            found.append((nbytes, _mbit_per_s(nbytes, calls, 2 * latency_s)))
    return found


def link_findings(
    one: str, other: str, found: LinkMeasurement, speeds_mbit: Sequence[float | None]
) -> list[Finding]:
    """What was measured between two hosts; `speeds_mbit` are those of their interfaces, where known."""
    where = pair_label(one, other)
    text = f"a small all-reduce takes {format_duration(found.latency_s)} over {found.backend}"
    advice = "fewer and larger messages: ddp.bucket_cap_mb, accumulate; or sync: local_sgd or diloco"
    value: dict[str, Any] = {"backend": found.backend, "all_reduce_us": found.latency_s * 1e6}
    latency = Finding(where, "latency", "ok", text, "", value)
    if found.latency_s > _HIGH_LATENCY_S:
        latency = replace(latency, level="note", do=advice)
    slow, fast = sorted((found.there_mbit, found.back_mbit))
    there, back, both = (
        format_bit_rate(1e6 * mbit) for mbit in (found.there_mbit, found.back_mbit, found.both_mbit)
    )
    text = f"{one} to {other} {there}, back {back}, both at once {both} each way over {found.backend}"
    do = []
    named = min((speed for speed in speeds_mbit if speed), default=0.0)
    if slow < _MIN_FRACTION_OF_SPEED * min(named, _MAX_GLOO_STREAM_MBIT):
        text += f"; the interfaces say {format_bit_rate(1e6 * named)}"
        do.append("look for a slower link on the way, other traffic, or a limit (`tc qdisc`, the provider's)")
    if fast > _MAX_ASYMMETRY * slow:
        do.append("one direction is slower than the other: look at cables, duplex and limits on that side")
    if slow < _SLOW_MBIT:
        text += f"; 100 MB of gradients take {format_duration(8e-6 * 100e6 / found.both_mbit)}"
        do.append("send less: hooks: [int8] or [powersgd], sync: diloco; `ddprun explain` counts the bytes")
    value = {
        "backend": found.backend,
        "mbit_per_s": {f"{one} to {other}": found.there_mbit, f"{other} to {one}": found.back_mbit},
        "all_reduce_mbit_per_s": found.both_mbit,
        "all_reduce_mbit_per_s_by_bytes": [list(one) for one in found.both_by_bytes],
        "bytes": found.nbytes,
    }
    level: Level = "warning" if do else "ok"
    return [latency, Finding(where, "bandwidth", level, text, "; ".join(do), value)]
