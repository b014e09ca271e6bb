"""Which stacks are refused, where, and what is said."""

import pytest

from ddprun_hooks import HookSetupError
from ddprun_hooks.config import grammar
from ddprun_hooks.config.options import HookSpec, parse_hook_spec
from ddprun_hooks.registry import make_stack

SUMMED_IN_FP32: HookSpec = {"bf16": {"accumulate": "fp32"}}
CASES: list[tuple[list[HookSpec], tuple[object, ...], str]] = [
    (["int8", "fp16"], (1,), '"fp16" comes after "int8", which ends the stack'),
    (["topk", "int8"], (1,), '"int8" comes after "topk", which ends the stack'),
    (["noop", "fp16"], (0,), '"noop" must be alone'),
    (["fp16", "fp16"], (1,), '"fp16" is in this stack twice'),
    (["fp16", "bf16"], (1,), '"bf16" comes after "fp16": one cast is enough'),
    (["powersgd", "powersgd"], (1,), "the second has no effect"),
    (
        ["fp16", {"hierarchical": {"across": ["fp16"]}}],
        (1, "hierarchical", "across", 0),
        '"fp16" is in this stack twice',
    ),
    (
        ["powersgd", {"hierarchical": {"across": ["powersgd"]}}],
        (1, "hierarchical", "across", 0),
        "the second has no effect",
    ),
    (
        [{"hierarchical": {"within": ["int8"]}}],
        (0, "hierarchical", "within", 0),
        "takes fp16, bf16 and shared_memory only",
    ),
    (
        [{"hierarchical": {"within": ["shared_memory", "bf16"]}}],
        (0, "hierarchical", "within", 1),
        "which ends the stack",
    ),
    (
        [{"hierarchical": {"across": ["shared_memory"]}}],
        (0, "hierarchical", "across", 0),
        "share no memory",
    ),
    (
        [{"hierarchical": {"within": [SUMMED_IN_FP32]}}],
        (0, "hierarchical", "within", 0),
        "16-bit sums are computed in fp32 anyway",
    ),
    ([SUMMED_IN_FP32, "hierarchical"], (1,), 'after "bf16", which with "accumulate" ends the stack'),
    ([SUMMED_IN_FP32, "topk"], (1,), 'after "bf16", which with "accumulate" ends the stack'),
    ([SUMMED_IN_FP32, "powersgd"], (1,), 'after "bf16", which with "accumulate" ends the stack'),
    ([SUMMED_IN_FP32, "fp16"], (1,), "one cast is enough"),
    (
        [{"hierarchical": {"across": ["hierarchical"]}}],
        (0, "hierarchical", "across", 0),
        "there are only two levels",
    ),
    ([{"hierarchical": {"across": ["noop"]}}], (0, "hierarchical", "across", 0), "alone in the whole stack"),
]


@pytest.mark.parametrize(("specs", "path", "text"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_stack_that_makes_no_sense_is_refused_with_its_reason(
    specs: list[HookSpec], path: tuple[object, ...], text: str
) -> None:
    """By `check`, without torch, and once more where a stack is made."""
    (problem,) = grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(spec)) for spec in specs])
    assert problem.path == path
    assert text in problem.text
    assert problem.severity == "error"
    with pytest.raises(HookSetupError, match=r".+"):
        make_stack(specs)


@pytest.mark.parametrize("across", [False, True])
def test_a_decay_of_what_another_hook_keeps_is_a_warning(across: bool) -> None:
    """PowerSGD keeps what `topk` does not send, and decays nothing of it."""
    topk: HookSpec = {"topk": {"decay": 0.9}}
    stack: list[HookSpec] = ["powersgd", {"hierarchical": {"across": [topk]}} if across else topk]
    (problem,) = grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(spec)) for spec in stack])
    assert problem.severity == "warning"
    assert '"decay" has no effect after "powersgd"' in problem.text
    assert not grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(topk))])


def test_a_cast_before_values_of_another_type_is_a_warning() -> None:
    """As before codes; without `values` they are of the payload's type."""
    stack: list[HookSpec] = ["fp16", {"topk": {"values": "int8"}}]
    (problem,) = grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(spec)) for spec in stack])
    assert problem.severity == "warning"
    assert '"fp16" saves nothing before "topk"' in problem.text
    assert not grammar.stack_problems([grammar.make_stack_entry("fp16"), grammar.make_stack_entry("topk")])


@pytest.mark.parametrize("codes", ["int8", "int4", "int2", "fp8", "auto_bits"])
def test_what_has_no_effect_but_does_no_harm_is_a_warning(codes: str) -> None:
    """A cast before codes."""
    (problem,) = grammar.stack_problems([grammar.make_stack_entry("fp16"), grammar.make_stack_entry(codes)])
    assert problem.severity == "warning"
    assert f'"fp16" saves nothing before "{codes}"' in problem.text
    assert make_stack(["fp16", codes]).names == ("fp16", codes)
