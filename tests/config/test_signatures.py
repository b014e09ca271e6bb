"""What is read from torch's source is what torch has."""

import importlib
import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from ddprun.config import length_option_to_fill, tensor_options, torch_signatures
from ddprun.config.torch_signatures import TorchKind

MODULES: dict[TorchKind, str] = {
    "optimizer": "torch.optim",
    "schedule": "torch.optim.lr_scheduler",
    "loss": "torch.nn",
}
EVERY = [(kind, name) for kind in MODULES for name in torch_signatures.offered_class_names(kind)]


def real(kind: TorchKind, name: str) -> Any:
    return getattr(importlib.import_module(MODULES[kind]), name)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_options_are_those_of_the_real_class(kind: TorchKind, name: str) -> None:
    """Each class exists, takes each option that is offered, and needs none that is not."""
    takes = inspect.signature(real(kind, name)).parameters
    offered = {item.name: item for item in torch_signatures.torch_options(kind, name)}
    assert offered.keys() <= takes.keys()
    needed = {key for key, item in takes.items() if item.default is item.empty} - {"params", "optimizer"}
    filled = {length_option_to_fill(name, {})}
    assert {key for key, item in offered.items() if item.required} == needed - filled
    assert not offered.keys() & {"params", "optimizer", "last_epoch", "verbose", "size_average", "reduce"}


def test_nothing_of_torch_is_missing() -> None:
    """Every optimizer, schedule and loss of torch is offered, or refused with a reason."""
    optim, schedules = (importlib.import_module(MODULES[kind]) for kind in ("optimizer", "schedule"))
    known = {
        name
        for name in optim.__all__
        if inspect.isclass(getattr(optim, name)) and issubclass(getattr(optim, name), optim.Optimizer)
    } - {"Optimizer"}
    assert known == set(torch_signatures.offered_class_names("optimizer"))
    for name in schedules.__all__:
        if name != "LRScheduler":
            assert (name in torch_signatures.offered_class_names("schedule")) != bool(
                torch_signatures.why_not_offered("schedule", name)
            )
    nn = importlib.import_module("torch.nn")
    losses = [name for name in dir(nn) if name.endswith(("Loss", "Loss2d"))]
    assert len(losses) > 20
    for name in losses:
        if torch_signatures.find_class_name("loss", name) == name:
            assert (name in torch_signatures.offered_class_names("loss")) != bool(
                torch_signatures.why_not_offered("loss", name)
            )
    offered = set(torch_signatures.offered_class_names("loss"))
    assert offered >= {"CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "HuberLoss"}
    assert not offered & {"CTCLoss", "TripletMarginLoss", "CosineEmbeddingLoss", "GaussianNLLLoss"}


@pytest.mark.parametrize(
    ("name", "given", "length"),
    [
        ("CosineAnnealingLR", {}, "T_max"),
        ("CosineAnnealingLR", {"T_max": 5}, None),
        ("LinearLR", {"start_factor": 0.1}, "total_iters"),
        ("ConstantLR", {}, "total_iters"),
        ("PolynomialLR", {}, "total_iters"),
        ("OneCycleLR", {"max_lr": 1}, "total_steps"),
        ("OneCycleLR", {"max_lr": 1, "total_steps": None}, "total_steps"),
        ("OneCycleLR", {"max_lr": 1, "epochs": 2, "steps_per_epoch": 3}, None),
        ("StepLR", {"step_size": 3}, None),
        ("my.own.Schedule", {}, None),
    ],
)
def test_a_length_that_is_left_out_has_a_name(name: str, given: dict[str, Any], length: str | None) -> None:
    """The engine learns which option to fill with the stage's steps."""
    assert length_option_to_fill(name, given) == length


def test_tensors_are_known() -> None:
    """Options that must become tensors are told; a learning rate stays a number."""
    assert tensor_options("CrossEntropyLoss") == {"weight"}
    assert tensor_options("BCEWithLogitsLoss") == {"weight", "pos_weight"}
    assert tensor_options("MSELoss") == frozenset()


@pytest.mark.parametrize("value", [None, True, 1, 0.5, [], ["min"], {}, {"min": 1}])
def test_one_of_several_words_is_a_string(value: object) -> None:
    """Nothing else passes for one of the words that an option takes."""
    with pytest.raises(ValidationError, match="should be 'min' or 'max'"):
        torch_signatures.torch_options_model("schedule", "ReduceLROnPlateau").model_validate({"mode": value})


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_class_is_described(kind: TorchKind, name: str) -> None:
    """The catalog has a sentence for each class."""
    summary = torch_signatures.torch_options_model(kind, name).__doc__ or ""
    assert len(summary) > 10
    assert ":" not in summary[:2]
    assert not summary.startswith(("Example", "Args"))
