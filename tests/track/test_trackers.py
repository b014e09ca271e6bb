"""Curves that go elsewhere: what arrives there, and that nothing there can stop a run."""

import importlib.util
import re
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from ddprun.config import PipelineError, load
from ddprun.engine.reporter import check_tracker_packages, open_trackers
from ddprun.plugins import TRACKERS
from ddprun.run_files import WrongFileTypeError
from ddprun.telemetry.records import StepRecord
from ddprun.track import RunInfo, StepInfo, Tracker, trackers
from ddprun.track.backends.mlflow import Mlflow
from ddprun.track.backends.tensorboard import Tensorboard
from ddprun.track.trackers import Trackers
from tests.engine.running import events, lines, run_pipeline, summary
from tests.ranks import Finished, Running, ddprun, free_port
from tests.report.made_up import step_record

TEXT = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.1}}
hooks: [fp16]
track: TRACK
timings: {grad_norm_every: 10}
stages:
  - train: {steps: 12}
  - evaluate: {metrics: [accuracy]}
groups: [{match: "*.bias", lr: 0.05}]
"""


BROKEN = """
import os
import time
from pathlib import Path

import torch

calls = 0


def loss(outputs, targets):
    global calls
    calls += 1
    if calls == 9 and os.environ["RANK"] in os.environ["BROKEN"]:
        while not [*Path().glob(os.environ["BROKEN_WHEN"])]:
            time.sleep(0.1)
        raise RuntimeError("broken")
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


LOGGING = """
import os
import time

import torch
import wandb

calls = 0


def loss(outputs, targets):
    global calls
    calls += 1
    end = time.monotonic() + 60
    while calls == 9 and os.environ["RANK"] == "0" and wandb.run is None and time.monotonic() < end:
        time.sleep(0.05)  # trackers begin beside the training
    found = torch.nn.functional.cross_entropy(outputs, targets)
    if wandb.run is not None:
        wandb.log({"of_users_code": found.item()})
    return found
"""


class Listening(Tracker):
    """Takes everything down; fails where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.measured: dict[str, float] = {}
        self.closed = False
        self.fail_at = fail_at

    def log_step(self, step: StepInfo) -> None:
        if step.record.step == self.fail_at:
            raise ConnectionError("the server is gone")
        self.steps.append(step.record.step)

    def log_eval_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.measured |= values

    def close(self, summary: Mapping[str, Any]) -> None:
        self.closed = True


def record_of(step: int) -> StepRecord:
    return msgspec.convert(step_record(0, step, None, 0.0), StepRecord)


def test_one_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    """Whether when it is made or later; also one whose package calls `sys.exit`."""
    good, bad = Listening(), Listening(fail_at=2)

    def broken() -> Listening:
        raise OSError("no network")

    def leaving() -> Listening:
        raise SystemExit(3)

    told: list[tuple[str, str]] = []
    makers = [("good", lambda: good), ("bad", lambda: bad), ("broken", broken), ("leaving", leaving)]
    it = Trackers(makers, lambda name, why: told.append((name, why)))
    for step in range(1, 5):
        it.log_step(StepInfo(record_of(step), {}))
    it.log_eval_metrics(4, {"accuracy": 0.5})
    assert it.close({"status": "done"}) == []
    assert (good.steps, good.measured, good.closed) == ([1, 2, 3, 4], {"accuracy": 0.5}, True)
    assert (bad.steps, bad.closed) == ([1], False)
    assert sorted(told) == [
        ("bad", "ConnectionError: the server is gone"),
        ("broken", "OSError: no network"),
        ("leaving", "SystemExit: 3"),
    ]


def test_one_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps pass it by, and the end does not wait for ever."""
    monkeypatch.setattr(trackers, "_QUEUE_LIMIT", 5)
    release = threading.Event()

    def hanging() -> Listening:
        release.wait(30)
        return Listening()

    it = Trackers([("hanging", hanging)], lambda name, why: None)
    started = time.monotonic()
    for step in range(1, 101):
        it.log_step(StepInfo(record_of(step), {}))
    assert it.close({}, within_s=0.3) == ["hanging"]
    assert time.monotonic() - started < 15, "it hangs for 30 s"
    assert it.dropped["hanging"] > 90
    release.set()


