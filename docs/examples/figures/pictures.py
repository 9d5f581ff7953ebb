"""The five pictures of the page that explains K-FAC.

A valley is a quadratic function of two numbers.  The other pictures show the dense layer of
`network`, 17 x 12: its factors, its exact block, and one step.
"""

from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc

from .drawing import BLUE, GREEN, ORANGE, RED, save
from .fidelity import fed
from .network import Array, Network, Seen, images

VALLEY = np.array([[13.0, 12.0], [12.0, 13.0]])
"""Curvatures 25 and 1, along the diagonals."""

DAMPINGS = 0.01, 0.1, 1.0
"""Over the mean eigenvalue of the block."""


def canvas(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure that is readable at the width of a telephone, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False).flat)
    for one in axes:
        one.tick_params(labelsize=10)
    return figure, axes


def descent(start: Array, *, inverse: Array, rate: float, steps: int) -> Array:
    """Return the points of ``w - rate * inverse @ gradient``, shape (steps + 1, 2)."""
    points = [start]
    for _ in range(steps):
        points.append(points[-1] - rate * inverse @ (VALLEY @ points[-1]))
    return np.array(points)


def draw_valley(path: Path) -> None:
    """Draw two ways down a valley whose curvatures differ by a factor of 25."""
    start = np.array([-1.0, 2.0])
    # Gradient descent diverges above 2 / 25, the largest curvature.
    ways = {
        "gradient, 20 steps": descent(start, inverse=np.eye(2), rate=0.07, steps=20),
        "gradient times inverse curvature, 5 steps": descent(
            start, inverse=np.linalg.inv(VALLEY), rate=0.6, steps=5
        ),
    }
    figure, [axes] = canvas(5.2, 4.0)
    x, y = np.meshgrid(np.linspace(-2.3, 2.3, 200), np.linspace(-2.3, 2.3, 200))
    w = np.stack([x, y], axis=-1)
    loss = 0.5 * np.einsum("...i,ij,...j->...", w, VALLEY, w)
    axes.contour(x, y, np.sqrt(loss), levels=12, colors="#bbbbbb", linewidths=0.8)
    for (label, points), color in zip(ways.items(), (ORANGE, GREEN), strict=True):
        axes.plot(*points.T, "o-", color=color, markersize=4, label=label)
    axes.plot(0, 0, "k*", markersize=9)
    axes.set(xlabel="first weight", ylabel="second weight")
    axes.legend(loc="lower left", fontsize=10, framealpha=1.0)
    save(figure, path)


def factors(seen: Seen) -> tuple[Array, Array]:
    """Return A = E[x x^T] and G = E[g g^T] in plain NumPy, the bias input last."""
    x = seen.rows[:, 0]
    g = seen.output_grads
    return x.T @ x / len(x), np.einsum("mno,mnp->op", g, g) / len(x)


def draw_factors(seen: Seen, path: Path) -> None:
    """Draw A and G as heat maps."""
    A, G = factors(seen)
    titles = f"A, {len(A)} x {len(A)}: inputs", f"G, {len(G)} x {len(G)}: gradients"
    figure, axes = canvas(5.2, 2.9, panels=2)
    for one, matrix, title in zip(axes, (A, G), titles, strict=True):
        _heat_map(one, matrix, title)
    save(figure, path)


def blocks(seen: Seen) -> dict[str, Array]:
    """Return the exact block and two approximations, in its order of entries."""
    _, n, m = seen.gradients.shape
    layer = kc.Dense(in_features=n - 1, out_features=m, bias=True, weight_layout="io")
    dense = {"exact": seen.dense_block()}
    for name, approximation in {
        r"K-FAC: $A \otimes G$": kc.Kronecker(),
        "EKFAC": kc.EKFAC(),
    }.items():
        block = kc.Block(layer, approximation)
        operator = kc.operator_of(
            block, fed(block, seen), kc.RefreshOptions(damping=0.0, rule="exact")
        )
        dense[name] = operator.to_dense()
    return dense


