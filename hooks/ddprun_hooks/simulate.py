"""What a stack would send, without sending it: no process group is made and no other rank is needed."""

from collections import Counter

import torch
from torch import Tensor

from ddprun_hooks import comm_queue
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
        {one._replace(via_shared_memory=False): rounds} for one, rounds in requirements.items()
    )
    factory = groups.GroupFactory(placement, lambda name, ranks: None, lambda data: [], 0.0)
    return factory.make_group(name, unshared)


def simulate(payload: Payload, stack: Stack, group: groups.RankGroup) -> BucketTrace[int]:
    """Carry one payload through a stack as if the other ranks of a group (`simulated_group`) had sent about
    the same; raises HookSetupError, or ExchangeError if a hook breaks what it has declared.

    Collectives are counted as a run counts them, without times. The payload's memory and the hooks' state are
    changed as in a run: take a stack that nothing else uses, and one for each rank.
    """
    trace: BucketTrace[int] = comm_queue.new_trace(payload, stack, 0)
    run = stack.run(payload, group)
    issued: Counter[str] = Counter()
    result: Tensor | None = None
    while True:
        try:
            collective = comm_queue.run_to_next_collective(run, result, payload, stack)
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
        comm_queue.check_rounds(collective, issued[group.name], len(group.process_groups), stack)
        if collective.via_shared_memory:
            groups.check_one_host(group.hosts)
        trace.collectives.append(comm_queue.new_collective_trace(collective, issued[group.name], 0))
        issued[group.name] += 1
        result = _simulated_result(collective)


def dummy_payload(layout: BucketLayout, kind: PayloadKind, device: torch.device | None = None) -> Payload:
    """A payload with the shape of a bucket and values that no run has."""
    values = torch.linspace(-1.0, 1.0, layout.numel, device=device)
    return Payload(values.to(getattr(torch, layout.dtype)), layout.params, kind, layout.index)


def _simulated_result(collective: groups.CollectiveRequest) -> Tensor:
    """What comes back, made of what this rank sends: of the right form where ranks send equal parts."""
    output, own = collective.output, collective.tensor.reshape(-1)
    if output.is_meta:
        return output
    if collective.op == "all_reduce":
        return output.mul_(collective.group.size)
    if output is collective.tensor:
        return output
    if not own.numel():
        return output.zero_()
    return output.copy_(own.repeat(-(-output.numel() // own.numel()))[: output.numel()])
