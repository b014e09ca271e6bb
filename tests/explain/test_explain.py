"""`explain` says what runs then do."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ddprun.config import PipelineError, load
from ddprun.explain import model_probe, traffic
from ddprun.explain.explain import explain
from ddprun.explain.model_probe import GradientBuckets, ModelProbe
from ddprun.explain.traffic import SentBytes
from tests.engine.running import events, lines, run_pipeline, summary

HEAD = """
model:
  {model}
data: digits
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.02, momentum: 0.9}}}}
ddp: {{bucket_cap_mb: 1}}
"""
MLP = HEAD.format(model="mlp: {inputs: 64, hidden: [600, 600], outputs: 10}")
CNN = HEAD.format(model="cnn: {inputs: [1, 8, 8], channels: [8, 16], outputs: 10}")

STAGES = {
    "every-step": "{steps: 3}",
    "fp16": "{steps: 3, hooks: [fp16]}",
    "hierarchical": "{steps: 3, hooks: [{hierarchical: {hosts: 2, across: [int8]}}]}",
    "accumulate": "{steps: 3, accumulate: 2, hooks: [{topk: {density: 0.1}}]}",
    "int4": "{steps: 2, hooks: [int4]}",
    "int2": "{steps: 2, hooks: [int2]}",
    "auto-bits": "{steps: 2, hooks: [auto_bits]}",
    "topk-int2": "{steps: 2, hooks: [{topk: {density: 0.015625, values: int2, decay: 0.95}}]}",
    "sums-in-fp32": "{steps: 2, hooks: [powersgd, {bf16: {accumulate: fp32}}]}",
    "noop": "{steps: 2, hooks: [noop]}",
    "local-sgd": "{steps: 8, sync: {local_sgd: {every: 3}}, hooks: [fp16]}",
    "local-sgd-fp8": "{steps: 6, sync: {local_sgd: {every: 3}}, hooks: [fp8]}",
    "local-sgd-with-state": "{steps: 6, sync: {local_sgd: {every: 3, optimizer_state: average}}}",
    "hierarchical-gradients": "{steps: 7, sync: {hierarchical_sgd: {across: 3, hosts: 2}}, "
    "hooks: [fp16, {hierarchical: {hosts: 2, within: [shared_memory]}}]}",
    "hierarchical-parameters": "{steps: 11, sync: {hierarchical_sgd: {within: 2, across: 4, hosts: 2}}, "
    "hooks: [bf16]}",
    "hierarchical-with-state": "{steps: 6, sync: {hierarchical_sgd: {within: 2, across: 4, hosts: 2, "
    "optimizer_state: average}}}",
    "diloco": "{steps: 9, sync: {diloco: {every: 4, fragments: 3}}, hooks: [int8]}",
    "diloco-overlapped": "{steps: 10, sync: {diloco: {every: 4, fragments: 2, overlap_steps: 2}}}",
    "diloco-mixed": "{steps: 8, sync: {diloco: {every: 4, alpha: 0.5, outer: sgd}}, hooks: [topk]}",
    "gossip": "{steps: 9, sync: {gossip: {every: 1}}}",
    "gossip-unfinished": "{steps: 5, sync: {gossip: {every: 2}}}",
    "average": "{steps: 5, sync: {average: {every: 2}}, hooks: [powersgd]}",
    "broadcast": "{steps: 5, sync: {broadcast: {every: 2, source: 3}}}",
    "independent": "{steps: 3, sync: independent}",
    "mutate": "{steps: 3, mutate: {noise: {std: 0.001}}}",
}


def buckets_of(probe: ModelProbe) -> GradientBuckets:
    """Those of a pipeline whose steps have one backward pass."""
    (found,) = probe.gradient_buckets.values()
    return found


def check(folder: Path, text: str, ranks: int) -> None:
    """Every step of every stage, over all ranks, to the byte."""
    run_dir = run_pipeline(folder, text, ranks)
    explained = explain(load(folder / "run.yaml"), hosts=1, ranks_per_host=ranks)
    by_stage, by_step = Counter[int](), Counter[int]()
    for line in lines(run_dir, "buckets"):
        by_stage[line["stage"]] += line["wire_bytes"]
        by_step[line["step"]] += line["wire_bytes"]
    said, done = 0, 0
    for stage in explained.stages:
        whole = stage.sent_in_stage
        assert whole is not None
        assert whole.all_ranks == by_stage[stage.index], stage.index
        said += whole.all_ranks
        overlaps = stage.settings is not None and stage.settings.sync.options.get("overlap_steps")
        for pattern in () if overlaps or stage.evaluations else stage.patterns:
            for step in pattern.steps:
                for of in range(
                    step, stage.steps or 0, stage.cycle
                ):  # in the last one, the stage's end counts
                    assert pattern.sent.all_ranks == by_step[done + of], (stage.index, of)
        done += stage.steps or 0
    assert said == summary(run_dir)["wire_bytes"] > 0


def test_bytes_are_those_of_a_run(tmp_path: Path) -> None:
    """Of every policy, with hooks, on four ranks."""
    stages = "".join(f"  - train: {stage}\n" for stage in STAGES.values())
    check(tmp_path, f"{MLP}stages:\n{stages}", 4)


BUFFERS = """
  - train: {steps: 2}
  - evaluate
  - train: {steps: 3, accumulate: 2, buffers: every_forward}
  - train: {steps: 5, sync: {local_sgd: {every: 2}}, buffers: {every: 3, reduce: mean}}
  - save
  - train: {steps: 2, buffers: never}
  - evaluate
  - train: {steps: 2, buffers: before_evaluate}
  - evaluate
  - evaluate
  - train: {epochs: 1, sync: independent}
  - average
  - forward: {steps: 4, update: evolution_strategies, hooks: [fp16]}
  - forward: {steps: 4, sync: {broadcast: {every: 3, source: 1}}, update: evolution_strategies}
  - forward: {steps: 2}
  - train: {steps: 3, sync: {local_sgd: {every: 2}}, hooks: [fp16]}
  - broadcast: {source: 1}
