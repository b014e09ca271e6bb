"""The save stage: the weights as safetensors, and next to them the pipeline that made them."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from ddprun.checkpoint.codec import write_tensors
from ddprun.config import SaveStage
from ddprun.engine.failures import OutputWriteError
from ddprun.engine.model_with_loss import bare_model
from ddprun.engine.session import Session
from ddprun.engine.stage_run import evaluation_weights, make_buffers_equal
from ddprun.engine.weights import strip_compile_prefix
from ddprun.run_files import open_file, replace_atomically

_STEP = "step"


def run_save_stage(session: Session, stage: SaveStage) -> dict[str, Any]:
    """Write the model's parameters and buffers, or what `only` leaves of them; gives the stage's entry in the
    summary.

    `model.safetensors` brings `model.safetensors.yaml` with it, the resolved pipeline. A relative path is
    relative to the run's folder. Either file is whole or not there. Raises OutputWriteError.
    """
    runtime, reporter = session.runtime, session.reporter
    make_buffers_equal(session, stage)
    with evaluation_weights(session):
        path: Path = runtime.run_dir / runtime.loaded.expand_env_and_folder(f"{stage.path}.to", stage.to)
        target = runtime.display_path(path)
        if runtime.ranks.rank == 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_weights_and_pipeline(session, path, only_trainable=stage.only == "trainable")
            except OSError as error:
                problem = f"cannot write {target}: {error.strerror or error}"
                raise OutputWriteError(f"{stage.path}: {problem}") from None
        runtime.exchange.control.barrier("rank 0's file")
    reporter.events.info("saved", stage=stage.index, step=session.state.step, file=str(target))
    reporter.note(f"{stage.name}: {target}")
    return {"file": str(target)}


def check_saved_dtypes(session: Session) -> None:
    """Raise a PipelineError if the model has a type of tensors that safetensors cannot write."""
    pipeline, model = session.runtime.loaded.pipeline, bare_model(session.runtime.model)
    for stage in pipeline.stages:
        if not isinstance(stage, SaveStage) and getattr(stage, "keep_best", None) is None:
            continue
        only_trainable = isinstance(stage, SaveStage) and stage.only == "trainable"
        kept = _weights_to_save(model, only_trainable=only_trainable)
        for dtype, name in {tensor.dtype: name for name, tensor in kept.items()}.items():
            try:
                serialize({"": torch.empty(1, dtype=dtype)})
            except (SafetensorError, KeyError, ValueError):
                kind = str(dtype).removeprefix("torch.")
                text = f'"{name}" is {kind}, which a safetensors file cannot hold'
                raise session.runtime.loaded.error(stage.path, text, "remove the stage") from None


def write_weights_and_pipeline(
    session: Session, target: Path, *, only_trainable: bool = False, step: int | None = None
) -> None:
    """Write the model and its pipeline, each whole or not at all; raises OSError."""
    kept = _weights_to_save(bare_model(session.runtime.model), only_trainable=only_trainable)
    # Copies: safetensors takes no two views of one storage.
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in kept.items()}
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write_tensors(unfinished, tensors, {"format": "pt"} | ({} if step is None else {_STEP: str(step)}))
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    with replace_atomically(target.parent, f"{target.name}.yaml") as file:
        file.write(session.runtime.loaded.resolved_yaml().encode())


def read_saved_step(folder: Path, name: str) -> int | None:
    """The step in a weights file of `write_weights_and_pipeline`; None: there is no such file, or no step."""
    try:
        with open_file(folder, name) as file, safe_open(f"/dev/fd/{file.fileno()}", "pt") as weights:
            return int((weights.metadata() or {})[_STEP])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _weights_to_save(model: nn.Module, *, only_trainable: bool) -> dict[str, Tensor]:
    """What is saved of a model, by the names that it has without `torch.compile`; of tied ones the first."""
    found: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and (value.requires_grad or not only_trainable):
            own = value.detach()
            tied = own.data_ptr() or name, own.dtype, own.shape, own.stride()
            found.setdefault(tied, (strip_compile_prefix(name), own))
    return dict(found.values())
