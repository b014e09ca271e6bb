"""A cost model that was fitted to a real run."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ddprun.config import PipelineError, load
from ddprun.explain.explain import Explanation, explain
from ddprun.predict.cost_model import CostModel, StepPrediction, fit_cost_model
from ddprun.predict.costs import (
    PARTS_WITHOUT_EXCHANGE,
    CostsUnknownError,
    LastRankLateness,
    LinearCost,
    RunCosts,
    StageCosts,
    check_predictable,
    costs_of_run,
)
from ddprun.predict.forecast import forecast, leave_one_out, measure_optimizer_state_bytes, stacks_to_measure
from ddprun.predict.links import Link, Links, parse_links
from ddprun.predict.measure import measurement_stages_yaml
from ddprun.predict.step_simulator import StepSimulator, round_count
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import PARTS
from tests.engine.running import run_pipeline
from tests.report.made_up import step_record

RANKS = 2
PIPELINE = """
model:
  mlp: {{inputs: 64, hidden: [600, 600], outputs: 10}}
data: digits
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.02, momentum: 0.9}}}}
ddp: {{bucket_cap_mb: 1}}
timings: {{gradients: true}}
checkpoint: {{keep: 0}}
stages: {stages}
"""
HIERARCHICAL = "{hierarchical: {hosts: 2, across: [int8]}}"
STAGES = {
    "every_step": "{train: {steps: 4}}",
    "int8": "{train: {steps: 4, hooks: [int8]}}",
    "accumulate": "{train: {steps: 4, accumulate: 3}}",
    "local_sgd": "{train: {steps: 8, sync: {local_sgd: {every: 4}}}}",
    "diloco": "{train: {steps: 8, sync: {diloco: {every: 4, overlap_steps: 2}}, hooks: [int8]}}",
    "independent": "{train: {steps: 4, sync: independent}}",
    "noop": "{train: {steps: 4, hooks: [noop]}}",
    "average": "average",
    "forward": "{forward: {steps: 4, sync: {average: {every: 2}}}}",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Explanation, RunCosts]:
    """A run with the stages of a short run, explained as it ran, and its costs."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "cases.yaml").write_text(PIPELINE.format(stages="[{train: {steps: 4}}]"))
    stages = measurement_stages_yaml(load(folder / "cases.yaml"), [[], ["int8"]], steps=12)
    run_dir = run_pipeline(folder, PIPELINE.format(stages=stages), RANKS)
    explained = explain(load(folder / "run.yaml"), hosts=1, ranks_per_host=RANKS)
    return explained, costs_of_run(RecordedRun(run_dir), len(explained.stages))


@pytest.fixture(scope="module")
def model(measured: tuple[Explanation, RunCosts]) -> CostModel:
    """Fitted to that run."""
    return fit_cost_model(*measured, Links())


@pytest.fixture(scope="module")
def fixed_model(tmp_path_factory: pytest.TempPathFactory) -> CostModel:
    """Fitted to records that are the same every time: of such a run as `measured`."""
    file = tmp_path_factory.mktemp("fixed") / "run.yaml"
    file.write_text(PIPELINE.format(stages="[{train: {steps: 4}}]"))
    stages = measurement_stages_yaml(load(file), [[], ["int8"]], steps=12)
    file.write_text(PIPELINE.format(stages=stages))
    explained = explain(load(file), hosts=1, ranks_per_host=RANKS)
    times_us = (250.0, 2400.0, 2500.0, 1100.0, 300.0, 700.0)
    parts, own_us = dict(zip(PARTS_WITHOUT_EXCHANGE, times_us, strict=True)), sum(times_us)
    # Of a step, and of the processor; of hooks before, between and after collectives.
    costs = {"[]": (10_500.0, 9_000.0, (40.0, 30.0)), "[int8]": (14_000.0, 11_500.0, (400.0, 450.0, 350.0))}
    found = []
    for stage in explained.stages:
        one = StageCosts(36, own_us, own_us, parts, own_us_by_rank=[[own_us - 50, own_us + 50]] * RANKS)
        key = "[" + ", ".join(hook.name for hook in stage.settings.hooks) + "]" if stage.settings else ""
        if key in costs and stage.patterns and stage.patterns[0].exchanges:
            one.step_us, one.cpu_us, hook_times_us = costs[key]
            one.bucket_bytes_and_hook_us = [
                (bucket.bytes, hook_times_us)
                for exchange in stage.patterns[0].exchanges
                for bucket in exchange.buckets
            ]
        found.append(one)
    return fit_cost_model(explained, RunCosts("cpu", 2.0, found), Links())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """A pipeline with all kinds of stages, on two hosts with two ranks each."""
    file = tmp_path_factory.mktemp("cases") / "cases.yaml"
    file.write_text(PIPELINE.format(stages=f"[{', '.join(STAGES.values())}]"))
    return explain(load(file), hosts=2, ranks_per_host=2)


