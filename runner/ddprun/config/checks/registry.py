"""Every check across keys, and what checks ask of a pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddprun.config.choices import Choice
from ddprun.config.faults import Severity
from ddprun.config.schema import Pipeline
from ddprun.config.stages import StepStage


@dataclass(frozen=True)
class KeyConflict:
    path: str  # the key at which it is shown; the message names the other
    problem: str
    allowed: str | None = None
    severity: Severity = "error"
    suggestion: str | None = None


def warning(path: str, problem: str, allowed: str | None = None) -> KeyConflict:
    """A conflict with which the pipeline can run all the same."""
    return KeyConflict(path, problem, allowed, "warning")


_Check = Callable[[Pipeline], Iterator[KeyConflict]]
_CHECKS: list[tuple[frozenset[str], _Check]] = []  # every check with the top-level keys that it reads


def register_check(*keys: str) -> Callable[[_Check], _Check]:
    """Register a check that reads these top-level keys; it is skipped if one of them has faults.

    A check that reads nothing but one key, by `values_of_key`, registers no keys and always runs: a
    faulty value has been replaced by a valid one.
    """

    def register(check: _Check) -> _Check:
        _CHECKS.append((frozenset(keys), check))
        return check

    return register


def find_conflicts(pipeline: Pipeline, faulty: frozenset[str]) -> Iterator[KeyConflict]:
    """What the checks find; those that read a `faulty` key, which holds a placeholder, are left out."""
    for keys, check in _CHECKS:
        if not keys & faulty:
            yield from check(pipeline)


def setting_text(stage: StepStage, key: str, value: object) -> str:
    """The key, with the stage if it names the key, and the value, as a message shows them."""
    return f'"{stage.key_path(key)}: {value.name if isinstance(value, Choice) else value}"'


def accumulation_text(pipeline: Pipeline, stage: StepStage) -> str | None:
    """What gives a step several micro-steps, or may, as a message shows it; None: nothing does."""
    accumulate, size = stage.effective_settings(pipeline).accumulate, pipeline.loader.global_batch
    if size is not None:
        return f'"global_batch: {size}" of "loader"'
    return setting_text(stage, "accumulate", accumulate) if accumulate > 1 else None


def values_of_key(pipeline: Pipeline, key: str) -> Iterator[tuple[str, Any]]:
    """The value of a key at the top and in each stage that names it, with its place."""
    yield key, getattr(pipeline, key)
    for stage in pipeline.stages_with_steps():
        if key in stage.model_fields_set:
            yield stage.key_path(key), getattr(stage, key)
