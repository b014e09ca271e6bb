"""`DDPRUN_TRUSTED`: what is not listed is neither imported nor called, under whatever name it goes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.engine import build
from ddprun.engine.hook_stacks import build_hook_stack
from ddprun.engine.optimizers import build_optimizer, build_schedule
from ddprun.engine.turns import build_turns
from ddprun_hooks import HookSetupError, registry
from ddprun_hooks.config import import_path as installing
from ddprun_hooks.config.import_path import import_trusted
from ddprun_hooks.config.trust import TRUST_VARIABLE, TrustSettingError, UntrustedError, read_trust_policy
from ddprun_hooks.registry import make_hook, make_stack
from tests.security import lab

LAB = "tests.security.lab"
TEXT = """
model: {model}
data: digits
optimizer: sgd
"""


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the limit."""
    return lambda packages: monkeypatch.setenv(TRUST_VARIABLE, packages)


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., LoadedPipeline]:
    """Load a pipeline with some keys replaced."""

    def from_keys(*overrides: str) -> LoadedPipeline:
        path = tmp_path / "p.yaml"
        path.write_text(TEXT.replace("{model}", "{mlp: {inputs: 64, outputs: 10}}"))
        return load(path, overrides)

    return from_keys


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os.system", "own library"),
        ("builtins.exec", "own library"),
        ("logging.os.system", "own library"),
        ("subprocess.Popen", "own library"),
        ("importlib.import_module", "own library"),
        ("pickle.loads", "own library"),
        ("torch.load", "of torch only the modules in torch.nn may be named here"),
        ("torch.nn.functional.torch.load", "of torch only"),
        ("torch.nn.modules.module.warnings.sys.exit", "of torch only"),
        ("torch.nn.functional.boolean_dispatch", "of torch only"),
        ("torch.nn.Linear.__init__.__globals__", "is private"),
        ("numpy.load", '"numpy" is not trusted'),
        (f"{LAB}.shell", "own library"),
        (f"{LAB}.run", "is subprocess.run"),
        (f"{LAB}.execute", "own library"),
        (f"{LAB}.partial_shell", "own library"),
        (f"{LAB}.opener", "own library"),
        (f"{LAB}.popen", "is subprocess.Popen"),
        (f"{LAB}.caller", "is operator.methodcaller"),
        (f"{LAB}.joined", "own library"),
        (f"{LAB}.log", "is logging.Logger.info"),
        (f"{LAB}.logger", "is logging.Logger"),
        (f"{LAB}.shown", "own library"),
        (f"{LAB}.listed", "own library"),
        (f"{LAB}.number", "is builtins.int"),
        (f"{LAB}.wrapped_shell", "own library"),
        (f"{LAB}.computed_shell", "own library"),
        (f"{LAB}.imported_shell", "own library"),
        (f"{LAB}.star_shell", "own library"),
        (f"{LAB}.os.system", "is the module os"),
        (f"{LAB}.lab_parts.os.system", "is the module tests.security.lab_parts"),
        (f"{LAB}.__builtins__.eval", "is private"),
        (f"{LAB}._hidden_net", "a part that begins with _ is private"),
        (f"{LAB}.Net.runs", "own library"),
        (f"{LAB}.Net.mro", "own library"),
        (f"{LAB}.Net.compile", r"is torch.nn.modules.module.Module.compile: of torch only"),
        (f"{LAB}.Net.compile_it", r"is torch.nn.modules.module.Module.compile: of torch only"),
        (f"{LAB}.Net.save", r"is .*\.Net\.save"),
        (f"{LAB}.Derived.save", r"is .*\.Net\.save"),
        (f"{LAB}.Net.forward", r"is .*\.Net\.forward"),
        (f"{LAB}.bound_method", "is a method, which is called on an object"),
        (f"{LAB}.one_net.save", "is an object, and a name may go through modules and classes only"),
        (f"{LAB}.Process", "is .*Process"),
        (f"{LAB}.count", "is .*count"),
        (f"{LAB}.nothing", "is .*nothing"),
        (f"{LAB}.samples", "is .*samples"),
        ("tests.security.test_trust.LAB", "it is not trusted"),
    ],
)
def test_what_runs_or_loads_code_is_never_a_model(
    trusted: Callable[[str], None], name: str, reason: str
) -> None:
    """The object's own module and its kind decide, although every package in question is listed."""
    trusted(f"{LAB}, os, posix, builtins, logging, subprocess, importlib, pickle, operator, torch")
    with pytest.raises(UntrustedError, match=reason):
        import_trusted(name, build._REQUIREMENTS_BY_KIND["model"])


