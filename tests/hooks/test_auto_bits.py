"""Codes that are chosen for each bucket."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks import ParamSlice
from ddprun_hooks.builtin.auto_bits import FORMATS, AutoBits, _cosine, _FormatChoice
from ddprun_hooks.comm.trace import compute_fidelity
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.testing import Rank, run_hooks

NUMEL = 30_000
PARAM = (ParamSlice("w", (NUMEL,), 0, NUMEL),)


def gradient(rank: int, step: int) -> Tensor:
    """What all ranks see alike, and noise of each one's own."""
    signal = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))
    return signal + 0.5 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def codes(floor: float, steps: int = 40) -> list[tuple[str, float, float]]:
    """With which code each step was sent, its cosine, and bits of a value; the same on all of three ranks."""

    def body(c: Rank) -> list[tuple[str, float, float]]:
        hook, found = c.stack.hooks[0], list[tuple[str, float, float]]()
        for step in range(steps):
            mean = c.send(gradient(c.rank, step) / 3, PARAM)
            code = hook.choices()["gradient", 0]
            exact = sum((gradient(rank, step) / 3 for rank in range(3)), torch.zeros(NUMEL))
            cosine = compute_fidelity(mean, exact, 0, 0.0).cosine
            found.append((code, cosine, 8 * c.traces[-1].wire_bytes / NUMEL))
        return found

    spec: HookSpec = {"auto_bits": {"floor": floor, "every": 2}}
    first: list[tuple[str, float, float]]
    first, *others = run_hooks([spec], 3, body)
    assert others == [first, first]
    return first


@pytest.mark.parametrize(
    ("floor", "most_often"), [(0.5, "int2"), (0.9, "int4"), (0.999, "int8"), (0.9999999, "bf16")]
)
def test_the_smallest_code_above_the_floor_is_used_most(floor: float, most_often: str) -> None:
    """A smaller one is tried, once in a while, for one measurement; a larger one only on the way down."""
    found = codes(floor)
    used = [code for code, _, _ in found[10:]]
    assert max(set(used), key=used.count) == most_often
    assert used.count(most_often) >= 0.6 * len(used)
    for code, cosine, _ in found[11::2]:  # those that were measured
        if code == most_often != "bf16":
            assert cosine >= floor
        elif list(FORMATS).index(code) < list(FORMATS).index(most_often):
            assert cosine < floor


def test_a_measurement_costs_one_value_of_61() -> None:
    """Beside three products for each rank."""
    bits = {code: sorted({sent for used, _, sent in codes(0.9) if used == code}) for code in ("int4", "int8")}
    for plain, measured in bits.values():
        more = 2 / 3 * (3 * 32 * math.ceil(NUMEL / 3 / 61) + 3 * 3 * 64) / NUMEL
        assert measured - plain == pytest.approx(more, rel=0.05)


def judged(cosines: list[float | None], floor: float = 0.9) -> str:
    """The codes after each measurement."""
    choice, found = _FormatChoice(), []
    for cosine in cosines:
        choice.choose_next_format(cosine, floor)
        found.append(choice.code)
    return " ".join(found)


@pytest.mark.parametrize(
    ("cosines", "wanted"),
    [
        ([0.99] * 6, "int8 int4 int4 int2 int2 int2"),
        ([0.5] * 3, "bf16 bf16 bf16"),
        ([None] * 3, "int8 int8 int8"),
        ([0.99, 0.9, 0.8, 0.99], "int8 int4 int8 int8"),
        # Tried in vain, a smaller code is tried again after 4 measurements, and then after 8.
        (
            [0.99] * 2 + [0.8] + [0.99] * 4 + [0.8] + [0.99] * 8,
            "int8 int4" + " int8" * 4 + " int4" + " int8" * 8 + " int4",
        ),
        # A code that was good enough at first has not been tried in vain.
        ([0.99] * 3 + [0.8] + [0.99] * 2, "int8 int4 int4 int8 int8 int4"),
    ],
)  # fmt: skip
def test_choices(cosines: list[float | None], wanted: str) -> None:
    assert judged(cosines) == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_cannot_be_measured_changes_nothing(value: float) -> None:
    """A mean that is not finite, or zero."""

    def body(c: Rank) -> tuple[Any, bool]:
        for _ in range(6):
            mean = c.send(torch.full((NUMEL,), value), PARAM)
        return c.stack.hooks[0].choices(), bool(torch.isfinite(mean).all())

    spec: HookSpec = {"auto_bits": {"every": 2}}
    for choices, finite in run_hooks([spec], 2, body):
        assert choices == {("gradient", 0): "int8"}
        assert finite == (value == 0)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e308])
