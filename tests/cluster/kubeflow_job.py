"""A job of Kubeflow's client on a Docker engine: `kubeflow_job.py DOCKER_HOST`. Prints what comes of it."""

import sys
from pathlib import Path

from kubeflow.trainer import CustomTrainer, TrainerClient
from kubeflow.trainer.backends.container.types import ContainerBackendConfig, TrainingRuntimeSource

RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata:
  name: torch-distributed
  labels: {trainer.kubeflow.org/framework: torch}
spec:
  mlPolicy: {numNodes: 1, torch: {}}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
            spec:
              template:
                spec:
                  containers: [{name: node, image: ddprun}]
"""


def train() -> None:
    """Runs in the container, under torchrun."""
    from importlib.resources import files

    from ddprun.cli import main

    pipeline = files("ddprun") / "pipelines" / "quickstart.yaml"
    code = main(["run", str(pipeline), "--run-dir", "/tmp/run", "--set", "stages[0].train.epochs=1"])
    if code:
        raise SystemExit(code)


def work(host: str) -> str:
    """Run the job; gives its status."""
    runtime = Path("runtime.yaml").resolve()
    runtime.write_text(RUNTIME)
    source = TrainingRuntimeSource(sources=[runtime.as_uri()])
    client = TrainerClient(
        backend_config=ContainerBackendConfig(
            container_runtime="docker", pull_policy="Never", container_host=host, runtime_source=source
        )
    )
    job = client.train(runtime="torch-distributed", trainer=CustomTrainer(func=train, num_nodes=2))
    done = client.wait_for_job_status(job, timeout=200)
    for step in done.steps:
        print(*client.get_job_logs(job, step=step.name), sep="\n")
    client.delete_job(job)
    return str(done.status)


if __name__ == "__main__":
    print(work(sys.argv[1]))
