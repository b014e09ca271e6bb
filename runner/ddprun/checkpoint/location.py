"""Where checkpoints are: in a folder that all ranks see, or in one on each host, in memory or on disk.

Where each host has a folder of its own, the folder holds what the ranks of that host need to resume, and a
copy of what only the ranks of the host before it have. If any one host is lost, the others have all files.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import FileRecords
from ddprun_hooks.comm.control_channel import ControlChannel

_SHARED_FILES = tuple(folder.file_names(["shared"]))


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The folders in memory, or those on disk, and which ranks see the same one."""

    root: Path  # the folder of all checkpoints, as this rank sees it
    rank: int
    leaders: tuple[int, ...]  # for each rank, the lowest rank that sees the same folder
    in_memory: bool = False

    @property
    def name(self) -> str:
        return "memory" if self.in_memory else "disk"

    @property
    def leads(self) -> bool:
        """Whether this rank does for its folder what one rank has to do."""
        return self.leaders[self.rank] == self.rank

    @property
    def folder_leaders(self) -> list[int]:
        """The leaders, one for each folder."""
        return sorted(set(self.leaders))

    def members(self, leader: int) -> list[int]:
        """The ranks that see the leader's folder."""
        return [rank for rank, other in enumerate(self.leaders) if other == leader]

    def files_needed(self, world_size: int) -> dict[int, set[str]]:
        """For each leader, what its ranks read if they resume as ranks of a run with this world size."""
        return {
            leader: {*_SHARED_FILES, *_rank_files(rank for rank in self.members(leader) if rank < world_size)}
            for leader in self.folder_leaders
        }

    def files_kept(self) -> dict[int, set[str]]:
        """For each leader, what its folder holds of a checkpoint: what is needed, and the copies."""
        needed = self.files_needed(len(self.leaders))
        if len(needed) > 1:
            before = dict(
                zip(self.folder_leaders, [self.folder_leaders[-1], *self.folder_leaders], strict=False)
            )
            for leader, files in needed.items():
                files.update(_rank_files(self.members(before[leader])))
        return needed


def _rank_files(ranks: Iterable[int]) -> list[str]:
    return folder.file_names(map(folder.rank_part_name, ranks))


FileTransfer = tuple[int, int, list[str]]  # from a leader to a leader; names of files


def plan_transfers(
    wanted: Mapping[int, Collection[str]], held: Mapping[int, Collection[str]]
) -> list[FileTransfer]:
    """What leaders have to send each other, in an order that is the same on all of them: each takes its turns
    in this order, so that none waits in a circle. Every file is held by somebody.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for target, names in wanted.items():
        for name in sorted(set(names) - set(held[target])):
            source = next(leader for leader, files in held.items() if name in files)
            found.setdefault((source, target), []).append(name)
    places = list(held)
    # First those with an even place send, then the others: most transfers go side by side.
    order = sorted(found, key=lambda pair: (places.index(pair[0]) % 2, pair))
    return [(*pair, found[pair]) for pair in order]


def run_transfers(
    control: ControlChannel, rank: int, path: Path, transfers: Iterable[FileTransfer], files: FileRecords
) -> None:
    """Send and receive what the plan says of this rank, in the folder `path`. Raises OSError, after all
    transfers, if files could not be written, or are not what `files` says.
    """
    problem: OSError | None = None
    for source, target, names in transfers:
        described = {name: files[name] for name in names}
        if rank == source:
            folder.send_files(control, target, path, described)
        elif rank == target:
            try:
                folder.receive_files(control, source, path, described)
            except OSError as error:
                problem = problem or error
    if problem is not None:
        raise problem
