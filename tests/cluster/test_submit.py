"""`ddprun submit`: what would be sent, and what cannot be."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddprun.cli import main
from ddprun.cluster import Submission
from ddprun.cluster.backends import slurm as backend
from ddprun.config import PipelineError, load
from ddprun_hooks.config.trust import TRUST_VARIABLE
from tests.ranks import Finished, ddprun

PIPELINE = """
name: digits
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
launch: {nproc_per_node: 2}
"""


def dry(folder: Path, *options: str, more: str = "") -> Finished:
    """The script for a pipeline."""
    (folder / "p.yaml").write_text(PIPELINE + more)
    return ddprun("submit", "p.yaml", "--to", "slurm", "--dry-run", *options, cwd=folder)


def directives(script: str) -> dict[str, str | bool]:
    """The options that sbatch reads in it."""
    found: dict[str, str | bool] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH --"):
            name, is_value, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value if is_value else True
    return found


def test_a_dry_run_prints_what_would_be_sent(tmp_path: Path) -> None:
    """From `launch` alone: one task on each host, a checkpoint before time is up, and queued again."""
    done = dry(tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert directives(done.stdout) == {
        "job-name": "digits",
        "nodes": "1",
        "ntasks-per-node": "1",
        "output": f"{tmp_path}/runs/digits/slurm-%j.out",
        "open-mode": "append",
        "signal": "USR1@120",
        "requeue": True,
    }
    assert f'run {tmp_path}/p.yaml --run-dir "$run"\n' in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "p.yaml"], "nothing is made"
    checked = subprocess.run(["sh", "-n"], input=done.stdout, text=True, check=False, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_every_key_becomes_an_option(tmp_path: Path) -> None:
    """And any other one of sbatch's is passed on."""
    keys = "{nodes: 4, gpus: 8, cpus: 32, time: 1-12:00:00, partition: long, account: lab, image: me/app:2, "
    done = dry(
        tmp_path, "--set", "seed=7", more=f"slurm: {keys}options: {{mem: 64G, exclusive: true, nice: 5}}}}\n"
    )
    assert done.code == 0, done.stderr
    found = directives(done.stdout)
    assert {name: found[name] for name in ("nodes", "gpus-per-node", "cpus-per-task", "time")} == {
        "nodes": "4",
        "gpus-per-node": "8",
        "cpus-per-task": "32",
        "time": "1-12:00:00",
    }
    assert (found["partition"], found["account"], found["mem"]) == ("long", "lab", "64G")
    assert (found["exclusive"], found["nice"]) == (True, "5")
    assert (
        "srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 "
        "--container-image=me/app:2 ddprun" in done.stdout
    )
    assert "--set seed=7" in done.stdout


def test_options_of_sbatch_go_before_what_ddprun_writes(tmp_path: Path) -> None:
    """Each of them once, whatever the other keys say."""
    options = "{time: 5, nodes: 3, gres: 'gpu:2'}"
    done = dry(tmp_path, more=f"slurm: {{nodes: 2, time: 10, options: {options}}}\n")
    assert done.code == 0, done.stderr
    found = directives(done.stdout)
    asked = {"time": "5", "nodes": "3", "gres": "gpu:2"}
    assert {name: found.get(name) for name in asked} == asked
    assert done.stdout.count("#SBATCH --time=") == 1


@pytest.mark.parametrize(
    ("slurm", "directive", "script"),
    [
        ("{options: {requeue: false}}", "no-requeue", False),
        ("{options: {requeue: true}}", "requeue", True),
        ("{options: {requeue: true}, warn_s: 0}", "requeue", False),
    ],
)
def test_requeue_says_whether_slurm_or_the_script_queues_the_job_again(
    tmp_path: Path, slurm: str, directive: str, script: bool
) -> None:
    """With `warn_s`, a checkpoint is taken before the time limit in either case."""
    done = dry(tmp_path, more=f"slurm: {slurm}\n")
    assert {"requeue", "no-requeue"} & set(directives(done.stdout)) == {directive}
    assert ("scontrol requeue" in done.stdout) == script
    assert ("DDPRUN_ON_USR1=stop" in done.stdout) == ("warn_s" not in slurm)


