"""The Jacobian of a whole network as the rows of its layers; it is never formed.

Conventions.  N examples have C outputs each (or residuals; without an axis of outputs, one
each): ``R = N C`` rows, an example's outputs side by side.  The derivative of output r with
respect to the matrix of layer l is ``D_lr = sum_s x_rs g_rs^T``, over the shared positions
s, with x the layer's inputs and g the derivative of the output with respect to the
layer's output.  J has the D_lr of all layers side by side: R rows, P columns.  Arrays in
the space of samples have the shape (N,) or (N, C), those in the space of parameters are
mappings of layers to parameters by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kfac_core import errors
from kfac_core.array import Array, Namespace, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.layers.dense import Dense
from kfac_core.layers.example_gradients import ExampleGradients, GradientBatch
from kfac_core.layers.layer import Layer
from kfac_core.layers.parameter_stacks import stack_to_matrices
from kfac_core.layers.rows import Batch, Rows
from kfac_core.layers.whole_rows import whole_rows
from kfac_core.samples.row_products import as_pair, combined_rows, row_products

Derivatives: TypeAlias = Batch | Sequence[Batch] | Mapping[str, Array]
"""What a layer saw, output gradients with one source for each output; several uses of the
layer in each example; or the derivatives themselves, parameters by name with the axes
(examples, outputs) in front."""

Parameters: TypeAlias = Mapping[str, Mapping[str, Array]]

Matrices: TypeAlias = Mapping[str, Array]
"""A vector in the space of parameters, as the matrix ``(in(+1), out)`` of each layer."""


@structure(static=("layer",))
class LayerJacobian:
    """The rows of one layer, and the layer that they belong to.

    Attributes
    ----------
    rows : Rows, IdRows or ExampleGradients
        Rows of all examples, with one source for each output.
    layer : Layer
        Turns parameters into the layer's matrix and back.
    """

    rows: Any
    layer: Layer


@structure(static=("sample_shape",))
class Jacobian:
    r"""The derivatives of N examples' outputs with respect to all parameters, by rows.

    For a layer with inputs x and output gradients g, with S shared positions,

    .. math:: (J d)_r = \sum_l \sum_s x_{rs}^T d_l \, g_{rs}, \qquad
        (J^T c)_l = \sum_{rs} c_r \, x_{rs} g_{rs}^T .

    Make one with `Jacobian.of`.

    Attributes
    ----------
    layers : dict of str to LayerJacobian
        Layers by name.
    sample_shape : tuple of int
        The shape (N,) or (N, C) of arrays in the space of samples.

    Notes
    -----
    Memory: the rows.  ``2 N S m (n + C)`` flops a layer for each product, where it has x
    and g.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> from kfac_core.samples import Jacobian
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> J = Jacobian.of({"fc": layer}, {"fc": kc.Batch(x, np.ones((3, 1)))})
    >>> J.multiply({"fc": {"weight": np.array([[1.0], [1.0]])}})
    array([ 3.,  7., 11.])
    """

    layers: dict[str, LayerJacobian]
    sample_shape: tuple[int, ...]

    @classmethod
    def of(
        cls, layers: Mapping[str, Layer], derivatives: Mapping[str, Derivatives], /
    ) -> Jacobian:
        """Return the Jacobian of what the layers saw.

        Parameters
        ----------
        layers : mapping of str to Layer
            The network's layers.
        derivatives : mapping of str to Batch, sequence of Batch, or mapping of arrays
            For each layer the inputs and the derivatives of the outputs with respect to the
            layer's outputs, of each example by itself: what one backward pass of the *sum*
            of the outputs gives.  ``sources=C`` for C outputs an example.  Parameters that
            no layer describes come as the derivatives themselves, for a layer
            `kfac_core.Parameters`.  A layer whose inputs differ between an example's
            outputs, as in derivatives of a network, has these as examples, side by side:
            the space of samples then has the shape (N C,).

        Returns
        -------
        Jacobian
            Refers to the arrays; inputs of layers with a bias are copied, with its 1s.

        Raises
        ------
        UnknownBlockError
            For names that differ.
        ShapeError
            For layers with different examples or outputs.
        DtypeError, MixedArraysError, UnsupportedError
            For arrays that do not fit their layer.
        """
        if layers.keys() != derivatives.keys():
            raise errors.UnknownBlockError(
                f"Expected derivatives of the layers {sorted(layers)}, got "
                f"{sorted(derivatives)}."
            )
        jacobians: dict[str, LayerJacobian] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            of_layer = derivatives[name]
            rows_of = _no_rows if _is_empty(of_layer) else _rows_of
            rows, shapes[name] = rows_of(layer, of_layer)
            jacobians[name] = LayerJacobian(rows, layer)
        forms = set(shapes.values())
        if len(forms) == 1:
            return cls(jacobians, forms.pop())
        samples = {math.prod(form) for form in forms}
        if len(samples) > 1:
            raise errors.ShapeError(
                "Expected the same examples and outputs for all layers, got the shapes "
                f"{shapes}."
            )
        # A layer may have R examples of one output where another has N of C: the samples
        # are the same, side by side.
        return cls(jacobians, (samples.pop(),))

    @classmethod
    def of_rows(
        cls,
        layers: Mapping[str, Dense],
        rows: Sequence[tuple[Array, Sequence[Array]]],
        /,
        *,
        scale: float = 1.0,
    ) -> Jacobian:
        """Return the Jacobian of dense layers without shared axes; nothing is checked.

        Parameters
        ----------
        layers : mapping of str to Dense
            The network's layers.
        rows : sequence of tuple of array and sequence of array
            For each layer the inputs, with the 1 of a bias, shape (N, n), and the
            derivatives of each of C outputs, shape (N, m).
        scale : float
            Factor on the derivatives.

        Returns
        -------
        Jacobian
            Of the sample shape (N C,), an example's outputs side by side.
        """
        jacobians: dict[str, LayerJacobian] = {}
        for (name, layer), (x, grads) in zip(layers.items(), rows, strict=True):
            xp = ns.own_namespace(x)
            g = xp.stack([*grads]) if len(grads) > 1 else grads[0][None, ...]
            g = g if scale == 1.0 else g * scale
            whole = Rows(x[:, None, :], g[:, :, None, :], None, False)
            jacobians[name] = LayerJacobian(whole, layer)
        return cls(jacobians, (g.shape[0] * g.shape[1],))

    @property
    def examples(self) -> int:
        """The number of examples N."""
        return self.sample_shape[0]

    @property
    def samples(self) -> int:
        """The number of rows ``R = N C``."""
        return self.sample_shape[0] * self.outputs

    @property
    def outputs(self) -> int:
        """The number of outputs C of an example."""
        return self.sample_shape[1] if len(self.sample_shape) == 2 else 1

    @property
    def parameters(self) -> int:
        """The number of columns P."""
        total = 0
        for jacobian in self.layers.values():
            n, m = jacobian.layer.matrix_shape
            total += n * m
        return total

    @property
    def like(self) -> Array:
        """An array whose library, device and dtype the products have."""
        return next(iter(self.layers.values())).rows.like

    def multiply(self, vectors: Parameters, /) -> Array:
        """Return ``J d``.

        Parameters
        ----------
        vectors : mapping of str to mapping of str to array
            The direction d, by layer and parameter.

        Returns
        -------
        array, shape (N,) or (N, C)
            In the dtype of d.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For vectors that do not fit.
        """
        return self.multiply_matrices(self.to_matrices(vectors))

    def multiply_matrices(self, matrices: Matrices, /) -> Array:
        """Return ``J d`` for d as the layers' matrices; see `to_matrices`."""
        xp, total = ns.own_namespace(self.like), None
        for name, jacobian in self.layers.items():
            rows, V = jacobian.rows, matrices[name]
            pair = as_pair(rows, V.dtype, xp=xp)
            if pair is None:
                product = row_products(rows, V, xp=xp)
            else:
                product = xp.vecdot(pair[0] @ V, pair[1])
            if product.shape != self.sample_shape:
                product = ns.reshaped(product, self.sample_shape, xp=xp)
            total = product if total is None else total + product
        return total

    def multiply_transposed(
        self, coefficients: Array, /, *, dtype: object = None
    ) -> dict[str, dict[str, Array]]:
        """Return ``J^T c``, a combination of the outputs' derivatives.

        Parameters
        ----------
        coefficients : array, shape (N,) or (N, C)
            The coefficients c.
        dtype : dtype, optional
            Dtype of the result; by default that of the rows.

        Returns
        -------
        dict of str to dict of str to array
            Parameter-shaped; products are in the wider dtype of the rows and the
            coefficients.

        Raises
        ------
        ShapeError, MixedArraysError
            For coefficients that do not fit.
        """
        return self.to_parameters(self.combine(coefficients, dtype=dtype))

    def combine(
        self, coefficients: Array, /, *, dtype: object = None
    ) -> dict[str, Array]:
        """Return ``J^T c`` as the layers' matrices; see `multiply_transposed`."""
        xp = ns.namespace_of(rows=self.like, coefficients=coefficients)
        if tuple(coefficients.shape) != self.sample_shape:
            raise errors.ShapeError(
                f"Expected `coefficients` of shape {self.sample_shape}, got "
                f"{tuple(coefficients.shape)}."
            )
        matrices: dict[str, Array] = {}
        column = ns.reshaped(coefficients, (-1, 1), xp=xp)
        for name, jacobian in self.layers.items():
            rows, shape = jacobian.rows, jacobian.layer.matrix_shape
            like = rows.like
            # Solutions w may be large where J^T w is not: it cancels in their dtype.
            if column.dtype != like.dtype:
                column = ns.cast(xp, column, xp.result_type(column, like))
            pair = as_pair(rows, column.dtype, xp=xp)
            if pair is None:
                c = ns.reshaped(column, (rows.examples, rows.sources), xp=xp)
                matrix = combined_rows(rows, c, shape, xp=xp)
            else:
                # In the order of parameters with outputs first, as those of PyTorch.
                matrix = ns.transposed(pair[1] * column, xp=xp) @ pair[0]
                matrix = ns.transposed(matrix, xp=xp)
            matrices[name] = ns.cast(xp, matrix, dtype or like.dtype)
        return matrices

    def to_matrices(self, vectors: Parameters, /) -> dict[str, Array]:
        """Return a vector in the space of parameters as the layers' matrices.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError
            For vectors that do not fit.
        """
        if vectors.keys() != self.layers.keys():
            raise errors.UnknownBlockError(
                f"Expected vectors of the layers {sorted(self.layers)}, got "
                f"{sorted(vectors)}."
            )
        matrices: dict[str, Array] = {}
        for name, jacobian in self.layers.items():
            V = jacobian.layer.parameters_to_matrix(vectors[name])
            ns.namespace_of(rows=jacobian.rows.like, vectors=V)
            matrices[name] = V
        return matrices

    def to_parameters(self, matrices: Matrices, /) -> dict[str, dict[str, Array]]:
        """Return the layers' matrices parameter-shaped; undoes `to_matrices`."""
        return {
            name: jacobian.layer.matrix_to_parameters(matrices[name])
            for name, jacobian in self.layers.items()
        }

    def squares(self) -> dict[str, dict[str, Array]]:
        """Return ``diag(J^T J)``, parameter-shaped, in the dtype of the rows."""
        matrices: dict[str, Array] = {}
        for name, jacobian in self.layers.items():
            rows, xp = jacobian.rows, ns.own_namespace(jacobian.rows.like)
            squares = rows.squares(rows.like.dtype, xp=xp)
            matrices[name] = xp.reshape(squares, jacobian.layer.matrix_shape)
        return self.to_parameters(matrices)


