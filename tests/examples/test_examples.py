"""The files of `examples/` run on two ranks, with the packages that they name and data written here.

The packages are not among ddprun's own extras; docs/your-own.md says how to run these tests.
"""

import contextlib
import copy
import csv
import importlib.util
import json
import math
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, load_model

from tests.engine.running import lines, summary
from tests.examples.test_your_own import PAGE, PYTHON
from tests.ranks import Finished, Running

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {
    "gpt2": ("transformers", "datasets"),
    "images": ("torchvision",),
    "volumes": ("monai", "nibabel"),
    "lora": ("transformers", "datasets", "peft"),
    "stream": ("transformers", "datasets"),
    "bert": ("transformers", "datasets", "torchmetrics"),
    "t5": ("transformers", "datasets"),
}
TEXT = "the a cat dog bird sat ran flew on over under mat house tree and then it was late"
KINDS = ("terrible", "wonderful", "so so")

# Packages that warn of themselves are none of our business.
pytestmark = pytest.mark.filterwarnings("default")


def packages(name: str) -> list[Any]:
    """What an example names, imported; skips the test if something is not installed."""
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"pip install {' '.join(missing)} to try examples/{name}.yaml")
    return [importlib.import_module(package) for package in PACKAGES[name]]


def run(folder: Path, name: str, *overrides: str, run_dir: str = "run", timeout_s: float = 170) -> Path:
    """Run an example to its end in `folder`; gives the run's folder."""
    done = start(folder, name, *overrides, run_dir=run_dir).wait_and_leave(timeout_s)
    assert done.code == 0, done.stderr
    return folder / run_dir


class Example(Running):
    """An example that runs offline, with caches in its own folder."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        super().__init__(*arguments, cwd=folder, environment=environment)

    def wait_and_leave(self, timeout_s: float) -> Finished:
        with self:
            return self.wait(timeout_s)


def start(folder: Path, name: str, *overrides: str, run_dir: str) -> Example:
    (folder / f"{name}.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text())
    changes = [word for override in overrides for word in ("--set", override)]
    return Example(f"{name}.yaml", f"--run-dir={run_dir}", *changes, folder=folder)


def losses(run_dir: Path) -> list[float]:
    """The mean loss of each step of a stage in which ranks synchronise at each, or of each rank's step."""
    return [line.get("mean_loss") or line["loss"] for line in lines(run_dir, "steps") if line["rank"] == 0]


def falls(run_dir: Path, to: float) -> bool:
    """Whether the mean of the last five steps' losses is below that share of the first five's."""
    found = losses(run_dir)
    return sum(found[-5:]) < to * sum(found[:5])


def sentences(count: int, seed: int) -> list[str]:
    """Of 1 to 20 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(TEXT.split(), k=draw.randint(1, 20))) for _ in range(count)]


def write_text(folder: Path) -> None:
    """What gpt2.yaml and lora.yaml train on; an empty line has no token to predict."""
    (folder / "text").mkdir()
    (folder / "text" / "train.txt").write_text("\n".join(sentences(300, 0)) + "\n")
    (folder / "text" / "held-out.txt").write_text(
        "\n".join([*sentences(20, 1), "", *sentences(21, 2)]) + "\n"
    )


def perplexity(model: Any, tokenizer: Any, folder: Path) -> float:
    """Of all tokens of the held-out lines, by Hugging Face's loss of each line, without padding."""
    total, count = 0.0, 0
    model.eval()
    for line in (folder / "text" / "held-out.txt").read_text().splitlines():
        ids = torch.tensor([tokenizer(line, truncation=True, max_length=128)["input_ids"]])
        if ids.shape[1] > 1:
            with torch.no_grad():
                total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return math.exp(total / count)


