"""`ddprun submit --to docker`, and the image, on a real engine."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from docker import DockerClient

from tests.docker_engine import NETWORK, ROOT, Engine, build, engine, needs_docker
from tests.ranks import Finished, Running, ddprun

pytestmark = [needs_docker, pytest.mark.timeout(1200)]

PIPELINE = """
model: MLP
data: digits
loader: {{batch_size: 16}}
optimizer: {{sgd: {{lr: 0.05}}}}
checkpoint: {{every: 10}}
launch: {{nproc_per_node: 2{launch}}}
docker: {{nodes: 2, network: {network}, runs: {runs}}}
stages:
  - train: {{steps: {steps}}}
"""
MLP = "{mlp: {inputs: 64, hidden: [64], outputs: 10}}"
NET = """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, OUT))
"""
USER = 1000
SHORT = ("--set", "stages[0].train.epochs=1")


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    """An engine with the image."""
    with engine() as it:
        build(it)
        yield it


def prepare(folder: Path, *, steps: int, launch: str = "") -> Path:
    """A pipeline for two containers; gives the folder in which its runs are."""
    runs = folder / "runs"
    runs.mkdir()
    os.chown(runs, USER, USER)
    text = PIPELINE.format(steps=steps, launch=launch, network=NETWORK, runs=runs).replace("MLP", MLP)
    (folder / "digits.yaml").write_text(text)
    for parent in runs.parents:  # pytest's own are closed to others
        if os.access(parent, os.W_OK) and parent != Path("/tmp") and Path("/tmp") in parent.parents:
            parent.chmod(parent.stat().st_mode | 0o011)
    return runs


def submit(docker: Engine, folder: Path, *options: str, file: str = "digits.yaml") -> Finished:
    return ddprun(
        "submit", file, "--to", "docker", *options, cwd=folder, environment=docker.environment, timeout_s=300
    )


def summary(runs: Path) -> dict[str, object]:
    """Of the one run that is there."""
    (found,) = runs.glob("*/*/summary.json")
    data: dict[str, object] = json.loads(found.read_text())
    return data


def of_job(docker: Engine, job: str) -> list[str]:
    """What the engine still has of a job."""
    label = f"label=ddprun.job={job}"
    kinds = (("ps", "--all"), ("network", "ls"))
    return [one for kind in kinds for one in docker.ask(*kind, "--quiet", "--filter", label).split()]


def test_the_image_runs_a_pipeline(docker: Engine) -> None:
    """As `docker run IMAGE PIPELINE`, without naming ddprun; a shell is one all the same."""
    run = ("run", "--rm", "--network", "none", "ddprun")
    done = docker.ask(*run, "pipelines/quickstart.yaml", *SHORT, timeout_s=120)
    assert done.splitlines()[-1].startswith("runs/quickstart/")
    assert docker.ask(*run, "--version").startswith("ddprun ")
    assert docker.call(*run, "bash", "-c", "echo x >/workspace/x").returncode != 0
    assert docker.ask(*run, "bash", "-lc", "id -u; command -v torchrun").split() == [
        str(USER),
        "/opt/ddprun/bin/torchrun",
    ]


def test_a_read_only_container_as_documented(docker: Engine) -> None:
    """The page's own command: without a capability, and with nothing to write to but /tmp and the volume."""
    page = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", "")
    command, *others = [
        line for line in page.splitlines() if line.startswith("$ docker run") and "read-only" in line
    ]
    assert not others
    options = shlex.split(command)[2:]
    done = docker.ask(*options[:1], "--network=none", *options[1:], *SHORT, timeout_s=120)
    assert done.splitlines()[-1].startswith("runs/quickstart/")
    at = options.index("ddprun") + 1
    refused = docker.call(*options[:at], "sh", "-c", "echo x >/workspace/pipelines/x || echo x >/home/x")
    assert refused.stderr.count("Read-only file system") == 2, refused.stderr


