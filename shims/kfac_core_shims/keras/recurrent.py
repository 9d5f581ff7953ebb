"""The recurrent layers of Keras, written out so that their products can be tapped.

Conventions.  The inputs' product is taken for all time steps at once,
``X W + b`` of shape (N, T, gates * units), the recurrent product step by step.  Both have g
of the same shape.  Keras's own fused loops compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import layers, ops

from kfac_core_shims.keras.taps import Tape


def recurrent_call(names: dict[str, str], layer: Any, tape: Tape) -> Callable[..., Any]:
    """Return the call of an `LSTM`, `GRU` or `SimpleRNN` layer on a tape.

    Parameters
    ----------
    names : dict of str to str
        Block names of the parts ``"kernel"`` and ``"recurrent_kernel"``.
    layer : keras.layers.Layer
        The layer, without dropout; not stateful.
    tape : Tape
        The tape.

    Returns
    -------
    callable
        Of ``(sequences, initial_state=None, mask=None, training=False)``.
    """
    cell = layer.cell
    advance = {
        layers.LSTM: _lstm,
        layers.GRU: _gru,
        layers.SimpleRNN: _simple,
    }[type(layer)]

    def call(
        sequences: Any,
        initial_state: Any = None,
        mask: Any = None,
        training: Any = False,
    ) -> Any:
        dtype = layer.compute_dtype
        x = ops.flip(sequences, axis=1) if layer.go_backwards else sequences
        if mask is not None:
            mask = ops.flip(mask, axis=1) if layer.go_backwards else mask
        W, U, b, c = _weights(layer, dtype)
        product = ops.matmul(x, W)
        product = product if b is None else product + b
        product = tape.tap(names["kernel"], x, product, mask)
        # One use for all time steps: its inputs, the states, come step by step.
        added = tape.begin(names["recurrent_kernel"], product)
        use = tape.uses[-1]

        states = initial_state
        if states is None:
            states = layer.get_initial_state(batch_size=ops.shape(x)[0])
        elif not isinstance(states, list | tuple):
            states = [states]  # the state of a GRU or a SimpleRNN, by itself
        states = [ops.cast(s, dtype) for s in states]
        before, outputs = [], []
        last = ops.zeros_like(states[0])
        for t in range(x.shape[1]):
            before.append(states[0])
            inner = ops.matmul(states[0], U)
            inner = (inner if c is None else inner + c) + added[:, t]
            new = advance(cell, product[:, t], inner, states)
            output = new[0]
            if mask is not None:
                counted = ops.expand_dims(mask[:, t], -1)
                new = [
                    ops.where(counted, n, s) for n, s in zip(new, states, strict=True)
                ]
                missing = ops.zeros_like(last) if layer.zero_output_for_mask else last
                output = ops.where(counted, output, missing)
            states, last = new, output
            outputs.append(output)
        use.inputs, use.mask = ops.stack(before, axis=1), mask
        result = ops.stack(outputs, axis=1) if layer.return_sequences else last
        return (result, *states) if layer.return_state else result

    return call


def _weights(layer: Any, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Return kernel, recurrent kernel, and the bias of each product."""
    cell = layer.cell
    W, U = ops.cast(cell.kernel, dtype), ops.cast(cell.recurrent_kernel, dtype)
    if cell.bias is None:
        return W, U, None, None
    bias = ops.cast(cell.bias, dtype)
    if len(bias.shape) == 2:
        return W, U, bias[0], bias[1]
    return W, U, bias, None


def _lstm(cell: Any, product: Any, inner: Any, states: list[Any]) -> list[Any]:
    i, f, g, o = ops.split(product + inner, 4, axis=1)
    gate = cell.recurrent_activation
    c = gate(f) * states[1] + gate(i) * cell.activation(g)
    return [gate(o) * cell.activation(c), c]


def _gru(cell: Any, product: Any, inner: Any, states: list[Any]) -> list[Any]:
    x_z, x_r, x_h = ops.split(product, 3, axis=1)
    h_z, h_r, h_h = ops.split(inner, 3, axis=1)
    z = cell.recurrent_activation(x_z + h_z)
    r = cell.recurrent_activation(x_r + h_r)
    return [z * states[0] + (1 - z) * cell.activation(x_h + r * h_h)]


def _simple(cell: Any, product: Any, inner: Any, states: list[Any]) -> list[Any]:
    return [cell.activation(product + inner)]
