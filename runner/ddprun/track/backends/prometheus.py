"""Metrics for Prometheus, by its own client: an endpoint, or a text file for the node exporter.

Names and units are as Prometheus wants them (https://prometheus.io/docs/practices/naming/): seconds, bytes,
`_total` at the end of what only grows.
"""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from ddprun.telemetry.records import PARTS
from ddprun.track import RunInfo, StepInfo, Tracker

_WRITE_EVERY_S = 5.0
_DURATION_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Prometheus(Tracker):
    """Metrics of rank 0 for Prometheus. Needs the package prometheus-client."""

    class Options(Tracker.Options):
        port: Annotated[int, Field(gt=0, lt=65536)] | None = None
        """Serve them on this port of rank 0's host; null writes metrics.prom into the run's folder, every
        5 s."""

        address: str = "127.0.0.1"
        """Address to listen on; 0.0.0.0 is all of the host's."""

    needs = "prometheus_client"

    def __init__(self, options: Options, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._steps = counter("ddprun_steps", "Optimizer steps.")
        self._samples = counter("ddprun_samples", "Samples of rank 0.")
        took = "How long a step of rank 0 took."
        self._durations = Histogram(
            "ddprun_step_duration_seconds", took, buckets=_DURATION_BUCKETS_S, registry=registry
        )
        parts = "Time of rank 0's training thread by part."
        self._parts = counter("ddprun_step_part_seconds", parts, ["part"])
        self._bytes = counter("ddprun_comm_bytes", "Bytes that rank 0 sent.", ["kind", "hook"])
        self._loss = gauge("ddprun_loss", "Mean loss over all ranks.")
        values = "Mean over all ranks of a number beside the loss."
        self._values = gauge("ddprun_value", values, ["name"])
        self._lr = gauge("ddprun_learning_rate", "Learning rate by parameter group.", ["group"])
        self._grad_norm = gauge("ddprun_gradient_norm", "Norm of rank 0's gradients before clipping.")
        norms = "Norm of rank 0's gradients before clipping, by parameter group."
        self._group_norms = gauge("ddprun_group_gradient_norm", norms, ["group"])
        self._evaluation_metrics = gauge("ddprun_evaluation", "Results of the latest evaluation.", ["metric"])
        about = {"pipeline": run.name, "run": run.folder.name}
        Info("ddprun_run", "Name and folder of the run.", registry=registry).info(about)
        self._file, self._server, self._written_s = str(run.folder / "metrics.prom"), None, 0.0
        if options.port is not None:
            self._server, _ = start_http_server(options.port, addr=options.address, registry=registry)

    def log_step(self, step: StepInfo) -> None:
        record = step.record
        self._steps.inc()
        self._samples.inc(record.samples)
        self._durations.observe(record.step_us / 1e6)
        for part in PARTS:
            self._parts.labels(part.removesuffix("_us")).inc(getattr(record, part) / 1e6)
        for (kind, hook), count in step.sent_bytes.items():
            self._bytes.labels(kind, hook).inc(count)
        if record.mean_loss is not None:
            self._loss.set(record.mean_loss)
        for name, value in (record.mean_values or {}).items():
            if value is not None:
                self._values.labels(name).set(value)
        for group, lr in enumerate(record.lr or ()):
            self._lr.labels(str(group)).set(math.nan if lr is None else lr)
        if record.grad_norm is not None:
            self._grad_norm.set(record.grad_norm)
        for group, norm in enumerate(record.group_grad_norms or ()):
            if norm is not None:
                self._group_norms.labels(str(group)).set(norm)
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def log_eval_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._evaluation_metrics.labels(name).set(value)
        self._write()

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write once more; an endpoint ends with the run."""
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        if self._server is None:
            write_to_textfile(self._file, self._registry)
            self._written_s = time.monotonic()
