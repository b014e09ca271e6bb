"""Whatever a pipeline file holds, it is accepted or refused with a place: no traceback, and not for long."""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddprun.cli import printing
from ddprun.config import PipelineError, load
from tests.security import mutations

CPU_S, MEMORY_MB = 10.0, 300  # a busy machine takes several times as much
WHOLE_FILE = ("the file is empty", "the file is longer than")
PLACED = re.compile(r"^(?P<where>[^\n]*?):\d+:\d+: ")

CASES = st.tuples(
    mutations.texts(), st.one_of(st.just([]), st.just([]), st.lists(mutations.overrides(), max_size=2))
)


def fuzz(folder: Path, examples: int) -> None:
    """Put that many mutated pipelines through what `check` calls, in this process."""
    path = folder / "p.yaml"

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[
            Phase.generate
        ],  # shrinking would run each failure for minutes; the bytes are printed instead
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def one(case: tuple[bytes, list[str]]) -> None:
        raw, overrides = case
        path.write_bytes(raw)
        before = _memory_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        start = time.process_time()
        try:
            found = load(path, overrides)
            faults = found.warnings
            assert load_again(found.resolved_yaml(), folder)
        except PipelineError as error:
            faults = error.faults
            assert any(fault.severity == "error" for fault in faults)
        for fault in faults:
            assert fault.place.line or fault.problem.startswith(WHOLE_FILE), fault.headline
            name = fault.place.source.name
            assert name == str(path) or name.startswith("--set "), name
            assert len(fault.headline.splitlines()) == 1
            json.dumps(printing.fault_to_json_data(fault), ensure_ascii=False).encode()
            str(fault).encode()
            printing.github_annotation(fault).encode()
        spent = time.process_time() - start
        assert spent < CPU_S, f"{spent:.1f} s of processor time"
        assert _memory_mb("VmHWM") - before < MEMORY_MB

    one()


def load_again(written: str, folder: Path) -> bool:
    """A resolved pipeline loads, or says that it had a password in it."""
    path = folder / "again.yaml"
    path.write_text(written)
    try:
        load(path)
    except PipelineError as error:
        return "the password that was here" in str(error)
    return True


def _memory_mb(line: str) -> float:
    """`VmRSS` is what this process holds of memory, `VmHWM` the most it has held."""
    status = Path("/proc/self/status").read_text()
    return int(next(row for row in status.splitlines() if row.startswith(line)).split()[1]) / 1024


def test_mutated_pipelines_are_accepted_or_refused_with_a_place(tmp_path: Path) -> None:
    """500 of them."""
    fuzz(tmp_path, 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # hypothesis, of a case of its own
def test_20000_mutated_pipelines_are_accepted_or_refused_with_a_place(tmp_path: Path) -> None:
    """The same at length."""
    fuzz(tmp_path, 20_000)


def command(folder: Path, examples: int) -> None:
    """Put that many through the command, each a process of its own."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def one(case: tuple[bytes, list[str]]) -> None:
        raw, overrides = case
        (folder / "p.yaml").write_bytes(raw)
        options = [word for override in overrides for word in ("--set", override)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "ddprun", "check", "p.yaml", *options],
            cwd=folder,
            capture_output=True,
            timeout=60,
            check=False,
            preexec_fn=_limit_memory,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = done.stdout.decode()
        assert done.stderr == b""
        assert done.returncode in (0, 2)
        assert "Traceback" not in out
        if done.returncode == 0:
            assert out.endswith("p.yaml: ok\n")
        else:
            told = [line for line in out.splitlines() if line[:1].strip()]
            assert told
            for line in told:
                assert PLACED.match(line) or "p.yaml: the file is" in line, line
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < CPU_S, f"{spent:.1f} s of processor time"

    one()


def _limit_memory() -> None:
    """Whoever wants more gets a MemoryError, which would be a traceback."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB << 20, MEMORY_MB << 20))


def test_some_go_through_the_command(tmp_path: Path) -> None:
    """Five of them, as a user runs them."""
    command(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_go_through_the_command(tmp_path: Path) -> None:
    """The same at length."""
    command(tmp_path, 200)
