"""Which layers of Keras have blocks, and how their calls are tapped.

Conventions.  x is what a layer was called with, g what comes back to its output before the
activation.  A recurrent layer has two blocks, and a block's parameter may be one row of a
variable (of a bias of two rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras import layers, ops

import kfac_core as kc
from kfac_core_shims.keras import private
from kfac_core_shims.keras.taps import Tape

DENSE = layers.Dense
CONVOLUTIONS = layers.Conv1D, layers.Conv2D, layers.Conv3D
NORMALIZATIONS = layers.LayerNormalization, layers.BatchNormalization
RECURRENT = layers.LSTM, layers.GRU, layers.SimpleRNN


@dataclass(frozen=True)
class Place:
    """Where a block's parameter is: a variable, or one row of it."""

    variable: Any
    row: int | None = None


@dataclass(frozen=True)
class Site:
    """A block of a layer, and the places of its parameters by role."""

    layer: Any
    block: kc.Block
    places: dict[str, Place]

    @property
    def trainable(self) -> bool:
        """Whether all of its parameters are trained."""
        return all(place.variable.trainable for place in self.places.values())


def sites_of(layer: Any) -> dict[str, Site]:
    """Return a layer's blocks by part; none for one that is not known.

    Parameters
    ----------
    layer : keras.layers.Layer
        A built layer.

    Returns
    -------
    dict of str to Site
        Parts are ``""`` for all there is, ``"kernel"`` and ``"recurrent_kernel"``.
    """
    # A subclass may compute anything: only what is known exactly has blocks.
    kind = type(layer)
    sites: dict[str, Site] = {}
    if not layer.built:
        return {}
    if kind in RECURRENT:
        sites = _recurrent(layer)
    elif _is_changed(layer):
        return {}
    elif kind is layers.EinsumDense:
        sites = _einsum_dense(layer)
    elif kind is DENSE:
        n, m = layer.kernel.shape
        sites = {"": _dense(layer, n, m, layer.kernel, layer.bias)}
    elif kind in CONVOLUTIONS:
        sites = {"": _convolution(layer)}
    elif kind is layers.Embedding:
        n, m = layer.embeddings.shape
        table = kc.Embedding(num_embeddings=n, features=m, weight_layout="io")
        block = kc.Block(table, kc.Kronecker(input="diagonal"))
        sites = {"": Site(layer, block, {"weight": Place(layer.embeddings)})}
    elif kind in NORMALIZATIONS and layer.axis in (-1, [-1]):
        sites = _normalization(layer)
    return sites if all(site.trainable for site in sites.values()) else {}


def tapped(names: dict[str, str], layer: Any, tape: Tape) -> dict[str, Any]:
    """Return the attributes with which a layer's calls go on a tape.

    Parameters
    ----------
    names : dict of str to str
        Names of the blocks of the layer's parts.
    layer : keras.layers.Layer
        The layer.
    tape : Tape
        The tape.

    Returns
    -------
    dict of str to object
        Attributes to set while the model runs.
    """
    kind, call = type(layer), layer.call
    if kind in RECURRENT:
        from kfac_core_shims.keras.recurrent import recurrent_call

        return {"call": recurrent_call(names, layer, tape)}
    [name] = names.values()
    if kind is layers.Embedding:

        def looked_up(x: Any) -> Any:
            ids = ops.cast(x, "int32")
            mask = ops.not_equal(ids, 0) if layer.mask_zero else None
            return tape.tap(name, ids, call(x), mask)

        return {"call": looked_up}
    if kind in NORMALIZATIONS:
        return _tapped_normalization(name, layer, tape)
    seen: list[Any] = []

    def called(x: Any, *args: Any, **options: Any) -> Any:
        seen.append((x, private.mask_of(x)))
        return call(x, *args, **options)

    # Tapped before the activation, where the output gradients are g.
    act = layer.activation or (lambda z: z)
    einsum = _einsum_sizes(layer) if kind is layers.EinsumDense else None

    def activation(z: Any) -> Any:
        x, mask = seen.pop()
        if einsum is not None:
            rows, n, m = einsum
            x = ops.reshape(x, (*x.shape[:rows], n))
            flat = ops.reshape(z, (*x.shape[:-1], m))
            return act(ops.reshape(tape.tap(name, x, flat, mask), z.shape))
        return act(tape.tap(name, x, z, mask))

    return {"call": called, "activation": activation}


def _is_changed(layer: Any) -> bool:
    """Whether an option makes a layer another computation than its weights'."""
    lora = getattr(layer, "lora_enabled", False)
    return bool(lora or getattr(layer, "quantization_mode", None))


