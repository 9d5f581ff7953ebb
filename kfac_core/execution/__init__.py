"""How the loops over blocks are run: stacks, threads, another library's memory.

An *executor* runs the loop over a network's blocks: `kfac_core.Network.update`,
`~kfac_core.Network.refresh` and the products take one, and so does
`kfac_core.Estimator`.  It is called with a function of one block and, by name, the
arguments for each, and returns what the function returns for each, up to rounding:
*what* is computed is no business of it.  Executors stand in one another, as in
``Stacked(Threaded(2))``.
"""

from kfac_core.execution.background import BackgroundRefresh
from kfac_core.execution.hosted import Hosted
from kfac_core.execution.stacked import Stacked
from kfac_core.execution.threaded import Threaded
from kfac_core.network import Executor, plain

__all__ = [
    "BackgroundRefresh",
    "Executor",
    "Hosted",
    "Stacked",
    "Threaded",
    "plain",
]
