"""What a run finds out about its model before its first step, found out here by a single process."""

import copy
import gc
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer

from ddprun.config import LoadedPipeline
from ddprun.engine import build, compiling, seeding
from ddprun.engine.data import Feed
from ddprun.engine.feeds import Feeds, build_training_feeds, check_epoch_end_evaluations, check_warmups
from ddprun.engine.objective import (
    Objective,
    Precision,
    find_buffer_use,
    freeze_bucket_layout,
    initialize_lazy_parameters,
    warmup_pass,
)
from ddprun.engine.optimizers import build_optimizer, check_closure, settings_of_stages, try_schedules
from ddprun.engine.turns import Turns, build_turns
from ddprun.host.code_folders import add_import_folder
from ddprun.host.device import gpu_count
from ddprun.parallel.ddp import DdpReplica, as_backward_error, predict_bucket_layout, sparse_parameters
from ddprun.sync.buffers import BufferUse, trainable_parameters
from ddprun.units import format_count
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.groups import RankGroup, RankPlacement
from ddprun_hooks.comm_queue import HostCommQueue
from ddprun_hooks.stack import Stack

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class WorldShape:
    """The ranks that a run would have: equally many on each host, neighbours in rank order."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{format_count(self.ranks, 'rank')} on {format_count(self.hosts, 'host')}"

    def placement(self, rank: int) -> RankPlacement:
        """Where the ranks are, seen from one of them."""
        names = [f"host {index // self.ranks_per_host}" for index in range(self.ranks)]
        return RankPlacement(rank, tuple(names), (self.ranks_per_host,) * self.ranks)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What torch.compile makes of the model in a training step."""

    blocks: tuple[str, ...]  # names of the modules that are compiled; ("",) is the model
    description: str  # the same in plain words
    graphs: tuple[compiling.CompiledGraph, ...]
    breaks: tuple[compiling.GraphBreak, ...]


@dataclass(frozen=True, slots=True)
class GradientBuckets:
    """The buckets of gradients, as backward fills them."""

    layouts: tuple[BucketLayout, ...]
    bucket_caps_bytes: Sequence[int]  # `ddp.bucket_cap_mb`
    params_in_ready_order: Mapping[str, Tensor] | None = field(compare=False)
    """Parameters by name, in the order in which backward completes their gradients; None: DDP itself was
    asked for its buckets."""

    def layouts_for_caps(self, caps_bytes: Sequence[int]) -> tuple[BucketLayout, ...] | None:
        """The buckets for other sizes; None: only DDP itself knows."""
        if caps_bytes == self.bucket_caps_bytes:
            return self.layouts
        if self.params_in_ready_order is None:
            return None
        return predict_bucket_layout(self.params_in_ready_order, caps_bytes)


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """What is known about a run before it starts."""

    model: nn.Module
    gradient_buckets: Mapping[tuple[str | None, ...], GradientBuckets]
    """Of each turn that sends gradients, by its key."""

    buffer_use: BufferUse  # what rank 0's first batch does to the buffers
    optimizer: Optimizer
    feeds: Feeds
    device: torch.device
    compiled: CompileReport | None  # None: the pipeline does not compile its model

    def suffices_for(self, loaded: LoadedPipeline) -> bool:
        """Whether all is known that explaining another pipeline of the same model and data takes: one that
        differs in its hooks, its policies or the size of its buckets.
        """
        known, caps = self.gradient_buckets, loaded.pipeline.ddp.bucket_caps_bytes
        wanted = [turn.key for turn in build_turns(loaded, self.model).exchanging_turns(loaded)]
        return all(key in known and known[key].layouts_for_caps(caps) is not None for key in wanted)


