"""Every policy with every kind of hook and model runs to the end."""

from pathlib import Path

import pytest

from tests.engine.running import events, run_pipeline, summary

POLICIES = [
    "every_step",
    "{local_sgd: {every: 3}}",
    "{local_sgd: {every: 3, optimizer_state: average}}",
    "{hierarchical_sgd: {within: 1, across: 4, hosts: 2}}",
    "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}",
    "{diloco: {every: 4}}",
    "{diloco: {every: 4, fragments: 2, overlap_steps: 2}}",
    "{diloco: {every: 4, alpha: 0.5, outer: sgd}}",
    "{gossip: {every: 2}}",
    "{broadcast: {every: 3, source: 1}}",
    "{average: {every: 3}}",
    "independent",
]
HOOKS = ["[]", "[fp16]", "[int8]", "[{hierarchical: {hosts: 2, across: [int8]}}]"]
MODELS = {"mlp": "{mlp: {inputs: 64, hidden: [64], outputs: 10}}", "cnn": "{cnn: {channels: [8]}}"}
TEXT = """
model: MODEL
data: digits
loader: {batch_size: 16}
optimizer: {adamw: {lr: RATE}}
accumulate: 2
hooks: HOOKS
sync: SYNC
audit: {every: 2}
stages:
  - train: {epochs: 4}
  - evaluate: {metrics: [accuracy]}
  - save
"""


def check(folder: Path, sync: str, hooks: str, model: str) -> None:
    text = TEXT.replace("MODEL", MODELS[model]).replace("HOOKS", hooks).replace("SYNC", sync)
    text = text.replace("RATE", "0.004" if model == "mlp" else "0.03")
    run = run_pipeline(folder, text, 4)
    assert summary(run)["status"] == "done"
    assert summary(run)["samples"] == 4 * 1438, "every sample once in each epoch"
    assert summary(run)["loss"] < (1.0 if model == "mlp" else 2.27), "from 2.3"
    assert summary(run)["audit"]["equal"]
    assert any(event["event"] == "audit" for event in events(run))


@pytest.mark.parametrize(
    ("sync", "hooks", "model"),
    [
        *((sync, HOOKS[place % 4], ["mlp", "cnn"][place % 2]) for place, sync in enumerate(POLICIES)),
        # The legs inside a host of the one and the periods inside a host of the other share process groups.
        ("{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}", HOOKS[3], "mlp"),
    ],
)
def test_policies_run_to_the_end(tmp_path: Path, sync: str, hooks: str, model: str) -> None:
    """On four ranks, two micro-batches to a step, uneven ends; all ranks end with the same weights."""
    check(tmp_path, sync, hooks, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("sync", POLICIES)
def test_the_full_matrix_runs_to_the_end(tmp_path: Path, sync: str, hooks: str, model: str) -> None:
    """All of them."""
    check(tmp_path, sync, hooks, model)