@pytest.mark.parametrize(
    "name",
    ["Net", "make_net", "made_once", "wrapped_net", "partial_net", "Net.small", "Net.tiny", "Derived.small"],
)
def test_what_a_trusted_package_offers_is_had(trusted: Callable[[str], None], name: str) -> None:
    """Classes, functions, partials, decorated and cached functions and class methods of the package's own."""
    trusted(LAB)
    assert isinstance(import_trusted(f"{LAB}.{name}", build._REQUIREMENTS_BY_KIND["model"])(), nn.Module)


def test_methods_are_had_where_their_object_is_an_option(trusted: Callable[[str], None]) -> None:
    """Of data and of objects in options; elsewhere they would be called with the model or a batch. Those that
    are inherited from torch are torch's.
    """
    trusted(f"{LAB}, torch")
    for wanted in (None, build._REQUIREMENTS_BY_KIND["data"]):
        assert import_trusted(f"{LAB}.Derived.save", wanted).__name__ == "save"
        with pytest.raises(UntrustedError, match=r"Module.compile: "):
            import_trusted(f"{LAB}.Derived.compile", wanted)
    for kind in build._REQUIREMENTS_BY_KIND.keys() - {"model", "data"}:
        with pytest.raises(UntrustedError, match="is a method, which is called on an object"):
            import_trusted(f"{LAB}.Derived.save", build._REQUIREMENTS_BY_KIND[kind])


def test_a_single_object_may_be_listed(trusted: Callable[[str], None]) -> None:
    """A prefix goes down to one class; what stands beside it is refused."""
    trusted(f"{LAB}.Net")
    assert import_trusted(f"{LAB}.Net").__name__ == "Net"
    with pytest.raises(UntrustedError, match="may not be imported: it is not trusted"):
        import_trusted(f"{LAB}.make_net")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("data", "torch.utils.data.TensorDataset", "torch.nn.Linear"),
        ("loss", "torch.nn.functional.mse_loss", "torch.optim.SGD"),
        ("optimizer", "torch.optim.SGD", "torch.nn.Linear"),
        ("schedule", "torch.optim.lr_scheduler.StepLR", "torch.nn.Linear"),
        ("metric", "torch.nn.functional.mse_loss", "torch.nn.Linear"),
        ("mutate", f"{LAB}.decorated", f"{LAB}.Net"),
        ("update", f"{LAB}.decorated", f"{LAB}.Net"),
    ],
)
def test_each_kind_takes_its_own(trusted: Callable[[str], None], kind: str, good: str, bad: str) -> None:
    """What is no dataset, optimizer, … is refused before it is called."""
    trusted(f"torch, {LAB}")
    import_trusted(good, build._REQUIREMENTS_BY_KIND[kind])
    with pytest.raises(UntrustedError):
        import_trusted(bad, build._REQUIREMENTS_BY_KIND[kind])


