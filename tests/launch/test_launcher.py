"""Which launcher has started a process: found by the variables that each of them sets."""

import os
from pathlib import Path

import pytest

from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.launch.launcher import LauncherError, detect_launcher, first_host
from ddprun.parallel.ranks import RankEnvironment
from tests.ranks import as_processes, ddprun, end_together

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {
    **KUBEFLOW,
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
JOB = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-004],big"}
TASK_FOR_EACH_RANK = JOB | {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
TASK_FOR_EACH_HOST = JOB | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("environment", [{}, BATCH_SCRIPT, {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}])
def test_nobody_has_started_what_a_user_starts(environment: dict[str, str]) -> None:
    """Nor what a batch script of Slurm's starts, outside of srun."""
    assert detect_launcher(environment, {"nproc_per_node": "2"}) is None


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (TORCHRUN, "torchrun: rank 3 of 4"),
        (PLAIN, "a launcher that sets RANK and WORLD_SIZE: rank 1 of 2"),
        (TASK_FOR_EACH_RANK, "srun: rank 4 of 5 on 3 hosts, job 17"),
        (TASK_FOR_EACH_RANK | TORCHRUN, "torchrun: rank 3 of 4"),
        (KUBEFLOW | TORCHRUN, "torchrun: rank 3 of 4"),
        (TASK_FOR_EACH_HOST | PLAIN, "a launcher that sets RANK and WORLD_SIZE: rank 1 of 2"),
    ],
)
def test_a_rank_knows_who_has_started_it(environment: dict[str, str], told: str) -> None:
    """The innermost launcher counts: torchrun under srun, or in a pod."""
    found = detect_launcher(environment, {})
    assert found is not None
    assert (found.summary, found.starts_ranks, found.is_first) == (told, False, False)


@pytest.mark.parametrize(
    ("environment", "told", "flags"),
    [
        (KUBEFLOW, "Kubeflow Trainer's variables (PET_…): host 1 of 2", set()),
        (PYTORCHJOB, "Kubeflow Trainer's variables (PET_…): host 1 of 2", set()),
        (
            TASK_FOR_EACH_HOST,
            "srun: host 1 of 3, job 17",
            {"nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id"},
        ),
    ],
)
def test_a_host_knows_that_it_is_to_start_ranks(
    environment: dict[str, str], told: str, flags: set[str]
) -> None:
    """Then torchrun's flags may be given."""
    found = detect_launcher(environment, {"nproc_per_node": "2"})
    assert found is not None
    assert (found.summary, found.starts_ranks, found.is_first) == (told, True, False)
    assert set(found.flags) == flags


def test_srun_gives_each_task_its_place() -> None:
    """In torchrun's variables; all tasks of a step meet at one port, and two steps hardly ever at one."""
    found = detect_launcher(TASK_FOR_EACH_RANK, {})
    assert found is not None
    variables = dict(found.variables)
    port = variables.pop("MASTER_PORT")
    assert variables == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu003",
    }
    assert 15_000 <= int(port) < 30_000
    other = detect_launcher(TASK_FOR_EACH_RANK | {"SLURM_STEP_ID": "1"}, {})
    assert other is not None
    assert other.variables["MASTER_PORT"] != port


@pytest.mark.parametrize(
    ("environment", "flags", "told"),
    [
        ({"RANK": "0"}, {}, "not set: WORLD_SIZE; a rank needs RANK, WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, {}, "not set: RANK, MASTER_ADDR, MASTER_PORT; "),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"},
            {},
            "not set: MASTER_PORT; ",
        ),
        (PLAIN | {"RANK": "2"}, {}, "RANK is 2 of WORLD_SIZE 2; ranks count from 0"),
        (PLAIN | {"RANK": "-1"}, {}, "RANK is '-1'; it must be a number from 0 on"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, {}, "LOCAL_RANK is 2 of LOCAL_WORLD_SIZE 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, "LOCAL_WORLD_SIZE is 8, but WORLD_SIZE 4"),
        (
            TORCHRUN,
            {"nproc_per_node": "2"},
            "torchrun has started this process as one rank, so --nproc-per-node has no effect",
        ),
        (TASK_FOR_EACH_RANK, {"rdzv_endpoint": "a:1"}, "so --rdzv-endpoint has no effect"),
        (
            TASK_FOR_EACH_RANK | PLAIN | {"WORLD_SIZE": "5"},
            {},
            "RANK is 1, but srun says SLURM_PROCID=4; leave RANK out",
        ),
        (TASK_FOR_EACH_RANK | {"SLURM_PROCID": "5"}, {}, "srun's variables contradict each other"),
        (TASK_FOR_EACH_RANK | {"SLURM_STEP_NUM_NODES": "2"}, {}, "SLURM_NODEID=2 of SLURM_STEP_NUM_NODES=2"),
        (KUBEFLOW | {"PET_NODE_RANK": "x"}, {}, "PET_NODE_RANK is 'x'; it must be a number from 0 on"),
    ],
)
def test_contradictions_are_errors(environment: dict[str, str], flags: dict[str, str], told: str) -> None:
    """Each says which variables, what they are, and what is allowed."""
    with pytest.raises(LauncherError) as caught:
        detect_launcher(environment, dict(flags))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0"),
        ("node[0-1]", "node0"),
        ("gpu[003-005,9],login", "gpu003"),
        ("rack[1-2]-gpu,login", "rack1-gpu"),
        ("a.example.org", "a.example.org"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    """The leading zeros are part of the name."""
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-2]", "node[", ","])
def test_what_is_no_list_of_hosts_is_refused(nodes: str) -> None:
    """It says which variable has it."""
    with pytest.raises(LauncherError, match="SLURM_STEP_NODELIST is"):
        first_host(nodes)


def local_ranks_found(missing: list[str]) -> tuple[int, int]:
    """This rank's number on its host, of how many, where a launcher does not set these variables."""
    for name in missing:
        del os.environ[name]
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), 60.0, FailureContext())
    ranks.connect_store()
    end_together(ranks)
    return ranks.environment.local_rank, ranks.environment.local_world_size


@pytest.mark.parametrize(
    "missing", [["LOCAL_RANK"], ["LOCAL_WORLD_SIZE"], ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]]
)
def test_ranks_find_out_what_their_launcher_does_not_say(missing: list[str]) -> None:
    """Many scripts for Slurm and MPI set LOCAL_RANK alone: `hierarchical` took each rank for a host."""
    assert as_processes(2, local_ranks_found, missing) == [(0, 2), (1, 2)]


def test_a_range_of_hosts_is_none_in_a_slurm_step(tmp_path: Path) -> None:
    """A warning says so; the run has the step's hosts."""
    text = "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\noptimizer: sgd\n"
    text += 'stages: [{train: {steps: 1}}]\nlaunch: {nproc_per_node: 1, nnodes: "1:2"}\n'
    (tmp_path / "p.yaml").write_text(text)
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    step = dict(zip(names, "0011", strict=True)) | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    done = ddprun("p.yaml", cwd=tmp_path, environment=JOB | step)
    assert done.code == 0, done.stderr
    assert "warning: launch.nnodes is a range, but hosts cannot leave or join a Slurm step" in done.stderr
