"""Who exchanges with whom: the teams that stacks need, made before the first step by all ranks together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddprun_hooks.arena_setup import open_arenas
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.hook import Need, Needs
from ddprun_hooks.porter import Porter
from ddprun_hooks.team import Team
from ddprun_hooks.watch import NOBODY, Watch, waiting


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks are."""

    rank: int
    hosts: tuple[str, ...]
    """Host name of each rank."""

    local_sizes: tuple[int, ...]
    """For each rank, how many ranks its launcher started on its host."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def launched(self) -> list[list[int]]:
        """The ranks of each host, wherever they lie in rank order, in the order of their first ranks.

        Ranks of one host name are on one host. Of several launchers on a host (or hosts of one name) each
        counts for a host of its own.
        """
        of_name: dict[str, list[int]] = {}
        for rank, name in enumerate(self.hosts):
            of_name.setdefault(name, []).append(rank)
        found = []
        for ranks in of_name.values():
            while ranks:
                size = max(1, self.local_sizes[ranks[0]])
                found.append(ranks[:size])
                ranks = ranks[size:]
        return sorted(found)

    def blocks(self, hosts: int | None) -> list[list[int]]:
        """The ranks of each host, in rank order as process groups have them.

        Args:
            hosts: how many to split the ranks into, those of one host together as far as that goes; None: as
                they were launched.

        Raises:
            HookSetupError: the hosts would not hold equally many ranks.
        """
        launched = self.launched()
        if hosts is None:
            if len({len(ranks) for ranks in launched}) > 1:
                counts = ", ".join(f"{self.hosts[ranks[0]]}: {len(ranks)}" for ranks in launched)
                raise HookSetupError(
                    f"two levels need equally many ranks on each host; here they are {counts}"
                )
            return launched
        if self.size % hosts:
            raise HookSetupError(
                f"two levels with hosts: {hosts} need equally many ranks on each host, but {hosts} "
                f"does not divide {self.size} ranks"
            )
        per_host, by_host = self.size // hosts, [rank for ranks in launched for rank in ranks]
        return sorted(sorted(by_host[at : at + per_host]) for at in range(0, self.size, per_host))


def all_of(needs: Iterable[Needs]) -> dict[Need, int]:
    """What serves each of several needs, one at a time."""
    together: dict[Need, int] = {}
    for one in needs:
        for need, rounds in one.items():
            together[need] = max(rounds, together.get(need, 0))
    return together


def inside_hosts(needs: Needs, hosts: int | None) -> dict[Need, int]:
    """The needs of a stack that only the ranks of one host go through.

    Args:
        needs: of a stack whose collectives are among all ranks.
        hosts: into how many hosts the ranks are split; None: as they were launched.
    """
    return all_of({Need("within", hosts, need.shared): rounds} for need, rounds in needs.items())


@dataclass(frozen=True, slots=True)
class Ground:
    """How teams come by what they exchange over. Every rank calls each of the two alike."""

    make_group: Callable[[str, list[int]], Any]
    """A new process group of these ranks; called for each group of ranks, also by ranks outside it, whose
    result is dropped. The name is unique."""

    tell: Callable[[bytes], Sequence[bytes]]
    """Gives every rank's bytes (at most 64)."""

    timeout_s: float
    porter: Porter
    watch: Watch = NOBODY
    """Is told of every collective."""


def open_teams(name: str, layout: Layout, needs: Needs, ground: Ground) -> Team:
    """Make the team of all ranks, and those into which the stacks' hooks split it.

    Args:
        name: of the team of all ranks.
        layout: where the ranks are.
        needs: of all stacks that will use the team.
        ground: makes process groups.

    Raises:
        HookSetupError: the ranks do not lie as a hook needs them; on all ranks alike.
    """
    everybody = [list(range(layout.size))]
    splits = {}
    for hosts in sorted({need.hosts for need in needs if need.leg != "world"}, key=lambda hosts: hosts or 0):
        blocks = layout.blocks(hosts)
        # In rank order, in which torch's process groups have their ranks whatever order they are given in.
        places = [sorted(ranks) for ranks in zip(*blocks, strict=True)]
        before, tag = "" if name == "world" else f"{name} ", "" if hosts is None else f"/{hosts}"
        made = []
        for leg, parts in (("within", blocks), ("across", places)):
            made.append(_team(f"{before}{leg}{tag}", layout, parts, _of(needs, leg, hosts), ground))
        splits[hosts] = (made[0], made[1])
    return _team(name, layout, everybody, _of(needs, "world"), ground, splits)


def _of(needs: Needs, leg: str, hosts: int | None = None) -> dict[bool, int]:
    """Rounds through shared memory (True) and over the network (False)."""
    return {need.shared: rounds for need, rounds in needs.items() if (need.leg, need.hosts) == (leg, hosts)}


def _team(
    name: str,
    layout: Layout,
    parts: list[list[int]],
    rounds: dict[bool, int],
    ground: Ground,
    splits: dict[int | None, tuple[Team, Team]] | None = None,
) -> Team:
    """This rank's team of those whose ranks `parts` lists."""
    mine = next(ranks for ranks in parts if layout.rank in ranks)
    groups, arenas = [], []
    for index in range(rounds.get(False, 0)):
        made = {ranks[0]: ground.make_group(f"{name}.{index} of {ranks[0]}", ranks) for ranks in parts}
        groups.append(made[mine[0]])
    if True in rounds:
        _check_one_host(layout, parts)
        # Its own line: the ranks have met before they share, and one may still be lost in between.
        sharing = ground.watch.line(f"{name}, being shared", mine)
        with waiting(sharing, "share", f"making {rounds[True]} areas of shared memory"):
            arenas = open_arenas(
                rank=mine.index(layout.rank),
                size=len(mine),
                count=rounds[True],
                share=lambda data: ground.tell(data)[mine[0]],
                timeout_s=ground.timeout_s,
                names=mine,
            )
    return Team(
        name,
        mine.index(layout.rank),
        tuple(layout.hosts[rank] for rank in mine),
        groups,
        arenas,
        ground.porter if arenas else None,
        splits or {},
        {
            shared: [
                ground.watch.line(f"{name}.{index}{' in shared memory' if shared else ''}", mine)
                for index in range(count)
            ]
            for shared, count in sorted(rounds.items())
        },
    )


def _check_one_host(layout: Layout, parts: list[list[int]]) -> None:
    for ranks in parts:
        hosts = list(dict.fromkeys(layout.hosts[rank] for rank in ranks))
        if len(hosts) > 1:
            raise HookSetupError(
                f'"shared_memory" sums over the ranks of one host, but these are on {", ".join(hosts)}: '
                "write hierarchical: {within: [shared_memory]}"
            )
