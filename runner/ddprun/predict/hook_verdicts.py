"""Whether a hook pays over a link: the same stage with it and without it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddprun.predict.links import Links
from ddprun.predict.model import StepPrediction
from ddprun_hooks.config.options import parse_spec

HookSpecs = Sequence[Any]  # hooks as a pipeline file has them
_SLOWEST, _FASTEST = 1e4, 1e12  # bytes a second, between which a break-even is looked for
_HALVINGS = 30
_NEGLIGIBLE_SHARE = 0.02  # of a step's time: no difference to speak of


@dataclass(frozen=True, slots=True)
class HookVerdict:
    """What a hook of a stack costs and saves in a step of a stage."""

    hook: str
    remaining_hooks: HookSpecs  # the stack that is left
    with_us: float
    without_us: float
    break_even_bytes_per_s: float | None
    """The rate of the link between hosts, in payload bytes a second, below which the hook pays. 0: never;
    infinite: always; None: there is one host."""

    @property
    def pays(self) -> bool | None:
        """Whether the step is faster with the hook; None: it makes no difference to speak of."""
        if abs(self.with_us - self.without_us) <= _NEGLIGIBLE_SHARE * self.without_us:
            return None
        return self.with_us < self.without_us

    def to_json_data(self) -> dict[str, Any]:
        """For `--format json`."""
        limit = self.break_even_bytes_per_s
        return {
            "hook": self.hook,
            "without": list(self.remaining_hooks),
            "step_us": round(self.with_us),
            "without_us": round(self.without_us),
            "pays": self.pays,
            "break_even_bits_per_s": round(8 * limit) if limit is not None and math.isfinite(limit) else None,
        }


def leave_one_out(stack: HookSpecs) -> Iterator[tuple[str, list[Any]]]:
    """Each hook of a stack, those on the legs of `hierarchical` included, and the stack without it."""
    for index, hook in enumerate(stack):
        name, options = parse_spec(hook)
        yield name, [*stack[:index], *stack[index + 1 :]]
        options = {key: value for key, value in options.items() if value is not None}
        for leg in ("within", "across") if name == "hierarchical" else ():
            inner = list(options.get(leg) or ())
            for place, one in enumerate(inner):
                left = {name: {**options, leg: [*inner[:place], *inner[place + 1 :]]}}
                where = "between hosts" if leg == "across" else "inside a host"
                yield f"{parse_spec(one)[0]} {where}", [*stack[:index], left, *stack[index + 1 :]]


def break_even_rate(
    with_hook: Callable[[Links], StepPrediction], without: Callable[[Links], StepPrediction], links: Links
) -> float:
    """The `break_even_bytes_per_s` of a hook, from predictions with it and without it over such links."""

    def gains(rate: float) -> bool:
        at = replace(links, across=links.across.at_rate(rate))
        return with_hook(at).step_us < (1 - _NEGLIGIBLE_SHARE) * without(at).step_us

    if not gains(_SLOWEST):
        return 0.0
    if gains(_FASTEST):
        return math.inf
    low, high = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low
