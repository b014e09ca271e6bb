"""How values travel as they are: stacks for what no hook may change."""

from torch import Tensor

from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Link, Stack


class Broadcast(Hook):
    """Give every rank the payload of one.

    Args:
        source: that rank's place in the team.
    """

    role = "reducer"

    def __init__(self, source: int = 0) -> None:
        self.source = source

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return await link.world.broadcast(payload.tensor, self.source)


def summed() -> Stack:
    """Plain all-reduce: the sum of the ranks' payloads."""
    return Stack([])


def broadcast_from(source: int) -> Stack:
    """The payload of rank `source`. Other ranks' payloads are overwritten."""
    return Stack([("broadcast", Broadcast(source))])
