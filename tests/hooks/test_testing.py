"""`ddprun_hooks.testing`: hooks that keep every promise pass, and one that breaks any is told which."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks import Communicator, Hook, Payload
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.config import grammar
from ddprun_hooks.config.options import BUILT_IN_HOOKS, HookSpec, parse_hook_spec
from ddprun_hooks.testing import NUMEL, check_hooks


class Half(ErrorFeedback):
    """Sends the larger half of its values and keeps the rest; right in every way."""

    role = "reducer"
    rounds = 1

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        residual = self.residual(payload, comm.size)
        residual += payload.tensor
        sent = self.sent(residual)
        self.keep(residual, sent)
        return payload.tensor.copy_(await comm.all_reduce(sent.to(payload.tensor.dtype)))

    def sent(self, residual: Tensor) -> Tensor:
        return torch.where(residual.abs() >= residual.abs().median(), residual, 0.0)

    def keep(self, residual: Tensor, sent: Tensor) -> None:
        residual -= sent


class Forgetful(Half):
    """Keeps only nine tenths of what it does not send."""

    def keep(self, residual: Tensor, sent: Tensor) -> None:
        residual -= sent
        residual *= 0.9


class Flat(Hook):
    """Keeps residuals in a format of its own; right in every way."""

    role = "reducer"
    keeps = 1.0

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.of_all: dict[str, Tensor] = {}  # of a merged state, each rank's part to be taken

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        for param in payload.params:
            values = param.of(payload.tensor)
            values += self.own.get(param.name, 0.0)
            values += self.of_all.pop(param.name, 0.0) / comm.size
            sent = torch.where(values.abs() >= values.abs().median(), values, 0.0)
            self.own[param.name] = (values - sent) * self.keeps
            values.copy_(sent)
        return await comm.all_reduce(payload.tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"own": dict(self.own), "of_all": dict(self.of_all)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own, self.of_all = dict(state["own"]), dict(state["of_all"])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "own": {},
            "of_all": {name: sum(one["own"][name] for one in states) for name in states[0]["own"]},
        }

    def take_back(self, kind: str, means: dict[str, Tensor]) -> None:
        for name in self.own.keys() & means.keys():
            self.own[name] = self.own[name] + means.pop(name) / 3

    def residual_square(self, kind: str, names: Sequence[str]) -> float:
        kept = [*self.own.values(), *self.of_all.values()]
        return sum(float(one.double().square().sum()) for one in kept)


class Leaky(Flat):
    """Loses a little of them."""

    keeps = 1 - 1e-5


class Listed(Half):
    """Keeps tensors in a list, too; right in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.means = [torch.zeros(2), torch.zeros(2)]  # the first two values of the newest

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        mean = await super().__call__(payload, comm)
        self.means = [self.means[1], mean[:2].clone()]
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": super().state_dict(), "means": [*self.means]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["residuals"])
        self.means = [*state["means"]]

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        residuals = super().merge([state["residuals"] for state in states])
        return {"residuals": residuals, "means": states[0]["means"]}


class Nothing(Half):
    """Sends everything, so that its residuals are zeros."""

    def sent(self, residual: Tensor) -> Tensor:
        return residual.clone()


class Apart(Half):
    """Adds something of its own on one rank."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return (await super().__call__(payload, comm)).add_(1e-3 * comm.rank)


class Newborn(Half):
    """Does not bring its state back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({})


class Stubborn(Half):
    """Brings its state back only before its first step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.state_dict():
            super().load_state_dict(state)


class Live(Flat):
    """Gives the very dictionary that it goes on with, not a copy."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "of_all": self.of_all}


class Wasteful(Half):
    """Keeps nothing of what it has sent and nobody uses."""

    def take_back(self, kind: str, means: dict[str, Tensor]) -> None:
        means.clear()


