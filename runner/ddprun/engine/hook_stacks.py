"""The hook stacks of a run's stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddprun.config import Choice, LoadedPipeline
from ddprun.engine.build import ChoiceBuilder
from ddprun_hooks.config.options import parse_hook_spec
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.registry import make_hook
from ddprun_hooks.stack import Stack

_INSIDE = ", inside a host"  # in the description of a stack among the ranks of one host


def build_hook_stack(
    loaded: LoadedPipeline, path: str, hooks: tuple[Choice, ...], *, inside_host: bool = False
) -> Stack:
    """A stack of hooks; inside one host, only the hooks `within` of `hierarchical` remain of it."""
    named = []
    for index, written in enumerate(hooks):
        chosen = ChoiceBuilder.from_key_path(loaded, f"{path}[{index}]", written)
        specs = [(chosen.name, chosen.options)]
        if inside_host and chosen.name == "hierarchical" and chosen.source == "built-in":
            specs = [parse_hook_spec(spec) for spec in chosen.options.get("within", ())]
        for name, options in specs:
            try:
                named.append((name, make_hook(name, options)))
            except HookSetupError as error:
                raise chosen.error(str(error)) from None
    try:
        return Stack(named, description=repr([choice.to_plain_data() for choice in hooks]))
    except HookSetupError as error:
        raise loaded.error(path, str(error)) from None


@dataclass(slots=True)
class HookStacksByStage:
    """The hook stacks of each stage, by its index; stages with the same hooks share one, and its state."""

    all_ranks: dict[int, Stack] = field(default_factory=dict)
    # Among the ranks of one host, where `hierarchical` has one level less.
    within_hosts: dict[int, Stack] = field(default_factory=dict)
    by_description: dict[str, Stack] = field(default_factory=dict)  # each once, by its description, in order

    @property
    def first_stack(self) -> Stack:
        return next(iter(self.by_description.values()), Stack([]))

    def adopt_earlier_state(self, stage: int) -> None:
        """A stage begins: its hooks take over the state of hooks of the same name in earlier stages."""
        for stacks in (self.all_ranks, self.within_hosts):
            stack = stacks[stage]
            stack.take_state_from([other for other in stacks.values() if other is not stack])

    def state_dict(self) -> dict[str, Any]:
        return {description: stack.state_dict() for description, stack in self.by_description.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; a stack of another description takes that of hooks with the same names."""
        for description, own in self._assign_states(state).items():
            self.by_description[description].load_state_dict(own)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of all ranks, for ranks of another world or with other buckets."""
        assigned = [self._assign_states(state) for state in states]
        return {
            description: stack.merge([hooks[description] for hooks in assigned])
            for description, stack in self.by_description.items()
        }

    def _assign_states(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The state of each stack; no hook's state goes to two of them."""
        stacks = self.by_description
        assigned = {description: dict(state.get(description, {})) for description in stacks}
        for description in [d for d in state if d not in stacks]:
            alike = {d: s for d, s in stacks.items() if (_INSIDE in d) == (_INSIDE in description)}
            for name, own in state[description].items():
                heirs = (d for d, stack in alike.items() if name in stack.names and name not in assigned[d])
                if heir := next(heirs, None):
                    assigned[heir][name] = own
        return assigned


def build_hook_stacks(loaded: LoadedPipeline) -> HookStacksByStage:
    """Make the hooks of every stage that takes steps; a PipelineError names one that cannot be made."""
    opened = HookStacksByStage()
    names: dict[tuple[str, bool], str] = {}
    for stage, settings in loaded.pipeline.stages_and_settings():
        hooks, path = settings.hooks, stage.key_path("hooks")
        plain = [hook.to_plain_data() for hook in hooks]
        for inside, stacks in ((False, opened.all_ranks), (True, opened.within_hosts)):
            wanted = repr(plain), inside
            if wanted not in names:
                # A checkpoint has this name, so secrets in the hooks' options are hidden in it.
                name = f"{loaded.secrets.redact_all(plain)!r}"
                name += _INSIDE if inside else ""
                while name in opened.by_description:
                    name += "'"
                names[wanted] = name
                opened.by_description[name] = build_hook_stack(loaded, path, hooks, inside_host=inside)
            stacks[stage.index] = opened.by_description[names[wanted]]
    return opened
