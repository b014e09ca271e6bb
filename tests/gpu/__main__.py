"""Run what needs an NVIDIA GPU, in parts: `make test-gpu`, or `python -m tests.gpu [NUMBER OF A PART...]`.

Each part is a process with a limit of its own, so that one that hangs or crashes hides no other. Parts that
measure times run alone, the others beside each other. The output of each, and a line for each test, go to the
folder that `OUT` names (`gpu-results` by default) as they come, so that they are there after an end by force,
too. A run of all parts writes the table of docs/gpu.md.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

LIMIT_S = 560.0  # of all parts
_END_S = 8  # from SIGINT, at which pytest prints its summary, to SIGKILL
_ROOT = Path(__file__).parents[2]
_PART_VARIABLE = "DDPRUN_GPU_TESTS_PART"
_BEGIN, _END = "<!-- figures: written by make test-gpu -->", "<!-- end of figures -->"


class Part(NamedTuple):
    """Tests of one file that run in one process."""

    name: str
    limit_s: float
    file: str
    select: str = ""  # as for `pytest -k`
    alone: bool = True


PARTS = (
    Part("first run over NCCL", 60, "test_gpu.py", "precision and fp32 and nccl or more_ranks"),
    Part("kernels, bits", 120, "test_kernels_on_gpu.py", "normal", alone=False),
    Part("hooks as on the CPU", 220, "test_hooks_on_gpu.py", alone=False),
    Part("resumed runs", 220, "test_runs_on_gpu.py", "resumed", alone=False),
    Part("compiled runs", 180, "test_runs_on_gpu.py", "compiled", alone=False),
    Part("other precisions, Gloo", 220, "test_gpu.py", "precision and not (fp32 and nccl)", alone=False),
    Part("order of times, bits", 120, "test_gpu.py", "times_from_events or same_seed", alone=False),
    Part("hang, clocks, refusal", 150, "test_runs_on_gpu.py", "hangs or jump or shared_memory", alone=False),
    Part(
        "kernels, other values",
        120,
        "test_kernels_on_gpu.py",
        "not normal and not quantising and not other_kernels",
        alone=False,
    ),
    Part("streams, clocks, copies", 120, "test_lane.py"),
    Part("kernels, speed", 35, "test_kernels_on_gpu.py", "quantising or other_kernels"),
    Part("cost of a step", 150, "test_runs_on_gpu.py", "costs"),
)


def main(wanted: list[int]) -> int:
    """Run the wanted parts, or all; gives the exit code."""
    out = Path(os.environ.get("OUT", "gpu-results")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.*"):
        old.unlink()
    end, codes = time.monotonic() + LIMIT_S, list[int]()

    def run(number: int) -> None:
        part = PARTS[number - 1]
        limit_s, start = min(part.limit_s, end - time.monotonic()), time.monotonic()
        if limit_s < 2 * _END_S:
            codes.append(-1)
            print(f"=== {number} {part.name}: no time left", flush=True)
            return
        codes.append(run_part(number, limit_s, out))
        s = time.monotonic() - start
        print(f"=== {number} {part.name}: exit code {codes[-1]} after {s:.0f} s", flush=True)

    numbers = [number for number in range(1, len(PARTS) + 1) if not wanted or number in wanted]
    beside = [number for number in numbers if not PARTS[number - 1].alone]
    print(machine(), flush=True)
    for number in numbers:
        if number in beside[:1]:
            with ThreadPoolExecutor(len(beside)) as pool:
                list(pool.map(run, beside))
        elif number not in beside:
            run(number)
    lines = table(out / "results.jsonl")
    print("\n".join(lines), flush=True)
    if not wanted and torch.cuda.is_available():
        write_into(_ROOT / "docs" / "gpu.md", lines)
    return 1 if any(codes) else 0


def run_part(number: int, limit_s: float, out: Path) -> int:
    """Run one part to its end or its limit, and end what it leaves. Gives pytest's exit code, or minus the
    signal that ended it.
    """
    part = PARTS[number - 1]
    path = [f"{_ROOT / 'runner'}", f"{_ROOT / 'hooks'}", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what else a machine has installed is not to change a test
        "GPU_RESULTS": str(out / "results.jsonl"),
        _PART_VARIABLE: str(number),
    }
    options = ["-v", "-rA", "--tb=short", "--color=no", "--durations=5", "-m", "gpu"]
    plugins = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "--timeout", "200"]
    tests = [f"{_ROOT / 'tests' / 'gpu' / part.file}", *(["-k", part.select] if part.select else [])]
    with (out / f"{number}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *plugins, *tests],
            cwd=_ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_END_S)
        process.kill()
        return process.wait()
    finally:
        for left in psutil.process_iter(["environ"]):
            # Ranks lead sessions of their own, and would keep the GPU.
            if left.pid != process.pid and (left.info["environ"] or {}).get(_PART_VARIABLE) == str(number):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def machine() -> str:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return (
        f"{gpu}, {os.cpu_count()} cores, torch {torch.__version__}, NCCL {nccl}, Python "
        f"{platform.python_version()}."
    )


def table(results: Path) -> list[str]:
    """The machine, how many tests have passed, and a row for each of the others and of those with figures."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    passed = sum(one["outcome"] == "passed" for one in found)
    rows = [machine(), "", f"{passed} of {len(found)} tests passed.", ""]
    rows += ["| test | result | time (s) | figures |", "|---|---|---|---|"]
    for one in found:
        if one["figures"] or one["outcome"] != "passed":
            name = one["test"].removeprefix("tests/gpu/").replace("|", "\\|")
            rows.append(f"| {name} | {one['outcome']} | {one['s']:.1f} | {'; '.join(one['figures'])} |")
    return rows


def write_into(page: Path, lines: list[str]) -> None:
    """Put the table in place of the one that the page has."""
    before, rest = page.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(lines) + f"\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
