"""The trackers of a run: whether they can be opened, and what they are given."""

import importlib.util
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from ddprun import LAUNCHED
from ddprun.config import Loaded, PipelineError
from ddprun.plugins import TRACKERS
from ddprun.telemetry.progress import Screen
from ddprun.track import RunInfo, StepInfo
from ddprun.track.trackers import Trackers
from ddprun_hooks.comm.trace import BucketTrace


def check_trackers(loaded: Loaded) -> None:
    """Look whether the packages are installed that the trackers of a pipeline need.

    Raises:
        PipelineError: names those that are not.
    """
    faults = []
    for place, choice in enumerate(loaded.pipeline.track):
        needs = TRACKERS.load(choice.name).needs
        if needs and importlib.util.find_spec(needs) is None:
            text = f"{choice.name} needs the package {needs}, which is not installed"
            package = f"'ddprun[{choice.name}]'" if choice.source == "built-in" else needs
            faults.append(loaded.fault(f"track[{place}]", text, f"pip install {package}"))
    if faults:
        raise PipelineError(faults)


def open_trackers(
    loaded: Loaded,
    run_dir: Path,
    screen: Screen,
    events: structlog.typing.FilteringBoundLogger,
) -> Trackers:
    """The trackers of the run; on rank 0 alone."""

    def failed(name: str, why: str) -> None:
        events.warning("tracker_failed", tracker=name, reason=why)
        screen.note(f"{name} has failed and gets no more of this run: {why}")

    run = RunInfo(loaded.pipeline.name, run_dir, loaded.secrets.redact_all(loaded.plain()))
    makers = {}
    for place, choice in enumerate(loaded.pipeline.track):
        filled = loaded.filled(f"track[{place}]", choice).options
        changed = {key: value for key, value in filled.items() if value != choice.options[key]}
        assert choice.settings is not None
        options = choice.settings.model_copy(update=changed)
        makers[choice.name] = partial(TRACKERS.load(choice.name), options)
    return Trackers(makers, run, failed)


def fail_when_ended(trackers: Trackers) -> None:
    """Close the trackers as failed when SIGTERM ends this rank: torchelastic sends it to the other ranks when
    one has failed. Without ddprun's launcher SIGTERM is a wish to stop, and stays one.

    A thread does it, since the main thread may be waiting in a collective, where no handler runs.
    """
    if LAUNCHED not in os.environ:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # gets the number of each signal at once

    def end() -> None:
        while signal.SIGTERM not in os.read(read, 64):
            pass
        trackers.fail()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end, name="ddprun-ended", daemon=True).start()


def pass_on(trackers: Trackers, record: dict[str, Any], traces: Sequence[BucketTrace[int]]) -> None:
    """Give the trackers a step: its record, and what rank 0 sent in it."""
    sent: Counter[tuple[str, str]] = Counter()
    for trace in traces:
        sent[trace.kind, ",".join(trace.hooks) or "all_reduce"] += trace.wire_bytes
    trackers.step(StepInfo(record, sent))
