"""Run folders whose records are known, because they are made up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddprun.telemetry.records import PARTS

STEP_US = 10_000
LAPS = (
    ("data", 500),
    ("forward", 2000),
    ("backward", 6000),
    ("optimizer", 1000),
    ("sync", 400),
    ("other", 100),
)


def make(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 20,
    late: int | None = None,
    name: str = "made-up",
    hooks: tuple[str, ...] = (),
    stages: tuple[tuple[str, ...], ...] = (),
    every: int = 1,
    fidelity_every: int = 0,
    groups: bool = False,
    evaluated: tuple[int, ...] = (),
    above: float = 0.0,
) -> Path:
    """A run of two buckets a step, in which `late` is 3 ms later in backward than the others.

    Args:
        folder: to make.
        ranks: how many.
        steps: how many.
        late: a rank, or none.
        name: of the pipeline.
        hooks: of the stack.
        stages: in place of `hooks`, of the stack of each of several stages that divide the steps evenly.
        every: how manieth step is recorded.
        fidelity_every: how manieth step compares its buckets with the exact mean.
        groups: whether there are learning rates of two groups of parameters, and a gradient norm.
        evaluated: the steps after which there was an evaluation.
        above: what all losses are higher by.
    """
    stacks = stages or (hooks,)

    def stage_of(step: int) -> int:
        return (step - 1) * len(stacks) // steps

    for kind in ("steps", "buckets"):
        (folder / kind).mkdir(parents=True)
    for rank in range(ranks):
        with (folder / "steps" / f"rank-{rank:05}.jsonl").open("w") as file:
            for step in range(every, steps + 1, every):
                record = step_record(rank, step, late, above) | {"stage": stage_of(step)}
                if groups:
                    norms = {"grad_norm": 1.0 + rank, "group_grad_norms": [0.8 + rank, 0.6]}
                    record |= {"lr": [0.1, 0.01 / step], **norms}
                file.write(json.dumps(record) + "\n")
        with (folder / "buckets" / f"rank-{rank:05}.jsonl").open("w") as file:
            for step in range(every, steps + 1, every):
                for record in bucket_records(rank, step, late, stacks[stage_of(step)]):
                    record["stage"] = stage_of(step)
                    if fidelity_every and step % fidelity_every == 0:
                        fidelity = {"cosine": 1 - stage_of(step) / 10, "relative_l2": 0.1}
                        record["fidelity"] = fidelity | {
                            "norm_ratio": 1.0,
                            "residual_norm": 0.0,
                            "wire_bytes": 4000,
                        }
                    file.write(json.dumps(record) + "\n")
    told = events(ranks, steps, late, name, stacks, evaluated, above, groups)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    episodes = [] if late is None else [episode(late, steps)]
    summary = {
        "v": 1,
        "status": "done",
        "steps": steps,
        "samples": 8 * steps * ranks,
        "loss": 1 / max(1, steps),
        "metrics": {"accuracy": 0.9},
        "seconds": steps * STEP_US / 1e6,
        "seconds_in_steps": steps * STEP_US / 1e6,
        "steps_per_s": 1e6 / STEP_US,
        "exposed_communication_s": steps * 3000 / 1e6,
        "straggler_wait_s": [0.0] * ranks,
        "stragglers": episodes,
        "wire_bytes": 4000 * steps * ranks,
        "world_size": ranks,
        "versions": {"ddprun": "0.1.0"},
        "stages": [{"kind": "train", "steps": steps // len(stacks), "seconds": 1.0} for _ in stacks],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def offset_us(rank: int) -> int:
    """How far a rank's clock is ahead of rank 0's."""
    return 5_000_000 * rank


def start_us(rank: int, step: int) -> int:
    """By the rank's own clock."""
    return 1_000_000 + step * STEP_US + offset_us(rank)


def step_record(rank: int, step: int, late: int | None, above: float) -> dict[str, Any]:
    """All wait 3 ms of their backward for the late rank; that one works."""
    waits = 0 if late in (None, rank) else 3000
    us = {f"{part}_us": length for part, length in LAPS}
    us["backward_us"] -= waits
    parts = {part: us.get(part, 0) for part in PARTS} | {"exposed_wait_us": waits}
    assert sum(parts.values()) == STEP_US
    end = start_us(rank, step) + 8500
    return {
        "v": 1,
        "rank": rank,
        "stage": 0,
        "step": step,
        "samples": 8,
        "loss": 1 / step + above + rank,
        "mean_loss": 1 / step + above,
        "lr": None,
        "grad_norm": None,
        "group_grad_norms": None,
        "start_us": start_us(rank, step),
        **parts,
        "step_us": STEP_US,
        "cpu_us": STEP_US,
        "laps": [list(lap) for lap in LAPS],
        "waits": [[end - waits, end]] if waits else [],
    }


