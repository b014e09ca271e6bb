"""All-reduce through shared memory."""

from torch import Tensor

from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload


class SharedMemory(Hook):
    """Sum in memory that the ranks of one host share (`ddprun_hooks.shm.group`); nothing is sent."""

    role = "reducer"

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.in_shared_memory().all_reduce(payload.tensor)

    def requirements(self) -> GroupRequirements:
        """All ranks, which have to be on one host."""
        return {GroupRequirement("world", via_shared_memory=True): 1}
