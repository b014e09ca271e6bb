"""The arithmetic of every hook on CUDA tensors is that on the CPU."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks import Payload
from ddprun_hooks.builtin.cast import find_overflow
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.gpu import GpuStreams, StreamTimestamp
from ddprun_hooks.comm.groups import RankPlacement
from ddprun_hooks.comm.trace import BucketTrace, read_finding_codes
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.registry import make_stack
from ddprun_hooks.testing import PARAMS, contribution
from tests.hooks.test_stacks import CASTS, EXACT, LOSSY, Specs
from tests.ranks import as_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
STACKS = [specs for specs in [*EXACT, *LOSSY, *CASTS] if "shared_memory" not in str(specs)]
STEPS = 4


def adds_in_rank_order(specs: Specs) -> bool:
    """Whether the sum is the hooks' own, and not that of an all-reduce."""
    return all(hook.role == "reducer" and isinstance(hook, ErrorFeedback) for hook in make_stack(specs).hooks)


def on_both(specs: Specs, backend: str) -> list[tuple[Tensor, Tensor]]:
    """Results of some steps on the CPU over Gloo, and on the GPU over `backend`, in fp32."""
    timeout = timedelta(seconds=60)
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    control = open_control_channel(timeout)
    results = []
    for device, over in (("cpu", "gloo"), ("cuda:0", backend)):
        stack = make_stack(specs)
        exchange = CommContext.open(
            control=control,
            device=torch.device(device),
            backend=over,
            placement=RankPlacement(rank, ("here",) * ranks, (int(os.environ["LOCAL_WORLD_SIZE"]),) * ranks),
            gradients=stack.requirements,
            timeout=timeout,
        )
        given = []
        for step in range(STEPS):
            tensor = contribution(rank, step, ranks).to(device)
            payload = Payload(tensor, PARAMS, "gradient", 0)
            given.append(exchange.gradient_queue.send(payload, stack, []).wait().cpu().clone())
        results.append(given)
    return list(zip(*results, strict=True))


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo"), (4, "gloo")])
@pytest.mark.parametrize("specs", STACKS, ids=str)
def test_a_gpu_computes_what_the_cpu_does(specs: Specs, ranks: int, backend: str) -> None:
    """Bit for bit, but for factorisations, matrix products and the order in which a reduction adds."""
    if "hierarchical" in str(specs) and ranks == 1:
        specs = [{"hierarchical": {"hosts": 1, "across": ["int8"]}}]
    for pairs in as_processes(ranks, on_both, specs, backend):
        for cpu, gpu in pairs:
            assert cpu.abs().sum() > 0
            if "powersgd" in str(specs):
                assert (gpu - cpu).norm() < 2e-2 * cpu.norm()
            elif ranks <= 2 or adds_in_rank_order(specs):
                assert torch.equal(gpu, cpu)
            else:
                assert torch.allclose(gpu, cpu, rtol=2e-2 if specs in CASTS else 1e-5, atol=1e-2)


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (1e9, 1), (float("inf"), 2)])
def test_what_a_cast_has_found_is_read_without_waiting_for_the_gpu(value: float, code: int) -> None:
    """Torch raises where anything waits: not the hook, and not who reads once the payload is over."""
    own = torch.full((1000,), value, device="cuda:0")
    total = own.half()
    trace: BucketTrace[StreamTimestamp]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        payload = Payload(own, (), "gradient", 0)
        payload.findings.extend(find_overflow("fp16", payload.tensor, total))
        done = GpuStreams(torch.device("cuda", 0)).record_timestamp()
        done.event.synchronize()  # as the clock does, which reads the payload's last mark
        trace = BucketTrace("gradient", 0, ("fp16",), "float32", 1000, 4000, done, findings=payload.findings)
        read_finding_codes([trace])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [finding.code for finding in trace.findings] == [code]