@contextmanager
def _one_rank_process_group() -> Iterator[None]:
    """A process group of this process alone; torch is afterwards as deterministic as before."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = "lo"  # the host's own name need not resolve, and nothing is sent anyway
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # with DETAIL, DDP ends in a segmentation fault
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        os.environ.pop(_INTERFACE, None)
        if before is not None:
            os.environ[_INTERFACE] = before


@_one_rank_process_group()  # a model or a loss may call collectives
def probe_model(loaded: LoadedPipeline, world: WorldShape) -> ModelProbe:
    """Build what a rank of `world` builds, and look at it as a rank does; raises PipelineError for what only
    a run can see.
    """
    pipeline = loaded.pipeline
    on_gpu = pipeline.launch.device != "cpu" and gpu_count()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    precision = Precision(pipeline.precision, device, channels_last=pipeline.channels_last)
    add_import_folder(loaded.folder)
    seeding.make_deterministic(device, strict=pipeline.deterministic)
    seeding.seed_everything(pipeline.seed)
    model = build.move_and_convert_model(loaded, build.build_model(loaded), device, precision.parameter_dtype)
    data, _ = build.build_datasets(loaded)
    feeds = build_training_feeds(loaded, data, rank=0, world_size=world.ranks)
    check_epoch_end_evaluations(loaded, feeds)
    check_warmups(loaded, feeds)
    loss = build.build_loss(loaded)
    model = build.join_loss_and_freeze(loaded, model, loss, device, precision.parameter_dtype)
    objective = Objective(loaded, loss, precision, transform=build.build_transform(loaded))
    turns = build_turns(loaded, model)
    initialize_lazy_parameters(model, objective, feeds.main, turns)
    optimizer = build_optimizer(loaded, model, turns)
    check_closure(loaded, optimizer)
    try_schedules(loaded, feeds, optimizer, settings_of_stages(loaded, model, turns, optimizer))
    build.check_sync_fits_run(loaded, turns, world.ranks)

    compiling.check_dynamo_config(loaded)
    verdict = find_buffer_use(model, objective, feeds.main, turns, automatic=True)
    compiled = None
    if pipeline.compile is not None:
        compiled = _compile_model(loaded, model, objective, feeds.main, turns)
    exchanging = turns.iterate_with_trainable(turns.exchanging_turns(loaded))
    gradients = dict[tuple[str | None, ...], GradientBuckets]()
    try:
        for turn in exchanging:
            gradients[turn.key] = _find_gradient_buckets(loaded, model, objective, feeds.main, turn.name)
    except RuntimeError as error:
        if (fault := as_backward_error(loaded, error)) is not None:
            raise fault from error
        raise
    return ModelProbe(model, gradients, verdict, optimizer, feeds, device, compiled)


def _compile_model(
    loaded: LoadedPipeline, model: nn.Module, objective: Objective, feed: Feed, turns: Turns
) -> CompileReport:
    """Compile the model without building kernels: graphs, and the order of gradients, are those of a run."""
    trained = {turn for stage in loaded.pipeline.train_stages() for turn in turns.by_stage[stage.index]}

    def run_passes() -> None:
        for turn in turns.iterate_with_trainable(turns.all()):
            warmup_pass(model, objective, feed, turn.name, backward=turn in trained)

    run_passes()  # what fails here is the model's own
    compiler, blocks = compiling.compile_model(loaded, model, backend="aot_eager")
    try:
        run_passes()
    except Exception as error:
        if (fault := compiling.as_compile_error(loaded, error, compiling=True)) is not None:
            raise fault from error
        raise
    return CompileReport(
        tuple(blocks), compiling.describe_blocks(blocks), tuple(compiler.graphs), compiler.breaks
    )


def _find_gradient_buckets(
    loaded: LoadedPipeline, model: nn.Module, objective: Objective, feed: Feed, turn: str | None
) -> GradientBuckets:
    """A turn's buckets as they stay, counted from 0: what DDP makes of its gradients' order in backward."""
    ddp, caps = loaded.pipeline.ddp, loaded.pipeline.ddp.bucket_caps_bytes
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # as DDP itself reads it
    # DDP has other rules for these, and a compiled graph has an order of its own.
    other_rules = ddp.static_graph or ddp.find_unused_parameters or ignored or sparse_parameters(model)
    if not (other_rules or loaded.pipeline.compile):
        order, trained = _gradient_completion_order(model, objective, feed, turn), trainable_parameters(model)
        if sorted(order) == sorted(trained):  # else DDP knows more, or refuses it
            ready = {name: trained[name] for name in order}
            return GradientBuckets(predict_bucket_layout(ready, caps), caps, ready)
    return GradientBuckets(_bucket_layouts_from_ddp(loaded, model, objective, feed, turn), caps, None)


def _gradient_completion_order(
    model: nn.Module, objective: Objective, feed: Feed, turn: str | None
) -> list[str]:
    """Names of parameters in the order in which a backward pass completes their gradients: in a copy of the
    model that has shapes, but no values. A model that looks at values, or computes gradients itself, shows
    none or some.
    """
    device, order = objective.precision.device, list[str]()
    with seeding.preserve_rng_state(device):
        content = objective.prepare_batch(feed.first_batch())
    with suppress(Exception):
        with warnings.catch_warnings(action="ignore"):
            warmup_pass(model, objective, feed, turn, backward=False)  # fills caches with values
        with (
            seeding.preserve_state(device, model, objective.loss),  # a copy may call the model itself
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
        ):
            with FakeCopyMode(fake):
                copied, content = copy.deepcopy((model, content))
            copied.train()
            for name, param in trainable_parameters(copied).items():
                param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: order.append(name)
                )
            objective(copied, content, turn).loss.backward()  # type: ignore[no-untyped-call]
    return order


def _bucket_layouts_from_ddp(
    loaded: LoadedPipeline, model: nn.Module, objective: Objective, feed: Feed, turn: str | None
) -> tuple[BucketLayout, ...]:
    """DDP's buckets after throw-away backward passes under DDP itself."""
    queue = HostCommQueue(RankGroup("world", 0, ("here",)))
    replica = DdpReplica(model, loaded.pipeline.ddp, objective.precision.device, queue, Stack([]))
    freeze_bucket_layout(replica, objective, feed, turn, barrier=lambda: None)
    layout = replica.dispatcher.bucket_layouts
    del replica
    gc.collect()  # before the process group ends, on which DDP still has a hand
    return layout
