"""File and overrides to a checked pipeline, or to every fault of them at once."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddprun.config import overrides as overriding
from ddprun.config import validation_errors
from ddprun.config import yaml_writer as resolving
from ddprun.config.built_in_options import MlpOptions
from ddprun.config.checks import KeyConflict, find_conflicts, find_equal_trackers
from ddprun.config.choices import Choice
from ddprun.config.faults import PipelineError, PipelineFault, Place, Source
from ddprun.config.schema import Pipeline, pipeline_with_cluster_keys
from ddprun.config.secrets import (
    Secrets,
    fill_references,
    pipeline_strings,
    referenced_variables,
    secret_or_reference_problem,
)
from ddprun.config.sections import TrackerList
from ddprun.config.stages import Stage
from ddprun.config.tree import Entry, KeyPath, Node, find_nearest, format_path, map_strings, parse_path
from ddprun.config.yaml_reader import parse_yaml, read_pipeline_file
from ddprun.options import Options
from ddprun_hooks.config.trust import TRUST_VARIABLE, TrustSettingError, read_trust_policy

FOLDER_PLACEHOLDER = "{here}"  # in a string: the pipeline's folder
_FAULTY_KEY_DEFAULTS: dict[str, Any] = {
    "model": Choice("model", "mlp", {}, "built-in", MlpOptions(inputs=1, outputs=1)),
    **{kind: Choice(kind, f"placeholder.{kind}", {}, "dotted") for kind in ("data", "loss", "optimizer")},
}  # stand-ins for faulty keys while rules across the other keys are checked


@dataclass(frozen=True, kw_only=True)
class LoadedSettings:
    """Settings that were checked, and where each value came from."""

    # Where names and files in them are looked for: the file's own folder, or, if a run is resumed, that of
    # the file that started it.
    folder: Path
    root: Node = field(repr=False, compare=False)  # the file's tree with the overrides applied
    secrets: Secrets = field(repr=False, compare=False)  # whatever a run writes or shows passes through it

    def fault(self, key_path: str, problem: str, allowed: str | None = None) -> PipelineFault:
        """A fault that only a run can see, at a key path such as `optimizer.sgd.lr`, or at the nearest key
        above it that the file or an override has; if they have none, it is one of the whole file.
        """
        path = _parse_key_path(key_path)
        found = find_nearest(self.root, path)
        place = found.node.place
        if path and found.missing_path == path:
            place = Place(place.source)
        return self.secrets.redact_faults([PipelineFault(place, key_path, problem, allowed)])[0]

    def error(self, key_path: str, problem: str, allowed: str | None = None) -> PipelineError:
        return PipelineError([self.fault(key_path, problem, allowed)])

    def is_given(self, key_path: str) -> bool:
        """Whether the file or an override has the key."""
        return not find_nearest(self.root, _parse_key_path(key_path)).missing_path

    def expand_env_and_folder(self, key_path: str, value: Any) -> Any:
        """Fill in `${env:NAME}` and `{here}`, the folder; a PipelineError names variables that are unset."""
        path = _parse_key_path(key_path)
        if isinstance(value, Choice):
            at = format_path((*path, value.name))
            return replace(value, options=self.expand_env_and_folder(at, value.options))
        faults: list[PipelineFault] = []

        def fill(at: KeyPath, text: str) -> str:
            missing = [name for name in dict.fromkeys(referenced_variables(text)) if name not in os.environ]
            for name in missing:
                problem = f"the environment variable {name} is not set"
                faults.append(self.fault(format_path(at), problem, "set it before the run"))
            if missing:
                return text
            return fill_references(text.replace(FOLDER_PLACEHOLDER, str(self.folder)), os.environ)

        filled = map_strings(value, fill, path=path)
        if faults:
            raise PipelineError(_sort_faults(faults))
        return filled

    def referenced_variables(self) -> tuple[str, ...]:
        """Environment variables that the pipeline takes, each once."""
        strings = pipeline_strings(self.root.data())
        return tuple(dict.fromkeys(name for found in strings for name in referenced_variables(found.text)))

    def check_environment(self) -> None:
        """Raise a PipelineError that names every variable of the pipeline that is not set."""
        self.expand_env_and_folder("", self.root.data())


@dataclass(frozen=True, kw_only=True)
class LoadedPipeline(LoadedSettings):
    """A pipeline that can run."""

    path: Path  # the file, as it was named
    pipeline: Pipeline
    warnings: tuple[PipelineFault, ...]
    overrides: tuple[str, ...] = field(repr=False)

    def written_options(self, stage: Stage) -> dict[str, Any]:
        """The options of a stage that the file or an override has."""
        stages = self.root.data().get("stages")
        item = stages[stage.index] if stages is not None else None
        return dict((item.get(stage.name) or {}) if isinstance(item, dict) else {})

    def stage_with_steps(
        self, stage: Stage, steps: int, *, only_training: bool = False, **options: Any
    ) -> dict[str, Any]:
        """A stage as the file has it, with these steps and options; `only_training`: without evaluation."""
        kept = self.written_options(stage)
        for key in ("epochs", *(("evaluate", "keep_best", "stop") if only_training else ())):
            kept.pop(key, None)
        return {stage.name: {**kept, "steps": steps, **options}}

    def resolved_yaml(self) -> str:
        """The whole pipeline as YAML with values' origins; but for relative paths it loads to the same."""
        return resolving.resolved_yaml(self.as_dict(), self.root)

    def as_dict(self) -> dict[str, Any]:
        """The whole pipeline as mappings, lists and scalars, defaults filled in, secrets left out."""
        whole: dict[str, Any] = self.secrets.redact_all(resolving.to_plain_data(self.pipeline))
        return whole

    def digest(self) -> str:
        """SHA-256 in hexadecimal of all that the pipeline says, but for passwords in URLs, at which nobody is
        to guess by it. The environment has no say: it may differ between ranks.
        """
        data = Secrets().redact_all(resolving.to_plain_data(self.pipeline))
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def load(path: Path, overrides: Sequence[str] = (), folder: Path | None = None) -> LoadedPipeline:
    """Read a pipeline file and apply overrides, each `key.path=value`, in order.

    Neither torch nor user code is imported. `folder` is where names and files in the pipeline are searched
    for, by default the file's own. A PipelineError has every fault that was found.
    """
    try:
        read_trust_policy()
    except TrustSettingError as error:
        problem, _, allowed = str(error).partition("; ")
        problem = problem.removeprefix(f"{TRUST_VARIABLE}: ")
        raise PipelineError([PipelineFault(Place(Source(TRUST_VARIABLE)), "", problem, allowed)]) from None
    written, faults = read_pipeline_file(path)
    if written is None:
        raise PipelineError(Secrets().redact_faults(_sort_faults(faults)))
    root, refused = overriding.apply_overrides(written, overrides)
    faults += refused
    secrets = Secrets.collect([*pipeline_strings(written.data()), *pipeline_strings(root.data())])
    faults += _secret_and_reference_faults(root)
    folder = path.resolve().parent if folder is None else folder
    pipeline, more = _validate_tree(root, path, secrets)
    faults = secrets.redact_faults(_sort_faults([*faults, *more]))
    if pipeline is None or any(fault.severity == "error" for fault in faults):
        raise PipelineError(faults)
    return LoadedPipeline(
        path=path,
        folder=folder,
        pipeline=pipeline,
        warnings=tuple(faults),
        overrides=tuple(overrides),
        root=root,
        secrets=secrets,
    )


