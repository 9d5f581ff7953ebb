"""K-FAC with fully_shard (FSDP2) on several processes, beside one with all rows.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo.  The loop
is that of `torch_ddp.py`: `KFAC` finds that parameters are divided.  The owner of a layer
gets the slices of its gradient and sends those of the direction; no other process has the
whole of either.
"""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard
from torch_ddp import main


def divided(model):
    """Divide the parameters of each layer among all processes."""
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


if __name__ == "__main__":
    main(wrap=divided)
