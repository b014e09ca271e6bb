"""A pipeline as objects of Kubernetes: a TrainJob of Kubeflow Trainer's, or an Indexed Job.

With a TrainJob comes a TrainingRuntime of its own: what a TrainJob can say of its pods differs between
versions of the Trainer, and a runtime can say all of it. Pods meet the restricted pod security standard.
https://www.kubeflow.org/docs/components/trainer/, https://kubernetes.io/docs/concepts/workloads/controllers/job/,
https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

import base64
import codecs
import math
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from ddprun.cluster import (
    CONTAINER_RUNS_FOLDER,
    CONTAINER_USER_ID,
    AbsoluteFolder,
    Cluster,
    ClusterError,
    ContainerOptions,
    Outcome,
    ShowOutput,
    Submission,
    VariableName,
    trust_environment,
)
from ddprun.config.secrets import PipelineString
from ddprun.config.tree import map_strings
from ddprun.options import (
    CustomValidator,
    KeyPath,
    NonNegativeInt,
    PositiveInt,
    combine,
    expected,
    pattern_constraint,
    problem,
    unknown_name_error,
)

JOB_LABEL = "ddprun.dev/job"  # label of all that belongs to a job; its value is the job's id
_PIPELINE_FOLDER, _PIPELINE_FILE = "/workspace/pipeline", "pipeline.yaml"
_POLL_S = 2.0
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # of a job that waits in a queue
_TRAINER_API_GROUP = "trainer.kubeflow.org"
_RESTRICTED_CONTEXT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}  # wanted of each
_REPLICATED_JOB_NAME = "node"  # what Kubeflow calls the replicated job, and in it the container, that trains
Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Shows a text of several lines as it is, and quotes what YAML 1.2 would read as a number (1e3)."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else '"' if text[:1].isdigit() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)

_DnsLabel = Annotated[
    str,
    Field(max_length=63),
    pattern_constraint(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", 'lower-case letters, digits and "-" only, not "-" first or last'
    ),
]  # a name as Kubernetes has them
_Quantity = Annotated[
    str,
    pattern_constraint(r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$", "a number of bytes, as in 512Mi or 8Gi"),
]  # bytes as Kubernetes has them: 512Mi, 4Gi
_DeviceName = Annotated[
    str,
    Field(max_length=300),
    pattern_constraint(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "a device as its plugin calls it, as in amd.com/gpu",
    ),
]  # what Kubernetes calls an extended resource
_NVIDIA_GPU = "nvidia.com/gpu"
_POD_SECURITY_REASON = "pods meet the restricted pod security standard"
_FORBIDDEN_POD_FIELDS = {
    "activeDeadlineSeconds": "write kubernetes.deadline_s",
    "automountServiceAccountToken": "a run asks the cluster for nothing",
    "containers": "there is one, which kubernetes.image and the other keys describe",
    "ephemeralContainers": "no pod is made with them",
    "hostIPC": _POD_SECURITY_REASON,
    "hostNetwork": _POD_SECURITY_REASON,
    "hostPID": _POD_SECURITY_REASON,
    "restartPolicy": "write launch.max_restarts",
    "securityContext": _POD_SECURITY_REASON,
    "terminationGracePeriodSeconds": "write kubernetes.grace_s",
    "volumes": "write kubernetes.claims",
}  # fields of a pod that may not stand in a file: what to do instead, or why
_POD_FIELDS = [
    *("affinity", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases", "hostUsers"),
    *("imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os", "overhead"),
    *("preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims"),
    *("runtimeClassName", "schedulerName", "schedulingGates", "serviceAccountName"),
    *("setHostnameAsFQDN", "shareProcessNamespace", "tolerations", "topologySpreadConstraints"),
]  # what `pod` may say of a pod: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
# What `pod` may say of an init container.
_INIT_CONTAINER_FIELDS = ["name", "image", "imagePullPolicy", "command", "args", "workingDir"]
_INIT_CONTAINER_FIELDS += ["env", "envFrom", "resources", "volumeMounts"]

_POD_SCHEMA = {
    "type": "object",
    "propertyNames": {"enum": _POD_FIELDS},
    "properties": {"initContainers": {"items": {"propertyNames": {"enum": _INIT_CONTAINER_FIELDS}}}},
}  # `pod` as far as a JSON Schema can say it


def _check_pod_fields(value: Any) -> dict[str, Any]:
    """The fields of a pod, as given; a ValidationError if one is unknown, ddprun's own, or unrestricted."""
    if not isinstance(value, dict):
        raise expected("a mapping of a pod's fields", "write {priorityClassName: low}")
    faults: list[ValidationError] = []
    for name in map(str, value):
        if name in _FORBIDDEN_POD_FIELDS:
            why = _FORBIDDEN_POD_FIELDS[name]
            faults.append(problem(f'"{name}" is not allowed', why, at=name, on_key=True))
        elif name not in _POD_FIELDS:
            faults.append(unknown_name_error("field of a pod", name, _POD_FIELDS, at=name, on_key=True))
    init_containers = value.get("initContainers", [])
    if not isinstance(init_containers, list) or not all(isinstance(one, dict) for one in init_containers):
        faults.append(expected("a list of containers, each a mapping", at="initContainers"))
        init_containers = []
    for index, container in enumerate(init_containers):
        for name in map(str, container):
            if name not in _INIT_CONTAINER_FIELDS:
                what, at = "field of an init container", ("initContainers", index, name)
                faults.append(unknown_name_error(what, name, _INIT_CONTAINER_FIELDS, at=at, on_key=True))
    hint = "take it from a Secret, by valueFrom: {secretKeyRef: {name, key}}"

    def check_text(path: KeyPath, text: str) -> str:
        if "${env:" in text:
            faults.append(problem("${env:NAME} is not filled in for pods", hint, at=path))
        match path:
            case ("initContainers", int(at), "env", int(number), "value"):
                name = value["initContainers"][at]["env"][number].get("name")
                if PipelineString((str(name),), text).is_literal_secret:
                    faults.append(problem("a secret in plain text", hint, at=path))
        return text

    map_strings(value, check_text)
    if faults:
        raise combine(faults)
    return dict(value)