"""


def test_bytes_of_buffers_and_of_stages_without_backward(tmp_path: Path) -> None:
    """Sent when the file says so; what evaluate and save need is sent before them."""
    check(
        tmp_path,
        f"{CNN}loader: {{batch_size: 128}}\nstages:{BUFFERS}".replace("loader: {batch_size: 8}\n", "", 1),
        2,
    )


EVALUATED = """
  - train: {steps: 7, evaluate: {every: 2}}
  - train: {steps: 11, sync: {local_sgd: {every: 4}}, evaluate: {every: 2}}
  - evaluate
  - train: {steps: 9, sync: {average: {every: 3}}, evaluate: {every: 3}, hooks: [bf16]}
  - average
  - train: {steps: 4, sync: {broadcast: {every: 3, source: 1}}, buffers: never, evaluate: {every: 9}}
  - broadcast: {source: 1}
  - train: {steps: 3, evaluate: {every: 1}}
  - train: {steps: 3, sync: independent}
  - average
  - save
"""


@pytest.mark.parametrize("more", ["", "ema: 0.9\nprecision: pure_bf16\n"])
def test_bytes_of_evaluations_inside_stages_and_of_the_average(more: str, tmp_path: Path) -> None:
    """What ranks hold apart is made equal for each evaluation, and the moving average where a stage ends."""
    check(tmp_path, f"{CNN}{more}stages:{EVALUATED}".replace("batch_size: 8", "batch_size: 128", 1), 2)


@pytest.mark.parametrize("caps", ["1", "[0.1, 1]"])
def test_a_run_finds_the_same(caps: str, tmp_path: Path) -> None:
    """The buckets and the verdict on buffers are those of a run's first event."""
    text = f"{CNN}stages: [{{train: {{steps: 1}}}}]\n"
    text = text.replace("channels: [8, 16]", "channels: [64, 128, 256]").replace(
        "cap_mb: 1", f"cap_mb: {caps}"
    )
    found = {event["event"]: event for event in events(run_pipeline(tmp_path, text, 2))}
    probe = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).probe
    said = [
        {"bucket": b.index, "dtype": b.dtype, "numel": b.numel, "params": [p.name for p in b.params]}
        for b in buckets_of(probe).layouts
    ]
    assert found["started"]["buckets"] == said
    assert len(said) > 1
    verdict, buffers = probe.buffer_use, found["buffers"]
    assert buffers["changing"] == list(verdict.changing)
    assert buffers["counters"] == list(verdict.counters)
    assert (buffers["bytes"], buffers["read_in_training"]) == (
        verdict.changing_bytes,
        verdict.read_in_training,
    )
    assert verdict.changing_bytes > 0