def test_an_edit_of_the_source_pushes_little(docker: Engine, tmp_path: Path) -> None:
    """Dependencies, most of a GB, are a layer that both images have; labels say what they are."""
    files = "Dockerfile .dockerignore pyproject.toml constraints.txt README.md LICENSE NOTICE"
    for name in files.split():
        shutil.copy(ROOT / name, tmp_path)
    for name in ("runner", "hooks", "pipelines", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "runner/ddprun/units.py").open("a") as file:
        file.write("EDITED = True\n")
    build(docker, tmp_path, "edited")
    look = ("run", "--rm", "--network=none", "edited", "python", "-c")
    assert docker.ask(*look, "import ddprun.units as u; print(u.EDITED)") == "True"
    with closing(DockerClient(docker.host)) as client:
        (sizes,) = (one for one in client.df()["Images"] if one["RepoTags"] == ["edited:latest"])
    assert sizes["Size"] - sizes["SharedSize"] < 20e6 < 500e6 < sizes["SharedSize"]
    config = docker.inspect("edited")["Config"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "MIT"
    assert config.get("StopSignal") in (None, ""), "Kubernetes would send it in place of SIGTERM"


def test_compose_gives_a_run_time_to_stop() -> None:
    """And a process 1 that passes signals on, whenever they come."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert [(one["init"], one["stop_grace_period"]) for one in services.values()] == [(True, "2m")] * 2


def test_two_containers_train_to_the_end(docker: Engine, tmp_path: Path) -> None:
    """Four ranks, with the loss of four ranks on one machine. After --follow nothing is left but the run. The
    model is the user's own, which imports another module beside the file: both come along.
    """
    runs = prepare(tmp_path, steps=30)
    file = tmp_path / "digits.yaml"
    file.write_text(file.read_text().replace(MLP, "nets.net.Net"))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/net.py").write_text("from torch import nn\nfrom sizes import OUT\n\n" + NET)
    (tmp_path / "sizes.py").write_text("OUT = 10\n")
    done = submit(docker, tmp_path, "--follow", "--with-modules")
    job = done.stdout.strip()
    assert done.code == 0, done.stderr
    assert f"ddprun: job {job}: done" in done.stderr
    found = summary(runs)
    assert (found["status"], found["world_size"], found["steps"]) == ("done", 4, 30)
    here = ddprun("digits.yaml", "--run-dir=here", "--nproc-per-node=4", cwd=tmp_path)
    assert here.code == 0, here.stderr
    assert json.loads((tmp_path / "here/summary.json").read_text())["loss"] == found["loss"]
    assert of_job(docker, job) == []
    assert {path.stat().st_uid for path in runs.rglob("*")} == {USER}


def test_containers_are_restricted(docker: Engine, tmp_path: Path) -> None:
    """No process is root or can become it, and none writes but to its run and to /tmp. With a network and a
    volume that are made for it; without --follow the containers stay, so that their output can be read.
    """
    prepare(tmp_path, steps=100_000)
    options = ("docker.network=null", "docker.runs=ddprun-runs", "launch.nproc_per_node=1")
    done = submit(docker, tmp_path, *(f"--set={option}" for option in options))
    job = done.stdout.strip()
    assert (done.code, done.stderr) == (0, "")
    names = [f"{job}-{node}" for node in range(2)]
    wait_for(docker, names, "train: step")
    for name in names:
        pids = docker.ask("top", name, "-o", "pid").split()[1:]
        assert len(pids) >= 2, "the launcher and a rank"
        for pid in pids:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            assert set(status["Uid"].split()) == {str(USER)}
            assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
            assert status["NoNewPrivs"].strip() == "1"
        refused = docker.call("exec", name, "sh", "-c", "echo x >/workspace/pipelines/x || echo x >/opt/x")
        assert refused.returncode != 0
        assert refused.stderr.count("Read-only file system") == 2
    docker.ask("stop", *names, timeout_s=150)  # SIGINT, as for Ctrl-C; the engine waits 120 s
    assert {docker.inspect(name)["State"]["ExitCode"] for name in names} == {130}
    assert {line for name in names for line in docker.ask("diff", name).splitlines()} == set()
    assert len(of_job(docker, job)) == 3, "and the network"
    look = ("run", "--rm", "--network=none", "--volume=ddprun-runs:/workspace/runs", "ddprun", "bash", "-c")
    left = docker.ask(*look, f"cat runs/digits/{job}/summary.json")
    assert json.loads(left)["status"] == "interrupted"


def wait_for(docker: Engine, names: list[str], text: str) -> None:
    """Until one of the containers has printed it."""
    for _ in range(300):
        logs = [docker.call("logs", name) for name in names]
        if any(text in log.stdout + log.stderr for log in logs):
            return
        time.sleep(0.2)
    pytest.fail(f"nobody has said {text!r} within a minute")


@pytest.mark.engines
@pytest.mark.parametrize("elastic", [False, True])
def test_a_killed_container(docker: Engine, tmp_path: Path, elastic: bool) -> None:
    """Is named, and ends the run; or the other goes on from the newest checkpoint, if one host is enough."""
    launch = ', nnodes: "1:2", max_restarts: 1' if elastic else ""
    runs = prepare(tmp_path, steps=2000, launch=launch)
    arguments = ("submit", "digits.yaml", "--to", "docker", "--follow")
    with Running(*arguments, cwd=tmp_path, environment=docker.environment) as running:
        for _ in range(600):
            if len(names := docker.ask("ps", "--format", "{{.Names}}").split()) == 2:
                break
            time.sleep(0.1)
        wait_for(docker, names, "train: step")
        victim = max(names)
        docker.ask("kill", "--signal", "KILL", victim)
        done = running.wait(240)
    assert f"{victim} was killed" in done.stderr
    assert "another rank is gone" in done.stderr
    assert done.code == (0 if elastic else 1), done.stderr
    found = summary(runs)
    assert found["status"] == ("done" if elastic else "failed")
    if elastic:
        assert "starting the ranks again (restart 1 of 1)" in done.stderr
        assert "resuming after step" in done.stderr
        assert (found["world_size"], found["steps"]) == (2, 2000)


@pytest.mark.engines
def test_a_drained_node_leaves_an_elastic_job(docker: Engine, tmp_path: Path) -> None:
    """Kubernetes sends a pod the image's own stop signal, as `docker stop` does: the other host goes on."""
    prepare(tmp_path, steps=2000, launch=', nnodes: "1:2", max_restarts: 1')
    run = ("run", "--detach", "--network", NETWORK, "--volume", f"{tmp_path}:/job", "--workdir", "/job")
    flags = ("--run-dir=runs/one", "--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=job")
    names = ["host0", "host1"]
    for name in names:
        docker.ask(*run, "--name", name, "--hostname", name, "ddprun", "digits.yaml", *flags)
    wait_for(docker, names, "train: step")
    docker.ask("stop", "--time=120", "host1", timeout_s=150)
    assert docker.ask("wait", "host0", timeout_s=240) == "0"
    left = docker.call("logs", "host1")
    assert "SIGTERM: this host leaves after a checkpoint" in left.stdout + left.stderr
    assert docker.inspect("host1")["State"]["ExitCode"] == 128 + 15
    found = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert (found["status"], found["world_size"], found["steps"]) == ("done", 2, 2000)


@pytest.mark.engines
def test_restarts_are_counted_once(docker: Engine, tmp_path: Path) -> None:
    """By ddprun, which starts ranks again inside: what always fails is tried twice, not four times."""
    runs = prepare(tmp_path, steps=10, launch=", max_restarts: 1")
    fails = "model={torch.nn.LSTM: {input_size: 64, hidden_size: 10}}"  # whose output no loss takes
    sent = submit(docker, tmp_path, "--set", "docker.nodes=1", "--set", fails)
    name = f"{sent.stdout.strip()}-0"
    assert docker.ask("wait", name, timeout_s=240) == "1"
    time.sleep(3)  # the engine would start it again within a moment
    found = docker.inspect(name)
    assert found["HostConfig"]["RestartPolicy"]["Name"] in ("", "no")
    assert (found["RestartCount"], found["State"]["Status"]) == (0, "exited")
    logs = docker.call("logs", name)
    assert (logs.stdout + logs.stderr).count("starting the ranks again (restart 1 of 1)") == 1
    assert summary(runs)["status"] == "failed"


def test_what_cannot_be_sent_is_said_in_one_line(docker: Engine, tmp_path: Path) -> None:
    """And leaves nothing behind."""
    prepare(tmp_path, steps=1)
    before = docker.ask("ps", "--all", "--quiet"), docker.ask("network", "ls", "--quiet")
    no_image = submit(docker, tmp_path, "--set", "docker.image=nowhere:1", "--set", "docker.network=null")
    assert no_image.code == 2
    assert "the Docker engine refuses: No such image: nowhere:1" in no_image.stderr
    no_variable = submit(docker, tmp_path, "--set", "docker.env=[NOT_SET_HERE]")
    assert "docker.env: NOT_SET_HERE is not set here" in no_variable.stderr
    away = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    away["PYTHONWARNINGS"] = "ignore::ResourceWarning"  # the client's, whose socket nobody has answered at
    no_engine = ddprun("submit", "digits.yaml", "--to", "docker", cwd=tmp_path, environment=away)
    assert no_engine.code == 2
    assert f"no Docker engine answers at unix://{tmp_path}/none.sock (DOCKER_HOST)" in no_engine.stderr
    for done in (no_image, no_variable, no_engine):
        assert len(done.stderr.splitlines()) == 1
    assert (docker.ask("ps", "--all", "--quiet"), docker.ask("network", "ls", "--quiet")) == before


@pytest.mark.engines
def test_variables_are_passed_on_and_not_shown(docker: Engine, tmp_path: Path) -> None:
    """In a dry run only their names; in the container, their values."""
    runs = prepare(tmp_path, steps=1)
    environment = {**docker.environment, "CURVES": "curves-of-mine", "DDPRUN_TRUSTED": "mylab, torchvision"}
    options = ("--set", "docker.env=[CURVES]", "--set", "docker.nodes=1")
    arguments = ("submit", "digits.yaml", "--to", "docker", *options)
    dry = ddprun(*arguments, "--dry-run", cwd=tmp_path, environment=environment)
    assert dry.code == 0, dry.stderr
    assert "CURVES=${env:CURVES}" in dry.stdout
    assert "curves-of-mine" not in dry.stdout
    assert list(runs.iterdir()) == []
    sent = ddprun(*arguments, cwd=tmp_path, environment=environment)
    found = docker.inspect(f"{sent.stdout.strip()}-0")["Config"]["Env"]
    assert "CURVES=curves-of-mine" in found
    assert "DDPRUN_TRUSTED=mylab, torchvision" in found, "the limit holds for the job"


def test_kubeflows_container_backend_runs_the_image(docker: Engine, tmp_path: Path) -> None:
    """Kubeflow's own client starts torchrun in it, on two nodes, until the job is Complete."""
    pytest.importorskip("kubeflow.trainer")
    script = ROOT / "tests" / "cluster" / "kubeflow_job.py"
    done = subprocess.run(
        [sys.executable, str(script), docker.host],
        env={**docker.environment, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Complete" in done.stdout.splitlines()[-1]
    assert "2 ranks on cpu over gloo" in done.stdout
