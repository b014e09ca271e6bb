"""`docker` and `kubernetes`: what `ddprun submit` asks these engines for.

Containers are restricted, whatever the file says: it may be a stranger's.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ddprun.config import patterns
from ddprun.config.fields import Validated
from ddprun.config.options import NonNegativeInt, Options, PositiveFloat, PositiveInt
from ddprun.config.problems import all_below, mismatch, problem

Image = Annotated[str, Field(max_length=300, pattern=patterns.IMAGE)]
Label = Annotated[str, Field(max_length=63, pattern=patterns.LABEL)]
"""A name as Kubernetes has them."""

Variable = Annotated[str, Field(max_length=200, pattern=patterns.VARIABLE)]
Folder = Annotated[str, Field(max_length=1000, pattern=patterns.FOLDER)]
Bytes = Annotated[str, Field(pattern=patterns.BYTES)]
"""As Docker has them: 512m, 4g."""

Quantity = Annotated[str, Field(pattern=patterns.QUANTITY)]
"""Bytes as Kubernetes has them: 512Mi, 4Gi."""

OWN_FIELDS = {
    "automountServiceAccountToken": "a run asks the cluster for nothing",
    "containers": "there is one, which kubernetes.image and the other keys describe",
    "restartPolicy": "write launch.max_restarts",
    "securityContext": "pods are restricted",
    "volumes": "write kubernetes.claims",
}
"""Fields of a pod that are ddprun's to set, and what to do instead."""

_RESTRICTED = "pods meet the restricted pod security standard"
REFUSED_FIELDS = {
    "ephemeralContainers": "no pod is made with them",
    "hostIPC": _RESTRICTED,
    "hostNetwork": _RESTRICTED,
    "hostPID": _RESTRICTED,
}
"""Fields of a pod that may not stand in a file, and why."""

_CONTEXT: dict[str, tuple[Any, ...]] = {
    "allowPrivilegeEscalation": (False,),
    "capabilities": ({"drop": ["ALL"]},),
    "privileged": (False,),
    "procMount": ("Default",),
    "readOnlyRootFilesystem": (True, False),
    "runAsNonRoot": (True,),
    "seccompProfile": ({"type": "RuntimeDefault"},),
}
"""What the security context of an init container may say; a number of a user or group but 0, too."""

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")

FIELD = r"^[a-z][A-Za-z]*$"

_OF_THE_ENGINES_MACHINE = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/proc",
        "/root",
        "/run",
        "/sbin",
    ),
    *(
        "/sys",
        "/usr/bin",
        "/usr/lib",
        "/usr/sbin",
        "/var/lib/containerd",
        "/var/lib/docker",
        "/var/lib/kubelet",
    ),
    *("/var/log", "/var/run", "/var/spool"),
)
"""Folders that hold the system itself, its secrets and its sockets."""

_WHOLE = ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/usr", "/var", "/var/lib")
"""Folders of which a part may be mounted, but not the whole."""


def _read_machine_folder(value: Any) -> Any:
    """A folder of the engine's machine.

    Raises:
        PydanticCustomError: it is the system's.
    """
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    plain = posixpath.normpath("/" + value.lstrip("/"))
    whole = plain in _WHOLE
    if whole or any(plain == one or plain.startswith(one + "/") for one in _OF_THE_ENGINES_MACHINE):
        why = "holds more than data" if whole else "is the system's own"
        raise problem(f'"{value}" {why}', "a folder for data or runs alone, as in /data/images")
    return value


def _read_network(value: Any) -> Any:
    """Raises:
    PydanticCustomError: it is no network of containers.
    """
    if isinstance(value, str) and (value == "host" or value.startswith(("container:", "ns:"))):
        raise problem(
            f'"{value}" is the network of the machine or of another container',
            "a network of containers; leave it out, and one is made",
        )
    return value


class Docker(Options):
    """What `ddprun submit --to docker` asks for."""

    image: Image = "ddprun"
    """With ddprun as its entrypoint, and with what the pipeline names."""

    nodes: PositiveInt | None = None
    """Containers; null is `launch.nnodes`, of a range the largest."""

    gpus: NonNegativeInt | None = None
    """GPUs of each container, none of which is another one's; null asks for none."""

    cpus: PositiveFloat | None = None
    """Processors of each container; null is no limit."""

    memory: Bytes | None = None
    """Of each container, as in 8g; null is no limit."""

    shm: Bytes = "1g"
    """Size of each container's /dev/shm."""

    network: Annotated[Image | None, BeforeValidator(_read_network)] = None
    """One that is there already; null makes one, of the driver bridge, for the job."""

    runs: Annotated[str, Field(pattern=patterns.VOLUME), BeforeValidator(_read_machine_folder)] = (
        "ddprun-runs"
    )
    """Where the folders of runs are kept: a volume, which is made if there is none, or a folder of the
    engine's machine, but none of the system's."""

    mounts: dict[Annotated[Folder, BeforeValidator(_read_machine_folder)], Folder] = Field(default={})
    """Folders of the engine's machine to read from, but none of the system's, and where they are in the
    containers."""

    env: Annotated[tuple[Variable, ...], Field(strict=False)] = ()
    """Environment variables that are passed on from where submit is called; `docker inspect` shows them."""