SHORT = ("stages[0].train.steps=24", "warmup_steps=2")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which gpt2.yaml has run, for fewer steps."""
    packages("gpt2")
    folder = tmp_path_factory.mktemp("gpt2")
    write_text(folder)
    run(folder, "gpt2", *SHORT)
    return folder


def test_gpt2_learns_and_its_weights_are_those_of_hugging_face(gpt2: Path) -> None:
    """The saved file loads into the model of transformers, whose own perplexity over all tokens is the one
    that `evaluate` gives.
    """
    transformers, _ = packages("gpt2")
    assert falls(gpt2 / "run", 0.7)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=384, n_positions=128, n_embd=128, n_layer=4, n_head=4)
    )
    load_model(model, gpt2 / "run" / "model.safetensors")
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    found = summary(gpt2 / "run")["stages"][1]["metrics"]["perplexity"]
    assert found == pytest.approx(perplexity(model, transformers.ByT5Tokenizer(), gpt2), rel=1e-5)


def test_gpt2_s_perplexity_does_not_depend_on_the_batch_size(gpt2: Path) -> None:
    """Lines are padded to other lengths, and one of them has no token to predict."""
    packages("gpt2")
    found = [summary(gpt2 / "run")["stages"][1]["metrics"]["perplexity"]]
    for size in (1, 5):
        only = ("init=run/model.safetensors", "stages=[evaluate: {metrics: [perplexity]}]")
        again = run(gpt2, "gpt2", *only, f"loader.batch_size={size}", run_dir=f"by-{size}")
        found.append(summary(again)["stages"][0]["metrics"]["perplexity"])
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)


def test_gpt2_resumed_after_sigkill_has_the_same_bits(gpt2: Path) -> None:
    """All processes are killed in the middle of the stage."""
    packages("gpt2")
    checkpoints, end = gpt2 / "killed" / "checkpoints", time.monotonic() + 120
    with start(gpt2, "gpt2", *SHORT, "checkpoint.every=4", run_dir="killed") as running:
        while not list(checkpoints.glob("step-*")) and time.monotonic() < end:
            time.sleep(0.02)
        for process in [running.process.pid, *running.ranks()]:
            with contextlib.suppress(ProcessLookupError):  # ranks end with their launcher
                os.kill(process, signal.SIGKILL)
    assert not (gpt2 / "killed" / "model.safetensors").exists()
    done = Example("resume", "killed", folder=gpt2).wait_and_leave(170)
    assert done.code == 0, done.stderr
    assert "resuming after step " in done.stderr
    whole, again = (load_file(gpt2 / name / "model.safetensors") for name in ("run", "killed"))
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
    assert summary(gpt2 / "killed")["metrics"] == summary(gpt2 / "run")["metrics"]


def write_images(folder: Path) -> None:
    """Three classes that differ by their colour, of several sizes."""
    from PIL import Image

    draw = torch.Generator().manual_seed(0)
    for part, count in (("train", 24), ("held-out", 7)):
        for place, name in enumerate(("blue", "green", "red")):
            of_class = folder / "images" / part / name
            of_class.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 100, (70 + number, 80, 3), generator=draw, dtype=torch.uint8)
                pixels[..., 2 - place] += 120
                Image.fromarray(pixels.numpy()).save(of_class / f"{number}.png")


def test_images(tmp_path: Path) -> None:
    """Almost every held-out image gets its class."""
    packages("images")
    write_images(tmp_path)
    found = run(tmp_path, "images", "stages[0].train.epochs=8")
    assert falls(found, 0.8)
    assert summary(found)["stages"][1]["metrics"]["accuracy"] > 0.7


def test_images_with_layer_wise_rates_and_mixup(tmp_path: Path) -> None:
    """The lines that docs/your-own.md gives for timm and torchvision; rates are those that timm means."""
    packages("images")
    timm: Any = pytest.importorskip("timm", reason="pip install timm to try its layer-wise rates")
    make: Any = importlib.import_module("timm.optim").create_optimizer_v2
    write_images(tmp_path)
    optimizer, transform = (
        re.findall(f"`({key}: {{{name}.*?}})`", PAGE)[0]
        for key, name in (("optimizer", "timm"), ("batch", "transform: {torchvision"))
    )
    model = {"model_name": "vit_tiny_patch16_224", "img_size": 64, "num_classes": 3, "depth": 3}
    short = [f"model={{timm.create_model: {json.dumps(model)}}}", "groups=[]"]
    short += ["warmup_steps=0", "stages[0].train.epochs=1"]
    found = run(tmp_path, "images", *(one.replace(": ", "=", 1) for one in (optimizer, transform)), *short)
    options = yaml.safe_load(optimizer)["optimizer"]["timm.optim.create_optimizer_v2"]
    groups = make(timm.create_model(**model), **options).param_groups
    wanted = [group["lr"] * group["lr_scale"] for group in groups]
    assert len(set(wanted)) == 5  # the embedding's, three blocks', the head's
    assert lines(found, "steps")[0]["lr"] == pytest.approx(wanted)
    assert summary(found)["metrics"]["accuracy"] > 0.2


def write_volumes(folder: Path, nibabel: Any) -> None:
    """Balls in noise: eight to train on, and two that are held out."""
    import numpy as np

    cases: dict[str, list[dict[str, str]]] = {"training": [], "validation": []}
    draw = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(30)] * 3, indexing="ij"))
    (folder / "task").mkdir()
    for number in range(10):
        centre = draw.uniform(9, 21, 3)[:, None, None, None]
        label = (np.linalg.norm(grid - centre, axis=0) < 7).astype(np.uint8)
        volume = (label + draw.normal(0, 0.2, label.shape)).astype(np.float32)
        names = {"image": f"image-{number}.nii.gz", "label": f"label-{number}.nii.gz"}
        for name, values in zip(names.values(), (volume, label), strict=True):
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / "task" / name)
        cases["training" if number < 8 else "validation"].append(names)
    (folder / "task" / "dataset.json").write_text(json.dumps(cases))


def test_volumes(tmp_path: Path) -> None:
    """The loss falls, on held-out volumes as well."""
    _, nibabel = packages("volumes")
    write_volumes(tmp_path, nibabel)
    found = run(tmp_path, "volumes", "stages[0].train.epochs=8")
    assert falls(found, 0.75)
    assert summary(found)["stages"][1]["metrics"]["loss"] < 0.75 * losses(found)[0]


def test_random_transforms_of_monai_can_be_repeated(tmp_path: Path) -> None:
    """With the class that docs/your-own.md puts around them: the same bits after a resume, however many
    processes load. Without it no two runs are the same.
    """
    _, nibabel = packages("volumes")
    write_volumes(tmp_path, nibabel)
    (tmp_path / "mine.py").write_text(PYTHON)
    pipeline = yaml.safe_load((EXAMPLES / "volumes.yaml").read_text())
    data = pipeline["data"]["train"]["monai.data.Dataset"]
    drawn = copy.deepcopy(data["transform"])
    drawn["monai.transforms.Compose"]["transforms"] += [
        {"monai.transforms.RandFlipd": {"keys": ["image", "label"], "prob": 0.5}},
        {"monai.transforms.RandGaussianNoised": {"keys": ["image"], "prob": 0.5}},
    ]

    def trained(transform: Any, run_dir: str, *overrides: str, epochs: int = 2) -> dict[str, torch.Tensor]:
        data["transform"] = transform
        (tmp_path / "random.yaml").write_text(yaml.safe_dump(pipeline))
        changes = [f"--set={change}" for change in (f"stages[0].train.epochs={epochs}", *overrides)]
        started = Example("random.yaml", f"--run-dir={run_dir}", "--or-resume", *changes, folder=tmp_path)
        done = started.wait_and_leave(170)
        assert done.code == 0, done.stderr
        return load_file(tmp_path / run_dir / "model.safetensors")

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    seeded = {"mine.Reseeded": {"transform": drawn}}
    whole = trained(seeded, "whole", "loader.workers=2")
    trained(seeded, "resumed", "loader.workers=1", epochs=1)
    assert same(whole, trained(seeded, "resumed", "loader.workers=2"))
    assert not same(trained(drawn, "one", epochs=1), trained(drawn, "two", epochs=1))


def write_base(folder: Path, transformers: Any) -> None:
    """A small GPT-2 and a tokenizer of its kind, as `hf download` leaves them."""
    tokenizers, end = importlib.import_module("tokenizers"), "<|endoftext|>"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(folder / "text" / "train.txt")], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end
    ).save_pretrained(folder / "base")
    torch.manual_seed(0)
    size, ends = tokenizer.get_vocab_size(), tokenizer.token_to_id(end)
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=ends, eos_token_id=ends
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "base")


def test_lora(tmp_path: Path) -> None:
    """Only adapters are trained, sent and saved: an eighth of what plain DDP sends. Peft takes them, and gets
    the perplexity that `evaluate` gave.
    """
    transformers, _, peft = packages("lora")
    write_text(tmp_path)
    write_base(tmp_path, transformers)
    found = run(tmp_path, "lora", "stages[0].train.steps=40", "optimizer.adamw.lr=0.02")
    assert falls(found, 0.97)
    plain = run(tmp_path, "lora", "stages=[train: {steps: 4}]", "sync=every_step", run_dir="plain")
    ours, theirs = (summary(one)["wire_bytes"] / summary(one)["steps"] for one in (found, plain))
    assert ours == pytest.approx(theirs / 8)
    adapters = load_file(found / "adapters.safetensors")
    assert adapters
    assert all("lora_" in name for name in adapters)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(base, config)
    problems = model.load_state_dict(adapters, strict=False)
    assert not problems.unexpected_keys
    assert not any("lora_" in name for name in problems.missing_keys)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == set(adapters)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    measured = summary(found)["stages"][1]["metrics"]["perplexity"]
    assert measured == pytest.approx(perplexity(model, tokenizer, tmp_path), rel=1e-5)


def write_reviews(folder: Path) -> None:
    """Texts of two kinds, in two files to train on and one that is held out."""
    (folder / "reviews").mkdir()
    draw = random.Random(0)
    for name, count in (("train-0", 130), ("train-1", 130), ("held-out", 41)):
        with (folder / "reviews" / f"{name}.jsonl").open("w") as file:
            for text in sentences(count, draw.randrange(100)):
                label = draw.randrange(2)
                file.write(json.dumps({"text": f"{KINDS[label]}: {text}", "label": label}) + "\n")


def write_table(folder: Path) -> None:
    """Texts of three kinds; a fifth of the labels is wrong."""
    (folder / "reviews").mkdir()
    draw = random.Random(0)
    for name, count in (("train", 200), ("held-out", 41)):
        with (folder / "reviews" / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("text", "label"))
            for text in sentences(count, draw.randrange(100)):
                label = draw.randrange(3)
                wrong = draw.randrange(5) == 0
                table.writerow((f"{KINDS[label]}: {text}", (label + wrong) % 3))


def test_bert(tmp_path: Path) -> None:
    """Accuracy and F1 are those of the saved model, text by text."""
    transformers, _, _ = packages("bert")
    write_table(tmp_path)
    found = run(tmp_path, "bert", "stages[0].train.epochs=4")
    config = transformers.BertConfig(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=256,
        num_labels=3,
    )
    model, tokenizer = transformers.BertForSequenceClassification(config), transformers.ByT5Tokenizer()
    load_model(model, found / "model.safetensors")
    model.eval()
    with (tmp_path / "reviews" / "held-out.csv").open(newline="") as file:
        pairs = [
            (int(model(**tokenizer(row["text"], return_tensors="pt")).logits.argmax()), int(row["label"]))
            for row in csv.DictReader(file)
        ]
    shares = [
        2 * pairs.count((kind, kind)) / sum((guess == kind) + (label == kind) for guess, label in pairs)
        for kind in range(3)
    ]
    measured = summary(found)["metrics"]
    assert measured["accuracy"] == sum(guess == label for guess, label in pairs) / 41 > 0.6
    assert measured["f1"] == pytest.approx(sum(shares) / 3)


def write_pairs(folder: Path) -> None:
    """Sentences, and the same in capitals."""
    (folder / "pairs").mkdir()
    for seed, (name, count) in enumerate((("train", 200), ("held-out", 41))):
        pairs = [{"source": text, "target": text.upper()} for text in sentences(count, seed)]
        lines = (f"{json.dumps(pair)}\n" for pair in pairs)
        (folder / "pairs" / f"{name}.jsonl").write_text("".join(lines))


def test_t5(tmp_path: Path) -> None:
    """The perplexity is that of all labels, by Hugging Face's loss of each pair, without padding."""
    transformers, _ = packages("t5")
    write_pairs(tmp_path)
    found = run(tmp_path, "t5", "stages[0].train.steps=40")
    assert falls(found, 0.7)
    config = transformers.T5Config(
        vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model, tokenizer = transformers.T5ForConditionalGeneration(config), transformers.ByT5Tokenizer()
    load_model(model, found / "model.safetensors")
    model.eval()
    total, count = 0.0, 0
    for line in (tmp_path / "pairs" / "held-out.jsonl").read_text().splitlines():
        source, target = (
            tokenizer(text, return_tensors="pt", truncation=True, max_length=128).input_ids
            for text in json.loads(line).values()
        )
        total += model(input_ids=source, labels=target).loss.item() * target.numel()
        count += target.numel()
    measured = summary(found)["metrics"]["perplexity"]
    assert measured == pytest.approx(math.exp(total / count), rel=1e-5)


def test_stream(tmp_path: Path) -> None:
    """Files are read one after the other, and again from the start; each held-out text counts once."""
    packages("stream")
    write_reviews(tmp_path)
    found = run(tmp_path, "stream", "stages[0].train.steps=50")
    assert falls(found, 0.8)
    assert summary(found)["stages"][1]["samples"] == 41
    assert summary(found)["stages"][1]["metrics"]["loss"] < 0.6


def test_gan(tmp_path: Path) -> None:
    """Both losses have curves, and the file saved has the weights of the model beside it."""
    (tmp_path / "gan.py").write_text((EXAMPLES / "gan.py").read_text())
    found = run(tmp_path, "gan", "stages[0].train.epochs=2")
    curves = {"discriminator", "generator", "real", "fake"}
    assert all(line["mean_values"].keys() == curves for line in lines(found, "steps"))
    spec = importlib.util.spec_from_file_location("gan_example", tmp_path / "gan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Gan().load_state_dict(load_file(found / "gan.safetensors"))
