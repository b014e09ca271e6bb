"""Where `explain` could go another way than a run: both read one sequence of what a stage does to ranks."""

from pathlib import Path

from ddprun.config import load
from ddprun.explain.explain import explain
from tests.engine.running import SAMPLES, lines, run_pipeline
from tests.engine.test_optimizer_modes import MODULE
from tests.explain.test_explain import MLP, check

MODES = """
model: modes.net
data: {train: modes.Samples, evaluate: modes.Samples}
loader: {batch_size: 4}
optimizer: {modes.FreeSGD: {lr: 0.2}}
stages:
  - train: {steps: 7, sync: {local_sgd: {every: 4}}, evaluate: {every: 4}}
  - evaluate
  - train: {steps: 5, sync: independent}
  - broadcast: {source: 1}
  - save
"""


def test_an_optimizer_with_modes_travels_with_the_weights(tmp_path: Path) -> None:
    """Its state is part of the weights that are read: a broadcast takes it along, and an evaluation averages
    weights whose optimizers differ.
    """
    (tmp_path / "modes.py").write_text(SAMPLES + MODULE)
    check(tmp_path, MODES, 2)


def test_steps_with_a_control_message_are_those_of_a_run(tmp_path: Path) -> None:
    """An audit is an exchange, too: ranks learn their mean loss in its steps."""
    syncs = ("{local_sgd: {every: 4}}", "independent", "every_step")
    stages = "".join(f"  - train: {{steps: 26, sync: {sync}}}\n" for sync in syncs)
    run_dir = run_pipeline(tmp_path, f"{MLP}audit: {{every: 6}}\nstages:\n{stages}", 2)
    records = [line for line in lines(run_dir, "steps") if line["rank"] == 0]
    for stage in explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages:
        first = {step % stage.control_cycle: step for step in stage.control_message_steps}
        said = [first.get(step % stage.control_cycle, 27) <= step for step in range(1, 27)]
        own = [line for line in records if line["stage"] == stage.index]
        assert said == [line["mean_loss"] is not None for line in own], stage.index
        assert any(said)


def test_a_mutation_after_a_last_step_that_nobody_knew_is_averaged(tmp_path: Path) -> None:
    """A stream does not say how long it is, so that weights are mutated after its last step, too."""
    (tmp_path / "stream.py").write_text(
        SAMPLES
        + """

def net():
    return nn.Linear(6, 3).double()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Samples()[index] for index in range(48))
"""
    )
    text = """
model: stream.net
data: stream.Stream
loader: {batch_size: 4, shuffle: false}
optimizer: {sgd: {lr: 0.1}}
sync: {average: {every: 1}}
stages: [train: {epochs: 1, mutate: {noise: {std: 0.01}}}]
"""
    run_dir = run_pipeline(tmp_path, text, 2)
    (stage,) = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    records = lines(run_dir, "buckets")
    last = max(line["step"] for line in records)
    assert stage.steps is None
    assert stage.end is not None
    (pattern,) = stage.patterns
    in_last_step = sum(line["wire_bytes"] for line in records if line["step"] == last)
    sent = [one.sent.all_ranks for one in (*pattern.exchanges, *stage.end)]
    assert sum(sent) == in_last_step
