"""Parameters by their names: what a run starts with, what is frozen, and what has options of its own; their
exponential moving average (`ema`), which is evaluated and saved in their place.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddprun.config import LoadedPipeline, PipelineError, PipelineFault
from ddprun.sync.exchanger import can_be_averaged
from ddprun.units import abbreviated_list

_COMPILE_PREFIX, _DDP_PREFIX = "_orig_mod.", "module."


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of these patterns, as a shell has them, fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def strip_compile_prefix(name: str) -> str:
    """The name that a weight has in a model without `torch.compile`."""
    return name.replace(_COMPILE_PREFIX, "")


def optimizer_has_train_eval(optimizer: Optimizer) -> bool:
    """Whether an optimizer has `train()` and `eval()`: it trains other weights than those to be read."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def load_initial_weights(loaded: LoadedPipeline, model: nn.Module) -> None:
    """Give the model the weights of `init`, if there are; a PipelineError if they cannot be read or used."""
    wanted = loaded.pipeline.init
    if wanted is None:
        return
    path = loaded.folder / loaded.expand_env_and_folder("init.file", wanted.file)
    try:
        read = load_file(path)
    except OSError as error:
        raise loaded.error("init.file", f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        text = f"{path} is not a safetensors file: {error}"
        raise loaded.error("init.file", text, "`save` writes one, and so does safetensors.torch") from None
    state = model.state_dict().items()
    model_tensors = {strip_compile_prefix(name): value for name, value in state if isinstance(value, Tensor)}
    file_tensors = {strip_compile_prefix(name): value for name, value in read.items()}
    if file_tensors.keys().isdisjoint(model_tensors):  # as of a model under DDP
        file_tensors = {name.removeprefix(_DDP_PREFIX): value for name, value in file_tensors.items()}
    in_file = {name: list(value.shape) for name, value in file_tensors.items()}
    in_model = {name: list(value.shape) for name, value in model_tensors.items()}
    fitting = {name for name, shape in in_model.items() if in_file.get(name) == shape}
    # Of weights that are tied, a file has one name.
    covered = {model_tensors[name].data_ptr() for name in fitting if model_tensors[name].numel()}
    lacking = [
        name
        for name, value in model_tensors.items()
        if name not in fitting and value.data_ptr() not in covered and not matches(name, wanted.missing)
    ]
    both = [name for name in lacking if name in in_file]
    lists = {
        "missing": [name for name in lacking if name not in in_file],
        "unexpected": [
            name for name in file_tensors if not (name in model_tensors or matches(name, wanted.unexpected))
        ],
        "other shapes": [
            f"{name} is {in_file[name]} in the file and {in_model[name]} in the model" for name in both
        ],
    }
    if any(lists.values()):
        shown = "; ".join(f"{what}: {abbreviated_list(names)}" for what, names in lists.items() if names)
        hint = 'allow some, as in init: {file: …, missing: ["head.*"], unexpected: ["old.*"]}'
        raise loaded.error("init", f"{path.name} does not fit the model: {shown}", hint)
    with torch.no_grad():
        for name, value in model_tensors.items():  # in this order: tied weights may differ in the file
            if name in fitting:
                value.copy_(file_tensors[name])


def freeze_in_all_stages(loaded: LoadedPipeline, model: nn.Module) -> None:
    """Take out of training what every stage freezes; a PipelineError if a pattern has no parameter, or a
    stage none to train.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    frozen = set(trained)
    for path, patterns in loaded.pipeline.frozen_patterns().items():
        matching = matching_parameters(loaded, path, patterns, model)
        if matching.issuperset(trained):
            raise loaded.error(path, "no parameter is left to train", "freeze fewer")
        frozen &= matching
    for param in frozen:
        param.requires_grad_(False)


def build_parameter_groups(
    loaded: LoadedPipeline,
    model: nn.Module,
    options: Sequence[dict[str, Any]],
    apart: Sequence[Collection[Tensor]] = (),
) -> list[Any]:
    """What an optimizer is made over: all that is trained; with `groups`, those of each with its `options`,
    then all others. No group holds parameters of one set in `apart` together with others. A PipelineError:
    a pattern has no parameter, or a group none that is trained.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = loaded.pipeline.groups
    if not groups and not apart:
        return trained
    found: list[dict[str, Any]] = []
    taken = set[Tensor]()
    faults: list[PipelineFault] = []
    for index, group in enumerate(groups):
        path = f"groups[{index}].match"
        try:
            matching = matching_parameters(loaded, path, group.match, model) - taken
        except PipelineError as error:
            faults += error.faults
            continue
        params = [param for param in trained if param in matching]
        if not params:
            text = "each parameter that it matches is frozen, or in an earlier group"
            faults.append(loaded.fault(path, text, "move the group up, or remove it"))
        taken.update(params)
        found.append({"params": params, **options[index]})
    if faults:
        raise PipelineError(faults)
    rest = [param for param in trained if param not in taken]
    found += [{"params": rest}] if rest else []
    divided: list[dict[str, Any]] = []
    for whole in found:
        parts: dict[tuple[bool, ...], list[Tensor]] = {}
        for param in whole["params"]:
            parts.setdefault(tuple(param in some for some in apart), []).append(param)
        divided += [{**whole, "params": params} for params in parts.values()]
    return divided


def matching_parameters(
    loaded: LoadedPipeline, path: str, patterns: Sequence[str], model: nn.Module
) -> set[Tensor]:
    """The parameters that a pattern matches, those of tied ones by any of their names."""
    named = [
        (strip_compile_prefix(name), param) for name, param in model.named_parameters(remove_duplicate=False)
    ]
    names = [name for name, _ in named]
    faults = [
        loaded.fault(
            f"{path}[{index}]", f'no parameter is called "{pattern}"', f"there are {abbreviated_list(names)}"
        )
        for index, pattern in enumerate(patterns)
        if not any(matches(name, [pattern]) for name in names)
    ]
    if faults:
        raise PipelineError(faults)
    return {param for name, param in named if matches(name, patterns)}


class WeightEma:
    """The average of the parameters that are trained, as torch's `AveragedModel` makes it: it begins with the
    weights after the first update, and is `decay` times itself plus 1 - `decay` times the weights after each
    other. Half-precision weights have an average in fp32.

    Where ranks train apart each averages its own weights. The average of the ranks' mean is the mean of their
    averages, so these are exchanged only where they are read, or where a stage makes ranks equal.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.updates = 0
        self.tensors = initial_ema_tensors(model)
        self._params = {name: p for name, p in model.named_parameters() if name in self.tensors}

    def update(self) -> None:
        """The optimizer has taken a step."""
        averages, params = list(self.tensors.values()), self._params.values()
        weights: Any = [param.detach().to(own.dtype) for param, own in zip(params, averages, strict=True)]
        with torch.no_grad():
            if self.updates:
                self._average(averages, weights, self.updates)
            else:
                torch._foreach_copy_(averages, weights)
        self.updates += 1

    def copy_to_model(self) -> None:
        with torch.no_grad():
            for name, own in self.tensors.items():
                self._params[name].copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """All of it; its tensors, not copies."""
        return {"tensors": dict(self.tensors), "updates": self.updates}


def initial_ema_tensors(model: nn.Module, device: str | None = None) -> dict[str, Tensor]:
    """The average before any update: trained parameters by name, at least in fp32, on `device` if given."""
    return {
        name: param.detach().to(device, torch.promote_types(param.dtype, torch.float32), copy=True)
        for name, param in model.named_parameters()
        if param.requires_grad and can_be_averaged(param)
    }
