"""A layer with a weight matrix, and the orders in which libraries store its parameters.

The matrix has shape ``(in, out)``, or ``(in + 1, out)`` with the bias as its
last row; a convolution's rows are kernel positions, then channels.  Its row-major
flattening numbers the parameters, and every dense block of the kit is in that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

HostArray: TypeAlias = np.ndarray[Any, Any]

WeightLayout = Literal["io", "oi"]
"""``(in, out)`` and ``(kh, kw, in, out)``, or ``(out, in)`` and ``(out, in, kh, kw)``."""

BiasPosition = Literal["last", "first", "after"]
"""In a dense block: beside the inputs, last or first, or after the whole weight."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearLayer:
    """A dense layer, or a convolution of stride 1 without padding.

    Parameters
    ----------
    matrix : numpy.ndarray, shape (in(+1), out)
        The weight, and the bias as the last row.
    bias : bool
        Whether the last row of `matrix` is a bias.
    kernel_size : tuple of int, optional
        The kernel of a convolution over two axes, with channels last.
    """

    matrix: HostArray
    bias: bool
    kernel_size: tuple[int, int] | None = None

    @property
    def kind(self) -> Literal["dense", "conv"]:
        """The kind of layer."""
        return "dense" if self.kernel_size is None else "conv"

    @property
    def out_features(self) -> int:
        """The number of outputs, or of output channels."""
        return int(self.matrix.shape[1])

    @property
    def in_features(self) -> int:
        """The number of inputs, or of input channels."""
        rows = self.matrix.shape[0] - self.bias
        return int(rows // math.prod(self.kernel_size or (1,)))

    def unfolded(self, inputs: HostArray, /) -> HostArray:
        """Return the inputs of each output position, shape (N, ..., in), without a 1."""
        if self.kernel_size is None:
            return inputs
        windows = np.lib.stride_tricks.sliding_window_view(
            inputs, self.kernel_size, axis=(1, 2)
        )
        # (N, H, W, c, kh, kw), and the matrix has channels after kernel positions.
        patches = np.moveaxis(windows, 3, -1)
        return patches.reshape(*patches.shape[:3], -1)

    def parameters(
        self, matrix: HostArray, weight_layout: WeightLayout, /
    ) -> dict[str, HostArray]:
        """Return a matrix as the parameters of a framework.

        Parameters
        ----------
        matrix : numpy.ndarray, shape (in(+1), out)
            Not modified.
        weight_layout : {"io", "oi"}
            The order of the weight's axes.

        Returns
        -------
        dict
            ``"weight"`` and, if the layer has one, ``"bias"``.
        """
        weight = matrix[:-1] if self.bias else matrix
        parameters = {"weight": self._shaped(weight, weight_layout).copy()}
        if self.bias:
            parameters["bias"] = matrix[-1].copy()
        return parameters

    def matrix_of(
        self, parameters: Mapping[str, Any], weight_layout: WeightLayout, /
    ) -> HostArray:
        """Return parameters as a matrix in float64; the inverse of `parameters`.

        Parameters
        ----------
        parameters : mapping of str to array
            As `parameters` returns them.
        weight_layout : {"io", "oi"}
            The order of the weight's axes.

        Returns
        -------
        numpy.ndarray, shape (in(+1), out)
            The bias last.

        Raises
        ------
        ValueError
            If names or shapes differ.
        """
        expected = self.parameters(self.matrix, weight_layout)
        if set(parameters) != set(expected):
            raise ValueError(
                f"expected the parameters {sorted(expected)}, got {sorted(parameters)}"
            )
        arrays = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
        for name, x in arrays.items():
            if x.shape != expected[name].shape:
                raise ValueError(
                    f"expected {name!r} to have shape {expected[name].shape}, got "
                    f"{x.shape}"
                )
        flat = np.empty(self.matrix.size)
        flat[self.order(weight_layout, "after")] = np.concatenate(
            [arrays[name].ravel() for name in expected]
        )
        return flat.reshape(self.matrix.shape)

    def order(
        self, weight_layout: WeightLayout, bias_position: BiasPosition, /
    ) -> HostArray:
        """Return the kit's number of each parameter, in another library's order.

        Parameters
        ----------
        weight_layout : {"io", "oi"}
            The order of the weight's axes.
        bias_position : {"last", "first", "after"}
            The position of the bias.

        Returns
        -------
        numpy.ndarray of int, shape (parameters,)
            A permutation.
        """
        numbers = np.arange(self.matrix.size).reshape(self.matrix.shape)
        weight, bias = (
            (numbers[:-1], numbers[-1:]) if self.bias else (numbers, numbers[:0])
        )
        weight = self._shaped(weight, weight_layout)
        if bias_position == "after":
            return np.concatenate([weight.ravel(), bias.ravel()])
        if weight_layout == "io":
            parts, axis = [weight.reshape(-1, self.out_features), bias], 0
        else:
            parts, axis = [weight.reshape(self.out_features, -1), bias.T], 1
        if bias_position == "first":
            parts.reverse()
        return np.concatenate(parts, axis=axis).ravel()

    def _shaped(self, weight: HostArray, weight_layout: WeightLayout) -> HostArray:
        """Return a weight of shape (in, out) in a framework's axes."""
        if self.kernel_size is None:
            return weight if weight_layout == "io" else weight.T
        kernel = weight.reshape(*self.kernel_size, self.in_features, self.out_features)
        return kernel if weight_layout == "io" else kernel.transpose(3, 2, 0, 1)
