"""The rows of several processes on each of them."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.distributed import run_ranks
from kfac_core.samples import Jacobian, gathered_jacobian, sample_curvature

from ..builders.tolerances import assert_close

LAYERS = {
    "fc": kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io"),
    "words": kc.Embedding(num_embeddings=6, features=2, weight_layout="io"),
    "norm": kc.ScaleShift(scale_shape=(2,), shift_shape=(2,)),
    "bare": kc.Parameters(shapes={"a": (4,)}),
}
PARTS = slice(0, 4), slice(4, 4), slice(4, 7)


def test_directions_are_those_of_one_process(backend):
    """Of unequal parts, one of which is empty."""
    if backend.name not in ("numpy", "torch"):
        pytest.skip("virtual ranks exchange arrays of the host")
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(7, 2, 3)), rng.normal(size=(2, 7, 2, 2))
    D, r = rng.normal(size=(7, 2, 4)), rng.normal(size=(7, 2))

    mask = rng.random((7, 2)) < 0.7
    ids, words = rng.integers(0, 6, (7, 2)), rng.normal(size=(2, 7, 2, 2))

    def place(values, dtype="float64"):
        return backend.asarray(values, dtype)

    def jacobian(part):
        rows = kc.Batch(
            place(x[part]), place(g[:, part]), mask=place(mask[part], "bool"), sources=2
        )
        read = kc.Batch(place(ids[part], "int64"), place(words[:, part]), sources=2)
        scaled = kc.Batch(place(x[part, :, :2]), place(words[:, part]), sources=2)
        given = {
            "fc": rows,
            "words": read,
            "norm": scaled,
            "bare": {"a": place(D[part])},
        }
        return Jacobian.of(LAYERS, given)

    def direction(communicator):
        J = gathered_jacobian(jacobian(PARTS[communicator.rank]), communicator)
        return sample_curvature(J, damping=0.1).direction(place(r))

    expected = sample_curvature(jacobian(slice(7)), damping=0.1).direction(place(r))
    for found in run_ranks(3, direction):
        for layer, vector in expected.items():
            for name, value in vector.items():
                got, want = (backend.to_numpy(v) for v in (found[layer][name], value))
                assert_close(got, want, "inverse", "float64")
