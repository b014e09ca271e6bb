"""Objects that the options of an import path ask for, and the pipeline's folder in strings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.config import PipelineError, load
from ddprun.engine import build, seeding
from ddprun.engine.objective import Objective, Precision
from ddprun.host.code_folders import add_import_folder
from tests.ranks import ddprun_here

MODULE = """
import functools

import torch
from torch.utils.data import Dataset

made = []


class Step:
    def __init__(self, size=1, inner=None):
        self.size, self.inner, self.draw = size, inner, torch.rand(()).item()
        made.append(size)


class Data(Dataset):
    def __init__(self, **options):
        self.options, self.draw = options, torch.rand(()).item()
        made.append("data")

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return torch.zeros(2), 0


def function(size):
    return size + 1


def taking_more(init):
    @functools.wraps(init)
    def wrapped(self, *arguments, labels=2, **options):
        init(self, *arguments, **options)
        self.labels = labels
    return wrapped


def opened(path):
    with open(path):
        return path


def typed(dtype):
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype")


class Config:
    @taking_more
    def __init__(self, width=1):
        self.width = width
"""
PIPELINE = """
model: {mlp: {inputs: 2, outputs: 2}}
data:
  parts.Data: OPTIONS
optimizer: sgd
stages: [train: {steps: 1}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("nested")
    (found / "parts.py").write_text(MODULE)
    (found / "broken.py").write_text("raise OSError('no such library')\n")
    add_import_folder(found)
    return found


def made(folder: Path, options: str) -> Any:
    (folder / "p.yaml").write_text(PIPELINE.replace("OPTIONS", options))
    seeding.seed_everything(0)
    return build.build_datasets(load(folder / "p.yaml"))[0]


def test_objects_are_made_innermost_first_once_and_under_the_seed(folder: Path) -> None:
    """At any depth, in lists and mappings."""
    import parts  # type: ignore[import-not-found]

    parts.made.clear()
    options = (
        "{a: [{parts.Step: {size: 2, inner: {parts.Step: {size: 3}}}}], b: {c: {parts.function: {size: 4}}}}"
    )
    data, again = (made(folder, options) for _ in range(2))
    assert parts.made == [3, 2, "data"] * 2
    (step,) = data.options["a"]
    assert isinstance(step, parts.Step)
    assert (step.size, step.inner.size, data.options["b"]) == (2, 3, {"c": 5})
    assert (step.draw, step.inner.draw, data.draw) == (
        again.options["a"][0].draw,
        again.options["a"][0].inner.draw,
        again.draw,
    )
    assert len({step.draw, step.inner.draw, data.draw}) == 3


def test_a_class_may_take_more_than_what_its_init_wraps(folder: Path) -> None:
    """As configurations of transformers do, whose `__init__` shows another's signature."""
    config = made(folder, "{config: {parts.Config: {width: 3, labels: 5}}}").options["config"]
    assert (config.width, config.labels) == (3, 5)


def test_a_reference_is_passed_on_as_it_is(folder: Path) -> None:
    """And what only looks like one is data."""
    import parts
    import torch

    options = (
        "{a: {ref: parts.Step}, b: {ref: torch.float32}, c: {ref: main}, d: {parts.Step: 3}, "
        "e: {parts.Step: {}, x.y: {}}, f: {parts.Step: null}, g: '{here}/x', h: {plain: {}}}"
    )
    found = made(folder, options).options
    assert found["a"] is parts.Step
    assert found["b"] is torch.float32
    assert found["c"] == {"ref": "main"}
    assert found["d"] == {"parts.Step": 3}
    assert found["e"] == {"parts.Step": {}, "x.y": {}}
    assert isinstance(found["f"], parts.Step)
    assert found["g"] == f"{folder}/x"
    assert found["h"] == {"plain": {}}


@pytest.mark.parametrize(
    ("options", "path", "problem"),
    [
        (
            "{a: [0, {parts.Step: {sizes: 2}}]}",
            'data."parts.Data".a[1]."parts.Step"',
            "got an unexpected keyword argument 'sizes'",
        ),
        (
            "{a: {parts.Step: {inner: {parts.Stepp: {}}}}}",
            'data."parts.Data".a."parts.Step".inner."parts.Stepp"',
            'has no "Stepp" (did you mean "Step"?)',
        ),
        ("{a: {ref: nowhere.x}}", 'data."parts.Data".a.ref', 'no module is named "nowhere"'),
    ],
)
def test_an_error_names_the_place_inside(folder: Path, options: str, path: str, problem: str) -> None:
    """In the file, and as a key path."""
    with pytest.raises(PipelineError) as refused:
        made(folder, options)
    (fault,) = refused.value.faults
    assert (fault.place.line, fault.path) == (4, path)
    assert problem in fault.problem


@pytest.mark.parametrize("name", ["os.system", "parts.torch.load", "torch.load", "other.thing"])
@pytest.mark.parametrize("form", ["{%s: {}}", "{ref: %s}", "[1, {parts.Step: {inner: {%s: {x: 1}}}}]"])
def test_what_is_not_trusted_is_refused_at_any_depth(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    """By `check`, at the name's place, as far as the name says it; and by a run."""
    file = folder / "t.yaml"
    file.write_text(PIPELINE.replace("OPTIONS", f"{{a: {form % name}}}"))
    monkeypatch.setenv("DDPRUN_TRUSTED", "./parts,torch")
    found = ddprun_here("check", "t.yaml", cwd=folder)
    said_by_name = name != "parts.torch.load"
    assert found.code == (2 if said_by_name else 0)
    line = file.read_text().splitlines()[3]
    assert (f"t.yaml:4:{line.index(name) + 1}: " in found.stdout) == said_by_name
    assert ("DDPRUN_TRUSTED allows" in found.stdout) == said_by_name
    monkeypatch.delenv("DDPRUN_TRUSTED")
    loaded = load(file)
    monkeypatch.setenv("DDPRUN_TRUSTED", "./parts,torch")
    with pytest.raises(PipelineError, match=r"may not be imported|parts\.torch\.load"):
        build.build_datasets(loaded)


def test_what_is_trusted_may_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch the plain places, and types of tensors."""
    monkeypatch.setenv("DDPRUN_TRUSTED", "./parts,torch")
    made(folder, "{a: {torch.nn.Linear: {in_features: 2, out_features: 3, dtype: {ref: torch.float64}}}}")


@pytest.mark.parametrize(
    ("option", "notes"),
    [
        (
            "{parts.opened: {path: no/such}}",
            [
                'p.yaml:4:34: data."parts.Data".a."parts.opened": while calling "parts.opened"',
                "a relative path is looked up in the current folder, CWD; "
                '"{here}/no/such" is in the folder of the pipeline',
            ],
        ),
        (
            "{parts.typed: {dtype: torch.float32}}",
            [
                'p.yaml:4:33: data."parts.Data".a."parts.typed": while calling "parts.typed"',
                'dtype: "torch.float32" is passed on as a string; '
                "{ref: torch.float32} passes the object itself",
            ],
        ),
        (
            "{broken.part: {}}",
            ['p.yaml:4:33: data."parts.Data".a."broken.part": while importing "broken.part"'],
        ),
    ],
    ids=["path", "string", "import"],
)
def test_what_fails_has_notes_of_its_place_and_what_may_be_wrong(
    folder: Path, option: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below its traceback, which says nothing of the file."""
    monkeypatch.chdir(folder.parent)
    with pytest.raises((OSError, ValueError)) as raised:
        made(folder, f"{{a: {option}}}")
    expected = [f"{folder}/{notes[0]}", *notes[1:]]
    assert raised.value.__notes__ == [note.replace("CWD", str(folder.parent)) for note in expected]


@pytest.mark.parametrize(
    ("loss", "notes"),
    [
        (
            "model",
            [
                "the model was called as model(float32 (4, 2), int64 (4,))",
                "write batch: {inputs: …} if its arguments are different",
            ],
        ),
        ("cross_entropy", ["the loss was called as loss(float32 (4, 3), int64 (4,))"]),
    ],
)
def test_a_model_or_loss_that_fails_has_a_note_of_how_it_was_called(
    folder: Path, loss: str, notes: list[str]
) -> None:
    """With types and shapes."""
    (folder / "q.yaml").write_text(f"{PIPELINE.replace('OPTIONS', '{}')}loss: {loss}\n")
    loaded = load(folder / "q.yaml")
    objective = Objective(loaded, build.build_loss(loaded), Precision("fp32", torch.device("cpu")))
    with pytest.raises((IndexError, TypeError)) as raised:
        objective(nn.Linear(2, 3), (torch.zeros(4, 2), torch.full((4,), 5)))
    assert raised.value.__notes__ == notes