def test_a_job_that_shall_not_come_back_is_just_run(tmp_path: Path) -> None:
    """Nothing of the script stands between Slurm and ddprun then."""
    done = dry(tmp_path, more="slurm: {warn_s: 0}\n")
    assert directives(done.stdout)["no-requeue"] is True
    assert "signal" not in directives(done.stdout)
    assert done.stdout.splitlines()[-1].startswith("exec srun ")
    assert "scontrol" not in done.stdout


@pytest.mark.parametrize(
    ("slurm", "told"),
    [
        (
            "{time: soon}",
            'slurm.time: expected a time, got "soon" (a string); minutes, "HH:MM:SS", "D-HH" or "D-HH:MM:SS"',
        ),
        ("{options: {ntasks: 4}}", 'slurm.options.ntasks: "ntasks" cannot be set; there is one task on each'),
        (
            "{options: {output: a.txt}}",
            "\"output\" cannot be set; the job's output is next to the run's folder",
        ),
        ("{options: {-N: 2}}", '"-N" is not a long option of sbatch'),
        ('{options: {comment: "a\\n#SBATCH --uid=0"}}', "cannot hold quotes, backslashes or line ends"),
        ('{options: {mem: "64G\\n"}}', "cannot hold quotes, backslashes or line ends"),
        ("{partition: 'a b'}", 'slurm.partition: cannot be "a b"; letters, digits and'),
        ("{nodes: 0}", "slurm.nodes: must be greater than 0, got 0"),
        ("{gpu: 2}", 'unknown key "gpu"'),
    ],
)
def test_bad_values_are_faults_of_the_file(tmp_path: Path, slurm: str, told: str) -> None:
    """With their place, and what is allowed."""
    done = dry(tmp_path, more=f"slurm: {slurm}\n")
    assert (done.code, done.stdout) == (2, "")
    assert told in done.stderr
    assert "p.yaml:7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_secret_does_not_get_into_a_script(tmp_path: Path) -> None:
    """It would stand in the job's script, which others may read."""
    done = dry(tmp_path, "--set", "data={mine.Data: {url: 'https://me:hunter2hunter2@host/'}}")
    assert done.code == 2
    assert "holds a secret" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.fixture
def submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """What a dry run prints for a file with some keys more: exit code, output, errors."""

    def to(engine: str, *options: str, more: str = "") -> tuple[int, str, str]:
        path = tmp_path / "p.yaml"
        path.write_text(PIPELINE + more)
        code = main(["submit", str(path), "--to", engine, "--dry-run", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return to


Submitted = Callable[..., tuple[int, str, str]]
LIMIT = "torchvision, ./mylab.nets"


@pytest.mark.parametrize("limit", [LIMIT, "", None])
@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_the_limit_on_imports_holds_for_the_job(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch, limit: str | None, kind: str
) -> None:
    """`DDPRUN_TRUSTED` goes along to each engine, also if it is empty, whatever the file says."""
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    if limit is not None:
        monkeypatch.setenv(TRUST_VARIABLE, limit)
    code, script, _ = submitted("slurm", more="slurm: {options: {export: NONE}, image: me/app}\n")
    assert code == 0
    exports = [line for line in script.splitlines() if line.startswith(f"export {TRUST_VARIABLE}=")]
    assert exports == ([] if limit is None else [f"export {TRUST_VARIABLE}={shlex.quote(limit)}"])
    assert "srun --export=ALL " in script
    assert ("--container-env=DDPRUN_TRUSTED" in script) is (limit is not None)

    code, text, _ = submitted("docker", more=f"docker: {{nodes: 2, env: [{TRUST_VARIABLE}, HOME]}}\n")
    assert code == 0
    containers = [one["body"] for one in yaml.safe_load_all(text) if "containers" in one.get("POST", "")]
    wanted = [
        f"{TRUST_VARIABLE}=${{env:{TRUST_VARIABLE}}}" if limit is None else f"{TRUST_VARIABLE}={limit}",
        "HOME=${env:HOME}",
    ]
    assert [one["Env"] for one in containers] == [wanted, wanted]

    code, text, _ = submitted("kubernetes", more=f"kubernetes: {{kind: {kind}, env_from: mine}}\n")
    assert code == 0
    found = [one.get("env") for manifest in yaml.safe_load_all(text) for one in _containers(manifest)]
    assert found == [None if limit is None else [{"name": TRUST_VARIABLE, "value": limit}]]

    monkeypatch.setenv("DDPRUN_ENV", "SERVER")  # what a run may take goes along, too
    _, script, _ = submitted("slurm")
    assert "export DDPRUN_ENV=SERVER\n" in script


def _containers(value: Any) -> list[dict[str, Any]]:
    """All containers in an object of Kubernetes'."""
    if isinstance(value, list):
        return [one for item in value for one in _containers(item)]
    if not isinstance(value, dict):
        return []
    return [*value.get("containers", ()), *(one for item in value.values() for one in _containers(item))]


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ("nodeSelector: {password: hunter2hunter2}", "a secret in plain text"),
        ("nodeSelector: {server: 'https://me:hunter2hunter2@host/'}", "holds a secret"),
    ],
)
def test_a_secret_of_a_pod_is_neither_sent_nor_shown(submitted: Submitted, pod: str, said: str) -> None:
    """Whether the file has it or an option."""
    for code, out, told in (
        submitted("kubernetes", more=f"kubernetes: {{pod: {{{pod}}}}}\n"),
        submitted("kubernetes", "--set", f"kubernetes.pod={{{pod}}}"),
    ):
        assert (code, out) == (2, "")
        assert said in told
        assert "hunter2" not in told


