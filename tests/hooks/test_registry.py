"""From names and options to stacks, and what is said when that does not work."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ddprun.config import PipelineError, load
from ddprun_hooks import Communicator, Hook, HookSetupError, Payload
from ddprun_hooks.registry import make_hook, make_stack


class Doubling(Hook):
    """A codec of this test's own."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.reduce(payload.tensor * self.factor) / self.factor


async def plain(payload: Payload, comm: Communicator) -> Tensor:
    """A hook that is a function."""
    return await comm.reduce(payload.tensor)


def blocking(payload: Payload, comm: Communicator) -> Tensor:
    """What a hook must not be."""
    return payload.tensor


class Blocking(Hook):
    """The same as a class."""

    def __call__(self, payload: Payload, comm: Communicator) -> Tensor:  # type: ignore[override]
        return payload.tensor


class Decorated(Hook):
    """What does not show whether it is async."""

    @functools.wraps(plain)
    def __call__(self, *args: Any) -> Any:  # type: ignore[override]
        return plain(*args)


class OfNoBase:
    """A hook in all but its base class."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.reduce(payload.tensor)


class Encoder(Hook):
    role = "encoder"  # type: ignore[assignment]


not_a_hook = 3


def test_a_dotted_name_is_a_class_or_an_async_function() -> None:
    """Either makes a hook; the class takes its options as keyword arguments."""
    made = make_hook("tests.hooks.test_registry.Doubling", {"factor": 4.0})
    assert isinstance(made, Doubling)
    assert made.factor == 4.0
    assert make_stack(["tests.hooks.test_registry.plain", "fp16"]).names[1] == "fp16"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp61", r'hooks\[0\]: unknown hook "fp61"; allowed: fp16, .* \(did you mean "fp16"\?\)'),
        ({"noop": {"bits": 8}}, r'hooks\[0\]\.noop\.bits: noop takes no options, got "bits"; remove it'),
        ({"bf16": {"accumulate": "fp64"}}, r"hooks\[0\]\.bf16\.accumulate: "),
        ("tests.hooks.test_registry.Dubling", r'has no "Dubling" \(did you mean "Doubling"\?\)'),
        ("no_such_package.Hook", 'no module is named "no_such_package"'),
        ("tests.hooks.test_registry.not_a_hook", "is int, not a hook"),
        ({"tests.hooks.test_registry.Doubling": {"size": 1}}, "unexpected keyword argument 'size'"),
        ({"tests.hooks.test_registry.plain": {"size": 1}}, "takes no options"),
        ("collections.OrderedDict", "which is not a ddprun_hooks.Hook"),
        (
            "tests.hooks.test_registry.blocking",
            'hook "tests.hooks.test_registry.blocking" is not async: .*; wr',
        ),
    ],
)
def test_a_hook_that_cannot_be_made_says_why(spec: str, message: str) -> None:
    """Every way to be wrong has its own sentence."""
    with pytest.raises(HookSetupError, match=message):
        make_stack([spec])


@pytest.mark.parametrize(
    "hook",
    [
        "fp61",
        3,
        {"topk": 3},
        {"int8": {}, "fp16": {}},
        {"topk": {"density": 2}},
        {"topk": {"density": 0}},
        {"topk": {"densty": 0.1}},
        {"fp16": {"bits": 8}},
        {"powersgd": {"rank": "x"}},
        {"powersgd": {"rank": 2.5, "rnk": 1}},
        {"powersgd": {"rank": True}},
        {"powersgd": {"rank": None}},
        {"hierarchical": {"within": 3}},
        {"hierarchical": {"across": ["fp61", {"topk": {"density": 0}}], "hosts": 0}},
    ],
)
def test_faults_are_told_in_the_words_of_a_file(tmp_path: Path, hook: Any) -> None:
    """At the same place, with what is wrong and what is allowed; a file adds what helps to write YAML."""
    path = tmp_path / "p.yaml"
    path.write_text(f"model: {{mlp: {{inputs: 2, outputs: 2}}}}\ndata: digits\nhooks: {json.dumps([hook])}\n")
    with pytest.raises(PipelineError) as of_file:
        load(path)
    with pytest.raises(HookSetupError) as of_code:
        make_stack([hook])
    faults = [f"{fault.path}: {fault.problem}" for fault in of_file.value.faults if "hooks" in fault.path]
    lines = str(of_code.value).splitlines()
    assert faults
    assert sorted(line.partition(";")[0] for line in lines) == sorted(
        fault.partition(";")[0] for fault in faults
    )


def test_hooks_are_taken_as_they_are() -> None:
    """One or several: a name, options, an object, a class, an async function. They are called by where they
    come from, on every rank alike.
    """
    here = "tests.hooks.test_registry"
    assert make_stack("fp16").names == ("fp16",)
    assert make_stack({"topk": {"density": 0.1}}).names == ("topk",)
    assert make_stack(Doubling(4.0)).names == (f"{here}.Doubling",)
    assert make_stack(Doubling).hooks[0].factor == 2.0  # type: ignore[attr-defined]
    several = make_stack([plain, Doubling(), "fp16"])
    assert several.names == (f"{here}.plain", f"{here}.Doubling", "fp16")
    assert several.description == repr([f"{here}.plain", f"{here}.Doubling", "fp16"])
    with pytest.raises(HookSetupError, match=rf'hooks\[1\]: hook "{here}.blocking" is not async'):
        make_stack(["fp16", blocking])


@pytest.mark.parametrize(
    "hook", ["tests.hooks.test_registry.Blocking", Blocking, Blocking(), lambda: Blocking()]
)
def test_a_hook_class_that_is_not_async_is_refused_when_it_is_made(hook: Any) -> None:
    """Before the first backward pass; a decorator says nothing of what it wraps, which tells when called."""
    with pytest.raises(
        HookSetupError, match=r'hooks\[1\]: hook ".*" is not async: its __call__ is a plain function; write'
    ):
        make_stack(["fp16", hook])
    assert make_stack(Decorated).names == ("tests.hooks.test_registry.Decorated",)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["noop", "fp16"], '"noop" must be alone'),
        (["fp16", "fp16"], "twice"),
        ([Doubling(2.0), Doubling(4.0)], 'Doubling" is in this stack twice; hooks keep their state by name'),
        ([OfNoBase()], r'^hooks\[0\]: ".*OfNoBase" is no hook: derive its class from ddprun_hooks.Hook$'),
        ([Encoder()], "^the role of \".*Encoder\" is 'encoder'; allowed: codec, reducer, alone$"),
    ],
)
def test_a_stack_that_makes_no_sense_is_refused(specs: list[Any], message: str) -> None:
    """Codecs first, then at most one reducer; noop alone."""
    with pytest.raises(HookSetupError, match=message):
        make_stack(specs)


def test_an_installed_package_adds_hooks_by_entry_point(tmp_path: Path) -> None:
    """A distribution with an entry point in `ddprun.hooks` makes its name known before it is imported."""
    (tmp_path / "wide_hooks.py").write_text(
        "from ddprun_hooks import Hook\n"
        "class Wide(Hook):\n"
        "    async def __call__(self, payload, comm):\n"
        "        return (await comm.reduce(payload.tensor.double())).to(payload.tensor.dtype)\n"
    )
    info = tmp_path / "wide_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ddprun.hooks]\nwide = wide_hooks:Wide\n")
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from ddprun_hooks.config.options import installed_hook_names\n"
        "from ddprun_hooks.registry import make_stack\n"
        "assert installed_hook_names() == ['wide'], installed_hook_names()\n"
        "assert 'wide_hooks' not in sys.modules\n"
        "assert make_stack(['wide', 'fp16']).names == ('wide', 'fp16')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


def test_importing_the_package_and_its_options_imports_no_torch() -> None:
    """`ddprun check` reads hook options without torch."""
    modules = "ddprun_hooks.config.options, ddprun_hooks.config.grammar"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
