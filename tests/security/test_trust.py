"""`DDPRUN_TRUSTED`: what is not listed is neither imported nor called, under whatever name it goes."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.engine import build
from ddprun.spec import Loaded, PipelineError, choices, load
from ddprun_hooks import HookSetupError, registry
from ddprun_hooks.dotted import import_dotted
from ddprun_hooks.registry import make_hook, make_stack
from ddprun_hooks.trust import VARIABLE, TrustSettingError, UntrustedError, trust

LAB = "tests.security.lab"
TEXT = """
model: {model}
data: digits
optimizer: sgd
"""


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the limit."""
    return lambda packages: monkeypatch.setenv(VARIABLE, packages)


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., Loaded]:
    """Load a pipeline with some keys replaced."""

    def from_keys(*overrides: str) -> Loaded:
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
        ("torch.load", "of torch only torch.nn"),
        ("torch.hub.load", "of torch only torch.nn"),
        ("torch.serialization.load", "of torch only torch.nn"),
        ("torch.jit.load", "of torch only torch.nn"),
        ("torch.utils.cpp_extension.load_inline", "of torch only torch.nn"),
        ("torch.distributed.run.main", "of torch only torch.nn"),
        ("torch.nn.functional.torch.load", "is the module torch"),
        ("torch.nn.modules.module.warnings.sys.exit", "is the module warnings"),
        ("torch.nn.functional.boolean_dispatch", "is torch._jit_internal.boolean_dispatch"),
        ("torch.nn.Linear.__init__.__globals__", "__"),
        ("numpy.load", '"numpy" is not trusted'),
        (f"{LAB}.shell", "is posix.system"),
        (f"{LAB}.run", "is subprocess.run"),
        (f"{LAB}.execute", "is builtins.exec"),
        (f"{LAB}.partial_shell", "is posix.system"),
        (f"{LAB}.opener", "own library"),
        (f"{LAB}.popen", "is subprocess.Popen"),
        (f"{LAB}.caller", "is operator.methodcaller"),
        (f"{LAB}.joined", "is builtins.str.join"),
        (f"{LAB}.log", "is logging.Logger.info"),
        (f"{LAB}.logger", "is logging.Logger"),
        (f"{LAB}.shown", "is posix.system"),
        (f"{LAB}.listed", "is builtins.list"),
        (f"{LAB}.number", "is builtins.int"),
        (f"{LAB}.wrapped_shell", "is posix.system"),
        (f"{LAB}.os.system", "is the module os"),
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
        import_dotted(name, build._WANTED["model"])


@pytest.mark.parametrize(
    "name",
    ["Net", "make_net", "made_once", "wrapped_net", "partial_net", "Net.small"],
)
def test_what_a_trusted_package_offers_is_had(trusted: Callable[[str], None], name: str) -> None:
    """Classes, functions, partials, decorated and cached functions and class methods of the package's own."""
    trusted(LAB)
    assert isinstance(import_dotted(f"{LAB}.{name}", build._WANTED["model"])(), nn.Module)


def test_a_single_object_may_be_listed(trusted: Callable[[str], None]) -> None:
    """A prefix goes down to one class; what stands beside it is refused."""
    trusted(f"{LAB}.Net")
    assert import_dotted(f"{LAB}.Net").__name__ == "Net"
    with pytest.raises(UntrustedError, match="may not be imported: it is not trusted"):
        import_dotted(f"{LAB}.make_net")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("data", "torch.utils.data.TensorDataset", "torch.nn.Linear"),
        ("loss", "torch.nn.functional.mse_loss", "torch.optim.SGD"),
        ("optimizer", "torch.optim.SGD", "torch.nn.Linear"),
        ("schedule", "torch.optim.lr_scheduler.StepLR", "torch.nn.Linear"),
        ("metric", "torch.nn.functional.mse_loss", "torch.nn.Linear"),
        ("mutate", "torch.nn.utils.parameters_to_vector", "torch.nn.Linear"),
        ("update", "torch.nn.utils.parameters_to_vector", "torch.nn.Linear"),
    ],
)
def test_each_kind_takes_its_own(trusted: Callable[[str], None], kind: str, good: str, bad: str) -> None:
    """What is no dataset, optimizer, … is refused before it is called."""
    trusted("torch")
    import_dotted(good, build._WANTED[kind])
    with pytest.raises(UntrustedError):
        import_dotted(bad, build._WANTED[kind])


def test_without_the_variable_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline is then as trusted as a script."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert import_dotted(f"{LAB}.shell", build._WANTED["model"]).__module__ == "posix"


@pytest.mark.parametrize("packages", ["", " , "])
def test_an_empty_list_trusts_nothing(trusted: Callable[[str], None], packages: str) -> None:
    """Set but empty: only what is built in, and torch's own by their short names."""
    trusted(packages)
    with pytest.raises(UntrustedError) as caught:
        import_dotted(f"{LAB}.Net")
    assert caught.value.allowed == "DDPRUN_TRUSTED is empty, so only what is built in may be named"
    assert make_stack(["fp16", {"hierarchical": {"across": ["int8"]}}]).names == ("fp16", "hierarchical")


