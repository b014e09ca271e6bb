"""What a stage does to ranks, in order: the one description that a run carries out and `explain` counts."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ddprun.config import StepStage, load
from ddprun.engine.stage_actions import EqualizeState, StageActions, equalizing_actions
from ddprun.sync.plan import BufferPlan, ReplicaConsistency
from tests.engine.running import lines, run_pipeline

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [4], outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
"""


def sequence(folder: Path, stages: str, steps: int | None, **replicas: Any) -> StageActions:
    """Of the first stage, of a model whose buffers a and b change and are read."""
    (folder / "p.yaml").write_text(f"{PIPELINE}{stages}\n")
    pipeline = load(folder / "p.yaml").pipeline
    stage = pipeline.stages[0]
    assert isinstance(stage, StepStage)
    settings = stage.effective_settings(pipeline)
    everywhere = settings.plan.gradients == "all"
    buffers = BufferPlan(settings.buffers, ("a", "b"), ("a", "b"), True, everywhere)
    return StageActions(pipeline, stage, settings, buffers, ReplicaConsistency(**replicas), steps)


def told(found: StageActions, steps: int) -> list[str]:
    """All of a stage in words: each action, with what ranks have in common when it comes."""

    def words(moment: str, action: Any) -> str:
        facts = [getattr(action, name, None) for name in ("started", "what", "source", "recorded")]
        shown = " ".join(str(fact) for fact in facts if fact not in (None, ()))
        name = action if isinstance(action, str) else type(action).__name__
        return f"{moment} {name} {shown}".strip() + f" | {found.replicas.parameters}"

    text = [words("begin", action) for action in found.actions_at_begin()]
    for step in range(1, steps + 1):
        text += [words(f"{step} {moment}", action) for moment, action in found.actions_in_step(step)]
    return (
        text + [words("end", action) for action in found.actions_at_end(steps)] + [found.replicas.parameters]
    )


