"""Sums of outer products in few columns: stacks of them, and sketches (A13)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg.low_rank import low_rank_zero, sketched
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs


def test_a_sketch_of_sufficient_rank_is_exact(backend, dtype, rng):
    """A13 for the randomized range finder; a rank that does not suffice differs."""
    sketch = backend.asarray(rng.normal(size=(7, 3)), dtype)
    for rank, iterations in ((3, 1), (5, 1), (5, 60)):
        A = reference.spd(rng, 7, rank=rank)
        w = np.linalg.eigvalsh(A)
        matrix = SymmetricMatrix(backend.asarray(A, dtype), whole=True)

        made = sketched(matrix, sketch, iterations=iterations, xp=backend.xp)

        B = backend.to_numpy(made.root)
        if rank == 3:
            assert_close(B @ B.T, A, "inverse", dtype)
        else:
            assert_differs(B @ B.T, A)
            assert float(made.lost) > (1 - 1e-4) * w[:-3].sum()
        if iterations == 60:
            assert_close(float(made.lost), w[:-3].sum(), "inverse", dtype)
        assert_close(float(made.trace()), np.trace(A), "gram", dtype, condition=10)

    for sketch, iterations in (
        (np.ones((7, 8)), 1),
        (np.ones((6, 2)), 1),
        (np.ones((7, 2)), 0),
    ):
        with pytest.raises(kc.ShapeError, match="Expected"):
            sketched(
                matrix,
                backend.asarray(sketch, dtype),
                iterations=iterations,
                xp=backend.xp,
            )


def test_stacks_are_compressed_each_for_itself(backend, rng):
    """Leading axes are independent problems."""
    X = rng.normal(size=(2, 4, 3))
    zero = low_rank_zero(
        (2, 4), rank=2, dtype=backend.xp.float64, device=backend.device, xp=backend.xp
    )

    made = zero.joined(backend.asarray(X))

    B = backend.to_numpy(made.root)
    for i in range(2):
        w, Q = np.linalg.eigh(X[i] @ X[i].T)
        best = (Q[:, -2:] * w[-2:]) @ Q[:, -2:].T
        assert_close(B[i] @ B[i].T, best, "inverse", "float64")
        assert_close(backend.to_numpy(made.lost)[i], w[:-2].sum(), "inverse", "float64")
