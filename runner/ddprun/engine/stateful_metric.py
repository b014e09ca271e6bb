"""Metrics that accumulate over the held-out data: objects with `update(output, target)` and `compute()`.

Each rank updates its own with its samples. At the end ranks gather their states, and each merges them in rank
order and computes the same: so the value depends neither on the batch size nor on the number of ranks.

A metric of torchmetrics says how its states are merged (`add_state`); any other class has
`merge_state(others)`, as those of torcheval do.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ddprun.checkpoint.codec import UnstorableError, decode_state, encode_state
from ddprun.config import PipelineError
from ddprun.engine.data import ErrorFactory
from ddprun.engine.objective import ForwardResult, describe_call
from ddprun_hooks.comm.control_channel import ControlChannel

_TREE_LENGTH_BYTES = 8


class StatefulMetric:
    """A metric of one evaluation, newly made: it keeps state over batches, as those of torchmetrics do."""

    def __init__(self, factory: Callable[[], Any], make_error: ErrorFactory, device: torch.device) -> None:
        self._metric_factory, self._make_error, self._device = factory, make_error, device
        self._metric = self._new_metric()
        self._updated = False
        self.select: Callable[[ForwardResult], ForwardResult] = lambda result: result  # what it is of

    def _new_metric(self) -> Any:
        made = self._metric_factory()
        if _torchmetrics_parts(made) is None and not hasattr(made, "merge_state"):
            raise self._make_error(
                f"{type(made).__name__} has update and compute, but no merge_state",
                "ranks merge what each has accumulated: give it merge_state(others), where others are "
                "objects of its class, or list the metrics of a collection one by one",
            )
        return made.to(self._device) if hasattr(made, "to") else made

    def update(self, result: ForwardResult) -> None:
        """Add a batch, all of whose samples count."""
        try:
            self._metric.update(result.output, result.target)
        except Exception as error:
            add_metric_notes(error, f"{type(self._metric).__name__}.update", result)
            raise
        self._updated = True

    def compute(self, control: ControlChannel) -> float:
        """The value over all ranks' samples, for all of them to call; one at least has been given a batch."""
        metric = self._metric
        if control.size > 1:
            own = self._encode_state() if self._updated else b""
            gathered = control.all_gather_bytes(own, "states of a metric")
            metric = self._merge_states([data for data in gathered if data])
        # Ranks decide by it: what one computes otherwise must not lead it elsewhere.
        return float(control.all_gather([self._compute_number(metric)], "a metric")[0, 0])

    def check_compute(self, ranks: int) -> None:
        """Raise a PipelineError if the value is not a number, and whatever merging states raises. Other
        errors are ignored: there may be too few samples.
        """
        metric = self._metric if ranks == 1 else self._merge_states([self._encode_state()] * 2)
        try:
            self._compute_number(metric)
        except PipelineError:
            raise
        except Exception:  # whatever somebody's metric raises
            return

    def _compute_number(self, metric: Any) -> float:
        for part in _torchmetrics_parts(metric) or ():
            part._to_sync = False  # it would gather by itself, over another process group
        return as_scalar(metric.compute(), "compute", self._make_error)

    def _state(self) -> dict[str, Any]:
        parts = _torchmetrics_parts(self._metric)
        if parts is not None:
            states = ({name: getattr(part, name) for name in part._reductions} for part in parts)
            return {str(index): state for index, state in enumerate(states)}
        own = self._metric
        return {"state": dict(own.state_dict() if hasattr(own, "state_dict") else vars(own))}

    def _encode_state(self) -> bytes:
        """State as bytes, without pickling: the length of its JSON tree, the tree, and its tensors."""
        try:
            encoded = encode_state(self._state())
        except UnstorableError as error:
            allowed = "a state is made of tensors, numbers, text, lists and mappings"
            raise self._make_error(f"a rank's state cannot be sent: {error}", allowed) from None
        tree = json.dumps(encoded.tree).encode()
        return len(tree).to_bytes(_TREE_LENGTH_BYTES, "little") + tree + save(encoded.tensors)

    def _merge_states(self, encoded: Sequence[bytes]) -> Any:
        """A metric with what ranks have accumulated, of their states in rank order."""
        states = [_decode_state(data, self._device) for data in encoded]
        first, *others = (self._new_metric() for _ in states)
        parts = _torchmetrics_parts(first)
        if parts is None:
            for made, state in zip((first, *others), states, strict=True):
                if hasattr(made, "load_state_dict"):
                    made.load_state_dict(state["state"])
                else:
                    vars(made).update(state["state"])
            first.merge_state(others)
            return first
        for index, part in enumerate(parts):
            part._update_count = len(states)
            for name, reduce in part._reductions.items():
                of_ranks = [state[str(index)][name] for state in states]
                listed = isinstance(of_ranks[0], list)
                joined: Any = list(chain(*of_ranks)) if listed else torch.stack(of_ranks)
                keep = reduce is None or (listed and not joined)
                setattr(part, name, joined if keep else reduce(joined))
        return first


def as_scalar(value: Any, source: str, make_error: ErrorFactory) -> float:
    """What a metric returns, which `source` computed."""
    try:
        if not (isinstance(value, Tensor) and value.numel() != 1):
            return float(value)
    except (TypeError, ValueError):
        pass
    given = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    raise make_error(
        f"{source} gives {given}", "expected one number, as torchmetrics gives with average: macro"
    )


def add_metric_notes(error: Exception, name: str, result: ForwardResult) -> None:
    """Have an error say what the metric was called with, and which parts it could have instead."""
    error.add_note(f"the metric was called as {describe_call(name, (result.output, result.target))}")
    if not isinstance(result.output, Tensor):
        hint = "write output: … and target: … beside the metric if it takes parts of these"
        for what, held in (("output", result.output), ("target", result.target)):
            hint += f"; {what} can be {', '.join(map(str, held))}" if isinstance(held, Mapping) else ""
        error.add_note(hint)


def _torchmetrics_parts(metric: Any) -> list[Any] | None:
    """A metric of torchmetrics and those inside it, each with states of its own; None for another class."""
    if not hasattr(metric, "_reductions"):
        return None
    return [part for part in metric.modules() if hasattr(part, "_reductions")]


def _decode_state(data: bytes, device: torch.device) -> dict[str, Any]:
    """The state of `_encode_state`."""
    end = _TREE_LENGTH_BYTES + int.from_bytes(data[:_TREE_LENGTH_BYTES], "little")
    tensors = {name: tensor.to(device) for name, tensor in load(data[end:]).items()}
    return decode_state(json.loads(data[_TREE_LENGTH_BYTES:end]), tensors)