OF_TORCH = [
    ("mutate", "torch.nn.Module.compile"),
    ("mutate", "torch.nn.Module.load_state_dict"),
    ("mutate", "torch.nn.utils.parameters_to_vector"),
    ("mutate", "torch.nn.init.normal_"),
    ("mutate", "torch.nn.Linear"),
    ("update", "torch.nn.functional.mse_loss"),
    ("hook", "torch.nn.Linear"),
    ("data", "torch.utils.data.datapipes.gen_pyi.gen_from_template"),
    ("data", "torch.utils.data.datapipes.iter.FileOpener"),
    ("data", "torch.utils.data.IterDataPipe"),
    ("data", "torch.utils.data.DataLoader"),
    ("data", "torch.utils.data.random_split"),
    ("data", "torch.utils.data.dataset.TensorDataset"),
    ("model", "torch.hub.load"),
    ("model", "torch.load"),
    ("model", "torch.jit.load"),
    ("model", "torch.jit.ScriptModule"),
    ("model", "torch.fx.GraphModule"),
    ("model", "torch.package.PackageImporter"),
    ("model", "torch._dynamo.OptimizedModule"),
    ("model", "torch.export.load"),
    ("model", "torch.utils.cpp_extension.load_inline"),
    ("model", "torch.distributed.run.main"),
    ("model", "torch.distributed.nn.api.remote_module.RemoteModule"),
    ("model", "torch.ao.nn.quantized.Linear"),
    ("model", "torch.nn.DataParallel"),
    ("model", "torch.nn.parallel.DistributedDataParallel"),
    ("model", "torch.nn.Linear.forward"),
    ("model", "torch.nn.Embedding.from_pretrained"),
    ("model", "torch.nn.Parameter"),
    ("model", "torch.nn.factory_kwargs"),
    ("model", "torch.nn.modules.linear.Linear"),
    ("model", "torch.optim.swa_utils.AveragedModel"),
    ("loss", "torch.nn.functional.relu"),
    ("loss", "torch.nn.functional.handle_torch_function"),
    ("metric", "torch.nn.functional.grid_sample"),
    ("optimizer", "torch.optim.Optimizer.load_state_dict"),
    ("optimizer", "torch.optim._functional.adam"),
    ("schedule", "torch.optim.lr_scheduler.Optimizer"),
    ("schedule", "torch.optim.lr_scheduler.Counter"),
    ("schedule", "torch.optim.SGD"),
]
OVERRIDES = {
    "mutate": "stages=[{train: {steps: 1, mutate: NAME}}]",
    "update": "stages=[{forward: {steps: 1, update: NAME}}]",
    "hook": "hooks=[NAME]",
    "metric": "stages=[{evaluate: {metrics: [NAME]}}]",
}


@pytest.mark.parametrize(
    "packages", ["torch", "torch.nn, torch.optim, torch.utils.data, torch.hub, torch.load"]
)
@pytest.mark.parametrize(("kind", "name"), OF_TORCH)
def test_of_torch_kinds_may_be_named_and_no_prefix(
    trusted: Callable[[str], None],
    pipeline: Callable[..., LoadedPipeline],
    packages: str,
    kind: str,
    name: str,
) -> None:
    """What compiles, loads, writes or wraps is refused, by `check` as by a run: it is at no open place."""
    trusted(packages)
    with pytest.raises(UntrustedError):
        import_trusted(name, registry._EXPECTED_HOOK if kind == "hook" else build._REQUIREMENTS_BY_KIND[kind])
    with pytest.raises(PipelineError, match="may not be imported") as caught:
        pipeline(OVERRIDES.get(kind, f"{kind}=NAME").replace("NAME", name))
    assert [fault.place.source.name for fault in caught.value.faults] == ["--set 1"]


