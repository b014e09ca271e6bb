"""A pipeline as containers on one network of a Docker engine, sent through the engine's API.

https://docs.docker.com/reference/api/engine/. The containers are restricted: an ordinary user, no
capabilities, a file system that is read-only but for /tmp and the folder of runs. The engine starts none of
them again: ddprun does that with ranks, inside, as often as `launch.max_restarts` says.
"""

import contextlib
import io
import os
import posixpath
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field

from ddprun.cluster import (
    CONTAINER_RUNS_FOLDER,
    CONTAINER_USER_ID,
    AbsoluteFolder,
    Cluster,
    ClusterError,
    ContainerOptions,
    ImageName,
    Outcome,
    ShowOutput,
    Submission,
    VariableName,
    trust_environment,
)
from ddprun.options import pattern_constraint, problem

JOB_LABEL = "ddprun.job"  # label of all that belongs to a job; its value is the job's id
_SIGKILL_EXIT_CODE = 137
_STOP_TIMEOUT_S = 120  # after SIGINT: for a step and a checkpoint

_ByteSize = Annotated[str, pattern_constraint(r"^[1-9][0-9]*[bkmg]?$", "a number of bytes, as in 512m or 8g")]
"""As Docker has them: 512m, 4g."""

_VOLUME_CONSTRAINT = pattern_constraint(
    r"^(/[^:\x00-\x1f]+|[A-Za-z0-9][A-Za-z0-9_.-]*)$", 'a volume\'s name, or a path from "/" on'
)

_SYSTEM_FOLDERS = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/root", "/run", "/sbin",
    "/sys", "/usr/bin", "/usr/lib", "/usr/sbin", "/var/lib/containerd", "/var/lib/docker", "/var/lib/kubelet",
    "/var/log", "/var/run", "/var/spool",
)  # fmt: skip  # they hold the system itself, its secrets and its sockets
_UNMOUNTABLE_FOLDERS = ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/usr", "/var", "/var/lib")
"""Folders that hold more than data: a folder below one may be mounted, but not the folder itself."""


def _check_mount_source(value: Any) -> Any:
    """A folder of the engine's machine; a ValidationError if it is the system's."""
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    plain = posixpath.normpath("/" + value.lstrip("/"))
    too_broad = plain in _UNMOUNTABLE_FOLDERS
    if too_broad or any(plain == folder or plain.startswith(folder + "/") for folder in _SYSTEM_FOLDERS):
        why = "holds more than data" if too_broad else "is the system's own"
        raise problem(f'"{value}" {why}', "a folder for data or runs alone, as in /data/images")
    return value


def _check_network(value: Any) -> Any:
    """The name of a network of containers, as given; a ValidationError for another kind."""
    if isinstance(value, str) and (value == "host" or value.startswith(("container:", "ns:"))):
        text = f'"{value}" is the network of the machine or of another container'
        raise problem(text, "a network of containers; leave it out, and one is made")
    return value


