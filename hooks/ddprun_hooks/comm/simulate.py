"""What a stack would send, without sending it: no process group is made and no other rank is needed."""

import itertools
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.groups import (
    Collective,
    GroupFactory,
    GroupRequirements,
    Placement,
    RankGroup,
    combine,
)
from ddprun_hooks.comm.queue import new_collective_trace, new_trace, next_collective, start_hooks, write_back
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.errors import ExchangeError, HooksError, HookSetupError
from ddprun_hooks.payload import Kind, Payload
from ddprun_hooks.shm.progress import ProgressThread
from ddprun_hooks.stack import Stack


def simulated_group(name: str, placement: Placement, requirements: GroupRequirements) -> RankGroup:
    """The group that `GroupFactory.open` would give the rank of `placement`, over which nothing can be sent.

    Args:
        name: of the group of all ranks.
        placement: where the ranks are.
        requirements: of all stacks that will use the group.

    Raises:
        HookSetupError: the ranks do not lie as a hook needs them.
    """
    # Shared memory would be made at once, where a process group is only a name here.
    unshared = combine({one._replace(shared=False): rounds} for one, rounds in requirements.items())
    return GroupFactory(_no_group, _no_ranks, 0.0, ProgressThread()).open(name, placement, unshared)


def simulate(payload: Payload, stack: Stack, group: RankGroup) -> BucketTrace[int]:
    """Carry one payload through a stack as if the other ranks of a group were there and had sent the same.

    Collectives are counted as a run counts them; times are 0. The payload's memory and the hooks' state are
    changed as in a run: take a stack that nothing else uses, and one for each rank.

    Args:
        payload: of the rank whose place in the group `group.rank` is.
        stack: the hooks to go through.
        group: made by `simulated_group`, or one of its splits.

    Raises:
        HookSetupError: the ranks do not lie as a hook needs them.
        ExchangeError: a hook asks for more than it has declared, or returns something else than it was given.
    """
    trace: BucketTrace[int] = new_trace(payload, stack, 0)
    trace.handed_over = trace.done = 0
    run = start_hooks(payload, stack, group)
    issued: Counter[str] = Counter()
    result: Tensor | None = None
    while True:
        try:
            wanted = next_collective(run, result, stack, trace)
        except StopIteration as stop:
            write_back(cast(Tensor, stop.value), payload, stack)
            return trace
        except HooksError:
            raise
        except Exception as error:
            if not stack.foreign:
                raise
            names = ", ".join(name for name, _ in stack.foreign)
            raise ExchangeError(
                f'hook "{names}" cannot be tried without other ranks: {type(error).__name__}: {error}'
            ) from error
        _check(wanted, issued, stack)
        collective = new_collective_trace(wanted, issued[wanted.group.name], 0)
        collective.done = 0
        trace.collectives.append(collective)
        issued[wanted.group.name] += 1
        result = _answer(wanted)


def example_payload(layout: BucketLayout, kind: Kind, device: torch.device | None = None) -> Payload:
    """A payload with the shape of a bucket and values that no run has."""
    dtype = cast(torch.dtype, getattr(torch, layout.dtype))
    if dtype.is_floating_point:
        tensor = torch.linspace(-1.0, 1.0, layout.numel, device=device).to(dtype)
    else:
        tensor = torch.zeros(layout.numel, dtype=dtype, device=device)
    return Payload(tensor, layout.params, kind, layout.index)


def _check(wanted: Collective, issued: Counter[str], stack: Stack) -> None:
    """Refuse what a run would refuse."""
    group = wanted.group
    if issued[group.name] >= len(group.process_groups):
        raise ExchangeError(
            f"hooks {list(stack.names)} ask for collective {issued[group.name] + 1} of one payload among the "
            f'ranks "{group.name}", but declare {len(group.process_groups)}: set `rounds` on the class of '
            "the hook to the most it needs"
        )
    hosts = list(dict.fromkeys(group.hosts))
    if wanted.shared and len(hosts) > 1:
        raise HookSetupError(
            f'"shared_memory" sums over the ranks of one host, but these are on {", ".join(hosts)}: '
            "write hierarchical: {within: [shared_memory]}"
        )


def _answer(wanted: Collective) -> Tensor:
    """What comes back if every rank has sent what this one sends."""
    tensor, output, group = wanted.tensor, wanted.output, wanted.group
    sizes = wanted.sizes
    match wanted.op:
        case "all_reduce":
            return output if wanted.maximum else output.mul_(group.size)
        case "all_gather":
            sizes = sizes or [tensor.numel()] * group.size
            for part, size in zip(torch.split(output, list(sizes)), sizes, strict=True):
                part.copy_(_as_long_as(tensor.reshape(-1), size))
            return output
        case "all_to_all":
            return output.copy_(_own_part(wanted).repeat(group.size))
        case "reduce_scatter":
            return output.copy_(_own_part(wanted)).mul_(group.size)
        case "broadcast":
            return output


def _own_part(wanted: Collective) -> Tensor:
    """The part of a tensor that goes to this rank itself."""
    flat, rank = wanted.tensor.reshape(-1), wanted.group.rank
    sizes = wanted.sizes or [flat.numel() // wanted.group.size] * wanted.group.size
    start = list(itertools.accumulate(sizes, initial=0))[rank]
    return flat[start : start + sizes[rank]]


def _as_long_as(flat: Tensor, size: int) -> Tensor:
    """`flat`, cut or repeated: a rank whose part is longer sends more of the same."""
    if not flat.numel():
        return flat.new_zeros(size)
    return flat.repeat(-(-size // flat.numel()))[:size]


def _no_group(name: str, ranks: list[int]) -> Any:
    return None


def _no_ranks(data: bytes) -> list[bytes]:
    raise AssertionError("there are no other ranks here")
