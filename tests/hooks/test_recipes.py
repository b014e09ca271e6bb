"""The code on the page about hooks: a script of one's own, a codec, and a hook with state."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks.payload import ParamSlice
from ddprun_hooks.stack import Stack
from ddprun_hooks.testing import Rank, bucket_slices, check_hooks, run_hooks
from tests.engine.running import run_pipeline, summary
from tests.ranks import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", PAGE, re.DOTALL))
CHECK = "\n".join(re.findall(r"```python\n(from ddprun_hooks.testing .*?)```", PAGE, re.DOTALL))


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """As it stands there, under torchrun, on two ranks."""
    (tmp_path / "train.py").write_text(SOURCES["train.py"])
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "train.py"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss \d\.\d+, \d+ bytes sent", done.stdout), done.stdout


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's hooks, as modules beside a pipeline."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("mine", "scaled"):
        (tmp_path / f"{module}.py").write_text(SOURCES[f"{module}.py"])
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def scaled(beside: None) -> Any:
    """The page's hook with state."""
    return importlib.import_module("scaled").Scaled


@pytest.mark.usefixtures("beside")
def test_the_codec_passes_the_check_of_the_page() -> None:
    """Before a hook that keeps residuals, for parameters that no rank used, too."""
    namespace: dict[str, Any] = {}
    exec(CHECK, namespace)
    namespace["test_shrunk"]()


@pytest.mark.parametrize(
    "hooks",
    [
        "scaled.Scaled",
        [{"powersgd": {"rank": 2}}, "scaled.Scaled"],
        [{"hierarchical": {"hosts": 2, "across": ["scaled.Scaled"]}}],
    ],
)
def test_the_hook_with_state_holds_every_promise(scaled: Any, hooks: Any) -> None:
    """Equal bits, nothing lost, the same bits after a resume, no trace of a step that is rolled back."""
    check_hooks(hooks, ranks=4)


def test_parameters_may_have_no_elements(scaled: Any) -> None:
    """Beside others in a bucket, and in one of their own."""
    empty = ParamSlice("empty", (0, 3), 40, 0)
    params = (bucket_slices(["first.bias"])[0], empty, ParamSlice("last", (7,), 40, 7))

    def body(rank: Rank) -> list[Tensor]:
        rank.send(torch.zeros(0), (replace(empty, offset=0),), bucket=1)
        return [rank.send(torch.full((47,), 0.5), params), rank.send(torch.zeros(0), ())]

    for mean, nothing in run_hooks(scaled, 2, body):
        assert torch.allclose(mean, torch.ones(47))
        assert not nothing.numel()


def test_its_own_state_is_merged_rolled_back_and_taken_over(scaled: Any) -> None:
    """The largest values of all ranks; after a rollback, those from before the step."""
    states = []
    for largest in (2.0, 5.0, 3.0):
        hook = scaled()
        stack, later = Stack([("scaled", hook)]), Stack([("scaled", scaled())])
        hook.largest = {"gradient": {"weight": torch.tensor(largest)}}
        stack.begin_step()
        hook.largest["gradient"]["weight"] = torch.tensor(9.0)
        stack.rollback()
        later.take_state_from([stack])
        assert not hook.largest
        states.append(later.state_dict()["scaled"])
    assert scaled().merge(states)["largest"] == {"gradient": {"weight": torch.tensor(5.0)}}


def test_it_trains_with_checkpoints_and_sends_a_quarter(scaled: Any, tmp_path: Path) -> None:
    """In a run of ddprun: gradients first, then changes of parameters."""
    text = (
        "model: {mlp: {inputs: 64, hidden: [256], outputs: 10}}\ndata: digits\nhooks: [HOOKS]\n"
        "optimizer: {sgd: {lr: 0.1, momentum: 0.9}}\ncheckpoint: {every: 5}\nstages:\n"
        "  - train: {steps: 12}\n  - train: {steps: 12, sync: {local_sgd: {every: 4}}}\n"
    )
    plain = summary(run_pipeline(tmp_path, text.replace("[HOOKS]", "[]"), 2, "plain"))
    found = summary(run_pipeline(tmp_path, text.replace("HOOKS", "scaled.Scaled"), 2, "scaled"))
    assert found["wire_bytes"] == pytest.approx(plain["wire_bytes"] / 4, rel=0.01)
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.2)
