"""What a stack would send, without sending it: no process group is made and no other rank is needed."""

from collections import Counter
from typing import cast

import torch
from torch import Tensor

from ddprun_hooks import queue
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm import groups
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.errors import ExchangeError, HooksError
from ddprun_hooks.payload import Payload, PayloadKind
from ddprun_hooks.stack import Stack


def simulated_group(
    name: str, placement: groups.RankPlacement, requirements: groups.GroupRequirements
) -> groups.RankGroup:
    """`GroupFactory.make_group`'s group of a rank, over which nothing can be sent; raises HookSetupError."""
    # Shared memory would be made at once, where a process group is only a name here.
    unshared = groups.merge_requirements(
        {one._replace(shared=False): rounds} for one, rounds in requirements.items()
    )
    factory = groups.GroupFactory(lambda name, ranks: None, lambda data: [], 0.0)
    return factory.make_group(name, placement, unshared)


def simulate(payload: Payload, stack: Stack, group: groups.RankGroup) -> BucketTrace[int]:
    """Carry one payload through a stack as if the other ranks of a group (`simulated_group`) had sent the
    same; raises HookSetupError, or ExchangeError if a hook breaks what it has declared.

    Collectives are counted as a run counts them; times are 0. The payload's memory and the hooks' state are
    changed as in a run: take a stack that nothing else uses, and one for each rank.
    """
    trace: BucketTrace[int] = queue.new_trace(payload, stack, 0)
    trace.handed_over = trace.done = 0
    run = stack.run(payload, group)
    issued: Counter[str] = Counter()
    result: Tensor | None = None
    while True:
        try:
            collective = queue.next_collective(run, result, payload, stack)
        except HooksError:
            raise
        except Exception as error:
            if not stack.custom_hooks:
                raise
            names = ", ".join(stack.custom_hooks)
            raise ExchangeError(
                f'hook "{names}" cannot be tried without other ranks: {type(error).__name__}: {error}'
            ) from error
        if collective is None:
            return trace
        group = collective.group
        queue.check_rounds(collective, issued[group.name], len(group.process_groups), stack)
        if collective.via_shared_memory:
            groups.check_one_host(group.hosts)
        collective_trace = queue.new_collective_trace(collective, issued[group.name], 0)
        collective_trace.done = 0
        trace.collectives.append(collective_trace)
        issued[group.name] += 1
        result = _simulated_result(collective)


def dummy_payload(layout: BucketLayout, kind: PayloadKind, device: torch.device | None = None) -> Payload:
    """A payload with the shape of a bucket and values that no run has."""
    dtype = cast(torch.dtype, getattr(torch, layout.dtype))
    if dtype.is_floating_point:
        tensor = torch.linspace(-1.0, 1.0, layout.numel, device=device).to(dtype)
    else:
        tensor = torch.zeros(layout.numel, dtype=dtype, device=device)
    return Payload(tensor, layout.params, kind, layout.index)


def _simulated_result(collective: groups.CollectiveRequest) -> Tensor:
    """What comes back if every rank has sent what this one sends."""
    output, group = collective.output, collective.group
    if output.is_meta:
        return output
    flat = collective.tensor.reshape(-1)

    def own_part() -> Tensor:
        """The part of the tensor that goes to this rank itself."""
        sizes = collective.sizes or [flat.numel() // group.size] * group.size
        return torch.split(flat, list(sizes))[group.rank]

    match collective.op:
        case "all_reduce":
            return output.mul_(group.size)
        case "all_gather":
            for part in torch.split(output, list(collective.sizes or [flat.numel()] * group.size)):
                # A rank whose part is longer sends more of the same.
                if flat.numel():
                    part.copy_(flat.repeat(-(-part.numel() // flat.numel()))[: part.numel()])
                else:
                    part.zero_()
            return output
        case "all_to_all":
            return output.copy_(own_part().repeat(group.size))
        case "reduce_scatter":
            return output.copy_(own_part()).mul_(group.size)
        case "broadcast":
            return output
