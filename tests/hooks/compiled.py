"""Kernels compiled for a GPU on a machine without one; for a process of its own, in which Triton compiles."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from ddprun_hooks.kernels import blocks

_I32 = ("numel", "blocks_per_share", "ranks")  # arguments that are whole numbers


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes, and what of its instructions would give other bits than torch."""

    kernel: str
    variant: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    threads: int
    other_bits: tuple[str, ...]


def compile_all(capability: int) -> list[Compiled]:
    """Every kernel, for GPUs of a compute capability (80 or 90), as it is launched."""
    return [
        _compiled(kernel, name, variant, capability, pointers, constants, options)
        for name, kernel, variant, pointers, constants, options in _variants()
    ]


def _variants() -> Iterator[tuple[str, Any, str, Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]]:
    """Name, kernel and variant; types behind pointers; constants; how it is launched."""
    for format, block in (("int8", 256), ("int8", 260), ("int8", 4096), ("int4", 64)):
        _, options = blocks.grid_and_options(block, 1, 1)
        constants = {"FORMAT": format, "BLOCK": block}
        message = {"message": "u8"}
        yield (
            "encode",
            blocks.encode,
            f"{format}, {block}",
            {"payload": "fp32", "residual": "fp32"} | message,
            constants,
            options,
        )
        arrived = {"arrived": "u8", "residual_share": "fp32"} | message
        yield "sum_and_encode", blocks.sum_and_encode, f"{format}, {block}", arrived, constants, options
        yield "decode", blocks.decode, f"{format}, {block}", message | {"values": "fp32"}, constants, options


def _compiled(
    kernel: Any,
    name: str,
    variant: str,
    capability: int,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Compiled:
    constants = {**constants, **{key: value for key, value in options.items() if key.isupper()}}
    signature, aligned = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in _I32:
            signature[argument] = "i32"
        else:
            signature[argument] = f"*{pointers[argument]}"
            aligned[(index,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={key: value for key, value in options.items() if not key.isupper()},
    )
    ptx = made.asm["ptx"]
    other_bits = re.findall(r"fma\.\S*|\S*\.ftz\S*|div\.full\S*|\S*\.approx\S*|cvt\.r[zmp]\S*", ptx)
    registers, spilled = _of_assembler(ptx, capability)
    module = kernel.__module__.rpartition(".")[2]
    return Compiled(
        f"{module}.{name}",
        variant,
        registers,
        spilled,
        made.metadata.shared,
        32 * made.metadata.num_warps,
        tuple(sorted(set(other_bits))),
    )


def _of_assembler(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as the assembler that Triton brings says."""
    ptxas = get_ptxas(capability).path
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [ptxas, "-v", "--fmad=false", f"--gpu-name={arch}", source.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stderr
    spilled = sum(int(found) for found in re.findall(r"(\d+) bytes spill", said))
    return int(re.findall(r"Used (\d+) registers", said)[0]), spilled


if __name__ == "__main__":
    print("| kernel | variant | threads | registers (A100) | registers (H100) | spilled (bytes) ", end="")
    print("| shared memory (bytes) |")
    print("|---|---|---|---|---|---|---|")
    for a100, h100 in zip(compile_all(80), compile_all(90), strict=True):
        print(
            f"| `{a100.kernel}` | {a100.variant} | {a100.threads} | {a100.registers} | {h100.registers} "
            f"| {a100.spilled + h100.spilled} | {max(a100.shared, h100.shared)} |"
        )