class Docker(Cluster):
    """Containers on one network of a Docker engine, each a host of the run. Needs the package docker."""

    class Options(ContainerOptions):
        memory: _ByteSize | None = None
        """Memory of each container, as in 8g; null is no limit."""

        shm: _ByteSize = "1g"
        """Size of each container's /dev/shm."""

        network: Annotated[ImageName | None, BeforeValidator(_check_network)] = None
        """An existing network; null creates one for the job, with the bridge driver."""

        runs: Annotated[str, _VOLUME_CONSTRAINT, BeforeValidator(_check_mount_source)] = "ddprun-runs"
        """Where the folders of runs are kept: a volume, which is created if it does not exist, or a folder on
        the engine's machine that is not one of the system's."""

        mounts: dict[Annotated[AbsoluteFolder, BeforeValidator(_check_mount_source)], AbsoluteFolder] = Field(
            default={}
        )
        """Folders on the engine's machine to read from, none of them the system's, and where each is mounted
        in the containers."""

        env: Annotated[tuple[VariableName, ...], Field(strict=False)] = ()
        """Environment variables that are passed on from where submit is called; `docker inspect` shows
        them."""

    max_modules_bytes = 64 << 20
    variables_source = "docker.env"

    def __init__(self, options: Options, submission: Submission) -> None:
        loaded, hosts = submission.loaded, submission.host_count(options.nodes)
        self.name, self._options = submission.new_name(), options
        folder, name = "", f"{self.name}.yaml"
        if submission.modules:  # in a folder of their own: other jobs' files are in that of runs
            folder, name = f"{self.name}-files/", loaded.path.name
        files = {**submission.modules, name: loaded.path.read_bytes()}
        self._file_contents = {f"{folder}{path}": data for path, data in files.items()}
        self._min_hosts = min(loaded.pipeline.launch.host_range[0], hosts)
        self._env = [name for name in options.env if name not in trust_environment()]
        names = [f"{self.name}-{node}" for node in range(hosts)]
        path = f"{CONTAINER_RUNS_FOLDER}/{folder}{name}"
        command = submission.container_arguments(self.name, path, hosts, names[0])
        self._configs = {name: self._container_config(node, name, command) for node, name in enumerate(names)}

    def unset_in_job(self, variables: Iterable[str]) -> list[str]:
        return [name for name in variables if name not in self._options.env]

    def _container_config(self, node: int, name: str, command: Sequence[str]) -> dict[str, Any]:
        options = self._options
        runs = {"Type": "bind" if options.runs.startswith("/") else "volume", "Source": options.runs}
        mounts: list[dict[str, Any]] = [{**runs, "Target": CONTAINER_RUNS_FOLDER}]
        mounts += [
            {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}
            for source, target in options.mounts.items()
        ]
        host: dict[str, Any] = {
            "NetworkMode": options.network or self.name,
            "Mounts": mounts,
            "ShmSize": _parse_bytes(options.shm),
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": "exec"},  # the engine's default is noexec; torch.compile loads what it makes
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
        }
        if options.cpus is not None:
            host["NanoCpus"] = round(options.cpus * 1e9)
        if options.memory is not None:
            host["Memory"] = _parse_bytes(options.memory)
        if options.gpus:
            ids = [str(node * options.gpus + index) for index in range(options.gpus)]
            host["DeviceRequests"] = [{"DeviceIDs": ids, "Capabilities": [["gpu"]]}]
        return {
            "Image": options.image,
            "Hostname": name,
            "User": f"{CONTAINER_USER_ID}:{CONTAINER_USER_ID}",
            "Cmd": list(command),
            "Env": self._environment({variable: f"${{env:{variable}}}" for variable in self._env}),
            "Labels": {JOB_LABEL: self.name},
            "StopSignal": "SIGINT",
            "StopTimeout": _STOP_TIMEOUT_S,
            "HostConfig": host,
        }

    def _environment(self, values: Mapping[str, str]) -> list[str]:
        """A container's environment variables; `values` has those that are passed on."""
        passed_on = {name: values[name] for name in self._env}
        return [f"{name}={value}" for name, value in {**trust_environment(), **passed_on}.items()]

    @property
    def text(self) -> str:
        """The requests, in order. Values of environment variables are not in it."""
        shown: list[dict[str, Any]] = []
        if self._options.network is None:
            network = {"Name": self.name, "Driver": "bridge", "Labels": {JOB_LABEL: self.name}}
            shown.append({"POST": "networks/create", "body": network})
        shown += [
            {"POST": f"containers/create?name={name}", "body": config}
            for name, config in self._configs.items()
        ]
        first = next(iter(self._configs))
        files = [f"{CONTAINER_RUNS_FOLDER}/{path}" for path in self._file_contents]
        put = {"file": files[0]} if len(files) == 1 else {"files": files}
        shown.append({"PUT": f"containers/{first}/archive?path={CONTAINER_RUNS_FOLDER}", **put})
        return yaml.safe_dump_all(shown, sort_keys=False, width=120, allow_unicode=True)

    def send(self) -> str:
        """Make all of it and start the containers, or remove what was made. Raises ClusterError."""
        if missing := [name for name in self._env if name not in os.environ]:
            raise ClusterError(f"docker.env: {', '.join(missing)} is not set here")
        env = self._environment(os.environ)
        with _docker_client() as api:
            try:
                if self._options.network is None:
                    api.create_network(self.name, driver="bridge", labels={JOB_LABEL: self.name})
                made = [
                    api.create_container_from_config({**config, "Env": env}, name)["Id"]
                    for name, config in self._configs.items()
                ]
                api.put_archive(made[0], CONTAINER_RUNS_FOLDER, _archive(self._file_contents))
                for container in made:
                    api.start(container)
            except BaseException:
                remove_job(self.name)
                raise
        return self.name

    def follow(self, job: str, show: ShowOutput) -> Outcome:
        """Show what the containers print until all have ended, then remove them. Raises ClusterError."""
        with _docker_client() as api:
            found = api.containers(all=True, filters={"label": f"{JOB_LABEL}={job}"})
            names = sorted((container["Names"][0].removeprefix("/") for container in found), key=_node_index)
            if not names:
                raise ClusterError(f"the engine has no container of {job}")
            stopped = threading.Event()

            def show_on(text: str) -> None:
                if not stopped.is_set():
                    show(text)

            threads = [
                threading.Thread(target=_show_log, args=(name, show_on), daemon=True) for name in names
            ]
            for thread in threads:
                thread.start()
            try:
                ended = [_wait_for_container(api, name) for name in names]
                for thread in threads:
                    thread.join(10)
            finally:
                stopped.set()  # whoever leaves, as by Ctrl-C, finds nobody writing
        remove_job(job)
        bad = [f"{name} {what}" for name, (code, what) in zip(names, ended, strict=True) if code]
        done = len(names) - len(bad) >= min(self._min_hosts, len(names))
        return Outcome("; ".join(["done" if done else "failed", *bad]), done)


