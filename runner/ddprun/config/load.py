"""File and overrides to a checked pipeline, or to every fault of them at once."""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddprun.config import errors
from ddprun.config import overrides as overriding
from ddprun.config import resolved as resolving
from ddprun.config.choices import FOLDER, Choice
from ddprun.config.cross_checks import cross_checks
from ddprun.config.faults import Fault, PipelineError
from ddprun.config.options import Mlp
from ddprun.config.reader import read_file
from ddprun.config.schema import Pipeline, pipeline_model
from ddprun.config.secrets import Secrets, fault_of, filled, references, texts
from ddprun.config.tree import KeyPath, Node, Place, Source, find, parse_path, show
from ddprun_hooks.config.trust import VARIABLE, TrustSettingError, trust

HERE = "{here}"
"""In a string: the pipeline's folder."""

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

    folder: Path
    """Where the names and files in it are looked for: the file's own folder, or, if a run is resumed, the
    folder of the file that started it."""

    pipeline: Pipeline
    warnings: tuple[Fault, ...]
    overrides: tuple[str, ...] = field(repr=False)
    root: Node = field(repr=False, compare=False)
    """The file's tree with the overrides applied."""

    secrets: Secrets = field(repr=False, compare=False)
    """What must not be written; whatever a run writes or shows passes through it."""

    def fault(
        self, key: str | KeyPath, problem: str, allowed: str | None = None, suggestion: str | None = None
    ) -> Fault:
        """A fault that only a run can see, at a key path such as `optimizer.sgd.lr`.

        Its place is that key, or the nearest key above it that the file or an override has. If they have
        none of them, it is a fault of the whole file.
        """
        path = _segments(key)
        found = find(self.root, path)
        fault = found.node.place.fault(show(path), problem, allowed, suggestion)
        if path and found.missing == path:
            fault = replace(fault, line=0, column=0, source_line="")
        return _redacted([fault], self.secrets)[0]

    def error(
        self, key: str | KeyPath, problem: str, allowed: str | None = None, suggestion: str | None = None
    ) -> PipelineError:
        """The error of this one `fault`."""
        return PipelineError([self.fault(key, problem, allowed, suggestion)])

    def has(self, key_path: str) -> bool:
        """Whether the file or an override has the key."""
        found = find(self.root, _segments(key_path))
        return found.node is not self.root and not found.missing

    def filled(self, key_path: str, value: Any) -> Any:
        """A choice, a string or other plain data at a key path, each `${env:NAME}` in it replaced, and each
        `{here}` by the pipeline's folder.

        Raises:
            PipelineError: variables that are not set.
        """
        faults: list[Fault] = []
        made = self._filled(_segments(key_path), value, faults)
        if faults:
            raise PipelineError(faults)
        return made

    def _filled(self, path: KeyPath, value: Any, faults: list[Fault]) -> Any:
        match value:
            case Choice():
                return replace(value, options=self._filled((*path, value.name), value.options, faults))
            case Mapping():
                return {key: self._filled((*path, key), item, faults) for key, item in value.items()}
            case list() | tuple():
                return type(value)(
                    self._filled((*path, index), item, faults) for index, item in enumerate(value)
                )
            case str():
                missing = [name for name in dict.fromkeys(references(value)) if name not in os.environ]
                for name in missing:
                    text = f"the environment variable {name} is not set"
                    faults.append(self.fault(path, text, "set it before the run"))
                return value if missing else filled(value.replace(HERE, str(self.folder)), os.environ)
        return value

    def variables(self) -> tuple[str, ...]:
        """Environment variables that the pipeline takes, each once."""
        names = (name for found in texts(self.root.data()) for name in references(found.text))
        return tuple(dict.fromkeys(names))

    def check_environment(self) -> None:
        """Look whether every variable that the pipeline names is set.

        Raises:
            PipelineError: those that are not, all at once.
        """
        faults: list[Fault] = []
        self._filled((), self.root.data(), faults)
        if faults:
            raise PipelineError(_sorted(faults))

    def resolved(self) -> str:
        """The whole pipeline as YAML, defaults filled in, each value's origin in a comment.

        It loads to the same pipeline again, except that relative paths are relative to another folder if it
        is written to one.
        """
        return resolving.resolved(self.pipeline, self.root, self.secrets)

    def plain(self) -> dict[str, Any]:
        """The whole pipeline as mappings, lists and scalars, defaults filled in, secrets left out."""
        whole: dict[str, Any] = self.secrets.hidden(resolving.plain(self.pipeline))
        return whole

    def digest(self) -> str:
        """SHA-256 of the pipeline in hexadecimal; what the file says counts, not how it is written.

        Secrets do not count.
        """
        return resolving.digest(self.pipeline)


