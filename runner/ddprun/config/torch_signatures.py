"""Torch's optimizers, schedules and losses, read from its source without importing it.

`find_spec("torch")` finds the package without running it (`find_spec("torch.optim")` would run it); `ast`
reads the few files that matter, each when it is first asked for.
"""

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)

from ddprun.config.tree import normalize_name
from ddprun.options import Options, expected

TorchKind = Literal["optimizer", "schedule", "loss"]

_NOT_OFFERED: dict[TorchKind, dict[str, str]] = {
    "optimizer": {},
    "schedule": {
        "LambdaLR": "its lr_lambda is a Python function; write the import path of your own schedule",
        "MultiplicativeLR": "its lr_lambda is a Python function; write the import path of your own schedule",
        "SequentialLR": "it takes schedule objects; write the import path of your own schedule",
        "ChainedScheduler": "it takes schedule objects; write the import path of your own schedule",
    },
    "loss": {"NLLLoss2d": "torch has deprecated it; use nll_loss"},
}
_IGNORED_PARAMETERS: dict[TorchKind, frozenset[str]] = {
    "optimizer": frozenset({"self", "params"}),
    "schedule": frozenset({"self", "optimizer", "last_epoch", "verbose"}),
    "loss": frozenset({"self", "size_average", "reduce", "reduction", "device", "dtype", "options"}),
}
_LOSS_FUNCTION_NAMES = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
}  # losses whose function has another name than the class
_SCHEDULE_LENGTH_OPTIONS = ("T_max", "total_iters", "total_steps")


@dataclass(frozen=True)
class TorchOption:
    name: str
    annotation: str  # of its type, as torch's source writes it
    required: bool
    default: str  # as torch's source writes it; empty if there is none


def offered_class_names(kind: TorchKind) -> tuple[str, ...]:
    """Every class that a pipeline may name, in torch's spelling."""
    return tuple(name for name in _class_source_files(kind) if why_not_offered(kind, name) is None)


def find_class_name(kind: TorchKind, name: str) -> str | None:
    """The class that a name means, offered or not: `cross_entropy` is `CrossEntropyLoss`. None: no class."""
    return _class_by_spelling(kind).get(normalize_name(name))


def class_name_spellings(kind: TorchKind, name: str) -> tuple[str, ...]:
    """A class as files write it: in torch's spelling or in lower case, and a loss as its function, too."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    functions = (_LOSS_FUNCTION_NAMES.get(name, parts), parts.removesuffix("_loss")) if kind == "loss" else ()
    return name, name.lower(), *functions


@functools.cache
def why_not_offered(kind: TorchKind, name: str) -> str | None:
    """Why a class of torch is not offered; None if it is."""
    reason = _NOT_OFFERED[kind].get(name)
    if reason is None and kind == "loss":
        forward = _find_method(_parse_source(_class_source_files("loss")[name]), name, "forward")
        taken = [argument.arg for argument in forward.args.args[1:]] if forward else []
        if len(taken) != 2:
            reason = f"it takes {', '.join(taken)}, and a loss here is called with (output, target)"
    return reason


@functools.cache
def torch_options(kind: TorchKind, name: str) -> tuple[TorchOption, ...]:
    """The options that a file can give a class that `find_class_name` returned."""
    init = _find_method(_parse_source(_class_source_files(kind)[name]), name, "__init__")
    return _options_of_init(init, kind) if init else ()


@functools.cache
def torch_options_model(kind: TorchKind, name: str) -> type[BaseModel]:
    """A pydantic model of the options of one class."""
    fields: dict[str, Any] = {
        item.name: (
            _evaluate_annotation(item.annotation),
            ... if item.required else _shown_default(kind, item),
        )
        for item in torch_options(kind, name)
    }
    return create_model(name, __base__=Options, __doc__=f"{_docstring_summary(kind, name)}.", **fields)


def _shown_default(kind: TorchKind, option: TorchOption) -> Any:
    """A default for readers, torch takes its own: a value, or an expression such as `1.0 / 3` as written."""
    if kind == "schedule" and option.name in _SCHEDULE_LENGTH_OPTIONS:
        return "the stage's steps"
    try:
        value = ast.literal_eval(option.default)
    except ValueError:
        return option.default
    return list(value) if isinstance(value, tuple) else value


class _Tuple:
    """A list of the file, as the tuple that torch takes."""

    def __class_getitem__(cls, items: Any) -> Any:
        return Annotated[tuple[items], Field(strict=False)]


# What a file gives for the names in torch's annotations.
_NAMESPACE: dict[str, Any] = {kind.__name__: kind for kind in (float, int, bool, str, list)}
_NAMESPACE |= {"Literal": Literal, "tuple": _Tuple, "Iterable": list, "Tensor": list[float]}
# Those of torch 2.11.
_NAMESPACE |= {"Optional": Optional, "Union": Union, "Tuple": _Tuple, "List": list, "Sequence": list}


def _evaluate_annotation(annotation: str) -> Any:
    """The type of what a file can give for a parameter; Any if nobody knows the form of its annotation."""
    try:  # to evaluate torch's own source, which a run imports anyway
        found = eval(annotation.replace("float | Tensor", "float"), {"__builtins__": {}}, _NAMESPACE)
    except (NameError, TypeError):
        return Any
    several = get_origin(found) in (Union, UnionType) and len(set(get_args(found)) - {NoneType}) > 1
    return Annotated[found, WrapValidator(_validate_number_or_list)] if several else found


def _validate_number_or_list(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """One error for a union, where pydantic has one for each of its types."""
    try:
        return read(value)
    except ValidationError:
        raise expected("a number or a list of numbers") from None


def length_option_to_fill(name: str, options: Mapping[str, Any]) -> str | None:
    """The option to fill with the stage's steps; None: `options` give a length, or the schedule has none."""
    if options.keys() >= {"epochs", "steps_per_epoch"} or name not in _class_source_files("schedule"):
        return None
    for parameter in torch_options("schedule", name):
        if parameter.name in _SCHEDULE_LENGTH_OPTIONS:
            return None if options.get(parameter.name) is not None else parameter.name
    return None


