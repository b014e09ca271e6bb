"""When a checkpoint is taken, and what is said of it."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddprun import __version__
from ddprun.checkpoint.codec import UnstorableError, check
from ddprun.checkpoint.folder import Apart, rank_name
from ddprun.checkpoint.writer import CheckpointWriter, Outcome
from ddprun.config import Loaded, PipelineError
from ddprun.engine.nonfinite import in_state
from ddprun.engine.ranks import Ranks
from ddprun.engine.state import shared_keys, state_of
from ddprun.host.rank_files import keep_checkpoint
from ddprun.telemetry.gather import Records
from ddprun_hooks.comm.control import open_control
from ddprun_hooks.comm.groups import Placement

if TYPE_CHECKING:
    from ddprun.engine.session import Session

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run; `checkpoint` in the file.

    Args:
        loaded: the pipeline.
        run_dir: the run's folder, as rank 0 sees it.
        ranks: this rank among the others.
        records: knows which ranks do not see the run's folder.
        token: of this attempt at the run, the same on all ranks.
        infinite_at_first: parameters that are meant to be so.
    """

    def __init__(
        self,
        loaded: Loaded,
        run_dir: Path,
        ranks: Ranks,
        records: Records,
        token: str,
        infinite_at_first: frozenset[str] = frozenset(),
    ) -> None:
        wanted, timeout_s = loaded.pipeline.checkpoint, loaded.pipeline.launch.timeout_s
        self._every = wanted.every
        self._away = bool(records.away)
        self._failed = False
        self.lost: str | None = None
        """On rank 0: why the checkpoint of the run's end is not there; it is otherwise."""

        self._writer: CheckpointWriter | None = None
        if wanted.keep:
            self._writer = CheckpointWriter(
                run_dir / FOLDER,
                ranks.store,
                token=token,
                rank=ranks.rank,
                ranks=ranks.size,
                keep=wanted.keep,
                away=records.away,
                control=open_control(timedelta(seconds=timeout_s)) if records.away else None,
                limit_s=timeout_s,
                before=records.writer.flush,
                after=keep_checkpoint,
                not_finite=partial(in_state, infinite_at_first=infinite_at_first),
            )

    def check(self, session: "Session") -> None:
        """Make sure that what the run starts with can be held.

        Raises:
            PipelineError: some state is of a kind that a checkpoint cannot hold.
        """
        if self._writer is not None:
            try:
                check(state_of(session))
            except UnstorableError as error:
                text, way_out = f"no checkpoint can be taken: {error}", "`checkpoint: {keep: 0}` takes none"
                raise PipelineError([session.runtime.loaded.fault("checkpoint", text, way_out)]) from None

    def due(self, step: int) -> bool:
        """Whether one is taken after so many steps of the run; the same on all ranks."""
        return self._writer is not None and self._every > 0 and step % self._every == 0

    def take(self, session: "Session", *, at_end: bool = False, wished: bool = False) -> None:
        """Take one of the state as it is now; called by all ranks after the same step.

        Args:
            session: of the run.
            at_end: nothing comes after it, so it is waited for.
            wished: somebody has asked for it by a signal, and is told.
        """
        runtime, reporter = session.runtime, session.reporter
        if wished:
            what = "no checkpoint is taken, because of checkpoint.keep: 0"
            reporter.note(
                f"SIGUSR1: {what if self._writer is None else f'checkpoint of step {session.state.step}'}"
            )
        if self._writer is None:
            return
        started = time.monotonic()
        step, cursor = session.state.step, session.state.cursor
        if cursor.mid_stage:
            cursor.elapsed_s()
        cursor.run_elapsed_s()
        if at_end:  # ranks that never meet have stopped each after a step of its own
            known = runtime.exchange.control.all_gather([float(step), float(self._writer.count)])
            step = int(known[:, 0].max())
            self._writer.leave_out(int(known[:, 1].max()))
        state, shared = state_of(session), shared_keys(session)
        own = {key: value for key, value in state.items() if key not in shared}
        parts = {rank_name(runtime.ranks.rank): Apart.of(own)}
        if runtime.ranks.rank == 0:
            parts["shared"] = Apart.of({**{key: state[key] for key in sorted(shared)}, **_about(session)})
        if self._away and (session.state.policy is None or not session.state.policy.never):
            runtime.records.collect()
        reporter.events.info("checkpoint_taken", step=step, seconds=time.monotonic() - started)
        self._writer.put(step, parts, wait=at_end)
        self.tell(session)
        if at_end and self._failed:
            self.lost = f"the checkpoint of step {step}, the last one, is lost: {self._reason}"

    def tell(self, session: "Session") -> None:
        """Say what has become of those that were taken."""
        if self._writer is None:
            return
        while not self._writer.outcomes.empty():
            self._tell(session, self._writer.outcomes.get())

    def close(self, session: "Session") -> None:
        """Finish writing."""
        if self._writer is not None:
            self._writer.close()
            self.tell(session)

    def _tell(self, session: "Session", outcome: Outcome) -> None:
        reporter = session.reporter
        seconds = round(outcome.seconds, 3)
        if outcome.written is not None:
            reporter.events.info(
                "checkpoint_written",
                step=outcome.step,
                seconds=seconds,
                bytes=outcome.written.bytes,
                folder=str(outcome.written.path),
                nonfinite=outcome.written.nonfinite,
            )
            self._failed = False
            return
        reporter.events.warning(
            "checkpoint_left_out", step=outcome.step, seconds=seconds, reason=outcome.problem
        )
        if not self._failed:  # once, until one is written again
            reporter.note(
                f"the checkpoint of step {outcome.step} is left out, and older ones stay: {outcome.problem}"
            )
        self._failed, self._reason = True, outcome.problem


def layout_of(session: "Session") -> str:
    """By what the ranks' shares of what hooks keep are cut."""
    runtime = session.runtime
    cap_mb, hooks = runtime.loaded.pipeline.ddp.bucket_cap_mb, sorted(runtime.stacks.used)
    ranks = runtime.ranks
    hosts = Placement(ranks.rank, ranks.hosts, ranks.local_sizes).launched()
    return repr((cap_mb, hosts, hooks))


def _about(session: "Session") -> dict[str, object]:
    """What a checkpoint says of its run."""
    runtime = session.runtime
    return {
        "pipeline": runtime.loaded.plain(),
        "world_size": runtime.ranks.size,
        "layout": layout_of(session),
        "ddprun": __version__,
    }
