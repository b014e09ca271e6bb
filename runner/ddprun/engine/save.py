"""The save stage: the weights as safetensors, and next to them the pipeline that made them."""

import errno
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from safetensors.torch import save_model
from torch import Tensor, nn

from ddprun import __version__
from ddprun.checkpoint.codec import sort_metadata, umask_permissions
from ddprun.checkpoint.folder import fsync_folder
from ddprun.config import SaveStage
from ddprun.engine.failures import OutputWriteError
from ddprun.engine.model_with_loss import model_alone
from ddprun.engine.session import Session
from ddprun.engine.stage_run import averaged_weights, make_buffers_equal
from ddprun.engine.weights import plain_name
from ddprun.run_files import open_file

_STEP = "step"
PIPELINE_HEADER = "# Written by ddprun next to weights: the pipeline that made them.\n"
"""First line of the pipeline that save writes; a file without it is somebody else's."""

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk that takes nothing more; every other error is the pipeline's."""


def save(session: Session, stage: SaveStage) -> dict[str, Any]:
    """Write the model's parameters and buffers, or what `only` leaves of them; gives the stage's entry in the
    summary.

    `model.safetensors` brings `model.yaml` with it, the resolved pipeline, or `model.safetensors.yaml` if the
    other is there and not save's. A relative path is relative to the run's folder. Either file is whole or
    not there. Raises OutputWriteError if the disk is full or fails, or else PipelineError.
    """
    reporter = session.reporter
    make_buffers_equal(session, stage)
    with averaged_weights(session):
        target = session.runtime.display_path(_write_on_rank_0(session, stage))
    reporter.events.info("saved", stage=stage.index, step=session.state.step, file=str(target))
    reporter.note(f"{stage.name}: {target}")
    return {"file": str(target)}


def check_saves(session: Session) -> None:
    """Raise a PipelineError if the model has a type of tensors that safetensors cannot write."""
    pipeline, model = session.runtime.loaded.pipeline, model_alone(session.runtime.model)
    for stage in pipeline.stages:
        if not isinstance(stage, SaveStage) and getattr(stage, "keep_best", None) is None:
            continue
        only_trainable = isinstance(stage, SaveStage) and stage.only == "trainable"
        kept = _SavedWeights(model, only_trainable=only_trainable).state_dict()
        for dtype, name in {tensor.dtype: name for name, tensor in kept.items()}.items():
            try:
                serialize({"": torch.empty(1, dtype=dtype)})
            except (SafetensorError, KeyError, ValueError):
                kind = str(dtype).removeprefix("torch.")
                text = f'"{name}" is {kind}, which a safetensors file cannot hold'
                raise session.runtime.loaded.error(stage.path, text, "remove the stage") from None


def _write_on_rank_0(session: Session, stage: SaveStage) -> Path:
    runtime, reporter = session.runtime, session.reporter
    target: Path = runtime.run_dir / runtime.loaded.expand_env_and_folder(f"{stage.path}.to", stage.to)
    if runtime.ranks.rank == 0:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            pipeline = write_weights_and_pipeline(session, target, only_trainable=stage.only == "trainable")
            usual = target.with_suffix(".yaml")
            if pipeline != usual:
                kept, now = runtime.display_path(usual), runtime.display_path(pipeline)
                note = f"{kept} was not written by save and is kept; the pipeline is in {now}"
                reporter.note(f"{stage.name}: {note}")
        except OSError as error:
            problem = f"cannot write {runtime.display_path(target)}: {error.strerror or error}"
            if error.errno in _DISK_ERRNOS:
                raise OutputWriteError(f"{stage.path}: {problem}") from None
            raise runtime.loaded.error(f"{stage.path}.to", problem) from None
    runtime.exchange.control.barrier("rank 0's file")
    return target


def write_weights_and_pipeline(
    session: Session, target: Path, *, only_trainable: bool = False, step: int | None = None
) -> Path:
    """Write the model and its pipeline, each whole or not at all; gives the latter's path; raises OSError."""
    notes = {"format": "pt", "ddprun": __version__} | ({} if step is None else {_STEP: str(step)})
    with _replace_atomically(target) as unfinished:
        try:
            kept = _SavedWeights(model_alone(session.runtime.model), only_trainable=only_trainable)
            with umask_permissions(unfinished):
                save_model(kept, str(unfinished), notes)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None
        sort_metadata(unfinished)
    pipeline = replaceable_pipeline_path(target)
    with _replace_atomically(pipeline) as unfinished:
        unfinished.write_text(PIPELINE_HEADER + session.runtime.loaded.resolved_yaml(), encoding="utf-8")
    return pipeline


def saved_step(folder: Path, name: str) -> int | None:
    """The step in a weights file of `write_weights_and_pipeline`; None: there is no such file, or no step."""
    try:
        with open_file(folder, name) as file, safe_open(f"/dev/fd/{file.fileno()}", "pt") as weights:
            return int((weights.metadata() or {})[_STEP])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


class _SavedWeights(nn.Module):
    """What is saved of a model, by the names that it has without `torch.compile`."""

    def __init__(self, model: nn.Module, *, only_trainable: bool) -> None:
        super().__init__()
        state = model.state_dict(keep_vars=True)
        self._tensors: dict[str, Tensor] = {
            plain_name(name): value.detach()
            for name, value in state.items()
            if isinstance(value, Tensor) and (value.requires_grad or not only_trainable)
        }

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._tensors


def replaceable_pipeline_path(weights: Path) -> Path:
    """Where the pipeline of these weights goes: to a file that is not there, or that save has written."""
    names = itertools.chain(
        [weights.with_suffix(".yaml").name, f"{weights.name}.yaml"],
        (f"{weights.name}.{number}.yaml" for number in itertools.count(2)),
    )
    paths = (weights.with_name(name) for name in names)
    return next(path for path in paths if not os.path.lexists(path) or _is_written_by_save(path))


def _is_written_by_save(path: Path) -> bool:
    try:
        with open_file(path.parent, path.name) as file:
            return file.read(len(PIPELINE_HEADER)) == PIPELINE_HEADER.encode()
    except OSError:  # no regular file, or what cannot be read: somebody else's
        return False


@contextmanager
def _replace_atomically(target: Path) -> Iterator[Path]:
    """A path next to `target` that takes its place when the block ends without an error."""
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)
