"""Real `ddprun` processes from the command line to the files they leave, and every way of ending."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.running import events, summary
from tests.ranks import Finished, Running, ddprun, is_running, shared_memory_of

QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
SHORT = """
model:
  mlp: {inputs: 64, hidden: [32], outputs: 10}
data: digits
loader: {batch_size: 32}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
hooks: [fp16]
stages:
  - train: {steps: 20}
  - evaluate: {metrics: [accuracy]}
  - save
"""
ENDLESS = SHORT.replace("steps: 20", "steps: 10000000")
SHARED = "[fp16, shared_memory]"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ddprun")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "short.yaml").write_text(SHORT)
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    return tmp_path


def no_noise(text: str) -> None:
    """Nothing on the screen that is not ddprun's own."""
    for sign in ("Warning", "Traceback", "torch/distributed", "[rank", "W1", "E1"):
        assert sign not in text, text


def test_quickstart_learns_digits_and_shows_a_table(tmp_path: Path) -> None:
    """Exit code 0, accuracy of at least 0.96 on held-out digits, the run's folder alone on stdout."""
    done = ddprun(QUICKSTART, cwd=tmp_path)
    assert done.code == 0, done.stderr
    run = tmp_path / done.run_dir
    assert done.stdout == f"{done.run_dir}\n"
    assert summary(run)["metrics"]["accuracy"] >= 0.96
    assert summary(run)["world_size"] == 2
    assert "held-out accuracy" in done.stderr
    assert "mean loss" in done.stderr
    assert "rank 0:" in done.stderr
    no_noise(done.stderr)
    assert {path.name for path in run.iterdir()} == {
        "pipeline.yaml",
        "run.json",
        "run.lock",
        "checkpoints",
        "events.jsonl",
        "buckets",
        "steps",
        "summary.json",
        "model.safetensors",
        "model.safetensors.yaml",
    }


SCREENS = {"reader-gone": "2>&1 | true", "closed": ">&- 2>&-", "full": ">/dev/full 2>/dev/full"}


@pytest.mark.parametrize("screen", SCREENS.values(), ids=SCREENS)
def test_a_run_ends_well_whatever_becomes_of_its_screen(folder: Path, screen: str) -> None:
    """The screen of a finished run is gone: `| head -0`, a closed stream, a full disk. Its exit code is 0."""
    shell = ["bash", "-c", f'"$0" "$@" {screen}; exit ${{PIPESTATUS[0]}}']
    flags = ("--run-dir", "run", "--nproc-per-node", "1")
    with Running("short.yaml", *flags, cwd=folder, prefix=shell) as running:
        done = running.wait(60)
    assert done.code == 0, done
    assert summary(folder / "run")["status"] == "done"
    assert not (folder / "run" / "logs").exists()


UMLAUTS = """
import os

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wörter = nn.Embedding(256, 256)
        print("Wörter")
        if "FAILS" in os.environ:
            raise ValueError("zu groß: …")

    def forward(self, inputs):
        return self.wörter(inputs).transpose(1, 2)
"""
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_names_and_words_that_the_locale_cannot_spell(tmp_path: Path) -> None:
    """A locale of ASCII, a folder, files, parameters and messages in other characters: all is as ever."""
    folder = tmp_path / "Größe"
    folder.mkdir()
    (folder / "netz.py").write_text(UMLAUTS, "utf-8")
    (folder / "Übung.txt").write_text("Übung macht den Meister.\n" * 30, "utf-8")
    text = "model: {netz.Net: {}}\ndata: {text: {files: '*.txt', context: 8}}\n"
    text += "optimizer: {sgd: {lr: 0.1}}  # größer\n"
    text += "stages: [{train: {steps: 3}}, {save: {to: gewicht.safetensors}}]\n"
    (folder / "größe.yaml").write_text(text, "utf-8")

    def run(*arguments: str, **more: str) -> Finished:
        return ddprun(*arguments, cwd=folder, environment={**ASCII_ONLY, **more})

    done = run("größe.yaml", "--run-dir", "läufe", "--nproc-per-node", "1")
    assert done.code == 0, done.stderr
    assert "Wörter".encode("ascii", "backslashreplace").decode() in done.stdout
    assert list(load_file(folder / "läufe" / "gewicht.safetensors")) == ["wörter.weight"]
    again = run("resume", "läufe", "--set", "stages[0].train.steps=5", "--nproc-per-node", "1")
    assert again.code == 0, again.stderr
    assert summary(folder / "läufe")["steps"] == 5
    assert run("report", "läufe").code == 0
    assert "<main" in (folder / "läufe" / "report.html").read_text("utf-8")
    fails = run("größe.yaml", "--run-dir", "zwei", "--nproc-per-node", "1", FAILS="1")
    assert fails.code == 1
    assert "ValueError: zu gro\\xdf: \\u2026" in fails.stderr
    assert "UnicodeEncodeError" not in fails.stderr + done.stderr + again.stderr
    assert run("init", "ü.yaml").code == 0
    assert "ü.yaml" in (folder / "ü.yaml").read_text("utf-8")


