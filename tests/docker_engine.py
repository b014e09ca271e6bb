"""A Docker engine of its own, and ddprun's image in it, built from the Dockerfile (Linux, root)."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

_CLIENT = shutil.which("docker", path=f"/usr/bin:{os.environ.get('PATH', '')}")
"""The one that came with the engine, where there are several."""

ROOT = Path(__file__).parents[1]
BASE = "python:3.11-slim"
NETWORK = "ddprun-test"
_BUILD_S = 900
_IN_MEMORY_BYTES = 12 << 30
"""Memory that must be free for the engine's data (2.5 GB) to be in memory."""


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    for tool, found in (("dockerd", shutil.which("dockerd")), ("docker", _CLIENT)):
        if found is None:
            return f"{tool} is not installed"
    return None


REASON = _missing()
needs_docker = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    folder: Path

    @property
    def host(self) -> str:
        """As `DOCKER_HOST` has it."""
        return f"unix://{self.folder}/docker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever is to find it."""
        return {**os.environ, "DOCKER_HOST": self.host}

    def call(self, *arguments: str, timeout_s: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
        """Run `docker`, with more variables."""
        return subprocess.run(
            [str(_CLIENT), *arguments],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ask(self, *arguments: str, timeout_s: float = 60) -> str:
        """Run `docker`, which has to succeed; gives what it prints."""
        done = self.call(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def inspect(self, container: str) -> dict[str, Any]:
        """All that the engine knows of a container."""
        found: list[dict[str, Any]] = json.loads(self.ask("inspect", container))
        return found[0]


@contextmanager
def engine() -> Iterator[Engine]:
    """An engine that ends with the block, and leaves nothing.

    It changes no rule of this machine's firewall; so its networks reach nothing but each other.
    """
    folder = Path(tempfile.mkdtemp(prefix="ddprun-docker-"))
    data = folder / "data"
    data.mkdir()
    if psutil.virtual_memory().available > _IN_MEMORY_BYTES:  # is gone at once, and no disk has written it
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=711", "tmpfs", data], timeout=30, check=False)
    try:
        with _running(folder) as it:
            yield it
    finally:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed(mounts):
            if mount.startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", mount], timeout=30, check=False)
        subprocess.run(["rm", "-rf", folder], timeout=300, check=True)  # faster than Python's own


@contextmanager
def _running(folder: Path) -> Iterator[Engine]:
    it = Engine(folder)
    command = ["dockerd", "--host", it.host, "--pidfile", str(folder / "pid")]
    command += ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
    command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            for _ in range(300):
                if process.poll() is not None:
                    why = (folder / "log").read_text().splitlines()[-1]
                    pytest.skip(f"no Docker engine can run here: {why}")
                if it.call("version").returncode == 0:
                    break
                time.sleep(0.1)
            else:
                pytest.fail("the Docker engine does not answer within 30 s")
            it.ask("network", "create", "--internal", NETWORK)
            yield it
        finally:
            if process.poll() is None:
                for container in it.call("ps", "--all", "--quiet").stdout.split():
                    it.call("rm", "--force", container)
                for network in it.call(
                    "network", "ls", "--quiet", "--filter", "driver=bridge"
                ).stdout.split():
                    it.call("network", "rm", network)
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def build(it: Engine, source: Path = ROOT, name: str = "ddprun") -> str:
    """Build ddprun's image; gives its name."""
    it.call("pull", "--quiet", BASE, timeout_s=120)
    if it.call("image", "inspect", BASE).returncode:
        _stand_in(it)
    # Torch from where pip finds it here.
    options = ["--build-arg", "TORCH_INDEX=", "--network", "host", "--tag", name]
    command = ["build", "--quiet", *options, str(source)]
    # BuildKit writes the layers of the last stage alone; a newer client without its plugin has it not.
    done = it.call(*command, timeout_s=_BUILD_S, DOCKER_BUILDKIT="1")
    if done.returncode and "buildx" in done.stderr:
        done = it.call(*command, timeout_s=_BUILD_S, DOCKER_BUILDKIT="0")
    assert done.returncode == 0, done.stderr
    return name


def _stand_in(it: Engine) -> None:
    """Where no registry can be reached: Debian with its own Python, and this machine's settings of pip."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip(f"{BASE} cannot be pulled, and mmdebstrap is not installed")
    root = it.folder / "base"
    # Unpacked, not configured, in a fifth of the time: Python, what torch links, what a shell script calls.
    include = "--include=python3,python3-venv,base-files,base-passwd,bash,dash,coreutils,grep,sed,libstdc++6"
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=extract", include, "bookworm", str(root)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"{BASE} cannot be pulled, nor Debian installed: {made.stderr.strip()[-300:]}")
    for name in ("base-passwd/passwd.master", "base-passwd/group.master", "base-files/profile"):
        shutil.copy(root / "usr/share" / name, root / "etc" / Path(name).stem)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")  # Debian's pip wants them there
    if certificates.exists():
        (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
        shutil.copy(certificates, root / "etc/ssl/certs")
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for name, value in list(settings.items()):
        if value.startswith("/") and Path(value).exists():
            (root / value[1:]).parent.mkdir(parents=True, exist_ok=True)
            if Path(value).is_dir():
                shutil.copytree(value, root / value[1:], dirs_exist_ok=True)
            else:
                shutil.copy(value, root / value[1:])
        elif not value:
            del settings[name]
    changes = [f"--change=ENV {name}={json.dumps(value)}" for name, value in settings.items()]
    archive = it.folder / "base.tar"
    subprocess.run(
        ["tar", "--directory", str(root), "--exclude=./dev/*", "--create", "--file", str(archive), "."],
        timeout=120,
        check=True,
    )
    shutil.rmtree(root)
    it.ask("import", *changes, str(archive), BASE, timeout_s=300)
    archive.unlink()
