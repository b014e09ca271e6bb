"""Predicted against measured: the steps of a stage and their buckets, and a difference that is not explained.

What was predicted is a file that `ddprun explain --format json` printed, or else what the run's own records
explain (`replay.py`). Nothing that the pipeline names is imported.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ddprun.config.resolved import flow
from ddprun.predict.links import Level, rate_of
from ddprun.report.digest import Digest, Stage, stragglers
from ddprun.report.replay import WARM_UP, Measured, Moments, Network, Part, Replay, numbered, read, replay
from ddprun.run_files import parse
from ddprun.units import count, duration

MOST_BYTES = 64 << 20
"""Of a file."""

_MUCH = 0.1  # a difference that wants a reason
_MOST_OF = 0.5  # what accounts for so much of a difference is its reason
_NEAR_LARGEST = 0.8
_BUSY = 0.8  # a process that has its cores computes for more of the time in which it does not wait


class PredictionError(Exception):
    """A file is not what `ddprun explain` prints."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A stage: predicted and measured, in microseconds."""

    stage: str
    sentences: Sequence[str]
    step: Mapping[Part, tuple[float, float]] = field(default_factory=dict)
    buckets: Mapping[str, tuple[Moments | None, Moments | None]] = field(default_factory=dict)
    sweep: Sequence[tuple[int, float, float]] = ()
    """Predicted for other numbers of ranks: how many, a step, and how long it waits."""


# A prediction in a file.


