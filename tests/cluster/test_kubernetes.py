"""`ddprun submit --to kubernetes`: every manifest against Kubeflow's own models and Kubernetes' own schemas.

No API server can be had here. Kubernetes' own client sends to one that only keeps what it is sent.
"""

import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_trainer_api import models

from ddprun.cluster import Submission
from ddprun.cluster.backends.kubernetes import Kubernetes
from ddprun.config import LoadedPipeline, load
from ddprun.config.secrets import REDACTED
from tests.ranks import Finished, ddprun

PIPELINE = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
"""
KUBEFLOW = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
FOLDERS = st.from_regex(r"/[a-z]{1,9}(/[a-z]{1,9}){0,2}", fullmatch=True)
QUANTITIES = st.sampled_from(["512Mi", "64Gi", "1.5T", "1000000", "8G"])
NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,90}", fullmatch=True)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["trainjob", "job"]),
        "image": st.sampled_from(["ddprun", "reg.example.org:5000/me/ddprun:1.2", "a@sha256:" + "0" * 64]),
        "namespace": LABELS,
        "nodes": st.integers(1, 500),
        "gpus": st.integers(0, 16),
        "resources": st.sampled_from([{"amd.com/gpu": 8, "rdma/hca": 1}, {"nvidia.com/mig-1g.10gb": 2}]),
        "cpus": st.sampled_from([0.5, 1, 2.25, 96.0]),
        "memory": QUANTITIES,
        "shm": QUANTITIES,
        "tmp": QUANTITIES,
        "runs": LABELS,
        "storage": QUANTITIES,
        "storage_class": LABELS,
        "claims": st.dictionaries(LABELS, FOLDERS, max_size=3),
        "env": st.just({"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}),
        "env_from": LABELS,
        "queue": LABELS,
        "grace_s": st.integers(0, 3600),
        "deadline_s": st.integers(1, 1 << 20),
        "pod": st.sampled_from(
            [
                {},
                {"nodeSelector": {"gpu": "h100"}, "priorityClassName": "low"},
                {"initContainers": [{"name": "first", "image": "busybox", "args": ["true"]}]},
                {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]},
            ]
        ),
    },
).flatmap(  # a TrainJob has no such field
    lambda asked: st.sampled_from([asked, {**asked, "kind": "job", "ttl_s": 0}])
)
LAUNCH = st.fixed_dictionaries(
    {},
    optional={
        "nproc_per_node": st.integers(1, 16),
        "nnodes": st.sampled_from([1, 2, 8, "1:2", "2:8"]),
        "max_restarts": st.integers(0, 5),
    },
)


def job_of(loaded: LoadedPipeline) -> Kubernetes:
    """What `submit` would send."""
    return Kubernetes(vars(loaded.pipeline)["kubernetes"] or Kubernetes.Options(), Submission(loaded))


def check(manifest: dict[str, Any]) -> None:
    """Nothing that its kind does not have; every pod of it restricted."""
    kind = manifest["kind"]
    if kind in KUBEFLOW:
        # Their models pass over what they do not know: so what comes back has to be what was given.
        assert KUBEFLOW[kind].from_dict(manifest).to_dict() == manifest
    else:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert len(manifest["metadata"]["name"]) <= 52, "with what JobSet and Job append it is a host's name"
    for pod in pods(manifest):
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)
        restricted(pod["spec"])


def pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates in it."""
    if manifest["kind"] == "Job":
        yield manifest["spec"]["template"]
    if manifest["kind"] == "TrainingRuntime":
        for job in manifest["spec"]["template"]["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]


def restricted(pod: dict[str, Any]) -> None:
    """The restricted pod security standard, and no token of the cluster's."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(name) for name in ("hostPID", "hostIPC", "hostNetwork"))
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged")
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    allowed = {"name", "configMap", "emptyDir", "persistentVolumeClaim"}
    assert {key for volume in pod["volumes"] for key in volume} <= allowed
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@settings(deadline=None, max_examples=60)
@given(name=NAMES, asked=ASKED, launch=LAUNCH)
def test_every_manifest_is_valid(name: str, asked: dict[str, Any], launch: dict[str, Any]) -> None:
    """Whatever the keys say."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "p.yaml"
        written = {"name": name, "kubernetes": asked, "launch": launch}
        file.write_text(PIPELINE + "".join(f"{key}: {json.dumps(value)}\n" for key, value in written.items()))
        loaded = load(file)
        job = job_of(loaded)
        manifests = list(yaml.safe_load_all(job.text))
        assert manifests == job.manifests
        (config,) = (one["data"] for one in manifests if one["kind"] == "ConfigMap")
        (Path(scratch) / "again.yaml").write_text(config["pipeline.yaml"])
        again = load(Path(scratch) / "again.yaml")
        assert again.pipeline == loaded.pipeline, "the pods read what was submitted"
        assert REDACTED not in loaded.resolved_yaml(), "names of Secrets are none themselves"
    for manifest in manifests:
        check(manifest)


@pytest.mark.parametrize("at", ["spec", "spec.runtimeRef", "spec.template.spec", "metadata"])
def test_a_field_that_is_none_is_refused(tmp_path: Path, at: str) -> None:
    """By the checks above."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    refused = 0
    for manifest in job_of(load(tmp_path / "p.yaml")).manifests:
        place: Any = manifest
        for key in at.split("."):
            place = place.get(key, {}) if isinstance(place, dict) else {}
        if place:
            place["notAField"] = 1
            with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
                check(manifest)
            refused += 1
    assert refused


def dry(folder: Path, *options: str, more: str = "") -> Finished:
    (folder / "digits.yaml").write_text(PIPELINE + more)
    return ddprun("submit", "digits.yaml", "--to", "kubernetes", "--dry-run", *options, cwd=folder)


def test_what_pods_run(tmp_path: Path) -> None:
    """The file from the ConfigMap, under its own name, in a folder that a pod started again finds."""
    done = dry(
        tmp_path,
        *("--set", "seed=7", "--set", "kubernetes.nodes=3"),
        more='launch: {nproc_per_node: 4, nnodes: "2:8", max_restarts: 1}\n',
    )
    assert done.code == 0
    assert done.stderr.startswith("ddprun: warning: 3 pods write to one volume"), (
        "whose claim may stay Pending"
    )
    assert "allows ReadWriteMany" in done.stderr
    objects = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert list(objects) == ["ConfigMap", "PersistentVolumeClaim", "TrainingRuntime", "TrainJob"]
    trainer = objects["TrainJob"]["spec"]["trainer"]
    job = objects["TrainJob"]["metadata"]["name"]
    assert trainer["args"] == [
        *("run", "/workspace/pipeline/pipeline.yaml", "--run-dir", f"/workspace/runs/digits/{job}"),
        *("--or-resume", "--set", 'name="digits"', "--set", "seed=7", "--set", 'launch.nnodes="2:3"'),
        *("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint"),
        *(f"{job}-node-0-0.{job}:29400", "--rdzv-id", job),
    ]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 4)
    jobs = objects["TrainingRuntime"]["spec"]["template"]["spec"]
    assert jobs["failurePolicy"] == {"maxRestarts": 1}
    assert objects["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_what_pods_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Variables, devices, room in /tmp, time to end; and labels by which Kubernetes' own tools find all."""
    monkeypatch.setenv("DDPRUN_TRUSTED", "mylab")
    keys = """
      env: {NCCL_DEBUG: INFO, DDPRUN_TRUSTED: everything}
      resources: {amd.com/gpu: 8, rdma/hca: 1}
      memory: 64Gi
      tmp: 20Gi
      grace_s: 300
      deadline_s: 86400
    """
    ttl = "  ttl_s: 3600\n" if kind == "job" else ""
    (tmp_path / "p.yaml").write_text(f"{PIPELINE}kubernetes:\n      kind: {kind}{keys}{ttl}")
    manifests = job_of(load(tmp_path / "p.yaml")).manifests
    (pod,) = (pod for manifest in manifests for pod in pods(manifest))
    (container,) = pod["spec"]["containers"]
    # The limit on what a job may import is this shell's to set.
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "NCCL_DEBUG": "INFO",
        "DDPRUN_TRUSTED": "mylab",
    }
    limited = {"amd.com/gpu": 8, "rdma/hca": 1, "memory": "64Gi"}
    assert container["resources"] == {"requests": limited, "limits": limited}
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "20Gi"}} in pod["spec"]["volumes"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300
    job = manifests[-1]["spec"]
    assert job["activeDeadlineSeconds"] == 86400
    assert job.get("ttlSecondsAfterFinished") == (3600 if kind == "job" else None)
    if kind == "trainjob":
        assert job["trainer"]["resourcesPerNode"] == container["resources"]
    for one in (*manifests, pod):
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/managed-by"] == "ddprun"
        assert labels["app.kubernetes.io/instance"] == manifests[-1]["metadata"]["name"]


def test_the_page_has_a_pipeline_that_can_be_submitted(tmp_path: Path) -> None:
    """docs/clusters.md, for both engines."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for engine in ("docker", "kubernetes"):
        (keys,) = re.findall(rf"```yaml\n(launch: [^`]*\n{engine}: [^`]*)```", page)
        (tmp_path / "p.yaml").write_text(PIPELINE + keys)
        done = ddprun("submit", "p.yaml", "--to", engine, "--dry-run", cwd=tmp_path)
        assert done.code == 0, done.stderr


def test_a_cluster_without_kubeflow(tmp_path: Path) -> None:
    """An Indexed Job whose pods find the first one by the name that a headless Service gives it."""
    done = dry(tmp_path, more="kubernetes: {kind: job, nodes: 2, runs: kept, gpus: 8}\n")
    assert done.stderr == "", "the claim is there"
    config, service, job = yaml.safe_load_all(done.stdout)
    name = job["metadata"]["name"]
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    spec, pod = job["spec"], job["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 0
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == name
    assert f"{name}-0.{name}:29400" in pod["spec"]["containers"][0]["args"]
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "kept"}} in pod["spec"]["volumes"]
    assert config["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("{pod: {containers: []}}", 'kubernetes.pod.containers: "containers" is not allowed; there is one'),
        ("{pod: {labels: {}}}", 'kubernetes.pod.labels: unknown field of a pod "labels"; allowed: affinity'),
        ("{pod: {nodeSelectr: {}}}", 'topologySpreadConstraints (did you mean "nodeSelector"?)'),
        ("{memory: lots}", 'kubernetes.memory: cannot be "lots"; a number of bytes, as in 512Mi or 8Gi'),
        ("{kind: pod}", 'kubernetes.kind: unknown value "pod"; allowed: trainjob, job'),
        ("{resources: {gpu: 1}}", "a device as its plugin calls it, as in amd.com/gpu"),
        ("{resources: {nvidia.com/gpu: 1}}", '"nvidia.com/gpu" has its own key; write kubernetes.gpus'),
        ("{ttl_s: 60}", "kubernetes.ttl_s: a TrainJob is not deleted after its end; write kind: job"),
        ("{env: {NCCL_IB_DISABLE: 1}}", "kubernetes.env.NCCL_IB_DISABLE: expected a string"),
        ("{env: {API_TOKEN: hunter2hunter2}}", "a secret in plain text; put it into the Secret that"),
        (
            '{env: {HF_TOKEN: "${env:HF_TOKEN}"}}',
            "${env:NAME} is not filled in for pods; put it into the Secret",
        ),
        ("{pod: {terminationGracePeriodSeconds: 9}}", "write kubernetes.grace_s"),
        ("{claims: {data: relative}}", 'kubernetes.claims.data: cannot be "relative"; a path from "/" on'),
    ],
)
def test_bad_values_are_faults_of_the_file(tmp_path: Path, asked: str, told: str) -> None:
    """With their place."""
    done = dry(tmp_path, more=f"kubernetes: {asked}\n")
    assert (done.code, done.stdout) == (2, "")
    assert told in done.stderr
    assert "digits.yaml:5" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_secret_does_not_get_into_a_config_map(tmp_path: Path) -> None:
    """Which others may read."""
    done = dry(tmp_path, more="track: [{wandb: {project: 'https://me:hunter2hunter2@host/x'}}]\n")
    assert (done.code, done.stdout) == (2, "")
    assert "holds a secret, which the job would show: write ${env:NAME}" in done.stderr
    assert "hunter2" not in done.stderr


class Server(ThreadingHTTPServer):
    """Keeps what it is sent, and refuses kinds in `refused`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.refused: set[str] = set()
        self.output = b"train: step 1/1\n"
        self.pods: list[dict[str, Any]] = []


_GROUPS = {
    "api/v1": ["ConfigMap", "PersistentVolumeClaim", "Service", "Pod"],
    "apis/batch/v1": ["Job"],
    "apis/trainer.kubeflow.org/v1alpha1": ["TrainJob", "TrainingRuntime"],
}


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, body: Any, code: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        if path == "version":
            self._answer({"major": "1", "minor": "34"})
        elif path == "api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            versions = [name.removeprefix("apis/") for name in _GROUPS if name != "api/v1"]
            groups = [
                {"name": one.split("/")[0], "versions": [v], "preferredVersion": v}
                for one in versions
                for v in [{"groupVersion": one, "version": one.split("/")[1]}]
            ]
            self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif path in _GROUPS:
            resources = [
                {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["create", "get"]}
                for kind in _GROUPS[path]
            ]
            self._answer(
                {"kind": "APIResourceList", "groupVersion": path.split("/", 1)[1], "resources": resources}
            )
        elif path.endswith("/pods/gone/log"):
            self._answer({"kind": "Status", "message": 'pods "gone" not found', "code": 404}, 404)
        elif path.endswith("/log"):
            self._answer(self.server.output)
        elif path.endswith("/pods"):
            self._answer({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.server.pods})
        else:
            (body,) = (
                one
                for one in self.server.bodies
                if one["metadata"]["name"] == path.rpartition("/")[2] and f"/{one['kind'].lower()}s/" in path
            )
            self._answer({**body, "status": {"conditions": [{"type": "Complete", "status": "True"}]}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] in self.server.refused:
            self._answer({"kind": "Status", "message": f"no {body['kind']} today", "code": 403}, 403)
            return
        self.server.log.append(f"create {body['kind']} in {self.path.split('/namespaces/')[1].split('/')[0]}")
        self.server.bodies.append(body)
        self._answer(body, 201)

    def do_DELETE(self) -> None:
        self.server.log.append(f"delete {self.path.split('/')[-2]}")
        self._answer({"kind": "Status", "status": "Success"})


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server, and the environment in which it is the current context's cluster."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "group"}}],
        "users": [{"name": "u", "user": {}}],
    }
    with Server() as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        config["clusters"] = [{"name": "c", "cluster": {"server": address}}]
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        environment = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
        try:
            yield server, environment
        finally:
            server.shutdown()
            thread.join()


def submit(folder: Path, environment: dict[str, str], *options: str) -> Finished:
    (folder / "digits.yaml").write_text(PIPELINE)
    arguments = ("submit", "digits.yaml", "--to", "kubernetes", *options)
    return ddprun(*arguments, cwd=folder, environment=environment)


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_what_a_dry_run_prints_is_sent(tmp_path: Path, kind: str) -> None:
    """To the current context's namespace, the job last; then its first pod's output is shown. A pod may have
    been deleted since the pods were listed.
    """
    with serving(tmp_path) as (server, environment):
        server.pods = [
            pod("second", {"running": {}}, index="1"),
            pod("gone", {"running": {}}),
            pod("first", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            pod("first", {"terminated": {"exitCode": 1}}),
            pod("first", {"terminated": {"exitCode": 0}}, restarts=1),
        ]
        done = submit(tmp_path, environment, "--follow", "--set", f"kubernetes.kind={kind}")
        assert done.code == 0, done.stderr
        last = ["TrainingRuntime", "TrainJob"] if kind == "trainjob" else ["Service", "Job"]
        kinds = ["ConfigMap", "PersistentVolumeClaim", *last]
        assert server.log == [f"create {one} in group" for one in kinds]
        for body in server.bodies:
            check(body)
        job = done.stdout.strip()
        assert {body["metadata"]["name"] for body in server.bodies} == {job}
        assert done.stderr == (
            "ddprun: pod first: ImagePullBackOff: no such image\n"
            f"train: step 1/1\ntrain: step 1/1\nddprun: job {job}: Complete\n"
        )


def test_a_character_that_is_cut_in_the_output_is_whole(tmp_path: Path) -> None:
    """The output comes in pieces of any number of bytes; a character may be cut, or never be whole."""
    with serving(tmp_path) as (server, environment):
        server.pods = [pod("first", {"terminated": {"exitCode": 0}})]
        text = "€" * 50_000
        server.output = text.encode() + b"\xe2\x82"
        done = submit(tmp_path, environment, "--follow")
        assert done.code == 0, done.stderr
        assert done.stderr.partition("ddprun: job ")[0] == text + "\ufffd"


def pod(name: str, state: dict[str, Any], *, index: str = "0", restarts: int = 0) -> dict[str, Any]:
    """As the API server shows one."""
    container = {"name": "node", "image": "i", "imageID": "i", "ready": True, "state": state}
    return {
        "metadata": {"name": name, "annotations": {"batch.kubernetes.io/job-completion-index": index}},
        "status": {"containerStatuses": [{**container, "restartCount": restarts}]},
    }


def test_a_refusal_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    """In the cluster's own words; and a cluster that is not there is an error of one line, too."""
    with serving(tmp_path) as (server, environment):
        server.refused = {"TrainJob"}
        done = submit(tmp_path, environment)
        assert done.code == 2
        assert "refuses: no TrainJob today" in done.stderr
        created = [line.split()[1].lower() + "s" for line in server.log if line.startswith("create")]
        deleted = [line.split()[1] for line in server.log if line.startswith("delete")]
        assert deleted == created[::-1] != []
    gone = submit(tmp_path, environment)
    assert gone.code == 2
    assert "does not answer" in gone.stderr
    none = submit(tmp_path, {**environment, "KUBECONFIG": str(tmp_path / "missing")})
    assert "there is no cluster to send to (KUBECONFIG)" in none.stderr
    for one in (done, gone, none):
        assert len(one.stderr.splitlines()) == 1
