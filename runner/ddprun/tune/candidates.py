"""What may be changed in a pipeline, and to what: the candidates of a search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from ddprun.config import Loaded, PipelineError, Train, TrainSettings, load
from ddprun.config.resolved import flow
from ddprun.explain.model_probe import WorldShape

CAP = "ddp.bucket_cap_mb"
KEYS = ("sync", "hooks", CAP, "accumulate")
"""What a search may change, as `--vary` names it."""

Kind = Literal["exact", "lossy hooks", "rare exchange"]
"""What a candidate does to training: nothing, for gradients are averaged as they are at every step; they
travel through hooks that lose something; or ranks meet in some steps only."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_CAPS_MB = (1, 5, 25, 100)
_CODECS: tuple[Sequence[Any], ...] = (
    *([], ["fp16"], ["bf16"], ["int8"], ["fp8"], ["int4"]),
    ["topk"],
    ["powersgd"],
)
_PERIODS = (2, 4, 8, 16, 32)
_LONG_PERIODS = (8, 16, 32)
_OVERLAP = 4  # a period is so many times as long as an exchange that overlaps with training
_LEVELS = {"fp16": 1, "bf16": 1, "int8": 2, "fp8": 2, "int4": 3}
_MOST_LOSSY = 4
_EXACT = ("shared_memory", "hierarchical")
_MEETINGS = 4  # in a stage, at least: with fewer, what a policy does to training is chance


@dataclass(frozen=True, slots=True)
class Target:
    """The stage that is tuned: the one that trains for most steps."""

    stage: Train
    steps: int | None  # None: not known
    keys: Mapping[str, str]  # of `KEYS`: where the file has each for this stage, or would


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline with some of its keys changed."""

    changes: Mapping[str, Any]  # by the key's place in the file: the new value, as the file would hold it
    loaded: Loaded
    settings: TrainSettings  # of the stage that is tuned

    @property
    def name(self) -> str:
        """Its changes, as overrides: no two candidates have the same."""
        return ", ".join(self.overrides) or "the file as it is"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its changes, each as `--set` takes it."""
        return tuple(f"{key}={flow(value)}" for key, value in self.changes.items())

    @property
    def period(self) -> int:
        """Steps from one meeting of all ranks to the next."""
        return self.settings.plan.period

    @property
    def loss_level(self) -> int:
        """How much is lost of what travels, in grades from 0 (nothing) to 4."""
        return max([_level(hook.name, hook.options) for hook in self.settings.hooks] or [0])

    @property
    def kind(self) -> Kind:
        """What it does to training."""
        if self.settings.gradients != "all":
            return "rare exchange"
        return "lossy hooks" if self.loss_level else "exact"

    @property
    def samples(self) -> int:
        """Of a rank in one step."""
        return self.settings.accumulate * self.loaded.pipeline.loader.batch_size

    def loses_as_much_as(self, other: "Candidate") -> bool:
        """Whether it surely loses no less than another: by the same policy, as rare or rarer, and through
        hooks that lose as much or more.
        """
        same = self.settings.sync.name == other.settings.sync.name
        return same and self.period >= other.period and self.loss_level >= other.loss_level


def _level(name: str, options: Mapping[str, Any]) -> int:
    if name not in _EXACT:
        return _LEVELS.get(name, _MOST_LOSSY)
    legs = [spec for leg in ("within", "across") for spec in options.get(leg) or ()]
    named = [(spec, {}) if isinstance(spec, str) else next(iter(spec.items())) for spec in legs]
    return max([_level(inner, given or {}) for inner, given in named] or [0])


def target(loaded: Loaded, steps: Mapping[int, int | None]) -> Target:
    """The stage to tune; `steps`: of each stage, by index.

    Raises:
        PipelineError: no stage trains.
    """
    stages = loaded.pipeline.train_stages()
    if not stages:
        raise loaded.error("stages", "no stage trains: there is nothing to tune", "add a train stage")
    stage = max(stages, key=lambda one: steps.get(one.index) or 0)
    keys = {key: key if key == CAP else stage.key_path(key) for key in KEYS}
    return Target(stage, steps.get(stage.index), keys)


