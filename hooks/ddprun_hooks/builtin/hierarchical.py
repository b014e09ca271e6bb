"""Two levels: inside each host, and between hosts."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ddprun_hooks.builtin.cast import DTYPES, find_overflow
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import ParamSlice, Payload
from ddprun_hooks.stack import Stack


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    params: tuple[ParamSlice, ...]
    sizes: list[int]  # elements of each rank's share
    shard_params: tuple[ParamSlice, ...]  # the parameters, and parts of them, in this rank's share


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
        self._shard_layouts: dict[tuple[str, int], _ShardLayout] = {}

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        within, across = comm.split(self.hosts)
        if self._uses_shared_memory:
            within = within.in_shared_memory()
        layout = self._shard_layout(payload, within)
        dtype = payload.tensor.dtype
        wire_dtype = DTYPES[self._cast_name] if self._cast_name and within.size > 1 else dtype

        part = (await within.reduce_scatter(payload.tensor.to(wire_dtype), layout.sizes)).to(dtype)
        if part.numel() and across.size > 1:
            start = sum(layout.sizes[: within.rank])
            error = payload.compression_error
            share = replace(
                payload,
                tensor=part,
                params=layout.shard_params,
                compression_error=None if error is None else error[start : start + part.numel()],
            )
            part = await self.across.run(share, across.group)
        if within.size == 1:
            return part
        total = await within.all_gather(part.to(wire_dtype), layout.sizes)
        if self._cast_name:
            payload.findings.extend(find_overflow(self._cast_name, payload.tensor, total))
        return payload.tensor.copy_(total)

    def _shard_layout(self, payload: Payload, within: Communicator) -> _ShardLayout:
        key = payload.kind, payload.bucket
        # A payload without parameters (factors, say) may have another length each time: it is not looked up.
        layout = self._shard_layouts.get(key) if payload.params else None
        if layout is None or layout.params != payload.params:
            ends = row_aligned_ends(payload.params, payload.tensor.numel(), within.size)
            bounds = list(itertools.pairwise([0, *ends]))
            sizes = [high - low for low, high in bounds]
            shard_params = param_slices_between(payload.params, *bounds[within.rank])
            layout = self._shard_layouts[key] = _ShardLayout(payload.params, sizes, shard_params)
        return layout

    def requirements(self) -> GroupRequirements:
        """Two collectives among the ranks of a host; as many as its stack needs between hosts."""
        across = {
            GroupRequirement("across", self.hosts, one.shared): rounds
            for one, rounds in self.across.requirements.items()
        }
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