def _is_empty(derivatives: Derivatives) -> bool:
    """Whether the derivatives are those of no examples."""
    if isinstance(derivatives, Batch):
        return 0 in derivatives.inputs.shape[:1]
    if isinstance(derivatives, Mapping):
        return any(D.ndim > 0 and D.shape[0] == 0 for D in derivatives.values())
    # Any: gradients of a whole batch raise an error of their own.
    first: Any = derivatives
    return isinstance(first, Sequence) and _is_empty(first[0])


def _no_rows(layer: Layer, derivatives: Derivatives) -> tuple[Any, tuple[int, ...]]:
    """Return the rows of no examples, as one of several processes may have."""
    # Layers take no empty batch: make rows of an example of zeros, and drop them.
    if isinstance(derivatives, Sequence):
        zeros: Any = [map_structure(_one_example, use) for use in derivatives]
    else:
        zeros = map_structure(_one_example, derivatives)
    rows, shape = _rows_of(layer, zeros)
    if isinstance(rows, ExampleGradients):
        rows = ExampleGradients(rows.gradients[:0, ...], 0, rows.sources)
        return rows, (0, *shape[1:])
    changes = {"output_grads": rows.output_grads[..., :0, :, :]}
    if isinstance(rows, Rows):
        changes["inputs"] = rows.inputs[..., :0, :, :]
    else:
        changes["ids"] = rows.ids[:0, ...]
    if rows.mask is not None:
        changes["mask"] = rows.mask[:0, ...]
    return replaced(rows, **changes), (0, *shape[1:])


