"""Under a real Slurm: `srun ddprun` with a task for each rank, and one for each host; `ddprun submit`."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ddprun.cluster import Submission
from ddprun.cluster.backends.slurm import Slurm as SlurmJob
from ddprun.config import load
from tests.engine.running import events, lines, summary
from tests.ranks import ddprun
from tests.slurm import Slurm, needs_slurm, slurm

pytestmark = [needs_slurm, pytest.mark.netns]

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [64, 64], outputs: 10}
data: digits
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
stages:
  - train: {steps: 25}
  - evaluate: {metrics: [accuracy]}
launch: {nproc_per_node: 2}
"""
DDPRUN = str(Path(sys.executable).parent / "ddprun")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as it:
        yield it


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of four ranks on one host."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "p.yaml").write_text(PIPELINE)
    done = ddprun("p.yaml", "--nproc-per-node=4", "--run-dir=one", cwd=folder)
    assert done.code == 0, done.stderr
    return float(summary(folder / "one")["loss"])


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (("-N2", "-n4"), "ddprun: started by srun: rank 0 of 4 on 2 hosts, job "),
        pytest.param(
            ("-N2", "--ntasks-per-node=1", "-c2"),
            "ddprun: started by srun: host 0 of 2, job ",
            marks=pytest.mark.engines,  # a submitted job is started like this, too
        ),
    ],
    ids=["a task for each rank", "a task for each host"],
)
def test_srun_in_both_shapes(
    cluster: Slurm, tmp_path: Path, loss: float, tasks: tuple[str, ...], told: str
) -> None:
    """Nothing is exported by hand, and the loss is that of four ranks on one host."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = cluster.call("srun", *tasks, DDPRUN, "p.yaml", "--run-dir=run", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ddprun: started by srun") == 1
    assert told in done.stderr
    found = summary(tmp_path / "run")
    assert (found["status"], found["world_size"], found["loss"]) == ("done", 4, loss)


def test_a_flag_that_srun_leaves_no_room_for_is_bad_input(cluster: Slurm, tmp_path: Path) -> None:
    """Once for each task, since none of them knows of the others yet."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = cluster.call("srun", "-n2", DDPRUN, "p.yaml", "--nproc-per-node=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "srun has started this process as one rank, so --nproc-per-node has no effect" in done.stderr
    assert "Traceback" not in done.stderr


