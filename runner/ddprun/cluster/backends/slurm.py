"""A pipeline as a job of Slurm's: one task on each host, in which ddprun starts that host's ranks.

A job whose time is nearly up gets SIGUSR1 (`sbatch --signal`), as it does from `scancel --signal=USR1`. Its
ranks take a checkpoint and stop, ddprun ends with `EXIT_REQUEUE`, and the script puts the job back into the
queue; when it runs again it resumes from the checkpoint. https://slurm.schedmd.com/sbatch.html
"""

import codecs
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ddprun import EXIT_REQUEUE, ON_USR1_VARIABLE
from ddprun.cluster import Cluster, ClusterError, Flag, Outcome, ShowOutput, Submission, trust_environment
from ddprun.options import (
    CustomValidator,
    NonNegativeInt,
    PositiveInt,
    combine,
    expected,
    pattern_constraint,
    problem,
)

_UNQUOTED_VALUE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
_POLL_S = 1.0
# Without an answer: its controller restarts, or another host takes over; jobs keep running.
_MAX_UNREACHABLE_S = 300.0
_NO_SUCH_JOB = "Invalid job id"
_UNFINISHED_STATES = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "STAGE_OUT"),
}  # of a job that is not over; https://slurm.schedmd.com/job_state_codes.html
_TIME_PATTERN = r"^([0-9]+-)?[0-9]{1,9}(:[0-9]{1,2}){0,2}$"
_OPTION_PATTERN = r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$"  # a long option of sbatch's, without its dashes
_PRINTABLE_PATTERN = r"[^\x00-\x1f\x7f\"\\]*"

_RESERVED_OPTIONS = {
    "array": "submit each run by itself",
    "no-requeue": "write slurm.warn_s: 0",
    "ntasks": "there is one task on each host; write launch.nproc_per_node",
    "ntasks-per-node": "there is one task on each host; write launch.nproc_per_node",
    "output": "the job's output is next to the run's folder",
    "signal": "write slurm.warn_s",
    "test-only": "use submit --dry-run",
    "wait": "use submit --follow",
    "wrap": "submit writes the script",
}  # options of sbatch's that would break the shape of the job, or following it, and what to do instead