def test_what_names_a_secret_of_the_cluster_is_none(submitted: Submitted) -> None:
    """Keys, names and references stand in a pod as they are."""
    pod: dict[str, Any] = {
        "tolerations": [{"key": "gpu", "operator": "Equal", "value": "present"}],
        "imagePullSecrets": [{"name": "registry-login"}],
        "topologySpreadConstraints": [
            {"topologyKey": "kubernetes.io/hostname", "matchLabelKeys": ["some-label"]}
        ],
        "initContainers": [
            {
                "name": "first",
                "image": "busybox",
                "command": [
                    "get",
                    "--token",
                    "$(A_TOKEN)",
                    "--token-file",
                    "/run/it",
                    "--key",
                    "2",
                    "--token",
                ],
                "args": ["-c", 'get -v --token=$A_TOKEN --api-key "${A_TOKEN}" --key -x | sort --key 2'],
                "envFrom": [{"secretRef": {"name": "mine-of-all"}}],
                "env": [{"name": "A_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}}],
            }
        ],
    }
    code, out, told = submitted("kubernetes", more=f"kubernetes: {{pod: {json.dumps(pod)}}}\n")
    assert (code, told) == (0, "")
    runtime = next(one for one in yaml.safe_load_all(out) if one["kind"] == "TrainingRuntime")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]["template"]["spec"]
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    (first,) = spec["initContainers"]
    assert first == {**pod["initContainers"][0], "securityContext": restricted}
    assert {key: spec[key] for key in pod if key != "initContainers"} == {
        key: item for key, item in pod.items() if key != "initContainers"
    }


def test_a_secret_in_the_script_is_refused(submitted: Submitted) -> None:
    """For Slurm the file stays where it is, but its options are in the script."""
    code, out, told = submitted(
        "slurm", more="slurm: {options: {comment: 'https://me:hunter2hunter2@host/'}}\n"
    )
    assert (code, out) == (2, "")
    assert "holds a secret under slurm" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("engine", "keys", "told"),
    [
        (
            "docker",
            "docker: {env: [A_TOKEN]}",
            "warning: B_SET will not be set in the job unless the image sets it; docker.env passes it on",
        ),
        ("docker", "docker: {env: [A_TOKEN, B_SET]}", ""),
        (
            "kubernetes",
            "kubernetes: {nodes: 1}",
            "A_TOKEN, B_SET will not .* sets them; the Secret that kubernetes.env_from names passes them on",
        ),
        ("kubernetes", "kubernetes: {env_from: mine}", ""),
        ("slurm", "slurm: {nodes: 1}", ""),
    ],
)
def test_variables_that_the_job_will_not_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, keys: str, told: str
) -> None:
    """Before it is sent, and not by a pod that fails."""
    path = tmp_path / "p.yaml"
    data = "data: {mylab.Data: {token: '${env:A_TOKEN}', url: 'https://${env:B_SET}/x'}}\n"
    path.write_text(PIPELINE.replace("data: digits\n", data) + keys + "\n")
    assert main(["submit", str(path), "--to", engine, "--dry-run"]) == 0
    warned = capsys.readouterr().err
    assert re.search(told, warned) if told else warned == ""


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("network: host", '"host" is the network of the machine or of another container; a network of'),
        ("network: 'container:other'", '"container:other" is the network of the machine'),
        ("runs: /etc", '"/etc" is the system\'s own; a folder for data or runs alone, as in /data/images'),
        ("runs: /etc/cron.d", '"/etc/cron.d" is the system\'s own'),
        ("runs: /data/../root/.ssh", '"/data/../root/.ssh" is the system\'s own'),
        ("runs: //etc", '"//etc" is the system\'s own'),
        ("runs: /", '"/" holds more than data'),
        ("runs: /home", '"/home" holds more than data'),
        ("mounts: {/var/run/docker.sock: /x}", '"/var/run/docker.sock" is the system\'s own'),
        ("mounts: {/data: /data, /proc/1/root: /x}", '"/proc/1/root" is the system\'s own'),
    ],
)
def test_containers_do_not_get_the_engines_machine(tmp_path: Path, keys: str, told: str) -> None:
    """Neither its network nor its system's folders, which a file of somebody else could ask for."""
    path = tmp_path / "p.yaml"
    path.write_text(f"{PIPELINE}docker: {{{keys}}}\n")
    with pytest.raises(PipelineError) as caught:
        load(path)
    (fault,) = caught.value.faults
    assert told in fault.message
    assert fault.place.line == 7
    assert fault.path.startswith(f"docker.{keys.partition(':')[0]}")


def test_what_docker_inspect_shows_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the option, and on the page."""
    assert main(["catalog", "docker"]) == 0
    assert "`docker inspect` shows them" in " ".join(capsys.readouterr().out.split())
    page = Path(__file__).parents[2] / "docs/clusters.md"
    assert "**`docker inspect` shows the values of `docker.env`**" in page.read_text("utf-8")


def test_folders_of_ones_own_are_mounted(submitted: Submitted) -> None:
    """For runs, and for data, which is only read; in a network of one's own."""
    keys = "{network: mine, runs: /home/me/runs, mounts: {/mnt/images: /data, /usr/share/dict: /words}}"
    code, out, told = submitted("docker", more=f"docker: {keys}\n")
    assert (code, told) == (0, "")
    (made,) = [one["body"] for one in yaml.safe_load_all(out) if "containers" in one.get("POST", "")]
    assert made["HostConfig"]["NetworkMode"] == "mine"
    assert made["HostConfig"]["Mounts"] == [
        {"Type": "bind", "Source": "/home/me/runs", "Target": "/workspace/runs"},
        {"Type": "bind", "Source": "/mnt/images", "Target": "/data", "ReadOnly": True},
        {"Type": "bind", "Source": "/usr/share/dict", "Target": "/words", "ReadOnly": True},
    ]


def test_the_engine_starts_no_container_again(submitted: Submitted) -> None:
    """`launch.max_restarts` is counted inside the containers, and not by their policy as well."""
    code, out, told = submitted("docker", "--set", "launch.max_restarts=3", "--set", "docker.nodes=2")
    assert (code, told) == (0, "")
    hosts = [
        one["body"]["HostConfig"] for one in yaml.safe_load_all(out) if "containers" in one.get("POST", "")
    ]
    assert len(hosts) == 2
    assert not any("RestartPolicy" in host for host in hosts)