MODULES = {"ddprun": (), "python -m ddprun": ("-m", "ddprun"), "torchrun": TORCHRUN}


def test_every_way_to_start_gives_the_same_run_and_a_users_folder_shadows_nothing(folder: Path) -> None:
    """`torchrun -m ddprun` joins, and ends with the same loss and weights as `ddprun` alone. Model and hook
    come from a folder that also holds hooks/, runner.py, yaml.py and click.py.
    """
    for name in ("runner.py", "yaml.py", "click.py", "structlog.py", "msgspec.py", "pydantic.py"):
        (folder / name).write_text("raise RuntimeError('shadowed ' + __name__)\n")
    (folder / "hooks").mkdir()
    (folder / "hooks" / "mine.py").write_text(
        "from ddprun_hooks import Hook\n"
        "class Scaled(Hook):\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "    async def __call__(self, payload, comm):\n"
        "        return (await comm.reduce(payload.tensor * self.by)) / self.by\n"
    )
    (folder / "nets.py").write_text(
        "from torch import nn\n"
        "def net(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    runs = []
    for how, module in MODULES.items():
        if not module:  # with -m, Python itself looks for ddprun in the working directory first
            (folder / "ddprun").mkdir()
            (folder / "ddprun" / "__init__.py").write_text("raise RuntimeError('shadowed ddprun')\n")
        done = ddprun(
            "short.yaml",
            "--set=model={nets.net: {width: 24}}",
            "--set=hooks=[{hooks.mine.Scaled: {by: 4.0}}, fp16]",
            cwd=folder,
            module=module,
            fresh=True,
        )
        assert done.code == 0, (how, done.stderr)
        no_noise(done.stderr)
        runs.append(folder / done.run_dir)
        shutil.rmtree(folder / "ddprun", ignore_errors=True)
    first, *others = runs
    assert summary(first)["stages"][0]["hooks"] == ["hooks.mine.Scaled", "fp16"]
    assert summary(first)["metrics"]["accuracy"] > 0.3
    for other in others:
        assert summary(other)["loss"] == summary(first)["loss"] is not None
        for name, value in load_file(first / "model.safetensors").items():
            assert torch.equal(value, load_file(other / "model.safetensors")[name])


def test_flags_and_overrides_go_before_the_file(folder: Path) -> None:
    """Three ranks by torchrun's own flag, spelled its way."""
    (folder / "short.yaml").write_text(SHORT + "launch: {nproc_per_node: 2}\n")
    done = ddprun(
        "--set",
        "stages[0].train.steps=3",
        "short.yaml",
        "--nproc_per_node",
        "3",
        "--run-dir",
        "here",
        cwd=folder,
    )
    assert done.code == 0, done.stderr
    assert done.run_dir == Path("here")
    found = summary(folder / "here")
    assert (found["world_size"], found["steps"]) == (3, 3)
    assert "short, 3 ranks on cpu over gloo" in done.stderr
    assert "steps: 3" in (folder / "here" / "pipeline.yaml").read_text()


def test_a_run_folder_in_use_is_refused(folder: Path) -> None:
    """Nothing of an older run is written over."""
    (folder / "old").mkdir()
    (folder / "old" / "kept").write_text("precious")
    done = ddprun("short.yaml", "--run-dir", "old", cwd=folder)
    assert done.code == 2
    assert "ddprun: the run folder old is not empty" in done.stderr
    assert [path.name for path in (folder / "old").iterdir()] == ["kept"]


FAILING = """
import os
import torch


class Failing(torch.nn.Linear):
    def __init__(self, after, how):
        super().__init__(64, 10)
        self.calls, self.after, self.how = 0, after, how

    def forward(self, inputs):
        self.calls += 1
        if self.calls == self.after and os.environ["RANK"] == "1":
            if self.how == "raise":
                raise ValueError("out of ideas on rank 1")
            if self.how == "exit":
                raise SystemExit(7)
            if self.how == "memory":
                torch.empty(2**50)
            os.kill(os.getpid(), 9)
        return super().forward(inputs.flatten(1))
"""


@pytest.mark.parametrize(
    ("how", "message", "module", "hooks"),
    [
        pytest.param("raise", "ValueError: out of ideas on rank 1", (), "[]", id="exception"),
        pytest.param("memory", "RuntimeError: ", TORCHRUN, "[]", id="out of memory under torchrun"),
        pytest.param("exit", "SystemExit: 7", (), SHARED, id="sys.exit in shared memory"),
        pytest.param("kill", None, (), "[]", id="SIGKILL"),
        pytest.param("kill", None, (), SHARED, id="SIGKILL in shared memory"),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_own_error_once(
    folder: Path, how: str, message: str | None, module: tuple[str, ...], hooks: str
) -> None:
    """Exit code 1; the rank that failed speaks, the others do not; no process stays, and no memory."""
    (folder / "failing.py").write_text(FAILING)
    with Running(
        "endless.yaml",
        "--set",
        f"model={{failing.Failing: {{after: 10, how: {how}}}}}",
        "--set",
        f"hooks={hooks}",
        "--run-dir",
        "run",
        cwd=folder,
        module=module,
    ) as running:
        ranks = wait_for_steps(running, folder / "run")
        done = running.wait(60)
    assert done.code == 1, done.stderr
    if message is None:
        assert "ddprun: rank 1 was killed by SIGKILL" in done.stderr
    else:
        assert done.stderr.count(f"ddprun: rank 1 failed (stages[0].train, step 10): {message}") == 1
        failure = summary(folder / "run")
        assert failure["status"] == "failed"
        assert failure["error"]["rank"] == 1
        assert (failure["world_size"], failure["run_dir"], failure["stages"]) == (2, "run", [])
        assert 0 < failure["seconds"] < 60
    assert "rank 0 failed" not in done.stderr
    assert not any(map(is_running, ranks))
    assert shared_memory_of(ranks) == []


def test_an_exception_while_building_is_shown_once_too(folder: Path) -> None:
    """Both ranks fail alike; one of them speaks."""
    (folder / "broken.py").write_text("def net():\n    raise KeyError('no weights here')\n")
    done = ddprun("short.yaml", "--set", "model=broken.net", cwd=folder)
    assert done.code == 1
    assert (
        done.stderr.count("KeyError: 'no weights here'\n") == 2
    )  # the headline and the traceback's last line
    assert done.stderr.count("Traceback") == 1


def wait_for_steps(running: Running, run: Path) -> list[int]:
    """Wait until ranks exist, and give their process ids; they are steps on their way."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ranks = running.ranks()
        if (run / "events.jsonl").exists() and "stage_started" in (run / "events.jsonl").read_text():
            return ranks
        if running.process.poll() is not None:
            return ranks
        time.sleep(0.05)
    raise AssertionError("no step within a minute")


def test_a_signal_ends_the_run_and_every_process(folder: Path) -> None:
    """The ranks finish the same step and take a checkpoint; the summary says interrupted. SIGTERM does the
    same (`test_signals.py`).
    """
    with Running("endless.yaml", "--run-dir", "run", cwd=folder) as running:
        ranks = wait_for_steps(running, folder / "run")
        assert len(ranks) == 2
        time.sleep(0.5)
        running.process.send_signal(signal.SIGINT)
        done = running.wait(30)
    assert done.code == 130, done.stderr
    assert "SIGINT: stopping at the end of the step" in done.stderr
    no_noise(done.stderr)
    assert not any(map(is_running, ranks))
    found = summary(folder / "run")
    assert found["status"] == "interrupted"
    assert found["steps"] > 0
    assert [event["event"] for event in events(folder / "run")][-1] == "finished"
    assert (folder / "run" / "checkpoints" / f"step-{found['steps']:08}" / "manifest.json").exists()
    for rank in range(2):
        last = (folder / "run" / "steps" / f"rank-{rank:05}.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["step"] == found["steps"]


def test_a_fault_that_only_a_run_sees_has_its_place_and_comes_before_any_step(folder: Path) -> None:
    """An import path that leads nowhere, exit code 2, said once, no run folder with steps."""
    done = ddprun("short.yaml", "--set", "model=os.path.nowhere", "--run-dir", "run", cwd=folder)
    assert done.code == 2
    assert done.stderr.startswith('--set 1:1:7: model: "os.path" has no "nowhere"')
    assert done.stderr.count("nowhere") == 2
    assert not (folder / "run" / "steps").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("setting", "message", "module"),
    [
        pytest.param(
            "launch.device=cuda",
            "launch.device: cuda is asked for, but torch sees no GPU here; write auto or cpu",
            (),
            id="ddprun",
        ),
        pytest.param(
            "launch.backend=nccl",
            "launch.backend: nccl needs GPUs, but torch sees none here; write auto or gloo",
            TORCHRUN,
            id="torchrun",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_told_with_its_place(
    folder: Path, setting: str, message: str, module: tuple[str, ...]
) -> None:
    """From the launcher before it starts a rank, and from a rank under torchrun."""
    done = ddprun("short.yaml", "--set", setting, cwd=folder, module=module)
    assert done.code == (2 if module != TORCHRUN else 1)
    assert done.stderr.count(message) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_while_torch_is_imported_ends_it_at_once(
    folder: Path, number: signal.Signals, code: int
) -> None:
    """Nothing is running yet, and nothing is printed, or left behind."""
    (folder / "temporary").mkdir()
    environment = {"TMPDIR": str(folder / "temporary")}
    with Running("endless.yaml", cwd=folder, fresh=True, environment=environment) as running:
        end = time.monotonic() + 30
        while "libtorch" not in Path(f"/proc/{running.process.pid}/maps").read_text():
            assert time.monotonic() < end
            time.sleep(0.005)
        os.kill(running.process.pid, number)
        done = running.wait(20)
    assert (done.code, done.stderr) == (code, "")
    assert list((folder / "temporary").iterdir()) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_that_start_while_their_launcher_dies_do_not_stay(folder: Path, stopped: bool) -> None:
    """A fresh rank takes seconds to come to its own code; by then it may have no launcher, or be stopped."""
    with Running("endless.yaml", "--set", "launch.preload=null", cwd=folder, fresh=True) as running:
        end = time.monotonic() + 60
        while not (ranks := running.ranks()) and time.monotonic() < end:
            time.sleep(0.001)
        for pid in ranks if stopped else ():
            time.sleep(0.3)  # Python itself has started; torch has not
            os.kill(pid, signal.SIGSTOP)
        running.process.kill()
        end = time.monotonic() + 20
        while any(is_running(pid) for pid in ranks) and time.monotonic() < end:
            time.sleep(0.05)
        left = [pid for pid in ranks if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        running.wait(20)
        assert ranks
        assert not left
    assert not (folder / "runs").exists()