def test_commands_in_options_of_torch_are_not_run(
    trusted: Callable[[str], None],
    pipeline: Callable[..., LoadedPipeline],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler of the pipeline's own choosing, and a template that is written to any file."""
    (tmp_path / "template.pyi.in").write_text("written")
    for packages in ("torch", "torch.nn", "torch.nn,torch.utils.data"):
        trusted(packages)
        for override in (
            "stages=[{train: {steps: 1, mutate: {torch.nn.Module.compile: {options: {cpp.cxx: [touch]}}}}}]",
            "data={torch.utils.data.datapipes.gen_pyi.gen_from_template: {dir: ., template_name: "
            "template.pyi.in, output_name: written, replacements: []}}",
        ):
            monkeypatch.chdir(tmp_path)
            with pytest.raises(PipelineError, match="may not be imported"):
                pipeline(override)
    assert not (tmp_path / "written").exists()


def test_the_open_places_of_torch_hold_what_they_are_said_to(trusted: Callable[[str], None]) -> None:
    """All that may be named is of its kind and defined there, and nearly all of the kind may be named."""
    trusted("torch")
    bases = {
        "torch.nn": (nn.Module, build._REQUIREMENTS_BY_KIND["model"]),
        "torch.optim": (torch.optim.Optimizer, build._REQUIREMENTS_BY_KIND["optimizer"]),
        "torch.optim.lr_scheduler": (
            torch.optim.lr_scheduler.LRScheduler,
            build._REQUIREMENTS_BY_KIND["schedule"],
        ),
        "torch.utils.data": (torch.utils.data.Dataset, build._REQUIREMENTS_BY_KIND["data"]),
        "torch.nn.functional": (None, build._REQUIREMENTS_BY_KIND["loss"]),
    }
    kept_out: dict[str, set[str]] = {}
    for place, (base, wanted) in bases.items():
        module = sys.modules[place]
        for name, found in vars(module).items():
            of_kind = isinstance(found, type) and base is not None and issubclass(found, base)
            if read_trust_policy().why_not_trusted(f"{place}.{name}", wanted.kind) is None:
                assert of_kind if base else callable(found), f"{place}.{name}"
                assert import_trusted(f"{place}.{name}", wanted) is found
            elif (name[0] != "_" and of_kind) or (base is None and name.endswith(("_loss", "entropy"))):
                kept_out.setdefault(place, set()).add(name)
    assert kept_out == {
        "torch.nn": {"DataParallel"},
        "torch.utils.data": {"DFIterDataPipe", "IterDataPipe", "MapDataPipe"},
        "torch.nn.functional": {"linear_cross_entropy"},
    }


OF_OTHERS = [
    (
        "model",
        "torchvision.datasets.utils.extract_archive",
        "the models in torchvision.models may be named here",
    ),
    ("model", "torchvision.models.Weights", "only the models"),
    ("model", "torchvision.models.resnet.load_state_dict_from_url", "only the models"),
    ("model", "torchvision._internally_replaced_utils.load_state_dict_from_url", "is private"),
    (
        "data",
        "torchvision.datasets.utils.download_url",
        "the datasets in torchvision.datasets may be named here",
    ),
    ("data", "torchvision.datasets.LSUN", "only the datasets"),
    ("data", "torchvision.datasets.lsun.pickle.load", "only the datasets"),
    ("data", "torchvision.transforms.Lambda", "only the datasets"),
    ("loss", "torchvision.io.write_file", "the losses in torchvision.ops may be named here"),
    (
        "model",
        "torchaudio.pipelines.WAV2VEC2_BASE.get_model",
        "the models in torchaudio.models may be named here",
    ),
    ("model", "timm.models.load_checkpoint", "of timm only create_model in timm may be named here"),
    ("data", "numpy.load", "nothing of numpy may be named here"),
    ("option", "numpy.memmap", "of numpy only the types of numbers in numpy may be named here"),
    ("option", "numpy.f2py.compile", "only the types of numbers"),
    (
        "option",
        "torchvision.datasets.utils.extract_archive",
        "transforms in torchvision.transforms may be named",
    ),
    ("option", "torchvision.datasets.utils.pickle.load", "transforms in torchvision.transforms may be named"),
]


@pytest.mark.parametrize(("kind", "name", "reason"), OF_OTHERS)
def test_of_well_known_packages_only_places_are_open(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline], kind: str, name: str, reason: str
) -> None:
    """They hold functions that extract, unpickle, download and write. `check` and a run refuse these names,
    before anything is imported.
    """
    trusted("torchvision, torchaudio, timm, numpy, torchvision.datasets.utils")
    imported = set(sys.modules)
    with pytest.raises(UntrustedError, match=reason):
        import_trusted(name, build._REQUIREMENTS_BY_KIND.get(kind))
    folder = "data={torchvision.datasets.ImageFolder: {root: ., loader: {ref: NAME}}}"
    with pytest.raises(PipelineError, match=reason):
        pipeline((folder if kind == "option" else f"{kind}=NAME").replace("NAME", name))
    assert not {module for module in set(sys.modules) - imported if module.partition(".")[0] in name}


def test_transforms_of_torchvision_may_transform_batches(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline]
) -> None:
    trusted("torchvision")
    pipeline("batch={transform: {torchvision.transforms.v2.MixUp: {num_classes: 3}}}")
    with pytest.raises(PipelineError, match=r"only the transforms in torchvision\.transforms may"):
        pipeline("batch={transform: torchvision.io.write_file}")


