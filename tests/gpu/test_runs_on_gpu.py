"""Whole runs on a GPU: broken off and resumed, hanging, and what they cost."""

import importlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from ddprun.checkpoint.folder import steps_in
from tests.engine.running import lines, summary
from tests.gpu.conftest import FRESH, Figure
from tests.gpu.conftest import on_gpu as ddprun
from tests.ranks import Running, as_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

STEPS = 400
RESUMED = """
model: {mlp: {inputs: 64, outputs: 10, hidden: [96, 96]}}
data: digits
optimizer: {adamw: {lr: 0.01}}
deterministic: true
hooks: HOOKS
sync: SYNC
stages: [{train: {steps: 400}}, save]
checkpoint: {every: 20, keep: 3}
launch: {device: DEVICE, backend: BACKEND}
"""
RESUMABLE = {
    "diloco-nccl": ("[]", "{diloco: {every: 8, overlap_steps: 3}}", 1, "nccl"),
    "diloco-gloo": ("[fp16]", "{diloco: {every: 8, overlap_steps: 3}}", 2, "gloo"),
    "powersgd": ("[{powersgd: {rank: 2}}]", "every_step", 2, "gloo"),
    "fp16-int8": ("[fp16, int8]", "every_step", 2, "gloo"),
}


def broken_off_and_resumed(folder: Path, ranks: int, text: str, *changes: str) -> tuple[Path, Path]:
    """An unbroken run, and one that is killed after a checkpoint and resumed; gives both folders."""
    (folder / "p.yaml").write_text(text)
    options = ["--nproc-per-node", str(ranks)]
    whole = ddprun("p.yaml", *options, "--run-dir", "whole", cwd=folder)
    assert whole.code == 0, whole.stderr
    checkpoints = folder / "part" / "checkpoints"
    with Running("p.yaml", *options, "--run-dir", "part", cwd=folder, module=FRESH) as running:
        until = time.monotonic() + 60
        while not steps_in(checkpoints) and time.monotonic() < until:
            time.sleep(0.005)
        for rank in running.ranks():
            os.kill(rank, signal.SIGKILL)
    assert 0 < steps_in(checkpoints)[0] < STEPS, "it was broken off"
    again = ddprun("resume", "part", *options, *changes, cwd=folder)
    assert again.code == 0, again.stderr
    assert summary(folder / "part")["steps"] == STEPS
    return folder / "whole", folder / "part"


def text_of(hooks: str, sync: str, device: str, backend: str) -> str:
    found = RESUMED
    for name, value in {"HOOKS": hooks, "SYNC": sync, "DEVICE": device, "BACKEND": backend}.items():
        found = found.replace(name, value)
    return found


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_resumed_run_on_a_gpu_ends_with_the_bits_of_the_unbroken_one(tmp_path: Path, kind: str) -> None:
    hooks, sync, ranks, backend = RESUMABLE[kind]
    whole, part = broken_off_and_resumed(tmp_path, ranks, text_of(hooks, sync, "cuda", backend))
    expected, found = (load_file(run / "model.safetensors") for run in (whole, part))
    assert expected.keys() == found.keys()
    assert expected
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert summary(part)["device"] == "cuda"


def test_a_checkpoint_of_a_cpu_is_resumed_on_the_gpu(tmp_path: Path) -> None:
    """With DiLoCo, whose outer momentum is in it."""
    text = text_of("[]", "{diloco: {every: 8}}", "cpu", "auto")
    changes = "--set=launch.device=cuda", "--set=launch.backend=gloo"
    _, part = broken_off_and_resumed(tmp_path, 2, text, *changes)
    assert summary(part)["device"] == "cuda"


