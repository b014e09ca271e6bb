"""From names and options to stacks, and what is said when that does not work."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from ddprun_hooks import Hook, HookSetupError, Link, Payload
from ddprun_hooks.registry import make_hook, make_stack


class Doubling(Hook):
    """A codec of this test's own."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return await link.hand_on(payload.tensor * self.factor) / self.factor


async def plain(payload: Payload, link: Link) -> Tensor:
    """A hook that is a function."""
    return await link.hand_on(payload.tensor)


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
        ("fp61", 'there is no hook "fp61"'),
        ({"fp16": {"bits": 8}}, 'options of hook "fp16": bits'),
        ("tests.hooks.test_registry.Dubling", r'has no "Dubling" \(did you mean "Doubling"\?\)'),
        ("no_such_package.Hook", 'there is no module "no_such_package"'),
        ("tests.hooks.test_registry.not_a_hook", "is int, not a hook"),
        ({"tests.hooks.test_registry.Doubling": {"size": 1}}, "unexpected keyword argument 'size'"),
        ({"tests.hooks.test_registry.plain": {"size": 1}}, "takes no options"),
        ("collections.OrderedDict", "which is not a ddprun_hooks.Hook"),
    ],
)
def test_a_hook_that_cannot_be_made_says_why(spec: str, message: str) -> None:
    """Every way to be wrong has its own sentence."""
    with pytest.raises(HookSetupError, match=message):
        make_stack([spec])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["noop", "fp16"], '"noop" stands alone'),
        (["fp16", "fp16"], "twice"),
    ],
)
def test_a_stack_that_makes_no_sense_is_refused(specs: list[str], message: str) -> None:
    """Codecs first, then at most one reducer; noop alone."""
    with pytest.raises(HookSetupError, match=message):
        make_stack(specs)


def test_an_installed_package_adds_hooks_by_entry_point(tmp_path: Path) -> None:
    """A distribution with an entry point in `ddprun.hooks` makes its name known before it is imported."""
    (tmp_path / "wide_hooks.py").write_text(
        "from ddprun_hooks import Hook\n"
        "class Wide(Hook):\n"
        "    async def __call__(self, payload, link):\n"
        "        return (await link.hand_on(payload.tensor.double())).to(payload.tensor.dtype)\n"
    )
    info = tmp_path / "wide_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ddprun.hooks]\nwide = wide_hooks:Wide\n")
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from ddprun_hooks.registry import installed_names, make_stack\n"
        "assert installed_names() == ['wide'], installed_names()\n"
        "assert 'wide_hooks' not in sys.modules\n"
        "assert make_stack(['wide', 'fp16']).names == ('wide', 'fp16')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


def test_importing_the_package_and_its_options_imports_no_torch() -> None:
    """`ddprun check` reads hook options without torch."""
    script = "import sys, ddprun_hooks.options, ddprun_hooks.grammar; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
