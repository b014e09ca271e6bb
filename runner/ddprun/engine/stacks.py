"""The hooks of each stage. Stages with the same hooks share them; their state goes from stage to stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddprun.config import Loaded
from ddprun.engine import build
from ddprun_hooks.stack import Stack


@dataclass(slots=True)
class Stacks:
    """Stacks by the index of their stage in `stages`."""

    all_ranks: dict[int, Stack] = field(default_factory=dict)
    # Among the ranks of one host, where `hierarchical` has one level less.
    within_hosts: dict[int, Stack] = field(default_factory=dict)
    used: dict[str, Stack] = field(default_factory=dict)  # each once, by its description, in order

    @property
    def first(self) -> Stack:
        """Of the first stage."""
        return next(iter(self.used.values()), Stack([]))

    def enter(self, stage: int) -> None:
        """A stage begins: its hooks take over the state of hooks of the same name in earlier stages."""
        for stacks in (self.all_ranks, self.within_hosts):
            stack = stacks[stage]
            stack.adopt_state([other for other in stacks.values() if other is not stack])

    def state_dict(self) -> dict[str, Any]:
        """State of every stack."""
        return {described: stack.state_dict() for described, stack in self.used.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring it back. Hooks of a stack that is described otherwise now take over what is of their name."""
        for described, kept in self._assigned(state).items():
            self.used[described].load_state_dict(kept)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of all ranks, for ranks of another world or with other buckets."""
        assigned = [self._assigned(state) for state in states]
        return {
            described: stack.merge([kept[described] for kept in assigned])
            for described, stack in self.used.items()
        }

    def _assigned(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The state of each stack; no hook's state goes to two of them."""
        found = {described: dict(state.get(described, {})) for described in self.used}
        for described, hooks in state.items():
            if described not in self.used:
                for name, kept in hooks.items():
                    heirs = [
                        d for d, stack in self.used.items() if name in stack.names and name not in found[d]
                    ]
                    if heirs:
                        found[heirs[0]][name] = kept
        return found


def open_stacks(loaded: Loaded) -> Stacks:
    """Make the hooks of every stage that takes steps.

    Raises:
        PipelineError: a hook that cannot be made.
    """
    found = Stacks()
    names: dict[tuple[str, bool], str] = {}
    for stage in loaded.pipeline.step_stages():
        hooks = stage.effective(loaded.pipeline).hooks
        path = stage.key_path("hooks")
        for inside, stacks in ((False, found.all_ranks), (True, found.within_hosts)):
            wanted = repr([hook.plain() for hook in hooks]), inside
            if wanted not in names:
                # A checkpoint has this name, so secrets in the hooks' options are hidden in it.
                name = f"{loaded.secrets.hidden([hook.plain() for hook in hooks])!r}"
                name += ", inside a host" if inside else ""
                while name in found.used:
                    name += "'"
                names[wanted] = name
                found.used[name] = build.build_stack(loaded, path, hooks, inside_host=inside)
            stacks[stage.index] = found.used[names[wanted]]
    return found
