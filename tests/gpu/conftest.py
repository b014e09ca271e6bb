"""Figures of the tests on a GPU, and the table of their results (`make test-gpu`)."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Figure = Callable[[str, str], None]

_figures: dict[str, list[str]] = {}
_results: dict[str, tuple[str, float]] = {}
_BEGIN, _END = "<!-- figures: written by make test-gpu -->", "<!-- end of figures -->"


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Call it with what was measured and the value in its unit, for the table."""

    def note(name: str, value: str) -> None:
        _figures.setdefault(request.node.nodeid, []).append(f"{name}: {value}")

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test of this folder ended."""
    if "tests/gpu/" not in report.nodeid:
        return
    outcome, seconds = _results.get(report.nodeid, ("passed", 0.0))
    if report.outcome != "passed":
        outcome = report.outcome
    _results[report.nodeid] = outcome, seconds + report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table; write it into the document that `GPU_TABLE` names, if anything has run."""
    if not any(outcome != "skipped" for outcome, _ in _results.values()):
        return
    lines = [*table()]
    terminalreporter.section("on the GPU")
    for line in lines:
        terminalreporter.write_line(line)
    if document := os.environ.get("GPU_TABLE"):
        path = Path(document)
        before, rest = path.read_text(encoding="utf-8").split(_BEGIN)
        after = rest.split(_END)[1]
        path.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(lines) + f"\n\n{_END}{after}", encoding="utf-8")


def table() -> list[str]:
    """The machine, and a row for each test."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    rows = [
        f"{gpu}, {os.cpu_count()} cores, torch {torch.__version__}, NCCL {nccl}, Python "
        f"{platform.python_version()}.",
        "",
        "| test | result | s | figures |",
        "|---|---|---|---|",
    ]
    for name, (outcome, seconds) in _results.items():
        short = name.removeprefix("tests/gpu/").replace("|", "\\|")
        rows.append(f"| {short} | {outcome} | {seconds:.1f} | {'; '.join(_figures.get(name, ()))} |")
    return rows