CASES = {
    "every step": (
        "ema: 0.9\naccumulate: 2\nstages: [train: {steps: 2}]",
        [
            *("1 before_forward EqualizeBuffers | common", "1 backward AverageGradients | common"),
            *("1 after_step AuditParameters False | common", "2 before_forward EqualizeBuffers | common"),
            *("2 backward AverageGradients | common", "end DueTransfers [] | common"),
            *("end compare frozen | common", "end AuditParameters False | common", "common"),
        ],
    ),
    "seldom": (
        "ema: 0.9\naudit: {every: 3}\nstages: [train: {steps: 3, sync: {local_sgd: {every: 2}}, "
        "mutate: {noise: {std: 0.1}}}]",
        [
            *("begin mutate | common", "2 after_step DueTransfers [0] | apart"),
            *("2 after_step EqualizeBuffers | common", "2 after_step AuditParameters False | common"),
            *("2 after_step mutate | common", "3 after_step AuditParameters True | apart"),
            *("end DueTransfers [0] | apart", "end EqualizeState averages | common"),
            *("end AuditParameters True | common", "common"),
        ],
    ),
    "mutated": (
        "stages: [train: {steps: 2, sync: {average: {every: 1}}, buffers: never, mutate: {noise: {std: 1}}}]",
        [
            *("begin mutate | common", "1 after_step DueTransfers [0] | apart"),
            *("1 after_step AuditParameters False | common", "1 after_step mutate | common"),
            *("2 after_step DueTransfers [0] | apart", "end DueTransfers [] | common"),
            *("end compare frozen | common", "end AuditParameters False | common", "common"),
        ],
    ),
    "alone": (
        "sync: independent\nbuffers: never\nstages: [train: {steps: 1}, train: {steps: 1}]",
        ["end DueTransfers [] | apart", "apart"],
    ),
    "noop": (
        "stages: [train: {steps: 1, hooks: [noop], buffers: never}]",
        [
            *("1 backward AverageGradients | common", "end DueTransfers [] | apart"),
            *("end EqualizeState parameters | apart", "end AuditParameters True | common", "common"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_all_of_a_stage_in_order(name: str, tmp_path: Path) -> None:
    """Each action once, at its moment, with what ranks have in common by then."""
    text, expected = CASES[name]
    steps = text.count("steps: 3") * 3 or text.count("steps: 2") * 2 or 1
    assert told(sequence(tmp_path, text, steps), steps) == expected


def test_a_last_step_that_nobody_knew_is_mutated_and_averaged(tmp_path: Path) -> None:
    """Where the length is not known, any step may be the last one."""
    text = CASES["mutated"][0]
    assert told(sequence(tmp_path, text, None), 2)[-6:] == [
        *("2 after_step DueTransfers [0] | apart", "2 after_step mutate | common"),
        *("end DueTransfers [] | apart", "end EqualizeState parameters | apart"),
        *("end AuditParameters True | common", "common"),
    ]
    overlapping = text.replace("average: {every: 1}", "diloco: {every: 4, fragments: 2, overlap_steps: 2}")
    assert told(sequence(tmp_path, overlapping, None), 4)[-6:] == [
        *("4 after_step DueTransfers [0] | apart", "4 after_step mutate | apart"),
        *("end DueTransfers [1] | apart", "end EqualizeState parameters | apart"),
        *("end AuditParameters True | common", "common"),
    ]


def test_gradients_on_unequal_momentum_begin_with_its_mean(tmp_path: Path) -> None:
    """Equal gradients keep ranks equal only if their optimizers' state is."""
    found = sequence(tmp_path, "stages: [train: {steps: 1}]", 1, optimizer="apart")
    assert list(found.actions_at_begin()) == [EqualizeState("optimizer")]
    assert list(found.actions_at_begin()) == []


def test_what_goes_with_the_parameters() -> None:
    """The weights' averages if they differ; the optimizer's state of a rank, where that is read."""
    replicas = ReplicaConsistency("apart", averages_differ=True, optimizer_is_read=True)
    differ = [replicas.weights_differ]
    of_rank = [EqualizeState("parameters", 1), EqualizeState("optimizer", 1), EqualizeState("averages", 1)]
    assert list(equalizing_actions(replicas, 1)) == of_rank
    differ.append(replicas.weights_differ)
    assert list(equalizing_actions(replicas)) == [EqualizeState("parameters")]
    replicas.optimizer = "apart"
    assert [*differ, replicas.weights_differ] == [True, False, True]


def test_steps_with_an_exchange(tmp_path: Path) -> None:
    """By the policy, by buffers of their own, by an audit. Ranks that train apart send messages alone."""
    text = (
        "audit: {every: 5}\nstages: [train: {steps: 9, sync: {local_sgd: {every: 4}}, buffers: {every: 3}}]"
    )
    found = sequence(tmp_path, text, 9)
    assert [step for step in range(1, 10) if found.exchanges_in_step(step)] == [3, 4, 5, 6, 8, 9]
    assert found.exchange_cycle == 60
    alone = sequence(tmp_path, "stages: [train: {steps: 9, sync: independent}]", 9)
    assert all(alone.exchanges_in_step(step) for step in range(1, 10))


def test_a_run_sends_in_the_order_of_its_sequence(tmp_path: Path) -> None:
    """What comes before `after_step`, too, which the loop has in its own code."""
    stages = (
        "accumulate: 2\nbuffers: every_forward\n"
        "stages: [train: {steps: 2, sync: {hierarchical_sgd: {across: 2, hosts: 1}}}]"
    )
    kinds = {"EqualizeBuffers": "buffers", "AverageGradients": "gradient", "DueTransfers": "delta"}
    wanted = [words.split() for words in told(sequence(tmp_path, stages, 2), 2)]
    wanted = [words[2:] for words in wanted if words[0] == "2"]
    names = [kinds[name] for words in wanted for name in kinds if " ".join(words).startswith(name)]
    cnn = PIPELINE.replace("{mlp: {inputs: 64, hidden: [4], outputs: 10}}", "{cnn: {channels: [4]}}")
    run = run_pipeline(tmp_path, cnn + stages, 2)
    sent = [line for line in lines(run, "buckets") if line["rank"] == 0 and line["step"] == 2]
    order = [line["kind"] for line in sorted(sent, key=lambda line: line["launch_us"])]
    assert [kind for kind, _ in groupby(order)] == [kind for kind, _ in groupby(names)]
    assert names == ["buffers", "gradient", "delta"]


def test_hosts_that_average_gradients_of_their_own_have_optimizers_of_their_own(tmp_path: Path) -> None:
    """A stage that exchanges gradients after it averages their state first, among the same hosts, too."""
    stages = "stages: [train: {steps: 2, sync: {hierarchical_sgd: {across: 2, hosts: 2}}}]"
    found = sequence(tmp_path, stages, 2)
    told(found, 2)
    assert found.replicas.optimizer == "apart"
    next_one = sequence(tmp_path, stages, 2, optimizer=found.replicas.optimizer)
    assert list(next_one.actions_at_begin()) == [EqualizeState("optimizer")]
    assert next_one.replicas.optimizer == "common"
