"""What may be changed in a pipeline, and to what: the candidates of a search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from ddprun.config import LoadedPipeline, PipelineError, StepStageSettings, TrainStage, load
from ddprun.config.yaml_writer import flow_yaml
from ddprun.explain.model_probe import WorldShape
from ddprun.tune import TuneError
from ddprun_hooks.config.options import parse_hook_spec

BUCKET_CAP_KEY = "ddp.bucket_cap_mb"
TUNABLE_KEYS = ("sync", "hooks", BUCKET_CAP_KEY, "accumulate")  # what a search may change, for `--vary`

# What a candidate does to training: nothing, for gradients are averaged as they are at every step; they
# travel through hooks that lose something; or ranks meet in some steps only.
CandidateKind = Literal["exact", "lossy hooks", "rare exchange"]
CANDIDATE_KINDS: tuple[CandidateKind, ...] = get_args(CandidateKind)

_CAPS_MB = (1, 5, 25, 100, [1, 5, 25], [25, 5, 1])
_SPARSE = {"topk": {"density": 0.015625, "values": "int2", "decay": 0.95}}  # SparseLoCo's
_SPARSE_OUTER = {"outer_lr": 1.0, "outer_momentum": 0}  # and its outer optimizer
_CODECS: tuple[list[Any], ...] = (
    *([], ["fp16"], ["bf16"], ["int8"], ["fp8"], ["int4"], ["int2"], ["topk"], [_SPARSE], ["powersgd"]),
)
_PERIODS = (2, 4, 8, 16, 32)
_LONG_PERIODS = (8, 16, 32)
_PERIOD_OPTIONS = {"every", "within", "across", "overlap_steps"}
_PERIODS_PER_OVERLAP = 4  # a period is so many times as long as an exchange that overlaps with training
_LOSSINESS_BY_HOOK = {"fp16": 1, "bf16": 1, "int8": 2, "fp8": 2, "int4": 3}
_MAX_LOSSINESS = 4
_LOSSLESS_HOOKS = ("shared_memory", "hierarchical")  # as far as their own options are
_MIN_SYNCS_PER_STAGE = 4  # with fewer, what a policy does to training is chance


@dataclass(frozen=True, slots=True)
class TunedStage:
    """The stage of a pipeline that is tuned: the one that trains for most steps."""

    loaded: LoadedPipeline
    stage: TrainStage
    steps: int | None  # None: not known
    paths_by_key: Mapping[str, str]  # of each of `TUNABLE_KEYS` the place in the file, present or not

    def with_changes(self, changes: Mapping[str, Any]) -> "Candidate | None":
        """The changed pipeline; None: `ddprun check` refuses it, or ranks would hardly ever synchronise."""
        overrides = [f"{key}={flow_yaml(value)}" for key, value in changes.items()]
        try:
            changed = load(self.loaded.path, (*self.loaded.overrides, *overrides), self.loaded.folder)
        except PipelineError:
            return None
        candidate = self._make_candidate(changed, changes)
        if candidate.settings.plan.round is not None:
            return None  # how long its steps are is known while they run
        steps = candidate.exchange_period * _MIN_SYNCS_PER_STAGE
        return None if candidate.changes and self.steps is not None and steps > self.steps else candidate

    def candidate_from_other_host(self, changes: Mapping[str, Any]) -> "Candidate":
        """The candidate with changes from another host; raises TuneError if they make none."""
        if set(changes) <= set(self.paths_by_key.values()):
            candidate = self.with_changes(changes)
            if candidate is not None and dict(candidate.changes) == dict(changes) != {}:
                return candidate
        raise TuneError(f"the first host sent changes that are no candidate of this file: {changes}")

    @property
    def unchanged_candidate(self) -> "Candidate":
        """The file as it is."""
        return self._make_candidate(self.loaded, {})

    def _make_candidate(self, changed: LoadedPipeline, changes: Mapping[str, Any]) -> "Candidate":
        """A changed pipeline as a candidate; changes to what the file says anyway are left out."""
        stage = changed.pipeline.stages[self.stage.index]
        assert isinstance(stage, TrainStage)
        candidate = Candidate(changes, changed, stage.effective_settings(changed.pipeline))
        if not changes:
            return candidate
        before = self.unchanged_candidate.tunable_values
        same = {
            self.paths_by_key[key] for key, value in candidate.tunable_values.items() if value == before[key]
        }
        return replace(candidate, changes={key: value for key, value in changes.items() if key not in same})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline with some of its keys changed."""

    changes: Mapping[str, Any]  # by the key's place in the file: the new value, as the file would hold it
    loaded: LoadedPipeline
    settings: StepStageSettings  # of the stage that is tuned

    @property
    def name(self) -> str:
        """Its changes, as overrides: no two candidates have the same."""
        return ", ".join(self.overrides) or "the file as it is"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its changes, each as `--set` takes it."""
        return tuple(f"{key}={flow_yaml(value)}" for key, value in self.changes.items())

    @property
    def tunable_values(self) -> dict[str, Any]:
        """The value of each of `TUNABLE_KEYS`, as a file would hold it."""
        return {
            "sync": self.settings.sync.to_plain_data(),
            "hooks": self.settings.hook_specs,
            BUCKET_CAP_KEY: self.loaded.pipeline.ddp.bucket_cap_mb,
            "accumulate": self.settings.accumulate,
        }

    @property
    def exchange_period(self) -> int:
        """Steps from one exchange to the next, among all ranks or, as in gossip, among parts of them."""
        return self.settings.plan.exchange_period

    @property
    def lossiness(self) -> int:
        """How much is lost of what travels, in grades from 0 (nothing) to 4."""
        if not self.settings.plan.uses_hooks:
            return 0
        return max([_hook_lossiness(hook.name, hook.options) for hook in self.settings.hooks] or [0])

    @property
    def kind(self) -> CandidateKind:
        """What it does to training."""
        if self.settings.plan.gradients != "all":
            return "rare exchange"
        return "lossy hooks" if self.lossiness else "exact"

    @property
    def rank_samples_per_step(self) -> int:
        """How many samples a rank takes in one step."""
        return self.settings.accumulate * self.loaded.pipeline.loader.batch_size

    def at_least_as_lossy_as(self, other: "Candidate") -> bool:
        """Whether it surely loses no less: the same policy and options apart from period and overlap, as rare
        or rarer, and hooks as lossy or more.
        """
        same = self._policy_without_period == other._policy_without_period
        return same and self.exchange_period >= other.exchange_period and self.lossiness >= other.lossiness

    @property
    def _policy_without_period(self) -> tuple[str, dict[str, Any]]:
        sync = self.settings.sync
        return sync.name, {key: value for key, value in sync.options.items() if key not in _PERIOD_OPTIONS}


def _hook_lossiness(name: str, options: Mapping[str, Any]) -> int:
    if name not in _LOSSLESS_HOOKS:
        return _LOSSINESS_BY_HOOK.get(name, _MAX_LOSSINESS)
    legs = [spec for leg in ("within", "across") for spec in options.get(leg) or ()]
    return max([_hook_lossiness(*parse_hook_spec(spec)) for spec in legs] or [0])


def find_tuned_stage(loaded: LoadedPipeline, steps: Mapping[int, int | None]) -> TunedStage:
    """The stage to tune; `steps`: how many each has, by index. Raises PipelineError if no stage trains."""
    stages = loaded.pipeline.train_stages()
    if not stages:
        raise loaded.error("stages", "no stage trains: there is nothing to tune", "add a train stage")
    stage = max(stages, key=lambda one: steps.get(one.index) or 0)
    keys = {key: key if key == BUCKET_CAP_KEY else stage.key_path(key) for key in TUNABLE_KEYS}
    return TunedStage(loaded, stage, steps.get(stage.index), keys)


def values_to_try(world: WorldShape, *, on_cpu: bool) -> dict[str, list[Any]]:
    """The values to try for each of `TUNABLE_KEYS`; the file's own values are tried anyway."""
    several = world.hosts > 1 and world.ranks_per_host > 1
    within: list[Any] = ["shared_memory"] if on_cpu else []
    hooks: list[Any] = list(_CODECS)
    if world.hosts == 1 and on_cpu:
        hooks += [["shared_memory"], ["fp16", "shared_memory"]]
    if several:
        hooks += [[{"hierarchical": {"within": within, "across": leg}}] for leg in _CODECS]
    sync: list[Any] = ["every_step", *({"local_sgd": {"every": every}} for every in _PERIODS)]
    sync += [
        {"diloco": {"every": every, "overlap_steps": every // _PERIODS_PER_OVERLAP}}
        for every in _LONG_PERIODS
    ]
    sync += [{"diloco": {"every": every, **_SPARSE_OUTER}} for every in _LONG_PERIODS]
    if world.ranks > 2:  # a pair of two ranks is all of them, as in local_sgd
        sync += [{"gossip": {"every": every}} for every in _PERIODS]
    if several:
        sync += [{"hierarchical_sgd": {"across": every}} for every in _PERIODS]
    return {
        "sync": [one for one in sync if world.ranks > 1 or one == "every_step"],
        "hooks": hooks if world.ranks > 1 else [],
        BUCKET_CAP_KEY: list(_CAPS_MB),
        "accumulate": [],
    }


def generate_candidates(
    tuned: TunedStage, tried: Mapping[str, Sequence[Any]], keys: Sequence[str]
) -> Iterator[Candidate]:
    """All combinations of these keys' values that `ddprun check` accepts, the unchanged file first."""
    known = set[str]()
    for chosen in product(*([None, *tried[key]] for key in keys)):
        values = zip(keys, chosen, strict=True)
        changes = {tuned.paths_by_key[key]: value for key, value in values if value is not None}
        candidate = tuned.with_changes(changes)
        if candidate is None:
            continue
        ignored = {} if candidate.settings.plan.uses_hooks else {"hooks": None}
        if (settings := repr({**candidate.tunable_values, **ignored})) not in known:
            known.add(settings)
            yield candidate
