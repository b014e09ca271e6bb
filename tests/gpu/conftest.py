"""Figures of the tests on a GPU, and a line for each test (`make test-gpu`)."""

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.ranks import Finished, ddprun

FRESH = ("-m", "ddprun")  # a new Python: NCCL needs NVML, which does not outlive a fork

Figure = Callable[[str, str], None]

_figures: dict[str, list[str]] = {}


def on_gpu(*arguments: str | Path, cwd: Path) -> Finished:
    """Run `ddprun` in a fresh process, with fresh ranks, to its end."""
    return ddprun(*arguments, cwd=cwd, module=FRESH)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Call it with what was measured and the value in its unit, for the table."""

    def note(name: str, value: str) -> None:
        _figures.setdefault(request.node.nodeid, []).append(f"{name}: {value}")

    return note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write how a test has ended and what it measured into the file that `GPU_RESULTS` names."""
    report = yield
    path = os.environ.get("GPU_RESULTS")
    if path and (call.when == "call" or report.outcome != "passed"):
        line = {"test": item.nodeid, "outcome": report.outcome, "s": call.duration}
        with open(path, "a", encoding="utf-8") as file:
            print(json.dumps({**line, "figures": _figures.get(item.nodeid, [])}), file=file)
    return report
