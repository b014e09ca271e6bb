"""`docker` and `kubernetes`: what `ddprun submit` asks these engines for."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from ddprun.spec import patterns
from ddprun.spec.fields import Validated
from ddprun.spec.options import NonNegativeInt, Options, PositiveFloat, PositiveInt
from ddprun.spec.problems import all_within, mismatch, problem

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

FIELD = r"^[a-z][A-Za-z]*$"


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

    network: Image | None = None
    """One that is there already; null makes one, of the driver bridge, for the job."""

    runs: Annotated[str, Field(pattern=patterns.VOLUME)] = "ddprun-runs"
    """Where the folders of runs are kept: a volume, which is made if there is none, or a folder of the
    engine's machine."""

    mounts: dict[Folder, Folder] = Field(default={})
    """Folders of the engine's machine to read from, and where they are in the containers."""

    env: Annotated[tuple[Variable, ...], Field(strict=False)] = ()
    """Environment variables that are passed on from where submit is called."""


def _read_pod(value: Any) -> dict[str, Any]:
    """Raises:
    PydanticCustomError: a field that no pod can have, or that is ddprun's own.
    """
    if not isinstance(value, dict):
        raise mismatch("a mapping of a pod's fields", "write {priorityClassName: low}")
    faults = []
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(FIELD, name):
            faults.append(
                (problem(f'"{name}" is no field of a pod', "as in nodeSelector", where="key"), str(name))
            )
        elif name in OWN_FIELDS:
            faults.append((problem(f'"{name}" is set by ddprun', OWN_FIELDS[name], where="key"), name))
    if faults:
        raise all_within(faults)
    return dict(value)


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
    """Any other fields of the pods, as in {nodeSelector: {gpu: h100}, tolerations: […]}."""