def predicted(model: CostModel, cases: Explanation, name: str, links: Links) -> StepPrediction:
    """A step of one of `STAGES`."""
    return model.predict(cases.stages[list(STAGES).index(name)], cases.world, links)


def test_what_was_measured_is_predicted(measured: tuple[Explanation, RunCosts], model: CostModel) -> None:
    """The fit leaves nothing of a step with a stack that was measured, if its parts leave it any room."""
    explained, costs = measured
    for stack in (["int8"], []):
        alike = [
            (stage, found)
            for stage, found in zip(explained.stages, costs.stages, strict=True)
            if stage.settings is not None
            and [hook.name for hook in stage.settings.hooks] == stack
            and stage.settings.plan.gradients == "all"
        ]
        assert len(alike) == 2
        step_us = sum(found.step_us * found.steps for _, found in alike) / sum(
            found.steps for _, found in alike
        )
        guess = model.predict(alike[0][0], explained.world, Links())
        assert guess.hooks_measured
        assert guess.step_us == pytest.approx(step_us, rel=0.02) or guess.step_us > step_us


@pytest.mark.parametrize("name", [name for name in STAGES if name != "average"])
def test_all_of_a_step_is_accounted_for(model: CostModel, cases: Explanation, name: str) -> None:
    """Its parts and what it waits for are its time; what nobody sends costs nothing."""
    one = predicted(model, cases, name, parse_links("100Mbit", "1ms"))
    assert sum(one.parts_us.values()) + one.exposed_us == pytest.approx(one.step_us)
    assert 0 < one.efficiency <= 1 + 1e-9
    if name in ("independent", "noop"):
        assert one.efficiency == pytest.approx(1)
        assert one.host_sends_bytes == 0
        contended = model.host_resources(cases.world, Links()).core_share() < 1
        assert one.limit == ("cores" if contended else "computation")


@pytest.mark.parametrize("name", [name for name in STAGES if name != "average"])
@pytest.mark.parametrize("rate", ["100kbit", "100Mbit"])
def test_times_of_buckets_are_those_of_a_step_that_sends(
    model: CostModel, cases: Explanation, name: str, rate: str
) -> None:
    """Since that step began; also if an exchange overlaps with the steps after it."""
    found = predicted(model, cases, name, parse_links(rate, "1ms")).to_json_data()
    cycle_us = cases.stages[list(STAGES).index(name)].cycle * found["step_us"]
    assert bool(found["buckets"]) == (name != "independent")
    for bucket in found["buckets"]:
        assert 0 <= bucket["ready_us"] <= bucket["done_us"] <= cycle_us + 5


