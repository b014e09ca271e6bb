"""One part of the parameters: what ranks last had in common, and how their mean change is applied.

What travels is the change since the last common weights, divided by the number of ranks, so that lossy hooks
lose little and their residuals are in units of the mean's contribution.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddprun.sync.exchanger import ParameterExchanger, PendingExchange
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Stack


class DeltaExchange:
    """Parameters that are exchanged together, round after round.

    Args:
        buckets: the parameters.
        exchanger: sends them.
        stack: the hooks they go through.
        group: the ranks, of the exchanger's queue of deltas.
        outer: what becomes of the mean change; None: it is added to the common weights.
    """

    def __init__(
        self,
        buckets: ParameterBuckets,
        exchanger: ParameterExchanger,
        stack: Stack,
        group: RankGroup,
        outer: "OuterSgd | None" = None,
    ) -> None:
        self.buckets = buckets
        self._exchanger = exchanger
        self._stack = stack
        self._group = group
        self.outer = outer
        self._base: list[Tensor] = []  # common weights, (numel,) of each bucket
        self._left: list[Tensor] = []  # this rank's weights when the exchange under way began
        self._pending: list[PendingExchange] = []
        self._means: list[Tensor] = []  # of an exchange that has landed, but is not to be applied yet

    @property
    def under_way(self) -> bool:
        """An exchange has begun and is not applied yet."""
        return bool(self._pending or self._means)

    def begin(self) -> None:
        """The ranks have the same weights now."""
        self._base = [self.buckets.flat(place) for place in range(len(self.buckets.layouts))]

    def send(self, *, overlap: bool = False) -> None:
        """Begin an exchange of what has changed.

        Args:
            overlap: training goes on meanwhile.
        """
        for place, layout in enumerate(self.buckets.layouts):
            flat = self.buckets.flat(place)
            if overlap:
                self._left.append(flat.clone())
            change = flat.sub_(self._base[place]).mul_(1.0 / self._group.size)
            payload = Payload(change, layout.params, "delta", layout.index)
            self._pending.append(
                self._exchanger.send(self._exchanger.exchange.deltas, payload, self._stack, self._group)
            )

    def exchange(self) -> None:
        """A whole exchange, waited for."""
        self.send()
        self.land()

    def land(self, *, moved: bool = True) -> None:
        """Wait for the exchange under way and apply it.

        Weights become the new common ones. If training went on meanwhile, they move by what the exchange has
        changed, and what this rank has learned since stays, as a change to be sent in the next round (delayed
        averaging: Zhou et al. 2020, arXiv:2006.00441).

        Args:
            moved: this rank's weights have changed since an overlapping exchange began.
        """
        means: list[Tensor | None] = [*self._means] or [None] * len(self._pending)
        for place, mean in enumerate(means):
            mean = self._exchanger.land(self._pending[place]) if mean is None else mean
            base = self._base[place]
            common = base + mean if self.outer is None else self.outer.step(place, base, mean)
            if self._left and moved:
                self.buckets.add(place, common - self._left[place])
            else:
                self.buckets.put(place, common)
            self._base[place] = common
        self._pending, self._left, self._means = [], [], []

    def state_dict(self) -> dict[str, Any]:
        """Common weights, what an exchange under way has brought, and the outer optimizer's momentum:
        `{name: {bucket: (numel,)}}`.
        """
        if self._pending and not self._means:
            self._means = [self._exchanger.land(pending).clone() for pending in self._pending]
        found = {"base": self._base, "left": self._left, "means": self._means}
        state = {name: _numbered(tensors) for name, tensors in found.items() if tensors}
        if self.outer is not None:
            state["momentum"] = {str(place): one.clone() for place, one in self.outer.momentum_of.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; without common weights in it, from those of `begin`."""
        if self.outer is not None:
            self.outer.momentum_of = {int(place): one.clone() for place, one in state["momentum"].items()}
        if "base" not in state:
            return
        self._base, self._left, self._means = (
            [state[name][str(place)].clone().to(base) for place, base in enumerate(self._base)]
            if name in state
            else []
            for name in ("base", "left", "means")
        )
        self._pending = []


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(place): tensor.clone() for place, tensor in enumerate(tensors)}


class OuterSgd:
    """SGD with Nesterov momentum on the common weights, its gradient the ranks' mean change, negated.

    As torch.optim.SGD(lr, momentum, nesterov=True): with m = 0 and lr = 1 it adds the mean change.

    Args:
        lr: outer learning rate.
        momentum: in [0, 1).
    """

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = lr
        self.momentum = momentum
        self.momentum_of: dict[int, Tensor] = {}
        """Momentum of each bucket, by its place; shape (numel,), at least fp32."""

    def step(self, place: int, base: Tensor, mean: Tensor) -> Tensor:
        """The new common weights."""
        step = mean
        if self.momentum:
            wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
            known = self.momentum_of.get(place)
            buffer = wide.clone() if known is None else known.mul_(self.momentum).add_(wide)
            self.momentum_of[place] = buffer
            step = torch.add(wide, buffer, alpha=self.momentum).to(mean.dtype)
        return torch.add(base, step, alpha=self.lr)

    def take_on(self, buckets: ParameterBuckets, momentum: Mapping[str, Tensor]) -> None:
        """Go on from the momentum that an earlier stage left, by parameter name."""
        for place, layout in enumerate(buckets.layouts):
            if all(param.name in momentum for param in layout.params):
                self.momentum_of[place] = torch.cat([momentum[param.name] for param in layout.params])

    def leave(self, buckets: ParameterBuckets, momentum: dict[str, Tensor]) -> None:
        """Leave the momentum to a later stage, by parameter name."""
        for place, buffer in self.momentum_of.items():
            for param in buckets.layouts[place].params:
                momentum[param.name] = buffer[param.offset : param.offset + param.numel].clone()
