"""A pipeline as containers on one network of a Docker engine, sent through the engine's API.

https://docs.docker.com/reference/api/engine/. The containers are restricted: an ordinary user, no
capabilities, a file system that is read-only but for /tmp and the folder of runs. The engine starts none of
them again: ddprun does that with ranks, inside, as often as `launch.max_restarts` says.
"""

import contextlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from ddprun.cluster.job import PORT, RUNS, ClusterError, Outcome, Show, arguments, limits, new_name, nodes_of
from ddprun.config import Loaded

JOB = "ddprun.job"
"""Label of all that belongs to a job; its value is the job's id."""

_USER = 1000
_KILLED = 137


class DockerJob:
    """Containers that run a pipeline together.

    Args:
        loaded: the checked pipeline.
        overrides: the `--set` options.
    """

    def __init__(self, loaded: Loaded, overrides: Sequence[str]) -> None:
        asked, launch = loaded.pipeline.docker, loaded.pipeline.launch
        nodes = nodes_of(loaded, asked.nodes)
        self.name = new_name(loaded)
        self._file, self._data = f"{RUNS}/{self.name}.yaml", loaded.path.read_bytes()
        self._network = asked.network or self.name
        self._least = launch.hosts[0] if launch.hosts[0] < nodes else nodes
        self._limits = limits()
        self._env = [name for name in asked.env if name not in self._limits]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Paths below the API's root, and what is posted there."""

        if asked.network is None:
            network = {"Name": self.name, "Driver": "bridge", "Labels": {JOB: self.name}}
            self.requests.append(("networks/create", network))
        run_dir = f"{RUNS}/{loaded.pipeline.name}/{self.name}"
        command = arguments(
            loaded,
            self._file,
            run_dir,
            overrides,
            nodes=nodes,
            meeting=f"{self._container(0)}:{PORT}",
            name=self.name,
        )
        for node in range(nodes):
            self.requests.append(
                (f"containers/create?name={self._container(node)}", self._body(loaded, node, command))
            )

    def _limited(self) -> list[str]:
        return [f"{name}={value}" for name, value in self._limits.items()]

    def _container(self, node: int) -> str:
        return f"{self.name}-{node}"

    def _body(self, loaded: Loaded, node: int, command: Sequence[str]) -> dict[str, Any]:
        """What makes one of the containers."""
        asked = loaded.pipeline.docker
        runs = {"Type": "bind" if asked.runs.startswith("/") else "volume", "Source": asked.runs}
        mounts: list[dict[str, Any]] = [{**runs, "Target": RUNS}]
        mounts += [
            {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}
            for source, target in asked.mounts.items()
        ]
        host: dict[str, Any] = {
            "NetworkMode": self._network,
            "Mounts": mounts,
            "ShmSize": _bytes(asked.shm),
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": ""},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
        }
        if asked.cpus is not None:
            host["NanoCpus"] = round(asked.cpus * 1e9)
        if asked.memory is not None:
            host["Memory"] = _bytes(asked.memory)
        if asked.gpus:
            ids = [str(node * asked.gpus + place) for place in range(asked.gpus)]
            host["DeviceRequests"] = [{"DeviceIDs": ids, "Capabilities": [["gpu"]]}]
        return {
            "Image": asked.image,
            "Hostname": self._container(node),
            "User": f"{_USER}:{_USER}",
            "Cmd": list(command),
            "Env": [*self._limited(), *(f"{name}=${{env:{name}}}" for name in self._env)],
            "Labels": {JOB: self.name},
            "StopSignal": "SIGINT",
            "HostConfig": host,
        }

    @property
    def text(self) -> str:
        """The requests, in order. Values of environment variables are not in it."""
        shown = [{"POST": path, "body": body} for path, body in self.requests]
        shown.append({"PUT": f"containers/{self._container(0)}/archive?path={RUNS}", "file": self._file})
        return yaml.safe_dump_all(shown, sort_keys=False, width=120, allow_unicode=True)

    def send(self) -> str:
        """Make all of it, and start the containers; what was made is removed again if that fails.

        Raises:
            ClusterError: the engine is not there, or refuses.
        """
        missing = [name for name in self._env if name not in os.environ]
        if missing:
            raise ClusterError(f"docker.env: {', '.join(missing)} is not set here")
        with _engine() as api:
            try:
                self._make(api)
            except BaseException:
                remove(self.name)
                raise
        return self.name

    def _make(self, api: Any) -> None:
        made = []
        for path, body in self.requests:
            if path == "networks/create":
                api.create_network(body["Name"], driver=body["Driver"], labels=body["Labels"])
                continue
            env = [*self._limited(), *(f"{name}={os.environ[name]}" for name in self._env)]
            name = path.partition("=")[2]
            made.append(api.create_container_from_config({**body, "Env": env}, name)["Id"])
        api.put_archive(made[0], RUNS, _archive(self._file.removeprefix(f"{RUNS}/"), self._data))
        for container in made:
            api.start(container)

    def follow(self, number: str, show: Show) -> Outcome:
        """Show what the containers print, until all have ended; then they and their network are removed.

        Raises:
            ClusterError: the engine does not answer.
        """
        with _engine() as api:
            found = api.containers(all=True, filters={"label": f"{JOB}={number}"})
            names = sorted((one["Names"][0].removeprefix("/") for one in found), key=_place)
            if not names:
                raise ClusterError(f"the engine has no container of {number}")
            left = threading.Event()

            def show_on(text: str) -> None:
                if not left.is_set():
                    show(text)

            threads = [
                threading.Thread(target=_show_log, args=(name, _place(name), show_on), daemon=True)
                for name in names
            ]
            for thread in threads:
                thread.start()
            try:
                ended = [_ended(api, name) for name in names]
                for thread in threads:
                    thread.join(10)
            finally:
                left.set()  # whoever leaves, as by Ctrl-C, finds nobody writing
        remove(number)
        good = [code == 0 for code, _ in ended]
        bad = [f"{name} {what}" for name, (code, what) in zip(names, ended, strict=True) if code]
        done = all(good) or (self._least < len(names) and sum(good) >= self._least)
        return Outcome("; ".join(["done" if done else "failed", *bad]), done)