@pytest.mark.skipif(
    shutil.which("gcc") is None or importlib.util.find_spec("triton") is None,
    reason="torch.compile needs triton and a C compiler here",
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_run_ends_as_one_that_is_not(tmp_path: Path, mode: str) -> None:
    """With CUDA graphs, too, without accumulation: with it, torch loses gradients."""
    text = text_of("[fp16]", "every_step", "cuda", "nccl").replace("steps: 400", "steps: 20")
    accumulate = "accumulate: 2" if mode == "default" else ""
    (tmp_path / "p.yaml").write_text(text.replace("deterministic: true", accumulate))
    ended: dict[str, dict[str, torch.Tensor]] = {}
    for compiled in ("null", f"{{mode: {mode}}}"):
        run_dir = f"run-{len(ended)}"
        done = ddprun(
            "p.yaml", f"--set=compile={compiled}", "--nproc-per-node=1", "--run-dir", run_dir, cwd=tmp_path
        )
        assert done.code == 0, done.stderr
        ended[compiled] = load_file(tmp_path / run_dir / "model.safetensors")
    plain, found = ended.values()
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)


def test_shared_memory_inside_a_host_is_refused_by_its_place_in_the_file(tmp_path: Path) -> None:
    text = text_of("[{hierarchical: {hosts: 1, within: [shared_memory]}}]", "every_step", "auto", "gloo")
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert "hooks" in done.stderr
    assert '"shared_memory" sums tensors on the CPU' in done.stderr


PACKED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((1 + index % 5, 4), index / 32), torch.tensor(index % 3)


class Graphs:
    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graphs(self.nodes.to(device))


def pack(samples):
    inputs, labels = zip(*samples)
    return (pack_sequence(inputs, enforce_sorted=False), Graphs(torch.ones(3))), torch.stack(labels)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.reads, self.last = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, both):
        packed, graphs = both
        return self.last(self.reads(packed)[1][0]) * graphs.nodes
"""


def test_packed_sequences_and_objects_that_move_themselves(tmp_path: Path) -> None:
    """cuDNN wants the sizes of a packed batch on the CPU."""
    (tmp_path / "mine.py").write_text(PACKED)
    (tmp_path / "p.yaml").write_text(
        "model: mine.Reads\ndata: mine.Sequences\nloader: {batch_size: 4, collate: mine.pack}\n"
        "loss: cross_entropy\noptimizer: {sgd: {lr: 0.1}}\nlaunch: {device: auto}\n"
        "stages: [{train: {steps: 6}}]\n"
    )
    done = ddprun("p.yaml", "--nproc-per-node=1", cwd=tmp_path)
    assert done.code == 0, done.stderr


ASLEEP = """
import torch
from ddprun_hooks import Hook

class Asleep(Hook):
    rounds = 2
    calls = 0

    async def __call__(self, payload, comm):
        Asleep.calls += 1
        total = await comm.reduce(payload.tensor)
        if Asleep.calls == 30:
            torch.cuda._sleep(60_000_000_000)  # half a minute
        return await comm.reduce(total)
"""


def test_a_collective_that_hangs_on_the_gpu_rings_the_alarm(tmp_path: Path) -> None:
    """NCCL's flight recorder is kept, and the process ends though the device is still busy."""
    (tmp_path / "mine.py").write_text(ASLEEP)
    text = text_of("[mine.Asleep]", "every_step", "cuda", "nccl, timeout_s: 6")
    (tmp_path / "p.yaml").write_text(text)
    start = time.monotonic()
    done = ddprun("p.yaml", "--nproc-per-node", "1", "--run-dir", "run", cwd=tmp_path)
    assert done.code == 1
    assert time.monotonic() - start < 40
    assert "the run hangs" in done.stderr
    logs = tmp_path / "run" / "logs"
    assert "flight-recorder-nccl-00000.json" in os.listdir(logs), done.stderr
    recorded = json.loads((logs / "flight-recorder-nccl-00000.json").read_text())
    assert any("nccl" in one["profiling_name"] for one in recorded["entries"])


WIDE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12)))

    def forward(self, x):
        return self.layers(x[:1].expand(2048, -1).bfloat16())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.full((4096,), index / 2**20), 0

def loss(output, target):
    return output.float().square().mean()
"""

GPT = """
import torch
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH, WORDS = 768, 12, 12, 1024, 50257

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return self.head(self.norm(self.layers(self.words(x) + self.places, mask=mask, is_causal=True)))