def test_tensorboard_gets_every_curve(tmp_path: Path) -> None:
    """Read back by TensorBoard's own reader: the losses of the records, and what evaluate has measured."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    run = run_pipeline(tmp_path, TEXT.replace("TRACK", "[tensorboard]"), 2)
    (file,) = (run / "tensorboard").iterdir()
    found: dict[str, dict[int, float]] = {}
    for raw in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(raw)
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    own = {line["step"]: line["loss"] for line in lines(run, "steps") if line["rank"] == 0}
    assert found["loss/rank_0"] == pytest.approx(own)
    assert len(found["loss/mean"]) == len(found["time/step_seconds"]) == 12
    assert len(found["lr/group_0"]) == len(found["lr/group_1"]) == 12
    (tenth,) = [line for line in lines(run, "steps") if (line["rank"], line["step"]) == (0, 10)]
    assert found["grad_norm"] == {10: pytest.approx(tenth["grad_norm"])}, "every tenth step"
    for group, norm in enumerate(tenth["group_grad_norms"]):
        assert found[f"grad_norm/group_{group}"] == {10: pytest.approx(norm)}
    assert found["communication/bytes"][3] == sum(
        line["wire_bytes"] for line in lines(run, "buckets") if (line["rank"], line["step"]) == (0, 3)
    )
    assert found["evaluate/accuracy"] == {12: pytest.approx(summary(run)["metrics"]["accuracy"])}


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    """As after a resume: the steps of the broken attempt are dropped from the resumed one's first step on. An
    evaluation that was due at the checkpoint drops none.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, loss in ((range(1, 11), 1.0), (range(7, 9), 2.0)):
        tracker = Tensorboard(Tensorboard.Options(), RunInfo("run", tmp_path, {}, tmp_path))
        tracker.log_eval_metrics(steps[0] - 1, {"accuracy": loss / 4})
        for step in steps:
            tracker.log_step(StepInfo(replace(record_of(step), loss=loss), {}))
        tracker.close({})
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = curves.Scalars("loss/rank_0")
    assert [(one.step, one.value) for one in curves.Scalars("evaluate/accuracy")] == [(0, 0.25), (6, 0.5)]
    assert [one.step for one in found] == [*range(1, 9)]
    assert [one.value for one in found] == [1.0] * 6 + [2.0] * 2


def test_prometheus_reads_a_file(tmp_path: Path) -> None:
    """With base units, and counters that end on `_total`; parsed by Prometheus' own client."""
    parser = pytest.importorskip("prometheus_client.parser")
    run = run_pipeline(tmp_path, TEXT.replace("TRACK", "[prometheus]"), 2)
    text = (run / "metrics.prom").read_text()
    found = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    steps = [line for line in lines(run, "steps") if line["rank"] == 0]
    sent = sum(line["wire_bytes"] for line in lines(run, "buckets") if line["rank"] == 0)
    assert found["ddprun_steps_total",] == found["ddprun_step_duration_seconds_count",] == 12
    assert found["ddprun_step_duration_seconds_sum",] == pytest.approx(sum(s["step_us"] for s in steps) / 1e6)
    assert found["ddprun_step_part_seconds_total", "forward"] == pytest.approx(
        sum(step["forward_us"] for step in steps) / 1e6
    )
    assert found["ddprun_comm_bytes_total", "fp16", "gradient"] == sent
    norms = next(step["group_grad_norms"] for step in steps if step["group_grad_norms"])
    assert [found["ddprun_group_gradient_norm", group] for group in "01"] == pytest.approx(norms)
    assert found["ddprun_evaluation", "accuracy"] == summary(run)["metrics"]["accuracy"]
    assert found["ddprun_run_info", "run", "run"] == 1, "pipeline and folder"


def test_prometheus_keeps_the_last_known_numbers_of_a_turn(tmp_path: Path) -> None:
    """A turn that did not run has no loss, and its parameters no norm."""
    pytest.importorskip("prometheus_client")
    made = TRACKERS.load("prometheus")
    tracker = made(made.Options(), RunInfo("run", tmp_path, {}, tmp_path))
    for value in (2.5, None):
        record = replace(record_of(1), mean_values={"generator": value}, group_grad_norms=[value])
        tracker.log_step(StepInfo(record, {}))
    tracker.close({})
    told = (tmp_path / "metrics.prom").read_text()
    assert 'ddprun_value{name="generator"} 2.5' in told
    assert 'ddprun_group_gradient_norm{group="0"} 2.5' in told