def _dense(layer: Any, n: int, m: int, weight: Any, bias: Any, row: Any = None) -> Site:
    dense = kc.Dense(
        in_features=n, out_features=m, bias=bias is not None, weight_layout="io"
    )
    places = {"weight": Place(weight)}
    if bias is not None:
        places["bias"] = Place(bias, row)
    return Site(layer, kc.Block(dense, kc.Kronecker()), places)


def _convolution(layer: Any) -> Site:
    padding: Any = layer.padding
    if padding == "causal":
        before = (layer.kernel_size[0] - 1) * layer.dilation_rate[0]
        padding = ((before, 0),)
    conv = kc.Conv(
        in_channels=layer.kernel.shape[-2] * layer.groups,
        out_channels=layer.filters,
        kernel_size=tuple(layer.kernel_size),
        strides=layer.strides,
        dilation=layer.dilation_rate,
        padding=padding,
        groups=layer.groups,
        bias=layer.bias is not None,
        weight_layout="spatial_io",
        data_layout=layer.data_format,
    )
    places = {"weight": Place(layer.kernel)}
    if layer.bias is not None:
        places["bias"] = Place(layer.bias)
    return Site(layer, kc.Block(conv, kc.Kronecker()), places)


def _normalization(layer: Any) -> dict[str, Site]:
    variables = {"scale": layer.gamma, "shift": layer.beta}
    places = {role: Place(v) for role, v in variables.items() if v is not None}
    if not places:
        return {}
    shapes = {
        f"{role}_shape": None if v is None else v.shape for role, v in variables.items()
    }
    block = kc.Block(kc.ScaleShift(**shapes), kc.Diagonal())
    return {"": Site(layer, block, places)}


def _tapped_normalization(name: str, layer: Any, tape: Tape) -> dict[str, Any]:
    call, gamma, beta = layer.call, layer.gamma, layer.beta

    def normalized(x: Any, **options: Any) -> Any:
        y = x = call(x, **options)
        y = y if gamma is None else y * ops.cast(gamma, x.dtype)
        y = y if beta is None else y + ops.cast(beta, x.dtype)
        # Padding that counts for nothing has output gradients of zero.
        return tape.tap(name, x, y)

    # The layer itself only normalizes meanwhile.
    return {"call": normalized, **dict.fromkeys(("gamma", "beta", "scale", "center"))}


def _einsum_dense(layer: Any) -> dict[str, Site]:
    """Return the block of an equation that is a dense layer on trailing axes."""
    sizes = _einsum_sizes(layer)
    if sizes is None:
        return {}
    _, n, m = sizes
    if layer.bias is not None and math.prod(layer.bias.shape) != m:
        return {}
    return {"": _dense(layer, n, m, layer.kernel, layer.bias)}


def _einsum_sizes(layer: Any) -> tuple[int, int, int] | None:
    """Return axes of rows, features in, and features out; None for other equations."""
    # An ellipsis stands for axes before the others: one letter will do.
    left, y = layer.equation.replace(" ", "").replace("...", ".").split("->")
    x, kernel = left.split(",")
    summed = "".join(letter for letter in kernel if letter not in y)
    rows, k = len(x) - len(summed), len(summed)
    # The kernel is (summed, outputs); inputs end in `summed`, and outputs in `outputs`.
    outputs = kernel[k:]
    if (kernel[:k], x[rows:], y) != (summed, summed, x[:rows] + outputs):
        return None
    shape = layer.kernel.shape
    return rows, math.prod(shape[:k]), math.prod(shape[k:])


def _recurrent(layer: Any) -> dict[str, Site]:
    """Return the blocks of the kernel and of the recurrent kernel."""
    cell = layer.cell
    unknown = layer.stateful or cell.dropout or cell.recurrent_dropout
    if type(layer) is layers.GRU:
        unknown = unknown or not cell.reset_after
    if unknown or _is_changed(layer) or _is_changed(cell):
        return {}
    n, m = cell.kernel.shape
    u = cell.units
    two = type(layer) is layers.GRU and cell.bias is not None
    return {
        "kernel": _dense(layer, n, m, cell.kernel, cell.bias, 0 if two else None),
        "recurrent_kernel": _dense(
            layer, u, m, cell.recurrent_kernel, cell.bias if two else None, 1
        ),
    }


def each_site(model: Any) -> Iterator[tuple[Any, dict[str, Site]]]:
    """Yield the layers of a built model with their sites, which may be none."""
    for layer in private.layers_of(model):
        yield layer, sites_of(layer)
