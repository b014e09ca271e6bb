"""What works but is hardly meant is told as a warning; what goes together is not told at all.

Clashes that are errors have a file each under `tests/bad`.
"""

from collections.abc import Callable

import pytest

from ddprun.config import LoadedPipeline
from ddprun.plugins import SYNC_POLICIES
from ddprun.sync.plan import StageFacts

Load = Callable[..., LoadedPipeline]

LOCAL = "sync: {local_sgd: {every: 2}}\n"
TRAIN = "stages: [{train: {steps: 4}}]\n"
APART = "{train: {steps: 4, sync: independent}}"


def told(loaded: Load, text: str, *overrides: str) -> list[tuple[str, str]]:
    """Path and problem of each warning."""
    warnings = loaded(text, *overrides).warnings
    assert all(warning.severity == "warning" for warning in warnings)
    return [(warning.path, warning.problem) for warning in warnings]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hooks: [fp16]\nsync: independent\n", '"sync: independent" sends nothing'),
        (
            "hooks: [fp16]\nsync: {broadcast: {every: 2}}\nstages: [{train: {steps: 4}}]\n",
            '"sync: broadcast" sends parameters as they are',
        ),
        (
            f"hooks: [fp16]\nstages: [{APART}, {{forward: {{steps: 4, sync: {{broadcast: {{every: 2}}}}}}}}]",
            '"sync: broadcast" sends parameters as they are and "sync: independent" sends nothing',
        ),
        (
            f"hooks: [fp16]\nstages: [{{train: {{steps: 4, hooks: [bf16]}}}}, {APART}]\n",
            '"sync: independent" sends nothing',
        ),
    ],
)
def test_hooks_that_no_stage_uses(loaded: Load, text: str, words: str) -> None:
    """Hooks at the top are unused where every stage that inherits them sends nothing through hooks."""
    assert told(loaded, text) == [("hooks", f'"hooks" has no effect: {words}')]


def test_a_mean_of_a_models_own_loss(loaded: Load) -> None:
    """Perplexity needs to know the model's targets; accuracy counts its own."""
    metric = "{accuracy: {}, output: logits, target: labels}"
    text = f"loss: model\nstages: [{{train: {{steps: 4}}}}, {{evaluate: {{metrics: [{metric}METRIC]}}}}]\n"
    assert told(loaded, text.replace("METRIC", "")) == []
    problem = '"perplexity" clashes with "loss: model" without "weight_by": the loss is averaged over samples'
    place = "stages[1].evaluate.metrics[1]"
    text = text.replace("METRIC", ", perplexity")
    assert told(loaded, text) == [(place, f"{problem}, not over targets")]
    assert told(loaded, text, "weight_by={targets: {of: labels}}") == []


def test_hooks_that_one_stage_uses(loaded: Load) -> None:
    """One stage that sends through them is enough; so it is for `hooks: []` in a stage that sends nothing."""
    assert told(loaded, f"hooks: [fp16]\nstages: [{APART}, {{train: {{steps: 4}}}}]\n") == []
    stage = "{train: {steps: 4, sync: independent, hooks: []}}"
    assert told(loaded, f"hooks: [fp16]\nstages: [{stage}, {{train: {{steps: 4}}}}]\n") == []
    assert told(loaded, f"stages: [{stage}]\n") == []


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        (
            "sync: {local_sgd: {every: 5}}\nstages: [{train: {steps: 4}}]\n",
            "stages[0].train.steps",
            '"every: 5" is longer than "steps: 4" of stages[0].train: ranks synchronise only at its end',
        ),
        (
            "stages: [{train: {steps: 4, sync: {hierarchical_sgd: {across: 6, within: 2}}}}]\n",
            "stages[0].train.sync.hierarchical_sgd.across",
            '"across: 6" is longer than "steps: 4" of stages[0].train: ranks synchronise only at its end',
        ),
        (
            "stages: [{train: {steps: 4, sync: {average: {every: 5}}}}, average]\n",
            "stages[0].train.sync.average.every",
            '"every: 5" is longer than "steps: 4" of stages[0].train: ranks do not synchronise in it',
        ),
        (
            f"stages: [{{forward: {{steps: 4, update: a.b, sync: {{broadcast: {{every: 5}}}}}}}}, {APART}]\n",
            "stages[0].forward.sync.broadcast.every",
            '"every: 5" is longer than "steps: 4" of stages[0].forward: ranks do not synchronise in it',
        ),
        (
            "stages: [{train: {steps: 4, sync: {diloco: {every: 6, fragments: 2}}}}]\n",
            "stages[0].train.sync.diloco.every",
            '"every: 6" is longer than "steps: 4" of stages[0].train: '
            "some fragments are exchanged only at its end",
        ),
        (
            "stages: [{train: {steps: 4, sync: {gossip: {every: 5}}}}]\n",
            "stages[0].train.sync.gossip.every",
            '"every: 5" is longer than "steps: 4" of stages[0].train: ranks synchronise only at its end',
        ),
    ],
)
def test_periods_that_never_come(loaded: Load, text: str, path: str, problem: str) -> None:
    """A period longer than its stage is told."""
    assert told(loaded, text) == [(path, problem)]