PERIODS = [
    ("local_sgd: {every: 7}", "every_forward"),
    ("hierarchical_sgd: {within: 2, across: 6, hosts: 2}", "{every: 4}"),
    ("diloco: {every: 5, fragments: 2, overlap_steps: 3}", "auto"),
]


@pytest.mark.parametrize(("sync", "buffers"), PERIODS)
def test_whole_stages_are_sums_of_steps(sync: str, buffers: str, tmp_path: Path) -> None:
    """However many steps a stage has, it is its steps and its end."""
    file, probe = tmp_path / "periods.yaml", None
    for steps in (*range(1, 14), 24, 25):
        stage = f"{{steps: {steps}, sync: {{{sync}}}, buffers: {buffers}}}"
        file.write_text(f"{CNN}stages: [train: {stage}]\n")
        explained = explain(load(file), hosts=2, ranks_per_host=2, probe=probe)
        (stage_explained,), probe = explained.stages, explained.probe
        each = {step: pattern for pattern in stage_explained.patterns for step in pattern.steps}
        sent = SentBytes(4)
        for step in range(1, steps + 1):
            sent += each[(step - 1) % stage_explained.cycle + 1].sent
        for exchange in (*stage_explained.begin, *(stage_explained.end or ())):
            sent += exchange.sent
        assert stage_explained.sent_in_stage == sent


def test_what_a_file_says_of_batches_and_parameters_is_explained(tmp_path: Path) -> None:
    """Frozen parameters are in no bucket, a sampler and a stage's data decide how long an epoch is, and
    collating and parts of batches are those of a run.
    """
    (tmp_path / "shown.py").write_text(
        """
import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        return {"x": torch.zeros(4), "y": place % 3}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


def every_other(data):
    return range(0, len(data), 2)


def pack(samples):
    columns = torch.utils.data.default_collate(samples)
    return {"inputs": columns["x"], "y": columns["y"]}
"""
    )
    (tmp_path / "shown.yaml").write_text(
        """
model: shown.Net
data: {shown.Data: {size: 40}}
loader: {batch_size: 5, sampler: shown.every_other, collate: shown.pack}
batch: {inputs: {x: inputs}, target: y}
weight_by: targets
freeze: ["body.*"]
groups: [{match: "*.bias", lr: 1}]
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {epochs: 2}
  - train: {epochs: 1, data: {shown.Data: {size: 100}}}
launch: {nproc_per_node: 2}
"""
    )
    found = explain(load(tmp_path / "shown.yaml"))
    assert [stage.steps for stage in found.stages] == [4, 5]
    (bucket,) = buckets_of(found.probe).layouts
    assert sorted(param.name for param in bucket.params) == ["head.bias", "head.weight"]


MANY = """
  - train: {{steps: 3, hooks: [{stack}]}}
  - train: {{steps: 9, sync: {{diloco: {{every: 4, fragments: 2}}}}, hooks: [{stack}]}}
  - train: {{steps: 5, sync: {{broadcast: {{every: 2, source: 5}}}}}}
  - train: {{steps: 5, sync: {{hierarchical_sgd: {{within: 2, across: 4}}}}}}
  - broadcast: {{source: 3}}
"""