def remove_job(job: str) -> None:
    """Remove a job's containers and its network, not what its run has left. Raises ClusterError."""
    with _docker_client() as api:
        label = {"label": f"{JOB_LABEL}={job}"}
        for container in api.containers(all=True, filters=label):
            api.remove_container(container["Id"], force=True)
        for network in api.networks(filters=label):
            api.remove_network(network["Id"])


def _wait_for_container(api: Any, name: str) -> tuple[int, str]:
    """Wait for the end of a container: its exit code, and what that means."""
    api.wait(name, timeout=None)
    state: Mapping[str, Any] = api.inspect_container(name)["State"]
    code = int(state["ExitCode"])
    if state["OOMKilled"]:
        return code, "was killed: it exceeded docker.memory"
    return code, "was killed" if code == _SIGKILL_EXIT_CODE else f"ended with exit code {code}"


def _show_log(name: str, show: ShowOutput) -> None:
    """Show a container's output, each line with its node's number but on the first one."""
    head = f"node {_node_index(name)}: " if _node_index(name) else ""
    with contextlib.suppress(ClusterError), _docker_client() as api:
        rest = b""
        for piece in api.logs(name, stream=True, follow=True):
            *whole, rest = (rest + piece).split(b"\n")
            show("".join(f"{head}{line.decode(errors='replace')}\n" for line in whole))
        if rest:
            show(f"{head}{rest.decode(errors='replace')}\n")


def _node_index(name: str) -> int:
    return int(name.rpartition("-")[2])


def _archive(files: Mapping[str, bytes]) -> bytes:
    import tarfile

    buffer = io.BytesIO()
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in (*sorted(folders), *files):
            entry, content = tarfile.TarInfo(path), files.get(path, b"")
            entry.mode, entry.uid, entry.gid = 0o644, CONTAINER_USER_ID, CONTAINER_USER_ID
            if path in folders:
                entry.mode, entry.type = 0o755, tarfile.DIRTYPE
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _parse_bytes(text: str) -> int:
    return int(text.rstrip("bkmg")) << {"k": 10, "m": 20, "g": 30}.get(text[-1], 0)


@contextlib.contextmanager
def _docker_client() -> Iterator[Any]:
    """The engine that `DOCKER_HOST` names, or this machine's; what it refuses inside is a ClusterError."""
    try:
        import docker
        from docker.errors import APIError, DockerException
    except ModuleNotFoundError:
        raise ClusterError("--to docker needs its client: pip install 'ddprun[docker]'") from None
    import requests

    where = os.environ.get("DOCKER_HOST", "this machine's socket")
    try:
        client = docker.from_env()
        client.ping()
    except (DockerException, requests.RequestException) as error:
        raise ClusterError(f"no Docker engine answers at {where} (DOCKER_HOST): {error}") from None
    try:
        yield client.api
    except APIError as error:
        raise ClusterError(f"the Docker engine refuses: {error.explanation or error}") from None
    except (DockerException, requests.RequestException) as error:
        raise ClusterError(f"the Docker engine at {where} does not answer: {error}") from None
    finally:
        client.close()