def bucket_records(
    rank: int, step: int, late: int | None, hooks: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Two buckets, ready 3 and 5 ms into the step; 3 ms later on the late rank."""
    for bucket, params in enumerate((["3.weight", "3.bias"], ["1.weight", "1.bias"])):
        ready = start_us(rank, step) + 3000 + 2000 * bucket + (3000 if rank == late and bucket else 0)
        all_ready = start_us(rank, step) + 3000 + 2000 * bucket + (3000 if late is not None and bucket else 0)
        done = all_ready + 400
        yield {
            "v": 1,
            "rank": rank,
            "stage": 0,
            "step": step,
            "kind": "gradient",
            "bucket": bucket,
            "params": params,
            "dtype": "float32",
            "numel": 500,
            "bytes": 2000,
            "wire_bytes": 2000,
            "between_hosts_bytes": 0,
            "hooks": list(hooks),
            "ready_us": ready,
            "all_ready_us": all_ready,
            "launch_us": ready + 10,
            "done_us": done,
            "encode_us": 10,
            "decode_us": 20,
            "legs": [
                {
                    "op": "all_reduce",
                    "group": "world.0",
                    "dtype": "float32",
                    "bytes": 2000,
                    "wire_bytes": 2000,
                    "start_us": ready + 10,
                    "done_us": done - 20,
                }
            ],
        }


def episode(late: int, steps: int) -> dict[str, Any]:
    """The one in which a rank was late."""
    return {
        "rank": late,
        "cause": "backward",
        "bucket": 1,
        "params": ["1.weight", "1.bias"],
        "late_us": 3000.0,
        "step_us": float(STEP_US),
        "first_step": 1,
        "last_step": steps,
    }


def events(
    ranks: int,
    steps: int,
    late: int | None,
    name: str,
    stacks: tuple[tuple[str, ...], ...],
    evaluated: tuple[int, ...],
    above: float,
    groups: bool,
) -> list[dict[str, Any]]:
    """What rank 0 told."""

    def event(name_: str, at: int, **facts: Any) -> dict[str, Any]:
        return {
            "event": name_,
            "rank": 0,
            "level": "info",
            "time": "2026-01-01T00:00:00Z",
            "monotonic_us": at,
            **facts,
        }

    offsets = [float(offset_us(rank)) for rank in range(ranks)]
    told = [
        event("clock_offsets", 1_000_000, offset_us=offsets, error_us=[50.0] * ranks),
        event(
            "started",
            1_000_100,
            pipeline=name,
            digest="0",
            world_size=ranks,
            hosts=["a"] * ranks,
            device="cpu",
            backend="gloo",
            buckets=[],
            groups=["head.*, *.bias", "the rest"] if groups else [],
        ),
        event("buffers", 1_000_200, verdict="the model has no buffers: nothing is sent"),
        *(
            event("stage_started", 1_000_300, stage=index, kind="train", sync="every_step", hooks=list(hooks))
            for index, hooks in enumerate(stacks)
        ),
        *(
            event("evaluated", 1_100_000, stage=0, step=step, loss=2 / step + above, accuracy=0.9)
            for step in evaluated
        ),
        event("checkpoint_written", 1_150_000, step=10, seconds=0.02, bytes=1000, folder="x"),
    ]
    if late is not None:
        facts = episode(late, steps) | {"straggler": late}
        del facts["rank"]
        told.append(event("straggler", 1_200_000, step=20, **facts))
    return told


SENT = ((100_000, 10_000), (150_000, 30_000), (50_000, 40_000), (200_000, 47_000))
"""Bytes of each bucket of `over_a_link`, and when it is ready, in microseconds: two wait for others."""


def over_a_link(
    folder: Path,
    *,
    bytes_per_s: float = 10e6,
    steps: int = 12,
    late_us: int = 0,
    longer_us: int = 0,
    every: int = 1,
) -> Path:
    """A run of a rank on each of two hosts, whose link carries one bucket after the other.

    The first three steps are ten times as long, and what they send ten times as large.

    Args:
        folder: to make.
        bytes_per_s: of the link.
        steps: how many.
        late_us: how much later rank 1 has bucket 2, and all behind it, ready.
        longer_us: how much longer bucket 1 is under way than the link takes for it.
        every: how manieth step exchanges anything.
    """
    for kind in ("steps", "buckets"):
        (folder / kind).mkdir(parents=True)
    told = events(2, steps, None, "made-up", ((),), (), 0.0, False)
    for event in told:
        if event["event"] == "started":
            event["hosts"] = ["a", "b"]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    for rank in range(2):
        lines: list[dict[str, Any]] = []
        buckets: list[dict[str, Any]] = []
        start = 1_000_000 + offset_us(rank)
        for step in range(1, steps + 1):
            times, sends = (10 if step <= 3 else 1), step % every == 0
            own = end = times * SENT[-1][1] + 2000 + late_us * rank
            free = 0
            for bucket, (nbytes, ready) in enumerate(SENT if sends else ()):
                late = late_us if bucket >= 2 else 0
                ready_at, all_ready = times * ready + late * rank, times * ready + late
                free = max(free, all_ready) + round(1e6 * times * nbytes / bytes_per_s)
                done = free + (longer_us if bucket == 1 else 0)
                end = max(end, done)
                sent = {"bytes": times * nbytes, "wire_bytes": times * nbytes}
                leg = {"op": "all_gather", "group": "world.0", "dtype": "float32", **sent}
                record = next(bucket_records(rank, step, None, ()))
                record |= {"bucket": bucket, "params": [f"{bucket}.weight"], **sent}
                record["between_hosts_bytes"] = times * nbytes
                record |= {"ready_us": start + ready_at, "all_ready_us": start + all_ready}
                record |= {"done_us": start + done, "encode_us": 0, "decode_us": 0}
                record["legs"] = [{**leg, "start_us": start + ready_at, "done_us": start + done}]
                buckets.append(record)
            late_wait = late_us if sends and not rank else 0
            record = step_record(rank, step, None, 0.0) | {"loss": 1.0, "mean_loss": 1.0, "laps": []}
            record |= dict.fromkeys(PARTS, 0) | {"backward_us": own, "optimizer_us": 5000}
            record |= {"exposed_wait_us": late_wait, "exposed_wire_us": end - own - late_wait}
            record |= {"start_us": start, "step_us": end + 5000, "cpu_us": own + 5000}
            record["waits"] = [[start + own, start + end]] if end > own else []
            lines.append(record)
            start += end + 5000
        for kind, records in (("steps", lines), ("buckets", buckets)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (folder / kind / f"rank-{rank:05}.jsonl").write_text(text)
    return folder