def submit(cluster: Slurm, folder: Path, *options: str, timeout_s: float = 150) -> tuple[int, str, str]:
    """Exit code, the job's id, and what else was told."""
    done = cluster.call(
        DDPRUN, "submit", "p.yaml", "--to", "slurm", *options, cwd=folder, timeout_s=timeout_s
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_submitted_job_is_completed(cluster: Slurm, tmp_path: Path, loss: float) -> None:
    """Two hosts with two ranks each; `--follow` shows what they tell, and how it ended."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    code, job, told = submit(cluster, tmp_path, "--follow", "--set", "slurm={nodes: 2, cpus: 2, time: 5}")
    assert code == 0, told
    assert f"ddprun: job {job}: COMPLETED" in told
    assert f"ddprun: started by srun: host 0 of 2, job {job}" in told
    assert "4 ranks on cpu over gloo" in told
    found = summary(tmp_path / "runs" / "p" / f"slurm-{job}")
    assert (found["status"], found["world_size"], found["loss"]) == ("done", 4, loss)


@pytest.mark.engines
def test_the_limit_on_imports_is_that_of_who_submits(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the file tells sbatch to leave out what the shell has set."""
    monkeypatch.setenv("DDPRUN_TRUSTED", "torchvision, ./mylab")
    (tmp_path / "p.yaml").write_text(PIPELINE)
    program = tmp_path / "show"
    program.write_text('#!/bin/sh\necho "limit: $DDPRUN_TRUSTED"\n')
    program.chmod(0o755)
    options = ("--set", "slurm={nodes: 1, time: 5, options: {export: NONE}}", "--program", str(program))
    code, job, told = submit(cluster, tmp_path, "--follow", *options)
    assert code == 0, told
    assert f"limit: torchvision, ./mylab\nddprun: job {job}: COMPLETED" in told


@pytest.mark.engines
def test_a_job_that_fails_says_so(cluster: Slurm, tmp_path: Path) -> None:
    """With the reason, and exit code 1."""
    (tmp_path / "p.yaml").write_text(
        PIPELINE.replace("  mlp: {inputs: 64, hidden: [64, 64], outputs: 10}", "  nowhere.Net")
    )
    code, job, told = submit(cluster, tmp_path, "--follow", "--set", "slurm={nodes: 1, cpus: 2, time: 5}")
    assert code == 1
    assert f"ddprun: job {job}: FAILED" in told
    assert "nowhere" in told


def test_what_slurm_refuses_is_told_in_its_words(cluster: Slurm, tmp_path: Path) -> None:
    """A partition that there is not."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    code, job, told = submit(cluster, tmp_path, "--set", "slurm.partition=nowhere")
    assert (code, job) == (2, "")
    assert "sbatch failed" in told
    assert "invalid partition" in told
    assert "--help" not in told


SLOW = """
import time
from pathlib import Path

from torch.utils.data import Dataset

from ddprun.zoo.data import digits


class Slow(Dataset):
    def __init__(self):
        self.digits = digits(held_out=None, split_seed=0, folder=Path()).train

    def __len__(self):
        return 960

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.digits[index]
"""


def slow_pipeline(folder: Path) -> None:
    """A pipeline that takes some 10 s, in the file `p.yaml`."""
    (folder / "slow.py").write_text(SLOW)
    text = PIPELINE.replace("data: digits", "data: {train: slow.Slow}").replace("steps: 25", "steps: 150")
    (folder / "p.yaml").write_text(text.replace("  - evaluate: {metrics: [accuracy]}\n", ""))


def wait_for_steps(folder: Path, job: str) -> Path:
    """Wait until a job has taken some; gives its run's folder."""
    run = folder / "runs" / "p" / f"slurm-{job}"
    steps = run / "steps" / "rank-00000.jsonl"
    until = time.monotonic() + 90
    while not (steps.exists() and steps.read_bytes().count(b"\n") > 20):
        assert time.monotonic() < until, (run.parent / f"slurm-{job}.out").read_text()
        time.sleep(0.2)
    return run


@pytest.mark.engines
def test_a_job_is_followed_while_the_controller_is_away(cluster: Slurm, tmp_path: Path) -> None:
    """It is started again while the job goes on: nothing of that is the job's end."""
    slow_pipeline(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(
            submit, cluster, tmp_path, "--follow", "--set", "slurm={nodes: 1, cpus: 2, time: 5}"
        )
        until = time.monotonic() + 30
        while not (jobs := cluster.call("squeue", "--noheader", "--format=%i", cwd=tmp_path).stdout.split()):
            assert time.monotonic() < until
            time.sleep(0.3)
        wait_for_steps(tmp_path, jobs[0])
        with cluster.without_controller():
            time.sleep(4)
            asked = cluster.call("scontrol", "show", "job", jobs[0], cwd=tmp_path)
            assert asked.returncode, "nobody answers"
        code, job, told = followed.result(150)
    assert (code, job) == (0, jobs[0]), told
    assert f"ddprun: job {job}: COMPLETED" in told
    assert "| status" in told


@pytest.mark.engines
def test_ctrl_c_ends_following_and_not_the_job(cluster: Slurm, tmp_path: Path) -> None:
    """It says so, and the job runs to its end."""
    slow_pipeline(tmp_path)
    command = [
        *cluster.on(0),
        DDPRUN,
        "submit",
        "p.yaml",
        "--to",
        "slurm",
        "--follow",
        "--set",
        "slurm.cpus=2",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=cluster.environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            job = process.stdout.readline().strip()
            wait_for_steps(tmp_path, job)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == f"ddprun: job {job} is still running, and is no longer followed"
    assert cluster.state(job) == "RUNNING"
    assert cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"


@pytest.mark.engines
def test_a_signalled_job_goes_on_when_it_is_queued_again(cluster: Slurm, tmp_path: Path) -> None:
    """`scancel --signal=USR1`: a checkpoint, back into the queue, and the loss of an unbroken run."""
    slow_pipeline(tmp_path)
    code, job, told = submit(cluster, tmp_path, "--set", "slurm={nodes: 2, cpus: 2, time: 5}")
    assert code == 0, told
    run = wait_for_steps(tmp_path, job)
    output = run.parent / f"slurm-{job}.out"
    assert cluster.call("scancel", "--signal=USR1", job, cwd=tmp_path).returncode == 0
    ended = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=240)
    assert ended == "COMPLETED", output.read_text()
    found = summary(run)
    assert found["status"] == "done"
    (resumed,) = [event for event in events(run) if event["event"] == "resumed"]
    assert 20 < resumed["step"] < 150
    assert [line["step"] for line in lines(run, "steps") if line["rank"] == 0] == list(range(1, 151))
    whole = ddprun("p.yaml", "--nproc-per-node=4", "--run-dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.stderr
    assert summary(tmp_path / "whole")["loss"] == found["loss"]


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\'), max_size=30)
CLOCK = st.builds("00:{:02}:{:02}".format, st.integers(1, 50), st.integers(0, 59))
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "mem": st.integers(1, 3000).map("{}M".format),
        "exclusive": st.booleans(),
        "comment": TEXTS,
        "nice": st.integers(0, 1000),
        "mail-type": st.sampled_from(["END", "FAIL", "NONE"]),
        "hold": st.booleans(),
    },
)
ASKED = st.fixed_dictionaries(
    {"nodes": st.integers(1, 2)},
    optional={
        "cpus": st.integers(1, 2),
        "time": st.one_of(st.integers(1, 59), CLOCK),
        "partition": st.just("debug"),
        "warn_s": st.integers(0, 3600),
        "image": NAMES,
        "options": OPTIONS,
    },
)


@settings(max_examples=40, deadline=None)
@given(name=NAMES, asked=ASKED, folder=NAMES)
def test_sbatch_takes_every_script(cluster: Slurm, name: str, asked: dict[str, Any], folder: str) -> None:
    """`sbatch --test-only` reads the options as it does for a job."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "p.yaml"
        file.write_text(PIPELINE + yaml.safe_dump({"name": name, "slurm": asked}))
        script = Path(scratch) / "job.sh"
        (there := Path(scratch) / f"a {folder}").mkdir()
        with contextlib.chdir(there):
            loaded = load(file)
            script.write_text(SlurmJob(vars(loaded.pipeline)["slurm"], Submission(loaded)).text)
        done = cluster.call("sbatch", "--test-only", str(script), cwd=Path(scratch))
    assert done.returncode == 0, done.stderr
    assert "in partition debug" in done.stderr
