"""Two levels: inside each host, and between hosts."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddprun_hooks.builtin.cast import DTYPES, find_overflow
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements, requirements_in_scope
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import ParamSlice, Payload
from ddprun_hooks.stack import Stack


class Hierarchical(Hook):
    """Reduce-scatter inside the host, the `across` stack between ranks of one index on all hosts, all-gather.

    Between hosts each value travels once for a whole host, not once for each of its ranks (two-level
    all-reduce as in Jia et al. 2018, arXiv:1807.11205). Shares are cut at row boundaries of parameters, so
    that every one holds matrices.
    """

    role = "reducer"

    def __init__(
        self, within: Stack | None = None, across: Stack | None = None, hosts: int | None = None
    ) -> None:
        self.within = within or Stack([])  # a cast, shared_memory, or both
        self.across = across or Stack([])
        self.hosts = hosts  # so many equal ones; None: as launched
        self._uses_shared_memory = "shared_memory" in self.within.names
        self._cast_name = next((name for name in self.within.names if name in DTYPES), None)

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        within, across = comm.split(self.hosts)
        if self._uses_shared_memory:
            within = within.in_shared_memory()
        numel = payload.tensor.numel()
        sizes, shard_params = _shard_layout(tuple(payload.params), numel, within.size, within.rank)
        dtype = payload.tensor.dtype
        wire_dtype = DTYPES[self._cast_name] if self._cast_name and within.size > 1 else dtype

        part = (await within.reduce_scatter(payload.tensor.to(wire_dtype), sizes)).to(dtype)
        if across.size > 1:
            start = sum(sizes[: within.rank])
            error = payload.compression_error
            share = replace(
                payload,
                tensor=part,
                params=shard_params,
                compression_error=None if error is None else error[start : start + part.numel()],
            )
            part = await self.across.run_from(share, across.group)
        if within.size == 1:
            return part
        total = await within.all_gather(part.to(wire_dtype), sizes)
        if self._cast_name:
            payload.findings.extend(find_overflow(self._cast_name, payload.tensor, total))
        return payload.tensor.copy_(total)

    def requirements(self) -> GroupRequirements:
        """Two collectives among the ranks of a host; as many as its stack needs between hosts."""
        across = requirements_in_scope("across", self.across.requirements, self.hosts)
        return {GroupRequirement("within", self.hosts, self._uses_shared_memory): 2, **across}

    def inner_stacks(self) -> Mapping[str, Stack]:
        return {"within": self.within, "across": self.across}

    def state_dict(self) -> dict[str, Any]:
        """State of the hooks between hosts, which is of this rank's shares."""
        state = self.across.state_dict()
        return {"across": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.across.load_state_dict(state.get("across", {}))

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of all shares together."""
        merged = self.across.merge([state["across"] for state in states if "across" in state])
        return {"across": merged} if merged else {}


@functools.lru_cache(maxsize=1024)
def _shard_layout(
    params: tuple[ParamSlice, ...], numel: int, parts: int, rank: int
) -> tuple[tuple[int, ...], tuple[ParamSlice, ...]]:
    """Elements of each rank's share, and the parameters, and parts of them, in this rank's."""
    bounds = list(itertools.pairwise([0, *row_aligned_ends(params, numel, parts)]))
    return tuple(high - low for low, high in bounds), param_slices_between(params, *bounds[rank])


def row_aligned_ends(params: Sequence[ParamSlice], numel: int, parts: int) -> list[int]:
    """Where each of `parts` shares ends: as even as whole rows of parameters allow, the last one at `numel`.
    A row is what one index of a parameter's first dimension holds; without parameters, one element.
    """
    ends: list[int] = []
    remaining = iter(params)
    param = next(remaining, None)
    for part in range(1, parts):
        even = round(part * numel / parts)
        while param is not None and param.offset + param.numel <= even:
            param = next(remaining, None)
        end = even
        if param is not None and param.shape:
            row = param.numel // param.shape[0]
            end = param.offset + round((even - param.offset) / row) * row
        ends.append(max(end, ends[-1] if ends else 0))
    return [*ends, numel]


def param_slices_between(params: Sequence[ParamSlice], low: int, high: int) -> tuple[ParamSlice, ...]:
    """The parameters, and the rows of parameters, between two row boundaries of a flat tensor."""
    found = []
    for param in params:
        start, end = max(low, param.offset), min(high, param.offset + param.numel)
        if start >= end:
            continue
        shape = param.shape
        if end - start < param.numel:
            shape = ((end - start) * shape[0] // param.numel, *shape[1:])
        found.append(
            ParamSlice(param.name, shape, start - low, end - start, param.start + start - param.offset)
        )
    return tuple(found)
