"""What a stack would send, without sending it: no process group is made and no other rank is needed."""

import itertools
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.channel import Collective
from ddprun_hooks.errors import ExchangeError, HooksError, HookSetupError
from ddprun_hooks.flight import Flight
from ddprun_hooks.hook import Need, Needs
from ddprun_hooks.lane import new_flight, new_leg, next_collective, put_back, route_of
from ddprun_hooks.payload import Kind, Payload
from ddprun_hooks.porter import Porter
from ddprun_hooks.stack import Stack
from ddprun_hooks.team import Team
from ddprun_hooks.teams import Ground, Layout, all_of, open_teams


def imagined_team(name: str, layout: Layout, needs: Needs) -> Team:
    """The team that `open_teams` would give the rank of `layout`, over which nothing can be sent.

    Args:
        name: of the team of all ranks.
        layout: where the ranks are.
        needs: of all stacks that will use the team.

    Raises:
        HookSetupError: the ranks do not lie as a hook needs them.
    """
    # Shared memory would be made at once, where a process group is only a name here.
    unshared = all_of({Need(need.leg, need.hosts): rounds} for need, rounds in needs.items())
    return open_teams(name, layout, unshared, Ground(_no_group, _nothing_told, 0.0, Porter()))


def rehearse(payload: Payload, stack: Stack, team: Team) -> Flight[int]:
    """Carry one payload through a stack as if the other ranks of a team were there and had sent the same.

    Legs are counted as a run counts them; times are 0. The payload's memory, and what the hooks keep, are
    changed as in a run: take a stack that nothing else uses, and one for each rank.

    Args:
        payload: of the rank whose place in the team `team.rank` is.
        stack: the hooks to go through.
        team: made by `imagined_team`, or one of its splits.

    Raises:
        HookSetupError: the ranks do not lie as a hook needs them.
        ExchangeError: a hook asks for more than it has declared, or returns something else than it was given.
    """
    flight: Flight[int] = new_flight(payload, stack, 0)
    flight.handed_over = flight.done = 0
    route = route_of(payload, stack, team)
    issued: Counter[str] = Counter()
    result: Tensor | None = None
    while True:
        try:
            wanted = next_collective(route, result, stack, flight)
        except StopIteration as stop:
            put_back(cast(Tensor, stop.value), payload, stack)
            return flight
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
        leg = new_leg(wanted, issued[wanted.team.name], 0)
        leg.done = 0
        flight.legs.append(leg)
        issued[wanted.team.name] += 1
        result = _answer(wanted)


def made_up(layout: BucketLayout, kind: Kind, device: torch.device | None = None) -> Payload:
    """A payload with the shape of a bucket and values that no run has."""
    dtype = cast(torch.dtype, getattr(torch, layout.dtype))
    if dtype.is_floating_point:
        tensor = torch.linspace(-1.0, 1.0, layout.numel, device=device).to(dtype)
    else:
        tensor = torch.zeros(layout.numel, dtype=dtype, device=device)
    return Payload(tensor, layout.params, kind, layout.index)


def _check(wanted: Collective, issued: Counter[str], stack: Stack) -> None:
    """Refuse what a run would refuse."""
    team = wanted.team
    if issued[team.name] >= len(team.groups):
        raise ExchangeError(
            f"hooks {list(stack.names)} ask for collective {issued[team.name] + 1} of one payload among the "
            f'ranks "{team.name}", but declare {len(team.groups)}: set `rounds` on the class of the hook to '
            "the most it needs"
        )
    hosts = list(dict.fromkeys(team.hosts))
    if wanted.shared and len(hosts) > 1:
        raise HookSetupError(
            f'"shared_memory" sums over the ranks of one host, but these are on {", ".join(hosts)}: '
            "write hierarchical: {within: [shared_memory]}"
        )


def _answer(wanted: Collective) -> Tensor:
    """What comes back if every rank has sent what this one sends."""
    tensor, output, team = wanted.tensor, wanted.output, wanted.team
    sizes = wanted.sizes
    match wanted.op:
        case "all_reduce":
            return output if wanted.maximum else output.mul_(team.size)
        case "all_gather":
            sizes = sizes or [tensor.numel()] * team.size
            for part, size in zip(torch.split(output, list(sizes)), sizes, strict=True):
                part.copy_(_as_long_as(tensor.reshape(-1), size))
            return output
        case "all_to_all":
            return output.copy_(_own_part(wanted).repeat(team.size))
        case "reduce_scatter":
            return output.copy_(_own_part(wanted)).mul_(team.size)
        case "broadcast":
            return output


def _own_part(wanted: Collective) -> Tensor:
    """The part of a tensor that goes to this rank itself."""
    flat, rank = wanted.tensor.reshape(-1), wanted.team.rank
    sizes = wanted.sizes or [flat.numel() // wanted.team.size] * wanted.team.size
    start = list(itertools.accumulate(sizes, initial=0))[rank]
    return flat[start : start + sizes[rank]]


def _as_long_as(flat: Tensor, size: int) -> Tensor:
    """`flat`, cut or repeated: a rank whose part is longer sends more of the same."""
    if not flat.numel():
        return flat.new_zeros(size)
    return flat.repeat(-(-size // flat.numel()))[:size]


def _no_group(name: str, ranks: list[int]) -> Any:
    return None


def _nothing_told(data: bytes) -> list[bytes]:
    raise AssertionError("nothing here is told to other ranks")
