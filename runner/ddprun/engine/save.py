"""The save stage: the weights as safetensors, and beside them the pipeline that made them."""

import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_model

from ddprun import __version__
from ddprun.engine.common import make_buffers_equal
from ddprun.engine.session import Session
from ddprun.spec import PipelineError, Save


def save(session: Session, stage: Save) -> dict[str, Any]:
    """Write the model's parameters and buffers; gives the stage's entry in the summary.

    `model.safetensors` brings `model.yaml` with it, the resolved pipeline. A relative path is relative to the
    run's folder. Either file is whole or not there.

    Raises:
        PipelineError: the file cannot be written.
    """
    session.where = stage.path
    make_buffers_equal(session, stage)
    target = session.run_dir / session.loaded.filled(f"{stage.path}.to", stage.to)
    if session.ranks.rank == 0:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _Replacing(target) as unfinished:
                save_model(session.model, str(unfinished), {"format": "pt", "ddprun": __version__})
            with _Replacing(target.with_suffix(".yaml")) as unfinished:
                unfinished.write_text(session.loaded.resolved())
        except OSError as error:
            reason = error.strerror or str(error)
            raise PipelineError(
                [session.loaded.fault(f"{stage.path}.to", f"cannot write {target}: {reason}")]
            ) from None
    session.exchange.control.barrier("rank 0's file")
    session.events.info("saved", stage=stage.index, step=session.step, file=str(target))
    session.screen.note(f"{stage.name}: {target}")
    return {"file": str(target)}


class _Replacing:
    """A path beside `target` that takes its place when the block ends without an error."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self._target.parent, prefix=f".{self._target.name}.")
        os.close(handle)
        self._unfinished = Path(name)
        return self._unfinished

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._unfinished.unlink(missing_ok=True)
            return
        umask = os.umask(0)
        os.umask(umask)
        self._unfinished.chmod(0o666 & ~umask)  # mkstemp makes files that nobody else may read
        with self._unfinished.open("rb") as file:
            os.fsync(file.fileno())
        self._unfinished.replace(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
