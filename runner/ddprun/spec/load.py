"""File and overrides to a checked pipeline, or to every fault of them at once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddprun.spec import overrides as overriding
from ddprun.spec import resolved as resolving
from ddprun.spec import sentences
from ddprun.spec.choices import Choice
from ddprun.spec.clashes import clashes
from ddprun.spec.faults import Fault, PipelineError
from ddprun.spec.options import Mlp
from ddprun.spec.problems import told
from ddprun.spec.reader import read_file
from ddprun.spec.schema import Pipeline
from ddprun.spec.tree import Node, Place, Source, find, parse_path, show
from ddprun_hooks.trust import VARIABLE, TrustSettingError, trust

_PLACEHOLDERS: dict[str, Any] = {
    "model": Choice("model", "mlp", {}, "built-in", Mlp(inputs=1, outputs=1)),
    "data": Choice("data", "placeholder.data", {}, "dotted"),
    "loss": Choice("loss", "placeholder.loss", {}, "dotted"),
    "optimizer": Choice("optimizer", "placeholder.optimizer", {}, "dotted"),
}
"""Stand-ins for faulty keys while rules across the other keys are checked."""


@dataclass(frozen=True)
class Loaded:
    """A pipeline that can run, and where each of its values came from."""

    path: Path
    """The file, as it was named."""

    pipeline: Pipeline
    warnings: tuple[Fault, ...]
    overrides: tuple[str, ...]
    root: Node = field(repr=False, compare=False)
    """The file's tree with the overrides applied."""

    def fault(
        self, key_path: str, problem: str, allowed: str | None = None, suggestion: str | None = None
    ) -> Fault:
        """A fault that only a run can see, at a key path such as `optimizer.sgd.lr`.

        It is located at that key, or at the nearest key above it that the file or an override has.
        """
        path = [segment for segment, _ in parse_path(key_path)] if key_path else []
        found = find(self.root, path)
        return found.node.place.fault(show(path), problem, allowed, suggestion)

    def resolved(self) -> str:
        """The whole pipeline as YAML, defaults filled in, each value's origin in a comment.

        It loads to the same pipeline again, except that relative paths are relative to another folder if it
        is written to one.
        """
        return resolving.resolved(self.pipeline, self.root)

    def digest(self) -> str:
        """SHA-256 of the pipeline in hexadecimal; what the file says counts, not how it is written."""
        return resolving.digest(self.pipeline)


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a pipeline file and apply overrides. Neither torch nor user code is imported.

    Args:
        path: the file.
        overrides: each `key.path=value`, the value as YAML, applied in order.

    Raises:
        PipelineError: with every fault that was found.
    """
    try:
        trust()
    except TrustSettingError as error:
        problem, _, allowed = str(error).partition("; ")
        problem = problem.removeprefix(f"{VARIABLE}: ")
        raise PipelineError(
            [Fault(file=VARIABLE, line=0, column=0, path="", problem=problem, allowed=allowed)]
        ) from None
    tree = read_file(path)
    faults = list(tree.faults)
    if tree.root is None:
        empty = Node(Place(Source.of(str(path), 0, ""), 1, 1), {})
        faults += [fault for fault in overriding.apply(empty, overrides)[1] if not fault.path]
        raise PipelineError(_sorted(faults))
    root, refused = overriding.apply(tree.root, overrides)
    faults += refused
    pipeline, found = _check(root, path)
    faults = _sorted([*faults, *found])
    if pipeline is None or any(fault.severity == "error" for fault in faults):
        raise PipelineError(faults)
    return Loaded(path, pipeline, tuple(faults), tuple(overrides), root)


def _check(root: Node, path: Path) -> tuple[Pipeline | None, list[Fault]]:
    """The pipeline if the tree is one, and the faults; rules across keys go as far as keys are whole."""
    data = root.data()
    if not isinstance(data, dict):
        return None, [root.place.fault("", "expected `key: value` lines at the top")]
    data.setdefault("name", _name_of(path))
    faulty = (
        {key for key, entry in root.value.items() if _broken(entry.node)}
        if isinstance(root.value, dict)
        else set()
    )
    faults: list[Fault] = []
    pipeline: Pipeline | None = None
    try:
        pipeline = Pipeline.model_validate(data)
    except ValidationError as error:
        explained = told(error, Pipeline)
        faults = sentences.faults(explained, root)
        faulty |= {str(item["loc"][0]) for item in explained.errors(include_url=False)}
    partial = pipeline or _partial(data, faulty)
    if partial is not None:
        faults += _clashes(partial, frozenset(faulty), root)
    return pipeline, faults


def _partial(data: dict[str, Any], faulty: set[str]) -> Pipeline | None:
    """The pipeline with its faulty keys replaced by placeholders."""
    whole = {key: value for key, value in data.items() if key not in faulty}
    whole |= {key: choice for key, choice in _PLACEHOLDERS.items() if key in faulty}
    try:
        return Pipeline.model_validate(whole)
    except ValidationError:
        return None


def _clashes(pipeline: Pipeline, faulty: frozenset[str], root: Node) -> Iterator[Fault]:
    for clash in clashes(pipeline, faulty):
        found = find(root, clash.path)
        place = found.node.place if found.rest or isinstance(found.node.value, (str, list)) else found.key
        yield place.fault(show(clash.path), clash.problem, clash.allowed, severity=clash.severity)


def _broken(node: Node) -> bool:
    """Whether a fault has been reported for the node or for one below it."""
    if node.broken:
        return True
    if isinstance(node.value, dict):
        return any(_broken(entry.node) for entry in node.value.values())
    return isinstance(node.value, list) and any(_broken(child) for child in node.value)


def _name_of(path: Path) -> str:
    """The file's own name, with what a folder's name cannot hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".") or "pipeline"


def _sorted(faults: list[Fault]) -> list[Fault]:
    """The file's faults from its top, then those of the overrides, none twice."""

    def key(fault: Fault) -> tuple[int, int, int]:
        number = int(fault.file.removeprefix("--set ")) if fault.file.startswith("--set ") else 0
        return (number, fault.line, fault.column)

    return sorted(dict.fromkeys(faults), key=key)
