"""Torch's optimizers, schedules and losses, read from its source without importing it.

`find_spec("torch")` finds the package without running it (`find_spec("torch.optim")` would run it); `ast`
reads the few files that matter, each when it is first asked for.
"""

import ast
import functools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError, create_model

from ddprun.config.docs import type_words
from ddprun.config.tree import normalize_name
from ddprun.options import CustomValidator, Options, combine, expected, problem, unknown_name

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
    "loss": frozenset({"self", "size_average", "reduce", "device", "dtype", "options"}),
}
Schema = dict[str, Any]
"""JSON Schema of what a parameter takes, as far as a file can hold it: `type`, `enum`, `items`,
`prefixItems`, and `anyOf` with these; empty: anything."""

_JSON_TYPES = {"float": "number", "int": "integer", "bool": "boolean", "str": "string", "None": "null"}
_TENSOR_SCHEMA: Schema = {"type": "array", "items": {"type": "number"}}
"""Schema of a tensor. It is compared by identity: the schema of a list of numbers is equal."""

_NULL_SCHEMA: Schema = {"type": "null"}
_LENGTH_OPTIONS = ("T_max", "total_iters", "total_steps")


@dataclass(frozen=True)
class TorchOption:
    name: str
    schema: Schema
    required: bool
    default: str  # as torch's source writes it; empty if there is none


@functools.cache
def torch_folder() -> Path | None:
    """Where torch is installed; None if it is not."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def torch_version() -> str | None:
    """Torch's release such as `2.13.0`, without the build's suffix; None if torch is not installed."""
    with suppress(PackageNotFoundError):
        return version("torch").partition("+")[0]
    return None


def offered_class_names(kind: TorchKind) -> tuple[str, ...]:
    """Every class that a pipeline may name, in torch's spelling; empty without torch."""
    return tuple(name for name in _classes(kind) if why_not_offered(kind, name) is None)


def find_class(kind: TorchKind, name: str) -> str | None:
    """The class that a name means, offered or not: `cross_entropy` is `CrossEntropyLoss`. None: no class."""
    wanted = normalize_name(name)
    by_class = _class_by_spelling(kind).get(wanted)
    # Of a loss the function's name, too, which its whole source has to be read for.
    return _loss_class_by_function().get(wanted) if by_class is None and kind == "loss" else by_class


@functools.cache
def why_not_offered(kind: TorchKind, name: str) -> str | None:
    """Why a class of torch is not offered; None if it is."""
    reason = _NOT_OFFERED[kind].get(name)
    if reason is None and kind == "loss":
        forward = _method(_parse(_classes("loss")[name]), name, "forward")
        taken = [argument.arg for argument in forward.args.args[1:]] if forward else []
        if len(taken) != 2:
            reason = f"it takes {', '.join(taken)}, and a loss here is called with (output, target)"
    return reason


@functools.cache
def torch_options(kind: TorchKind, name: str) -> tuple[TorchOption, ...]:
    """The options that a file can give a class that `find_class` returned."""
    init = _method(_parse(_classes(kind)[name]), name, "__init__")
    return _parameters(init, kind) if init else ()


@functools.cache
def torch_options_model(kind: TorchKind, name: str) -> type[BaseModel]:
    """A pydantic model of the options of one class."""
    fields: dict[str, Any] = {
        item.name: (
            Annotated[Any, CustomValidator(functools.partial(_check_value, item.schema), item.schema)],
            ... if item.required else None,
        )
        for item in torch_options(kind, name)
    }
    return create_model(name, __base__=Options, **fields)


def _check_value(schema: Schema, value: Any) -> Any:
    """A value that fits the schema, lists as the type that torch expects; raises a ValidationError."""
    given = _JSON_TYPES.get("None" if value is None else type(value).__name__, "")
    words: list[str] = []
    for form in schema.get("anyOf", [schema]):
        kind = form.get("type")
        if not form or given == kind or (given == "integer" and kind == "number"):
            if form and isinstance(value, float) and not math.isfinite(value):
                raise expected("a finite number")
            return value
        if kind == "array" and isinstance(value, list | tuple):
            return _check_list(form, value)
        words += form.get("enum", ())
    if isinstance(value, str) and value in words:
        return value
    if isinstance(value, str) and words:
        raise unknown_name("value", value, words)
    raise expected(type_words(schema))


def _check_list(form: Schema, value: "list[Any] | tuple[Any, ...]") -> Any:
    fixed = form.get("prefixItems")
    if fixed and len(value) != len(fixed):
        raise problem(f"expected a list of {len(fixed)} values, got a list of {len(value)}")
    read = []
    for index, item in enumerate(value):
        try:
            read.append(_check_value(fixed[index] if fixed else form["items"], item))
        except ValidationError as error:
            raise combine([error], at=(index,)) from None
    return tuple(read) if fixed else read