@pytest.mark.parametrize(
    "stack",
    ["int8", "{hierarchical: {across: [int4]}}", "{hierarchical: {hosts: 6, across: [powersgd, topk]}}"],
)
def test_ranks_that_send_alike_are_simulated_once(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comes out as of a simulation of every rank, for fewer ranks than there are."""
    file = tmp_path / "many.yaml"
    file.write_text(f"{CNN}stages:{MANY.format(stack=stack)}")
    simulated = []

    def recorded(*args: Any) -> int:
        simulated.append(representative_ranks(*args))
        return simulated[-1]

    representative_ranks = traffic._representative_rank_count
    monkeypatch.setattr(traffic, "_representative_rank_count", recorded)
    few = explain(load(file), hosts=12, ranks_per_host=2)
    assert simulated[0] < few.world.ranks == 24
    monkeypatch.setattr(traffic, "_representative_rank_count", lambda *_: 24)
    all_ranks = explain(load(file), hosts=12, ranks_per_host=2, probe=few.probe)
    assert few.to_json_data() == all_ranks.to_json_data()


RECURRENT = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(8, 300, 2, batch_first=True), nn.Linear(300, 10)

    def forward(self, x):
        return self.head(self.body(x.reshape(-1, 8, 8))[0][:, -1])
"""


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("recurrent.Net: {}", "fp32"),
        ("mlp: {inputs: 64, hidden: [400, 400, 400, 400, 400, 400, 400, 400], outputs: 10}", "fp32"),
        ("cnn: {inputs: [1, 8, 8], channels: [64, 128, 256], outputs: 10}", "bf16"),
        ("transformer: {layers: 3, width: 160, heads: 4, context: 16}", "fp32"),
        ("transformer: {layers: 3, width: 160, heads: 4, context: 16}", "bf16"),
    ],
)
def test_buckets_without_values_are_those_of_ddp(model: str, precision: str, tmp_path: Path) -> None:
    """DDP's buckets follow from the order of gradients, which a model shows on shapes alone."""
    text = f"{HEAD.format(model=model)}precision: {precision}\n"
    if "transformer" in model:
        (tmp_path / "words.txt").write_text("no rank sends what it has not been asked for\n" * 40)
        text = text.replace("data: digits", "data: {text: {files: words.txt, context: 16}}")
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    file = tmp_path / "large.yaml"
    file.write_text(f"{text}stages: [train: {{steps: 1}}]\n")
    by_order = buckets_of(explain(load(file), hosts=1, ranks_per_host=2).probe)
    assert len(by_order.layouts) > 1
    assert by_order.params_in_ready_order is not None
    for caps in ("25", "0.5", "[3, 1, 0.1]"):
        loaded = load(file, [f"ddp={{bucket_cap_mb: {caps}, static_graph: true}}"])
        by_ddp = buckets_of(explain(loaded, hosts=1, ranks_per_host=2).probe)
        assert by_ddp.layouts == by_order.layouts_for_caps(loaded.pipeline.ddp.bucket_caps_bytes)
        assert by_ddp.layouts_for_caps([7 << 20]) is None