def test_built_in_and_torchs_own_are_always_allowed(
    trusted: Callable[[str], None], pipeline: Callable[..., Loaded]
) -> None:
    """Models, data, losses, optimizers and schedules by their short names need no trust."""
    trusted("")
    loaded = pipeline("schedule={StepLR: {step_size: 5}}", "loss=mse")
    model = build.build_model(loaded)
    optimizer = build.build_optimizer(loaded, model)
    assert build.build_schedule(loaded, "schedule", loaded.pipeline.schedule, optimizer, 5) is not None
    assert build.build_loss(loaded, torch.device("cpu")) is not None


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
    trusted: Callable[[str], None], pipeline: Callable[..., Loaded], override: str
) -> None:
    """Without importing anything, with the place in the file and what is allowed."""
    pipeline(override)
    trusted("mylab.nets,torchvision")
    with pytest.raises(PipelineError) as caught:
        pipeline(override)
    (fault,) = caught.value.faults
    assert fault.file == "--set 1"
    assert fault.line == 1
    assert fault.problem == '"os.system" may not be imported: Python\'s own library is never trusted'
    assert fault.allowed == "DDPRUN_TRUSTED allows mylab.nets, torchvision"


@pytest.mark.parametrize(
    ("override", "make"),
    [
        ("model={tests.security.lab.shell: {command: 'touch ran'}}", build.build_model),
        ("data={tests.security.lab.shell: {command: 'touch ran'}}", build.build_data),
        ("loss=tests.security.lab.shell", lambda loaded: build.build_loss(loaded, torch.device("cpu"))),
        (
            "optimizer=tests.security.lab.shell",
            lambda loaded: build.build_optimizer(loaded, nn.Linear(1, 1)),
        ),
        (
            "hooks=[{tests.security.lab.shell: {command: 'touch ran'}}]",
            lambda loaded: build.build_stack(loaded, "hooks", loaded.pipeline.hooks),
        ),
    ],
)
def test_a_run_refuses_what_a_trusted_name_leads_to(
    trusted: Callable[[str], None],
    pipeline: Callable[..., Loaded],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    make: Callable[[Loaded], Any],
) -> None:
    """After the import and before the call, as a fault with its place."""
    monkeypatch.chdir(tmp_path)
    trusted(LAB)
    with pytest.raises(PipelineError) as caught:
        make(pipeline(override))
    (fault,) = caught.value.faults
    assert fault.file == "--set 1"
    assert '"tests.security.lab.shell" is posix.system' in fault.message
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
    trusted: Callable[[str], None], pipeline: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an entry point leads to decides, in `check` by its name and in a run by what it is."""
    points = [
        EntryPoint("good", f"{LAB}:Scaled", "ddprun.hooks"),
        EntryPoint("evil", f"{LAB}:shell", "ddprun.hooks"),
        EntryPoint("foreign", "no_such_package:Hook", "ddprun.hooks"),
    ]

    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points if name in (None, point.name)]

    for module in (registry, choices):
        monkeypatch.setattr(module, "entry_points", found)
    choices.installed_hooks.cache_clear()
    choices._installed_targets.cache_clear()
    try:
        trusted(LAB)
        assert make_hook("good") is not None
        with pytest.raises(HookSetupError, match=r"is posix\.system"):
            make_hook("evil")
        with pytest.raises(PipelineError, match=r"\(no_such_package\.Hook\) may not be imported"):
            pipeline("hooks=[foreign]")
        assert pipeline("hooks=[good]").pipeline.hooks[0].source == "installed"
    finally:
        choices.installed_hooks.cache_clear()
        choices._installed_targets.cache_clear()


@pytest.mark.parametrize("packages", ["os.", "my lab", "*", "a..b", "-x", "lab;os"])
def test_a_setting_that_cannot_be_read_is_a_fault(
    trusted: Callable[[str], None], pipeline: Callable[..., Loaded], packages: str
) -> None:
    """A mistake in the setting never opens the door."""
    trusted(packages)
    with pytest.raises(TrustSettingError):
        trust()
    with pytest.raises(TrustSettingError):
        import_dotted(f"{LAB}.Net")
    with pytest.raises(PipelineError, match=r"^DDPRUN_TRUSTED: .* is no package; write packages"):
        pipeline()


def test_the_pipelines_folder_holds_only_what_is_listed(tmp_path: Path) -> None:
    """What an installed package would import if it were there is not taken from a stranger's folder."""
    (tmp_path / "mylab.py").write_text("import builtins\nbuiltins.ran.append('mylab')\n")
    (tmp_path / "optional.py").write_text("import builtins\nbuiltins.ran.append('optional')\n")
    program = (
        "import builtins, pathlib, sys\n"
        "from ddprun.engine.beside import make_folder_importable\n"
        "builtins.ran = []\n"
        "for _ in range(2): make_folder_importable(pathlib.Path(sys.argv[1]).parent)\n"
        "for name in ('mylab', 'optional'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: pass\n"
        "print(*builtins.ran)\n"
    )
    for packages, ran in (("mylab.nets,torchvision", "mylab"), ("", ""), (None, "mylab optional")):
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, str(tmp_path / "p.yaml")],
            env={"PATH": "", **({} if packages is None else {VARIABLE: packages})},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == ran


def test_nothing_untrusted_is_imported(tmp_path: Path) -> None:
    """The root package is judged before the import: a module's own code does not run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "p.yaml").write_text(TEXT.replace("{model}", "evil.Net"))
    done = subprocess.run(
        [sys.executable, "-m", "ddprun", "p.yaml"],
        cwd=tmp_path,
        env={"PATH": "", VARIABLE: "mylab"},
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