class Kubernetes(Cluster):
    """Pods of Kubernetes, each a host of the run. Needs the package kubernetes."""

    class Options(ContainerOptions):
        kind: Literal["trainjob", "job"] = "trainjob"
        """A Kubeflow TrainJob or, for clusters without Kubeflow Trainer, an Indexed Job with a headless
        Service."""

        namespace: _DnsLabel | None = None
        """Null is the namespace of the current context."""

        resources: dict[_DeviceName, PositiveInt] = Field(default={})
        """Other devices of each pod, as in {amd.com/gpu: 8, rdma/hca_shared_devices_a: 1} or
        {nvidia.com/mig-1g.10gb: 1}. `launch.nproc_per_node` then says how many ranks use them."""

        memory: _Quantity | None = None
        """Memory of each pod, as in 16Gi; null asks for none."""

        shm: _Quantity = "1Gi"
        """Size of each pod's /dev/shm, which counts as its memory."""

        tmp: _Quantity | None = None
        """Size of each pod's /tmp, on its node's disk; null is no limit."""

        runs: _DnsLabel | None = None
        """The PersistentVolumeClaim that holds the folders of runs; null creates one for the job."""

        storage: _Quantity = "10Gi"
        """Size of the volume that is asked for if `runs` names none."""

        storage_class: _DnsLabel | None = None
        """Storage class of that volume; null is the cluster's default."""

        claims: dict[_DnsLabel, AbsoluteFolder] = Field(default={})
        """Other PersistentVolumeClaims to read from, and where each is mounted in the pods."""

        env: dict[VariableName, str] = Field(default={})
        """Environment variables of the pods, as in {NCCL_DEBUG: INFO}."""

        env_from: _DnsLabel | None = None
        """A Secret whose entries are environment variables of the pods."""

        queue: _DnsLabel | None = None
        """The Kueue LocalQueue in which the job waits."""

        grace_s: NonNegativeInt = 120
        """Seconds that a pod has for its last step and a checkpoint when it is to end, as when its node is
        drained; then it is killed."""

        deadline_s: PositiveInt | None = None
        """Seconds after which a job that is not over is ended as failed; null is no limit."""

        ttl_s: NonNegativeInt | None = None
        """Seconds after its end at which the job and its pods are deleted; null keeps them. For `kind: job`
        alone."""

        pod: Annotated[dict[str, Any], CustomValidator(_check_pod_fields, _POD_SCHEMA)] = Field(default={})
        """Other fields of the pods' spec, as in {nodeSelector: {gpu: h100}, tolerations: […]}."""

        @model_validator(mode="after")
        def _check_kind(self) -> "Kubernetes.Options":
            if _NVIDIA_GPU in self.resources:
                hint = "write kubernetes.gpus"
                raise problem(f'"{_NVIDIA_GPU}" has its own key', hint, at=("resources", _NVIDIA_GPU))
            if self.kind == "trainjob" and self.ttl_s is not None:
                raise problem("a TrainJob is not deleted after its end", "write kind: job", at="ttl_s")
            return self

    max_modules_bytes = 900 << 10  # a ConfigMap holds 1 MiB, the pipeline's text included
    variables_source = "the Secret that kubernetes.env_from names"

    def __init__(self, options: Options, submission: Submission) -> None:
        self._options, self._launch = options, submission.loaded.pipeline.launch
        self.name, self._node_count = submission.new_name(), submission.host_count(options.nodes)
        # As JobSet and Job call the first of their pods, in the domain of a headless Service.
        first = f"{self.name}-{_REPLICATED_JOB_NAME}-0-0" if options.kind == "trainjob" else f"{self.name}-0"
        self._command = submission.container_arguments(
            self.name, f"{_PIPELINE_FOLDER}/{_PIPELINE_FILE}", self._node_count, f"{first}.{self.name}"
        )
        texts = {_PIPELINE_FILE: submission.loaded.path.read_text("utf-8")}
        binary, self._paths = {}, {_PIPELINE_FILE: _PIPELINE_FILE}
        for index, (path, data) in enumerate(submission.modules.items()):
            key = f"{index}-{re.sub(r'[^-._a-zA-Z0-9]', '_', posixpath.basename(path))}"
            self._paths[key] = path
            try:
                texts[key] = data.decode("utf-8")
            except UnicodeDecodeError:
                binary[key] = base64.b64encode(data).decode()
        self.manifests = [self._manifest("v1", "ConfigMap", data=texts, binaryData=binary or None)]
        if options.runs is None:
            claim = {
                "accessModes": ["ReadWriteMany" if self._node_count > 1 else "ReadWriteOnce"],
                "resources": {"requests": {"storage": options.storage}},
                "storageClassName": options.storage_class,
            }
            self.manifests.append(self._manifest("v1", "PersistentVolumeClaim", spec=claim))
        self.manifests += self._train_job() if options.kind == "trainjob" else self._indexed_job()

    @property
    def text(self) -> str:
        """The manifests, as `kubectl create -f -` reads them."""
        return yaml.dump_all(self.manifests, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)

    @property
    def warnings(self) -> list[str]:
        """That a claim may stay Pending: most block disks can only be mounted by one node."""
        options = self._options
        if self._node_count == 1 or options.runs is not None or options.storage_class is not None:
            return []
        return [
            f"{self._node_count} pods write to one volume, and stay Pending unless the cluster's default "
            "storage class allows ReadWriteMany, as NFS does and block disks do not: name a class in "
            "kubernetes.storage_class, or a claim in kubernetes.runs"
        ]

    def unset_in_job(self, variables: Iterable[str]) -> list[str]:
        """None if a Secret is named, whose entries are not known here."""
        options = self._options
        return [] if options.env_from is not None else [one for one in variables if one not in options.env]

    def _manifest(
        self, api: str, kind: str, labels: Mapping[str, str | None] | None = None, **rest: Manifest | None
    ) -> Manifest:
        """The manifest of one of the job's objects; of `labels` and `rest` what is None is left out."""
        labels = {**self._labels(), **(labels or {})}
        metadata = {"name": self.name, "namespace": self._options.namespace, "labels": labels}
        made: Manifest = _without_none({"apiVersion": api, "kind": kind, "metadata": metadata, **rest})
        return made

    def _labels(self) -> dict[str, str]:
        """Of all that belongs to the job, its pods too."""
        standard = {"name": "ddprun", "instance": self.name, "managed-by": "ddprun"}
        return {JOB_LABEL: self.name} | {f"app.kubernetes.io/{key}": text for key, text in standard.items()}

    def _train_job(self) -> list[Manifest]:
        options, launch = self._options, self._launch
        job = {
            "spec": {"backoffLimit": 0, "template": self._pod_template("Never")},
            "metadata": {"labels": {f"{_TRAINER_API_GROUP}/trainjob-ancestor-step": "trainer"}},
        }
        jobs = {
            "replicatedJobs": [{"name": _REPLICATED_JOB_NAME, "template": job}],
            # Where a pod is lost all pods start again, and resume from the checkpoint.
            "failurePolicy": {"maxRestarts": launch.max_restarts} if launch.max_restarts else None,
        }
        runtime = {"mlPolicy": {"numNodes": self._node_count, "torch": {}}, "template": {"spec": jobs}}
        trainer = {
            "image": options.image,
            "args": self._command,
            "numNodes": self._node_count,
            "numProcPerNode": launch.nproc_per_node or options.gpus or 2,
            "resourcesPerNode": self._resources(),
        }
        reference = {"apiGroup": _TRAINER_API_GROUP, "kind": "TrainingRuntime", "name": self.name}
        train_job = {
            "runtimeRef": reference,
            "trainer": trainer,
            "activeDeadlineSeconds": options.deadline_s,
        }
        api = f"{_TRAINER_API_GROUP}/v1alpha1"
        framework = {f"{_TRAINER_API_GROUP}/framework": "torch"}  # for Kubeflow's own tools
        return [
            self._manifest(api, "TrainingRuntime", framework, spec=runtime),
            self._manifest(api, "TrainJob", {_QUEUE_LABEL: options.queue}, spec=train_job),
        ]

    def _indexed_job(self) -> list[Manifest]:
        options, restarts = self._options, self._launch.max_restarts
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: self.name}}
        job = {
            "completionMode": "Indexed",
            "completions": self._node_count,
            "parallelism": self._node_count,
            "backoffLimit": restarts * self._node_count,
            "activeDeadlineSeconds": options.deadline_s,
            "ttlSecondsAfterFinished": options.ttl_s,
            "template": self._pod_template("OnFailure" if restarts else "Never", subdomain=self.name),
        }
        return [
            self._manifest("v1", "Service", spec=service),
            self._manifest("batch/v1", "Job", {_QUEUE_LABEL: options.queue}, spec=job),
        ]

    def _resources(self) -> Manifest | None:
        """Both asked for and not to be exceeded; processors that are idle may be used."""
        options = self._options
        limited = {_NVIDIA_GPU: options.gpus or None, **options.resources, "memory": options.memory}
        cpu = None if options.cpus is None else f"{options.cpus:g}"
        if not any((*limited.values(), cpu)):
            return None
        return {"requests": {**limited, "cpu": cpu}, "limits": limited if any(limited.values()) else None}

    def _pod_template(self, restart: str, subdomain: str | None = None) -> Manifest:
        """A pod, as every host of the job is one."""
        options = self._options
        variables = {**options.env, **trust_environment()}
        claims = [(f"claim-{index}", *item) for index, item in enumerate(options.claims.items())]
        container = {
            "name": _REPLICATED_JOB_NAME,
            "image": options.image,
            "args": self._command,
            "securityContext": {**_RESTRICTED_CONTEXT, "readOnlyRootFilesystem": True},
            "volumeMounts": [
                {"name": "pipeline", "mountPath": _PIPELINE_FOLDER, "readOnly": True},
                {"name": "runs", "mountPath": CONTAINER_RUNS_FOLDER},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
                *({"name": name, "mountPath": path, "readOnly": True} for name, _, path in claims),
            ],
            # These come before those of envFrom.
            "env": [{"name": name, "value": value} for name, value in variables.items()] or None,
            "envFrom": options.env_from and [{"secretRef": {"name": options.env_from}}],
            "resources": self._resources(),
        }
        items = [{"key": key, "path": path} for key, path in self._paths.items()]
        config_map = {"name": self.name, "items": items if len(items) > 1 else None}
        given = options.pod.get("initContainers", ())
        init_containers = [{**one, "securityContext": _RESTRICTED_CONTEXT} for one in given]
        spec = {
            "restartPolicy": restart,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": options.grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": CONTAINER_USER_ID,
                "runAsGroup": CONTAINER_USER_ID,
                "fsGroup": CONTAINER_USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **options.pod,
            "initContainers": init_containers or None,
            "containers": [container],
            "volumes": [
                {"name": "pipeline", "configMap": config_map},
                {"name": "runs", "persistentVolumeClaim": {"claimName": options.runs or self.name}},
                {"name": "tmp", "emptyDir": {"sizeLimit": options.tmp}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
                *(
                    {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
                    for name, claim, _ in claims
                ),
            ],
            "subdomain": subdomain,
        }
        return {"metadata": {"labels": self._labels()}, "spec": spec}

    def send(self) -> str:
        """Create the objects, the job last, or delete those that were made. Raises ClusterError."""
        with _cluster_client() as cluster, ExitStack() as undo:
            namespace = self._options.namespace or _current_namespace()
            for manifest in self.manifests:
                resource = _api_resource(cluster, manifest)
                resource.create(body=manifest, namespace=namespace)
                undo.callback(resource.delete, name=self.name, namespace=namespace)
            undo.pop_all()
        return self.name

    def follow(self, job: str, show: ShowOutput) -> Outcome:
        """Show what the job's first pod prints, or why it does not run yet. Raises ClusterError."""
        from kubernetes.client import CoreV1Api

        with _cluster_client() as cluster:
            namespace = self._options.namespace or _current_namespace()
            log = _PodLogFollower(CoreV1Api(cluster.client), namespace, f"{JOB_LABEL}={job}", show)
            resource = _api_resource(cluster, self.manifests[-1])
            while True:
                log.show_while_running()
                status = resource.get(name=job, namespace=namespace).to_dict().get("status", {})
                for condition in status.get("conditions", []):
                    if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
                        log.show_while_running()
                        return Outcome(condition["type"], condition["type"] == "Complete")
                time.sleep(_POLL_S)


def _without_none(value: Any) -> Any:
    """Plain data without the fields that are None, which Kubernetes takes for missing ones, too."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@dataclass
class _PodLogFollower:
    """The output of a job's first pod, and of those that take its place."""

    core_api: Any
    namespace: str
    selector: str
    show: ShowOutput
    # When the output of a pod's n-th container was read last; infinity: it was read to its end.
    last_read_s: dict[tuple[str, int], float] = field(default_factory=dict)
    waiting_reason: str = ""

    def show_while_running(self) -> None:
        """Show what there is to show; comes back when the pod has ended, or does not run yet."""
        from kubernetes.client.exceptions import ApiException

        for pod in self.core_api.list_namespaced_pod(self.namespace, label_selector=self.selector).items:
            notes, state = pod.metadata.annotations or {}, (pod.status.container_statuses or [None])[0]
            if notes.get(_INDEX_ANNOTATION, "0") != "0":
                continue
            if state is None or state.state is None or state.state.waiting is not None:
                if (why := _waiting_reason(pod, state)) and why != self.waiting_reason:
                    self.show(f"ddprun: {why}\n")
                self.waiting_reason = why
                continue
            container = pod.metadata.name, state.restart_count
            if self.last_read_s.get(container) != math.inf:
                try:
                    self._follow(*container)
                except ApiException as error:
                    if error.status != HTTPStatus.NOT_FOUND:
                        raise
                    continue  # it was deleted after it was listed
                self.last_read_s[container] = (
                    math.inf if state.state.terminated is not None else time.monotonic()
                )

    def _follow(self, pod: str, start: int) -> None:
        from urllib3.exceptions import HTTPError

        options: dict[str, Any] = {"follow": True, "_preload_content": False}
        if (pod, start) in self.last_read_s:
            options["since_seconds"] = int(time.monotonic() - self.last_read_s[pod, start]) + 1
        stream = self.core_api.read_namespaced_pod_log(pod, self.namespace, **options)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a piece may end in a character
        with suppress(HTTPError):  # cut off by something on the way: the rest is read next time
            for piece in stream.stream():
                self.show(decoder.decode(piece))
            self.show(decoder.decode(b"", final=True))


def _waiting_reason(pod: Any, container: Any) -> str:
    if container is not None and container.state is not None and container.state.waiting is not None:
        waiting = container.state.waiting
        message = f": {waiting.message}" if waiting.message else ""
        return f"pod {pod.metadata.name}: {waiting.reason}{message}"
    for condition in pod.status.conditions or []:
        if condition.status == "False" and condition.message:
            return f"pod {pod.metadata.name}: {condition.reason}: {condition.message}"
    return ""


def _api_resource(cluster: Any, manifest: Manifest) -> Any:
    """What creates, finds and deletes objects of this kind."""
    return cluster.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])