def tensor_options(loss: str) -> frozenset[str]:
    """Options that a file gives as a list of numbers and torch wants as a tensor."""
    return frozenset(item.name for item in torch_options("loss", loss) if "Tensor" in item.annotation)


@functools.cache
def _class_by_spelling(kind: TorchKind) -> dict[str, str]:
    return {
        normalize_name(one): name
        for name in _class_source_files(kind)
        for one in class_name_spellings(kind, name)
    }


@functools.cache
def _class_source_files(kind: TorchKind) -> dict[str, Path]:
    spec = find_spec("torch")
    assert spec is not None, "torch is not installed"
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    if kind == "optimizer":
        tree = _parse_source(folder / "optim" / "__init__.py")
        return {
            alias.name: folder.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch.optim.")
            for alias in node.names
            if alias.name[0].isupper() and alias.name != "Optimizer"
        }
    path = folder / ("optim/lr_scheduler.py" if kind == "schedule" else "nn/modules/loss.py")
    exported = next(
        node.value
        for node in _parse_source(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: path for name in ast.literal_eval(exported) if name != "LRScheduler"}


@functools.cache
def _parse_source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find_method(tree: ast.Module, name: str, method: str) -> ast.FunctionDef | None:
    """A method of a class or of the nearest base in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    queue = [name]
    while queue:
        found = classes.get(queue.pop(0))
        if found is None:
            continue
        for item in found.body:
            if isinstance(item, ast.FunctionDef) and item.name == method:
                return item
        queue += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return None


def _options_of_init(init: ast.FunctionDef, kind: TorchKind) -> tuple[TorchOption, ...]:
    arguments = init.args
    positional = arguments.posonlyargs + arguments.args
    without_default = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*without_default, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = []
    for argument, default in pairs:
        annotation = ast.unparse(argument.annotation) if argument.annotation else "Any"
        if argument.arg in _IGNORED_PARAMETERS[kind] or "Callable" in annotation:
            continue
        required = default is None and not (kind == "schedule" and argument.arg in _SCHEDULE_LENGTH_OPTIONS)
        source = ast.unparse(default) if default else ""
        found.append(TorchOption(argument.arg, annotation, required, source))
    return tuple(found)


def _docstring_summary(kind: TorchKind, name: str) -> str:
    """The first sentence of the class's docstring, or of the text that is assigned to its `__doc__`."""
    text = ""
    for node in _parse_source(_class_source_files(kind)[name]).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or text
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"{name}.__doc__":
            parts = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            parts.sort(key=lambda part: (part.lineno, part.col_offset))
            text = next((part.value for part in parts if isinstance(part.value, str)), text)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    prose = next((paragraph for paragraph in paragraphs if not paragraph.startswith("..")), "")
    prose = re.sub(r":\w+:`~?([^`<]*?)(?: <[^`]*>)?`", r"\1", prose).replace("`", "")
    return re.split(r"(?<=[a-z)])\. ", prose)[0].rstrip(".:")