def test_a_probe_serves_other_settings_of_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is explained with it is the same as without; where more must be known, the model is looked at."""
    file = tmp_path / "p.yaml"
    file.write_text(
        f"{HEAD.format(model='{mlp: {inputs: 64, hidden: [512, 512, 512], outputs: 10}}')}"
        "stages: [train: {steps: 8}]\nsync: {local_sgd: {every: 4}}\n"
    )
    probe = explain(load(file), hosts=1, ranks_per_host=2).probe
    looked: list[Any] = []

    def probe_anew(*args: Any, **options: Any) -> model_probe.ModelProbe:
        looked.append(args)
        return model_probe.probe_model(*args, **options)

    monkeypatch.setattr("ddprun.explain.explain.probe_model", probe_anew)
    for overrides, looks in (
        (["sync={diloco: {every: 4}}"], False),
        (["sync={local_sgd: {every: 4, optimizer_state: average}}"], False),
        (["sync=every_step", "ddp={bucket_cap_mb: 1, static_graph: true}"], True),
        (["sync=every_step", "ddp={bucket_cap_mb: 2, static_graph: true}"], True),
        (["sync=every_step"], True),
        (["sync=every_step", "ddp.bucket_cap_mb=1", "hooks=[fp16]"], False),
    ):
        loaded = load(file, overrides)
        looked.clear()
        found = explain(loaded, hosts=1, ranks_per_host=2, probe=probe)
        assert bool(looked) == looks, overrides
        assert found.to_json_data() == explain(loaded, hosts=1, ranks_per_host=2).to_json_data()
        probe = found.probe


def test_a_model_that_looks_at_values_is_left_to_ddp(tmp_path: Path) -> None:
    """Its forward pass cannot run without them."""
    (tmp_path / "looks.py").write_text(
        """
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1) if float(x.sum()) > -1e9 else -x)
"""
    )
    file = tmp_path / "looks.yaml"
    model = "looks.Net: {in_features: 64, out_features: 10}"
    file.write_text(f"{HEAD.format(model=model)}stages: [train: {{steps: 1}}]\n")
    gradients = buckets_of(explain(load(file), hosts=1, ranks_per_host=2).probe)
    assert [param.name for param in gradients.layouts[0].params] == ["bias", "weight"]


REENTRANT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, times=1):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.times = times

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        for _ in range(self.times):
            hidden = checkpoint(self.inner, hidden, use_reentrant=True)
        return self.last(hidden)


class WithoutGradients(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x.flatten(1))
"""


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Net: {}", ""),
        ("Net: {times: 0}", "ddp.find_unused_parameters: .* inner.weight, inner.bias took no part"),
        ("Net: {times: 2}", "ddp: a backward pass has completed a gradient twice, as reentrant"),
        ("WithoutGradients: {in_features: 64, out_features: 10}", "model: the loss has no gradient"),
    ],
)
def test_what_ddp_does_not_take_is_told_as_a_run_tells_it(model: str, told: str, tmp_path: Path) -> None:
    """And of a reentrant checkpoint that it takes, buckets are those of a run."""
    (tmp_path / "reentrant.py").write_text(REENTRANT)
    text = f"{HEAD.format(model=f'reentrant.{model}')}ddp: {{bucket_cap_mb: 0.0001}}\n"
    text = f"{text.replace('ddp: {bucket_cap_mb: 1}', '')}stages: [train: {{steps: 1}}]\n"
    if told:
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(PipelineError, match=told):
            explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2)
        return
    run_dir = run_pipeline(tmp_path, text, 2)
    found = buckets_of(explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).probe)
    (started,) = [event for event in events(run_dir) if event["event"] == "started"]
    buckets = [bucket["params"] for bucket in started["buckets"]]
    assert [[param.name for param in one.params] for one in found.layouts] == buckets
    assert len(buckets) > 1


CLOSES = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.last = nn.Linear(64, 10), None
        self.call = lambda x: self.keep(self.line(x))

    def keep(self, x):
        if self.last is not None:
            float(self.last.sum())
        self.last = x.detach()
        return x

    def forward(self, x):
        return self.call(x.flatten(1))
"""


def test_a_model_whose_copy_calls_the_model_itself_is_left_to_ddp(tmp_path: Path) -> None:
    """A closure stays what it is in a copy. The model is left without gradients."""
    (tmp_path / "closes.py").write_text(CLOSES)
    file = tmp_path / "closes.yaml"
    file.write_text(f"{HEAD.format(model='closes.Net')}stages: [train: {{steps: 1}}]\n")
    probe = explain(load(file), hosts=1, ranks_per_host=2).probe
    (bucket,) = buckets_of(probe).layouts
    assert [param.name for param in bucket.params] == ["line.bias", "line.weight"]
    assert [param.grad for param in probe.model.parameters()] == [None, None]


IGNORES = """
from torch import nn


