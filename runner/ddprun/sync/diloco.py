"""DiLoCo: an outer optimizer on what the ranks learn apart; in fragments, and while training goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun.sync.policy import Effect, Policy, SyncContext
from ddprun.sync.rounds import OuterSgd, Part
from ddprun_hooks.buckets import ParameterBuckets


@dataclass(slots=True)
class _Fragment:
    """One part of the parameters and its outer optimizer."""

    part: Part
    outer: OuterSgd
    phase: int
    """It is exchanged after steps whose number leaves this remainder, divided by the period."""

    since: int = 0
    """Steps since its last exchange began."""

    def begins(self, step: int, every: int) -> bool:
        """Its exchange begins after this step."""
        return step > 0 and step % every == self.phase


class Diloco(Policy):
    """Outer SGD with Nesterov momentum, its gradient the ranks' mean change (Douillard et al. 2023,
    arXiv:2311.08105).

    With fragments, each part of the parameters has its own exchange every `every` steps, at evenly spread
    steps (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). With overlap, an exchange that begins
    after step k is applied after step k + overlap_steps, neither before nor after, on every rank alike.

    Args:
        place: what to work with.
        every: steps between two exchanges of the same parameters.
        outer_lr, outer_momentum: of the outer optimizer.
        fragments: how many parts.
        overlap_steps: steps for which an exchange may take; less than `every`.
        momentum: of an earlier stage's outer optimizer, by parameter name; taken on, and updated at the end.

    Raises:
        ValueError: more fragments than parameters.
    """

    gradients_everywhere = False

    def __init__(
        self,
        place: SyncContext,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        fragments: int,
        overlap_steps: int,
        momentum: dict[str, Tensor],
    ) -> None:
        self._every, self._overlap = every, overlap_steps
        self.control_delay_steps = max(1, overlap_steps)
        self._described = (every, outer_lr, outer_momentum, fragments, overlap_steps)
        self._momentum = momentum
        self._fragments: list[_Fragment] = []
        first = 0
        for index, named in enumerate(split_evenly(place.parameters(), fragments)):
            buckets = ParameterBuckets(named, place.exchanger.cap_bytes, first)
            first += len(buckets.layouts)
            outer = OuterSgd(outer_lr, outer_momentum)
            _take_on(outer, buckets, momentum)
            part = Part(buckets, place.exchanger, place.stack, place.exchanger.exchange.deltas.world, outer)
            self._fragments.append(_Fragment(part, outer, index * every // fragments))

    def begin(self) -> None:
        """What the ranks have in common now is what changes are counted from."""
        for fragment in self._fragments:
            fragment.part.begin()

    def synchronises(self, step: int) -> bool:
        """Where an exchange is applied."""
        return any(fragment.begins(step - self._overlap, self._every) for fragment in self._fragments)

    def after_step(self, step: int) -> Effect:
        """Apply what is due, begin what is due."""
        for fragment in self._fragments:
            fragment.since += 1
            if self._overlap and fragment.begins(step - self._overlap, self._every):
                fragment.part.land()
        for fragment in self._fragments:
            if fragment.begins(step, self._every):
                fragment.part.send(overlap=self._overlap > 0)
                fragment.since = 0
                if not self._overlap:
                    fragment.part.land()
        everything = not self._overlap and all(fragment.since == 0 for fragment in self._fragments)
        return "common" if everything else "apart"

    def finish(self, *, reconcile: bool) -> Effect:
        """Apply what is under way; then each part's last round is a short one."""
        landed = [fragment for fragment in self._fragments if fragment.part.under_way]
        for fragment in landed:
            fragment.part.land(moved=fragment.since > 0)
        unsent = [fragment for fragment in self._fragments if fragment.since]
        if reconcile:
            for fragment in unsent:
                fragment.part.send()
                fragment.since = 0
            for fragment in unsent:
                fragment.part.land()
        for fragment in self._fragments:
            _leave(fragment.outer, fragment.part.buckets, self._momentum)
        return "common" if reconcile and (unsent or landed) else "nothing"

    def describe(self) -> str:
        """Its options."""
        return f"diloco {self._described}"

    def state_dict(self) -> dict[str, Any]:
        """Of each fragment: common weights, outer momentum, counters, and what is under way."""
        return {
            str(index): {
                "part": fragment.part.state_dict(),
                "momentum": {str(place): buffer.clone() for place, buffer in fragment.outer.buffers.items()},
                "since": fragment.since,
            }
            for index, fragment in enumerate(self._fragments)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in mid-round."""
        for index, fragment in enumerate(self._fragments):
            own = state[str(index)]
            if own["part"]:
                fragment.part.load_state_dict(own["part"])
            fragment.outer.buffers = {int(place): buffer.clone() for place, buffer in own["momentum"].items()}
            fragment.since = own["since"]

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The outer momentum, which all ranks have alike."""
        return {
            index: {"part": {}, "momentum": own["momentum"], "since": 0} for index, own in states[0].items()
        }


def split_evenly(named: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Neighbouring parameters in `parts` groups of about equally many elements, none of them empty.

    Raises:
        ValueError: fewer parameters than parts.
    """
    if parts > len(named):
        raise ValueError(f"{parts} fragments of {len(named)} parameters: each needs at least one")
    items = list(named.items())
    total, done = sum(tensor.numel() for tensor in named.values()), 0
    groups: list[dict[str, Tensor]] = [{}]
    for place, (name, tensor) in enumerate(items):
        left, wanted = len(items) - place, parts - len(groups)
        middle = done + tensor.numel() / 2
        if groups[-1] and (left <= wanted or (wanted and middle >= total * len(groups) / parts)):
            groups.append({})
        groups[-1][name] = tensor
        done += tensor.numel()
    return groups


def _take_on(outer: OuterSgd, buckets: ParameterBuckets, momentum: Mapping[str, Tensor]) -> None:
    """Go on from the momentum that an earlier stage left."""
    for place, layout in enumerate(buckets.layouts):
        if all(param.name in momentum for param in layout.params):
            outer.buffers[place] = torch.cat([momentum[param.name] for param in layout.params])


def _leave(outer: OuterSgd, buckets: ParameterBuckets, momentum: dict[str, Tensor]) -> None:
    """Leave the momentum to a later stage."""
    for place, buffer in outer.buffers.items():
        for param in buckets.layouts[place].params:
            momentum[param.name] = buffer[param.offset : param.offset + param.numel].clone()
