"""Run hooks on several ranks in one process, and check what every hook must guarantee.

```python
from ddprun_hooks.testing import check_hooks

def test_my_hook():
    check_hooks({"mylab.hooks.Mine": {"strength": 2}}, ranks=3)
```

Ranks are threads, each with its own Gloo process groups over loopback: three of them take 30 ms to start.
Tensors are in host memory.
"""

import copy
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.builtin.cast import Cast
from ddprun_hooks.comm.groups import (
    GroupFactory,
    GroupRequirement,
    GroupRequirements,
    RankGroup,
    RankPlacement,
)
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_queue import HostCommQueue
from ddprun_hooks.payload import ParamSlice, Payload, PayloadKind
from ddprun_hooks.registry import AnyHook, make_stack
from ddprun_hooks.stack import Stack

TIMEOUT_S = 60
_DRAIN_STEPS = 48

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (40, 30),
    "first.bias": (40,),
    "scale": (),
    "conv.weight": (12, 4, 3, 3),
    "last.weight": (7, 40),
}
"""Parameters of the payloads here: matrices, vectors, one number, a convolution."""


def bucket_slices(names: Sequence[str] = tuple(SHAPES)) -> tuple[ParamSlice, ...]:
    """Parameters of `SHAPES` one after the other, as they lie in a bucket."""
    named_tensors = ((name, torch.empty(SHAPES[name], device="meta")) for name in names)
    return BucketLayout.from_tensors(0, torch.float32, named_tensors).params


PARAMS = bucket_slices()
NUMEL = sum(param.numel for param in PARAMS)


