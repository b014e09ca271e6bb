"""Hooks on tensors that say they are on a GPU: torch's meta tensors, which have shapes and no values.

They raise where a value would be read, for which a GPU would be waited for, and where devices are mixed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.builtin import cast
from ddprun_hooks.builtin.two_phase import BlockScaledFormat, Fp8, Int4, Int8
from ddprun_hooks.comm.groups import CollectiveRequest, RankGroup, RankPlacement, merge_requirements
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.simulate import dummy_payload, simulate, simulated_group
from ddprun_hooks.testing import PARAMS
from tests.hooks.test_stacks import CASTS, EXACT, LOSSY, Specs

GPU = torch.device("meta")
LAYOUT = BucketLayout(0, "float32", sum(param.numel for param in PARAMS), PARAMS)
STACKS = [specs for specs in [*EXACT, *LOSSY, *CASTS] if "shared_memory" not in str(specs)]


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors of two devices: meta tensors take another's where they are changed in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.dim()]
        if len({one.device for one in operands}) > 1:
            raise RuntimeError(f"{func}: operands are on more than one device")
        return func(*args, **(kwargs or {}))


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Inside, tensors say that they are on a GPU."""
    is_cuda = mock.patch.object(Tensor, "is_cuda", property(lambda self: True))
    with (
        is_cuda,
        OneDevice(),  # type: ignore[no-untyped-call]
        mock.patch.object(cast, "copy_scalar_to_host", lambda code: torch.zeros((), dtype=code.dtype)),
    ):
        yield


class Divisions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is divided by a number of the host: on CUDA that is multiplied by its reciprocal."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_host: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.seen += 1
            if not isinstance(args[1], Tensor) or args[1].device.type == "cpu":
                self.by_host.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("specs", STACKS, ids=str)
def test_a_hook_neither_waits_for_a_gpu_nor_mixes_devices(specs: Specs) -> None:
    stack = make_stack(specs)
    placement = RankPlacement(0, ("a", "a", "b", "b"), (2, 2, 2, 2))
    group = simulated_group("world", placement, merge_requirements([stack.requirements]))
    with on_a_gpu(), mock.patch.object(Tensor, "data_ptr", lambda self: id(self)):
        for step in range(2):  # the second has residuals
            stack.begin_step()
            payload = dummy_payload(LAYOUT, "gradient", GPU)
            trace = simulate(payload, stack, group)
            assert trace.collectives, "something was sent"
            stack.rollback() if step == 0 else stack.commit()


def test_the_stand_in_for_a_gpu_sees_a_wait_and_mixed_devices() -> None:
    """Or the test above could not fail."""
    with on_a_gpu():
        values = torch.ones(4, device=GPU)
        with pytest.raises(RuntimeError, match="meta"):
            bool(values.any())
        with pytest.raises(RuntimeError, match="device"):
            values + torch.ones(4)
        with pytest.raises(RuntimeError, match="device"):
            values.add_(torch.ones(4))


@pytest.mark.parametrize("wire", [Int8(256), Int4(64), Fp8(256)])
def test_codes_divide_by_nothing_that_a_gpu_rounds_otherwise(wire: BlockScaledFormat) -> None:
    """A GPU multiplies by the reciprocal of a plain number; the scales would differ by a bit from a CPU's."""
    with on_a_gpu(), Divisions() as divisions:
        wire.encode(torch.ones(1024, device=GPU))
    assert divisions.seen >= 2
    assert not divisions.by_host


def test_gathered_tensors_of_one_length_arrive_in_place() -> None:
    """A list of tensors has NCCL gather into one more buffer, and copy out of it."""
    group = mock.create_autospec(dist.ProcessGroup, instance=True)
    ranks = RankGroup("world", 0, ("a", "a"), [group])
    tensor, output = torch.arange(3), torch.empty(6)
    ranks.launch(CollectiveRequest(ranks, "all_gather", tensor, output), 0)
    group._allgather_base.assert_called_once_with(output, tensor)
    group.allgather.assert_not_called()


@pytest.mark.parametrize("block", [256, 260, 1024])
def test_int8_scales_are_aligned_in_a_message(block: int) -> None:
    """With any number of values, odd numbers of blocks included."""
    spec: HookSpec = {"int8": {"block": block}}
    stack = make_stack(spec)
    group = simulated_group("world", RankPlacement(0, ("a",) * 3, (3,) * 3), stack.requirements)
    for numel in (1, block + 1, 7 * block - 5):
        layout = BucketLayout.from_tensors(0, torch.float32, {"w": torch.empty(numel)}.items())
        simulate(dummy_payload(layout, "gradient"), stack, group)