def test_prometheus_asks_an_endpoint(tmp_path: Path) -> None:
    """While the run goes on; the port is free afterwards."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    text = TEXT.replace("TRACK", f"[{{prometheus: {{port: {port}}}}}]").replace("steps: 12", "steps: 100000")
    (tmp_path / "p.yaml").write_text(text)
    with Running("p.yaml", "--nproc-per-node=2", "--run-dir=run", cwd=tmp_path) as running:
        end, body = time.monotonic() + 60, ""
        while "ddprun_comm_bytes_total{" not in body and time.monotonic() < end:
            time.sleep(0.2)
            try:
                body = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            except OSError:
                continue
        assert running.process.poll() is None
    assert "ddprun_comm_bytes_total{" in body
    assert not (tmp_path / "run" / "metrics.prom").exists()


def test_weights_and_biases_keeps_a_run_offline(tmp_path: Path) -> None:
    """A file in the run's folder has curves, metrics and the pipeline: one for each tracker of two. What code
    of the user logs is in the first one's, beside all that the tracker logs.
    """
    pytest.importorskip("wandb", reason="no wandb here")
    both = [f"wandb: {{project: {name}, mode: offline, every: 4}}" for name in ("digits", "others")]
    (tmp_path / "logging_loss.py").write_text(LOGGING)
    text = TEXT.replace("TRACK", f"[{', '.join(both)}]").replace("hooks:", "loss: logging_loss.loss\nhooks:")
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.code == 0, done.stderr
    folder = tmp_path / done.stdout.strip()
    assert not [event for event in events(folder) if event["event"] == "tracker_failed"]
    files = [file.read_bytes() for file in folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(files) == 2, "one of each project"
    assert sum(b"of_users_code" in kept for kept in files) == 1
    assert "ignored" not in done.stderr
    for kept in files:
        for name in (b"loss/mean", b"time/backward_seconds", b"communication/bytes", b"evaluate/accuracy"):
            assert name in kept
        assert kept.count(b"loss/rank_0") >= 3, "steps 4, 8 and 12"
        assert b'\x12\x01*"\x04step' in kept, "glob_name and step_metric of a MetricRecord: the x axis"
        assert b"batch_size" in kept


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_trackers_folder_is_not_followed_elsewhere(tmp_path: Path, name: str) -> None:
    """In a run's folder that somebody else has made."""
    pytest.importorskip(name)
    made, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    made.mkdir()
    elsewhere.mkdir()
    (made / name).symlink_to(elsewhere)
    tracker = TRACKERS.load(name)
    options = tracker.Options.model_validate({"mode": "offline"} if name == "wandb" else {})
    with pytest.raises(WrongFileTypeError, match=f"{name} is a symbolic link, not a folder"):
        tracker(options, RunInfo("run", made, {}, made))
    assert list(elsewhere.iterdir()) == []


def test_mlflow_gets_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by its own client: metrics with their steps, parameters, and how the run ended. Two trackers
    of the kind each have a run.
    """
    pytest.importorskip("mlflow.tracking", reason="no mlflow here")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    other = (tmp_path / "other").as_uri()
    both = [
        f"mlflow: {{tracking_uri: '{uri}', experiment: digits, every: {every}}}"
        for uri, every in ((store, 4), (other, 5))
    ]
    (tmp_path / "p.yaml").write_text(TEXT.replace("TRACK", f"[{', '.join(both)}]"))
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.code == 0, done.stderr
    folder = tmp_path / done.stdout.strip()
    for client in (MlflowClient(other), MlflowClient(store)):
        place = client.get_experiment_by_name("digits")
        assert place is not None
        (found,) = client.search_runs([place.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", folder.name)
    assert found.data.params["loader.batch_size"] == "8"
    losses = {line["step"]: line["mean_loss"] for line in lines(folder, "steps")}
    history = client.get_metric_history(found.info.run_id, "loss/mean")
    assert {point.step: point.value for point in history} == {step: losses[step] for step in (4, 8, 12)}
    accuracy = summary(folder)["metrics"]["accuracy"]
    assert found.data.metrics["evaluate/accuracy"] == pytest.approx(accuracy)


def break_down(folder: Path, store: str, ranks: str, when: str, more: str = "") -> Finished:
    """A run with MLflow whose loss fails on some ranks when a file is there."""
    (folder / "broken.py").write_text(BROKEN)
    options = f"[{{mlflow: {{tracking_uri: '{store}'}}}}]\nloss: {{broken.loss: {{}}}}\n{more}"
    (folder / "p.yaml").write_text(TEXT.replace("TRACK", options))
    told = {"MLFLOW_ALLOW_FILE_STORE": "true", "BROKEN": ranks, "BROKEN_WHEN": when}
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=folder, environment=told)
    assert done.code == 1, done.stderr
    return done


def test_a_run_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would run for ever where it is shown. Rank 0, which tracks, is ended by the launcher."""
    pytest.importorskip("mlflow.tracking", reason="no mlflow here")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    break_down(tmp_path, store, "1", "store/*/*/params/*")  # MLflow takes its time until it has begun
    client = MlflowClient(store)
    place = client.get_experiment_by_name("ddprun")
    assert place is not None
    (found,) = client.search_runs([place.experiment_id])
    assert found.info.status == "FAILED"