class _TrackerSettings(Options):
    track: TrackerList = ()


def load_trackers(text: str, name: str) -> tuple[LoadedSettings, tuple[Choice, ...]]:
    """Read a list of trackers, in YAML, as `track` in a pipeline is read; messages call the text `name`.
    Raises a PipelineError with every fault.
    """
    source = Source.from_text(name, 1, text)
    listed, faults = parse_yaml(text, source, path=("track",))
    listed = listed or Node(Place(source, 1, 1), None)
    root = Node(listed.place, {"track": Entry(listed.place, listed)})
    secrets, track = Secrets.collect(pipeline_strings(root.data())), tuple[Choice, ...]()
    if not faults:
        faults = _secret_and_reference_faults(root)
        try:
            track = _TrackerSettings.model_validate(root.data()).track
        except ValidationError as error:
            faults += validation_errors.validation_faults(error, root, secrets.redact)
        faults += [_conflict_fault(root, conflict) for conflict in find_equal_trackers(track)]
    if faults:
        raise PipelineError(secrets.redact_faults(_sort_faults(faults)))
    return LoadedSettings(folder=Path.cwd(), root=root, secrets=secrets), track


def _secret_and_reference_faults(root: Node) -> list[PipelineFault]:
    """Secrets in plain text, and references to variables that cannot be filled in."""
    faults = []
    for item in pipeline_strings(root.data()):
        if (wrong := secret_or_reference_problem(item)) is not None:
            nearest = find_nearest(root, item.path)
            place = nearest.key_place if item.is_key else nearest.node.place
            faults.append(PipelineFault(place, format_path(item.path), *wrong))
    return faults


