"""What each built-in hook takes: its options, its role in a stack, and where its implementation lives.

Nothing here imports torch, so `ddprun check` and `ddprun catalog` can read it in milliseconds.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["codec", "reducer", "alone"]
"""`codec`: changes the payload and hands it on. `reducer`: carries the payload over the ranks and ends the
stack. `alone`: a reducer that stands in a stack by itself."""


class HookOptions(BaseModel):
    """Options of one built-in hook. The docstring of a subclass is what `ddprun catalog` prints."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    role: ClassVar[Role]
    implementation: ClassVar[str]  # "module:factory", imported when a run uses the hook


class Fp16(HookOptions):
    """Cast to IEEE half precision: half the bytes. Values above 65,504 x world size overflow to infinity."""

    role: ClassVar[Role] = "codec"
    implementation: ClassVar[str] = "ddprun_hooks.cast:fp16"


class Bf16(HookOptions):
    """Cast to bfloat16: half the bytes, fp32's range, 8 bits of precision."""

    role: ClassVar[Role] = "codec"
    implementation: ClassVar[str] = "ddprun_hooks.cast:bf16"


class Noop(HookOptions):
    """Send nothing: the upper bound on what any hook could gain. Ranks train apart."""

    role: ClassVar[Role] = "alone"
    implementation: ClassVar[str] = "ddprun_hooks.noop:Noop"


BUILT_IN: dict[str, type[HookOptions]] = {"fp16": Fp16, "bf16": Bf16, "noop": Noop}
"""Every built-in hook by its name in a pipeline. Plain all-reduce has no name: it ends every stack that
names no reducer."""

ENTRY_POINT_GROUP = "ddprun.hooks"