class Net(nn.Sequential):
    _ddp_params_and_buffers_to_ignore = ("1.bias",)

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


def test_parameters_that_ddp_ignores_are_in_no_bucket(tmp_path: Path) -> None:
    """A model names them for DDP, which never sends their gradients."""
    (tmp_path / "ignores.py").write_text(IGNORES)
    file = tmp_path / "ignores.yaml"
    file.write_text(f"{HEAD.format(model='ignores.Net')}stages: [train: {{steps: 1}}]\n")
    (bucket,) = buckets_of(explain(load(file), hosts=1, ranks_per_host=2).probe).layouts
    assert [param.name for param in bucket.params] == ["1.weight"]


KEEPS = """
import torch
from torch import nn

MASKS = {}


class Net(nn.Linear):
    def forward(self, x):
        x = x.flatten(1)
        return super().forward(x * MASKS.setdefault(x.shape[1], torch.ones_like(x[0])))
"""


def test_what_a_models_module_keeps_has_values(tmp_path: Path) -> None:
    """The pass without values comes after one with values, which fills such caches."""
    (tmp_path / "keeps_masks.py").write_text(KEEPS)
    file = tmp_path / "keeps.yaml"
    model = "keeps_masks.Net: {in_features: 64, out_features: 10}"
    file.write_text(f"{HEAD.format(model=model)}stages: [train: {{steps: 1}}]\n")
    explain(load(file), hosts=1, ranks_per_host=2)
    (mask,) = sys.modules["keeps_masks"].MASKS.values()
    assert type(mask) is Tensor


def test_a_model_that_does_not_fit_is_told_without_torchs_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass with values fails first."""
    (tmp_path / "keeps_masks.py").write_text(KEEPS)
    file = tmp_path / "narrow.yaml"
    file.write_text(
        "model: {keeps_masks.Net: {in_features: 63, out_features: 10}}\ndata: digits\noptimizer: sgd\n"
        "stages: [train: {steps: 1}]\n"
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        explain(load(file), hosts=1, ranks_per_host=2)
    assert not caplog.records


PUTS = """
import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        scores = super().forward(x.flatten(1))
        return scores.clone().put_(torch.tensor([0]), torch.ones(1))
"""


def test_deterministic_holds_while_the_model_is_looked_at(tmp_path: Path) -> None:
    """An operation that a run refuses is refused here, too, and torch's setting is afterwards as before."""
    (tmp_path / "puts.py").write_text(PUTS)
    file = tmp_path / "puts.yaml"
    model = "puts.Net: {in_features: 64, out_features: 10}"
    file.write_text(f"{HEAD.format(model=model)}stages: [train: {{steps: 1}}]\ndeterministic: true\n")
    with mock.patch.dict(os.environ), pytest.raises(RuntimeError, match="deterministic"):
        explain(load(file), hosts=1, ranks_per_host=2)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_probe_serves_only_pipelines_whose_buckets_it_knows(tmp_path: Path) -> None:
    """A stage that freezes more has buckets of its own; they are looked at where it sends gradients."""
    file = tmp_path / "p.yaml"
    file.write_text(
        "model: {mlp: {inputs: 64, hidden: [8], outputs: 10}}\ndata: digits\noptimizer: sgd\nstages:\n"
        '  - train: {steps: 2}\n  - train: {steps: 2, freeze: ["1.*"], sync: independent}\n'
    )
    probe = explain(load(file), hosts=1, ranks_per_host=2).probe
    assert len(probe.gradient_buckets) == 1
    sent = load(file, ["stages[1].train.sync=every_step"])
    assert not probe.suffices_for(sent)
    found = explain(sent, hosts=1, ranks_per_host=2, probe=probe)
    assert [[one.bucket for _, _, one in stage.step_buckets()] for stage in found.stages] == [[0], [1]]
