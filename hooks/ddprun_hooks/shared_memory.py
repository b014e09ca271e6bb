"""All-reduce through POSIX shared memory."""

from torch import Tensor

from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.hook import Hook, Need, Needs
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Link


class SharedMemory(Hook):
    """Sum in memory that the ranks of one host share (`ddprun_hooks.arena`); nothing is sent."""

    role = "reducer"

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        if payload.tensor.device.type != "cpu":
            raise HookSetupError(
                f'"shared_memory" sums tensors on the CPU, this one is on {payload.tensor.device.type}: '
                "remove the hook, NCCL uses shared memory by itself"
            )
        return await link.world.in_memory().all_reduce(payload.tensor)

    def needs(self) -> Needs:
        """All ranks, which have to be on one host."""
        return {Need("world", shared=True): 1}
