"""Loss scaling: how often it waits for the device; and what a GPU is given without waiting."""

import os
from collections import UserDict, defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ddprun.engine import seeding
from ddprun.engine.objective import Precision
from ddprun_hooks.comm.gpu import CopyStream
from tests.fake_gpu import FakeGpu

OPTIMIZERS: dict[str, Any] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.Adam(params, lr=1.0, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_step_with_loss_scaling_reads_one_number_of_the_device(kind: str, value: float) -> None:
    """Whether a gradient was not finite; torch's own scaler reads as much."""
    param = torch.zeros(3, requires_grad=True)
    optimizer = OPTIMIZERS[kind]([param])
    precision = Precision("fp16", torch.device("cpu"))
    assert precision.scaler is not None
    precision.loss_scale()
    param.grad = torch.full((3,), value)
    precision.note_nonfinite_gradients(optimizer)
    read: list[int] = []
    item = Tensor.item

    def counted(self: Tensor) -> Any:
        read.append(self.numel())
        return item(self)

    with mock.patch.object(Tensor, "item", counted):
        applied = precision.step(optimizer)
    assert read == [1]
    assert applied == (value == 1.0)
    assert bool((param == 0).all()) != applied
    assert precision.scaler.get_scale() == (2.0**16 if applied else 2.0**15)


def test_a_batch_is_copied_beside_what_the_gpu_computes() -> None:
    """On a stream of its own; the compute stream waits for the copies, and keeps their memory."""
    gpu = FakeGpu()
    gpu.device = torch.device("meta")
    precision = Precision("pure_bf16", torch.device("meta"))
    precision._copy_stream = CopyStream(gpu)
    resident = torch.zeros(7, device="meta")
    given = {"image": torch.zeros(5), "pair": (torch.zeros(2, dtype=torch.int64), resident), "name": "x"}
    moved = precision.to_device(given)
    assert gpu.log == [
        ("compute", "waits for", "stream 0"),
        ("compute", "uses", "5"),
        ("compute", "uses", "2"),
    ]
    image, (labels, still) = moved["image"], moved["pair"]
    assert {one.device.type for one in (image, labels, still)} == {"meta"}
    assert (image.dtype, labels.dtype, moved["name"]) == (torch.bfloat16, torch.int64, "x")


class Graphs:
    """A batch that moves itself, as torch_geometric's do."""

    def __init__(self, nodes: Tensor, edges: Tensor) -> None:
        self.nodes, self.edges = nodes, edges

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.nodes.to(device), self.edges.to(device))


class Fields(dict[str, Tensor]):
    """A mapping that moves itself, as a TensorDict does."""

    def to(self, device: torch.device) -> "Fields":
        return Fields({key: value.to(device) for key, value in self.items()})


def test_objects_with_a_method_to_move_as_a_whole() -> None:
    """A PackedSequence keeps its batch sizes on the CPU; a GPU's copy stream leaves such objects alone."""
    precision = Precision("fp32", torch.device("meta"))
    precision._copy_stream = CopyStream(gpu := FakeGpu())
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, 4), torch.zeros(3, 4)], enforce_sorted=False)
    graphs, fields = Graphs(torch.zeros(5), torch.zeros(2, 3)), Fields(ids=torch.zeros(4))
    moved = precision.to_device((packed, {"graphs": graphs, "fields": fields}))
    assert not [entry for entry in gpu.log if entry[1] == "uses"]
    assert isinstance(moved[0], nn.utils.rnn.PackedSequence)
    assert (moved[0].data.device.type, moved[0].batch_sizes.device.type) == ("meta", "cpu")
    unsorted = moved[0].unsorted_indices
    assert unsorted is not None
    assert unsorted.device.type == "meta"
    graphs, fields = moved[1]["graphs"], moved[1]["fields"]
    assert isinstance(fields, Fields)
    assert {graphs.nodes.device.type, graphs.edges.device.type, fields["ids"].device.type} == {"meta"}


class Encoding(UserDict[str, Tensor]):
    """As Hugging Face's BatchEncoding, whose `to` waits for the device, tensor by tensor."""

    def to(self, device: torch.device) -> "Encoding":
        raise AssertionError


def test_a_user_dict_keeps_its_class_and_its_tensors_move_as_others_do() -> None:
    given = Encoding(pixels=torch.zeros(4), ids=torch.zeros(4, dtype=torch.int64))
    moved = Precision("pure_bf16", torch.device("meta")).to_device(given)
    assert isinstance(moved, Encoding)
    assert {name: one.dtype for name, one in moved.items()} == {"pixels": torch.bfloat16, "ids": torch.int64}
    assert {one.device.type for one in moved.values()} == {"meta"}
    assert given["pixels"].device.type == "cpu"


class Meta(dict[str, Any]):
    """Keys are attributes, too; one that is missing raises a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Frozen(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError


def test_tuples_and_classes_derived_from_dict_stay_what_they_are() -> None:
    given: dict[str, Any] = {
        "sizes": [(4, 4)],
        "meta": Meta(scale=torch.zeros(2)),
        "frozen": Frozen(to=torch.zeros(2)),
    }
    counts = defaultdict[str, Any](int, {"a": torch.zeros(2)})
    moved, also = Precision("pure_bf16", torch.device("meta")).to_device((given, counts))
    assert moved["sizes"] == [(4, 4)]
    assert type(moved["meta"]) is Meta
    assert type(moved["frozen"]) is dict, "it cannot be changed"
    assert also["b"] == 0
    for tensor in (moved["meta"].scale, moved["frozen"]["to"], also["a"]):
        assert (tensor.device.type, tensor.dtype) == ("meta", torch.bfloat16)
    assert given["meta"]["scale"].device.type == "cpu"


def test_a_checkpoint_of_a_cpu_is_restored_on_a_gpu() -> None:
    """Which has a generator more; one that is there is restored."""
    gpu, set_to = torch.device("cuda", 0), list[Any]()
    state = seeding.rng_state(torch.device("cpu"))
    with mock.patch.object(torch.cuda, "set_rng_state", lambda *given: set_to.append(given)):
        seeding.restore_rng_state(state, gpu)
        assert not set_to
        seeding.restore_rng_state({**state, "cuda": torch.zeros(16)}, gpu)
    assert len(set_to) == 1


def test_deterministic_refuses_what_cannot_repeat_its_bits() -> None:
    """As torch does: attention's backward pass on a GPU is one of them unless it is asked for."""
    values, index = torch.zeros(4), torch.tensor([0, 0])
    with mock.patch.dict(os.environ):
        seeding.make_deterministic(torch.device("cpu"), strict=False)
        values.put_(index, torch.ones(2))
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        try:
            seeding.make_deterministic(torch.device("cpu"), strict=True)
            with pytest.raises(RuntimeError, match="deterministic"):
                values.put_(index, torch.ones(2))
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        finally:
            torch.use_deterministic_algorithms(False)
