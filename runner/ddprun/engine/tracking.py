"""What a session tells its trackers."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from ddprun import LAUNCHED
from ddprun.config import Loaded, PipelineError
from ddprun.telemetry.progress import Screen
from ddprun.track.trackers import NEEDS, About, StepTold, Trackers, maker, missing
from ddprun_hooks.comm.trace import BucketTrace


def check_trackers(loaded: Loaded) -> None:
    """Make sure that what trackers need is there.

    Raises:
        PipelineError: names the package.
    """
    chosen = [choice.name for choice in loaded.pipeline.track]
    if gone := missing(chosen):
        raise PipelineError(
            [
                loaded.fault(
                    f"track[{chosen.index(name)}]",
                    f"{name} needs the package {NEEDS[name]}, which is not installed",
                    f"pip install 'ddprun[{name}]'",
                )
                for name in gone
            ]
        )


def open_trackers(
    loaded: Loaded,
    run_dir: Path,
    screen: Screen,
    events: structlog.typing.FilteringBoundLogger,
) -> Trackers:
    """The trackers of the run; on rank 0 alone."""
    chosen = loaded.pipeline.track

    def failed(name: str, why: str) -> None:
        events.warning("tracker_failed", tracker=name, reason=why)
        screen.note(f"{name} has failed and gets no more of this run: {why}")

    about = About(loaded.pipeline.name, run_dir, loaded.secrets.redact_all(loaded.plain()))
    return Trackers({choice.name: maker(choice.name, choice.settings) for choice in chosen}, about, failed)


def fail_when_ended(trackers: Trackers) -> None:
    """Have trackers told of a failure by which this rank is ended: another rank was first, and torchelastic
    ends the others by SIGTERM. Without ddprun's launcher SIGTERM is a wish to stop, and stays one.

    A thread does it, since the main thread may be waiting in a collective, where no handler runs.
    """
    if LAUNCHED not in os.environ:
        return
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)  # gets the number of each signal at once

    def end() -> None:
        while signal.SIGTERM not in os.read(told, 64):
            pass
        trackers.fail()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end, name="ddprun-ended", daemon=True).start()


def pass_on(trackers: Trackers, record: dict[str, Any], landed: Sequence[BucketTrace[int]]) -> None:
    """Tell the trackers of a step."""
    sent: Counter[tuple[str, str]] = Counter()
    for trace in landed:
        sent[trace.kind, ",".join(trace.hooks) or "all_reduce"] += trace.wire_bytes
    trackers.step(StepTold(record, sent))
