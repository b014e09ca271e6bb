"""A comparison on several hosts: the first host decides what runs, and tells the others.

Every host runs the same command, `ddprun compare` or `ddprun tune`, with torchrun's flags. The hosts find
each other as those of a run do (`doctor/run.py`). The first one, on which a run's rank 0 will be, decides;
the others start their part of each run. They are told through the store of the rendezvous. What they are told
is checked like anything that comes from elsewhere: JSON of this form, and a folder below their own.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
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


class HostMessage(BaseModel):
    """What the first host tells the others: runs to take part in, or the end."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    end: Annotated[int, Field(ge=0, le=255)] | None = None  # the exit code
    # Below the folder of the command's runs.
    folder: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/round-[0-9]{1,3})?$")] = "-"
    # Of a round of `tune`: the changes of each candidate, steps of a turn, and of each run.
    candidates: Annotated[tuple[dict[str, Any], ...], Field(strict=False, max_length=64)] = ()
    turn_steps: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=1)] = 1


class ComparisonHosts:
    """This host's connection to the other hosts.

    Args:
        command: `compare` or `tune`.
        flags: torchrun's, of which `nnodes` and `rdzv_endpoint` are there.
    """

    def __init__(self, command: str, flags: Mapping[str, str]) -> None:
        self._flags = {"rdzv_backend": "c10d", "rdzv_id": command, **flags}
        try:
            self._handler, info = join_rendezvous(self._flags, TIMEOUT_S, command)
        except UnreachableError as error:
            raise HostsError(f"{error}\n  -> {error.advice}") from None
        except ValueError as error:  # torchrun's way to refuse flags
            raise HostsError(str(error)) from None
        self._store: Store = PrefixStore(command, info.store)
        self._store.set_timeout(_STORE_TIMEOUT)
        self.index, self.count = info.rank, info.world_size
        self._message_number = 0

    @property
    def is_first(self) -> bool:
        """Whether this host decides."""
        return self.index == 0

    def run_arguments(self, run_dir: Path) -> list[str]:
        """The arguments of `ddprun run` for a run in this folder, which meets under an id of its own."""
        run_id = "-".join((self._flags["rdzv_id"], *run_dir.parts[-3:]))
        return [
            word
            for name, value in {**self._flags, "rdzv_id": run_id}.items()
            for word in (f"--{name.replace('_', '-')}", value)
        ]

    def check_same_inputs(self, inputs: Sequence[Any]) -> None:
        """Compare the inputs, which go into JSON, with those of the other hosts.

        Raises:
            HostsError: they are not the same on all, or a host is gone.
        """
        own = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        keys = [f"inputs/{index}" for index in range(self.count)]
        try:
            self._store.set(keys[self.index], own)
            self._wait_for(keys, time.monotonic() + TIMEOUT_S)
            others = [index for index, key in enumerate(keys) if self._store.get(key).decode() != own]
        except (DistError, RuntimeError) as error:
            raise HostsError(f"lost contact between the hosts: {first_line(error)}") from None
        if others:
            raise HostsError(
                f"hosts {self.index} and {others[0]} have different pipelines or options: give the same "
                "command and the same files on each"
            )

    def _wait_for(self, keys: Sequence[str], until: float) -> None:
        """Wait in short steps, so that Ctrl-C is heard."""
        while not self._store.check(list(keys)) and time.monotonic() < until:
            time.sleep(_TICK_S)

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

    def send_to_others(self, message: HostMessage) -> None:
        """Send a message to all other hosts."""
        self._message_number += 1
        self._store.set(f"told/{self._message_number}", json.dumps(message.model_dump(mode="json")))

    def receive(self) -> HostMessage:
        """Wait for the next message of the first host.

        Raises:
            HostsError: it is gone, or what it says makes no sense.
        """
        self._message_number += 1
        key = f"told/{self._message_number}"
        try:
            self._wait_for([key], math.inf)
            data = self._store.get(key)
        except (DistError, RuntimeError) as error:
            raise HostsError(f"the first host is gone: {first_line(error)}") from None
        try:
            if len(data) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"longer than {_MAX_MESSAGE_BYTES:,} bytes")
            return HostMessage.model_validate(parse_json(data))
        except ValueError as error:
            raise HostsError(f"what the first host says makes no sense: {error}") from None

    def follow(self, take_part: Callable[[HostMessage], object]) -> int:
        """Take part in the runs that the first host tells of, until it tells the end; gives the exit code.

        Raises:
            HostsError: it is gone, or what it says makes no sense.
        """
        while (message := self.receive()).end is None:
            take_part(message)
        return message.end

    def wait_for_all_to_leave(self, seconds: float = 30.0) -> None:
        """Wait until all hosts have come here: the store ends with the process that holds it."""
        try:
            self._store.set(f"parting/{self.index}", "")
            keys = [f"parting/{index}" for index in range(self.count)]
            self._wait_for(keys, time.monotonic() + seconds)
            time.sleep(_TICK_S)
        except (DistError, RuntimeError):
            return  # it has ended already