PACKAGE = {
    "__init__": "",
    "models/__init__": "from .net import Net, net\nfrom .net import load",
    "models/net": """
from torch import nn
from pickle import load
class Net(nn.Linear):
    def __init__(self): super().__init__(1, 1)
def net() -> nn.Module: return Net()
""",
    "datasets/__init__": "from .folder import *\nfrom .utils import *\nfrom subprocess import Popen",
    "datasets/folder": """
from torch.utils.data import Dataset
class ImageFolder(Dataset):
    def __init__(self, transform): self.transform = transform
    def __getitem__(self, index): raise IndexError
    def __len__(self): return 0
""",
    "datasets/utils": "import pickle\nclass Archive: ...\ndef extract_archive(path): ...",
    "transforms/__init__": "from .some import Some",
    "transforms/some": "import enum\nclass Some(enum.Enum): ONE = 1",
}


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with that name, built as it is: public names in front, and what defines them behind."""
    for name, text in PACKAGE.items():
        file = tmp_path / "site" / "torchvision" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("torchvision")}
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("torchvision")
def test_a_run_judges_what_stands_at_an_open_place(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline]
) -> None:
    """What a package defines elsewhere is had by its public name; what comes from elsewhere is not."""
    trusted("torchvision.models,torchvision.transforms,torchvision.datasets.ImageFolder")
    for name in ("net", "Net"):
        loaded = pipeline(f"model=torchvision.models.{name}")
        assert type(build.build_model(loaded)).__name__ == "Net"
    option = "{ref: torchvision.transforms.Some.ONE}"
    data, _ = build.build_datasets(
        pipeline(f"data={{torchvision.datasets.ImageFolder: {{transform: {option}}}}}")
    )
    assert vars(data)["transform"].name == "ONE"
    with pytest.raises(PipelineError, match="Python's own library is never trusted"):
        build.build_model(pipeline("model=torchvision.models.load"))
    trusted("torchvision")
    for name, reason in (
        ("Popen", "is subprocess.Popen: Python's own"),
        ("Archive", "expected a Dataset class"),
    ):
        with pytest.raises(PipelineError, match=reason):
            build.build_datasets(pipeline(f"data=torchvision.datasets.{name}"))


LEADING_ELSEWHERE = [
    *("shell", "same_shell", "imported_shell", "star_shell", "run", "execute", "opener", "popen", "shown"),
    *("partial_shell", "os.system", "lab_parts.os.system", "lab_parts.star_shell", "nn.Module.compile"),
    *("__builtins__.eval", "Net.__init__.__globals__", "Net.runs", "Net.save", "Net.forward", "Derived.save"),
    *("Net.compile", "Net.compile_it", "Derived.compile", "subprocess.Popen", "logging.os.system"),
]


@pytest.mark.parametrize("name", LEADING_ELSEWHERE)
def test_a_run_judges_where_a_name_leads(trusted: Callable[[str], None], name: str) -> None:
    """Through aliases, imports, bases and methods, before anything is called."""
    trusted(f"{LAB}, {LAB}_parts, torch")
    with pytest.raises(UntrustedError):
        import_trusted(f"{LAB}.{name}", build._REQUIREMENTS_BY_KIND["mutate"])


def test_check_refuses_nothing_that_a_run_takes(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline]
) -> None:
    """Of all names that lead into the package, at any depth up to two."""
    trusted(f"{LAB}, {LAB}_parts, torch")
    names = [
        *vars(lab),
        *(f"{first}.{second}" for first, found in vars(lab).items() for second in dir(found)),
    ]
    names = [name for name in names if "__" not in name]
    taken = 0
    for name in names:
        try:
            import_trusted(f"{LAB}.{name}", build._REQUIREMENTS_BY_KIND["model"])
        except UntrustedError:
            continue
        taken += 1
        pipeline(f"model={LAB}.{name}")
    assert taken >= 10
    assert len(names) > 500


def test_check_imports_nothing(tmp_path: Path) -> None:
    """It judges the name as it is written."""
    (tmp_path / "lab_here.py").write_text("raise SystemExit('imported')\nimport os\n")
    (tmp_path / "p.yaml").write_text(TEXT.replace("{model}", "lab_here.os.system"))
    done = subprocess.run(
        [sys.executable, "-m", "ddprun", "check", "p.yaml"],
        cwd=tmp_path,
        env={"PATH": "", TRUST_VARIABLE: "./lab_here"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_variable_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline is then as trusted as a script."""
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    assert import_trusted(f"{LAB}.shell", build._REQUIREMENTS_BY_KIND["model"]).__module__ == "posix"


@pytest.mark.parametrize("packages", ["", " , "])
def test_an_empty_list_trusts_nothing(trusted: Callable[[str], None], packages: str) -> None:
    """Set but empty: only what is built in, and torch's own by their short names."""
    trusted(packages)
    with pytest.raises(UntrustedError) as caught:
        import_trusted(f"{LAB}.Net")
    assert caught.value.allowed == "DDPRUN_TRUSTED is empty, so only what is built in may be named"
    assert make_stack(["fp16", {"hierarchical": {"across": ["int8"]}}]).names == ("fp16", "hierarchical")


