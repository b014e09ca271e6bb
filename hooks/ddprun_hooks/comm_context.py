"""The one owner of what ranks exchange: process groups, queues, and the small control messages."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.buckets import TensorBuckets
from ddprun_hooks.comm import groups
from ddprun_hooks.comm.collective_observer import NULL_OBSERVER, CollectiveObserver, observed_wait
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.gpu import GpuStreams
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_queue import CommQueue, GpuCommQueue, HostCommQueue
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Stack, broadcast_stack

BROADCAST_BUCKET_BYTES = 25 << 20
_LAUNCH_ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
_NO_RANKS: groups.GroupRequirements = MappingProxyType({})
ALL_RANKS: groups.GroupRequirements = MappingProxyType({groups.GroupRequirement("world"): 1})


@dataclass(frozen=True, slots=True)
class CommContext:
    """Everything over which the ranks exchange; made once, before the first step, by all ranks together."""

    gradient_queue: CommQueue  # for gradient buckets
    delta_queue: CommQueue  # for changes of parameters, through hooks: never to meet gradients
    # For parameters, buffers and optimizer state as they are. A queue of its own, too: what is sent here
    # never waits for an exchange of deltas that is still under way.
    plain_queue: CommQueue
    control: ControlChannel

    @classmethod
    def open(
        cls,
        *,
        control: ControlChannel,
        device: torch.device,
        backend: str,
        placement: groups.RankPlacement,
        gradients: groups.GroupRequirements,
        deltas: groups.GroupRequirements = _NO_RANKS,
        plain: groups.GroupRequirements = ALL_RANKS,
        timeout: timedelta,
        observer: CollectiveObserver = NULL_OBSERVER,
    ) -> "CommContext":
        """Make all process groups. Every rank of the default group has to call this, with equal arguments
        but for its own rank.

        `gradients`, `deltas` and `plain` say among which ranks, and how many rounds of collectives, the three
        queues need. Raises HookSetupError if the ranks do not lie as a stack needs them, or for shared memory
        on a GPU.
        """
        gpu = GpuStreams(device) if device.type == "cuda" else None
        groups.check_shared_memory_device(device, [*gradients, *deltas, *plain])
        for requirements in (gradients, deltas, plain):  # before the groups of the first queue are made
            groups.check_placement(placement, requirements)
        # Two groups may wait for each other on a GPU, unless NCCL starts all collectives in one order.
        shares_process_groups = backend == "nccl" and os.environ.get(_LAUNCH_ORDER_VARIABLE) != "1"
        set_up = observer.new_sequence("set-up of groups", range(placement.size))

        def make_process_group(name: str, ranks: list[int]) -> Any:
            options = None if backend != "nccl" else _high_priority_nccl_options(timeout)
            with observed_wait(set_up, "new_group", f"making the process group {name}"):
                return dist.new_group(
                    ranks, backend=backend, timeout=timeout, group_desc=name, pg_options=options
                )

        factory = groups.GroupFactory(
            placement,
            make_process_group,
            control.all_gather_bytes,
            timeout.total_seconds(),
            observer,
            # A stream keeps collectives in order: there, one process group can serve every round.
            one_group_for_all_rounds=shares_process_groups,
        )

        def queue(
            name: str, requirements: groups.GroupRequirements, existing: Sequence[Any] = ()
        ) -> CommQueue:
            world = factory.make_group(name, requirements, existing)
            return HostCommQueue(world) if gpu is None else GpuCommQueue(world, gpu)

        return cls(
            gradient_queue=queue("world", gradients),
            delta_queue=queue("deltas", deltas),
            # DDP alone uses the default group otherwise: a communicator less on the GPU.
            plain_queue=queue("plain", plain, [dist.group.WORLD] if backend == "nccl" else []),
            control=control,
        )

    def set_detailed_timing(self, detailed: bool) -> None:
        """Whether buckets on a GPU take timestamps of all that they do from now on."""
        for queue in (self.gradient_queue, self.delta_queue, self.plain_queue):
            if isinstance(queue, GpuCommQueue):
                queue.detailed_timing = detailed

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors`, in place, with those of rank `source`, in flat messages of one dtype each."""
        named_tensors = {str(index): tensor for index, tensor in enumerate(tensors)}
        buckets, stack = TensorBuckets(named_tensors, BROADCAST_BUCKET_BYTES), broadcast_stack(source)
        for index, layout in enumerate(buckets.layouts):
            payload = Payload(buckets.flatten(index), layout.params, "parameters", layout.index)
            buckets.copy_to_tensors(index, self.plain_queue.send(payload, stack, []).wait())

    def exact_sum(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Sum `tensor` over the ranks, in place, past every hook; gives it, and the bytes sent."""
        traces: list[BucketTrace[Any]] = []
        total = self.plain_queue.send(Payload(tensor, (), "gradient", 0), Stack([]), traces).wait()
        return total, traces[0].wire_bytes


def _high_priority_nccl_options(timeout: timedelta) -> Any:
    """Options of a process group whose collectives run before the kernels of others that wait."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options
