"""The formats of a run's records, each said once: the run writes these, and its readers get them back.

`docs/records.md` explains the fields. A line is checked when it is read: a missing field, or one of another
type, raises a ValueError. Other fields may be there. A field with a default is left out where it has nothing
to say.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

RECORDS_VERSION = 1  # of all records

OWN_PARTS = ("data_us", "forward_us", "backward_us", "hook_us", "optimizer_us", "sync_us", "other_us")
"""What the training thread did itself: without waiting, and all parts but `hook_us` without hooks."""

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what arrays take
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
StepNumber = Annotated[int, Meta(gt=0, le=2**63 - 1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
StragglerCause = Literal["data", "forward", "backward", "optimizer", "sync", "other", "communication"]

_MAX_PROFILED_STEPS = 100_000


class MachineRecord(Struct):
    """Memory of a rank, and the load of its host."""

    rss_bytes: Count
    device_bytes: Count | None
    load: float


class StepRecord(Struct, kw_only=True, omit_defaults=True):
    """A line of `steps/rank-….jsonl`."""

    v: int
    rank: Count
    stage: Count
    step: StepNumber
    samples: Count
    loss: float | None
    mean_loss: float | None
    lr: Sequence[float | None] | None
    grad_norm: float | None
    group_grad_norms: Sequence[float | None] | None
    start_us: Int64
    data_us: Int64
    forward_us: Int64
    backward_us: Int64
    exposed_hook_us: Int64
    exposed_wait_us: Int64
    exposed_wire_us: Int64
    optimizer_us: Int64
    sync_us: Int64
    other_us: Int64
    step_us: Int64
    cpu_us: Int64
    laps: list[tuple[str, Int64]]
    waits: list[tuple[Int64, Int64]]
    values: Mapping[str, float | None] | None = None
    mean_values: Mapping[str, float | None] | None = None
    machine: MachineRecord | None = None


_FIELDS = StepRecord.__struct_fields__
PARTS = _FIELDS[_FIELDS.index("start_us") + 1 : _FIELDS.index("step_us")]
"""The parts of a step, as fields of its record: they add up to `step_us`."""


class CollectiveRecord(Struct):
    """One of a bucket's `legs`."""

    op: str
    group: str
    dtype: str
    bytes: Count
    wire_bytes: Count
    start_us: Int64
    done_us: Int64


class BucketRecord(Struct, kw_only=True, omit_defaults=True):
    """A line of `buckets/rank-….jsonl`."""

    v: int
    rank: Count
    stage: Count
    step: StepNumber
    kind: Literal["gradient", "delta", "parameters", "buffers", "optimizer"]
    bucket: Count
    params: list[str]
    dtype: str
    numel: Count
    bytes: Count
    wire_bytes: Count
    between_hosts_bytes: Count
    hooks: tuple[str, ...]
    ready_us: Int64
    all_ready_us: Int64 | None
    launch_us: Int64
    done_us: Int64
    encode_us: Int64
    decode_us: Int64
    legs: list[CollectiveRecord]
    params_ready_us: list[Int64 | None] | None = None
    completed_by: str | None = None
    fidelity: dict[str, float | None] | None = None  # `ddprun_hooks.comm.trace.Fidelity`; None: NaN


class ProfilerRecord(Struct, kw_only=True, omit_defaults=True):
    """A line of `profile/rank-….jsonl`: a slice has a length, an end of a flow an id."""

    v: int
    rank: Count
    step: StepNumber
    first_step: StepNumber
    track: str
    ph: str
    name: str
    cat: str
    start_us: float
    us: float | None = None
    id: Count | None = None
    args: dict[str, Any]

    def __post_init__(self) -> None:
        if self.us is None is self.id or not 0 <= self.step - self.first_step < _MAX_PROFILED_STEPS:
            raise ValueError("neither a slice nor a flow of the profiled steps")


