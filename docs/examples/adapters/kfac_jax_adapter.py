"""kfac-jax behind the adapter of the conformance kit.

    kfac-core conformance --adapter docs/examples/adapters/kfac_jax_adapter.py:KfacJax

kfac-jax takes a function of parameters and a batch in which losses are registered, and
finds its layers by tracing it.  A registered loss is that of each example: the value that
the function returns, and so the reduction of the loss, does not enter the curvature.
What is translated:

* its squared error has no 1/2 before it, which ``weight=0.5`` puts there;
* ``fisher_empirical`` has 1/N^2 before the sum over examples, where the kit has 1/N.

With k the ratio of the two, ``H = k F``, the damped inverse is ``k (H + k damping
I)^-1``, by the factored rule as well.
"""

from __future__ import annotations

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np

from kfac_core_conformance import Capabilities, NotOfferedError

# Blocks are chosen by the kinds of layers that its tracer finds.
REPEATED = kfac_jax.RepeatedDenseKroneckerFactored
BLOCKS = {
    "kronecker": {},
    "unmasked": {"repeated_dense": functools.partial(REPEATED, use_masking=False)},
    "tnt": {"dense": kfac_jax.DenseTNT},
    "full": {"dense": kfac_jax.DenseFull},
    "diagonal": {"dense": kfac_jax.DenseDiagonal},
}


class KfacJax:
    name = "kfac-jax"
    version = importlib.metadata.version("kfac-jax")
    capabilities = Capabilities(
        weight_layout="io",
        bias_position="after",
        layers=("dense", "conv"),
        losses=("mse", "ce"),
        estimations=("ggn", "empirical"),
        approximations=("kronecker", "tnt", "full", "diagonal"),
        sharing=("expand",),
        reductions=("sum", "mean"),
        dtypes=("float64", "float32"),
        damping_rules=("factored", "exact"),
        moving_average=True,
        parts=True,
    )

    kronecker = "kronecker"

    def blocks(self, problem):
        with precision(problem):
            estimator, state, k = estimated(problem, self.kronecker)
            blocks = estimator.to_diagonal_block_dense_matrix(state)
            # In the order of the parameters, and not in that of the tracer.
            places = jax.tree.leaves([x[0] for x in estimator.params_block_index])
            return [np.asarray(blocks[i]) / k for i in places]

    def multiply(self, problem, vectors):
        with precision(problem):
            estimator, state, k = estimated(problem, self.kronecker)
            product = estimator.multiply(
                state,
                tuples(vectors),
                identity_weight=0.0,
                exact_power=True,
                use_cached=False,
                pmap_axis_name=None,
            )
            return dictionaries(vectors, product, 1 / k)

    def multiply_inverse(self, problem, vectors, *, damping, rule):
        with precision(problem):
            estimator, state, k = estimated(problem, self.kronecker)
            product = estimator.multiply_inverse(
                state,
                tuples(vectors),
                identity_weight=k * damping,
                exact_power=rule == "exact",
                use_cached=False,
                pmap_axis_name=None,
            )
            return dictionaries(vectors, product, k)


class Unmasked(KfacJax):
    """The same, with `use_masking=False` for layers that are used repeatedly."""

    kronecker = "unmasked"


def precision(problem):
    # In double precision its `ggn_exact` makes float64 vectors for float32 networks.
    return jax.enable_x64(problem.dtype == "float64")


# Several checks ask about one problem.
@functools.lru_cache(maxsize=4)
def estimated(problem, kronecker):
    """Return the estimator, its state, and how many times ours its curvature is."""
    approximation = problem.approximation
    if problem.shared and approximation != "kronecker":
        raise NotOfferedError(f"it has no block {approximation} for repeated layers")
    sizes = {len(data.inputs) for data in problem.updates}
    empirical = problem.estimation == "empirical"
    if empirical and (len(sizes) > 1 or problem.parts):
        raise NotOfferedError("its empirical Fisher matrix depends on the batch's size")
    estimator = kfac_jax.BlockDiagonalCurvature(
        functools.partial(registered, problem),
        default_estimation_mode="fisher_empirical" if empirical else "ggn_exact",
        layer_tag_to_block_ctor=BLOCKS[
            kronecker if approximation == "kronecker" else approximation
        ],
    )
    layers = problem.network.layers
    parameters = tuples([x.parameters(x.matrix, "io") for x in layers])
    state = estimator.init(
        rng=jax.random.PRNGKey(0),
        func_args=(parameters, batch(problem.updates[0])),
        exact_powers_to_cache=None,
        approx_powers_to_cache=None,
    )
    for data in problem.updates:
        old = problem.decay
        for part in problem.split(data):
            state = estimator.update_curvature_matrix_estimate(
                state,
                ema_old=old,
                ema_new=len(part.inputs) / len(data.inputs),
                identity_weight=0.0,
                batch_size=len(part.inputs),
                rng=jax.random.PRNGKey(0),
                func_args=(parameters, batch(part)),
            )
            old = 1.0
    return estimator, state, 1 / sizes.pop() if empirical else 1.0


def registered(problem, parameters, data):
    """Compute the network's outputs and register the loss."""
    network, (x, targets) = problem.network, data
    for k, (layer, (weight, *bias)) in enumerate(
        zip(network.layers, parameters, strict=True)
    ):
        if layer.kind == "conv":
            form = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, weight, (1, 1), "VALID", dimension_numbers=form
            )
        else:
            x = x @ weight
        if bias:
            x = x + bias[0]
        if network.activation == "tanh" and k + 1 < len(network.layers):
            x = jnp.tanh(x)
        if k == network.reduce_after:
            axes = tuple(range(1, x.ndim - 1))
            x = x.mean(axes) if network.reduction == "mean" else x.sum(axes)
    if problem.loss == "mse":
        kfac_jax.register_squared_error_loss(x, targets, weight=0.5)
        return 0.5 * jnp.sum((x - targets) ** 2) / len(x)
    kfac_jax.register_softmax_cross_entropy_loss(x, targets)
    return -jnp.sum(jax.nn.log_softmax(x) * targets) / len(x)


def batch(data):
    return jnp.asarray(data.inputs), jnp.asarray(data.targets)


def tuples(vectors):
    return [
        tuple(jnp.asarray(x) for x in parameters.values()) for parameters in vectors
    ]


def dictionaries(vectors, product, scale):
    return [
        dict(zip(parameters, (scale * np.asarray(x) for x in values), strict=True))
        for parameters, values in zip(vectors, product, strict=True)
    ]
