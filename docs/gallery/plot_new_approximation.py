"""
A new approximation in one file
===============================

An approximation says which averages of a layer's rows are kept, and which operator they
make. :doc:`/new_approximation` explains every step, with a larger example.
"""

from dataclasses import dataclass

import numpy as np

import kfac_core as kc

# %%
# Kronecker factors have kinds: often nothing has to be written.

layer = kc.Dense(in_features=6, out_features=4, bias=True, weight_layout="io")
block = kc.Block(layer, kc.Kronecker(input="diagonal", output="diagonal"))


# %%
# Where the statistics differ, derive from the nearest approximation. Here the output factor
# holds the signs of the gradients alone, so that a few large ones do not decide.


@dataclass(frozen=True, kw_only=True)
class SignedOutputs(kc.Kronecker):
    """K-FAC, with the signs of output gradients in the place of their values."""

    name = "signed_outputs"

    def rows(self, layer, batch):
        signs = np.sign(batch.output_grads)
        return layer.rows(kc.Batch(batch.inputs, signs))


# %%
# Everything else works: products, inverses, powers, files, stacks, processes.

rng = np.random.default_rng(0)
inputs, output_grads = rng.normal(size=(64, 6)), rng.standard_t(2, size=(64, 4))
gradient = {
    "fc": {"weight": inputs.T @ output_grads / 64, "bias": output_grads.mean(0)}
}
for approximation in (kc.Kronecker(), SignedOutputs(), block.approximation):
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, approximation)}, reduction="sum", damping=0.1
    )
    estimator.update({"fc": kc.Batch(inputs, output_grads)})
    estimator.refresh()
    direction = estimator.precondition(gradient)["fc"]["weight"]
    trace = float(estimator.operator("fc").trace(damped=False))
    print(
        f"{approximation.name}: trace {trace:.3g}, norm {np.linalg.norm(direction):.3g}"
    )

# %%
# Checked against the definition, in plain NumPy.

x = np.concatenate([inputs, np.ones((64, 1))], axis=1)
signs = np.sign(output_grads)
A, G = x.T @ x / 64, signs.T @ signs / 64
estimator = kc.Estimator(
    {"fc": kc.Block(layer, SignedOutputs())}, reduction="sum", damping=0.1
)
estimator.update({"fc": kc.Batch(inputs, output_grads)})
estimator.refresh()
dense = estimator.operator("fc").to_dense(damped=False)
np.testing.assert_allclose(dense, np.kron(A, G), rtol=1e-10, atol=1e-12)
