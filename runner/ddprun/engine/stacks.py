"""The hooks of each stage. Stages with the same hooks share them; what they keep goes from stage to stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddprun.engine import build
from ddprun.engine.policies import key_path
from ddprun.spec import Loaded
from ddprun_hooks.stack import Stack


@dataclass(slots=True)
class Stacks:
    """Stacks by the place of their stage in `stages`."""

    all_ranks: dict[int, Stack] = field(default_factory=dict)
    inside_hosts: dict[int, Stack] = field(default_factory=dict)
    """For what the ranks of one host exchange among themselves: `hierarchical` has one level less there."""

    used: list[Stack] = field(default_factory=list)
    """Each once, in the order of their stages."""

    @property
    def first(self) -> Stack:
        """Of the first stage."""
        return self.used[0] if self.used else Stack([])

    def enter(self, stage: int) -> None:
        """A stage begins: its hooks take over what hooks of the same name have kept in earlier stages."""
        for stacks in (self.all_ranks, self.inside_hosts):
            stack = stacks[stage]
            stack.take_over([other for other in stacks.values() if other is not stack])

    def state_dict(self) -> dict[str, Any]:
        """State of every stack."""
        return {str(place): stack.state_dict() for place, stack in enumerate(self.used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring it back."""
        for place, hooks in state.items():
            self.used[int(place)].load_state_dict(hooks)


def open_stacks(loaded: Loaded) -> Stacks:
    """Make the hooks of every stage that takes steps.

    Raises:
        PipelineError: a hook that cannot be had.
    """
    found = Stacks()
    known: dict[tuple[str, bool], Stack] = {}
    for stage in loaded.pipeline.step_stages():
        hooks = stage.effective(loaded.pipeline).hooks
        path = key_path(stage, "hooks")
        for inside, stacks in ((False, found.all_ranks), (True, found.inside_hosts)):
            key = repr([hook.plain() for hook in hooks]), inside
            if key not in known:
                known[key] = build.build_stack(loaded, path, hooks, inside_host=inside)
                found.used.append(known[key])
            stacks[stage.index] = known[key]
    return found
