"""Folders from which libraries load code: nobody else may put any there."""

import getpass
import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun.host.code_folders import UnsafeFolderError, private_code_caches
from tests.ranks import ddprun

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "ddprun")
PIPELINE = """
model: noted.Net
data: digits
loader: {batch_size: 8}
optimizer: {adamw: {lr: 0.01}}
launch: {nproc_per_node: 1, device: cpu, preload: [noted]}
stages: [{train: {steps: 1}}]
"""
# Torch's own answers, asked where a pipeline's code is imported.
NOTED = """
import json, os, stat, tempfile
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

def mode(folder):
    return stat.S_IMODE(os.lstat(folder).st_mode)

noted = {
    "kernels": cache_dir(), "triton": triton_cache_dir(0), "others": os.path.dirname(default_cache_dir()),
}
noted["modes"] = [mode(noted["kernels"]), mode(noted["triton"]), mode(tempfile.gettempdir())]
with open("noted.json", "w") as file:
    json.dump(noted, file)

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user whose temporary folder is everybody's, with torch's folder planted there by another one."""
    for name in ("shared/torchinductor_" + getpass.getuser(), "cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / f"torchinductor_{getpass.getuser()}").chmod(0o777)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    (tmp_path / "noted.py").write_text(NOTED)
    empty = dict.fromkeys((*VARIABLES, "TORCH_EXTENSIONS_DIR"), "")
    return {"TMPDIR": f"{tmp_path}/shared", "XDG_CACHE_HOME": f"{tmp_path}/cache", **empty}


@pytest.mark.parametrize(
    ("command", "module"), [(["p.yaml"], ()), (["p.yaml"], TORCHRUN), (["explain", "p.yaml"], ())]
)
def test_torch_looks_into_folders_of_this_user_only(
    tmp_path: Path, environment: dict[str, str], command: list[str], module: tuple[str, ...]
) -> None:
    """Kernels stay for the next run; what goes below the temporary folder whatever is set is gone with this
    one, and nobody can guess its name.
    """
    done = ddprun(*command, cwd=tmp_path, environment=environment, module=module)
    assert done.code == 0, done.stderr
    noted = json.loads((tmp_path / "noted.json").read_text())
    assert noted["kernels"] == f"{tmp_path}/cache/ddprun/inductor"
    assert noted["triton"] == f"{tmp_path}/cache/ddprun/triton"
    assert noted["modes"] == [0o700] * 3
    assert Path(noted["others"]) != tmp_path / "shared"
    assert not Path(noted["others"]).exists()
    planted = tmp_path / "shared" / f"torchinductor_{getpass.getuser()}"
    assert list(planted.iterdir()) == []


@pytest.mark.parametrize("module", [(), TORCHRUN])
def test_a_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, environment: dict[str, str], module: tuple[str, ...]
) -> None:
    """Before the pipeline's code is imported, in one line."""
    planted = f"{tmp_path}/shared/torchinductor_{getpass.getuser()}"
    environment["TORCHINDUCTOR_CACHE_DIR"] = planted
    done = ddprun("p.yaml", cwd=tmp_path, environment=environment, module=module)
    assert done.code == (1 if module else 2)  # torchrun's own code for a rank's failure
    said = [line for line in done.stderr.splitlines() if line.startswith("ddprun: ")]
    assert said == [
        f"ddprun: {planted} can be written by other users, and libraries load code from it: remove it, or "
        "set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write"
    ]
    assert not (tmp_path / "noted.json").exists()


@pytest.fixture
def scratch(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process with that user's environment, and a folder of its own."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "scratch").mkdir(mode=0o700)
    return tmp_path / "scratch"


def test_a_prediction_looks_there_too(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddprun tune`, and predictions of `explain`, build the model themselves."""
    monkeypatch.chdir(tmp_path)
    explain(load(tmp_path / "p.yaml"))
    monkeypatch.delitem(sys.modules, "noted")
    noted = json.loads((tmp_path / "noted.json").read_text())
    assert noted["kernels"] == f"{tmp_path}/cache/ddprun/inductor"
    assert noted["triton"] == f"{tmp_path}/cache/ddprun/triton"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""


def test_sockets_fit_into_the_temporary_folder(scratch: Path) -> None:
    """Loading workers open some, whose names have 107 bytes at most."""
    deep = scratch / ("d" * 72)
    deep.mkdir()
    with private_code_caches(deep):
        folder = Path(tempfile.gettempdir())
        assert len(str(folder)) <= 72
        assert folder.parent.name.startswith("ddprun-launch-"), "which is removed after a kill, too"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.parent.exists()


def refusal(scratch: Path) -> str:
    """Why the folders are refused."""
    with pytest.raises(UnsafeFolderError) as caught, private_code_caches(scratch):
        pass
    return str(caught.value)


@pytest.mark.parametrize("name", ["cache/ddprun", "cache/ddprun/inductor", "cache/ddprun/triton"])
@pytest.mark.parametrize("what", ["link", "file", "mode", "owner"])
def test_what_stands_in_a_folders_place_is_refused(
    tmp_path: Path, scratch: Path, name: str, what: str
) -> None:
    place, elsewhere = tmp_path / name, tmp_path / "elsewhere"
    place.parent.mkdir(exist_ok=True)
    elsewhere.mkdir()
    if what == "link":
        place.symlink_to(elsewhere)
    elif what == "file":
        place.touch()
    else:
        place.mkdir(mode=0o700)
    if what == "mode":
        place.chmod(0o720)
    if what == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(place, 65534, 65534)
    problem = {
        "link": "is a link",
        "file": "is not a folder",
        "mode": "can be written by other users",
        "owner": "belongs to another user",
    }
    assert refusal(scratch).startswith(f"{place} {problem[what]}, and libraries load code")


@pytest.mark.parametrize("variable", [*VARIABLES, "TORCH_EXTENSIONS_DIR"])
def test_what_the_user_has_set_is_judged_and_kept(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A relative path keeps its meaning when the working directory changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "mine")
    with private_code_caches(scratch):
        assert os.environ[variable] == f"{tmp_path}/mine"
    (tmp_path / "mine").chmod(0o777)
    assert f"set {variable} to a folder" in refusal(scratch)
    assert os.environ[variable] == "mine"


@pytest.mark.parametrize("home", ["a file", "/proc/1/nowhere", "", "~"])
def test_without_a_home_they_are_gone_with_the_run(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """As in a container whose user has none."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/{home}" if home == "a file" else home)
    monkeypatch.setenv("HOME", home if home == "~" else f"{tmp_path}/a file")  # of an unknown user ~ stays ~
    monkeypatch.chdir(tmp_path)
    with private_code_caches(scratch):
        for variable in VARIABLES:
            folder = Path(os.environ[variable])
            assert folder.parent == scratch
            assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(scratch)