class Data(torch.utils.data.Dataset):
    def __init__(self):
        text = torch.randint(WORDS, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.x, self.y = text[:, :-1], text[:, 1:]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""

COSTS = {"wide": (WIDE, "pure_bf16", 2, 300), "gpt": (GPT, "bf16", 16, 60)}
"""By module: its text, `precision`, the batch size, and steps."""

COST = """
model: MODULE.Model
data: MODULE.Data
loader: {batch_size: BATCH, shuffle: false}
loss: MODULE.loss
optimizer: {adamw: {lr: 0.0001}}
precision: PRECISION
stages: [{train: {steps: STEPS}}]
checkpoint: {keep: 0}
hooks: HOOKS
launch: {device: cuda, backend: nccl}
"""

_UNCOUNTED = 10  # steps at the start


def plain_loop(folder: Path, name: str) -> float:
    """Seconds a step of DDP and AdamW, as anyone would write it."""
    _, precision, batch_size, steps = COSTS[name]
    sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    net = module.Model().to("cuda", torch.bfloat16 if precision == "pure_bf16" else torch.float32)
    model = DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(module.Data(), batch_size=batch_size, pin_memory=True)
    start = 0.0
    for step, (inputs, targets) in enumerate(islice(loader, steps + _UNCOUNTED)):
        if step == _UNCOUNTED:
            torch.cuda.synchronize()
            start = time.perf_counter()
        x, y = inputs.to("cuda", non_blocking=True), targets.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = module.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


@pytest.mark.parametrize(("name", "hooks"), [("wide", "[]"), ("gpt", "[]"), ("gpt", "[int8]")])
def test_what_a_step_costs_beside_a_plain_loop(tmp_path: Path, figure: Figure, name: str, hooks: str) -> None:
    """One process over NCCL. `wide`: steps of about 4 ms on an H200 with 12 buckets, so that what the host
    does counts. `gpt`: 163 million parameters, steps of about 80 ms.

    The times are figures, which nothing here judges.
    """
    text, precision, batch_size, steps = COSTS[name]
    (tmp_path / f"{name}.py").write_text(text)
    pipeline = COST.replace("MODULE", name).replace("PRECISION", precision).replace("HOOKS", hooks)
    pipeline = pipeline.replace("BATCH", str(batch_size)).replace("STEPS", str(steps))
    (tmp_path / "p.yaml").write_text(pipeline)
    plain = [as_processes(1, plain_loop, tmp_path, name)[0]]
    done = ddprun("p.yaml", "--nproc-per-node", "1", "--run-dir", "run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    plain.append(as_processes(1, plain_loop, tmp_path, name)[0])
    run = tmp_path / "run"
    assert summary(run)["steps"] == steps
    recorded = lines(run, "steps")
    first, last = recorded[_UNCOUNTED], recorded[-1]
    ours = (last["start_us"] - first["start_us"]) / (last["step"] - first["step"]) / 1e6
    figure("plain", f"{1000 * plain[0]:.2f} and {1000 * plain[1]:.2f} ms")
    figure("ddprun", f"{1000 * ours:.2f} ms, {min(plain) / ours:.3f}")
    for part in ("data_us", "forward_us", "backward_us", "optimizer_us", "sync_us"):
        figure(part, f"{statistics.median(one[part] for one in recorded[1:]) / 1000:.2f} ms")


def test_the_clocks_of_a_run_do_not_jump(tmp_path: Path) -> None:
    """Steps follow each other: what they take adds up to the time of the run, within 1 %."""
    text = text_of("[int8]", "every_step", "cuda", "gloo")
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", "--nproc-per-node", "2", "--run-dir", "run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    steps = [line for line in lines(tmp_path / "run", "steps") if line["rank"] == 0]
    assert len(steps) == 400
    whole = steps[-1]["start_us"] + steps[-1]["step_us"] - steps[0]["start_us"]
    assert abs(sum(line["step_us"] for line in steps) / whole - 1) < 0.01
