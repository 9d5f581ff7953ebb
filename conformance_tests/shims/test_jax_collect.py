"""Statistics of a data set on JAX: those of NumPy's formulas, killed or not."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.posterior import spectral_blocks

jax = pytest.importorskip("jax")
jnp = jax.numpy
from kfac_core_shims.jax import Network, collect  # noqa: E402


class KilledError(Exception):
    """A run was killed."""


def apply(params, x):
    h = jnp.tanh(x @ params["A"] + params["a"])
    return h @ params["B"] + params["b"]


def problem(rng):
    shapes = {"A": (4, 5), "a": (5,), "B": (5, 3), "b": (3,)}
    params = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(21, 4)), jnp.float32)
    return Network(apply, params, x), params, x


def with_aux(params, x):
    return apply(params, x), x


@pytest.mark.parametrize("function", [apply, with_aux])
def test_moments_are_the_diagonal_of_the_dense_block_in_its_basis(rng, function):
    _, params, x = problem(rng)
    network = Network(function, params, x, has_aux=function is with_aux)
    data = [x[:8], x[8:16], x[16:]]
    found = collect(
        network, params, data, likelihood=kc.losses.Categorical(), fisher="exact"
    )
    J = jax.vmap(jax.jacrev(apply), (None, 0))(params, x)
    p = np.asarray(jax.nn.softmax(apply(params, x)), np.float64)
    H = np.einsum("nc,cd->ncd", p, np.eye(3)) - p[:, :, None] * p[:, None, :]
    rows = np.concatenate([J["B"], J["b"][:, :, None, :]], axis=2).reshape(21, 3, -1)
    F = np.einsum("nci,ncd,ndj->ij", rows, H, rows) / 21
    spectra = spectral_blocks(found.blocks, found.statistics)
    name = next(n for n, b in found.blocks.items() if b.layer.matrix_shape == (6, 3))
    bases = found.statistics[name].bases
    Q = np.kron(*(np.asarray(bases[s].eigenvectors) for s in ("input", "output")))
    assert found.examples == 21
    np.testing.assert_allclose(
        np.ravel(spectra[name].spectrum), np.diag(Q.T @ F @ Q), rtol=1e-4, atol=1e-6
    )


def test_a_likelihood_may_change_between_two_calls(rng):
    """One of a program's own, without a hash: the second call takes what it is then."""
    network, params, x = problem(rng)

    class Scaled(kc.losses.Gaussian):
        __hash__ = None

    likelihood = Scaled(variance=1.0)
    grams = []
    for variance in (1.0, 4.0):
        object.__setattr__(likelihood, "variance", variance)
        sums = collect(network, params, [x], likelihood=likelihood, fisher="exact")
        average = next(iter(sums.statistics.values())).averages["output"]
        grams.append(np.asarray(average.value(debias=True).full()))
    np.testing.assert_allclose(grams[0], 4.0 * grams[1], rtol=1e-5)


def test_a_killed_run_is_resumed_to_the_bit(rng, tmp_path):
    network, params, x = problem(rng)
    data, left = [x[:8], x[8:16], x[16:]], [5]

    def progress(done, total):
        left[0] -= 1
        if not left[0]:
            raise KilledError

    options = {"likelihood": kc.losses.Categorical(), "save_every": 1}
    whole, path = tmp_path / "whole.npz", tmp_path / "stopped.npz"
    collect(network, params, data, path=whole, **options)
    with pytest.raises(KilledError):
        collect(network, params, data, path=path, progress=progress, **options)
    collect(network, params, data, path=path, **options)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("in_file", [False, True])
def test_statistics_of_a_model_in_bfloat16_are_float32_arrays_of_jax(
    rng, tmp_path, in_file
):
    _, params, x = problem(rng)
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    found = collect(
        Network(apply, params, x),
        params,
        [x[:9], x[9:]],
        likelihood=kc.losses.Categorical(),
        path=tmp_path / "factors.npz" if in_file else None,
    )
    name = next(n for n, b in found.blocks.items() if b.layer.matrix_shape == (5, 5))
    A = found.statistics[name].averages["input"].value(debias=True).full()
    assert isinstance(A, jax.Array)
    assert A.dtype == jnp.float32
    rows = np.c_[np.asarray(x, np.float64), np.ones(21)]
    np.testing.assert_allclose(A, rows.T @ rows / 21, rtol=1e-5)


@pytest.mark.parametrize("pair", [tuple, list, lambda x: dict(enumerate(x))])
def test_a_batch_with_labels_raises(rng, pair):
    network, params, x = problem(rng)
    with pytest.raises(kc.ConventionError, match="Leave labels out"):
        collect(
            network,
            params,
            [pair([x, x[:, 0]])],
            likelihood=kc.losses.Categorical(),
        )


def test_a_file_of_other_parameters_or_options_is_refused(rng, tmp_path):
    network, params, x = problem(rng)
    options = {"likelihood": kc.losses.Categorical(), "path": tmp_path / "factors.npz"}
    collect(network, params, [x], **options)
    assert collect(network, dict(params), [], **options).examples == 21
    other = {**params, "b": params["b"] + 1.0}
    with pytest.raises(kc.StateError, match=r"factors\.npz.*other params.*Delete"):
        collect(network, other, [x], **options)
    with pytest.raises(kc.StateError, match="other samples, other positions"):
        collect(network, params, [x], samples=2, positions="separate", **options)
