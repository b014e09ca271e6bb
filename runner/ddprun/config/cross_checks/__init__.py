"""Rules across keys: what has no effect, or breaks, together with the rest of the file."""

from collections.abc import Iterator

from ddprun.config.cross_checks import buffers, exchange, stages, sync, values
from ddprun.config.cross_checks.rule import CrossCheck
from ddprun.config.schema import Pipeline

__all__ = ["CrossCheck", "clashes"]

_RULES = [rule for theme in (values, exchange, sync, buffers, stages) for rule in theme.RULES]


def cross_checks(pipeline: Pipeline, faulty: frozenset[str] = frozenset()) -> Iterator[CrossCheck]:
    """Every clash of a pipeline whose `faulty` top-level keys hold placeholders."""
    for rule in _RULES:
        if not rule.keys & faulty:
            yield from rule.find(pipeline)