@pytest.mark.parametrize("name", ["every_step", "int8", "accumulate", "local_sgd", "diloco", "forward"])
def test_a_worse_link_is_never_better(fixed_model: CostModel, cases: Explanation, name: str) -> None:
    """Neither a slower one nor one of more latency, and far enough down the link is what limits.

    Costs are fixed. With others a worse link may win up to 4 %, rarely: what shares cores then meets in a
    luckier order (Graham 1969, 10.1137/0117039), as it may in truth.
    """
    model = fixed_model
    rates = [predicted(model, cases, name, Links(across=Link(rate))) for rate in (1e10, 1e8, 1e7, 1e6, 1e5)]
    assert all(one.step_us <= other.step_us * 1.001 for one, other in pairwise(rates))
    assert rates[-1].limit == "link across"
    # A link that is always busy is what a step takes, but for what computing hides, and for what goes one way
    # at first: most where hosts have drifted apart before they send codes to each other.
    busy_us = rates[-1].links_busy_us["across"]
    assert busy_us <= rates[-1].step_us <= (1.25 if name == "diloco" else 1.2) * busy_us
    late = [predicted(model, cases, name, Links(across=Link(1e8, s))) for s in (0.0, 1e-3, 1e-2, 1e-1)]
    assert all(one.step_us <= other.step_us * 1.001 for one, other in pairwise(late))
    assert late[-1].limit == "latency"


@pytest.mark.parametrize(
    ("name", "ranks_per_host", "share"),
    [("int8", 1, 1.0), ("int8", 2, 0.0), ("diloco", 1, 1.0), ("diloco", 2, 0.4)],
)
def test_an_all_to_all_between_two_hosts_is_one_way_at_first(
    fixed_model: CostModel, cases: Explanation, name: str, ranks_per_host: int, share: float
) -> None:
    """On a slow link an exchange takes longer than the link is busy: by what one host sends to the other in
    the largest all-to-all, if each has one rank; by some of it, if ranks of both have drifted apart.
    """
    explained = explain(cases.loaded, hosts=2, ranks_per_host=ranks_per_host, probe=cases.probe)
    stage = explained.stages[list(STAGES).index(name)]
    found = fixed_model.predict(stage, explained.world, Links(across=Link(1e4)))
    legs = [
        leg
        for pattern in stage.patterns
        for exchange in pattern.exchanges
        for bucket in exchange.buckets
        for leg in bucket.legs
    ]
    largest = max(leg.sent.mean_step_bytes()["between_hosts"] / 2 for leg in legs if leg.op == "all_to_all")
    extra_us = stage.cycle * (found.step_us - found.links_busy_us["across"])
    assert extra_us / 1e6 * 1e4 == pytest.approx(share * largest, abs=0.1 * largest)


@pytest.mark.parametrize(("hosts", "ranks_per_host", "blocked"), [(2, 2, True), (4, 1, False), (1, 4, False)])
@pytest.mark.parametrize("latency_s", [0.0, 2e-3])
def test_a_ring_waits_for_a_late_receiver_whose_host_sends(
    fixed_model: CostModel,
    cases: Explanation,
    hosts: int,
    ranks_per_host: int,
    latency_s: float,
    *,
    blocked: bool,
) -> None:
    """The first bucket begins later: by two of its pieces, or by what a network card's queue holds."""
    explained = explain(cases.loaded, hosts=hosts, ranks_per_host=ranks_per_host, probe=cases.probe)
    stage = explained.stages[list(STAGES).index("every_step")]
    link = Link(1e4, latency_s)
    found = fixed_model.predict(stage, explained.world, Links(link, link))
    (exchange,) = stage.patterns[0].exchanges
    first = exchange.buckets[0]
    assert [leg.op for leg in first.legs] == ["all_reduce"]
    extra_us = found.step_us - found.links_busy_us["across" if hosts > 1 else "within"]
    ahead = (first.bytes / explained.world.ranks if latency_s else 100e3) * blocked
    assert extra_us / 1e6 * 1e4 == pytest.approx(ahead, abs=5e3)


def test_bytes_are_those_that_are_sent(model: CostModel, cases: Explanation) -> None:
    """What a host sends to others is what explain counts, for a mean step."""
    for stage in cases.stages:
        if stage.patterns and stage.sent_per_cycle is not None:
            sent = stage.sent_per_cycle.mean_step_bytes(stage.cycle)["between_hosts"] / cases.world.hosts
            assert model.predict(stage, cases.world, Links()).host_sends_bytes == pytest.approx(sent)