def length_option_to_fill(name: str, options: Mapping[str, Any] | None = None) -> str | None:
    """The option to fill with the stage's steps; None: `options` give a length, or the schedule has none."""
    given = options or {}
    if given.keys() >= {"epochs", "steps_per_epoch"} or name not in _classes("schedule"):
        return None
    for parameter in torch_options("schedule", name):
        if parameter.name in _LENGTH_OPTIONS:
            return None if given.get(parameter.name) is not None else parameter.name
    return None


def tensor_options(loss: str) -> frozenset[str]:
    """Options that a file gives as a list of numbers and torch wants as a tensor."""
    found = ((item.name, item.schema.get("anyOf", [item.schema])) for item in torch_options("loss", loss))
    return frozenset(name for name, forms in found if any(form is _TENSOR_SCHEMA for form in forms))


def written_name(kind: TorchKind, name: str) -> str:
    """A class as a file would write it: a loss by its function."""
    return _functional_name(name) if kind == "loss" else name


@functools.cache
def _functional_name(loss: str) -> str:
    """The function of `torch.nn.functional` that a loss class calls; the class's name if there is none."""
    forward = _method(_parse(_classes("loss")[loss]), loss, "forward")
    for node in ast.walk(forward) if forward else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "F":
            return node.attr
    return loss


@functools.cache
def _class_by_spelling(kind: TorchKind) -> dict[str, str]:
    return {normalize_name(name): name for name in _classes(kind)}


@functools.cache
def _loss_class_by_function() -> dict[str, str]:
    return {normalize_name(_functional_name(name)): name for name in _classes("loss")}


@functools.cache
def _classes(kind: TorchKind) -> dict[str, Path]:
    folder = torch_folder()
    if folder is None:
        return {}
    if kind == "optimizer":
        tree = _parse(folder / "optim" / "__init__.py")
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
        for node in _parse(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: path for name in ast.literal_eval(exported) if name != "LRScheduler"}


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _method(tree: ast.Module, name: str, method: str) -> ast.FunctionDef | None:
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


def _parameters(init: ast.FunctionDef, kind: TorchKind) -> tuple[TorchOption, ...]:
    arguments = init.args
    positional = arguments.posonlyargs + arguments.args
    without_default = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*without_default, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = []
    for argument, default in pairs:
        schema = _schema(argument.annotation)
        if argument.arg == "reduction":  # `none` gives a loss per sample: no backward pass can start there
            schema = {"enum": ["mean", "sum"]}
        if argument.arg in _IGNORED_PARAMETERS[kind] or schema is None:
            continue
        required = default is None and not (kind == "schedule" and argument.arg in _LENGTH_OPTIONS)
        found.append(TorchOption(argument.arg, schema, required, ast.unparse(default) if default else ""))
    return tuple(found)


def _schema(annotation: ast.expr | None) -> Schema | None:
    """JSON Schema of an annotation: empty (anything) if its form is unknown, None if it takes a function."""
    forms = list(_union_schemas(annotation))
    real = [form for form in forms if form is not None and form != _NULL_SCHEMA]
    if not real:
        return None
    if {} in real:
        return {}
    if {"type": "number"} in real:  # a number takes the place of a tensor
        real = [form for form in real if form is not _TENSOR_SCHEMA]
    lists = [form for form in real if form.get("type") == "array"]
    unique = [form for index, form in enumerate(real) if form not in real[:index] and form not in lists[1:]]
    unique += [_NULL_SCHEMA] if _NULL_SCHEMA in forms else []
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _union_schemas(annotation: ast.expr | None) -> Iterator[Schema | None]:
    """What each member of a union takes, as `_schema`."""
    name = ast.unparse(annotation) if annotation else ""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from (*_union_schemas(left), *_union_schemas(right))
        case ast.Subscript(value=ast.Name(id=outer), slice=inner) if outer != "Callable":
            members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if outer in ("Union", "Optional"):
                yield from (form for member in members for form in _union_schemas(member))
                if outer == "Optional":
                    yield _NULL_SCHEMA
            elif outer == "Literal":
                yield {"enum": [str(ast.literal_eval(member)) for member in members]}
            elif outer in ("tuple", "Tuple") and ast.unparse(members[-1]) != "...":
                items, count = [_schema(member) or {} for member in members], len(members)
                yield {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
            elif outer in ("tuple", "Tuple", "list", "List", "Iterable", "Sequence"):
                yield {"type": "array", "items": _schema(members[0]) or {}}
            else:
                yield {}
        case _ if name in _JSON_TYPES:
            yield {"type": _JSON_TYPES[name]}
        case _ if name == "Tensor":
            yield _TENSOR_SCHEMA
        case _:
            yield None if name.startswith("Callable") else {}


def docstring_summary(kind: TorchKind, name: str) -> str:
    """The first sentence of the class's docstring, or of the text that is assigned to its `__doc__`."""
    text = ""
    for node in _parse(_classes(kind)[name]).body:
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
