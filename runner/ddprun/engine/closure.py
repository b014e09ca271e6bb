"""The closure of a step, for optimizers that call for loss and gradients again, as SAM and LBFGS do."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ddprun.engine import seeding
from ddprun.engine.objective import zero_gradients_in_backward
from ddprun.engine.stage_run import StageRun
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.audit import checksums
from ddprun_hooks.comm.trace import BucketTrace


class StepClosure:
    """Repeats a step's forward and backward passes, exchange included, for the weights as they are now.

    The step's own passes come first, as in any other step; a call before anything has changed is answered by
    them. Each later call starts from the hooks' state before the step and the random numbers of each pass,
    and clips as the step does. Its loss is the mean over ranks, so that all decide alike.
    """

    def __init__(self, run: StageRun, replica: DdpReplica, clip: Callable[[], object]) -> None:
        self._run, self._replica, self._clip = run, replica, clip
        self._passes = list[tuple[Any, float, seeding.RepeatableRng]]()
        self._fixed_rng: seeding.RepeatableRng
        self._loss = 0.0
        self._state: list[int] = []

    def begin_pass(self) -> None:
        """A micro-batch's forward pass comes next."""
        self._fixed_rng = seeding.RepeatableRng(self._run.session.runtime.device)

    def add_pass(self, content: Any, weight: float, weighted_loss: Tensor) -> None:
        """Note a micro-batch of the step, on the device, whose passes are done."""
        self._passes.append((content, weight, self._fixed_rng))
        self._loss += float(weighted_loss.detach()) if weight else 0.0

    def begin_optimizer_step(self) -> None:
        """The optimizer is about to step, by the gradients that there are."""
        self._loss, self._state = self._mean_over_ranks(self._loss), self._checksum_weights()

    def __call__(self) -> Tensor:
        runtime = self._run.session.runtime
        if self._state != self._checksum_weights():
            runtime.optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                self._loss = self._mean_over_ranks(self._repeat_passes())
            self._clip()
            self._state = self._checksum_weights()
        return torch.tensor(self._loss, dtype=torch.float64, device=runtime.device)

    def _checksum_weights(self) -> list[int]:
        """Of weights and gradients: code that changes `param.data` leaves no other trace."""
        params = list(self._run.session.runtime.model.parameters())
        return checksums([*params, *(torch.zeros(()) if one.grad is None else one.grad for one in params)])

    def _repeat_passes(self) -> float:
        runtime, replica, total = self._run.session.runtime, self._replica, 0.0
        traces = list[BucketTrace[Any]]()
        replica.dispatcher.restart_step()
        runtime.buffers.sync_before_forward()
        for index, (content, weight, fixed_rng) in enumerate(self._passes, start=1):
            last = index == len(self._passes)
            with replica.accumulating(not last), fixed_rng():
                weighted = runtime.objective(replica.ddp, content).loss * weight
                with nullcontext() if weight else zero_gradients_in_backward(runtime.model):
                    missing = replica.backward(weighted, traces, exchange=last)
                if missing:
                    where = f"the loss of rank {runtime.ranks.rank} in a call of the closure"
                    raise runtime.objective.unused_parameters_error(missing, where)
            total += float(weighted.detach()) if weight else 0.0
        runtime.recorder.non_backward_exchanges.sent += traces
        runtime.recorder.non_backward_exchanges.completed += traces
        return total

    def _mean_over_ranks(self, loss: float) -> float:
        control = self._run.session.runtime.exchange.control
        return float(control.all_gather([loss], "the loss of a closure").mean())
