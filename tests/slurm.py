"""A real Slurm of two hosts on this machine: munge, slurmctld and a slurmd on each (Linux, root)."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import namespaces
from tests.namespaces import Host, hosts
from tests.ranks import free_port

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue")
_UP_WITHIN_S = 60.0

_CONF = """
ClusterName=lab
SlurmctldHost=node0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
SlurmctldPort={port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=node0 NodeAddr={one} CPUs=2 RealMemory=4000
NodeName=node1 NodeAddr={two} CPUs=2 RealMemory=4000
PartitionName=debug Nodes=node[0-1] Default=YES State=UP MaxTime=60
"""


def _missing() -> str | None:
    if namespaces.REASON is not None:
        return namespaces.REASON
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    gone = [tool for tool in _TOOLS if shutil.which(tool, path=search) is None]
    return f"no Slurm here: {', '.join(gone)} not installed" if gone else None


REASON = _missing()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up."""

    folder: Path
    hosts: list[Host]
    controller: ExitStack
    """Ends it when it is closed."""

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Inside, no controller answers; jobs go on, and it knows of them when it is back."""
        self.controller.close()
        try:
            yield
        finally:
            self.controller.enter_context(_daemon(self, self.hosts[0], "slurmctld", "-D"))

    @property
    def environment(self) -> dict[str, str]:
        """For whoever uses it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def on(self, host: int) -> list[str]:
        """Run what follows on a host."""
        return self.hosts[host].prefix()

    def call(self, *command: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host to its end, with what it starts."""
        process = subprocess.Popen(
            [*self.on(0), *command],
            cwd=cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def state(self, job: str) -> str:
        """Of a job, such as COMPLETED; empty once Slurm has forgotten it."""
        shown = self.call("scontrol", "show", "job", "--oneliner", job, cwd=self.folder).stdout
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, *states: str, timeout_s: float = 120) -> str:
        """Wait until a job is in one of the states; gives it, or the one that it is in when time is up."""
        until = time.monotonic() + timeout_s
        while (found := self.state(job)) not in states and time.monotonic() < until:
            time.sleep(0.3)
        return found


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Slurm on node0 and node1, with its files in a folder."""
    folder.mkdir()
    with hosts(2) as made, ExitStack() as stack:
        one, two = (host.address for host in made)
        conf = _CONF.format(
            folder=folder, address=one, one=one, two=two, port=free_port(), slurmd_port=free_port()
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        it = Slurm(folder, made, stack.enter_context(ExitStack()))
        stack.enter_context(
            _daemon(
                it,
                None,
                "munged",
                "--foreground",
                "--force",
                f"--socket={folder}/munge.socket",
                f"--key-file={key}",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munged.seed",
            )
        )
        it.controller.enter_context(_daemon(it, made[0], "slurmctld", "-D", "-c"))
        for host in made:
            stack.enter_context(_daemon(it, host, "slurmd", "-D", "-N", host.name))
        _wait_until_up(it)
        yield it


@contextmanager
def _daemon(it: Slurm, host: Host | None, *command: str) -> Iterator[None]:
    """A process that is ended, with all that it has started, when this is left."""
    # In a namespace of processes of its own, whose first one takes in orphans, and whose end is everybody's.
    prefix: list[str] = []
    if host is not None:
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        prefix = [*host.prefix(), *apart, "sh", "-c", '"$@"; exit $?', "sh"]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    with (it.folder / f"{command[0]}.{host.name if host else 'all'}.out").open("wb") as out:
        process = subprocess.Popen(
            [*prefix, *command],
            cwd=it.folder,
            env={**it.environment, "PATH": path},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_up(it: Slurm) -> None:
    until = time.monotonic() + _UP_WITHIN_S
    while time.monotonic() < until:
        found = it.call("sinfo", "--noheader", "--format=%T %D", cwd=it.folder).stdout.split()
        if found == ["idle", "2"]:
            return
        time.sleep(0.3)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in it.folder.glob("*.log"))
    raise AssertionError(f"Slurm is not up after {_UP_WITHIN_S:g} s:\n{logs}")