def load(path: Path, overrides: Sequence[str] = (), folder: Path | None = None) -> Loaded:
    """Read a pipeline file and apply overrides, each `key.path=value`, in order.

    Neither torch nor user code is imported. `folder` is where names and files in the pipeline are searched
    for, by default the file's own.

    Raises:
        PipelineError: with every fault that was found.
    """
    try:
        trust()
    except TrustSettingError as error:
        problem, _, allowed = str(error).partition("; ")
        problem = problem.removeprefix(f"{VARIABLE}: ")
        raise PipelineError([Fault(file=VARIABLE, problem=problem, allowed=allowed)]) from None
    tree = read_file(path)
    faults = list(tree.faults)
    if tree.root is None:
        empty = Node(Place(Source.of(str(path), 0, ""), 1, 1), {})
        faults += [fault for fault in overriding.apply(empty, overrides)[1] if not fault.path]
        raise PipelineError(_redacted(_sorted(faults), Secrets.of()))
    root, refused = overriding.apply(tree.root, overrides)
    faults += refused
    found = list(texts(root.data()))
    secrets = Secrets.of([*texts(tree.root.data()), *found])
    for item in found:
        if (wrong := fault_of(item.text, of_key=item.is_key)) is not None:
            nearest = find(root, item.path)
            place = nearest.key if item.is_key else nearest.node.place
            faults.append(place.fault(show(item.path), *wrong))
    folder = path.resolve().parent if folder is None else folder
    before = FOLDER.set(folder)
    try:
        pipeline, more = _check(root, path, secrets)
    finally:
        FOLDER.reset(before)
    faults = _redacted(_sorted([*faults, *more]), secrets)
    if pipeline is None or any(fault.severity == "error" for fault in faults):
        raise PipelineError(faults)
    return Loaded(path, folder, pipeline, tuple(faults), tuple(overrides), root, secrets)


def _redacted(faults: Iterable[Fault], secrets: Secrets) -> list[Fault]:
    """The faults as they may be shown. Many quote one line, and it may be long."""
    text, line = functools.cache(secrets.redact), functools.cache(secrets.redact_line)
    return [
        fault.redacted(text, functools.partial(line, override=fault.file.startswith("--set ")))
        for fault in faults
    ]


def _segments(key_path: str | KeyPath) -> KeyPath:
    if isinstance(key_path, str):
        return tuple(segment for segment, _ in parse_path(key_path)) if key_path else ()
    return key_path


def _check(root: Node, path: Path, secrets: Secrets) -> tuple[Pipeline | None, list[Fault]]:
    """The pipeline if the tree is one, and the faults; rules across keys go as far as keys are whole."""
    assert isinstance(root.value, dict)
    faulty = {key for key, entry in root.value.items() if _broken(entry.node)}
    data = {"name": _name_of(path), **root.data()}
    faults: list[Fault] = []
    pipeline: Pipeline | None = None
    try:
        pipeline = pipeline_model().model_validate(data)
    except ValidationError as error:
        error = errors.with_known_keys(error, pipeline_model())
        faults = errors.faults(error, root, secrets.redact)
        faulty |= {str(item["loc"][0]) for item in error.errors(include_url=False)}
    partial = pipeline
    if partial is None:
        whole = {key: value for key, value in data.items() if key not in faulty}
        whole |= {key: choice for key, choice in _PLACEHOLDERS.items() if key in faulty}
        with suppress(ValidationError):
            partial = pipeline_model().model_validate(whole)
    for check in cross_checks(partial, frozenset(faulty)) if partial else ():
        found = find(root, check.path)
        place = found.node.place if found.missing or isinstance(found.node.value, (str, list)) else found.key
        faults.append(place.fault(show(check.path), check.problem, check.allowed, severity=check.severity))
    return pipeline, faults


def _broken(node: Node) -> bool:
    """Whether a fault has been reported for the node or for one below it."""
    if node.broken:
        return True
    if isinstance(node.value, dict):
        return any(_broken(entry.node) for entry in node.value.values())
    return isinstance(node.value, list) and any(_broken(child) for child in node.value)


def _name_of(path: Path) -> str:
    """The file's own name, with what a folder's name cannot hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".")[:200] or "pipeline"


def _sorted(faults: list[Fault]) -> list[Fault]:
    """The file's faults from its top, then those of the overrides, none twice."""

    def key(fault: Fault) -> tuple[int, int, int]:
        number = int(fault.file.removeprefix("--set ")) if fault.file.startswith("--set ") else 0
        return (number, fault.line, fault.column)

    return sorted(dict.fromkeys(faults), key=key)