class Off(Hook):
    """Gives a little more than the mean, and has no error feedback."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return (await comm.reduce(payload.tensor)) * 1.01


@pytest.mark.parametrize(
    "hooks",
    [
        [],
        "int8",
        [{"powersgd": {"rank": 2}}, "int8"],
        {"topk": {"density": 0.3}},
        Half,
        Flat,
        Listed,
        Nothing,
        ["shared_memory"],
    ],
    ids=str,
)
def test_what_keeps_its_promises_passes(hooks: Any) -> None:
    check_hooks(hooks)


def test_two_hosts() -> None:
    check_hooks({"hierarchical": {"across": ["int8"]}}, ranks=4, hosts=["a", "a", "b", "b"])


SHIPPED: list[HookSpec] = [
    *(name for name in BUILT_IN_HOOKS if name not in ("noop", "powersgd", "topk")),
    {"powersgd": {"rank": 1}},
    {"topk": {"density": 0.1}},
    {"topk": {"density": 0.1, "values": "int2"}},
    {"fp16": {"accumulate": "fp32"}},
    {"bf16": {"accumulate": "fp32"}},
]


def _across(spec: HookSpec) -> HookSpec:
    return {"hierarchical": {"across": [spec]}}


STACKS: list[list[HookSpec]] = [
    *([one] for one in SHIPPED),
    *([one, other] for one, other in itertools.product(SHIPPED, SHIPPED)),
    *([_across(one)] for one in SHIPPED),
]


@pytest.mark.parametrize(
    "hooks",
    [
        stack
        for stack in STACKS
        if not grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(spec)) for spec in stack])
    ],
    ids=str,
)
def test_every_stack_of_one_or_two_shipped_hooks_passes(hooks: Any) -> None:
    """With no `relative_error`: what a cast in 16 bits rounds off is known. `noop` gives no mean."""
    check_hooks(hooks, ranks=2, hosts=["a", "b"] if "hierarchical" in str(hooks) else ())


def test_relative_error_holds_for_every_stack() -> None:
    """Of a stack that keeps residuals, too."""
    stack: list[HookSpec] = [{"powersgd": {"rank": 1}}, "fp16"]
    with pytest.raises(AssertionError, match="is lost, allowed 1e-05"):
        check_hooks(stack, ranks=2, relative_error=1e-5)
    check_hooks(stack, ranks=2, relative_error=1e-3)
    check_hooks(Off, relative_error=0.02)


class Dtypes(Hook):
    """Refuses everything but fp32."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        assert payload.tensor.dtype == torch.float32
        return await comm.reduce(payload.tensor)


def test_payloads_are_fp32() -> None:
    check_hooks(Dtypes)


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (Leaky, "do not add up to what came in"),
        (Forgetful, "do not add up to what came in"),
        (Wasteful, "do not add up to what came in"),
        (Apart, "rank 1 and rank 0 got different bits"),
        (Newborn, "resumes from a loaded state with different bits"),
        (Stubborn, "rolled back has changed the state"),
        (Live, "resumes from a loaded state with different bits"),
        (Off, "away from the mean"),
    ],
)
def test_a_broken_promise_is_named(hook: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_hooks(hook)


class Raising(Hook):
    """Raises on rank 1, for which the others wait."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        if comm.rank == 1:
            raise LookupError("only here")
        return await comm.reduce(payload.tensor)


def test_what_one_rank_raises_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it hidden behind the ranks that hang because of it."""
    monkeypatch.setattr("ddprun_hooks.testing.TIMEOUT_S", 8)
    begin = time.monotonic()
    with pytest.raises(LookupError, match="only here"):
        check_hooks(Raising)
    assert time.monotonic() - begin < 4


class Gathering(Hook):
    """Gathers a number and a matrix, whose number of elements it says as well as it can."""

    role = "reducer"
    rounds = 2

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        self.sizes = sizes

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        numbers = await comm.all_gather(payload.tensor.new_tensor(1.0))
        assert numbers.tolist() == [1.0] * comm.size
        matrices = await comm.all_gather(payload.tensor.view(-1, 31), self.sizes)
        return matrices.view(comm.size, -1).sum(0)


def test_all_gather_takes_tensors_of_any_shape_flat() -> None:
    for sizes in (None, [NUMEL, NUMEL]):
        check_hooks(Gathering(sizes), ranks=2)


def test_all_gather_refuses_a_tensor_that_is_not_of_its_size() -> None:
    """Or ranks would wait for more than is sent."""
    with pytest.raises(ValueError, match=rf"sizes\[1\] is {NUMEL + 1}, .* rank 1 has {NUMEL} elements"):
        check_hooks(Gathering([NUMEL, NUMEL + 1]), ranks=2)


def test_hook_objects_are_copied_for_each_rank() -> None:
    """One object on three threads would keep three ranks' residuals in one place."""
    hook = Half()
    check_hooks(hook)
    assert not hook.state_dict()
