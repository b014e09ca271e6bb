"""From the file's `sync` to the policy of one stage, and to the groups of ranks that it needs."""

from torch import Tensor, nn

from ddprun.config import Loaded, PipelineError, StepStage, TrainSettings
from ddprun.config import options as chosen
from ddprun.sync.broadcast import Broadcast
from ddprun.sync.diloco import Diloco
from ddprun.sync.hierarchical_sgd import HierarchicalSgd
from ddprun.sync.independent import Independent
from ddprun.sync.local_sgd import LocalSgd
from ddprun.sync.policy import Policy, SyncContext, averaged_parameters
from ddprun_hooks.comm.groups import combine, within_hosts
from ddprun_hooks.hook import GroupRequirement
from ddprun_hooks.stack import Stack


class NoSync(Policy):
    """A stage in which nothing changes the weights, and no gradients are there to be averaged."""

    gradients_everywhere = False
    never = True

    def synchronises(self, step: int) -> bool:
        """Never."""
        return False


def build_policy(settings: TrainSettings, place: SyncContext, momentum: dict[str, Tensor]) -> Policy:
    """The policy of a stage.

    Args:
        settings: of the stage.
        place: what it works with.
        momentum: of earlier stages' outer optimizer, by parameter name; taken on and updated.
    """
    match settings.sync.settings:
        case chosen.EveryStep() if settings.gradients == "all":
            return Policy()
        case chosen.EveryStep():
            # Without a backward pass there are weights to average, if something changes them.
            return LocalSgd(place, 1) if settings.update or settings.mutate else NoSync()
        case chosen.LocalSgd() as o:
            return LocalSgd(place, o.every, o.optimizer_state)
        case chosen.Average() as o:
            return LocalSgd(place, o.every)
        case chosen.HierarchicalSgd() as o:
            gradients = settings.gradients == "host"
            return HierarchicalSgd(place, o.within, o.across, o.hosts, o.optimizer_state, gradients=gradients)
        case chosen.Diloco() as o:
            return Diloco(
                place, o.every, o.outer_lr, o.outer_momentum, o.fragments, o.overlap_steps, momentum
            )
        case chosen.Broadcast() as o:
            return Broadcast(place, o.every, o.source)
        case chosen.Independent():
            return Independent()
    raise AssertionError(f"a sync policy without an engine: {settings.sync.name}")


def gradient_needs(settings: TrainSettings, stack: Stack, host_stack: Stack) -> dict[GroupRequirement, int]:
    """Among which ranks a stage's gradients travel."""
    if settings.gradients == "host":
        return within_hosts(host_stack.requirements, _hosts(settings))
    return dict(stack.requirements) if settings.gradients == "all" else {}


def delta_needs(settings: TrainSettings, stack: Stack, host_stack: Stack) -> dict[GroupRequirement, int]:
    """Among which ranks a stage's changes of parameters travel."""
    match settings.sync.settings:
        case chosen.EveryStep() if settings.gradients == "all":
            return {}
        case chosen.Broadcast() | chosen.Independent():
            return {}
        case chosen.HierarchicalSgd() as o if settings.gradients is None:
            return combine([stack.requirements, within_hosts(host_stack.requirements, o.hosts)])
    return dict(stack.requirements)


def plain_needs(settings: TrainSettings) -> dict[GroupRequirement, int]:
    """Among which ranks a stage sends values as they are."""
    options = settings.sync.settings
    if isinstance(options, chosen.HierarchicalSgd) and options.optimizer_state == "average":
        return {GroupRequirement("world"): 1, GroupRequirement("within", options.hosts): 1}
    return {GroupRequirement("world"): 1}


def check_policies(loaded: Loaded, model: nn.Module, ranks: int) -> None:
    """Refuse what only a run can see.

    Args:
        loaded: the pipeline.
        model: of this rank.
        ranks: how many there are.

    Raises:
        PipelineError: a source that is no rank, more fragments than parameters, hooks on complex gradients.
    """
    faults = []
    count = len(averaged_parameters(model))
    is_complex = any(param.is_complex() and param.requires_grad for param in model.parameters())
    for stage in loaded.pipeline.stages:
        if isinstance(stage, StepStage):
            settings = stage.effective(loaded.pipeline)
            path = f"{key_path(stage, 'sync')}.{settings.sync.name}"
            options = settings.sync.settings
            source = options.source if isinstance(options, chosen.Broadcast) else None
            if isinstance(options, chosen.Diloco) and options.fragments > count:
                text = f"{options.fragments} fragments of {count} parameters: each needs at least one"
                faults.append(loaded.fault(f"{path}.fragments", text, f"at most {count}"))
            if is_complex and settings.gradients and settings.hooks:
                text = "the model has complex parameters, and hooks carry gradients of real numbers only"
                faults.append(loaded.fault(key_path(stage, "hooks"), text, "remove the hooks"))
        else:
            path, source = stage.path, getattr(stage, "source", None)
        if source is not None and source >= ranks:
            text = f"there is no rank {source}: the run has {ranks} ranks"
            faults.append(loaded.fault(f"{path}.source", text, f"0 to {ranks - 1}"))
    if faults:
        raise PipelineError(faults)


def key_path(stage: StepStage, key: str) -> str:
    """Where a stage's setting stands in the file: in the stage, or above."""
    return f"{stage.path}.{key}" if key in stage.model_fields_set else key


def _hosts(settings: TrainSettings) -> int | None:
    options = settings.sync.settings
    return options.hosts if isinstance(options, chosen.HierarchicalSgd) else None