def remove(number: str) -> None:
    """Remove a job's containers and its network; what its run has left stays.

    Raises:
        ClusterError: the engine does not answer.
    """
    with _engine() as api:
        label = {"label": f"{JOB}={number}"}
        for one in api.containers(all=True, filters=label):
            api.remove_container(one["Id"], force=True)
        for one in api.networks(filters=label):
            api.remove_network(one["Id"])


def _ended(api: Any, name: str) -> tuple[int, str]:
    """Wait for the end of a container: its exit code, and what that means."""
    api.wait(name, timeout=None)
    state: Mapping[str, Any] = api.inspect_container(name)["State"]
    code = int(state["ExitCode"])
    if state["OOMKilled"]:
        return code, "was killed: it had used up docker.memory"
    return code, "was killed" if code == _KILLED else f"ended with exit code {code}"


def _show_log(name: str, place: int, show: Show) -> None:
    """Show a container's output, each line with its node's number but on the first one."""
    with contextlib.suppress(ClusterError), _engine() as api:
        rest = b""
        for piece in api.logs(name, stream=True, follow=True):
            *whole, rest = (rest + piece).split(b"\n")
            show("".join(_line(line, place) for line in whole))
        if rest:
            show(_line(rest, place))


def _line(line: bytes, place: int) -> str:
    return (f"node {place}: " if place else "") + line.decode(errors="replace") + "\n"


def _place(name: str) -> int:
    return int(name.rpartition("-")[2])


def _archive(name: str, data: bytes) -> bytes:
    """A tar file with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o644, _USER, _USER
        tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _bytes(text: str) -> int:
    """Of `512m`, `4g`."""
    unit = {"b": 0, "k": 10, "m": 20, "g": 30}.get(text[-1])
    return int(text) if unit is None else int(text[:-1]) << unit


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    """The engine that `DOCKER_HOST` names, or this machine's.

    Raises:
        ClusterError: it is not there, or refuses something inside the block.
    """
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
