"""Parameters that are not trained: ranks hold the same from the start, so they are compared, not sent."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ddprun.sync.audit import checksums, gather_checksums, odd_ranks
from ddprun.sync.exchanger import ParameterExchanger, can_be_averaged, restore_values_on_exit


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name, in the model's order."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class FrozenParameters:
    """The parameters that are not trained in the run, or in a stage that freezes more of them.

    All ranks hold those of rank 0, and nothing is sent while that stays so. Something may change them all
    the same: a forward pass, `mutate`, `update`, or code of the user's that trains them after all. Where
    ranks synchronise they compare checksums of the values. Those that differ are made equal as they are,
    without hooks, and `report` gets the names of those that have not differed before.
    """

    def __init__(
        self, model: nn.Module, exchanger: ParameterExchanger, report: Callable[[Sequence[str]], None]
    ) -> None:
        self._everything: dict[str, Tensor] = dict(model.named_parameters())
        self.train(trainable_parameters(model))
        self._exchanger, self._control, self._report = exchanger, exchanger.exchange.control, report
        self.noted_checksums: Sequence[int] = ()  # of this rank's values, which ranks have yet to compare
        self._reported: set[str] = set()

    def train(self, names: Container[str]) -> None:
        """From here on these are trained, and all others frozen."""
        held = self._everything.items()
        self.trainable = {name: param for name, param in held if name in names}  # which ranks exchange
        self.parameters = {name: param for name, param in held if name not in names}

    def note_checksums(self) -> None:
        """Ranks begin to synchronise: `equalize_if_different` compares the values of now."""
        if self.parameters and self._control.size > 1:
            self.noted_checksums = checksums(self.parameters.values())

    def equalize_if_different(self, source: int | None = None) -> None:
        """If the noted checksums differ: parameters that differ now become those of rank `source`, or their
        mean. Numbers without a mean (quantised weights) are never averaged.
        """
        noted, self.noted_checksums = [*map(float, self.noted_checksums)], ()
        if noted:
            found = self._control.all_gather(noted, "checksums of the frozen parameters")
            if (found != found[0]).any():
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
        flags = zip(self.parameters.items(), odd_ranks(found).any(0), strict=True)
        differing = {name: param for (name, param), differs in flags if differs}
        if new := [name for name in differing if name not in self._reported]:
            self._reported.update(new)
            self._report(new)
        return differing
