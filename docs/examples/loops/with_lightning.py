"""A module of Lightning, with gradient accumulation, validation and resumption.

Needs `pip install lightning torch`.
"""

import tempfile
import warnings

import lightning
import torch
from problem import data, network, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kfac_core_shims.torch import KFAC


class Classifier(lightning.LightningModule):
    """What is K-FAC's are three hooks, and a line where the optimizer is made."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.losses = []
        self._saved = None

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = cross_entropy(self.network(inputs), labels)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, index):
        """Share the model with the training: passes without gradients do not count."""
        inputs, labels = batch
        self.log("validation_loss", cross_entropy(self.network(inputs), labels))

    def configure_optimizers(self):
        """Make the optimizer, and K-FAC of the network that makes the outputs."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.kfac = KFAC(self.network, lr=optimizer)
        if self._saved is not None:
            self.kfac.load_state_dict(self._saved)
        return optimizer

    def on_before_optimizer_step(self, optimizer):
        """Replace the gradients, which are all there and not clipped yet."""
        self.kfac.step()

    def on_save_checkpoint(self, checkpoint):
        """Save K-FAC with the model."""
        checkpoint["kfac"] = self.kfac.state_dict()

    def on_load_checkpoint(self, checkpoint):
        """Load it, where the optimizer is made only afterwards."""
        self._saved = checkpoint["kfac"]


def train(epochs, folder, resumed=None):
    """Train, and return the module and where it was saved."""
    loader = DataLoader(TensorDataset(*data()), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Classifier()
    trainer.fit(module, loader, loader, ckpt_path=resumed)
    path = f"{folder}/epoch{epochs}.ckpt"
    trainer.save_checkpoint(path)
    return module, path


def main():
    """Train six epochs, and six with a stop after two."""
    # Lightning recommends more workers for its loaders.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = train(6, folder)
        _, path = train(2, folder)
        resumed, _ = train(6, folder, path)
    equal = same(whole, resumed)
    loss, steps = whole.losses[-1], whole.kfac.steps
    print(f"loss {loss:.3g}, {steps} steps; resumed to the bit: {equal}")
    assert loss < 0.3
    assert steps == 24
    assert equal


if __name__ == "__main__":
    main()