def test_built_in_and_torchs_own_are_always_allowed(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline]
) -> None:
    """Models, data, losses, optimizers and schedules by their short names need no trust."""
    trusted("")
    loaded = pipeline("schedule={StepLR: {step_size: 5}}", "loss=mse")
    model = build.build_model(loaded)
    optimizer = build_optimizer(loaded, model, build_turns(loaded, model))
    assert build_schedule(loaded, "schedule", loaded.pipeline.schedule, optimizer, 5) is not None
    assert build.build_loss(loaded) is not None


@pytest.mark.parametrize(
    "override",
    [
        "model=os.system",
        "model={os.system: {command: 'true'}}",
        "data=os.system",
        "data={train: os.system}",
        "loss=os.system",
        "optimizer=os.system",
        "schedule=os.system",
        "hooks=[os.system]",
        "hooks=[{hierarchical: {across: [os.system]}}]",
        "stages=[{train: {steps: 1, mutate: os.system}}]",
        "stages=[{train: {steps: 1, hooks: [os.system]}}]",
        "stages=[{forward: {steps: 1, update: os.system}}]",
        "stages=[{evaluate: {metrics: [os.system]}}]",
    ],
)
def test_check_refuses_by_name_wherever_a_name_may_stand(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline], override: str
) -> None:
    """Without importing anything, with the place in the file and what is allowed."""
    pipeline(override)
    trusted("mylab.nets,torchvision")
    with pytest.raises(PipelineError) as caught:
        pipeline(override)
    (fault,) = caught.value.faults
    assert fault.place.source.name == "--set 1"
    assert fault.place.line == 1
    assert fault.problem == '"os.system" may not be imported: Python\'s own library is never trusted'
    assert fault.allowed == "DDPRUN_TRUSTED allows mylab.nets, torchvision"


@pytest.mark.parametrize(
    ("override", "make"),
    [
        ("model={tests.security.lab.computed_shell: {command: 'touch ran'}}", build.build_model),
        ("data={tests.security.lab.computed_shell: {command: 'touch ran'}}", build.build_datasets),
        ("loss=tests.security.lab.computed_shell", build.build_loss),
        (
            "optimizer=tests.security.lab.computed_shell",
            lambda loaded: build_optimizer(loaded, net := nn.Linear(1, 1), build_turns(loaded, net)),
        ),
        (
            "hooks=[{tests.security.lab.computed_shell: {command: 'touch ran'}}]",
            lambda loaded: build_hook_stack(loaded, "hooks", loaded.pipeline.hooks),
        ),
    ],
)
def test_a_run_refuses_what_a_trusted_name_leads_to(
    trusted: Callable[[str], None],
    pipeline: Callable[..., LoadedPipeline],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    make: Callable[[LoadedPipeline], Any],
) -> None:
    """After the import and before the call, as a fault with its place."""
    monkeypatch.chdir(tmp_path)
    trusted(LAB)
    with pytest.raises(PipelineError) as caught:
        make(pipeline(override))
    (fault,) = caught.value.faults
    assert fault.place.source.name == "--set 1"
    assert "Python's own library is never trusted" in fault.message
    assert "DDPRUN_TRUSTED allows tests.security.lab" in fault.message
    assert not (tmp_path / "ran").exists()


def test_hooks_are_judged_outside_of_pipelines_too(trusted: Callable[[str], None]) -> None:
    """`ddprun_hooks.register` in a script goes through the same judgement."""
    trusted(LAB)
    assert make_hook(f"{LAB}.Scaled") is not None
    for name in ("Net", "shell", "Process"):
        with pytest.raises(HookSetupError, match=f'"{LAB}.{name}" is'):
            make_stack([f"{LAB}.{name}"])


