"""What a user gets from ddprun, as one file: `python -m tests.golden new.json [--against old.json]`.

For a change that must change nothing: run it before and after, on the same machine, in the same virtual
environment or two alike. It trains small pipelines (each sync policy with another stack of hooks, stages that
switch, a killed run that goes on) and runs every command, all as processes of their own, so that it needs
nothing of ddprun's insides. Kept are the final weights' SHA-256, the keys of every record, event and summary,
the files that a run leaves, and what commands print, with numbers, times and paths masked.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

TIMEOUT_S = 300
PIPELINES = Path(__file__).parent.parent / "pipelines"
BAD = Path(__file__).parent / "bad"

MLP = """
seed: 3
model: {mlp: {inputs: 64, hidden: [24], outputs: 10}}
data: digits
loader: {batch_size: 8}
loss: cross_entropy
optimizer: {adamw: {lr: 0.01}}
"""
CNN = """
seed: 3
model: cnn
data: digits
loader: {batch_size: 8}
loss: cross_entropy
optimizer: {sgd: {lr: 0.05, momentum: 0.9}}
"""
TEXT = """
seed: 3
model: {transformer: {width: 16, layers: 2, heads: 2, context: 16}}
data: {text: {files: "*.txt", context: 16}}
loader: {batch_size: 4}
loss: cross_entropy
optimizer: {adamw: {lr: 0.01}}
"""
SEVERAL_BUCKETS = MLP.replace("[24]", "[512, 512]") + "ddp: {bucket_cap_mb: 1}\n"

RUNS: dict[str, tuple[int, str]] = {
    "every-step": (
        2,
        SEVERAL_BUCKETS + "hooks: [fp16]\naccumulate: 2\nclip_norm: 1.0\nwarmup_steps: 5\n"
        "schedule: CosineAnnealingLR\ntimings: {fidelity_every: 4}\n"
        "stages: [{train: {steps: 20}}, {evaluate: {metrics: [accuracy]}}, {save: {to: out.safetensors}}]\n",
    ),
    "buffers": (
        2,
        CNN + "hooks: [{powersgd: {rank: 2}}, bf16]\naudit: {every: 5}\n"
        "stages: [{train: {steps: 12}}, {evaluate: {metrics: [accuracy]}}, {save: {to: out.safetensors}}]\n",
    ),
    "precision": (
        2,
        TEXT + "precision: fp16\nhooks: [int8]\n"
        "stages: [{train: {steps: 12}}, {evaluate: {metrics: [perplexity]}}, {save: {to: out.safetensors}}]",
    ),
    "local-sgd": (
        3,
        MLP + "sync: {local_sgd: {every: 4}}\nhooks: [{topk: {density: 0.1}}]\naudit: {every: 6}\n"
        "stages: [{train: {steps: 18}}, {save: {to: out.safetensors}}]\n",
    ),
    "hierarchical": (
        4,
        MLP + "sync: {hierarchical_sgd: {within: 1, across: 4, hosts: 2}}\n"
        "hooks: [{hierarchical: {hosts: 2, across: [int8]}}]\n"
        "stages: [{train: {steps: 18}}, {save: {to: out.safetensors}}]\n",
    ),
    "hierarchical-apart": (
        4,
        MLP + "sync: {hierarchical_sgd: {within: 2, across: 4, hosts: 2}}\nhooks: [fp16]\n"
        "stages: [{train: {steps: 18}}, {save: {to: out.safetensors}}]\n",
    ),
    "diloco": (
        3,
        MLP + "sync: {diloco: {every: 6, fragments: 2, overlap_steps: 2}}\nhooks: [int8]\n"
        "stages: [{train: {steps: 20}}, {save: {to: out.safetensors}}]\n",
    ),
    "shared-memory": (
        2,
        MLP + "sync: {average: {every: 3}}\nhooks: [shared_memory]\n"
        "stages: [{train: {steps: 10, mutate: {noise: {std: 0.001}}}}, average,"
        " {save: {to: out.safetensors}}]\n",
    ),
    "no-backward": (
        2,
        MLP + "stages:\n"
        "  - forward: {steps: 8, update: {evolution_strategies: {std: 0.05, population: 4}},"
        " sync: {average: {every: 1}}}\n"
        "  - forward: {steps: 6, mutate: {noise: {std: 0.01}}, sync: {broadcast: {every: 3, source: 1}}}\n"
        "  - broadcast: {source: 1}\n"
        "  - evaluate: {metrics: [accuracy]}\n"
        "  - save: {to: out.safetensors}\n",
    ),
    "stages": (
        2,
        MLP + "checkpoint: {every: 10, keep: 2}\nstages:\n"
        "  - train: {steps: 8, hooks: [], sync: every_step}\n"
        "  - train: {steps: 9, hooks: [{powersgd: {rank: 2}}]}\n"
        "  - train: {steps: 6, sync: {broadcast: {every: 2, source: 0}}}\n"
        "  - train: {steps: 5, sync: independent}\n"
        "  - average\n"
        "  - train: {steps: 7, sync: {local_sgd: {every: 3}}, hooks: [noop]}\n"
        "  - evaluate: {metrics: [accuracy]}\n"
        "  - save: {to: out.safetensors}\n",
    ),
}
DYING = (
    MLP + "sync: {local_sgd: {every: 4}}\nhooks: [int8]\ncheckpoint: {every: 12, keep: 2}\n"
    "loss: dying.loss\nstages: [{train: {steps: 24}}, {save: {to: out.safetensors}}]\n"
).replace("loss: cross_entropy\n", "")
DYING_LOSS = """
import os
import signal
from pathlib import Path

