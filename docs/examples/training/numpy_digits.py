"""A convolutional classifier written by hand in NumPy, by K-FAC and by Adam.

Needs `pip install -e '.[demo]'`.  K-FAC takes its rate and momentum from the exact
quadratic model of each batch, for which the program differentiates the outputs along a
direction (`output_change`).  Adam has five learning rates, a factor of about three apart,
of which the best is the one with the least training loss (`curves.best`), measured with a
seed of its own.  Both have batches of 128, of the same order, and the same parameters to
begin with.
"""

import argparse
import time
from functools import partial

import numpy as np
from curves import Curve, best, plot, table
from data import batches, digits

import kfac_core as kc
from kfac_core_shims.numpy import KFAC

LIKELIHOOD = kc.losses.Categorical()
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
LAYERS = {
    name: kc.Conv(
        in_channels=channels,
        out_channels=16,
        kernel_size=(3, 3),
        strides=(2, 2),
        padding=((1, 1), (1, 1)),
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    for name, channels in (("conv1", 1), ("conv2", 16))
}


def initial(seed):
    """Return the parameters: two convolutions, a hidden layer, the classes."""
    rng = np.random.default_rng(seed)
    shapes = {
        "conv1": (3, 3, 1, 16),
        "conv2": (3, 3, 16, 16),
        "fc": (64, 32),
        "out": (32, 10),
    }
    return {
        name: {
            "weight": rng.normal(size=shape, scale=np.prod(shape[:-1]) ** -0.5).astype(
                np.float32
            ),
            "bias": np.zeros(shape[-1], np.float32),
        }
        for name, shape in shapes.items()
    }


def patches(x):
    """Return the 3 by 3 patches of each other pixel, shape (N, h / 2, w / 2, 9 c)."""
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
    seen = seen[:, ::2, ::2].transpose(0, 1, 2, 4, 5, 3)
    return seen.reshape(*seen.shape[:3], -1)


def unpatched(g, shape):
    """Return the sum of patches, put back where they came from."""
    n, h, w, c = shape
    g = g.reshape(n, h // 2, w // 2, 3, 3, c)
    x = np.zeros((n, h + 2, w + 2, c), g.dtype)
    for i in range(3):
        for j in range(3):
            x[:, i : i + h : 2, j : j + w : 2] += g[:, :, :, i, j]
    return x[:, 1:-1, 1:-1]


def forward(parameters, images):
    """Return each layer's inputs as its product wants them, and the logits."""
    x, seen, shapes = images[..., None], {}, {}
    for name, p in parameters.items():
        shapes[name] = x
        if name.startswith("conv"):
            x = patches(x)
        elif x.ndim > 2:
            x = x.reshape(len(x), -1)
        seen[name] = x
        x = x @ p["weight"].reshape(-1, p["weight"].shape[-1]) + p["bias"]
        if name != "out":
            x = np.tanh(x)
    return shapes, seen, x


def output_change(parameters, inputs, seen, direction):
    """Return the derivative of the logits along a direction."""
    change = None
    for name, p in parameters.items():
        out = p["weight"].shape[-1]
        d = direction[name]
        product = seen[name] @ d["weight"].reshape(-1, out) + d["bias"]
        if change is not None:
            # Through the tanh below this layer.
            below = change.reshape(inputs[name].shape) * (1.0 - inputs[name] ** 2)
            x = patches(below) if name.startswith("conv") else below
            product += x.reshape(seen[name].shape) @ p["weight"].reshape(-1, out)
        change = product
    return change


def exact_curvature(parameters, inputs, seen, z, directions):
    """Return ``d_i . F d_j`` with the exact Fisher matrix F of a batch."""
    changes = [
        LIKELIHOOD.fisher_factor_transpose_multiply(
            z, output_change(parameters, inputs, seen, d)
        )
        for d in directions
    ]
    return kc.steps.curvature_of_outputs(changes, changes, examples=len(z))


def backward(parameters, inputs, seen, g):
    """Return each layer's output gradients and parameters' gradients."""
    output_grads, gradients = {}, {}
    names = list(parameters)
    for i, name in reversed(list(enumerate(names))):
        p, x = parameters[name], seen[name]
        g2, x2 = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        weight = p["weight"].reshape(-1, g.shape[-1])
        output_grads[name] = g
        gradients[name] = {
            "weight": (x2.T @ g2).reshape(p["weight"].shape),
            "bias": g2.sum(axis=0),
        }
        if i:
            g = g @ weight.T
            below = inputs[name]
            g = unpatched(g, below.shape) if name.startswith("conv") else g
            g = g.reshape(below.shape) * (1.0 - below**2)
    return output_grads, gradients


def log_softmax(z):
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def mean_loss(parameters, images, labels):
    return loss_and_error(parameters, images, labels)[0]


def loss_and_error(parameters, images, labels):
    """Return the mean cross-entropy, and the part of wrong answers."""
    z = forward(parameters, images)[2]
    loss = -log_softmax(z)[np.arange(len(z)), labels].mean()
    return float(loss), float(np.mean(z.argmax(axis=1) != labels))


class Adam:
    """Adam (Kingma and Ba 2015), with the paper's constants."""

    wants_statistics = False

    def __init__(self, parameters, learning_rate):
        self.parameters, self.learning_rate, self.steps = parameters, learning_rate, 0
        self.m, self.v = {}, {}

    def step(self, gradients):
        self.steps += 1
        for name, arrays in gradients.items():
            for parameter, g in arrays.items():
                key = name, parameter
                m = self.m[key] = 0.9 * self.m.get(key, 0.0) + 0.1 * g
                v = self.v[key] = 0.999 * self.v.get(key, 0.0) + 0.001 * g * g
                m, v = m / (1.0 - 0.9**self.steps), v / (1.0 - 0.999**self.steps)
                change = self.learning_rate * m / (np.sqrt(v) + 1e-8)
                self.parameters[name][parameter] -= change.astype(g.dtype)


def optimizer(method, parameters, rate):
    if method == "Adam":
        return Adam(parameters, rate)
    return KFAC(
        parameters,
        likelihood=LIKELIHOOD,
        layers=LAYERS,
        damping=1e-3,
        min_damping=1e-3,
        update_every=2,
    )


def train(method, rate, *, steps, seed):
    """Return the curve of one run."""
    name = f"Adam ({rate:g})" if method == "Adam" else method
    data, curve = digits(), Curve(name)
    parameters = initial(seed)
    method_of = optimizer(method, parameters, rate)
    seconds = 0.0
    stream = batches(data.train_inputs, data.train_targets, size=128, seed=seed)
    for step in range(steps + 1):
        if step % 10 == 0:
            loss, _ = loss_and_error(parameters, data.train_inputs, data.train_targets)
            curve.add(step, seconds, loss)
            if step == steps:
                break
        images, labels = next(stream)
        start = time.process_time()
        inputs, seen, z = forward(parameters, images)
        p = np.exp(log_softmax(z))
        if method_of.wants_statistics:
            # The Fisher matrix is that of labels drawn from the model's own prediction.
            [g] = method_of.vectors(z)
            sampled, _ = backward(parameters, inputs, seen, g)
            for name, output_grads in sampled.items():
                # A convolution's inputs are images; patches are made by the core.
                x = inputs[name] if name.startswith("conv") else seen[name]
                method_of.observe(name, kc.Batch(x, output_grads))
        g = (p - np.eye(10, dtype=p.dtype)[labels]) / len(labels)
        gradients = backward(parameters, inputs, seen, g)[1]
        if method == "Adam":
            method_of.step(gradients)
        else:
            curvature = partial(exact_curvature, parameters, inputs, seen, z)
            loss = partial(mean_loss, parameters, images, labels)
            method_of.step(gradients, curvature=curvature, loss=loss)
        seconds += time.process_time() - start
    _, curve.test = loss_and_error(parameters, data.test_inputs, data.test_targets)
    return curve


def runs(*, steps, seeds):
    """Return the curves of K-FAC, and of Adam at its best learning rate."""
    tried = {rate: [train("Adam", rate, steps=steps, seed=100)] for rate in RATES}
    return [
        train(method, best(tried), steps=steps, seed=seed)
        for method in ("K-FAC", "Adam")
        for seed in range(seeds)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="numpy_digits.png")
    options = parser.parse_args()
    curves = runs(steps=options.steps, seeds=options.seeds)
    print(table(curves))
    plot(curves, options.output, title="Digits, a convolutional network in NumPy")


if __name__ == "__main__":
    main()