def test_installed_hooks_are_judged_by_their_target(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an entry point leads to decides, in `check` by its name and in a run by what it is."""
    points = [
        EntryPoint("good", f"{LAB}:Scaled", "ddprun.hooks"),
        EntryPoint("evil", f"{LAB}:shell", "ddprun.hooks"),
        EntryPoint("foreign", "no_such_package:Hook", "ddprun.hooks"),
    ]

    monkeypatch.setattr(installing, "_all_entry_points", lambda: EntryPoints(points))
    installing.installed_entry_points.cache_clear()
    try:
        trusted(LAB)
        assert make_hook("good") is not None
        with pytest.raises(HookSetupError, match="own library"):
            make_hook("evil")
        with pytest.raises(PipelineError, match=r"\(no_such_package\.Hook\) may not be imported"):
            pipeline("hooks=[foreign]")
        assert pipeline("hooks=[good]").pipeline.hooks[0].source == "installed"
    finally:
        installing.installed_entry_points.cache_clear()


@pytest.mark.parametrize(
    "packages", ["os.", "my lab", "*", "a..b", "-x", "lab;os", ".", "./", "../lab", "lab/nets"]
)
def test_a_setting_that_cannot_be_read_is_a_fault(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline], packages: str
) -> None:
    """A mistake in the setting never opens the door."""
    trusted(packages)
    with pytest.raises(TrustSettingError):
        read_trust_policy()
    with pytest.raises(TrustSettingError):
        import_trusted(f"{LAB}.Net")
    with pytest.raises(PipelineError, match=r"^DDPRUN_TRUSTED: .* is not a package; write packages"):
        pipeline()


def test_the_pipelines_folder_holds_only_what_is_listed(tmp_path: Path) -> None:
    """A listed package that is not installed, and what an installed one would import if it were there, is not
    taken from a stranger's folder: only what is named for that folder.
    """
    (tmp_path / "mylab.py").write_text("import builtins\nbuiltins.ran.append('mylab')\n")
    (tmp_path / "optional.py").write_text("import builtins\nbuiltins.ran.append('optional')\n")
    program = (
        "import builtins, pathlib, sys\n"
        "from ddprun.host.code_folders import add_import_folder\n"
        "builtins.ran = []\n"
        "folder = pathlib.Path(sys.argv[1]).parent\n"
        "for _ in range(2): add_import_folder(folder)\n"
        "for name in ('mylab', 'optional'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: pass\n"
        "print(*builtins.ran)\n"
    )
    for packages, ran in (
        ("./mylab.nets,torchvision", "mylab"),
        ("mylab.nets,optional", ""),
        ("", ""),
        (None, "mylab optional"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, str(tmp_path / "p.yaml")],
            env={"PATH": "", **({} if packages is None else {TRUST_VARIABLE: packages})},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == ran


@pytest.mark.parametrize("module", ["mylab.py", "mylab/__init__.py", "mylab/nets.py"])
def test_a_listed_package_is_not_taken_from_the_folder(tmp_path: Path, module: str) -> None:
    """A run says how the one in the folder is named."""
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("raise SystemExit('imported')\n")
    (tmp_path / "p.yaml").write_text(TEXT.replace("{model}", "mylab.nets.Net"))
    done = subprocess.run(
        [sys.executable, "-m", "ddprun", "p.yaml"],
        cwd=tmp_path,
        env={"PATH": "", TRUST_VARIABLE: "mylab.nets,torchvision"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        'p.yaml:2:8: model: no module is named "mylab"; names are looked up among installed packages, then '
        f"in {tmp_path}, there only what DDPRUN_TRUSTED lists as ./package"
    )


def test_a_package_that_is_named_for_the_folder_is_had(
    trusted: Callable[[str], None], pipeline: Callable[..., LoadedPipeline]
) -> None:
    trusted("./lab_of_mine, torchvision")
    assert pipeline("model=lab_of_mine.Net").pipeline.model.source == "dotted"
    with pytest.raises(PipelineError, match=r'"lab" is not trusted; .*allows \./lab_of_mine, torchv'):
        pipeline("model=lab.Net")


def test_nothing_untrusted_is_imported(tmp_path: Path) -> None:
    """The root package is judged before the import: a module's own code does not run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "p.yaml").write_text(TEXT.replace("{model}", "evil.Net"))
    done = subprocess.run(
        [sys.executable, "-m", "ddprun", "p.yaml"],
        cwd=tmp_path,
        env={"PATH": "", TRUST_VARIABLE: "mylab"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    expected = (
        'p.yaml:2:8: model: "evil.Net" may not be imported: "evil" is not trusted; DDPRUN_TRUSTED allows'
    )
    assert done.stderr.startswith(expected), done.stderr