def draw_blocks(seen: Seen, path: Path) -> None:
    """Draw a corner of the exact block, of A (x) G and of EKFAC, in one color scale."""
    dense = blocks(seen)
    exact = dense["exact"]
    corner = 4 * seen.gradients.shape[2]
    # The last inputs include the bias, which every example has.
    shown = slice(-corner, None)
    figure, axes = canvas(5.4, 2.5, panels=3)
    for one, (name, block) in zip(axes, dense.items(), strict=True):
        error = np.linalg.norm(block - exact) / np.linalg.norm(exact)
        title = name if name == "exact" else f"{name}\nerror {error:.2f}"
        # Colors saturate at a third of the largest entry, to show the small ones.
        limit = np.abs(exact[shown, shown]).max() / 3.0
        _heat_map(one, block[shown, shown], title, limit=limit)
    save(figure, path)


def draw_damping(seen: Seen, path: Path) -> None:
    """Draw which share of a Newton step is taken along each eigenvector, by damping."""
    A, G = factors(seen)
    eigenvalues = np.outer(np.linalg.eigvalsh(A), np.linalg.eigvalsh(G)).ravel()
    mean = eigenvalues.mean()
    grid = np.logspace(-5, 2, 200)
    figure, [axes] = canvas(5.2, 3.4)
    for damping, color in zip(DAMPINGS, (BLUE, GREEN, RED), strict=True):
        share = grid / (grid + damping)
        axes.semilogx(grid, share, color=color, label=f"damping {damping:g} x mean")
    visible = np.clip(eigenvalues / mean, grid[0], None)
    axes.plot(visible, np.full_like(visible, -0.07), "|", color="black", markersize=9)
    axes.set(
        xlabel="eigenvalue of the block / mean eigenvalue (ticks: this layer's)",
        ylabel="share of a Newton step",
        ylim=(-0.12, 1.05),
    )
    axes.legend(fontsize=10, frameon=False)
    save(figure, path)


def losses_along(lengths: Array) -> dict[str, Array]:
    """Return losses of a network along two directions of one layer, by their length.

    The directions are the gradient of all examples, and that preconditioned by K-FAC with a
    damping of a thirtieth of the mean eigenvalue.
    """
    count = 512
    x, labels = images(4, count)
    x = x.reshape(count, 16)
    network = Network(x[:, None], labels, hidden=12).trained(steps=400, rate=0.5)
    layer = kc.Dense(in_features=16, out_features=12, bias=True, weight_layout="io")
    seen = network.seen("dense layer, 17 x 12", layer, x, ())
    block = kc.Block(layer, kc.Kronecker())
    A, G = factors(seen)
    mean = np.trace(A) * np.trace(G) / (len(A) * len(G))
    options = kc.RefreshOptions(damping=mean / 30.0, rule="factored_unit_pi")
    operator = kc.operator_of(block, fed(block, seen), options)
    gradient = seen.gradients.mean(axis=0)
    directions = {"gradient": gradient, "K-FAC": operator.multiply_inverse(gradient)}
    start, losses = network.W, {}
    for name, direction in directions.items():
        unit = direction / np.linalg.norm(direction)
        values = []
        for length in lengths:
            network.W = start - length * unit
            values.append(_cross_entropy(network))
        losses[name] = np.array(values)
    network.W = start
    return losses


def draw_step(path: Path) -> None:
    """Draw the loss along the gradient and along K-FAC's direction."""
    lengths = np.linspace(0.0, 14.0, 141)
    figure, [axes] = canvas(5.2, 3.4)
    for (name, losses), color in zip(
        losses_along(lengths).items(), (ORANGE, GREEN), strict=True
    ):
        axes.plot(lengths, losses, color=color, label=name)
        lowest = losses.argmin()
        axes.plot(lengths[lowest], losses[lowest], "o", color=color)
    axes.set(xlabel="length of the step", ylabel="loss of all examples")
    axes.legend(fontsize=10, frameon=False)
    save(figure, path)


def _heat_map(axes: Any, matrix: Array, title: str, *, limit: float = 0.0) -> None:
    limit = limit or np.abs(matrix).max()
    axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set_title(title, fontsize=11)
    axes.set(xticks=[], yticks=[])


def _cross_entropy(network: Network) -> float:
    """Return the mean loss of all examples."""
    _, _, z = network.forward()
    top = z.max(axis=-1, keepdims=True)
    log_sum = top[..., 0] + np.log(np.exp(z - top).sum(axis=-1))
    return float(np.mean(log_sum - np.sum(z * network.labels, axis=-1)))
