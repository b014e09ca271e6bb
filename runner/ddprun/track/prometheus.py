"""Metrics for Prometheus, by its own client: an endpoint, or a text file for the node exporter.

Names and units are as Prometheus wants them (https://prometheus.io/docs/practices/naming/): seconds, bytes,
`_total` at the end of what only grows.
"""

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    start_http_server,
    write_to_textfile,
)

from ddprun.config.options import Prometheus
from ddprun.telemetry.steps import PARTS
from ddprun.track.trackers import About, StepTold

_WRITE_EVERY_S = 5.0
_STEP_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class PrometheusTracker:
    """What rank 0 did and sent."""

    def __init__(self, settings: Prometheus, about: About) -> None:
        registry = self._registry = CollectorRegistry()
        self._file = str(about.folder / "metrics.prom") if settings.port is None else None
        self._steps = Counter("ddprun_steps", "Optimizer steps.", registry=registry)
        self._samples = Counter("ddprun_samples", "Samples of rank 0.", registry=registry)
        self._durations = Histogram(
            "ddprun_step_duration_seconds",
            "How long a step of rank 0 took.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._parts = Counter(
            "ddprun_step_part_seconds",
            "Time of rank 0's training thread by part.",
            ["part"],
            registry=registry,
        )
        self._bytes = Counter(
            "ddprun_comm_bytes", "Bytes that rank 0 sent.", ["kind", "hook"], registry=registry
        )
        self._loss = Gauge("ddprun_loss", "Mean loss over all ranks.", registry=registry)
        self._measured = Gauge("ddprun_evaluation", "What was measured last.", ["metric"], registry=registry)
        Info("ddprun_run", "The run.", registry=registry).info(
            {"pipeline": about.name, "run": about.folder.name}
        )
        self._stop = None
        if settings.port is not None:
            self._stop, _ = start_http_server(settings.port, addr=settings.address, registry=registry)
        self._written_s = 0.0

    def step(self, told: StepTold) -> None:
        """Count a step."""
        record = told.record
        self._steps.inc()
        self._samples.inc(record["samples"])
        self._durations.observe(record["step_us"] / 1e6)
        for part in PARTS:
            self._parts.labels(part.removesuffix("_us")).inc(record[part] / 1e6)
        for (kind, hook), count in told.sent.items():
            self._bytes.labels(kind, hook).inc(count)
        if record["mean_loss"] is not None:
            self._loss.set(record["mean_loss"])
        self._write(_WRITE_EVERY_S)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Show what was measured."""
        for name, value in values.items():
            self._measured.labels(name).set(value)
        self._write(0.0)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write once more; an endpoint ends with the run."""
        self._write(0.0)
        if self._stop is not None:
            self._stop.shutdown()
            self._stop.server_close()

    def _write(self, after_s: float) -> None:
        now = time.monotonic()
        if self._file is not None and now - self._written_s >= after_s:
            write_to_textfile(self._file, self._registry)
            self._written_s = now


def open_tracker(settings: Prometheus, about: About) -> PrometheusTracker:
    """The tracker of a run."""
    return PrometheusTracker(settings, about)
