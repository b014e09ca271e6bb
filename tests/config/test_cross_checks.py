"""What has no effect but does no harm is told as a warning; what goes together is not told at all.

Clashes that are errors have a file each under `tests/bad`.
"""

from collections.abc import Callable

import pytest

from ddprun.config import LoadedPipeline, PipelineError
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


def test_batches_that_are_changed_are_not_compared_with_the_model(loaded: Load) -> None:
    """What the model gets is not known."""
    overrides = "model={mlp: {inputs: 12, outputs: 10}}", "data=digits"
    with pytest.raises(PipelineError, match="inputs: 12"):
        loaded("", *overrides)
    for changed in ("batch={transform: mine.cut}", "loader={batch_size: 4, collate: mine.cut}"):
        assert told(loaded, "", *overrides, changed) == []


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


def test_a_cast_of_what_is_half_already(loaded: Load) -> None:
    """To sum in fp32 is worth something all the same, and so is the other type."""
    text = f"hooks: [{{bf16: {{accumulate: fp32}}}}]\n{TRAIN}"
    assert told(loaded, text, "precision=pure_bf16") == []
    assert told(loaded, text, "precision=pure_bf16", "hooks=[fp16]") == []
    assert told(loaded, text, "precision=bf16", "hooks=[bf16]") == []
    problem = '"bf16" has no effect: with "precision: pure_bf16" everything is sent in that type'
    assert told(loaded, text, "precision=pure_bf16", "hooks=[bf16]") == [("hooks[0]", problem)]


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
            '"every: 5" is longer than "steps: 4" of stages[0].train',
        ),
        (
            "stages: [{train: {steps: 4, sync: {hierarchical_sgd: {across: 6, within: 2}}}}]\n",
            "stages[0].train.sync.hierarchical_sgd.across",
            '"across: 6" is longer than "steps: 4" of stages[0].train',
        ),
        (
            "stages: [{train: {steps: 4, sync: {average: {every: 5}}}}, average]\n",
            "stages[0].train.sync.average.every",
            '"every: 5" is longer than "steps: 4" of stages[0].train',
        ),
        (
            f"stages: [{{forward: {{steps: 4, update: a.b, sync: {{broadcast: {{every: 5}}}}}}}}, {APART}]\n",
            "stages[0].forward.sync.broadcast.every",
            '"every: 5" is longer than "steps: 4" of stages[0].forward',
        ),
        (
            "stages: [{train: {steps: 4, sync: {diloco: {every: 6, fragments: 2}}}}]\n",
            "stages[0].train.sync.diloco.every",
            '"every: 6" is longer than "steps: 4" of stages[0].train',
        ),
        (
            "stages: [{train: {steps: 4, sync: {gossip: {every: 5}}}}]\n",
            "stages[0].train.sync.gossip.every",
            '"every: 5" is longer than "steps: 4" of stages[0].train',
        ),
        (
            "sync: {hierarchical_sgd: {within: 4, across: 4}}\n",
            "sync.hierarchical_sgd.within",
            '"within: 4" has no effect with "across: 4": all average equally often',
        ),
    ],
)
def test_periods_that_never_come(loaded: Load, text: str, path: str, problem: str) -> None:
    """A period longer than its stage, and two levels that are one, are told."""
    assert told(loaded, text) == [(path, problem)]


def test_a_period_as_long_as_its_stage(loaded: Load) -> None:
    """The last step of a stage is one of its steps."""
    assert told(loaded, "sync: {local_sgd: {every: 4}}\nstages: [{train: {steps: 4}}]\n") == []
    assert told(loaded, "sync: {local_sgd: {every: 400}}\nstages: [{train: {epochs: 1}}]\n") == []


def test_a_profile_after_the_end(loaded: Load) -> None:
    """Where all stages say how many steps they take."""
    text = "timings: {profile: [9, 12]}\nstages: [{train: {steps: 4}}, {train: {LENGTH}}]\n"
    (warning,) = told(loaded, text.replace("LENGTH", "steps: 4"))
    assert warning == ("timings.profile", '"profile: [9, 12]" has no effect: the run has 8 steps')
    assert told(loaded, text.replace("LENGTH", "steps: 5")) == []
    assert told(loaded, text.replace("LENGTH", "epochs: 1")) == []