UNRESTRICTED = [
    ("hostPID: true", "hostPID", '"hostPID" is not allowed; pods meet the restricted pod security standard'),
    ("hostIPC: true", "hostIPC", '"hostIPC" is not allowed'),
    ("hostNetwork: true", "hostNetwork", '"hostNetwork" is not allowed'),
    (
        "volumes: [{name: a, hostPath: {path: /}}]",
        "volumes",
        '"volumes" is not allowed; write kubernetes.cl',
    ),
    ("securityContext: {runAsUser: 0}", "securityContext", '"securityContext" is not allowed'),
    ("ephemeralContainers: [{name: a}]", "ephemeralContainers", '"ephemeralContainers" is not allowed'),
    *(
        (
            f"initContainers: [{{name: a}}, {{name: b, {field}: {value}}}]",
            f"initContainers[1].{field}",
            f'unknown field of an init container "{field}"; allowed: name, image, ',
        )
        for field, value in (
            ("securityContext", "{privileged: true}"),
            ("ports", "[{containerPort: 1}, {hostPort: 22}]"),
            ("startupProbe", "{httpGet: {host: 10.0.0.1}}"),
            ("lifecycle", "{postStart: {tcpSocket: {host: h}}}"),
            ("volumeDevices", "[{name: runs, devicePath: /dev/sda}]"),
        )
    ),
    ("initContainers: {name: a}", "initContainers", "expected a list of containers, each a mapping"),
    (
        "initContainers: [{name: a, env: [{name: X, value: 'x${env:HOME}'}]}]",
        "initContainers[0].env[0].value",
        "is not filled in for pods; take it from a Secret, by valueFrom",
    ),
    (
        "initContainers: [{name: a, env: [{name: A_TOKEN, value: hunter2hunter2}]}]",
        "initContainers[0].env[0].value",
        "a secret in plain text; take it from a Secret, by valueFrom",
    ),
]


@pytest.mark.parametrize(("pod", "where", "told"), UNRESTRICTED)
def test_pods_stay_restricted(tmp_path: Path, pod: str, where: str, told: str) -> None:
    """What the restricted standard does not allow is a fault at its place, in init containers too."""
    path = tmp_path / "p.yaml"
    path.write_text(f"{PIPELINE}kubernetes: {{pod: {{{pod}}}}}\n")
    with pytest.raises(PipelineError) as caught:
        load(path)
    (fault,) = caught.value.faults
    assert (fault.place.line, fault.path) == (7, f"kubernetes.pod.{where}")
    assert told in fault.message


def test_a_character_that_is_cut_in_the_output_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's file of the output may be read within a character; one that never becomes whole is replaced."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    loaded = load(tmp_path / "p.yaml")
    job = backend.Slurm(backend.Slurm.Options(), Submission(loaded))
    output = tmp_path / "runs" / "digits" / "slurm-7.out"
    output.parent.mkdir(parents=True)
    answers = iter(
        [(b"5 \xe2", "RUNNING"), (b"\x82\xac\n", "RUNNING"), (b"", "RUNNING"), (b"\xe2", "FAILED")]
    )

    def answer(_: list[str]) -> str:
        written, state = next(answers)
        with output.open("ab") as file:
            file.write(written)
        return f"JobId=7 JobState={state} Reason=None"

    monkeypatch.setattr(backend, "_run_slurm_command", answer)
    monkeypatch.setattr(backend, "_POLL_S", 0.0)
    shown: list[str] = []
    assert job.follow("7", shown.append) == ("FAILED", False)
    assert "".join(shown) == "5 \u20ac\n\ufffd"


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    """And how to see the script."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = ddprun("submit", "p.yaml", "--to", "slurm", cwd=tmp_path, environment={"PATH": str(tmp_path)})
    assert done.code == 2
    assert done.stderr == "ddprun: sbatch is not installed here; --dry-run prints the script\n", (
        "and no --help"
    )