def test_accumulating_repeats_all_but_the_exchange(fixed_model: CostModel, cases: Explanation) -> None:
    """Three micro-steps compute three times, and send once."""
    links = parse_links("10Mbit")
    once, thrice = (predicted(fixed_model, cases, name, links) for name in ("every_step", "accumulate"))
    assert thrice.host_sends_bytes == once.host_sends_bytes
    for part in ("data_us", "forward_us", "backward_us"):
        assert thrice.parts_us[part] == pytest.approx(3 * once.parts_us[part], rel=0.01)


def test_thousands_of_ranks_take_no_longer_to_predict(
    model: CostModel, cases: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many moments are played for 16,384 ranks as for 64."""
    counts, advance = [], StepSimulator._advance_time
    for hosts in (32, 8192):
        many = explain(cases.loaded, hosts=hosts, ranks_per_host=2, probe=cases.probe)
        moments = list[int]()
        with monkeypatch.context() as patched:
            patched.setattr(
                StepSimulator, "_advance_time", lambda *args, to=moments: to.append(1) or advance(*args)
            )
            model.predict(many.stages[0], many.world, parse_links("100Gbit", "5us"))
        counts.append(len(moments))
    assert counts[1] == pytest.approx(counts[0], rel=0.5)


def test_hooks_pay_below_their_break_even(fixed_model: CostModel, cases: Explanation) -> None:
    """At half the rate a stage is faster with the hook, and at twice the rate it is not, beyond 2 %."""
    index = list(STAGES).index("int8")
    found = forecast(cases, [fixed_model], parse_links("10Mbit"), hosts=[1, 4])
    (verdict,) = found[index].hook_verdicts
    assert verdict.hook == "int8"
    assert verdict.pays is True
    limit = verdict.break_even_bytes_per_s
    assert limit is not None
    assert 1e6 < limit < 1e12
    plain = list(STAGES).index("every_step")
    for factor, pays in ((0.5, True), (2.0, False)):
        at = Links(across=Link(factor * limit))
        faster = fixed_model.predict(cases.stages[index], cases.world, at).step_us
        slower = fixed_model.predict(cases.stages[plain], cases.world, at).step_us
        assert (faster < 0.98 * slower) is pays
    said = [" ".join(" ".join(one.text_lines()).split()) for one in found.values()]
    assert all("Predicted Over 10 Mbit/s between hosts, a step takes" in one for one in said)
    worlds = [world for one in found.values() for world, _ in one.sweep]
    assert {world.hosts for world in worlds} == {1, 4}
    assert {world.ranks for world in worlds if world.hosts == 4} == {8}


def test_the_short_run_has_what_a_forecast_wants(cases: Explanation) -> None:
    """Each stack of the pipeline, each without one hook, and the stages in which nothing is sent."""
    assert stacks_to_measure(cases) == [[], [{"int8": {"block": 256}}]]
    text = measurement_stages_yaml(cases.loaded, [[], ["int8"]], steps=5)
    assert text.count("steps: 5") == 2 * 4
    assert text.count("noop") == text.count("independent") == 2
    only_forward = PIPELINE.format(stages="[{forward: {steps: 4}}]")
    file = cases.loaded.path.with_name("forward.yaml")
    file.write_text(only_forward)
    with pytest.raises(CostsUnknownError, match="no stage trains"):
        measurement_stages_yaml(load(file), [[]])
    file.write_text(PIPELINE.format(stages='[{train: {steps: 4}}, {train: {steps: 4, freeze: ["1.*"]}}]'))
    with pytest.raises(PipelineError, match=r"stages\[1\].train.freeze: stages freeze different parameters"):
        check_predictable(load(file))


def test_only_hierarchical_has_legs() -> None:
    """A user's hook may have options of the same names."""
    stack = [{"my.Hook": {"across": 8}}, {"hierarchical": {"within": ["fp16"], "hosts": None}}]
    assert list(leave_one_out(stack)) == [
        ("my.Hook", stack[1:]),
        ("hierarchical", stack[:1]),
        ("fp16 inside a host", [stack[0], {"hierarchical": {"within": []}}]),
    ]


def test_memory_is_what_a_rank_holds(model: CostModel, cases: Explanation) -> None:
    """Momentum is as large as the weights, and so is what int8 has not sent yet."""
    assert cases.parameters is not None
    weights = sum(one.nbytes for one in cases.parameters.values())
    assert measure_optimizer_state_bytes(cases.probe.optimizer) == weights
    memory = {index: one.memory for index, one in forecast(cases, [model], Links()).items()}
    plain, int8 = (memory[list(STAGES).index(name)] for name in ("every_step", "int8"))
    assert list(plain.values()) == [weights, weights, weights, 0, 0]
    assert int8["hooks"] == weights


class NamedAdam(torch.optim.Adam):
    """It cannot be made of its parameters alone."""

    def __init__(self, params: list[torch.Tensor], name: str) -> None:
        super().__init__(params)
        self.name = name


def test_the_state_of_somebodys_own_optimizer_is_known_unless_it_grows_with_its_steps() -> None:
    """It is made as a run makes it, and weights stay what they are."""
    weights = torch.ones(10, requires_grad=True)
    assert measure_optimizer_state_bytes(NamedAdam([weights], "mine")) == 2 * 40 + 4
    assert weights.tolist() == [1.0] * 10
    assert measure_optimizer_state_bytes(torch.optim.LBFGS([weights])) is None
    assert measure_optimizer_state_bytes(torch.optim.SparseAdam([weights])) is None


def made_up(own_us: float, cpu_us: float, step_us: float) -> StageCosts:
    """Ten steps, half of whose own time is forward and half backward, and what processes computed in them."""
    parts = dict.fromkeys(PARTS_WITHOUT_EXCHANGE, 0.0) | {"forward_us": own_us / 2, "backward_us": own_us / 2}
    spread = [[own_us] * 10] * RANKS
    return StageCosts(
        10, step_us, cpu_us, parts, own_us_by_rank=spread, cpu_us_by_rank=[[cpu_us] * 10] * RANKS
    )


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """Without exchange, with plain gradients, and without exchange in three micro-steps; two ranks here."""
    file = tmp_path_factory.mktemp("simple") / "simple.yaml"
    stages = "{train: {steps: 9, hooks: [noop]}}, {train: {steps: 9}}, "
    stages += "{train: {steps: 9, hooks: [noop], accumulate: 3}}"
    file.write_text(PIPELINE.format(stages=f"[{stages}]"))
    return explain(load(file), hosts=1, ranks_per_host=RANKS)


@pytest.mark.parametrize(("cores", "step_us"), [(1.0, 10_000), (2.0, 5_000), (8.0, 5_000)])
def test_work_is_what_processes_computed(simple: Explanation, cores: float, step_us: float) -> None:
    """Two ranks took 10 ms on one core for 5 ms of work: with a core for each they take 5 ms."""
    quiet, _, accumulated = simple.stages
    costs = RunCosts("cpu", 1.0, [made_up(10_000, 5_000, 10_000), StageCosts(), StageCosts()])
    fitted = fit_cost_model(simple, dataclasses.replace(costs, cores=cores), Links())
    assert fitted.predict(quiet, simple.world, Links()).step_us == pytest.approx(step_us)
    assert fitted.predict(accumulated, simple.world, Links()).step_us == pytest.approx(3 * step_us)
    of_three = RunCosts("cpu", cores, [StageCosts(), StageCosts(), made_up(30_000, 15_000, 30_000)])
    fitted = fit_cost_model(simple, of_three, Links())
    assert fitted.predict(quiet, simple.world, Links()).step_us == pytest.approx(step_us)


def test_threads_of_a_rank_are_no_exchange(simple: Explanation) -> None:
    """Ranks that keep four cores busy take as long as they took, and what that computes is their own."""
    quiet, plain, _ = simple.stages
    costs = RunCosts(
        "cpu", 8.0, [made_up(10_000, 40_000, 10_000), made_up(10_000, 40_000, 10_000), StageCosts()]
    )
    fitted = fit_cost_model(simple, costs, Links())
    assert fitted.predict(quiet, simple.world, Links()).step_us == pytest.approx(10_000)
    assert fitted.predict(plain, simple.world, Links()).step_us == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize("more_us", [0, 700, 4_000])
def test_what_processes_computed_beyond_it_is_the_exchange(simple: Explanation, more_us: float) -> None:
    """On one core two ranks take twice what each computes, whatever it is."""
    measured = made_up(10_000, 5_000 + more_us, 9_000)
    costs = RunCosts("cpu", 1.0, [made_up(10_000, 5_000, 10_000), measured, StageCosts()])
    fitted = fit_cost_model(simple, costs, Links())
    one = fitted.predict(simple.stages[1], simple.world, Links())
    assert one.step_us == pytest.approx(2 * (5_000 + more_us))
    assert one.exposed_us <= 2 * more_us + 0.01


def test_the_first_steps_of_a_stage_do_not_count(tmp_path: Path) -> None:
    """Nor do single steps that took many times as long; waiting is no such thing."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "events.jsonl").write_text('{"event": "started", "device": "cpu", "cores": 3.5}\n')
    records = []
    for step in range(1, 21):
        forward_us = 900_000 if step <= 3 or step == 11 else 1_000
        line = step_record(0, step, None, 0.0) | {"cpu_us": 800}
        line |= dict.fromkeys(PARTS, 0) | {"forward_us": forward_us, "exposed_wire_us": 70_000}
        records.append(json.dumps({**line, "start_us": 0, "step_us": forward_us + 70_000}))
    (tmp_path / "steps" / "rank-00000.jsonl").write_text("\n".join(records) + "\n")
    costs = costs_of_run(RecordedRun(tmp_path), 2)
    assert (costs.device, costs.cores) == ("cpu", 3.5)
    found, none = costs.stages
    assert (found.steps, found.step_us, found.cpu_us, none.steps) == (16, 71_000, 800, 0)
    assert found.parts_us["forward_us"] == 1_000
    with pytest.raises(CostsUnknownError, match="no stage with records of more than 3 steps"):
        costs_of_run(RecordedRun(tmp_path), 0)


def test_a_collective_has_the_rounds_of_its_algorithm() -> None:
    """A ring's grow with ranks, a tree's with their logarithm; two ranks need one message."""
    assert [round_count("all_reduce", ranks) for ranks in (1, 2, 4, 1024)] == [0, 2, 6, 2046]
    assert [round_count("all_reduce", ranks, use_trees=True) for ranks in (2, 4, 1024)] == [2, 4, 20]
    assert [round_count("all_gather", ranks) for ranks in (1, 2, 8)] == [0, 1, 7]
    assert [round_count("all_to_all", ranks) for ranks in (1, 2, 8)] == [0, 1, 1]
    assert round_count("broadcast", 1000) == 10


def test_a_line_goes_through_its_points() -> None:
    """And costs never fall with bytes, nor below zero."""
    exact = LinearCost.fit([(0, 5), (10, 25)])
    assert (exact.base, exact.slope) == pytest.approx((5, 2))
    assert LinearCost.fit([(10, 20), (10, 40)]).at(10) == pytest.approx(30)
    assert LinearCost.fit([(10, 20), (20, 10)]) == LinearCost(15.0)
    below_zero = LinearCost.fit([(10, 1), (20, 12)])
    assert below_zero.base == 0
    assert below_zero.slope > 0


def test_the_last_of_n_ranks_is_an_order_statistic() -> None:
    """Of one rank it is its mean; of many it goes to the largest; with steps it grows as sums do."""
    rank = [float(value) for value in range(101)]
    late = LastRankLateness([rank, rank])
    assert late.expected_us(1, 1) == pytest.approx(0)
    assert late.expected_us(1, 2) == pytest.approx(100 / 6, rel=0.02)  # of two uniform draws from 0 to 100
    assert late.expected_us(1, 10_000) == pytest.approx(50, rel=0.01)
    assert late.expected_us(9, 2) == pytest.approx(3 * late.expected_us(1, 2))
    always = LastRankLateness([[10.0] * 5, [20.0] * 5])
    assert always.expected_us(1, 1_000) == pytest.approx(5)
    assert always.expected_us(8, 1_000) == pytest.approx(40)
    assert LastRankLateness([]).expected_us(1, 4) == 0