def test_products_that_are_not_finite_are_no_cosine(odd: float) -> None:
    """Nor do infinities of both signs, in two shares, end a run."""
    products = torch.tensor([[odd, 1.0, 1.0], [-odd, 1.0, 1.0], [odd, 1.0, 1.0]], dtype=torch.float64)
    assert _cosine(products) == (pytest.approx(1e308 / 3) if odd == 1e308 else None)


@pytest.mark.parametrize("numel", [16, 61, 122, 400, 4000])
def test_small_buckets_are_measured_whole(numel: int) -> None:
    """A cosine of a few values would be far off."""
    param = (ParamSlice("w", (numel,), 0, numel),)

    def body(c: Rank) -> list[float]:
        cosines = []
        for step in range(80):
            mean = c.send(gradient(c.rank, step)[:numel] / 2, param)
            exact = (gradient(0, step)[:numel] + gradient(1, step)[:numel]) / 2
            cosines.append(compute_fidelity(mean, exact, 0, 0.0).cosine)
        return cosines

    spec: HookSpec = {"auto_bits": {"floor": 0.999, "every": 2}}
    cosines = run_hooks([spec], 2, body)[0]
    assert sum(cosines[40:]) / 40 > 0.998


def test_what_overflows_in_bf16_is_said() -> None:
    """As by the cast itself."""

    def body(c: Rank) -> list[list[Any]]:
        for step in range(20):
            c.send(gradient(c.rank, step) / 2, PARAM)
        assert c.stack.hooks[0].choices()["gradient", 0] == "bf16"
        c.send(torch.full((NUMEL,), 3.4e38), PARAM)
        return [list(trace.findings) for trace in c.traces[-1:]]

    spec: HookSpec = {"auto_bits": {"floor": 0.9999999, "every": 2}}
    for findings in run_hooks([spec], 2, body):
        assert [found.hook for found in findings[0]] == ["bf16"]


def test_both_factors_of_powersgd_are_measured() -> None:
    """They are exchanged in turns, under one bucket."""

    def body(c: Rank) -> dict[Any, Any]:
        shape = (200, 150)
        param = (ParamSlice("w", shape, 0, NUMEL),)
        for step in range(30):
            c.send(gradient(c.rank, step) / 2, param)
        hook = c.stack.hooks[1]
        assert isinstance(hook, AutoBits)
        return {key[2]: choice.code for key, choice in hook._choices.items()}

    spec: list[HookSpec] = [{"powersgd": {"rank": 4}}, {"auto_bits": {"floor": 0.3, "every": 4}}]
    for codes in run_hooks(spec, 2, body):
        assert codes == {200 * 4: "int2", 150 * 4: "int2"}


def test_each_bucket_has_its_own() -> None:
    """One of two magnitudes, and one in which every block of 64 has a single large value."""
    large = torch.arange(NUMEL) % 64 == 5

    def body(c: Rank) -> Any:
        for step in range(40):
            c.send(gradient(0, step).sign() / 2, PARAM, bucket=0)
            spiky = gradient(0, step).clamp(-1, 1) * torch.where(large, 60.0, 1.0)
            c.send(spiky / 2, (ParamSlice("v", (NUMEL,), 0, NUMEL),), bucket=1)
        return c.stack.hooks[0].choices()

    spec: HookSpec = {"auto_bits": {"floor": 0.999, "every": 2}}
    first, second = run_hooks([spec], 2, body)
    assert first == second == {("gradient", 0): "int2", ("gradient", 1): "int8"}
