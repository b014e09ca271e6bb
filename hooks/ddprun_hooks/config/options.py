"""What each built-in hook takes: its options, its role in a stack, and where its implementation lives.

Nothing here imports torch, so `ddprun check` and `ddprun catalog` can read it in milliseconds.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
)

from ddprun_hooks.config.import_path import installed_entry_points
from ddprun_hooks.config.messages import (
    allowed_values,
    closest_match,
    combine,
    expected,
    format_message,
    problem,
)

Role = Literal["codec", "reducer", "alone"]
"""`codec`: changes the payload and passes it on. `reducer`: carries the payload over the ranks and ends the
stack. `alone`: a reducer that stands in a stack by itself."""

HookSpec = str | Mapping[str, Mapping[str, Any] | None]
"""`"fp16"` or `{"topk": {"density": 0.01}}`: the same rule as in a pipeline file."""


class HookOptions(BaseModel):
    """Options of one built-in hook. The docstring of a subclass is what `ddprun catalog` prints."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    role: ClassVar[Role]
    implementation: ClassVar[str]
    """`module:factory` in `ddprun_hooks.builtin`, imported when a run uses the hook."""

    def __init_subclass__(cls, name: str = "", role: Role = "codec", implementation: str = "") -> None:
        """Make it the hook of a name in pipelines; without one it is the base of others."""
        super().__init_subclass__()
        if name:
            cls.role, cls.implementation = role, implementation
            BUILT_IN_HOOKS[name] = cls

    @classmethod
    def role_for_options(cls, options: Mapping[str, Any]) -> Role:
        return cls.role


BUILT_IN_HOOKS: dict[str, type[HookOptions]] = {}
"""Every built-in hook by its name in a pipeline. Plain all-reduce has no name: it ends every stack that
names no reducer."""

ENTRY_POINT_GROUP = "ddprun.hooks"


