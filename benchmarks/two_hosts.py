"""Runs `ddprun` on two hosts of this machine: network namespaces, joined by a link (Linux, root)."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.namespaces import hosts
from tests.ranks import Finished, Running

HOSTS = 2
TIMEOUT_S = 300


def refusal(folder: Path, file: str, settings: Sequence[str]) -> str | None:
    """Why `ddprun check` refuses a file with some `--set`; None if it does not."""
    command = [sys.executable, "-m", "ddprun", "check", file, *settings]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[0] if done.returncode else None


def run(
    folder: Path, file: str, settings: Sequence[str], *, local: int, run_dir: str, setup: str = "true"
) -> dict[str, int]:
    """Run a pipeline of `folder` on two hosts; gives what programs of each sent over the link in bytes, by
    the host's name.

    Args:
        folder: where the file is, and the run's folder will be.
        file: the pipeline.
        settings: `--set=…`, any number.
        local: ranks on each host.
        run_dir: name of the run's folder.
        setup: a shell command that each host does first; its end of the link is `e0`.

    Raises:
        RuntimeError: a host's `ddprun` failed.
        subprocess.TimeoutExpired: it took longer than five minutes.
    """
    with hosts(HOSTS) as made, contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    file,
                    *settings,
                    f"--nnodes={HOSTS}",
                    f"--nproc-per-node={local}",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=node0:29400",
                    "--rdzv-id=two-hosts",
                    f"--run-dir={run_dir}",
                    cwd=folder,
                    prefix=host.prefix(setup),
                )
            )
            for host in made
        ]
        finished: list[Finished] = [running.wait(TIMEOUT_S) for running in started]
        for one in finished:
            if one.code:
                raise RuntimeError(one.stderr.strip() or f"exit code {one.code}")
        return {host.name: host.tx_payload_bytes("e0") for host in made}
