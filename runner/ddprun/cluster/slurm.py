"""A pipeline as a job of Slurm's: one task on each host, in which ddprun starts that host's ranks.

A job whose time is nearly up gets SIGUSR1 (`sbatch --signal`), as it does from `scancel --signal=USR1`. Its
ranks take a checkpoint and stop, ddprun ends with `QUEUE_AGAIN`, and the script puts the job back into the
queue; when it runs again it goes on from the checkpoint. https://slurm.schedmd.com/sbatch.html
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddprun import ON_USR1, QUEUE_AGAIN
from ddprun.cluster.job import ClusterError, Outcome, Show, limits, nodes_of
from ddprun.config import Loaded

_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
_POLL_S = 1.0
_SILENT_S = 300.0
"""How long Slurm may not answer: its controller is started again, or another host takes over; jobs go on."""

_NO_SUCH_JOB = "Invalid job id"
_NOT_OVER = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"),
        *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "STAGE_OUT"),
    }
)
"""States of a job that is to go on; https://slurm.schedmd.com/job_state_codes.html."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What is handed to sbatch."""

    text: str
    """The script."""

    output: Path
    """The job's output; `%j` stands for its id."""

    def send(self) -> str:
        """Hand it to sbatch; gives the job's id.

        Raises:
            ClusterError: Slurm is not here, or refuses the job.
        """
        if shutil.which("sbatch") is None:
            raise ClusterError("sbatch is not installed here; --dry-run prints the script")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"cannot make {self.output.parent}: {error.strerror}") from None
        return _call(["sbatch", "--parsable"], self.text).partition(";")[0]

    def follow(self, number: str, show: Show) -> Outcome:
        """Show the job's output as it comes, until the job is over.

        Raises:
            ClusterError: Slurm has not answered for long, or knows no such job.
        """
        path = Path(str(self.output).replace("%j", number))
        read, answered = 0, time.monotonic()
        while True:
            state = "PENDING"
            try:
                found = _call(["scontrol", "show", "job", "--oneliner", number])
            except ClusterError as error:
                if _NO_SUCH_JOB in str(error) or time.monotonic() - answered > _SILENT_S:
                    raise
            else:
                state, answered = found.partition("JobState=")[2].partition(" ")[0], time.monotonic()
            if path.exists():
                with path.open("rb") as file:
                    file.seek(read)
                    piece = file.read()
                read += len(piece)
                if piece:
                    show(piece.decode(errors="replace"))
            if state not in _NOT_OVER:
                return Outcome(state, state == "COMPLETED")
            time.sleep(_POLL_S)


def job_of(loaded: Loaded, overrides: Sequence[str], program: str, folder: Path) -> SlurmJob:
    """The job that runs a pipeline.

    Args:
        loaded: the checked pipeline.
        overrides: the `--set` options.
        program: how ddprun is called on the hosts.
        folder: `runs` as all hosts see it.
    """
    pipeline, asked = loaded.pipeline, loaded.pipeline.slurm
    runs = folder / pipeline.name
    output = runs / "slurm-%j.out"
    options: list[tuple[str, str | int | float | bool | None]] = [
        ("job-name", pipeline.name),
        ("nodes", nodes_of(loaded, asked.nodes)),
        ("ntasks-per-node", 1),
        ("cpus-per-task", asked.cpus),
        ("gpus-per-node", asked.gpus),
        ("time", str(asked.time) if asked.time is not None else None),
        ("partition", asked.partition),
        ("account", asked.account),
        ("output", str(output)),
        ("open-mode", "append"),
        *(
            [("signal", f"USR1@{asked.warn_s}"), ("requeue", True)]
            if asked.warn_s
            else [("no-requeue", True)]
        ),
        *asked.options.items(),
    ]
    lines = [
        f"#SBATCH --{name}" + ("" if value is True else f"={_directive(str(value))}")
        for name, value in options
        if value is not None and value is not False
    ]
    sets = "".join(f" --set {shlex.quote(override)}" for override in overrides)
    # All variables of this script, whatever of the shell that submits it sbatch is told to leave out.
    srun = "srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60"
    if asked.image is not None:
        srun += f" --container-image={shlex.quote(asked.image)}"
        if limits():  # before what the image sets
            srun += f" --container-env={','.join(limits())}"
    body = [
        "set -u",
        *(f"export {name}={shlex.quote(value)}" for name, value in limits().items()),
        "# The same folder each time that the job is queued: a run that is there goes on.",
        f'run={shlex.quote(str(runs))}/slurm-"$SLURM_JOB_ID"',
        'if [ -e "$run/pipeline.yaml" ]; then',
        '  set -- resume "$run"',
        "else",
        f'  set -- run {shlex.quote(str(loaded.path.resolve()))} --run-dir "$run"{sets}',
        "fi",
        # Since Slurm 22.05 srun does not take that over from the job.
        'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
    ]
    if asked.warn_s:
        body += [
            f"export {ON_USR1}=stop",
            f'{srun} {shlex.quote(program)} "$@"',
            "code=$?",
            f'if [ "$code" -eq {QUEUE_AGAIN} ]; then # SIGUSR1 has come, and a checkpoint was taken',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]
    else:
        body.append(f'exec {srun} {shlex.quote(program)} "$@"')
    return SlurmJob("\n".join(["#!/bin/sh", *lines, "", *body]) + "\n", output)


def _directive(value: str) -> str:
    """A value in a line of options, which sbatch reads nearly as a shell does."""
    return value if _PLAIN.fullmatch(value) else f'"{value}"'


def _call(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(f"{command[0]} failed: {reason}")
    return done.stdout.strip()