def _check_time_limit(value: Any) -> str | int | None:
    """A time, in Slurm's own ways to write it; a ValidationError if it is none."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and re.fullmatch(_TIME_PATTERN, value):
        return value
    raise expected("a time", 'minutes, "HH:MM:SS", "D-HH" or "D-HH:MM:SS"')


def _check_options(value: Any) -> dict[str, str | int | float | bool]:
    """Options of sbatch, as given; a ValidationError if one is none, or would break the job."""
    if not isinstance(value, dict):
        raise expected("a mapping of sbatch's options", "write {mem: 64G, exclusive: true}")
    faults = []
    for name, item in value.items():
        if not isinstance(name, str) or not re.fullmatch(_OPTION_PATTERN, name):
            text = f'"{name}" is not a long option of sbatch'
            faults.append(problem(text, "as in mem-per-cpu", at=str(name), on_key=True))
        elif name in _RESERVED_OPTIONS:
            text = f'"{name}" cannot be set'
            faults.append(problem(text, _RESERVED_OPTIONS[name], at=name, on_key=True))
        elif not isinstance(item, (str, int, float)):
            text = "expected a string, a number, or true for a flag without a value"
            faults.append(problem(text, at=name))
        elif isinstance(item, str) and not re.fullmatch(_PRINTABLE_PATTERN, item):
            text = "a line of a script cannot hold quotes, backslashes or line ends"
            faults.append(problem(text, at=name))
    if faults:
        raise combine(faults)
    return dict(value)


_SlurmName = Annotated[
    str,
    Field(min_length=1, max_length=200),
    pattern_constraint(r"^[A-Za-z0-9_.,:/@+-]+$", 'letters, digits and "_.,:/@+-" only'),
]  # as partitions, accounts and images have
_TimeInFile = PositiveInt | Annotated[str, Field(pattern=_TIME_PATTERN)] | None
_OPTIONS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": _OPTION_PATTERN, "not": {"enum": list(_RESERVED_OPTIONS)}},
    "additionalProperties": {"anyOf": [{"type": name} for name in ("string", "number", "boolean")]},
}  # `options` as JSON Schema


class Slurm(Cluster):
    """A Slurm batch job with one task on each host, which starts that host's ranks."""

    class Options(Cluster.Options):
        nodes: PositiveInt | None = None
        """Hosts; null is `launch.nnodes`, or the maximum if that is a range."""

        gpus: NonNegativeInt | None = None
        """GPUs of each host; null asks for none."""

        cpus: PositiveInt | None = None
        """CPUs of each host, for all of its ranks; null is what the cluster gives."""

        time: Annotated[_TimeInFile, CustomValidator(_check_time_limit)] = None
        """How long the job may take: minutes, "HH:MM:SS" or "D-HH:MM:SS"; null is the partition's limit."""

        partition: _SlurmName | None = None
        """Where the job is queued; null is the cluster's default."""

        account: _SlurmName | None = None
        """The account to charge; null is the user's default."""

        image: _SlurmName | None = None
        """Container image, for clusters with Pyxis (`srun --container-image`); null runs without one."""

        warn_s: NonNegativeInt = 120
        """Seconds before the time limit at which a checkpoint is taken and the job is requeued; 0 lets it
        end."""

        options: Annotated[
            dict[str, str | int | float | bool], CustomValidator(_check_options, _OPTIONS_SCHEMA)
        ] = Field(default={})
        """Long options of sbatch, as in {mem: 64G, exclusive: true}; they replace what ddprun would write."""

    job_contains_pipeline = False
    flags: ClassVar[Mapping[str, Flag]] = {
        "program": Flag(
            "PATH", "path of ddprun on the hosts; by default this one, on a disk that all hosts share."
        )
    }

    def __init__(self, options: Options, submission: Submission) -> None:
        self._options, self._submission = options, submission
        # As all hosts see them; `%j` stands for the job's id.
        self._runs = Path("runs").resolve() / submission.loaded.pipeline.name
        self._output = self._runs / "slurm-%j.out"

    @property
    def text(self) -> str:
        options, submission = self._options, self._submission
        loaded, program = submission.loaded, _ddprun_executable(options, submission)
        more = {**options.options}
        requeue = more.pop("requeue", options.warn_s > 0)
        directives = {
            "job-name": loaded.pipeline.name,
            "nodes": submission.host_count(options.nodes),
            "ntasks-per-node": 1,
            "cpus-per-task": options.cpus,
            "gpus-per-node": options.gpus,
            "time": options.time,
            "partition": options.partition,
            "account": options.account,
            "output": str(self._output),
            "open-mode": "append",
            "signal": f"USR1@{options.warn_s}" if options.warn_s else None,
            "requeue" if requeue else "no-requeue": True,
            **more,
        }
        lines = [
            f"#SBATCH --{name}" + ("" if value is True else f"={_quote_directive_value(str(value))}")
            for name, value in directives.items()
            if value is not None and value is not False
        ]
        sets = "".join(f" --set {shlex.quote(override)}" for override in submission.overrides)
        # All variables of this script, whatever sbatch leaves out of the shell that submits it.
        srun = "srun --export=ALL --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60"
        if options.image is not None:
            srun += f" --container-image={shlex.quote(options.image)}"
            if trust_environment():  # before what the image sets
                srun += f" --container-env={','.join(trust_environment())}"
        body = [
            "set -u",
            *(f"export {name}={shlex.quote(value)}" for name, value in trust_environment().items()),
            "# The same folder each time that the job is queued, so that its run is resumed.",
            f'run={shlex.quote(str(self._runs))}/slurm-"$SLURM_JOB_ID"',
            'if [ -e "$run/pipeline.yaml" ]; then',
            '  set -- resume "$run"',
            "else",
            f'  set -- run {shlex.quote(str(loaded.path.resolve()))} --run-dir "$run"{sets}',
            "fi",
            # Since Slurm 22.05 srun does not take that over from the job.
            'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
        ]
        if options.warn_s:
            body.append(f"export {ON_USR1_VARIABLE}=stop")
        if options.warn_s and requeue:
            body += [
                f'{srun} {shlex.quote(program)} "$@"',
                "code=$?",
                f'if [ "$code" -eq {EXIT_REQUEUE} ]; then # SIGUSR1 has come, and a checkpoint was taken',
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$code"',
            ]
        else:
            body.append(f'exec {srun} {shlex.quote(program)} "$@"')
        return "\n".join(["#!/bin/sh", *lines, "", *body]) + "\n"

    def send(self) -> str:
        """Hand it to sbatch; gives the job's id. Raises ClusterError if Slurm is not here, or refuses it."""
        if shutil.which("sbatch") is None:
            raise ClusterError("sbatch is not installed here; --dry-run prints the script")
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"cannot make {self._output.parent}: {error.strerror}") from None
        return _run_slurm_command(["sbatch", "--parsable"], self.text).partition(";")[0]

    def follow(self, job: str, show: ShowOutput) -> Outcome:
        """Show the job's output until it is over. Raises ClusterError if Slurm is silent, or knows no job."""
        path = Path(str(self._output).replace("%j", job))
        # What was written so far may end within a character.
        offset, decoder = 0, codecs.getincrementaldecoder("utf-8")(errors="replace")
        last_answer_s = time.monotonic()
        while True:
            state = "PENDING"
            try:
                found = _run_slurm_command(["scontrol", "show", "job", "--oneliner", job])
            except ClusterError as error:
                if _NO_SUCH_JOB in str(error) or time.monotonic() - last_answer_s > _MAX_UNREACHABLE_S:
                    raise
            else:
                state, last_answer_s = found.partition("JobState=")[2].partition(" ")[0], time.monotonic()
            ended = state not in _UNFINISHED_STATES
            if path.exists():
                with path.open("rb") as file:
                    file.seek(offset)
                    piece = file.read()
                offset += len(piece)
                show(decoder.decode(piece, final=ended))
            if ended:
                return Outcome(state, state == "COMPLETED")
            time.sleep(_POLL_S)


def _ddprun_executable(options: Slurm.Options, submission: Submission) -> str:
    if given := submission.flags.get("program"):
        return given
    if options.image is not None:
        return "ddprun"
    here = Path(sys.argv[0]).resolve()
    return str(here) if here.name.startswith("ddprun") else shutil.which("ddprun") or "ddprun"  # python -m


def _quote_directive_value(value: str) -> str:
    """A value in a line of options, which sbatch reads nearly as a shell does."""
    return value if _UNQUOTED_VALUE.fullmatch(value) else f'"{value}"'


def _run_slurm_command(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(f"{command[0]} failed: {reason}")
    return done.stdout.strip()
