"""Events of a run: structlog, one JSON object a line in `events.jsonl`."""

from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from ddprun.telemetry.writer import Writer, dumps
from ddprun_hooks.comm.trace import now_us

FILE = "events.jsonl"


def event_log(
    writer: Writer | None, redact: Callable[[dict[str, Any]], dict[str, Any]], **bound: Any
) -> structlog.typing.FilteringBoundLogger:
    """A structlog logger whose lines go through the writer's thread.

    Each line has `event`, `level`, `time` (UTC, ISO 8601), `monotonic_us` (this rank's clock, as in the
    records) and what the caller gives.

    Args:
        writer: where the lines go; None discards them (every rank but 0).
        redact: replaces secrets in an event's fields.
        bound: fields of every line, such as `rank`.
    """

    def stamp(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["monotonic_us"] = now_us()
        return event

    def render(_: Any, __: str, event: MutableMapping[str, Any]) -> bytes:
        return dumps(redact(dict(event)))

    class Sink:
        def msg(self, line: bytes) -> None:
            if writer is not None:
                writer.put(FILE, line)

        debug = info = warning = error = critical = msg

    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        Sink(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            stamp,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    ).bind(**bound)
    return logger