@contextmanager
def _cluster_client() -> Iterator[Any]:
    """A client of the current context's cluster, or this process's; what it refuses is a ClusterError."""
    try:
        from kubernetes import client, config
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config.config_exception import ConfigException
        from kubernetes.dynamic import DynamicClient
        from kubernetes.dynamic.exceptions import ResourceNotFoundError, api_exception
        from urllib3.exceptions import HTTPError
    except ModuleNotFoundError:
        raise ClusterError("--to kubernetes needs its client: pip install 'ddprun[kubernetes]'") from None
    try:
        config.load_config()
    except ConfigException as error:
        raise ClusterError(f"there is no cluster to send to (KUBECONFIG): {error}") from None
    settings = client.Configuration.get_default_copy()
    settings.retries = 1
    try:
        with client.ApiClient(settings) as api, TemporaryDirectory(prefix="ddprun-") as scratch:
            yield DynamicClient(api, cache_file=f"{scratch}/kinds.json")
    except ResourceNotFoundError as error:
        is_trainer = _TRAINER_API_GROUP in str(error)
        hint = "; kubernetes.kind: job needs no Kubeflow Trainer" if is_trainer else ""
        raise ClusterError(f"the cluster at {settings.host} does not have it: {error}{hint}") from None
    except ApiException as error:
        try:
            why = api_exception(error).summary()
        except ValueError:  # no JSON, although it says so
            why = error.reason
        raise ClusterError(f"the cluster at {settings.host} refuses: {why}") from None
    except HTTPError as error:
        raise ClusterError(f"the cluster at {settings.host} does not answer: {error}") from None


def _current_namespace() -> str:
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        _, current = config.list_kube_config_contexts()
    except ConfigException:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace", encoding="utf-8") as file:
            return file.read().strip()
    return str(current["context"].get("namespace") or "default")
