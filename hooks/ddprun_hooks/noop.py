"""No communication at all: what training would cost if exchange were free."""

from torch import Tensor

from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Link


class Noop(Hook):
    """Give every rank its own gradient back; the ranks' weights drift apart."""

    role = "alone"
    rounds = 0

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return payload.tensor.mul_(link.world.size)