import torch

calls = 0


def loss(output, target):
    global calls
    calls += 1
    if calls == 16 and os.environ["RANK"] == "1" and not (here := Path(__file__).with_name("died")).exists():
        here.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(output, target)
"""

COMMANDS: dict[str, list[str]] = {
    "help": ["--help"],
    **{
        f"help {name}": [name, "--help"]
        for name in (
            "run",
            "check",
            "explain",
            "compare",
            "report",
            "resume",
            "submit",
            "init",
            "catalog",
            "schema",
            "doctor",
        )
    },
    "no such command": ["frobnicate"],
    "no such file": ["run", "nowhere.yaml"],
    "set": ["check", "every-step.yaml", "--set", "optimizer.adamw.lr=abc", "--set", "nothing=1"],
    "equals": ["every-step.yaml", "seed=1"],
    "catalog": ["catalog"],
    "catalog json": ["catalog", "--format", "json"],
    "schema": ["schema"],
    "init": ["init", "started.yaml"],
    "init again": ["init", "started.yaml"],
    "check started": ["check", "started.yaml"],
    "resolved": ["check", "--resolved", "stages.yaml"],
    "explain json": ["explain", "stages.yaml", "--format", "json"],
    "explain hosts": ["explain", "hierarchical.yaml", "--nnodes", "4", "--nproc-per-node", "2"],
    "resume nothing": ["resume", "nowhere"],
    "report nothing": ["report", "nowhere"],
    "submit slurm": ["submit", "every-step.yaml", "--to", "slurm", "--dry-run", "--program", "/opt/ddprun"],
    "submit docker": [
        "submit",
        "every-step.yaml",
        "--to",
        "docker",
        "--dry-run",
        "--set",
        "docker.image=x:1",
    ],
    "submit kubernetes": [
        "submit",
        "every-step.yaml",
        "--to",
        "kubernetes",
        "--dry-run",
        "--set",
        "kubernetes={image: 'x:1', runs: claim}",
    ],
    "compare": [
        "compare",
        "every-step.yaml",
        "--vary",
        "hooks=[[], [fp16]]",
        "--steps",
        "40",
        "--no-control",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a user gets from ddprun, as one file.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier output; exit code 1 if they differ")
    parser.add_argument("--only", help="a part of the names to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found = dict(gather(Path(folder), arguments.only or ""))
    arguments.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if arguments.against:
        sys.exit(differ(json.loads(arguments.against.read_text()), found, only=arguments.only is not None))


def gather(folder: Path, only: str) -> Iterator[tuple[str, Any]]:
    """Everything, by name."""
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "dying.py").write_text(DYING_LOSS)
    (folder / "dying.yaml").write_text(DYING)
    for name, (_, text) in RUNS.items():
        (folder / f"{name}.yaml").write_text(text)
    for name, (ranks, _) in RUNS.items():
        if only in f"run {name}":
            progress(name)
            flags = [f"{name}.yaml", "--nproc-per-node", str(ranks), "--run-dir", name]
            yield f"run {name}", {**command(folder, *flags), **left_by(folder / name)}
        if only in f"explain {name}":
            yield (
                f"explain {name}",
                command(folder, "explain", f"{name}.yaml", "--nproc-per-node", str(ranks)),
            )
    if only in "run dying":
        progress("dying")
        killed = command(folder, "dying.yaml", "--nproc-per-node", "2", "--run-dir", "dying")
        # Which of the last bytes a killed rank had written is chance.
        yield "run dying", {"exit code": killed["exit code"]}
        resumed = command(folder, "resume", "dying")
        yield "run resumed", {**resumed, **left_by(folder / "dying")}
        (folder / "died").touch()
        command(folder, "dying.yaml", "--nproc-per-node", "2", "--run-dir", "unbroken")
        yield "run unbroken", left_by(folder / "unbroken")
        again = command(folder, "resume", "unbroken")
        yield "run resumed at its end", again
    for name, words in COMMANDS.items():
        if only in name:
            progress(name)
            yield name, command(folder, *words)
    for file in sorted(PIPELINES.glob("*.yaml")):
        if only in file.name:
            progress(file.name)
            yield f"check {file.name}", command(folder, "check", "--resolved", str(file))
            yield f"explain {file.name}", command(folder, "explain", str(file))
    if only in "bad files":
        bad = [str(file) for file in sorted(BAD.glob("*.yaml"))]
        yield "bad files", command(folder, "check", *bad)
        yield "bad files json", command(folder, "check", "--format", "json", *bad)
        yield "bad files github", command(folder, "check", "--format", "github", *bad)
    if only in "report":
        for name, runs in (
            ("report", ["stages"]),
            ("report of three", ["every-step", "local-sgd", "diloco"]),
        ):
            if all((folder / run).is_dir() for run in runs):
                progress(name)
                page = folder / "report.html"
                printed = command(folder, "report", "--output", str(page), *runs)
                yield name, {**printed, "page": text_of(page), "trace": trace_keys(folder / runs[0])}


def progress(name: str) -> None:
    print(name, file=sys.stderr, flush=True)


def command(folder: Path, *words: str) -> dict[str, Any]:
    """Run ddprun; its exit code and what it printed, masked."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DDPRUN")},
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddprun", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return {
        "exit code": done.returncode if done.returncode >= 0 else signal.Signals(-done.returncode).name,
        "stdout": mask(done.stdout, folder),
        "stderr": mask(done.stderr, folder),
    }