def test_fidelity_needs_gradients_of_all_ranks(loaded: Load) -> None:
    """There is nothing to compare where gradients are not exchanged among all ranks."""
    text = "timings: {fidelity_every: 5}\n"
    (warning,) = told(loaded, text + LOCAL)
    assert warning == (
        "timings.fidelity_every",
        '"fidelity_every: 5" has no effect: no train stage averages gradients of all ranks',
    )
    assert len(told(loaded, text + "sync: {hierarchical_sgd: {across: 4}}\n")) == 1
    assert len(told(loaded, text + "stages: [{forward: {steps: 4, update: a.b}}]\n")) == 1
    assert told(loaded, text) == []
    assert (
        told(loaded, text + LOCAL + "stages: [{train: {steps: 4, sync: every_step}}, {train: {steps: 4}}]\n")
        == []
    )


def test_ddp_needs_gradients(loaded: Load) -> None:
    """What DDP is built with has no effect where no backward pass sends anything."""
    text = "ddp: {static_graph: true, gradient_as_bucket_view: true, bucket_cap_mb: 5}\n"
    problem = '"static_graph: true" has no effect: no train stage averages gradients'
    assert told(loaded, text + LOCAL) == [("ddp.static_graph", problem)]
    assert told(loaded, text + "stages: [{forward: {steps: 4, update: a.b}}]\n") == [
        ("ddp.static_graph", problem)
    ]
    (warning,) = told(loaded, "ddp: {gradient_as_bucket_view: false}\n" + LOCAL)
    assert warning[0] == "ddp.gradient_as_bucket_view"
    assert told(loaded, text + "sync: {hierarchical_sgd: {across: 4}}\n") == []
    assert told(loaded, text) == []


def test_hosts_wait_for_each_other_where_ddp_looks_for_unused_parameters(loaded: Load) -> None:
    """It asks all ranks in each backward pass, also where only the ranks of a host average gradients."""
    text = "ddp: {find_unused_parameters: true}\n"
    problem = '"find_unused_parameters: true" has hosts wait for each other in each step: DDP asks all ranks'
    inside = "sync: {hierarchical_sgd: {within: WITHIN, across: 4}}\n"
    expected = [("ddp.find_unused_parameters", problem)]
    assert told(loaded, text + inside.replace("WITHIN", "1")) == expected
    assert problem not in str(told(loaded, text + inside.replace("WITHIN", "2")))
    assert told(loaded, text) == []


def test_local_steps_accumulate_with_any_ddp(loaded: Load) -> None:
    """Local steps do not enter DDP, so what breaks there with `accumulate` does not break here."""
    text = "accumulate: 4\nddp: {static_graph: true}\n"
    text += "stages: [{train: {steps: 4, accumulate: 1}}, {train: {steps: 4, sync: {average: {every: 2}}}}]\n"
    assert told(loaded, text) == []


@pytest.mark.parametrize(
    ("stages", "index", "why"),
    [
        ("average", 0, "all ranks start with the same parameters"),
        ("evaluate, broadcast", 1, "all ranks start with the same parameters"),
        ("{train: {steps: 4}}, average", 1, "stages[0].train leaves all ranks with the same parameters"),
        (
            "{train: {steps: 4}}, evaluate, average",
            2,
            "stages[0].train leaves all ranks with the same parameters",
        ),
        (f"{APART}, evaluate, average", 2, "stages[0].train leaves all ranks with the same parameters"),
        (
            f"{APART}, {{train: {{steps: 4}}}}, average",
            2,
            "stages[1].train leaves all ranks with the same parameters",
        ),
        (
            "{train: {steps: 4, mutate: a.b, hooks: [noop]}}, save, average",
            2,
            "stages[0].train leaves all ranks with the same parameters",
        ),
        (f"{APART}, average, broadcast", 2, "stages[1].average leaves all ranks with the same parameters"),
        (
            "{train: {steps: 4, sync: {local_sgd: {every: 2}}}}, save, average",
            2,
            "stages[0].train leaves all ranks with the same parameters",
        ),
        (
            "{forward: {steps: 4, mutate: a.b}}, average",
            1,
            "stages[0].forward leaves all ranks with the same parameters",
        ),
        (
            "{forward: {steps: 4, sync: independent}}, average",
            1,
            "stages[0].forward leaves all ranks with the same parameters",
        ),
    ],
)
def test_ranks_that_are_equal_already(loaded: Load, stages: str, index: int, why: str) -> None:
    """To average what is equal has no effect, and the warning says since when it is."""
    ((path, problem),) = told(loaded, f"stages: [{stages}]\n")
    name = problem.split('"')[1]
    assert (path, problem) == (f"stages[{index}]", f'"{name}" has no effect: {why}')


