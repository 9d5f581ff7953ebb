"""IKFAC: K-FAC's inverse factors, moved by products instead of inverted.

Lin, Dangel, Eschenhagen et al. (2024), arXiv:2312.05705.  Each factor has the damping
``sqrt(damping)``.
"""

import numpy as np

import kfac_core as kc
from methods.curvature import DECAY


class IKFAC:
    """``K K^T V C C^T`` for each layer."""

    def __init__(self, problem, *, damping):
        self.layers, self.damping = problem.layers, damping
        self.roots, self.steps = {}, 0

    def direction(self, seen):
        self.steps += 1
        found = {}
        for name, batch in seen.of_model().items():
            layer = self.layers[name]
            sides = moments(layer.rows(batch))
            old = self.roots.get(name) or [self.start(*side) for side in sides]
            new = [self.moved(K, *side) for K, side in zip(old, sides, strict=True)]
            self.roots[name] = new
            V = layer.parameters_to_matrix(seen.gradient[name])
            found[name] = layer.matrix_to_parameters(
                kc.roots.precondition_by_roots(*new, V)
            )
        return found

    def start(self, rows, scale):
        """Return a root that is no larger than that of the first batch's inverse."""
        trace = scale * np.sum(rows * rows)
        size = (trace + self.damping**0.5) ** -0.5
        return kc.roots.factor_root(rows.shape[1], form="dense", scale=size, like=rows)

    def moved(self, root, rows, scale):
        """Return the root after one update."""
        # As long as there are few batches, each counts for more, as in K-FAC's averages.
        return kc.roots.ikfac_updated(
            root,
            rows,
            scale=scale,
            damping=self.damping**0.5,
            step=max(1.0 / (self.steps + 1), 1.0 - DECAY),
            check="status",
        )


def moments(rows):
    """Return both sides' rows, each with the scale of its moment.

    The mean over positions belongs to the inputs, the sum to the output gradients.
    """
    x = rows.inputs.reshape(-1, rows.inputs.shape[-1])
    x = np.concatenate([x, np.ones_like(x[:, :1])], axis=1)
    g = rows.output_grads.reshape(-1, rows.output_grads.shape[-1])
    return (x, 1.0 / len(x)), (g, 1.0 / rows.examples)
