"""A comparison on several hosts: the first host decides what runs, and tells the others.

Every host runs the same command, `ddprun compare` or `ddprun tune`, with torchrun's flags. The hosts meet as
those of a run do (`launch/host_group.py`). The first one, on which a run's rank 0 will be, decides; the
others start their part of each run. They are told through the store of the rendezvous. What they are told is
checked like anything that comes from elsewhere: JSON of this form, and a folder below their own.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.distributed import PrefixStore, Store

from ddprun import EXIT_FAILURE, EXIT_INTERRUPTED, InputError
from ddprun.doctor import links as doctor_links
from ddprun.launch import host_group
from ddprun.options import Options
from ddprun.predict.links import Link, Links
from ddprun.run_files import parse_json
from ddprun.standard_streams import say

TIMEOUT_S = 300.0  # for which hosts wait for each other
_COLLECTIVE_TIMEOUT_S = 60.0
_STORE_TIMEOUT = timedelta(seconds=60)
_LEAVE_S = 30.0


class HostMessage(Options):
    """What the first host tells the others: runs to take part in, or the end."""

    end: Annotated[int, Field(ge=0, le=255)] | None = None  # the exit code
    # Below the folder of the command's runs.
    folder: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/round-[0-9]{1,3})?$")] = "-"
    # Of a round of `tune`: the changes of each candidate, steps of a turn, and of each run.
    candidates: Annotated[tuple[dict[str, Any], ...], Field(strict=False, max_length=64)] = ()
    turn_steps: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=1)] = 1


class HostCoordinator:
    """This host's connection to the others, for `compare` or `tune`; `flags` are torchrun's."""

    def __init__(self, command: str, flags: Mapping[str, str]) -> None:
        self._flags = {"rdzv_backend": "c10d", "rdzv_id": command, **flags}
        try:
            self._handler, info = host_group.join_rendezvous(self._flags, TIMEOUT_S, command)
        except ValueError as error:  # torchrun's way to refuse flags
            raise InputError(str(error)) from None
        store: Store = PrefixStore(command, info.store)
        store.set_timeout(_STORE_TIMEOUT)
        self.index, self.count = info.rank, info.world_size
        self._group = host_group.HostGroup(
            store, [f"host {index}" for index in range(self.count)], self.index
        )
        self._message_number = 0

    @property
    def is_first(self) -> bool:
        """Whether this host decides."""
        return self.index == 0

    def run_arguments(self, run_dir: Path) -> list[str]:
        """The arguments of `ddprun run` for a run in this folder, which meets under an id of its own."""
        flags = {**self._flags, "rdzv_id": "-".join((self._flags["rdzv_id"], *run_dir.parts[-3:]))}
        return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]

    def check_same_inputs(self, inputs: Sequence[Any]) -> None:
        """Raise HostsError unless the inputs, which go into JSON, are the same on all hosts."""
        own = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        digests = self._group.gather("inputs", own, TIMEOUT_S)
        if others := [index for index, digest in enumerate(digests) if digest != own]:
            raise host_group.HostsError(
                f"hosts {self.index} and {others[0]} have different pipelines or options",
                "give the same command and the same files on each",
            )

    def measure_link(self, device: torch.device) -> Links | None:
        """The link between the first two hosts; None on the others."""
        if self.index > 1:
            return None
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            found = doctor_links.measure_host_link(
                PrefixStore("link", self._group.store), self.index, backend, device, _COLLECTIVE_TIMEOUT_S
            )
        except (RuntimeError, ValueError) as error:
            raise host_group.HostsError(f"the link between hosts cannot be measured: {error}") from None
        link = Link.from_measurement(backend, found.latency_s, found.both_mbit, found.both_by_bytes)
        return Links(across=link)

    def send_to_others(self, message: HostMessage) -> None:
        self._message_number += 1
        self._group.store.set(f"told/{self._message_number}", json.dumps(message.model_dump(mode="json")))

    def receive(self) -> HostMessage:
        """Wait for the next message of the first host; raises HostsError if it is gone or makes no sense."""
        self._message_number += 1
        key = f"told/{self._message_number}"
        try:
            host_group.wait_for_keys(self._group.store, [key])
            data = self._group.store.get(key)
        except RuntimeError as error:  # the store's
            raise host_group.HostsError(
                f"the first host is gone, see its output: {host_group.error_first_line(error)}"
            ) from None
        try:
            return HostMessage.model_validate(parse_json(data))
        except ValueError as error:
            raise host_group.HostsError(f"the first host sent an invalid message: {error}") from None

    def follow_first_host(self, take_part: Callable[[HostMessage], object]) -> int:
        """Take part in the runs that the first host tells of, until it tells the end; gives the exit code."""
        while (message := self.receive()).end is None:
            take_part(message)
        return message.end

    def leave_with_all_hosts(self) -> None:
        """Wait until all hosts have come here."""
        host_group.leave_together(self._group.store, self.index, self.count, _LEAVE_S)


def join_hosts_and_run(
    command: str,
    flags: Mapping[str, str] | None,
    inputs: Sequence[Any],
    work: Callable[[HostCoordinator | None], int],
) -> int:
    """Meet the other hosts, which run the same command, and do this host's part; gives the exit code. `flags`
    are torchrun's; None: there is this host alone.

    `inputs` must be the same on all, and go into JSON. `work` gives the exit code; that of the first host is
    told to the others at the end.
    """
    hosts, code = None, EXIT_FAILURE
    try:
        if flags is not None:
            hosts = HostCoordinator(command, flags)
            hosts.check_same_inputs(inputs)
        code = work(hosts)
    except host_group.HostsError as error:
        advice = f"\n  -> {error.advice}" if error.advice else ""
        say(f"{error}{advice}")
    except OSError as error:
        say(error)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        if hosts is not None:
            if hosts.is_first:
                hosts.send_to_others(HostMessage(end=code))
            hosts.leave_with_all_hosts()
    return code