def _one_example(x: Array) -> Array:
    """Return zeros like an array whose axis of examples has the length 0."""
    shape = tuple(length or 1 for length in x.shape)
    xp = ns.own_namespace(x)
    return xp.zeros(shape, dtype=x.dtype, device=ns.device_of(x))


def _rows_of(layer: Layer, derivatives: Derivatives) -> tuple[Any, tuple[int, ...]]:
    """Return a layer's rows, and the shape of the space of samples."""
    # First a batch: whether something is a mapping takes long to say.
    if isinstance(derivatives, Batch):
        first = derivatives
    elif isinstance(derivatives, Mapping):
        return _stacked_gradients(layer, derivatives)
    elif isinstance(derivatives, GradientBatch):
        raise errors.UnsupportedError(
            "Expected the derivatives of each output, got gradients of the whole batch. "
            "Give a mapping of arrays with the axes (examples, outputs) in front."
        )
    else:
        first = derivatives[0]
    rows = whole_rows(layer, derivatives)
    if isinstance(rows, Rows) and rows.homogeneous:
        xp = ns.own_namespace(rows.inputs)
        # Append the 1s once: K and each product with J would append them again.
        x = rows.full_inputs(rows.inputs.dtype, xp=xp)
        rows = Rows(x, rows.output_grads, mask=None, homogeneous=False)
    if first.sources is None:
        return rows, (rows.examples,)
    return rows, (rows.examples, rows.sources)


def _stacked_gradients(
    layer: Layer, derivatives: Mapping[str, Array]
) -> tuple[ExampleGradients, tuple[int, ...]]:
    """Return derivatives that are known themselves as rows without x and g."""
    D = stack_to_matrices(layer, derivatives)
    xp: Namespace = ns.own_namespace(D)
    lead = tuple(int(length) for length in D.shape[:-2])
    if len(lead) not in (1, 2):
        raise errors.ShapeError(
            "Expected derivatives with the axes (examples,) or (examples, outputs) before "
            f"those of the parameters, got the axes {lead}."
        )
    C = lead[1] if len(lead) == 2 else 1
    D = xp.reshape(D, (lead[0], C, -1))
    # Rows have the sources in front; `sample_shape` has the examples there.
    by_source = xp.reshape(xp.permute_dims(D, (1, 0, 2)), (C * lead[0], -1))
    return ExampleGradients(by_source, lead[0], C), lead
