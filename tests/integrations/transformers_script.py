"""A script with transformers: accumulation, clipping, an evaluation after each epoch, autocast to bf16."""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ddprun.integrations.transformers import ObserveCallback

FOLDER = Path(sys.argv[1])


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of 4 to 8 tokens. Ranks take turns, a batch each."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fails_at:
            raise ValueError("a broken sample")
        words = torch.randint(1, 30, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.where(torch.arange(8) < 4 + index % 5, -100)}


def train(name: str, fails_at: int | None = None, **options: object) -> None:
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        str(FOLDER / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        logging_steps=1,
        use_cpu=True,
        bf16=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    data = Words(fails_at)
    callbacks = [] if name == "plain" else [ObserveCallback(run_dir=FOLDER / name, **options)]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    torch.save(model.state_dict(), FOLDER / f"{name}-{arguments.process_index}.pt")
    shown = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    (FOLDER / f"{name}-losses.json").write_text(json.dumps(shown))


train("plain")
train("observed")
train("fp16", hooks=["fp16"])
train("failed", fails_at=60)
