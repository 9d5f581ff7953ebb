"""Who computes: one adapter a library, each in a process of its own.

`LIBRARIES` says what there is.  An adapter is imported in its process only, and imports
no other library than its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.libraries.library import Library

__all__ = ["LIBRARIES", "Entry", "make_library"]


@dataclass(frozen=True)
class Entry:
    """An adapter, and what a table should say of it.

    Attributes
    ----------
    module, argument : str
        The adapter's module here, and what its ``make`` is given.
    title : str
        What a table should call it.
    needs : tuple of str
        The modules that must be importable.
    devices : tuple of str
        Where it runs.
    core : bool
        Whether it is the library that the others are peers of.
    includes : str
        What its figures include and leave out.
    kernels : bool
        Whether it is no library but an array library's own calls, with nothing around
        them.
    """

    module: str
    title: str
    needs: tuple[str, ...]
    includes: str
    argument: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    core: bool = False
    kernels: bool = False


_CORE = (
    "Estimator.update, refresh and precondition, with the finite-input guards, the "
    "residual checks and fallbacks on; gradients come and go as the framework's parameters"
)
LIBRARIES = {
    "numpy": Entry(
        "core", "kfac_core numpy", ("kfac_core",), _CORE, "numpy", ("cpu",), True
    ),
    "torch": Entry(
        "core", "kfac_core torch", ("kfac_core", "torch"), _CORE, "torch", core=True
    ),
    "jax": Entry(
        module="core",
        argument="jax",
        title="kfac_core jax",
        needs=("kfac_core", "jax"),
        core=True,
        includes=f"{_CORE}; each stage one compiled program, the statistics donated",
    ),
    "cupy": Entry(
        "core", "kfac_core cupy", ("kfac_core", "cupy"), _CORE, "cupy", ("cuda",), True
    ),
    "curvlinops": Entry(
        module="curvlinops",
        title="curvlinops",
        needs=("curvlinops", "torch"),
        includes="the functions behind its hooks, fed rows, with no network, hooks or "
        "autograd; a sum over batches and no moving average; KFACInverseLinearOperator "
        "with heuristic or exact damping; no residual checks",
    ),
    "kfac-jax": Entry(
        module="kfac_jax",
        argument="lu",
        title="kfac-jax",
        needs=("kfac_jax", "jax"),
        includes="DenseTwoKroneckerFactored blocks fed rows, each stage one compiled "
        "function with donated states; inverses by LU, its default; no residual checks",
    ),
    "kfac-jax-cholesky": Entry(
        module="kfac_jax",
        argument="cholesky",
        title="kfac-jax, Cholesky",
        needs=("kfac_jax", "jax"),
        includes="as kfac-jax, with set_use_cholesky_inversion(True)",
    ),
    "torch-kernels": Entry(
        module="torch_kernels",
        title="plain PyTorch",
        needs=("torch",),
        includes="no library but PyTorch's own calls in the plainest order: ADDMM with the "
        "average in beta (the column of ones is given), cholesky_ex, cholesky_inverse, "
        "MM, eigh; no guards, no residual checks, no layouts",
        kernels=True,
    ),
    "cuda-kernels": Entry(
        module="torch_kernels",
        argument="syrk",
        title="cuBLAS, cuSOLVER",
        needs=("torch", "cupy"),
        devices=("cuda",),
        core=False,
        includes="as plain PyTorch, with cuBLAS's SYRK for the statistics",
        kernels=True,
    ),
    "lapack": Entry(
        module="lapack",
        title="plain BLAS, LAPACK",
        needs=("scipy",),
        devices=("cpu",),
        includes="no library but SciPy's bindings in the best plain order found: SYRK with "
        "the average in beta (the column of ones is given), POTRF, POTRI, SYMM, SYEVD on "
        "one triangle; no guards, no residual checks, no layouts",
        kernels=True,
    ),
}


def make_library(name: str, /, *, device: str, threads: int) -> Library:
    """Import an adapter and return the library.

    Parameters
    ----------
    name : str
        One of `LIBRARIES`.
    device : {"cpu", "cuda"}
        Where it computes.
    threads : int
        How many of the host.

    Returns
    -------
    Library
        Ready to be prepared.
    """
    entry = LIBRARIES[name]
    module = importlib.import_module(f"benchmarks.libraries.{entry.module}")
    library: Library = module.make(entry.argument, device=device, threads=threads)
    return library