def mask(text: str, folder: Path) -> list[str]:
    """Lines without what changes from run to run: paths, numbers and their units, spaces between columns."""
    for path, name in ((str(folder), "FOLDER"), (str(BAD), "BAD"), (str(PIPELINES), "PIPELINES")):
        text = text.replace(path, name)
    text = re.sub("─+", "─", re.sub("-{3,}", "---", text.replace(folder.name, "FOLDER")))
    text = re.sub(r"\b(every-step)-[0-9a-f]{4,8}", r"\1-JOB", text)
    text = re.sub(r"\d{4}-?\d\d-?\d\d[T-]\d\d:?\d\d:?\d\d\S*", "TIME", text)
    text = re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?( ?([kMG]i?B|B|ms|us|µs|s|%)\b)?", "#", text)
    text = re.sub(r"(#[ ,;]*)+#", "#", text)
    return [re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines()]


def left_by(run: Path) -> dict[str, Any]:
    """What a run left: weights, keys of records, events and summary, names of files."""
    if not (run / "summary.json").exists():
        return {"summary": None}
    summary = json.loads((run / "summary.json").read_text())
    weights = sorted(run.rglob("out.safetensors")) or sorted(run.parent.glob("out.safetensors"))
    return {
        "weights": [tensors_hash(file) for file in weights],
        "steps": record_keys(run / "steps"),
        "buckets": record_keys(run / "buckets"),
        "events": event_keys(run / "events.jsonl"),
        "summary": sorted(keys(summary)),
        "loss": summary.get("loss"),
        "metrics": summary.get("metrics"),
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
    }


def tensors_hash(file: Path) -> str:
    """SHA-256 of names, shapes and bytes of the tensors in a safetensors file."""
    digest = hashlib.sha256()
    with safe_open(str(file), framework="np") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode() + tensor.tobytes())
    return digest.hexdigest()


def record_keys(folder: Path) -> dict[str, Any]:
    """How many records each rank has of each kind, and their keys."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            kind = f"{file.stem} {record.get('kind', 'step')} {','.join(sorted(keys(record)))}"
            found[kind] = found.get(kind, 0) + 1
    return found


def event_keys(file: Path) -> list[str]:
    """The keys of each kind of event; whether a rank was found late is the machine's mood."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(
        {
            f"{event['event']}: {','.join(sorted(keys(event)))}"
            for event in events
            if not event["event"].startswith("straggler")
        }
    )


def keys(value: Any, before: str = "") -> Iterator[str]:
    """Every key of nested mappings, with dots; numbers in keys are masked."""
    if isinstance(value, dict):
        for key, one in value.items():
            path = f"{before}.{re.sub('[0-9]+', '#', str(key))}".lstrip(".")
            yield path
            yield from keys(one, path)
    elif isinstance(value, list):
        yield from sorted({path for one in value for path in keys(one, before + "[]")})


def text_of(page: Path) -> list[str]:
    """What a page says, without its scripts, styles and pictures."""
    text = re.sub(r"(?s)<(script|style|svg).*?</\1>", " ", page.read_text())
    lines = mask(re.sub(r"<[^>]+>", "\n", text), page.parent)
    # Which step is the median, and so in which order steps are offered, differs from run to run.
    return list(dict.fromkeys(line for line in lines if line.strip("# ") and not line.startswith("step #")))


def trace_keys(run: Path) -> list[str]:
    """The kinds of entries in a trace."""
    entries = json.loads((run / "trace.json").read_text())["traceEvents"]
    return sorted({re.sub("[0-9]+", "#", f"{one['ph']} {','.join(sorted(keys(one)))}") for one in entries})


def differ(old: dict[str, Any], new: dict[str, Any], *, only: bool) -> int:
    """Print what differs; the exit code."""
    differences = 0
    for name in sorted(old.keys() & new.keys() if only else old.keys() | new.keys()):
        before, after = (json.dumps(one.get(name), indent=1, sort_keys=True) for one in (old, new))
        if before != after:
            differences += 1
            print(f"=== {name}")
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new", "", "", 1, "")
            print("\n".join(lines))
    print(f"{differences} of {len(new)} differ" if differences else f"equal: {len(new)} parts")
    return 1 if differences else 0


if __name__ == "__main__":
    main()
