"""What a pipeline sends, when, among whom and how much: looked up before any rank is started."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ddprun.config import Loaded, StepStage
from ddprun.explain.explained import Exchange, Explained, Pattern, StageExplained
from ddprun.explain.model_probe import ModelProbe, World, look
from ddprun.explain.stage_plans import Moment, Sent, StagePlan, stage_plans
from ddprun.explain.traffic import Amount, Carried, Hooks, Route, Simulations, total
from ddprun.host.device import default_ranks
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets

_MESSAGE_BYTES = 25 << 20


def explain(
    loaded: Loaded, *, hosts: int | None = None, ranks_per_host: int | None = None, importing: bool = True
) -> Explained:
    """Find out what a pipeline sends. No rank is started and nothing is sent.

    The model and the data are built and run as on rank 0, hooks and sync policies are the engine's own, and
    bytes are counted as a run counts them. A hook is asked about its first payload only.

    Args:
        loaded: the pipeline.
        hosts: how many there would be; None: as the file says.
        ranks_per_host: None: as the file says, or as a run on this machine would have it.
        importing: what the pipeline names by a dotted name may be imported.

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    launch = loaded.pipeline.launch
    world = World(hosts or launch.hosts[1], ranks_per_host or launch.nproc_per_node or default_ranks(loaded))
    probe = look(loaded, world, importing=importing)
    hooks = Hooks(loaded, importing=importing)
    simulations = Simulations(loaded, world, hooks, probe.device)
    stages = tuple(
        _Stage(plan, probe, hooks, simulations, world).explained() for plan in stage_plans(loaded, probe)
    )
    return Explained(loaded, world, probe, _start(probe, simulations, world), stages)


class _Stage:
    """Makes patterns of steps."""

    def __init__(
        self, plan: StagePlan, probe: ModelProbe, hooks: Hooks, simulations: Simulations, world: World
    ) -> None:
        self._plan, self._probe, self._hooks = plan, probe, hooks
        self._simulations, self._world = simulations, world
        self._known: dict[tuple[Any, ...], Exchange] = {}

    def explained(self) -> StageExplained:
        plan = self._plan
        begin = tuple(self._exchanges(plan.begin))
        steps: dict[tuple[Sent, ...], list[int]] = {}
        for place, what in enumerate(plan.by_step):
            steps.setdefault(what, []).append(place + 1)
        patterns = []
        for sent, places in steps.items():
            before = [one for one in sent if one.moment == "before_forward"]
            later = [one for one in sent if one.moment != "before_forward"]
            found = list(self._exchanges([*before, *plan.backward, *later]))
            amount = total([e.amount(self._world.ranks) for e in found], self._world.ranks)
            patterns.append(Pattern(tuple(places), tuple(found), amount))
        return StageExplained(
            plan.stage.index,
            plan.stage.name,
            plan.settings,
            plan.steps,
            len(plan.by_step),
            tuple(sorted(patterns, key=lambda pattern: len(pattern.steps))),
            plan.control_messages,
            begin,
            None if plan.end is None else tuple(self._exchanges(plan.end)),
            plan.left_apart,
            self._world.ranks,
        )

    def _exchanges(self, sent: Sequence[Sent]) -> Iterator[Exchange]:
        groups: dict[tuple[Moment, Route], list[BucketLayout | None]] = {}
        for one in sent:
            groups.setdefault((one.moment, one.route), []).append(one.layout)
        for (moment, route), layouts in groups.items():
            times = Counter(layouts)
            key = moment, route, tuple(times), times[layouts[0]]
            if key not in self._known:
                self._known[key] = self._exchange(moment, route, list(times), times[layouts[0]])
            yield self._known[key]

    def _exchange(
        self, moment: Moment, route: Route, layouts: list[BucketLayout | None], times: int
    ) -> Exchange:
        stage = self._plan.stage if isinstance(self._plan.stage, StepStage) else None
        unknown = ""
        if stage is not None and route.through in ("hooks", "host_hooks"):
            unknown = self._hooks.unknown(stage)
        buckets = tuple(layout for layout in layouts if layout is not None)
        carried: list[Carried] | None = []
        if len(buckets) < len(layouts):
            missing = self._probe.unknown
            reasons = {"gradient": missing.batch, "buffers": missing.batch, "optimizer": missing.optimizer}
            unknown = reasons.get(route.kind) or missing.model
            carried = None
        for layout in buckets:
            one = self._simulations.carry(stage, route, layout)
            if one is None or carried is None:
                carried = None
                break
            carried.append(one)
        world = self._simulations.groups[0][route.queue]
        return Exchange(
            len(self._known),
            moment,
            route,
            route.group(world).size,
            times,
            buckets if len(buckets) == len(layouts) else None,
            None if carried is None else tuple(carried),
            unknown,
        )


def _start(probe: ModelProbe, simulations: Simulations, world: World) -> Amount | None:
    """What rank 0 gives all others, before the first step."""
    if probe.shapes is None:
        return None
    held = [*probe.shapes.named_parameters(), *probe.shapes.named_buffers()]
    buckets = ParameterBuckets(dict(held), _MESSAGE_BYTES)
    route = Route("parameters", "plain", "broadcast")
    carried = [simulations.carry(None, route, layout) for layout in buckets.layouts]
    return total([None if one is None else one.amount for one in carried], world.ranks)
