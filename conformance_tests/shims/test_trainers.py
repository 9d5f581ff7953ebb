"""Trainers of other libraries: a resumed run is the same to the bit."""

import warnings

import pytest

import kfac_core as kc

torch = pytest.importorskip("torch")
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from kfac_core_shims.torch import trainers  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
    return torch.nn.Sequential(*layers)


def loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)


def assert_same(first, second):
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_hugging_face_is_resumed_to_the_bit(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ids = (torch.arange(32)[:, None] + torch.arange(8)) % 16
    examples = [{"input_ids": x, "labels": x} for x in ids]
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    def train(folder, checkpoint=None, optim="sgd", **options):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            gradient_accumulation_steps=2,
            optim=optim,
            learning_rate=0.1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=4,
        )
        callback = trainers.HuggingFaceCallback(**options)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=examples, callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return model, callback.kfac

    whole, kfac = train("runs")
    assert kfac.steps == 4
    middle = str(tmp_path / "runs" / "checkpoint-2")
    again, kfac = train("runs", middle)
    assert kfac.steps == 4
    assert_same(whole, again)
    assert_same(whole, train("elsewhere", middle, resumed=middle)[0])
    with pytest.raises(kc.StateError, match="resumed"):
        train("nowhere", middle)
    with pytest.raises(kc.ConventionError, match="AdamW divides"):
        train("adam", optim="adamw_torch")


def test_lightning_is_resumed_to_the_bit(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.network(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train(epochs, resumed=None):
        callback = trainers.LightningCallback("network")
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=[callback],
            accumulate_grad_batches=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module = Classifier()
        trainer.fit(module, loader(), loader(), ckpt_path=resumed, weights_only=False)
        path = tmp_path / f"{epochs}.ckpt"
        trainer.save_checkpoint(path)
        return module, callback.kfac, path

    whole, kfac, _ = train(4)
    assert kfac.steps == 12
    _, _, path = train(2)
    assert_same(whole, train(4, path)[0])


def test_accelerate_is_resumed_to_the_bit(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def begin():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parts = accelerator.prepare(model, optimizer, loader())
        return accelerator, *parts, trainers.accelerated(accelerator, *parts[:2])

    def train(accelerator, model, optimizer, batches, kfac, epochs):
        for _ in range(epochs):
            for x, y in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(x), y))
                    if accelerator.sync_gradients:
                        kfac.step()
                    optimizer.step()
                    optimizer.zero_grad()

    whole, first, second = begin(), begin(), begin()
    train(*whole, 4)
    train(*first, 2)
    first[0].save_state(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second[0].load_state(str(tmp_path))
    train(*second, 2)
    assert whole[-1].steps == second[-1].steps == 12
    assert_same(whole[1], second[1])