@pytest.mark.parametrize(
    "stages",
    [
        f"{APART}, average",
        f"{APART}, {APART}, average",
        "{train: {steps: 4, mutate: a.b}}, average",
        "{train: {steps: 4, hooks: [noop]}}, broadcast",
        "{train: {steps: 4, sync: {local_sgd: {every: 2}}}}, average",
        "{forward: {steps: 4, sync: independent, mutate: a.b}}, average",
        "{forward: {steps: 4, sync: independent, update: a.b}}, average",
        "{forward: {steps: 4, hooks: [noop], update: a.b}}, average",
    ],
)
def test_ranks_that_may_differ(loaded: Load, stages: str) -> None:
    """Where ranks may hold different parameters, an average is no surprise."""
    assert told(loaded, f"stages: [{stages}]\n") == []


def test_buffers_of_a_model_without(loaded: Load) -> None:
    """A built-in model that has no buffers has none to send."""
    stages = "stages: [{train: {steps: 4, buffers: {every: 2}}}, {train: {steps: 4}}]\n"
    text = '"buffers: %s" has no effect: "model: mlp" has no buffers'
    assert told(loaded, "buffers: every_forward\n") == [("buffers", text % "every_forward")]
    assert told(loaded, stages) == [("stages[0].train.buffers", text % "{every: 2}")]
    assert told(loaded, "buffers: never\n") == []
    assert told(loaded, "buffers: every_forward\n" + stages, "model=cnn") == []
    assert told(loaded, "buffers: every_forward\n", "model=mylab.Net") == []


def test_evaluation_with_statistics_of_ones_own(loaded: Load) -> None:
    """Under `never`, ranks evaluate models that differ in BatchNorm's statistics."""
    problem = "%s clashes with stages[1].evaluate: "
    problem += 'each rank evaluates with its own running statistics of "model: cnn"'
    assert told(loaded, "buffers: never\nstages: [{train: {steps: 4}}, evaluate]\n", "model=cnn") == [
        ("buffers", problem % '"buffers: never"')
    ]
    own = "stages: [{train: {steps: 4, buffers: never}}, evaluate]\n"
    assert told(loaded, own, "model=cnn") == [
        ("stages[0].train.buffers", problem % '"stages[0].train.buffers: never"')
    ]
    assert told(loaded, own) == []
    assert told(loaded, own.replace("never", "before_evaluate"), "model=cnn") == []
    assert told(loaded, "stages: [evaluate, {train: {steps: 4, buffers: never}}]\n", "model=cnn") == []