class StragglerEpisode(Struct):
    """An episode in which a rank was late for one cause."""

    rank: Count
    cause: StragglerCause
    bucket: Count | None  # gradient bucket that was late, if the cause is backward and there are such buckets
    params: tuple[str, ...]  # the parameters in that bucket
    late_us: float  # by how much, in the median of a step; the mean over windows
    step_us: PositiveFloat  # how long a step takes, in the median
    first_step: Count
    last_step: Count

    def __post_init__(self) -> None:
        if self.first_step > self.last_step:
            raise ValueError("ends before it begins")

    def describe(self) -> str:
        """In one line."""
        cause = self.cause if self.bucket is None else f"{self.cause}, bucket {self.bucket}"
        return f"the others wait for rank {self.rank}: {self.late_us / 1000:.1f} ms late ({cause})"


class Event(Struct, kw_only=True, tag_field="event"):
    """A line of `events.jsonl`, of a kind that readers know. `make_event_logger` fills in its fields."""

    level: str = ""
    time: str = ""
    monotonic_us: Int64 = 0


class Started(Event, tag="started"):
    """The run has started, or has been resumed."""

    version: str = ""
    pipeline: str | None = None
    digest: str = ""
    world_size: Count = 0
    hosts: list[str] = []  # of each rank
    device: str = ""
    backend: str = ""
    cores: PositiveFloat | None = None
    device_name: str | None = None
    buckets: list[dict[str, Any]] = []
    groups: list[str] = []


class Resumed(Event, tag="resumed"):
    """The run continues from a checkpoint."""

    world_sizes: list[tuple[StepNumber, Count]] = []  # as in the summary


class BufferUsage(Event, tag="buffers"):
    """What the model's forward passes do with its buffers, and what follows from that."""

    found: bool = False
    changing: list[str] = []
    constant: list[str] = []
    counters: list[str] = []
    bytes: Count = 0
    read_in_training: bool | None = None
    verdict: str | None = None


class StageStarted(Event, tag="stage_started"):
    """A stage has started; `sync` and `buffers` are as the pipeline has them."""

    stage: Count
    kind: str = "train"
    steps: Count | None = None
    turns: tuple[str, ...] = ()
    sync: Any = None
    hooks: tuple[str, ...] = ()
    buffers: Any = None


class ClockOffsets(Event, tag="clock_offsets"):
    """How far each rank's clock is ahead of rank 0's, and the bound of the error."""

    offset_us: list[float]
    error_us: list[float] = []


class SharesSet(Event, tag="shares"):
    """The samples of each rank in a full micro-batch, from a step on; each attempt of a stage has a first."""

    step: StepNumber
    samples: list[Count]
    stage: Count = 0
    speeds: list[float] = []  # relative to the fastest rank's; empty: not known


class CheckpointWritten(Event, tag="checkpoint_written"):
    """A checkpoint is on disk."""

    step: Count
    seconds: float
    bytes: Count = 0
    folder: str = ""
    nonfinite: str | None = None  # the first parameter that is not finite


class Hang(Struct):
    """What the watchdog found out about a hang."""

    ranks: list[Count]  # that cause it
    step: Count
    collective: str
    carries: str
    activities: list[str] = []  # what the first of these ranks are doing, and where


class Failure(Struct):
    """What ended a run: `error` of its summary."""

    rank: Count  # that failed first, or reported the hang
    message: str
    hang: Hang | None = None


class Summary(Struct, kw_only=True):
    """`summary.json`. None: not known, as the totals of all ranks of a run that an error ended."""

    v: int = RECORDS_VERSION
    status: str
    steps: Count
    error: dict[str, Any] | None = None
    samples: Count | None = None
    loss: float | None = None
    values: dict[str, float | None] | None = None
    metrics: dict[str, float | None] | None = None
    best: dict[str, Any] | None = None
    nonfinite: dict[str, Any] | None = None
    seconds: float | None = None
    seconds_in_steps: float | None = None
    steps_per_s: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_communication_s: float | None = None
    straggler_wait_s: list[float] | None = None
    trackers_dropped: dict[str, int] | None = None
    stragglers: list[StragglerEpisode] | None = None
    wire_bytes: Count | None = None
    world_size: Count | None = None
    world_sizes: list[tuple[StepNumber, Count]] | None = None  # the first step of so many ranks, and how many
    backend: str | None = None
    device: str | None = None
    versions: dict[str, str] | None = None
    records_dropped: Count | None = None
    records_failure: str | None = None
    run_dir: str | None = None
    audit: dict[str, Any] | None = None
    stages: list[dict[str, Any]] | None = None