_Us = Annotated[float, Field(strict=True, ge=0, lt=2**63)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _PredictedBucket(BaseModel):
    bucket: Annotated[str, Field(strict=True, max_length=100)]
    ready_us: _Us
    done_us: _Us


class _PredictedRanks(BaseModel):
    ranks: Annotated[int, Field(strict=True, gt=0, lt=2**31)]
    step_us: Annotated[float, Field(strict=True, gt=0, lt=2**63)]
    exposed_us: _Us


class _Predicted(BaseModel):
    step_us: Annotated[float, Field(strict=True, gt=0, lt=2**63)]
    parts_us: dict[str, _Us]
    waits_us: dict[str, _Us]
    links_busy_us: dict[Level, _Us]
    host_sends_bytes: _Us
    buckets: list[_PredictedBucket]
    sweep: Annotated[list[_PredictedRanks], Field(max_length=100)] = []

    @property
    def parts(self) -> dict[Part, float]:
        """A step, divided as records divide it."""
        late, hooks_us = self.waits_us.get("late", 0.0), self.waits_us.get("hooks", 0.0)
        wire = sum(self.waits_us.values()) - late - hooks_us
        hooks = self.parts_us.get("hooks", 0.0) + hooks_us
        own = self.step_us - hooks - late - wire
        return {"own": own, "hooks": hooks, "late": late, "wire": wire, "step": self.step_us}

    @property
    def moments(self) -> dict[str, Moments]:
        """Of each bucket, under the name that records have for it."""
        times = Counter[str]()
        found = {}
        for one in self.buckets:
            times[one.bucket] += 1
            found[numbered(one.bucket, times[one.bucket])] = Moments(one.ready_us, one.done_us)
        return found


class _PredictedStage(BaseModel):
    stage: _Count
    kind: str
    sync: Any = None
    hooks: list[str | dict[str, Any]] = []
    cycle: _Count = 1
    predicted: _Predicted | None = None


class Prediction(BaseModel):
    """What `ddprun explain --link … --format json` printed, as far as it is needed."""

    v: Literal[1]
    ranks: _Count
    hosts: _Count
    stages: list[_PredictedStage]

    @classmethod
    def read(cls, data: bytes) -> "Prediction":
        """Check what anybody may have written.

        Raises:
            PredictionError: says what is wrong with it.
        """
        if len(data) > MOST_BYTES:
            raise PredictionError(f"longer than {MOST_BYTES:,} bytes")
        try:
            found = cls.model_validate(parse(data))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise PredictionError(f"{place}{': ' * bool(place)}{fault['msg']}") from None
        except ValueError as error:
            raise PredictionError(str(error)) from None
        if all(stage.predicted is None for stage in found.stages):
            raise PredictionError("no stage has `predicted`; `--link` adds it")
        return found


# Both, side by side.


def compare(digest: Digest, prediction: Prediction | None = None) -> list[Compared]:
    """The stages of a run, against a prediction or against what their records explain."""
    started = digest.run.first("started") or {}
    hosts = len(set(started.get("hosts") or [""]))
    network = Network(hosts, started.get("world_size", digest.ranks), started.get("device", "cpu") == "cpu")
    measured, found = read(digest), list[Compared]()
    for stage in digest.stages:
        if stage.index not in measured:
            continue
        one = _Stage(digest, stage, measured[stage.index], replay(measured[stage.index], network))
        if prediction is not None:
            found.append(one.against(prediction, network))
        elif one.replay is not None:
            found.append(one.explained(one.replay))
    return found


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a run, and what is known of it."""

    digest: Digest
    stage: Stage
    measured: Measured
    replay: Replay | None

    def explained(self, replay: Replay) -> Compared:
        """Against what the records explain."""
        measured, played = self.measured.parts(replay.steps), replay.played
        own, hooks = measured["own"], measured["hooks"]  # they are played as they were
        wire = max(0.0, played.us - own - hooks)
        predicted: dict[Part, float] = {
            "own": own,
            "hooks": hooks,
            "late": 0.0,
            "wire": wire,
            "step": played.us,
        }
        text = f"The link {replay.where} gave {rate_of(replay.bytes_per_s)}."
        if not replay.known:
            text = f"The link {replay.where} took too little of a step for its rate to be known."
        text += " Over it, with what ranks did themselves and with no rank late, a step takes "
        text += f"{duration(1e-6 * played.us)}; it took {duration(1e-6 * measured['step'])}."
        ends = {one.name: Moments(one.ready_us, one.done_us) for one in played.flights}
        return self._compared(text, predicted, measured, ends)

    def against(self, prediction: Prediction, network: Network) -> Compared:
        """Against a prediction, if it is of the same stage."""
        one = next((one for one in prediction.stages if one.stage == self.stage.index), None)
        if one is None or one.predicted is None:
            return Compared(self.stage.name, ["Nothing is predicted of this stage."])
        hooks = [next(iter(hook), "") if isinstance(hook, dict) else hook for hook in one.hooks]
        facts = {
            "kind": (one.kind, self.stage.kind),
            "ranks": (prediction.ranks, network.ranks),
            "hosts": (prediction.hosts, network.hosts),
            "sync": (flow(one.sync), flow(self.stage.sync)),
            "hooks": (flow(hooks), flow(list(self.stage.hooks))),
        }
        differ = [f"{name} {said} (in the run {was})" for name, (said, was) in facts.items() if said != was]
        if differ:
            text = f"The prediction is not compared, since it is of something else: {', '.join(differ)}."
            return Compared(self.stage.name, [text])
        measured = self.measured.parts(self.measured.steps, max(1, one.cycle))
        if not measured:
            text = f"Too few steps are recorded: it takes {one.cycle:,} after the first {WARM_UP}."
            return Compared(self.stage.name, [text])
        said, was = one.predicted.step_us, measured["step"]
        text = f"A step was predicted to take {duration(1e-6 * said)}, and took {duration(1e-6 * was)}"
        text += f" ({_percent(was, said)})."
        found = self._compared(text, one.predicted.parts, measured, one.predicted.moments, one.predicted)
        sweep = [(row.ranks, row.step_us, row.exposed_us) for row in one.predicted.sweep]
        return replace(found, sweep=sweep)

    def _compared(
        self,
        text: str,
        predicted: Mapping[Part, float],
        measured: Mapping[Part, float],
        ends: Mapping[str, Moments],
        by: _Predicted | None = None,
    ) -> Compared:
        step = {part: (us, measured[part]) for part, us in predicted.items()}
        names = dict.fromkeys((*ends, *(self.measured.buckets if by else ())))
        buckets = {name: (ends.get(name), self.measured.moments(name)) for name in names}
        found = Compared(self.stage.name, [text], step, buckets)
        return Compared(self.stage.name, [text, self._unexplained(found, by)], step, buckets)

    def _unexplained(self, found: Compared, by: _Predicted | None) -> str:
        """Which bucket differs by much, or else whether the step does, and the likely reason."""
        known = {name: (said, was) for name, (said, was) in found.buckets.items() if said and was}
        off = {name: was.done_us - said.done_us for name, (said, was) in known.items()}
        off = {name: us for name, us in off.items() if abs(us) > _MUCH * known[name][0].done_us}
        said_us, was_us = found.step["step"]
        if off:
            # What holds up one bucket holds up those behind it: the first of them is named.
            bucket = next(
                name for name in off if abs(off[name]) >= _NEAR_LARGEST * max(map(abs, off.values()))
            )
            us, (said, was) = off[bucket], known[bucket]
            text = f"{bucket[:1].upper()}{bucket[1:]} was done {_time(us)} {_word(us, 'later', 'earlier')} "
            text += f"than predicted ({_percent(was.done_us, said.done_us)})"
            if len(off) > 1:
                text += f", and {count(len(off) - 1, 'other bucket')} by more than {_MUCH:.0%}"
            return f"{text}: {self._reason(us, found, bucket, by)}."
        if abs(us := was_us - said_us) > _MUCH * said_us:
            text = f"The step took {_time(us)} {_word(us, 'longer', 'less')} than predicted"
            return f"{text}: {self._reason(us, found, None, by)}."
        return f"Neither the step nor a bucket differs from the prediction by more than {_MUCH:.0%}."

    def _reason(self, us: float, found: Compared, bucket: str | None, by: _Predicted | None) -> str:
        for amount_us, reason in self._evidence(found, bucket, by):
            if amount_us * math.copysign(1.0, us) >= _MOST_OF * abs(us):
                return reason
        busy = self.measured.busy
        if us > 0 and busy < _BUSY:
            return (
                f"ranks share too few cores: each had one for {busy:.0%} of the time in which it did not wait"
            )
        return "nothing in the records says why"

    def _evidence(
        self, found: Compared, bucket: str | None, by: _Predicted | None
    ) -> Iterator[tuple[float, str]]:
        """What records know of: by how many microseconds it makes a bucket, or else the step, later."""
        more_us = {part: was - said for part, (said, was) in found.step.items()}
        ends = {name: was.done_us for name, (_, was) in found.buckets.items() if was}
        said, was = found.buckets[bucket] if bucket else (None, None)
        late_us, last = self.measured.late(bucket or max(ends, key=ends.__getitem__, default=""))
        text = f"ranks waited {_time(late_us)} for the last one, which was not always the same"
        if last is not None:
            episodes = stragglers(self.digest, self.stage)
            causes = [f", late in {one['cause']}" for one in episodes if one["rank"] == last]
            text = f"rank {last} had it ready {_time(late_us)} after the others{''.join(causes[:1])}"
        yield (late_us - found.step["late"][0] if bucket else more_us["late"]), text
        if by is None:
            return
        if said and was:
            us = was.ready_us - said.ready_us
            yield us, f"it was ready {_time(us)} {_word(us, 'later', 'earlier')}"
        else:
            us = more_us["own"]
            yield us, f"ranks' own work took {_time(us)} {_word(us, 'longer', 'less')}"
        link, busy_us = self.replay, self.replay and by.links_busy_us.get(self.replay.level)
        if link and link.known and busy_us and by.host_sends_bytes:
            bytes_per_s = 1e6 * by.host_sends_bytes / busy_us
            took_us = was.done_us - was.ready_us if was else found.step["wire"][1]
            text = f"the link {link.where} gave {rate_of(link.bytes_per_s)}, and {rate_of(bytes_per_s)} was "
            yield took_us * (1 - link.bytes_per_s / bytes_per_s), f"{text}predicted with"
        us = more_us["hooks"]
        yield us, f"hooks took {_time(us)} {_word(us, 'longer', 'less')}"


def _time(us: float) -> str:
    return duration(1e-6 * abs(us))


def _word(us: float, more: str, less: str) -> str:
    return more if us > 0 else less


def _percent(was: float, said: float) -> str:
    return f"{was / said - 1:+.0%}" if said else "+∞"
