"""A resolved pipeline says what the file says, and where each value comes from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddprun.config import ForwardStage, LoadedPipeline, TrainStage, load
from ddprun.config.yaml_writer import to_plain_data, written_yaml

Load = Callable[..., LoadedPipeline]


def test_resolved_tells_where_values_come_from(loaded: Load) -> None:
    """Each value of the resolved pipeline says its line, its override, or that it is a default."""
    text = loaded(
        "seed: 3\nloss: mse_loss\n", "loader.workers=2", "optimizer.sgd.lr=0.5", "hooks=[fp16, powersgd]"
    ).resolved_yaml()
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 3  # line 5" in lines
    assert "loss: MSELoss  # line 6" in lines
    assert "mlp:  # line 2" in lines
    assert "digits:  # line 3" in lines
    assert "held_out: 0.2  # default" in lines
    assert "workers: 2  # --set 1" in lines
    assert "SGD:  # line 4" in lines
    assert "lr: 0.5  # --set 2" in lines
    assert "- fp16  # --set 3" in lines
    assert "name: p  # default" in lines
    block = "model:\n  mlp:\n    inputs: 64\n    outputs: 10\ndata: digits\noptimizer: sgd\n"
    lines = [line.strip() for line in loaded(block, base=False).resolved_yaml().splitlines()]
    assert "mlp:  # line 2" in lines
    assert "outputs: 10  # line 4" in lines


NAMES = st.text("abcXYZ0._-", min_size=1).filter(lambda name: not name.startswith("."))
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc:. #", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)
DOTTED = st.builds(
    lambda options: {"a.b.C": options}, st.dictionaries(st.text("abc", min_size=1), ANY, max_size=3)
)
STACKS = st.sampled_from(
    [
        [],
        ["fp16"],
        ["powersgd", "fp16"],
        ["noop"],
        [{"fp16": None}, {"x.y.Hook": {"a": [1, [2]]}}],
        [{"hierarchical": {"within": ["shared_memory"], "across": [{"topk": {"density": 0.5}}]}}],
    ]
)
SCHEDULES = st.sampled_from(
    [None, "PolynomialLR", {"OneCycleLR": {"max_lr": [0.1, 1]}}, {"cosineannealinglr": {"T_max": 5}}]
)
SYNCS = st.sampled_from(
    [
        {"every_step": {}},
        {"local_sgd": {"every": 8}},
        {"hierarchical_sgd": {"across": 6, "within": 2, "hosts": None, "optimizer_state": "average"}},
        {"diloco": {"every": 5, "outer_lr": 1, "fragments": 5, "overlap_steps": 4}},
        {"average": {"every": 200}},
    ]
)
BUFFERS = st.sampled_from(
    [
        "auto",
        {"reduce": "mean"},
        {"when": "before_evaluate", "reduce": "broadcast"},
        "never",
        {"every": 3},
        {"every": 3, "reduce": "mean"},
    ]
)
MUTATIONS = st.sampled_from([None, {"noise": {"std": 0.5}}, "a.b", {"a.b": {"c": [1]}}])
STEPS = {
    "hooks": STACKS,
    "clip_norm": st.none() | st.floats(1e-9, 1e9),
    "schedule": SCHEDULES,
    "warmup_steps": st.integers(0, 19),
    "sync": SYNCS,
    "buffers": BUFFERS,
    "mutate": MUTATIONS,
}
LENGTH = {"steps": st.integers(20, 99)}
TRAIN = st.fixed_dictionaries(LENGTH, optional={**STEPS, "accumulate": st.integers(1, 9)})
FORWARD = st.fixed_dictionaries(
    {**LENGTH, "update": st.sampled_from(["evolution_strategies", "a.b"])}, optional=STEPS
)
STAGE = st.one_of(
    st.builds(lambda stage: {"train": stage}, TRAIN),
    st.builds(lambda stage: {"forward": stage}, FORWARD),
    st.sampled_from(["average", "broadcast", {"average": None}, {"broadcast": {"source": 0}}]),
)
DATA: Any = st.one_of(
    st.just("digits"),
    st.builds(
        lambda share, seed: {"digits": {"held_out": share, "split_seed": seed}},
        st.floats(0.01, 0.99),
        st.integers(0, 9),
    ),
    st.just({"train": "digits", "evaluate": {"digits": {"split_seed": 3}}}),
    st.builds(lambda choice: {"train": choice}, DOTTED),
    DOTTED,
)
BUCKET_CAP = st.floats(1e-3, 1e6) | st.integers(1, 99)
PIPELINE = st.fixed_dictionaries(
    {
        "model": st.one_of(
            st.builds(
                lambda hidden: {"mlp": {"inputs": 64, "hidden": hidden, "outputs": 10}},
                st.lists(st.integers(1, 99)),
            ),
            DOTTED,
        ),
        "data": DATA,
        "optimizer": st.sampled_from(
            ["sgd", {"AdamW": {"lr": 1e-5, "betas": [0.9, 0.99], "fused": None}}, {"rprop": {}}]
        ),
    },
    optional={
        "name": NAMES,
        "seed": st.integers(0, 2**63 - 1),
        "loss": st.one_of(st.sampled_from(["mse", "model", {"cross_entropy": {"weight": [1, 2.5]}}]), DOTTED),
        "schedule": SCHEDULES,
        "hooks": STACKS,
        "clip_norm": st.none() | st.floats(1e-300, 1e300),
        "precision": st.sampled_from(["fp32", "pure_bf16"]),
        "ddp": st.fixed_dictionaries(
            {},
            optional={
                "bucket_cap_mb": BUCKET_CAP | st.lists(BUCKET_CAP, min_size=1),
                "static_graph": st.just(False),
            },
        ),
        "sync": SYNCS,
        "buffers": BUFFERS,
        "audit": st.fixed_dictionaries(
            {}, optional={"every": st.integers(0, 9), "on_drift": st.sampled_from(["stop", "continue"])}
        ),
        "stages": st.lists(STAGE, min_size=1, max_size=3),
        "launch": st.fixed_dictionaries(
            {}, optional={"nproc_per_node": st.none() | st.integers(1, 9), "timeout_s": st.floats(1e-3, 1e9)}
        ),
    },
)


@given(PIPELINE)
def test_resolved_loads_to_the_same_pipeline(tmp_path: Path, data: dict[str, Any]) -> None:
    """The resolved text says what the file says: it loads to an equal pipeline with the same digest, and with
    the same warnings. Without defaults, the text loads to the same keys and values.
    """
    first = load(_written(tmp_path / "first.yaml", data))
    (tmp_path / "second.yaml").write_text(first.resolved_yaml(), encoding="utf-8")
    second = load(tmp_path / "second.yaml")
    assert first.pipeline == second.pipeline
    assert second.digest() == first.digest()
    assert {one.problem for one in second.warnings} == {one.problem for one in first.warnings}
    for one, other in zip(first.pipeline.stages, second.pipeline.stages, strict=True):
        assert to_plain_data(one) == to_plain_data(other)
        if isinstance(one, (TrainStage, ForwardStage)) and isinstance(other, (TrainStage, ForwardStage)):
            assert one.effective_settings(first.pipeline) == other.effective_settings(second.pipeline)
    (tmp_path / "third.yaml").write_text(written_yaml(first.root), encoding="utf-8")
    assert load(tmp_path / "third.yaml").root.data() == first.root.data() == data


def _written(path: Path, data: dict[str, Any]) -> Path:
    from ddprun.config.scalars import format_scalar

    def flow(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{format_scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(flow, value)) + "]"
        return format_scalar(value)

    path.write_text("".join(f"{key}: {flow(value)}\n" for key, value in data.items()), encoding="utf-8")
    return path


def test_a_stages_own_optimizer_and_stages_without_keys_load_again(tmp_path: Path, loaded: Load) -> None:
    """Settings of the optimizer in a stage stay the stage's, and a bare stage stays bare."""
    first = loaded(
        "stages:\n"
        "  - train: {steps: 9, sync: independent, optimizer: {sgd: {lr: 0.5}}}\n"
        "  - average:\n"
        "  - forward: {steps: 9, update: a.b, optimizer: {SGD: {momentum: 0.5}}}\n"
    )
    (tmp_path / "second.yaml").write_text(first.resolved_yaml())
    second = load(tmp_path / "second.yaml", ["name=p"])
    assert second.digest() == first.digest()
    assert [to_plain_data(stage) for stage in second.pipeline.stages][1] == "average"
    optimizers = [
        stage.effective_settings(second.pipeline).optimizer for stage in second.pipeline.stages_with_steps()
    ]
    assert [choice.options for choice in optimizers] == [{"lr": 0.5}, {"momentum": 0.5}]