def contribution(rank: int, step: int, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's share of a mean: random, fixed by rank and step, and divided by `ranks`; shape (NUMEL,)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    values = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
    return (values / ranks).to(dtype)


def exact_mean(step: int, ranks: int) -> Tensor:
    """The sum of all ranks' shares: shape (NUMEL,), float64."""
    return torch.stack([contribution(rank, step, ranks, torch.float64) for rank in range(ranks)]).sum(0)


class Rank:
    """One of the ranks that run on threads of this process, with a stack of its own."""

    def __init__(self, group: RankGroup, stack: Stack) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.size
        self.stack = stack
        self.traces: list[BucketTrace[int]] = []  # what has been sent
        self._queue = HostCommQueue(group)

    def send(
        self,
        tensor: Tensor,
        params: tuple[ParamSlice, ...] = PARAMS,
        bucket: int = 0,
        kind: PayloadKind = "gradient",
    ) -> Tensor:
        """Reduce one payload over the ranks by the stack; gives the mean.

        `tensor` is this rank's share of the mean, shape (numel,), and stays as it is.
        """
        payload = Payload(tensor.clone(), params, kind, bucket)
        future = self._queue.send(payload, self.stack, self.traces)
        try:
            return future.wait().clone()
        except RuntimeError:
            if self._queue.error is None:
                raise
            raise self._queue.error from None  # as it was raised; a future may have no more than its text

    @property
    def residual_norm(self) -> float:
        """2-norm of what this rank has not sent yet of gradients."""
        return self.stack.residual_norm("gradient", list(SHAPES))

    def step(self, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Reduce this rank's `contribution` to a step."""
        return self.send(contribution(self.rank, step, self.world_size, dtype))


def run_hooks(
    hooks: AnyHook | Sequence[AnyHook], ranks: int, body: Callable[[Rank], Any], hosts: Sequence[str] = ()
) -> list[Any]:
    """Run `body` on each rank, with its own stack; returns what the ranks return, in rank order.

    Args:
        hooks: as `ddprun_hooks.register` takes them; each rank gets copies of hook objects.
        ranks: the number of ranks.
        body: what each rank runs.
        hosts: the name of each rank's host; by default, all ranks are on one host.
    """
    return run_ranks(
        ranks,
        lambda group: body(Rank(group, make_stack(copy.deepcopy(hooks)))),
        requirements=make_stack(copy.deepcopy(hooks)).requirements,
        hosts=hosts,
    )


def check_hooks(
    hooks: AnyHook | Sequence[AnyHook],
    *,
    ranks: int = 3,
    hosts: Sequence[str] = (),
    relative_error: float | None = None,
) -> None:
    """Check that a hook, or a stack of hooks, has the properties that every hook must have.

    - All ranks get the same bits.
    - Nothing is lost, up to `relative_error`. A hook that keeps residuals (`Hook.residual_square`) has sent
      all its inputs after further steps with zeros have emptied the residuals, even if no rank used a
      parameter's mean. A hook without error feedback returns the mean.
    - After a state is saved and loaded, the hook gives the same bits. The merged states of all ranks lose
      nothing with different buckets.
    - A step that is rolled back leaves no trace in the state.
    - The hook issues no more collectives than its `rounds` allow (the queue itself enforces this).

    Payloads are in float32, as gradients are.

    Args:
        hooks: as `ddprun_hooks.register` takes them.
        ranks: the number of ranks.
        hosts: the name of each rank's host; by default, all ranks are on one host.
        relative_error: the largest |lost| / |mean| that is allowed; None: the rounding error of
            float32 (1e-6), or of the stack's coarsest cast that sums in 16 bits (`torch.finfo(...).eps`).

    Raises:
        AssertionError: says which property does not hold.
        Exception: what the hook has raised.
    """
    steps, unused, unused_in = 4, PARAMS[0], 1
    stack = make_stack(copy.deepcopy(hooks))
    casts = [hook.dtype for _, hook in stack.named_hooks() if isinstance(hook, Cast)]
    if relative_error is None:
        relative_error = max([1e-6, *(torch.finfo(dtype).eps for dtype in casts)])

    def unbroken(rank: Rank) -> list[tuple[Tensor, dict[str, Any], float]]:
        run = []
        for step in range(steps):
            result = rank.step(step)
            if step == unused_in:
                rank.stack.take_back("gradient", {unused.name: unused.of(result)})
            run.append((result, rank.stack.state_dict(), rank.residual_norm))
        return run

    runs: list[list[tuple[Tensor, dict[str, Any], float]]] = run_hooks(hooks, ranks, unbroken, hosts)
    keeps_residuals = any(norm for run in runs for _, _, norm in run)
    came_in = torch.zeros(NUMEL, dtype=torch.float64)
    came_out = torch.zeros_like(came_in)
    for step in range(steps):
        result = runs[0][step][0]
        for rank, run in enumerate(runs):
            assert torch.equal(run[step][0], result), (
                f"rank {rank} and rank 0 got different bits in step {step}"
            )
        assert torch.isfinite(result).all(), f"step {step} gave values that are not finite"
        assert result.abs().sum() > 0, f"step {step} gave only zeros"
        mean = exact_mean(step, ranks)
        came_in += mean
        came_out += result
        if step == unused_in:
            unused.of(came_out).sub_(unused.of(result))
        if not keeps_residuals:
            error = float((result - mean).norm() / mean.norm())
            assert error <= relative_error, (
                f"step {step}: {error:.3g} away from the mean, allowed {relative_error:.3g}"
            )

    def resumed(rank: Rank) -> list[Tensor]:
        rank.stack.load_state_dict(runs[rank.rank][1][1])
        return [rank.step(step) for step in (2, 3)]

    for rank, results in enumerate(run_hooks(hooks, ranks, resumed, hosts)):
        for step, result in zip((2, 3), results, strict=True):
            same = torch.equal(result, runs[rank][step][0])
            assert same, f"rank {rank} resumes from a loaded state with different bits in step {step}"

    if keeps_residuals:
        states, kept = [run[-1][1] for run in runs], came_in - came_out
        merged = stack.merge(states)
        halves = [bucket_slices(list(SHAPES)[:3]), bucket_slices(list(SHAPES)[3:])]
        for what, begin, buckets in (
            ("results and residuals do not add up to what came in", states, [PARAMS]),
            ("other buckets lose residuals", [merged] * ranks, halves),
        ):
            came, left = _drain_residuals(hooks, hosts, begin, buckets)
            lost = (float((came - kept).norm()) - left) / float(came_in.norm())
            assert lost <= relative_error, f"{what}: {lost:.2g} is lost, allowed {relative_error:.2g}"

    def rolled_back(rank: Rank) -> None:
        rank.step(0)
        before = copy.deepcopy(rank.stack.state_dict())
        rank.stack.begin_step()
        rank.step(1)
        rank.stack.rollback()
        assert _states_equal(rank.stack.state_dict(), before), (
            "a step that was rolled back has changed the state"
        )

    run_hooks(hooks, ranks, rolled_back, hosts)


def _drain_residuals(
    hooks: AnyHook | Sequence[AnyHook],
    hosts: Sequence[str],
    states: Sequence[dict[str, Any]],
    buckets: Sequence[tuple[ParamSlice, ...]],
) -> tuple[Tensor, float]:
    """Send zeros in these buckets, from each rank's state on, until nearly nothing is left; gives the sum of
    what came out, shape (NUMEL,), and the sum over ranks of the norms of what is left.
    """

    def send_zeros(rank: Rank) -> tuple[Tensor, float]:
        rank.stack.load_state_dict(states[rank.rank])
        came = torch.zeros(NUMEL, dtype=torch.float64)
        for _ in range(_DRAIN_STEPS):
            sent = list[Tensor]()
            for index, params in enumerate(buckets):
                zeros = torch.zeros(sum(param.numel for param in params))
                sent.append(rank.send(zeros, params, index))
            came += torch.cat(sent)
        return came, rank.residual_norm

    results: list[tuple[Tensor, float]] = run_hooks(hooks, len(states), send_zeros, hosts)
    return results[0][0], sum(norm for _, norm in results)


def _states_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_states_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_states_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


# A process group must not be freed by a thread of its own, which would then wait for itself and abort: groups
# stay here until nothing else, such as a callback that is just being forgotten, refers to them.
_groups_to_free: list[dist.ProcessGroup | None] = []
_UNREFERENCED_COUNT = 2  # references: the list, and the argument of `getrefcount`


def run_ranks(
    size: int,
    body: Callable[[RankGroup], Any],
    *,
    requirements: GroupRequirements | int = 1,
    hosts: Sequence[str] = (),
) -> list[Any]:
    """Run `body(group)` on `size` threads, each a rank with Gloo groups of its own; gives what they return.

    `requirements` says which groups to make; a number: so many rounds among all ranks. `hosts` is as in
    `run_hooks`.
    """
    needed = {GroupRequirement("world"): requirements} if isinstance(requirements, int) else requirements
    _free_groups()
    store = dist.HashStore()
    names = tuple(hosts or ["here"] * size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    process_groups: list[dist.ProcessGroup] = []

    def run(rank: int) -> None:
        placement = RankPlacement(rank, names, tuple(names.count(name) for name in names))
        calls = itertools.count()

        def make_process_group(name: str, ranks: list[int]) -> Any:
            if rank not in ranks:
                return None
            prefix = dist.PrefixStore(name, store)
            timeout = timedelta(seconds=TIMEOUT_S)
            group: Any = dist.ProcessGroupGloo(prefix, ranks.index(rank), len(ranks), timeout)
            process_groups.append(group)
            return group

        def all_gather_bytes(data: bytes) -> list[bytes]:
            call = next(calls)
            store.set(f"gathered {call} {rank}", data.hex())
            return [bytes.fromhex(store.get(f"gathered {call} {peer}").decode()) for peer in range(size)]

        factory = GroupFactory(placement, make_process_group, all_gather_bytes, TIMEOUT_S)
        try:
            results[rank] = body(factory.make_group("world", needed))
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + TIMEOUT_S
    while not errors and (unfinished := [thread for thread in threads if thread.is_alive()]):
        assert time.monotonic() < end, f"a rank hangs: it has not finished after {TIMEOUT_S} s"
        unfinished[0].join(0.05)  # another rank may raise, which this one waits for
    _groups_to_free.extend(process_groups)
    process_groups.clear()
    if errors:
        raise errors[0]
    return results


def _free_groups() -> None:
    """Free earlier calls' groups to which nothing else refers by now."""
    held = _groups_to_free
    free = [at for at in range(len(held)) if sys.getrefcount(held[at]) <= _UNREFERENCED_COUNT]
    # Gloo's threads end within 10 ms each, so all at the same time.
    threads = [threading.Thread(target=held.__setitem__, args=(at, None)) for at in free]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held[:] = [group for group in held if group is not None]