@pytest.mark.slow
def test_a_run_that_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which tracks, is the one that waits, and ends itself."""
    pytest.importorskip("mlflow.tracking", reason="no mlflow here")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    done = break_down(tmp_path, store, "1", "never", "launch: {timeout_s: 12}")
    assert re.search(r"hangs \(stages\[0\].train, step \d+\): rank 1 did not arrive within 12 s", done.stderr)
    client = MlflowClient(store)
    place = client.get_experiment_by_name("ddprun")
    assert place is not None
    (found,) = client.search_runs([place.experiment_id])
    assert found.info.status == "FAILED"


def test_what_has_failed_is_told_before_trackers_are_waited_for(tmp_path: Path) -> None:
    """All ranks fail at once, and rank 0's tracker has not even begun."""
    pytest.importorskip("mlflow.tracking", reason="no mlflow here")
    done = break_down(tmp_path, (tmp_path / "store").as_uri(), "01", "p.yaml")
    assert "failed (stages[0].train, step " in done.stderr
    assert "RuntimeError: broken" in done.stderr
    (told,) = tmp_path.glob("runs/p/*/summary.json")
    assert '"status": "failed"' in told.read_text()


def test_a_port_that_is_taken_costs_the_tracker_and_not_the_run(tmp_path: Path) -> None:
    """It is told on the screen and as an event."""
    pytest.importorskip("prometheus_client")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "p.yaml").write_text(TEXT.replace("TRACK", f"[{{prometheus: {{port: {port}}}}}]"))
        done = ddprun("p.yaml", "--nproc-per-node=1", "--run-dir=run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "prometheus has failed and receives nothing more of this run: OSError" in done.stderr
    (event,) = [one for one in events(tmp_path / "run") if one["event"] == "tracker_failed"]
    assert event["tracker"] == "prometheus"


def test_a_package_that_is_missing_is_a_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the run starts, with the way to get it."""
    monkeypatch.setattr(Tensorboard, "needs", "no_such_package")
    (tmp_path / "p.yaml").write_text(TEXT.replace("TRACK", "[prometheus, tensorboard]"))
    loaded = load(tmp_path / "p.yaml")
    with pytest.raises(PipelineError) as caught:
        check_tracker_packages(loaded, loaded.pipeline.track)
    fault = caught.value.faults[-1]
    assert (fault.place.line, fault.place.column, fault.path) == (7, 21, "track[1]")
    assert fault.problem == "tensorboard needs the package no_such_package, which is not installed"
    assert fault.allowed == "pip install 'ddprun[tensorboard]'"
    if importlib.util.find_spec("mlflow") is None:
        (tmp_path / "p.yaml").write_text(TEXT.replace("TRACK", "[prometheus, mlflow]"))
        done = ddprun("p.yaml", "--nproc-per-node=1", cwd=tmp_path)
        assert done.code == 2
        assert "p.yaml:7:21: track[1]: mlflow needs the package mlflow, which is not installed" in done.stderr
        assert "pip install 'ddprun[mlflow]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_options_take_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other options do: an address with a password in it, for example."""
    made: list[str | None] = []
    monkeypatch.setattr(Mlflow, "__init__", lambda self, options, run: made.append(options.tracking_uri))
    monkeypatch.setattr(Mlflow, "close", lambda self, summary: None)
    monkeypatch.setenv("MLFLOW_SERVER", "https://mlflow.example.org")
    tracked = "[{mlflow: {tracking_uri: '${env:MLFLOW_SERVER}/x'}}]"
    (tmp_path / "p.yaml").write_text(TEXT.replace("TRACK", tracked))
    reporter, recorder = (cast(Any, SimpleNamespace()) for _ in range(2))
    loaded = load(tmp_path / "p.yaml")
    run = RunInfo("p", tmp_path, {}, tmp_path)
    open_trackers(loaded, loaded.pipeline.track, run, reporter, recorder)
    assert reporter.trackers.close({}) == []
    assert made == ["https://mlflow.example.org/x"]