def _parse_key_path(key_path: str) -> KeyPath:
    return tuple(segment for segment, _ in parse_path(key_path)) if key_path else ()


def _validate_tree(root: Node, path: Path, secrets: Secrets) -> tuple[Pipeline | None, list[PipelineFault]]:
    """Validate the tree: the pipeline, if it is valid, and all faults; cross checks skip faulty keys."""
    assert isinstance(root.value, dict)
    faulty = {key for key, entry in root.value.items() if _has_fault_below(entry.node)}
    data = {"name": _folder_safe_name(path), **root.data()}
    faults: list[PipelineFault] = []
    pipeline: Pipeline | None = None
    model = pipeline_with_cluster_keys(data)
    try:
        pipeline = model.model_validate(data)
    except ValidationError as error:
        error = validation_errors.add_key_hints(error, model)
        faults = validation_errors.validation_faults(error, root, secrets.redact)
        faulty |= {str(item["loc"][0]) for item in error.errors(include_url=False)}
    checkable = pipeline
    if checkable is None:
        without_faulty = {key: value for key, value in data.items() if key not in faulty}
        without_faulty |= {key: choice for key, choice in _FAULTY_KEY_DEFAULTS.items() if key in faulty}
        with suppress(ValidationError):
            checkable = model.model_validate(without_faulty)
    conflicts = find_conflicts(checkable, frozenset(faulty)) if checkable else ()
    return pipeline, faults + [_conflict_fault(root, conflict) for conflict in conflicts]


def _conflict_fault(root: Node, conflict: KeyConflict) -> PipelineFault:
    """A conflict at its place in the tree."""
    found = find_nearest(root, _parse_key_path(conflict.path))
    has_key = not found.missing_path and not isinstance(found.node.value, (str, list))
    place = found.key_place if has_key else found.node.place
    words = conflict.problem, conflict.allowed, conflict.suggestion, conflict.severity
    return PipelineFault(place, conflict.path, *words)


def _has_fault_below(node: Node) -> bool:
    if node.has_fault:
        return True
    if isinstance(node.value, dict):
        return any(_has_fault_below(entry.node) for entry in node.value.values())
    return isinstance(node.value, list) and any(_has_fault_below(child) for child in node.value)


def _folder_safe_name(path: Path) -> str:
    """The file's own name, with what a folder's name cannot hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".")[:200] or "pipeline"


def _sort_faults(faults: list[PipelineFault]) -> list[PipelineFault]:
    """The file's faults from its top, then those of the overrides, none twice."""

    def position(fault: PipelineFault) -> tuple[int, int, int]:
        return fault.place.source.override_number, fault.place.line, fault.place.column

    return sorted(dict.fromkeys(faults), key=position)
