"""No communication at all: what training would cost if exchange were free."""

from torch import Tensor

from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload


class Noop(Hook):
    """Give every rank its own gradient back; the ranks' weights drift apart."""

    role = "alone"
    rounds = 0

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return payload.tensor.mul_(comm.size)
