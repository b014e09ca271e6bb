"""What a collective asks of a rank and of the links, with Gloo's habits; a GPU's may be trees."""

from dataclasses import dataclass, field, replace

from ddprun.explain.traffic import Leg
from ddprun.predict.costs import LinearCost
from ddprun.predict.links import LinkLevel
from ddprun.predict.timeline import MAX_SIMULATED_ROUNDS, SimulatedCollective, round_count

_ROUND_WORK_US = 20.0  # of a core, for each round of a collective on one rank, before fitting
_BYTE_US = 1e-3  # of a core, for each byte that a rank sends and receives, before fitting
_COPY_US = 2.5e-4  # for each byte through shared memory
_ONE_WAY_SHARE = 0.4  # of an all-to-all between two hosts, if all ranks of one are later: as measured


@dataclass(slots=True)
class StackCosts:
    """What a stack of hooks costs on one rank."""

    hook_costs: list[LinearCost] = field(default_factory=list)  # hooks before, between and after collectives
    collective_factor: float = 1.0  # work of collectives, to what it is before fitting
    wake_us: float = 0.0  # from a message's arrival until a thread works on it


def collective_of(
    leg: Leg, hosts: int, stack: StackCosts, queue: str = "", *, on_cpu: bool, drifted: bool = False
) -> SimulatedCollective:
    """The collective of a leg; `drifted`: all ranks of a host may be later than those of another."""
    rounds = round_count(leg.op, leg.ranks, use_trees=not on_cpu)
    sent = leg.sent.per_rank
    bytes_us = _BYTE_US * sent if sent else _COPY_US * leg.bytes
    work_us = stack.collective_factor * (_ROUND_WORK_US * rounds + bytes_us) if on_cpu else 0.0
    level: LinkLevel = "across" if hosts > 1 and leg.among != "host" else "within"
    nbytes = host_bytes_by_level(leg, hosts)
    messages = max(1, leg.ranks - 1 if leg.op == "all_to_all" else rounds)
    found = SimulatedCollective(work_us, nbytes, messages=messages, wake_us=stack.wake_us, queue=queue)
    if not sent or not on_cpu:
        return replace(found, latency_counts={level: rounds if sent else 0})
    one_way_bytes = 0.0
    if leg.op == "all_to_all":
        # Gloo's all-to-all sends first: between two ranks, the later one says that it is ready behind its
        # own message, and the other's comes when that is through. Ranks that begin within a latency do
        # not yet know that they may send, and say it first. So it is between two hosts if all ranks of
        # one are later. But pairs of ranks end one after the other, and part of what goes back overlaps.
        one_way_bytes = sent if leg.ranks == 2 else 0.0
        if drifted and hosts == 2:
            one_way_bytes = max(one_way_bytes, _ONE_WAY_SHARE * nbytes["across"])
    return replace(
        found,
        rounds=max(1, min(rounds, MAX_SIMULATED_ROUNDS)),
        # Gloo's receivers tell its senders when they are ready: two latencies for each message. A ring
        # has two on their way, and the receiver is ready for the second when the first has come.
        latency_counts={level: 2.0 * rounds},
        double_buffered=leg.op == "all_reduce",
        one_way_bytes=one_way_bytes,
        # Where a host has several ranks, a ring enters it at one and leaves it at another. If the first
        # is late, it says that it is ready behind the two pieces that the other has sent meanwhile. It
        # is then late in the next step, too, so this always counts.
        blocking_bytes=leg.bytes / leg.ranks if leg.op == "all_reduce" and leg.ranks > hosts else 0.0,
    )


def host_bytes_by_level(leg: Leg, hosts: int) -> dict[LinkLevel, float]:
    """What each host sends to others, and what its ranks send to each other, in bytes."""
    across = leg.sent.between_hosts
    return {"within": (leg.sent.all_ranks - across) / hosts, "across": across / hosts}
