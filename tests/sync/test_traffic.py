"""What a policy sends, counted from the records."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddprun.telemetry.records import PARTS
from tests.engine.running import lines, run_pipeline, summary

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [700, 700], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05, momentum: 0.9}}
ddp: {bucket_cap_mb: 1}
MORE
stages:
"""
ELEMENTS = 64 * 700 + 700 + 700 * 700 + 700 + 700 * 10 + 10
S = 4 * ELEMENTS


def sent(
    folder: Path, more: str, ranks: int = 4, stages: str = "  - train: {steps: 24}\n"
) -> tuple[Path, Counter[tuple[str, int]]]:
    """The run, and what each of its ranks sent on average, in bytes, by kind and step."""
    name = f"run-{len(list(folder.iterdir()))}"
    run = run_pipeline(folder, PIPELINE.replace("MORE", more) + stages, ranks, name)
    found: Counter[tuple[str, int]] = Counter()
    for line in lines(run, "buckets"):
        found[line["kind"], line["step"]] += line["wire_bytes"] / ranks
    assert sum(found.values()) * ranks == pytest.approx(summary(run)["wire_bytes"], abs=ranks)
    return run, found


def test_a_policy_sends_once_in_its_period(tmp_path: Path) -> None:
    """A ring's 1.5 S from each of 4 ranks at whole periods, less what the hooks save; nothing between."""
    saved = {"[]": 1.0, "[fp16]": 0.5, "[int8]": 0.25 * (1 + 4 / 256)}
    stages = [(policy, hooks) for policy in ("local_sgd", "diloco", "average") for hooks in saved]
    text = "".join(
        f"  - train: {{steps: 24, sync: {{{policy}: {{every: 8}}}}, hooks: {hooks}}}\n"
        for policy, hooks in stages
    )
    run, found = sent(tmp_path, "", stages=text)
    for index, (policy, hooks) in enumerate(stages):
        first = 24 * index
        in_stage = {key: size for key, size in found.items() if first < key[1] <= first + 24}
        assert set(in_stage) == {("delta", first + step) for step in (8, 16, 24)}, (policy, hooks)
        for wire_bytes in in_stage.values():
            assert wire_bytes == pytest.approx(1.5 * S * saved[hooks], rel=0.005), (policy, hooks)
        mine = [line for line in lines(run, "buckets") if line["rank"] == 0 and line["step"] == first + 8]
        assert len(mine) > 1, "several buckets"
        assert sorted(name for line in mine for name in line["params"]) == sorted(
            f"{i}.{kind}" for i in (1, 3, 5) for kind in ("weight", "bias")
        )


def test_the_last_round_is_a_short_one_and_goes_the_same_way(tmp_path: Path) -> None:
    """24 steps with a period of 10: once more at the end, through the hooks, where the policy has any."""
    policies = dict.fromkeys(("local_sgd", "diloco", "broadcast"), "every: 10")
    policies["hierarchical_sgd"] = "across: 10, within: 10, hosts: 1"
    stages = "".join(
        f"  - train: {{steps: 24, sync: {{{policy}: {{{options}}}}}}}\n"
        for policy, options in policies.items()
    )
    run, found = sent(tmp_path, "hooks: [fp16]", 2, stages)
    for index, policy in enumerate(policies):
        kind, first = "parameters" if policy == "broadcast" else "delta", 24 * index
        in_stage = {key for key in found if first < key[1] <= first + 24}
        assert in_stage == {(kind, first + step) for step in (10, 20, 24)}, policy
        hooks = {tuple(line["hooks"]) for line in lines(run, "buckets") if line["stage"] == index}
        assert hooks == {("broadcast",) if policy == "broadcast" else ("fp16",)}


def test_fragments_go_out_at_steps_of_their_own(tmp_path: Path) -> None:
    """Each part once in a period, evenly spread; with overlap they are recorded where they are applied."""
    _, found = sent(tmp_path, "sync: {diloco: {every: 8, fragments: 2}}", 2)
    assert sorted(step for _, step in found) == [4, 8, 12, 16, 20, 24]
    assert found["delta", 4] + found["delta", 8] == S
    _, late = sent(tmp_path, "sync: {diloco: {every: 8, fragments: 2, overlap_steps: 3}}", 2)
    assert sorted({step for _, step in late}) == [7, 11, 15, 19, 23, 24]
    assert late["delta", 7] == found["delta", 4]
    assert late["delta", 24] == found["delta", 24] == S, "the last round of a part is a short one"


def test_hierarchical_sgd_sends_gradients_inside_hosts_and_changes_across(tmp_path: Path) -> None:
    """2(n-1)/n of S for the 2 ranks of a host in each step; for all 4 every eighth."""
    run, found = sent(tmp_path, "sync: {hierarchical_sgd: {within: 1, across: 8, hosts: 2}}")
    for step in range(1, 25):
        assert found["gradient", step] == S
        assert found["delta", step] == (1.5 * S if step % 8 == 0 else 0)
    groups = {(line["kind"], leg["group"]) for line in lines(run, "buckets") for leg in line["legs"]}
    assert groups == {("gradient", "within/2.0"), ("delta", "deltas.0")}
    all_ready = [line for line in lines(run, "buckets") if line["all_ready_us"] is not None]
    assert {line["kind"] for line in all_ready} == {"delta"}, "of a host alone it is not known"


