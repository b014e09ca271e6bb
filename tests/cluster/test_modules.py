"""Modules beside a pipeline's file: `submit` names those that do not travel, or takes them along."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddprun_hooks.config.trust import TRUST_VARIABLE
from tests.cluster.test_kubernetes import check
from tests.ranks import Finished, ddprun_here

PIPELINE = """
name: mine
model: {nets.unet.Unet: {depth: 3}}
data: {train: samples.Samples, evaluate: {json.loads: {s: "[]"}}}
loss: numpy.mean
optimizer: {sgd: {lr: 0.1}}
hooks: [{hierarchical: {across: [shrink.Shrunk]}}]
stages: [{train: {steps: 3}}, {evaluate: {metrics: [elsewhere.f1]}}]
"""
FILES = {
    "nets/__init__.py": b"",
    "nets/unet.py": b"from .blocks import Block\nimport helper.text as text, torch\n",
    "nets/blocks.py": b"",
    "nets/table.bin": bytes(range(256)),
    "helper.py": b"def f():\n    from shared import g\n",
    "shared.py": b"import helper\n",
    "samples.py": b"Samples = [",  # no Python at all: whoever imports it will say so
    "shrink.py": b"import numpy\n",
}
OTHERS = {
    "numpy.py": b"",  # is installed, so Python takes that one
    "json/__init__.py": b"",
    "unnamed.py": b"",
    "nets/__pycache__/unet.cpython-311.pyc": b"",
    "nets/.secret": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline, modules that it needs, and others."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    for name, data in (FILES | OTHERS).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def dry(folder: Path, to: str, *options: str) -> Finished:
    return ddprun_here("submit", "p.yaml", "--to", to, "--dry-run", *options, cwd=folder)


@pytest.mark.parametrize("to", ["docker", "kubernetes"])
def test_those_that_do_not_travel_are_named(folder: Path, to: str) -> None:
    """Whether the pipeline names them or they are imported by one that it names, and with the way out."""
    done = dry(folder, to)
    assert done.code == 0, done.stderr
    names = done.stderr.partition(" has ")[2].partition(", which")[0]
    assert sorted(names.split(", ")) == ["helper", "nets", "samples", "shared", "shrink"]
    assert "--with-modules sends them" in done.stderr
    assert "shrink.py" not in done.stdout


def test_slurm_reads_the_folder_itself(folder: Path) -> None:
    """Nothing has to travel, and asking for it is an error that says so."""
    assert dry(folder, "slurm").stderr == ""
    done = dry(folder, "slurm", "--with-modules")
    assert done.code == 2
    assert f"its hosts read {folder} themselves" in done.stderr


def test_docker_puts_them_beside_the_file(folder: Path) -> None:
    """In a folder of the job's own, from which the run imports them."""
    done = dry(folder, "docker", "--with-modules", "--set", "docker.nodes=1")
    assert done.code == 0, done.stderr
    shown: list[dict[str, Any]] = list(yaml.safe_load_all(done.stdout))
    (container,) = (one["body"] for one in shown if "containers/create" in one.get("POST", ""))
    file = Path(container["Cmd"][1])
    put = {Path(path).relative_to(file.parent).as_posix() for path in shown[-1]["files"]}
    assert put == {*FILES, "p.yaml"}
    assert file.parent.name == f"{container['Hostname'].removesuffix('-0')}-files"


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_kubernetes_mounts_them_beside_the_file(folder: Path, kind: str) -> None:
    """All are in the ConfigMap, what is no text in base64, and the volume gives each its path back."""
    done = dry(folder, "kubernetes", "--with-modules", "--set", f"kubernetes.kind={kind}")
    assert done.code == 0, done.stderr
    manifests: list[dict[str, Any]] = list(yaml.safe_load_all(done.stdout))
    for manifest in manifests:
        check(manifest)
    held = {key: text.encode() for key, text in manifests[0]["data"].items()}
    held |= {key: base64.b64decode(text) for key, text in manifests[0]["binaryData"].items()}
    volumes = [one for one in _mappings(manifests) if one.get("name") == "pipeline" and "configMap" in one]
    assert volumes
    for volume in volumes:
        found = {item["path"]: held[item["key"]] for item in volume["configMap"]["items"]}
        assert found == FILES | {"pipeline.yaml": PIPELINE.encode()}


def _mappings(value: Any) -> list[dict[str, Any]]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict) else []
    return own + [found for item in items for found in _mappings(item)]


def test_what_cannot_be_taken_along(folder: Path) -> None:
    """More than a ConfigMap holds, and a secret."""
    (folder / "samples.py").write_bytes(b"#" * (900 << 10))
    done = dry(folder, "kubernetes", "--with-modules")
    assert (done.code, done.stdout) == (2, "")
    assert "--to kubernetes can send at most" in done.stderr
    assert dry(folder, "docker", "--with-modules").code == 0
    (folder / "p.yaml").write_text(PIPELINE.replace("{depth: 3}", "{api_token: '${env:TOKEN}'}"))
    (folder / "samples.py").write_text("TOKEN = 'hunter2hunter2'")
    done = ddprun_here(
        *("submit", "p.yaml", "--to", "docker", "--dry-run", "--with-modules"),
        cwd=folder,
        environment={"TOKEN": "hunter2hunter2"},
    )
    assert (done.code, done.stdout) == (2, "")
    assert "samples.py holds a secret" in done.stderr
    assert "hunter2" not in json.dumps([done.stdout, done.stderr])


def test_trust_still_judges(folder: Path) -> None:
    """What may not be imported here is refused here, and the limit holds in the job."""
    # Python's own library is never trusted.
    # And no function of numpy may be named under a limit.
    own = ("--set", "data={train: samples.Samples, evaluate: samples.Samples}", "--set", "loss=mse")
    command = ("submit", "p.yaml", "--to", "docker", "--dry-run", "--with-modules", *own)
    for trusted, code in (("torchvision", 2), ("./nets,./samples,./shrink,elsewhere", 0)):
        done = ddprun_here(*command, cwd=folder, environment={TRUST_VARIABLE: trusted})
        assert done.code == code, done.stderr
    assert f"{TRUST_VARIABLE}={trusted}" in done.stdout
