"""What a rule across keys is, and what several of them ask."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddprun.config.choices import Choice
from ddprun.config.faults import Severity
from ddprun.config.schema import Pipeline, StepStage
from ddprun.config.tree import KeyPath


@dataclass(frozen=True)
class CrossCheck:
    """Two keys that do not go together."""

    path: KeyPath
    """The key at which it is shown; the message names the other."""

    problem: str
    allowed: str | None = None
    severity: Severity = "error"


@dataclass(frozen=True)
class Rule:
    """A function that finds clashes of one sort."""

    keys: frozenset[str]
    """The top-level keys that it reads: it is left out if one of them is faulty."""

    find: Callable[[Pipeline], Iterator[CrossCheck]]


def reads(*keys: str) -> Callable[[Callable[[Pipeline], Iterator[CrossCheck]]], Rule]:
    """Make a function a rule that reads these top-level keys."""
    return lambda find: Rule(frozenset(keys), find)


def known_ranks(pipeline: Pipeline) -> int | None:
    """How many ranks the file says there are; None if it leaves that to the machine."""
    launch = pipeline.launch
    least, most = launch.hosts
    return launch.nproc_per_node * most if launch.nproc_per_node and least == most else None


def place(stage: StepStage, key: str) -> KeyPath:
    """Where a key stands that holds in the stage: in it, or at the top."""
    return ("stages", stage.index, stage.name, key) if key in stage.model_fields_set else (key,)


def shown(stage: StepStage, key: str, value: object) -> str:
    """Such a key and its value as a message names them."""
    own = f"{stage.path}." if key in stage.model_fields_set else ""
    return f'"{own}{key}: {value.name if isinstance(value, Choice) else value}"'
