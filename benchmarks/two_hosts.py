"""Runs `ddprun` on two hosts of this machine: network namespaces, joined by a link (Linux, root)."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.page import ROOT
from benchmarks.shaper import QUEUE_LENGTH
from tests.namespaces import REASON, Host, hosts
from tests.ranks import Finished, Running

HOSTS = 2
TIMEOUT_S = 300
_BURST_MS, _SMALLEST_BURST_KB, _LARGEST_BURST_KB = 1.0, 16, 70
_FRAME_BYTES = 1514
_RENDEZVOUS = (
    f"--nnodes={HOSTS}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=node0:29400",
    "--rdzv-id=two-hosts",
)


@dataclass(frozen=True)
class Link:
    """How slow the link between the hosts is, in each direction."""

    mbit: float
    one_way_ms: float = 0.0
    """With a latency, a process of this machine carries the packets: the kernel may have no netem."""

    @property
    def words(self) -> tuple[str, str | None]:
        """Its rate and its latency, as `ddprun explain` takes them."""
        return f"{self.mbit:g}Mbit", f"{self.one_way_ms:g}ms" if self.one_way_ms else None

    def refusal(self) -> str | None:
        """Why it cannot be had here."""
        if REASON is not None:
            return REASON
        if self.one_way_ms:
            return None if Path("/dev/net/tun").exists() else "no /dev/net/tun"
        return None if shutil.which("tc") else "tc is not installed"

    @contextlib.contextmanager
    def between(self, made: Sequence[Host]) -> Iterator[None]:
        """Make the link between two hosts so slow."""
        for host in made:  # BBR, the default of some machines, sends at a pace of its own
            reno = ["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"]
            subprocess.run(["ip", "netns", "exec", host.namespace, *reno], check=True)
        if not self.one_way_ms:
            # A pause saves up a burst, which then passes at once: it is small. On a fast link it holds one of
            # the kernel's packets of 64 KB, since cutting them takes time that a network card spares.
            burst = round(self.mbit * _BURST_MS / 8)
            burst = min(max(_SMALLEST_BURST_KB, burst), _LARGEST_BURST_KB)
            rate = f"tbf rate {self.mbit}mbit burst {burst}kb limit {QUEUE_LENGTH * _FRAME_BYTES}"
            for host in made:
                tc = ["tc", "qdisc", "replace", "dev", "e0", "root", *rate.split()]
                subprocess.run(["ip", "netns", "exec", host.namespace, *tc], check=True)
            yield
            return
        subprocess.run(["ip", "-n", made[0].namespace, "link", "del", "e0"], check=True)
        ends = [word for host in made for word in (host.namespace, f"{host.address}/24")]
        command = [sys.executable, "-m", "benchmarks.shaper", *ends, str(self.mbit), str(self.one_way_ms)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as shaper:
            try:
                assert shaper.stdout is not None
                if shaper.stdout.readline() != b"up\n":
                    raise RuntimeError("the link does not come up")
                yield
            finally:
                shaper.kill()


def refusal(folder: Path, file: str, settings: Sequence[str]) -> str | None:
    """Why `ddprun check` refuses a file with some `--set`; None if it does not."""
    command = [sys.executable, "-m", "ddprun", "check", file, *settings]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[0] if done.returncode else None


@contextlib.contextmanager
def started(
    folder: Path,
    file: str,
    settings: Sequence[str],
    *,
    local: int,
    run_dir: str = "run",
    link: Link | None = None,
    warm: bool = False,
    own_cores: bool = False,
) -> Iterator[tuple[list[Host], list[Running]]]:
    """Start a pipeline of `folder` on two hosts; what still runs when the block is left is ended.

    Args:
        folder: where the file is, and the run's folder will be.
        file: the pipeline.
        settings: `--set=…`, any number.
        local: ranks on each host.
        run_dir: name of the run's folder.
        link: between the hosts; None is one without limits.
        warm: processes are forked from one that has torch imported, for what is not to count a start.
        own_cores: each host has an equal part of the cores for itself, if there are enough.
    """
    with hosts(HOSTS) as made, contextlib.ExitStack() as stack:
        if link is not None:
            stack.enter_context(link.between(made))
        words = [file, *settings, *_RENDEZVOUS, f"--nproc-per-node={local}", f"--run-dir={run_dir}"]
        running = [
            stack.enter_context(Running(*words, cwd=folder, host=host, fresh=not warm)) for host in made
        ]
        usable = sorted(os.sched_getaffinity(0))
        if own_cores and len(usable) >= HOSTS:
            for number, one in enumerate(running):
                _pin(one.process.pid, set(usable[number::HOSTS]))
        yield made, running


def doctor_report(folder: Path, link: Link) -> Path:
    """Have `ddprun doctor` measure a link between two hosts; gives its report, a new file in `folder`."""
    words = ("doctor", "--format=json", *_RENDEZVOUS)
    with hosts(HOSTS) as made, link.between(made), contextlib.ExitStack() as stack:
        running = [stack.enter_context(Running(*words, cwd=folder, host=host, fresh=True)) for host in made]
        finished = [one.wait(TIMEOUT_S) for one in running]
    file = folder / f"link-{link.mbit:g}.json"
    file.write_text(finished[0].stdout)
    return file


def _pin(pid: int, cores: set[int]) -> None:
    """Keep a process on some cores, with all threads and processes that it has started or will start."""
    loose = True
    while loose:  # what a thread started before it was pinned is found the next time
        loose = False
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    if os.sched_getaffinity(int(thread.name)) != cores:
                        os.sched_setaffinity(int(thread.name), cores)
                        loose = True


def finish(two: contextlib.AbstractContextManager[tuple[list[Host], list[Running]]]) -> dict[str, int]:
    """Wait for the end of a pipeline that is `started`; gives what programs of each host sent over the link,
    in bytes, by the host's name. Raises RuntimeError if a host's `ddprun` failed.
    """
    with two as (made, running):
        finished: list[Finished] = [one.wait(TIMEOUT_S) for one in running]
        for one in finished:
            if one.code:
                raise RuntimeError(one.stderr.strip() or f"exit code {one.code}")
        return {host.name: host.tx_payload_bytes("e0") for host in made}
