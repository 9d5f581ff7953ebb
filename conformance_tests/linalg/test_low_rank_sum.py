"""Sums of outer products in few columns: stacks of them (A13)."""

import numpy as np

from kfac_core.array.place import Place
from kfac_core.linalg.low_rank import LowRankSum

from ..builders.tolerances import assert_close


def test_stacks_are_compressed_each_for_itself(backend, rng):
    """Leading axes are independent problems."""
    X = rng.normal(size=(2, 4, 3))
    place = Place(backend.xp, backend.xp.float64, backend.device)
    zero = LowRankSum(place.zeros(2, 4, 2), place.zeros(2))

    made = zero.plus(backend.asarray(X))

    B = backend.to_numpy(made.root)
    for i in range(2):
        w, Q = np.linalg.eigh(X[i] @ X[i].T)
        best = (Q[:, -2:] * w[-2:]) @ Q[:, -2:].T
        assert_close(B[i] @ B[i].T, best, "inverse", "float64")
        assert_close(
            backend.to_numpy(made.truncated_trace)[i],
            w[:-2].sum(),
            "inverse",
            "float64",
        )