def test_a_period_as_long_as_its_stage(loaded: Load) -> None:
    """The last step of a stage is one of its steps."""
    assert told(loaded, "sync: {local_sgd: {every: 4}}\nstages: [{train: {steps: 4}}]\n") == []
    assert told(loaded, "sync: {local_sgd: {every: 400}}\nstages: [{train: {epochs: 1}}]\n") == []


def test_local_steps_accumulate_with_any_ddp(loaded: Load) -> None:
    """Local steps do not enter DDP, so what breaks there with `accumulate` does not break here."""
    text = "accumulate: 4\nddp: {static_graph: true}\n"
    text += "stages: [{train: {steps: 4, accumulate: 1}}, {train: {steps: 4, sync: {average: {every: 2}}}}]\n"
    assert told(loaded, text) == []


def test_what_goes_together(loaded: Load) -> None:
    """A whole pipeline of several policies has no clash."""
    assert (
        told(
            loaded,
            "hooks: [fp16]\n"
            "schedule: CosineAnnealingLR\n"
            "clip_norm: 1.0\n"
            "stages:\n"
            "  - train: {steps: 20}\n"
            "  - train: {steps: 20, sync: {hierarchical_sgd: {across: 4, hosts: 2}}, hooks: [hierarchical]}\n"
            "  - train: {steps: 20, sync: {local_sgd: {every: 4}}, mutate: {noise: {std: 0.01}}}\n"
            "  - average\n"
            "  - forward: {steps: 20}\n"
            "  - train: {steps: 20, sync: independent}\n"
            "  - broadcast: {source: 3}\n"
            "  - forward: {steps: 20, update: evolution_strategies, optimizer: {sgd: {lr: 0.2}}}\n"
            "  - evaluate\n"
            "  - save\n"
            "launch: {nproc_per_node: 4}\n",
        )
        == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "precision: pure_bf16\nhooks: [bf16]\n",
        "sync: {hierarchical_sgd: {within: 4, across: 4}}\n",
        "timings: {fidelity_every: 5}\nddp: {static_graph: true}\n" + LOCAL,
        "buffers: every_forward\n",
        "ema: 0.9\nstages: [{train: {steps: 4}}]\n",
        "clip_norm: 1.0\nstages: [average, save, {train: {steps: 4, clip_norm: 2.0}}]\n",
        "loader: {max_share: 3.0}\ncompile: {mode: reduce-overhead}\nlaunch: {device: cpu}\n",
    ],
)
def test_a_setting_that_merely_has_no_effect_passes(loaded: Load, text: str) -> None:
    """The run does what the file says."""
    assert told(loaded, text) == []


def test_hosts_that_may_leave_need_restarts(loaded: Load) -> None:
    """A range of hosts without restarts, and restarts without checkpoints, do not do what one would hope."""
    path, problem = told(loaded, 'launch: {nnodes: "1:2"}\n')[0]
    assert path == "launch.nnodes"
    assert problem.endswith('needs "max_restarts": losing a host would end the run')
    path, problem = told(loaded, "launch: {max_restarts: 3}\ncheckpoint: {keep: 0}\n")[0]
    assert path == "launch.max_restarts"
    assert problem.endswith('needs checkpoints, and "keep" is 0: the run would start over')
    assert told(loaded, 'launch: {nnodes: "1:2", max_restarts: 3}\n') == []
    assert told(loaded, 'launch: {nnodes: "2:2"}\n') == []
    path, problem = told(loaded, "checkpoint: {keep: 0, memory_every: 5}\n")[0]
    assert (path, problem) == (
        "checkpoint.memory_every",
        '"memory_every: 5" has no effect: "keep: 0" takes no checkpoints',
    )


def test_cuda_graphs_lose_only_gradients_that_accumulate(loaded: Load) -> None:
    """Which file is refused for it: `bad/cuda-graphs-accumulate.yaml`."""
    assert told(loaded, "compile: {mode: max-autotune}\n") == []
    assert told(loaded, "compile: {mode: max-autotune}\naccumulate: 2\nlaunch: {device: cpu}\n") == []
    assert told(loaded, "compile: {mode: max-autotune-no-cudagraphs}\naccumulate: 2\n") == []


def test_every_policy_says_its_period() -> None:
    """The option that a message names is the one that the plan goes by. Without one ranks synchronise at
    every step or never; and with one, never if it is only some ranks that exchange.
    """
    for name, policy in SYNC_POLICIES.load_available().items():
        has_period = policy.period_key in policy.model_fields
        made = policy(**({policy.period_key: 6} if has_period else {}))
        plan = made.plan(StageFacts(backward=True, changes_weights=True))
        among_all = plan.gradients == "all" or any(one.among == "all" and one.every for one in plan.transfers)
        assert plan.period == ((6 if has_period else 1) if among_all else 0), name
        assert not has_period or any(one.every % 6 == 0 and one.every for one in plan.transfers), name
