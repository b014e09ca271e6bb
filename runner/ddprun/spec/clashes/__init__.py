"""Rules across keys: what has no effect, or breaks, together with the rest of the file."""

from collections.abc import Iterator

from ddprun.spec.clashes import buffers, exchange, stages, sync, values
from ddprun.spec.clashes.rule import Clash
from ddprun.spec.schema import Pipeline

__all__ = ["Clash", "clashes"]

_RULES = [rule for theme in (values, exchange, sync, buffers, stages) for rule in theme.RULES]


def clashes(pipeline: Pipeline, faulty: frozenset[str] = frozenset()) -> Iterator[Clash]:
    """Every clash of a pipeline whose `faulty` top-level keys hold placeholders."""
    for rule in _RULES:
        if not rule.keys & faulty:
            yield from rule.find(pipeline)
