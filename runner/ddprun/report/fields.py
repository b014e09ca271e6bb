"""What a reader of records takes for granted. What is otherwise is no record, and is passed over."""

from collections.abc import Callable, Mapping
from typing import Any

from ddprun.telemetry.records import PARTS

Shape = Callable[[Any], bool]

_MOST = 2**63
_MOST_PROFILED = 100_000


def number(value: Any) -> bool:
    """A finite one, of 64 bits."""
    return isinstance(value, int | float) and -_MOST < value < _MOST


def count(value: Any) -> bool:
    """A whole number from 0."""
    return type(value) is int and 0 <= value < _MOST


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def mapping(value: Any) -> bool:
    """An object."""
    return isinstance(value, dict)


def positive(value: Any) -> bool:
    """A number above 0."""
    return number(value) and value > 0


def or_none(shape: Shape) -> Shape:
    """That, or null."""
    return lambda value: value is None or shape(value)


def one_of(*known: str) -> Shape:
    """One of these strings."""
    return lambda value: isinstance(value, str) and value in known


def list_of(shape: Shape) -> Shape:
    """A list of these."""
    return lambda value: isinstance(value, list) and all(map(shape, value))


def row(*shapes: Shape) -> Shape:
    """A list of exactly these."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(shapes)
        and all(shape(item) for shape, item in zip(shapes, value, strict=True))
    )


def fields(needed: Mapping[str, Shape], **may: Shape) -> Shape:
    """An object with these fields; others may be there."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and shape(value[name]) for name, shape in needed.items())
            and all(shape(value[name]) for name, shape in may.items() if name in value)
        )

    return fits


STEP = fields(
    {
        "step": positive,
        "stage": count,
        "samples": number,
        "loss": or_none(number),
        "mean_loss": or_none(number),
        "start_us": number,
        "step_us": number,
        **dict.fromkeys(PARTS, number),
    },
    laps=list_of(row(text, number)),
    waits=list_of(row(number, number)),
)
"""A line of `steps/rank-….jsonl`."""

_LEG = fields(
    {
        "op": text,
        "group": text,
        "dtype": text,
        **dict.fromkeys(("bytes", "wire_bytes", "start_us", "done_us"), number),
    }
)

BUCKET = fields(
    {
        "step": positive,
        "kind": one_of("gradient", "delta", "parameters", "buffers", "optimizer"),
        "bucket": count,
        "params": list_of(text),
        "hooks": list_of(text),
        "legs": list_of(_LEG),
        **dict.fromkeys(
            (
                "bytes",
                "wire_bytes",
                "between_hosts_bytes",
                "ready_us",
                "done_us",
                "encode_us",
                "decode_us",
            ),
            number,
        ),
    },
    all_ready_us=or_none(number),
    params_ready_us=list_of(or_none(number)),
    completed_by=or_none(text),
    fidelity=fields({"cosine": or_none(number), "relative_l2": or_none(number)}),
)
"""A line of `buckets/rank-….jsonl`."""

_PROFILED = fields(
    {
        "step": positive,
        "first_step": positive,
        "track": text,
        "ph": text,
        "name": text,
        "cat": text,
        "args": mapping,
        "start_us": number,
    },
    us=number,
    id=count,
)


def profiled(value: Any) -> bool:
    """A line of `profile/rank-….jsonl`."""
    if not _PROFILED(value) or not ("us" in value or "id" in value):
        return False
    return bool(0 <= value["step"] - value["first_step"] < _MOST_PROFILED)


_SPELL = {
    "cause": text,
    "bucket": or_none(count),
    "params": list_of(text),
    "late_us": number,
    "step_us": positive,
    "first_step": count,
    "last_step": count,
}

_EVENTS = {
    "clock_offsets": fields({"monotonic_us": number, "offset_us": list_of(number)}),
    "started": fields({}, hosts=list_of(text), world_size=count, time=text),
    "stage_started": fields({"stage": count}, hooks=list_of(text)),
    "straggler": fields({"straggler": count, **_SPELL}),
    "checkpoint_written": fields({"step": count, "seconds": number}),
}
_ANY_EVENT = fields({"event": text}, monotonic_us=number)


def event(value: Any) -> bool:
    """A line of `events.jsonl`."""
    return _ANY_EVENT(value) and _EVENTS.get(value["event"], mapping)(value)


_SUMMARY = {
    "stragglers": list_of(fields({"rank": count, **_SPELL})),
    "metrics": or_none(mapping),
    "versions": or_none(mapping),
    "stages": list_of(mapping),
    **dict.fromkeys(("steps", "samples", "wire_bytes"), count),
    **dict.fromkeys(("steps_per_s", "seconds", "exposed_communication_s", "seconds_in_steps"), number),
}


def of_summary(value: Mapping[str, Any]) -> dict[str, Any]:
    """What of a `summary.json` can be what it says."""
    return {name: item for name, item in value.items() if _SUMMARY.get(name, lambda _: True)(item)}