def test_saving_before_anything_has_changed(loaded: Load) -> None:
    """Forward passes alone change no weights; an update or a mutation does."""
    for stage in ("{forward: {steps: 4}}", "average"):
        assert ("stages[1]", '"save" comes before every "train": it saves the initial weights') in told(
            loaded, f"stages: [{stage}, save]\n"
        )
    for key in ("update", "mutate"):
        assert told(loaded, f"stages: [{{forward: {{steps: 4, {key}: a.b}}}}, save]\n") == []


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        (
            LOCAL
            + "stages: [{train: {steps: 4, sync: every_step}}, {forward: {steps: 4, sync: independent}}]\n",
            "sync",
            '"sync" has no effect: every train and forward stage of "stages" has its own "sync"',
        ),
        (
            "accumulate: 2\nstages: [{train: {steps: 4, accumulate: 3}}, {forward: {steps: 4}}]\n",
            "accumulate",
            '"accumulate" has no effect: every train stage of "stages" has its own "accumulate"',
        ),
        (
            "clip_norm: 1.0\nstages: [{train: {steps: 4, clip_norm: 2.0}}, {forward: {steps: 4}}]\n",
            "clip_norm",
            '"clip_norm" has no effect: every train stage of "stages" has its own "clip_norm"',
        ),
        (
            "buffers: never\nstages: [{train: {steps: 4, buffers: auto}}]\n",
            "buffers",
            '"buffers" has no effect: every train stage of "stages" has its own "buffers"',
        ),
        (
            "schedule: CosineAnnealingLR\nstages: [{forward: {steps: 4}}]\n",
            "schedule",
            '"schedule" has no effect: no stage of "stages" updates the weights',
        ),
        (
            "accumulate: 2\nstages: [{forward: {steps: 4, update: a.b}}]\n",
            "accumulate",
            '"accumulate" has no effect: no stage of "stages" accumulates gradients',
        ),
        (
            "audit: {every: 5}\nstages: [{train: {steps: 4}}, {train: {steps: 3}}]\n",
            "audit.every",
            '"every: 5" has no effect: no stage has so many steps',
        ),
        (
            "loader: {evaluate_collate: a.b}\nstages: [{train: {steps: 4}}]\n",
            "loader.evaluate_collate",
            '"evaluate_collate" has no effect: no evaluation of "stages" uses it',
        ),
    ],
)
def test_what_every_stage_says_for_itself(loaded: Load, text: str, path: str, problem: str) -> None:
    """A key at the top has no effect if each stage that could use it has its own, or none could."""
    assert told(loaded, text) == [(path, problem)]


def test_the_optimizer_that_every_stage_sets(loaded: Load) -> None:
    """It must be named at the top all the same; only options there would have no effect."""
    stages = "stages: [{train: {steps: 4, optimizer: {sgd: {lr: 0.1}}}}]\n"
    assert told(loaded, stages) == []
    assert told(loaded, stages, "optimizer.sgd.momentum=0.9") == [
        (
            "optimizer",
            'the options of "optimizer" have no effect: '
            'every train stage of "stages" has its own "optimizer"',
        )
    ]


def test_defaults_written_out_are_no_clash(loaded: Load) -> None:
    """What a resolved pipeline writes out is not told as unused."""
    text = "sync: every_step\nhooks: []\nclip_norm: null\naccumulate: 1\nbuffers: auto\n"
    stage = "sync: {average: {every: 2}}, hooks: [fp16], clip_norm: 1.0, accumulate: 2, buffers: never"
    assert told(loaded, f"{text}stages: [{{train: {{steps: 4, {stage}}}}}]\n") == []
    assert told(loaded, "ddp: {static_graph: false, gradient_as_bucket_view: true}\n" + LOCAL) == []
    stages = "audit: {every: 5}\nstages: [{train: {steps: 4}}, {train: {epochs: 1}}]\n"
    assert told(loaded, stages) == []
    stages = "audit: {every: 0}\nfreeze: [a]\nstages: [{forward: {steps: 4}}]\n"
    assert told(loaded, text + stages) == []


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


def test_restarts_need_checkpoints(loaded: Load) -> None:
    """On disk. Whether hosts that may leave need restarts, the launcher says: flags may bring them."""
    path, problem = told(loaded, "launch: {max_restarts: 3}\ncheckpoint: {keep: 0}\n")[0]
    assert path == "launch.max_restarts"
    assert problem.endswith('needs checkpoints, and "keep" is 0: the run would start over')
    assert told(loaded, 'launch: {nnodes: "1:2"}\n') == []
    path, problem = told(loaded, "checkpoint: {keep: 0, memory_every: 5}\n")[0]
    assert (path, problem) == (
        "checkpoint.memory_every",
        '"memory_every: 5" has no effect: "keep: 0" takes no checkpoints',
    )


def test_cuda_graphs_on_a_cpu(loaded: Load) -> None:
    """The mode that is nothing but CUDA graphs has no effect there."""
    on_cpu = "launch: {device: cpu}\ncompile: {mode: MODE}\n"
    path, problem = told(loaded, on_cpu.replace("MODE", "reduce-overhead"))[0]
    assert (path, problem.partition(" with ")[0]) == ("compile.mode", '"mode: reduce-overhead" has no effect')
    assert told(loaded, on_cpu.replace("MODE", "max-autotune")) == []
    assert told(loaded, "compile: {mode: reduce-overhead}\n") == []


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
