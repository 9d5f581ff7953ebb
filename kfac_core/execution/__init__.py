"""How the loops over blocks are run: stacks, threads, another library's memory.

An *executor* runs the loop over a network's blocks: `kfac_core.Network.update`,
`~kfac_core.Network.refresh` and the products take one, and so does
`kfac_core.Estimator`.  It is called with a `Stage`, a function of one block, and with
the arguments for each block by name, and returns the results by name, up to rounding.
Executors are nested, as in ``Stacked(Threaded(2))``.
"""

from kfac_core.execution.background import BackgroundRefresh
from kfac_core.execution.hosted import Hosted
from kfac_core.execution.stacked import Stacked
from kfac_core.execution.threaded import Threaded
from kfac_core.stages import Executor, ProductCall, Stage, plain

__all__ = [
    "BackgroundRefresh",
    "Executor",
    "Hosted",
    "ProductCall",
    "Stage",
    "Stacked",
    "Threaded",
    "plain",
]
