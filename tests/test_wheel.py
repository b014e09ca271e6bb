"""The wheel holds all that a run needs: it is built, installed and used away from the source."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def succeed(*command: str | Path, cwd: Path) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_the_quickstart_runs_from_the_wheel(tmp_path: Path) -> None:
    """In an environment that has ddprun's dependencies and nothing of its source."""
    succeed(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("ddprun-*.whl")
    made = tmp_path / "env"
    venv.create(made, with_pip=True)
    python = made / "bin" / "python"
    succeed(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # Of this environment the packages, and no .pth file: the one for the source among them.
    (site,) = made.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    where = succeed(python, "-c", "import ddprun, ddprun_hooks; print(ddprun.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(made)
    (pipelines,) = site.glob("ddprun/pipelines")
    shipped = {path.name for path in (ROOT / "pipelines").iterdir()} - {"__pycache__"}
    assert {path.name for path in pipelines.iterdir()} - {"__pycache__"} == shipped
    command = made / "bin" / "ddprun"
    run = succeed(command, pipelines / "quickstart.yaml", "--set=stages[0].train.epochs=2", cwd=tmp_path)
    page = succeed(command, "report", run.strip(), cwd=tmp_path)
    assert (tmp_path / page.splitlines()[0]).stat().st_size > 100_000
    needs = 'import importlib.metadata as m; print(*m.requires("ddprun") or (), sep="\\n")'
    declared = succeed(python, "-c", needs, cwd=tmp_path)
    assert all(f"{name}>=" in declared for name in ("torch", "pydantic", "click", "structlog", "pyyaml"))
