"""`ddprun submit`: what would be sent, and what cannot be."""

import subprocess
from pathlib import Path

import pytest

from tests.ranks import Finished, ddprun

PIPELINE = """
name: digits
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: {sgd: {lr: 0.1}}
launch: {nproc_per_node: 2}
"""


def dry(folder: Path, *options: str, more: str = "") -> Finished:
    """The script for a pipeline."""
    (folder / "p.yaml").write_text(PIPELINE + more)
    return ddprun("submit", "p.yaml", "--to", "slurm", "--dry-run", *options, cwd=folder)


def directives(script: str) -> dict[str, str | bool]:
    """The options that sbatch reads in it."""
    found: dict[str, str | bool] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH --"):
            name, is_value, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value if is_value else True
    return found


def test_a_dry_run_prints_what_would_be_sent(tmp_path: Path) -> None:
    """From `launch` alone: one task on each host, a checkpoint before time is up, and queued again."""
    done = dry(tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert directives(done.stdout) == {
        "job-name": "digits",
        "nodes": "1",
        "ntasks-per-node": "1",
        "output": f"{tmp_path}/runs/digits/slurm-%j.out",
        "open-mode": "append",
        "signal": "USR1@120",
        "requeue": True,
    }
    assert f'run {tmp_path}/p.yaml --run-dir "$run"\n' in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "p.yaml"], "nothing is made"
    checked = subprocess.run(["sh", "-n"], input=done.stdout, text=True, check=False, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_every_key_becomes_an_option(tmp_path: Path) -> None:
    """And any other one of sbatch's is passed on."""
    keys = "{nodes: 4, gpus: 8, cpus: 32, time: 1-12:00:00, partition: long, account: lab, image: me/app:2, "
    done = dry(
        tmp_path, "--set", "seed=7", more=f"slurm: {keys}options: {{mem: 64G, exclusive: true, nice: 5}}}}\n"
    )
    assert done.code == 0, done.stderr
    found = directives(done.stdout)
    assert {name: found[name] for name in ("nodes", "gpus-per-node", "cpus-per-task", "time")} == {
        "nodes": "4",
        "gpus-per-node": "8",
        "cpus-per-task": "32",
        "time": "1-12:00:00",
    }
    assert (found["partition"], found["account"], found["mem"]) == ("long", "lab", "64G")
    assert (found["exclusive"], found["nice"]) == (True, "5")
    assert (
        "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --container-image=me/app:2 ddprun"
        in done.stdout
    )
    assert "--set seed=7" in done.stdout


def test_a_job_that_shall_not_come_back_is_just_run(tmp_path: Path) -> None:
    """Nothing of the script stands between Slurm and ddprun then."""
    done = dry(tmp_path, more="slurm: {warn_s: 0}\n")
    assert directives(done.stdout)["no-requeue"] is True
    assert "signal" not in directives(done.stdout)
    assert done.stdout.splitlines()[-1].startswith("exec srun ")
    assert "scontrol" not in done.stdout


@pytest.mark.parametrize(
    ("slurm", "told"),
    [
        ("{time: soon}", 'slurm.time: "soon" is no time; minutes, "HH:MM:SS", "D-HH" or "D-HH:MM:SS"'),
        ("{options: {time: 5}}", 'slurm.options.time: "time" is set by ddprun; write slurm.time'),
        ("{options: {gres: 'gpu:2'}}", '"gres" is set by ddprun; write slurm.gpus'),
        ("{options: {-N: 2}}", '"-N" is no long option of sbatch'),
        ('{options: {comment: "a\\n#SBATCH --uid=0"}}', "cannot hold quotes, backslashes or line ends"),
        ('{options: {mem: "64G\\n"}}', "cannot hold quotes, backslashes or line ends"),
        ("{partition: 'a b'}", "slurm.partition"),
        ("{nodes: 0}", "slurm.nodes: must be greater than 0, got 0"),
        ("{gpu: 2}", 'unknown key "gpu"'),
    ],
)
def test_bad_values_are_faults_of_the_file(tmp_path: Path, slurm: str, told: str) -> None:
    """With their place, and what is allowed."""
    done = dry(tmp_path, more=f"slurm: {slurm}\n")
    assert (done.code, done.stdout) == (2, "")
    assert told in done.stderr
    assert "p.yaml:7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_secret_does_not_get_into_a_script(tmp_path: Path) -> None:
    """It would stand in the job's script, which others may read."""
    done = dry(tmp_path, "--set", "data={mine.Data: {api_token: hunter2hunter2}}")
    assert done.code == 2
    assert "holds a secret" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    """And how to see the script."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = ddprun("submit", "p.yaml", "--to", "slurm", cwd=tmp_path, environment={"PATH": str(tmp_path)})
    assert done.code == 2
    assert "sbatch is not installed here; --dry-run prints the script" in done.stderr