def test_a_hierarchical_hook_keeps_its_inner_hooks_inside_a_host(tmp_path: Path) -> None:
    """Inside a host only its `within` is left of it; all ranks go through both levels."""
    hooks = "[{hierarchical: {hosts: 2, within: [fp16], across: [int8]}}]"
    run, _ = sent(tmp_path, f"sync: {{hierarchical_sgd: {{across: 8, hosts: 2}}}}\nhooks: {hooks}")
    legs: dict[str, set[tuple[str, str, str]]] = {}
    for line in lines(run, "buckets"):
        for leg in line["legs"]:
            legs.setdefault(line["kind"], set()).add((leg["op"], leg["group"], leg["dtype"]))
    assert legs["gradient"] == {("all_reduce", "within/2.0", "float16")}
    assert ("all_to_all", "deltas across/2.0", "uint8") in legs["delta"]
    assert ("all_to_all", "deltas within/2.0", "float16") in legs["delta"]


def test_optimizer_state_and_broadcasts_go_as_they_are(tmp_path: Path) -> None:
    """Momentum costs as much as the parameters; a broadcast passes down a chain, and needs no hooks."""
    _, found = sent(tmp_path, "sync: {local_sgd: {every: 8, optimizer_state: average}}\nhooks: [fp16]")
    assert found["optimizer", 8] == 1.5 * S
    assert found["delta", 8] == 0.75 * S
    run, found = sent(tmp_path, "sync: {broadcast: {every: 8, source: 3}}")
    assert set(found) == {("parameters", step) for step in (8, 16, 24)}
    assert found["parameters", 8] == 0.75 * S
    last = [line for line in lines(run, "buckets") if line["rank"] == 2]
    assert {line["wire_bytes"] for line in last} == {0}, "the end of the chain that starts at rank 3"


def test_ranks_tell_each_other_nothing_between_synchronisations(tmp_path: Path) -> None:
    """The mean loss is known where ranks meet, and is of all samples since; a step's parts add up."""
    run, _ = sent(tmp_path, "sync: {local_sgd: {every: 8}}", 2)
    steps = lines(run, "steps")
    known: dict[int, Any] = {line["step"]: line["mean_loss"] for line in steps if line["rank"] == 0}
    assert [step for step, loss in known.items() if loss is not None] == [8, 16, 24]
    for end in (8, 16, 24):
        mine = [line for line in steps if end - 8 < line["step"] <= end]
        assert known[end] == pytest.approx(sum(line["loss"] for line in mine) / len(mine))
    assert summary(run)["loss"] == known[24]
    for line in steps:
        parts = [line[part] for part in PARTS]
        assert sum(parts) == line["step_us"]
        assert min(parts) >= 0
        following = [s for s in steps if (s["rank"], s["step"]) == (line["rank"], line["step"] + 1)]
        assert all(line["start_us"] + line["step_us"] == after["start_us"] for after in following)
        meets = line["step"] % 8 == 0
        assert (line["exposed_wire_us"] + line["exposed_wait_us"] > 0) == meets, line


SPY = """
import json, os
import torch
from ddprun_hooks import Hook

class Spy(Hook):
    async def __call__(self, payload, comm):
        sent = payload.tensor.max().item()
        with open(f"sent-{os.environ['RANK']}.jsonl", "a") as file:
            print(json.dumps([payload.kind, comm.size, sent]), file=file)
        return await comm.reduce(payload.tensor)

def shift(model, by):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(by * int(os.environ["RANK"]))
"""


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("{local_sgd: {every: 2}}", [["delta", 4, 0.375], ["delta", 4, 0.375], ["delta", 4, 0.375]]),
        (
            "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}",
            [["delta", 2, 0.75], ["delta", 4, 0.3125], ["delta", 2, 0.75]],
        ),
    ],
)
def test_what_travels_is_the_change_since_the_last_common_weights(
    tmp_path: Path, sync: str, expected: list[Any]
) -> None:
    """Training leaves weights alone, and rank r adds r/2 after each meeting of all ranks: rank 3 sends its
    share of 1.5, not of all that has come together before. Inside a host, 1.25 are left of it.
    """
    (tmp_path / "spy.py").write_text(SPY)
    text = PIPELINE.replace("lr: 0.05, momentum: 0.9", "lr: 1.0e-30").replace(
        "bucket_cap_mb: 1", "bucket_cap_mb: 25"
    )
    text = text.replace("MORE", f"hooks: [spy.Spy]\nsync: {sync}")
    text += "  - train: {steps: 6, mutate: {spy.shift: {by: 0.5}}}\n"
    run_pipeline(tmp_path, text, 4)
    lines = (tmp_path / "sent-3.jsonl").read_text().splitlines()
    sent = [json.loads(line) for line in lines][: len(expected)]
    assert [[kind, size, round(value, 3)] for kind, size, value in sent] == [
        [kind, size, pytest.approx(value, abs=1e-3)] for kind, size, value in expected
    ]