def values(loaded: Loaded, tuned: Target, world: WorldShape, *, on_cpu: bool) -> dict[str, list[Any]]:
    """What the keys are tried with, by `KEYS`; the file's own values are tried anyway."""
    settings = tuned.stage.effective(loaded.pipeline)
    split = _own_split(settings)
    within: list[Any] = ["shared_memory"] if on_cpu else []
    hooks: list[Any] = list(_CODECS)
    if world.hosts == 1 and on_cpu:
        hooks += [["shared_memory"], ["fp16", "shared_memory"]]
    if (world.hosts > 1 and world.ranks_per_host > 1) or split is not None:
        hosts = {} if split is None else {"hosts": split}
        hooks += [[{"hierarchical": {"within": within, "across": leg, **hosts}}] for leg in _CODECS]
    sync: list[Any] = ["every_step", *({"local_sgd": {"every": every}} for every in _PERIODS)]
    sync += [{"diloco": {"every": every, "overlap_steps": every // _OVERLAP}} for every in _LONG_PERIODS]
    if world.hosts > 1 and world.ranks_per_host > 1:
        sync += [{"hierarchical_sgd": {"across": every}} for every in _PERIODS]
    return {
        "sync": [one for one in sync if world.ranks > 1 or one == "every_step"],
        "hooks": hooks if world.ranks > 1 else [],
        CAP: list(_CAPS_MB),
        "accumulate": [],
    }


def _own_split(settings: TrainSettings) -> int | None:
    """Into how many hosts the file itself splits the ranks."""
    found = [hook.options.get("hosts") for hook in settings.hooks if hook.name == "hierarchical"]
    return next((one for one in (*found, settings.sync.options.get("hosts")) if one), None)


def combined(
    loaded: Loaded, tuned: Target, tried: Mapping[str, Sequence[Any]], keys: Sequence[str]
) -> Iterator[Candidate]:
    """All combinations of the values of these keys, the file as it is first; what `ddprun check` refuses is
    none, nor what says the same as another.
    """
    known = set[tuple[Any, ...]]()
    for chosen in ((), *product(*([None, *tried[key]] for key in keys))):
        overrides = {
            tuned.keys[key]: value for key, value in zip(keys, chosen, strict=False) if value is not None
        }
        candidate = changed(loaded, tuned, overrides)
        if candidate is not None and (said := _said(candidate)) not in known:
            known.add(said)
            yield candidate


def changed(loaded: Loaded, tuned: Target, changes: Mapping[str, Any]) -> Candidate | None:
    """The pipeline with these changes; None: `ddprun check` refuses it, or ranks would hardly ever meet."""
    try:
        found = load(
            loaded.path,
            (*loaded.overrides, *(f"{key}={flow(value)}" for key, value in changes.items())),
            loaded.folder,
        )
    except PipelineError:
        return None
    candidate = of(loaded, tuned, found, changes)
    if candidate.changes and tuned.steps is not None and candidate.period * _MEETINGS > tuned.steps:
        return None
    return candidate


def told(loaded: Loaded, tuned: Target, changes: Mapping[str, Any]) -> Candidate:
    """The candidate of changes that a file or another host has told.

    Raises:
        ValueError: it is none.
    """
    if not changes or not set(changes) <= set(tuned.keys.values()):
        raise ValueError(f"changes of {', '.join(changes) or 'nothing'}, which a search does not change")
    candidate = changed(loaded, tuned, changes)
    if candidate is None or dict(candidate.changes) != dict(changes):
        raise ValueError("changes that are no candidate of this file")
    return candidate


def of(loaded: Loaded, tuned: Target, found: Loaded, changes: Mapping[str, Any]) -> Candidate:
    """A changed pipeline as a candidate: what of the changes says what the file says anyway is no change."""
    stage = found.pipeline.stages[tuned.stage.index]
    assert isinstance(stage, Train)
    settings, before = stage.effective(found.pipeline), tuned.stage.effective(loaded.pipeline)
    same = {
        tuned.keys["sync"]: settings.sync.plain() == before.sync.plain(),
        tuned.keys["hooks"]: _plain(settings) == _plain(before),
        tuned.keys[CAP]: found.pipeline.ddp.bucket_cap_mb == loaded.pipeline.ddp.bucket_cap_mb,
        tuned.keys["accumulate"]: settings.accumulate == before.accumulate,
    }
    return Candidate({key: value for key, value in changes.items() if not same[key]}, found, settings)


def _plain(settings: TrainSettings) -> list[Any]:
    return [hook.plain() for hook in settings.hooks]


def _said(candidate: Candidate) -> tuple[Any, ...]:
    settings = candidate.settings
    cap_mb = candidate.loaded.pipeline.ddp.bucket_cap_mb
    return repr(settings.sync.plain()), repr(_plain(settings)), cap_mb, settings.accumulate
