"""A loop of accelerate, with gradient accumulation and resumption.

Needs `pip install accelerate torch`.  On several processes (`accelerate launch`) the rows
are those of all.
"""

import tempfile

import torch
from accelerate import Accelerator
from problem import data, network, same
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kfac_core_shims.torch import KFAC


class Run:
    """What accelerate prepares, and K-FAC."""

    def __init__(self):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(*data()), batch_size=32)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, loader
        )
        # K-FAC is made of what was prepared, and is saved with it.
        self.kfac = KFAC(self.model, lr=self.optimizer)
        self.accelerator.register_for_checkpointing(self.kfac)

    def train(self, epochs):
        """Train, and return the last loss."""
        for _ in range(epochs):
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(inputs), labels)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.kfac.step()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return float(loss.detach())


def main():
    """Train six epochs, and six with a stop after two."""
    whole, first, second = Run(), Run(), Run()
    loss = whole.train(6)
    with tempfile.TemporaryDirectory() as folder:
        first.train(2)
        first.accelerator.save_state(folder)
        second.accelerator.load_state(folder)
    second.train(4)
    equal = same(whole.model, second.model)
    print(f"loss {loss:.3g}, {whole.kfac.steps} steps; resumed to the bit: {equal}")
    assert loss < 0.3
    assert whole.kfac.steps == 24
    assert equal


if __name__ == "__main__":
    main()
