"""Hugging Face's Trainer, with a callback: GPT-2 of its configuration, from scratch.

Needs `pip install accelerate transformers torch`.  Nothing is downloaded.
"""

import tempfile
from pathlib import Path

import torch
from problem import same
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kfac_core_shims.torch import KFAC


class WithKFAC(TrainerCallback):
    """Replaces the gradients before the optimizer reads them."""

    def __init__(self, resumed=None):
        self.kfac, self.resumed = None, resumed

    def on_train_begin(self, args, state, control, *, model, optimizer, **others):
        """Make K-FAC; a resumed run loads it."""
        self.kfac = KFAC(model, lr=optimizer)
        if self.resumed is not None:
            saved = torch.load(Path(self.resumed) / "kfac.pt", weights_only=True)
            self.kfac.load_state_dict(saved)

    def on_pre_optimizer_step(self, args, state, control, **others):
        """Replace the gradients."""
        self.kfac.step()

    def on_save(self, args, state, control, **others):
        """Save K-FAC beside the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.kfac.state_dict(), folder / "kfac.pt")


class Sequences(Dataset):
    """Sequences that count up from a random start, modulo 16."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        start = torch.randint(16, (), generator=torch.Generator().manual_seed(index))
        ids = (start + torch.arange(12)) % 16
        return {"input_ids": ids, "labels": ids}


def train(folder, resumed=None):
    """Train 30 steps, and return the trainer and its callback."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16,
            n_positions=12,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=30,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # It would clip the gradients before K-FAC reads them.
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        logging_steps=10,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    callback = WithKFAC(resumed)
    examples = Sequences()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=examples,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resumed)
    return trainer, callback.kfac


def main():
    """Train 30 steps, and the last 20 of them again from the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        whole, kfac = train(folder)
        assert kfac.skipped == {}
        resumed, _ = train(folder, f"{folder}/checkpoint-10")
    losses = [x["eval_loss"] for x in whole.state.log_history if "eval_loss" in x]
    equal = same(whole.model, resumed.model)
    print(kfac)
    print(f"test losses {losses}; resumed to the bit: {equal}")
    assert losses[-1] < 0.5 * losses[0]
    assert equal


if __name__ == "__main__":
    main()
