"""A search on several hosts: the first decides which candidates run, and tells the others.

Every host runs the same command. They find each other as those of a run do (`doctor/run.py`). The first one,
on which a run's rank 0 will be, searches; the others start their part of each round. They are told through
the store of the rendezvous. What they are told is checked like anything that comes from elsewhere: JSON of
this form, and candidates of their own file.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import DistError, PrefixStore, Store

from ddprun.doctor import first_line
from ddprun.doctor import links as doctor_links
from ddprun.doctor.run import UnreachableError, join_rendezvous
from ddprun.predict.links import Link, Links
from ddprun.run_files import parse_json

TIMEOUT_S = 300.0  # for which hosts wait for each other
_COLLECTIVE_TIMEOUT_S = 60.0
_STORE_TIMEOUT = timedelta(seconds=60)
_TICK_S = 0.2
_MAX_MESSAGE_BYTES = 1 << 20


class HostsError(Exception):
    """The hosts do not find each other, or one is lost; says what to do."""


class RoundMessage(BaseModel):
    """What the first host tells the others: a round to run, or the end."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    end: Annotated[int, Field(ge=0, le=255)] | None = None  # the exit code
    # Below --runs.
    folder: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*/round-[0-9]{1,3}$")] = "-/round-0"
    # The changes of each candidate.
    candidates: Annotated[tuple[dict[str, Any], ...], Field(strict=False, max_length=64)] = ()
    turn_steps: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=1)] = 1


class SearchHosts:
    """This host's connection to the other hosts of a search.

    Args:
        flags: torchrun's, of which `nnodes`, `nproc_per_node` and `rdzv_endpoint` are there.
    """

    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = {"rdzv_backend": "c10d", **flags}
        try:
            self._handler, info = join_rendezvous(self._flags, TIMEOUT_S, "tune")
        except UnreachableError as error:
            raise HostsError(f"{error}\n  -> {error.advice}") from None
        except ValueError as error:  # torchrun's way to refuse flags
            raise HostsError(str(error)) from None
        self._store: Store = PrefixStore("tune", info.store)
        self._store.set_timeout(_STORE_TIMEOUT)
        self.index, self.count = info.rank, info.world_size
        self._message_number = 0

    @property
    def is_first(self) -> bool:
        """Whether this host searches."""
        return self.index == 0

    @property
    def arguments(self) -> list[str]:
        """The arguments of `ddprun run`, without the rendezvous' id."""
        flags = {name: value for name, value in self._flags.items() if name != "rdzv_id"}
        return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]

    def rdzv_id(self, folder: str) -> str:
        """The rendezvous' id of the runs of a round, which has a folder of its own."""
        return f"{self._flags.get('rdzv_id', 'tune')}-{folder.replace('/', '-')}"

    def measure_link(self, device: torch.device) -> Links | None:
        """The link between the first two hosts; None on the others."""
        if self.index > 1:
            return None
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            found = doctor_links.measure(
                PrefixStore("link", self._store), self.index, backend, device, _COLLECTIVE_TIMEOUT_S
            )
        except (RuntimeError, ValueError) as error:
            raise HostsError(f"the link between hosts cannot be measured: {error}") from None
        link = Link.from_measurement(backend, found.latency_s, found.both_mbit, found.both_by_bytes)
        return Links(across=link)

    def send_to_others(self, message: RoundMessage) -> None:
        """Send a message to all other hosts."""
        self._message_number += 1
        self._store.set(f"told/{self._message_number}", json.dumps(message.model_dump(mode="json")))

    def receive(self) -> RoundMessage:
        """Wait for the next message of the first host.

        Raises:
            HostsError: it is gone, or what it says makes no sense.
        """
        self._message_number += 1
        key = f"told/{self._message_number}"
        try:
            while not self._store.check([key]):  # in short steps, so that Ctrl-C is heard
                time.sleep(_TICK_S)
            data = self._store.get(key)
        except (DistError, RuntimeError) as error:
            raise HostsError(f"the first host is gone: {first_line(error)}") from None
        try:
            if len(data) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"longer than {_MAX_MESSAGE_BYTES:,} bytes")
            return RoundMessage.model_validate(parse_json(data))
        except ValueError as error:
            raise HostsError(f"what the first host says makes no sense: {error}") from None

    def wait_for_all_to_leave(self, seconds: float = 30.0) -> None:
        """Wait until all hosts have come here: the store ends with the process that holds it."""
        try:
            self._store.set(f"parting/{self.index}", "")
            keys: Sequence[str] = [f"parting/{index}" for index in range(self.count)]
            until = time.monotonic() + seconds
            while not self._store.check(list(keys)) and time.monotonic() < until:
                time.sleep(_TICK_S)
            time.sleep(_TICK_S)
        except (DistError, RuntimeError):
            return  # it has ended already