_NOT_FILLED = problem(
    "${env:NAME} is not filled in for pods",
    "take it from a Secret, by valueFrom: {secretKeyRef: {name, key}}",
)


def _read_pod(value: Any) -> dict[str, Any]:
    """Raises:
    PydanticCustomError: a field that no pod can have, that is ddprun's own, or that is not restricted.
    """
    if not isinstance(value, dict):
        raise mismatch("a mapping of a pod's fields", "write {priorityClassName: low}")
    faults: list[tuple[PydanticCustomError, tuple[str | int, ...]]] = []
    for name, item in value.items():
        if not isinstance(name, str) or not re.fullmatch(FIELD, name):
            faults.append(
                (problem(f'"{name}" is no field of a pod', "as in nodeSelector", where="key"), (str(name),))
            )
        elif name in OWN_FIELDS:
            faults.append((problem(f'"{name}" is set by ddprun', OWN_FIELDS[name], where="key"), (name,)))
        elif name in REFUSED_FIELDS and item is not False:
            faults.append((problem(f'"{name}" is not allowed', REFUSED_FIELDS[name], where="key"), (name,)))
        elif name == "initContainers":
            faults += [(error, (name, *path)) for error, path in _unrestricted(item)]
    faults += [(_NOT_FILLED, path) for path, text in _texts(value) if "${env:" in text]
    if faults:
        raise all_below(faults)
    return dict(value)


def _texts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every string of plain data, and where it stands."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*path, step))


def _unrestricted(containers: Any) -> Iterator[tuple[PydanticCustomError, tuple[str | int, ...]]]:
    """What init containers ask for that no restricted one may have."""
    if not isinstance(containers, list):
        yield mismatch("a list of containers"), ()
        return
    for place, container in enumerate(containers):
        if not isinstance(container, dict):
            yield mismatch("a container's fields"), (place,)
            continue
        context = container.get("securityContext")
        if context is not None and not isinstance(context, dict):
            yield mismatch("a mapping of a security context's fields"), (place, "securityContext")
        for name, item in (context if isinstance(context, dict) else {}).items():
            allowed = _CONTEXT.get(name, ())
            user = name in ("runAsUser", "runAsGroup") and isinstance(item, int) and item > 0
            if not user and not any(item == one and type(item) is type(one) for one in allowed):
                rule = f"must be {json.dumps(allowed[0])}" if allowed else "is not allowed"
                yield problem(f'"{name}" {rule}', _RESTRICTED), (place, "securityContext", name)
        for port, asked in enumerate(_items(container.get("ports"))):
            if isinstance(asked, dict) and asked.get("hostPort"):
                yield problem('"hostPort" is not allowed', _RESTRICTED), (place, "ports", port, "hostPort")
        lifecycle = container.get("lifecycle")
        handlers = [(name, container.get(name)) for name in _PROBES]
        handlers += lifecycle.items() if isinstance(lifecycle, dict) else ()
        for name, handler in handlers:
            for how, asked in (handler if isinstance(handler, dict) else {}).items():
                if isinstance(asked, dict) and asked.get("host"):
                    path = (*(() if name in _PROBES else ("lifecycle",)), name, how, "host")
                    yield problem('"host" is not allowed', _RESTRICTED), (place, *path)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Kubernetes(Options):
    """What `ddprun submit --to kubernetes` asks for."""

    kind: Literal["trainjob", "job"] = "trainjob"
    """A TrainJob of Kubeflow Trainer's, or for clusters without it an Indexed Job with a headless Service."""

    image: Image = "ddprun"
    """With ddprun as its entrypoint, and with what the pipeline names."""

    namespace: Label | None = None
    """Null is that of the current context."""

    nodes: PositiveInt | None = None
    """Pods; null is `launch.nnodes`, of a range the largest."""

    gpus: NonNegativeInt | None = None
    """GPUs of each pod (nvidia.com/gpu); null asks for none."""

    cpus: PositiveFloat | None = None
    """Processors of each pod; null asks for none."""

    memory: Quantity | None = None
    """Of each pod, as in 16Gi; null asks for none."""

    shm: Quantity = "1Gi"
    """Size of each pod's /dev/shm, which counts as its memory."""

    runs: Label | None = None
    """The claim of the volume in which the folders of runs are kept; null makes one for the job."""

    storage: Quantity = "10Gi"
    """Size of the volume that is asked for if `runs` names none."""

    storage_class: Label | None = None
    """Class of that volume; null is the cluster's default."""

    claims: dict[Label, Folder] = Field(default={})
    """Claims of other volumes, to read from, and where they are in the pods."""

    env_from: Label | None = None
    """A Secret whose entries are environment variables of the pods."""

    queue: Label | None = None
    """The local queue of Kueue's in which the job waits."""

    pod: Annotated[dict[str, Any], Validated(_read_pod, "kubernetes_pod")] = Field(default={})
    """Any other restricted fields of the pods, as in {nodeSelector: {gpu: h100}, tolerations: […]}."""
