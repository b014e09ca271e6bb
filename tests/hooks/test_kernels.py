"""Triton's kernels give the bits of the torch reference, and compile for GPUs without spilling registers."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddprun_hooks import kernels
from tests.hooks import same_bits

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["normal", "zeros", "denormal", "whole", "lost"]
BLOCKS = [("int8", 256), ("int8", 260), ("int4", 64), ("int4", 72)]


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A process that imports Triton with an environment of its own."""
    with mock.patch.dict(os.environ, environment):
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result(60)
    with pool:
        yield pool


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Triton interprets kernels if it was told to before it was imported."""
    with process(TRITON_INTERPRET="1") as pool:
        pool.submit(same_bits.prepare).result(60)
        yield pool


def run(pool: ProcessPoolExecutor, check: Any, *arguments: Any) -> Any:
    return pool.submit(check, *arguments).result(120)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_codes_scales_sums_and_what_is_left(
    interpreter: ProcessPoolExecutor, name: str, block: int, kind: str
) -> None:
    """Of three ranks, with half a block that is padded and a program's last blocks missing; bit for bit."""
    for numel, ranks, dtype in ((5 * block + 3, 3, torch.float32), (block, 1, torch.bfloat16)):
        assert run(interpreter, same_bits.of_blocks, name, block, numel, ranks, dtype, kind) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(BLOCKS), st.integers(1, 3000), st.integers(1, 4), st.sampled_from(DTYPES),
    st.sampled_from(KINDS), st.integers(0, 9999),
)  # fmt: skip
def test_codes_of_any_payload(
    interpreter: ProcessPoolExecutor,
    wire: tuple[str, int],
    numel: int,
    ranks: int,
    dtype: torch.dtype,
    kind: str,
    seed: int,
) -> None:
    assert run(interpreter, same_bits.of_blocks, *wire, numel, ranks, dtype, kind, seed) == []


@pytest.mark.parametrize("hook", ["int8", "int4"])
def test_a_hook_gives_and_keeps_the_same_with_kernels(interpreter: ProcessPoolExecutor, hook: str) -> None:
    """And uses them."""
    assert run(interpreter, same_bits.through_a_stack, hook, 777) == ([], 3)


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_kernels_spill_no_registers_and_fuse_nothing(tmp_path: Path, capability: int) -> None:
    """For A100 and H100, on a machine without either."""
    from tests.hooks.compiled import compile_all

    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)) as pool:
        found = run(pool, compile_all, capability)
    assert len(found) == 12
    for one in found:
        assert (one.spilled, one.other_bits) == (0, ()), one
        assert one.registers * one.threads <= 65536 // 2, (
            f"a multiprocessor runs one program at a time: {one}"
        )


def test_without_a_gpu_nothing_imports_triton() -> None:
    """It takes as long to import as torch."""
    script = """
import os
import sys
from ddprun_hooks.testing import run_hooks
for hook in ("int8", "fp16", {"bf16": {"accumulate": "fp32"}}, {"topk": {"density": 0.5}}):
    run_hooks([hook], 1, lambda rank: rank.step(0))
assert "ddprun_hooks.kernels" in sys.modules
assert "triton" not in sys.modules
os._exit(0)  # Gloo's threads of groups that are still there abort one process in some ten at its end
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it works")
def test_a_triton_that_does_not_work_is_said_once_and_not_used() -> None:
    """Here, because torch finds no GPU."""
    kernels._triton_works.cache_clear()
    device = torch.device("cuda", 0)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        with pytest.warns(UserWarning, match="Triton is installed but does not work here"):
            assert not kernels._triton_works(device)
        assert not kernels._triton_works(device)
    kernels._triton_works.cache_clear()


def test_an_old_gpu_computes_in_torch() -> None:
    """Its types and instructions were not looked at."""
    kernels._triton_works.cache_clear()
    with mock.patch("torch.cuda.get_device_capability", return_value=(7, 5)):
        assert not kernels._triton_works(torch.device("cuda", 0))
    kernels._triton_works.cache_clear()
