"""Records of hosts that do not share the run's disk: rank 0 gets them at stage ends."""

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from ddprun.run_files import open_file, replacing
from ddprun.telemetry.profile import FOLDER as PROFILE
from ddprun.telemetry.records import file_of
from ddprun.telemetry.writer import Writer
from ddprun_hooks.comm.control import Control

FOLDERS = ("steps", "buckets", PROFILE)
_TOKEN = ".rank-0"


class Records:
    """Where this rank writes its records, and how they come to rank 0's folder.

    Args:
        folder: the run's folder, by the same path on every host.
        control: over which ranks that do not see rank 0's folder send their records.
        tell_all: what rank 0 makes under a key, on every rank; for finding out which ranks see its folder.
    """

    def __init__(
        self, folder: Path, control: Control, tell_all: Callable[[str, Callable[[], str]], str]
    ) -> None:
        self._control = control
        self._target = folder
        shared = self._sees_rank_0(tell_all)
        self.away = [
            rank
            for rank, sees in enumerate(
                control.all_gather([float(shared)], "who sees the run folder")[:, 0].tolist()
            )
            if not sees
        ]
        """Ranks that do not see rank 0's folder."""
        self._scratch = None if shared else tempfile.TemporaryDirectory(prefix="ddprun-")
        self.writer = Writer(folder if self._scratch is None else Path(self._scratch.name))
        self._sent = dict.fromkeys(FOLDERS, 0)

    def collect(self) -> None:
        """Bring all records so far to disk, and those of other hosts to rank 0; called by all ranks."""
        self.writer.flush()
        for rank in self.away:
            for name in FOLDERS:
                if self._control.rank == rank:
                    self._control.send_bytes(self._new_bytes(name), 0)
                elif self._control.rank == 0:
                    data = self._control.receive_bytes(rank)
                    if data:
                        self._append(file_of(name, rank), data)

    def _append(self, name: str, data: bytes) -> None:
        """Write what another host has sent; a disk that fails costs records, not the run."""
        try:
            with open_file(self._target, name, "ab", make_folders=True) as file:
                file.write(data)
        except OSError as error:
            self.writer.failure = self.writer.failure or error.strerror or str(error)

    def close(self) -> None:
        """End the writing; what `collect` did not bring over is lost with its host."""
        self.writer.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _sees_rank_0(self, tell_all: Callable[[str, Callable[[], str]], str]) -> bool:
        def make() -> str:
            name = uuid.uuid4().hex
            with replacing(self._target, _TOKEN) as file:
                file.write(name.encode())
            return name

        name = tell_all("token", make)
        try:
            with open_file(self._target, _TOKEN) as file:
                seen = file.read(len(name) + 1) == name.encode()
        except OSError:
            seen = False
        self._control.barrier("the run folder")
        if self._control.rank == 0:
            (self._target / _TOKEN).unlink()
        return seen

    def _new_bytes(self, name: str) -> bytes:
        try:
            with open_file(self.writer.folder, file_of(name, self._control.rank)) as file:
                file.seek(self._sent[name])
                data = file.read()
        except FileNotFoundError:
            return b""
        self._sent[name] += len(data)
        return data