def parse_hook_spec(spec: Any, known: Callable[[], list[str]] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `{name: options}`, not checked; ValidationError lists what is `known`."""
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or not spec or not all(isinstance(name, str) for name in spec):
        raise expected("a name, or `name: {options}`", allowed_values(known()) if known else None, got=spec)
    if len(spec) > 1:
        listed = ", ".join(f'"{name}"' for name in spec)
        raise problem(f"expected one hook, got {len(spec)}: {listed}", "keep one", at=list(spec)[1])
    ((name, options),) = spec.items()
    if options is not None and not isinstance(options, Mapping):
        raise expected(f"a mapping of {name}'s options", at=name, got=options)
    return name, dict(options or {})


def validate_hook_spec(spec: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of a hook, a built-in one's checked and complete; raises ValidationError by place."""
    name, options = parse_hook_spec(spec)
    if name in BUILT_IN_HOOKS:
        try:
            return name, BUILT_IN_HOOKS[name].model_validate(options).model_dump(mode="json")
        except ValidationError as error:
            raise combine([error], at=(name,)) from None
    if "." not in name and name not in installed_hook_names():
        raise problem(unknown_hook_message(name))
    return name, options


def _validate_level_stack(value: Any, info: ValidationInfo) -> tuple[HookSpec, ...]:
    """Read the hooks of one level; each fault has its place in the list. The reader of pipeline files has a
    `read_hook` of its own in the validation's context.
    """
    if not isinstance(value, list | tuple):
        raise expected("a list", got=value)
    read: Callable[[Any], tuple[str, Mapping[str, Any]]] = (info.context or {}).get(
        "read_hook", validate_hook_spec
    )
    hooks: list[HookSpec] = []
    errors: list[ValidationError] = []
    for index, spec in enumerate(value):
        try:
            name, options = read(spec)
            hooks.append({name: dict(options)} if options else name)
        except ValidationError as error:
            errors.append(combine([error], at=(index,)))
    if errors:
        raise combine(errors)
    return tuple(hooks)


LevelStack = Annotated[
    tuple[HookSpec, ...],
    PlainValidator(_validate_level_stack),
    PlainSerializer(list),
    WithJsonSchema({"type": "array", "items": {"definition": "hook"}}),
]
"""A stack for one level of `hierarchical`."""


def installed_hook_names() -> list[str]:
    """Names that installed packages add; nothing is imported."""
    return list(installed_entry_points(ENTRY_POINT_GROUP))


def unknown_hook_message(name: str) -> str:
    known = [*BUILT_IN_HOOKS, *installed_hook_names()]
    allowed = allowed_values([*known, "or an import path such as package.module.name"])
    return format_message(f'unknown hook "{name}"', allowed, closest_match(name, known))


class _CastOptions(HookOptions):
    accumulate: Literal["fp32"] | None = None
    """`fp32`: sum in fp32, in two phases of the same bytes, with error feedback, and round the mean once; the
    cast then ends the stack. null: sum in 16 bits."""

    @model_serializer(mode="wrap")
    def _dump_without_none(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A plain cast stays a plain name."""
        return {key: value for key, value in dump(self).items() if value is not None}

    @classmethod
    def role_for_options(cls, options: Mapping[str, Any]) -> Role:
        return "reducer" if options.get("accumulate") else cls.role


class Fp16Options(_CastOptions, name="fp16", role="codec", implementation="cast:fp16"):
    """Cast to IEEE half precision: half the bytes. Means and shares above 65,504 become infinity."""


class Bf16Options(_CastOptions, name="bf16", role="codec", implementation="cast:bf16"):
    """Cast to bfloat16: half the bytes, fp32's range, 8 bits of precision."""


class PowerSgdOptions(HookOptions, name="powersgd", role="codec", implementation="powersgd:PowerSgd"):
    """Send each matrix as two thin factors (PowerSGD), with warm start and error feedback."""

    rank: Annotated[int, Field(gt=0)] = 4
    """Rank of the approximation: columns of each factor."""


class Int8Options(HookOptions, name="int8", role="reducer", implementation="two_phase:Int8.hook"):
    """Send 8-bit codes with a scale for each block of values, in two phases, with error feedback."""

    block: Annotated[int, Field(ge=256, multiple_of=4)] = 256
    """Values that share one fp32 scale."""


class Int4Options(HookOptions, name="int4", role="reducer", implementation="two_phase:Int4.hook"):
    """Send 4-bit codes with a scale for each block of values, in two phases, with error feedback."""

    block: Annotated[int, Field(ge=32, multiple_of=8)] = 64
    """Values that share one fp32 scale."""


class Int2Options(HookOptions, name="int2", role="reducer", implementation="two_phase:Int2.hook"):
    """Send a sign and one of two magnitudes for each value, in two phases, with error feedback."""

    block: Annotated[int, Field(ge=32, multiple_of=16)] = 128
    """Values that share two fp32 magnitudes."""


class Fp8Options(HookOptions, name="fp8", role="reducer", implementation="two_phase:Fp8.hook"):
    """Send 8-bit floats (e4m3) with a scale for each block of values, in two phases, with error feedback."""

    block: Annotated[int, Field(ge=32, multiple_of=4)] = 256
    """Values that share one fp32 scale."""


class AutoBitsOptions(HookOptions, name="auto_bits", role="reducer", implementation="auto_bits:AutoBits"):
    """Choose int2, int4, int8 or bf16 for each bucket: the smallest whose mean is near the exact one."""

    floor: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """The least cosine similarity of a bucket's mean and the exact mean."""

    every: Annotated[int, Field(ge=2)] = 50
    """Exchanges of a bucket from one measurement to the next."""


class TopKOptions(HookOptions, name="topk", role="reducer", implementation="topk:TopK"):
    """Send only the values of largest magnitude, with indices; keep the rest for later (error feedback)."""

    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of each chunk's values that each rank sends."""

    chunk: Annotated[int, Field(ge=64)] = 4096
    """Maximum number of values in a chunk."""

    values: Literal["fp32", "bf16", "int8", "int2"] | None = None
    """How values are sent; null is the payload's type. int8 has one scale per chunk, int2 two magnitudes."""

    decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the residual that is kept from one exchange to the next."""


class HierarchicalOptions(
    HookOptions, name="hierarchical", role="reducer", implementation="hierarchical:Hierarchical"
):
    """Reduce inside each host first, then between hosts, then gather inside each host."""

    within: LevelStack = ()
    """Hooks for the leg inside a host: casts and shared_memory."""

    across: LevelStack = ()
    """Hooks for the leg between hosts, on each rank's share of the bucket; none is plain all-reduce."""

    hosts: Annotated[int, Field(gt=0)] | None = None
    """Treat the ranks as this many equal hosts, for trials on one machine; null: as they were launched."""


class SharedMemoryOptions(
    HookOptions, name="shared_memory", role="reducer", implementation="shared_memory:SharedMemory"
):
    """Sum through shared memory: the ranks of one host, tensors on the CPU."""


class NoopOptions(HookOptions, name="noop", role="alone", implementation="noop:Noop"):
    """Send nothing: the upper bound on what any hook could gain. Ranks diverge."""
