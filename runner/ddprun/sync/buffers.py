"""What ranks compare or send besides trained parameters: buffers, and parameters that are frozen.

Buffers (BatchNorm's running statistics and the like): what changes, what is read, when it is sent. Frozen
parameters are not trained: ranks hold the same from the start, so they are compared, not sent.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddprun.sync.audit import checksums, differs_from_majority, gather_checksums
from ddprun.sync.exchanger import TensorExchanger, can_be_averaged, restore_values_on_exit
from ddprun.sync.plan import BufferPlan, BufferSettings
from ddprun.units import abbreviated_list
from ddprun_hooks.comm.control_channel import ControlChannel


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What a model's buffers do, found by their values around training forward passes and by their layers."""

    changing: tuple[str, ...] = ()  # those that a training forward pass changes, counters aside
    constant: tuple[str, ...] = ()  # those that it leaves as they are
    counters: tuple[str, ...] = ()  # of one element: every rank counts the same, so they are not sent
    read_in_training: bool = False  # a training pass may depend on `changing`
    changing_bytes: int = 0  # size of the changing ones

    @classmethod
    def from_changes(cls, named: Mapping[str, Tensor], changing: Collection[str], *, read: bool) -> Self:
        """Of these buffers, `changing` change, but for counters."""
        counters = tuple(name for name, buffer in named.items() if is_counter_buffer(buffer))
        changing = tuple(name for name in named if name in changing and name not in counters)
        constant = tuple(name for name in named if name not in changing and name not in counters)
        return cls(changing, constant, counters, read, sum(named[name].nbytes for name in changing))

    def plan(
        self, setting: BufferSettings, names: Iterable[str], *, gradients_everywhere: bool
    ) -> BufferPlan:
        """When a stage sends which of the model's buffers, which have these names."""
        sent = tuple(name for name in names if name not in self.counters)
        return BufferPlan(setting, sent, self.changing, self.read_in_training, gradients_everywhere)

    def describe(self) -> str:
        """How many change in training, and whether training may read them."""
        total = len(self.changing) + len(self.constant) + len(self.counters)
        if not total:
            return "the model has no buffers"
        if not self.changing:
            return f"none of {total} buffers changes in a training pass"
        facts = f"{abbreviated_list(self.changing, 2)}, {self.changing_bytes} bytes"
        change = f"{len(self.changing)} of {total} buffers change in training ({facts})"
        return f"{change}, and training {'may read' if self.read_in_training else 'never reads'} them"


def is_counter_buffer(buffer: Tensor) -> bool:
    """A whole number that counts something, such as BatchNorm's batches."""
    return buffer.numel() == 1 and not can_be_averaged(buffer)


def norm_buffer_names(modules: Iterable[tuple[str, nn.Module]]) -> set[str]:
    """The buffers of torch's own batch and instance norm layers, which write them in training, and read them
    in evaluation mode alone.
    """
    return {
        name
        for prefix, module in modules
        if isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.modules.")
        for name, _ in module.named_buffers(prefix, recurse=False)
    }


def clone_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def load_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, by name; none that is missing, or has another shape by now."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if _same_shape(value := values.get(name), buffer):
                buffer.copy_(value)


def probe_buffer_use(
    model: nn.Module, forward: Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
) -> BufferUse:
    """Find out by value what training forward passes do with the buffers.

    `forward` is a pass in training mode that leaves no trace, on one batch with the same random numbers: from
    buffers that have other values, by name, to the loss and the buffers after it. That two losses are equal
    proves little (a second pass leaves a moving minimum as it is), so it counts for norm buffers alone.
    """
    before = clone_buffers(model)
    first, after = forward({})
    changing = [
        name
        for name, buffer in before.items()
        if not is_counter_buffer(buffer)
        and _same_shape(now := after.get(name), buffer)  # no cache that a pass has made longer
        and not _bitwise_equal(buffer, now)
    ]
    second, _ = forward(after)  # whatever changed here: a model may call collectives
    unread = norm_buffer_names(model.named_modules()).issuperset(changing) and _bitwise_equal(second, first)
    return BufferUse.from_changes(before, changing, read=bool(changing) and not unread)


