"""K-FAC with tensor-parallel linear layers on several processes, beside one.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo.  The loop
is that of `torch_ddp.py`, but all processes have the same rows.  Of each layer's inputs and
output gradients a process takes its part of the examples, with all features; so the factors
are added up over processes as those of shards of data.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch_ddp import main


def divided(model):
    """Divide the columns of the first layer and the rows of the second."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Columns stay apart until the second layer; their number may be odd.
    columns = ColwiseParallel(use_local_output=False)
    plan = {"0": columns, "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


if __name__ == "__main__":
    main(wrap=divided, divided=False)