def merge_buffer_use(found: BufferUse, model: nn.Module, control: ControlChannel) -> BufferUse:
    """The buffer use merged over all ranks: a buffer that changes on one rank counts as changing."""
    named = dict(model.named_buffers())
    if not named:
        return found
    flags = [float(found.read_in_training), *(float(name in found.changing) for name in named)]
    read, *changes = control.all_gather(flags, "what buffers do").any(0).tolist()
    changing = [name for name, changes_here in zip(named, changes, strict=True) if changes_here]
    return BufferUse.from_changes(named, changing, read=bool(read))


def split_averaged_and_broadcast(
    named: Mapping[str, Tensor], setting: BufferSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers that are averaged, and those that rank 0 broadcasts; whole numbers are never averaged."""
    averaged = {n: b for n, b in named.items() if setting.reduce == "mean" and can_be_averaged(b)}
    return averaged, {name: buffer for name, buffer in named.items() if name not in averaged}


class BufferSync:
    """Sends buffers when the setting says so; all ranks hold the same ones now."""

    def __init__(
        self, model: nn.Module, exchanger: TensorExchanger, use: BufferUse, setting: BufferSettings
    ) -> None:
        self.use = use
        self._model, self._exchanger = model, exchanger
        self._common_values = clone_buffers(model)
        self.begin_stage(setting, gradients_everywhere=True)

    @property
    def _current_buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, by name; of one that has another shape, the last values in common."""
        now = dict(self._model.named_buffers())
        return {
            name: buffer if _same_shape(buffer := now.get(name), common) else common
            for name, common in self._common_values.items()
        }

    def begin_stage(self, setting: BufferSettings, *, gradients_everywhere: bool) -> None:
        self.plan = self.use.plan(setting, self._current_buffers, gradients_everywhere=gradients_everywhere)

    def sync_before_forward(self) -> bool:
        """Send, if forward passes want the same buffers on all ranks; whether it was done. As under DDP, this
        comes before the first pass of a step, of a turn, and of a call of a closure.
        """
        return self.average_or_broadcast(self.plan.names_before_forward())

    def buffers_not_synchronized(self) -> dict[str, Tensor]:
        """Those that `auto` does not send in a stage's steps, although a forward pass may read them: the same
        names on all ranks. Running statistics that a layer only writes, in training mode, count as equal.
        """
        if self.plan.setting.when != "auto":
            return {}
        written = norm_buffer_names(named for named in self._model.named_modules() if named[1].training)
        sent = self.plan.changing if self.plan.read_in_training else ()
        held = self._current_buffers | {name: self._common_values[name] for name in written}
        return {name: held[name] for name in self.plan.names if name not in sent}

    def equalize_before_evaluate_or_save(self) -> tuple[str, ...]:
        """Make all ranks' buffers equal, unless the setting is `never`: an evaluate or a save stage comes.

        Only what has changed on some rank since ranks were last equal is sent. Gives the names of those;
        under `never`, of those that differ from what they were.
        """
        named, common = self._current_buffers, self._common_values
        if not named:
            return ()
        averageable = torch.tensor([can_be_averaged(buffer) for buffer in named.values()])
        digests = zip(averageable, checksums(named.values()), checksums(common.values()), strict=True)
        said = [float(now != before if averaged else now) for averaged, now, before in digests]
        found = self._exchanger.exchange.control.all_gather(said, "digests of the buffers")
        flags = torch.where(averageable, found != 0, found != found[0]).any(0)  # of (ranks, buffers)
        wanted = [name for name, flag in zip(named, flags, strict=True) if flag]
        if self.plan.setting.when != "never":
            self.average_or_broadcast(wanted)
            self._common_values = {name: one.detach().clone() for name, one in self._current_buffers.items()}
        return tuple(wanted)

    @contextmanager
    def temporarily_equal(self) -> Iterator[tuple[str, ...]]:
        """Inside, buffers are as before an evaluate stage; then each rank has its own again, bit for bit.
        Gives the same names as `equalize_before_evaluate_or_save`.
        """
        own, common_values = clone_buffers(self._model), self._common_values
        try:
            yield self.equalize_before_evaluate_or_save()
        finally:
            self._common_values = common_values
            load_buffers(self._model, own)

    def state_dict(self) -> dict[str, Tensor]:
        """Values that all ranks had in common last."""
        return dict(self._common_values)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, value in self._common_values.items():
            value.copy_(state[name])

    def average_or_broadcast(self, names: Sequence[str]) -> bool:
        """Make these equal; whether there are any."""
        if not names:
            return False
        held = self._current_buffers
        named = {name: held[name] for name in names}
        averaged, broadcast = split_averaged_and_broadcast(named, self.plan.setting)
        self._exchanger.equalize(averaged, "buffers")
        self._exchanger.equalize(broadcast, "buffers", source=0)
        return True


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name, in the model's order."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class FrozenParameterSync:
    """The parameters that are not trained in the run, or in a stage that freezes more of them.

    All ranks hold those of rank 0, and nothing is sent while that stays so. Something may change them all
    the same: a forward pass, `mutate`, `update`, or code of the user's that trains them after all. Where
    ranks synchronise they compare checksums of the values. Those that differ are made equal as they are,
    without hooks, and `report` gets the names of those that have not differed before.
    """

    def __init__(
        self, model: nn.Module, exchanger: TensorExchanger, report: Callable[[Sequence[str]], None]
    ) -> None:
        self._everything: dict[str, Tensor] = dict(model.named_parameters())
        self.set_trained_names(trainable_parameters(model))
        self._exchanger, self._control, self._report = exchanger, exchanger.exchange.control, report
        self._reported: set[str] = set()

    def set_trained_names(self, names: Container[str]) -> None:
        """From here on these are trained, and all others frozen."""
        held = self._everything.items()
        self.trainable = {name: param for name, param in held if name in names}  # which ranks exchange
        self.parameters = {name: param for name, param in held if name not in names}

    def equalize_differing(self, source: int | None = None) -> None:
        """Parameters that differ between ranks become those of rank `source`, or their mean. Numbers without
        a mean (quantised weights) are never averaged.
        """
        self._equalize(self.find_and_report_differing(), source)

    @contextmanager
    def temporarily_equal(self) -> Iterator[None]:
        """Inside, values that differ are their mean; then each rank has its own again, bit for bit."""
        differing = self.find_and_report_differing()
        with restore_values_on_exit(differing.values()):
            self._equalize(differing)
            yield

    def _equalize(self, named: Mapping[str, Tensor], source: int | None = None) -> None:
        if source is None:
            named = {name: param for name, param in named.items() if can_be_averaged(param)}
        self._exchanger.equalize(named, "parameters", source)

    def find_and_report_differing(self) -> dict[str, Tensor]:
        """Those of which not all ranks hold the same bits, by name; called by all ranks together."""
        if not self.parameters or self._control.size == 1:
            return {}
        found = gather_checksums(self.parameters, self._control, "checksums of the frozen parameters")
        flags = zip(self.parameters.items(), differs_from_majority(found).any(0), strict=True)
        differing = {name: param for (name, param), differs in flags if differs}
        if new := [name for name in differing if name not in self._reported]:
            self._reported.update(new)
            self._report(new)
        return differing


def _same_shape(one: Tensor | None, other: Tensor) -> TypeGuard[Tensor]:
    return one is not None and one.shape == other.shape


def _bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: a NaN is the same as itself."""
    first, second = checksums([one, other])
    return first == second
