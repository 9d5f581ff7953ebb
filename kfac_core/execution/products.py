"""Products by name: which there are, what they need, and how parameters go through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.block import Block
from kfac_core.conventions import require_one_of
from kfac_core.errors import ShapeError, UnsupportedError
from kfac_core.layers.feeding import detached_array
from kfac_core.linalg.shifted import Factorization
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.sparse_rows import SparseRows

__all__ = [
    "VECTOR_PRODUCTS",
    "WORTH_THREADS",
    "apply_product",
    "product_flops",
    "require_products",
    "vector_of",
]

VECTOR_PRODUCTS = (
    "multiply",
    "multiply_inverse",
    "multiply_matpower",
    "multiply_cholesky",
    "multiply_cholesky_inverse",
    "sample",
)
"""The functions of `CurvatureOperator` that take and return a vector."""

_ALL_PRODUCTS = (*VECTOR_PRODUCTS, "trace", "logdet", "eigenvalues", "to_dense")

_FACTORIZATION_OF: dict[str, Factorization] = {
    "multiply_inverse": "inverse",
    "multiply_cholesky": "cholesky",
    "multiply_cholesky_inverse": "cholesky",
    "sample": "cholesky",
}


def require_products(blocks: Mapping[str, Block], products: tuple[str, ...], /) -> None:
    """Raise where some block cannot give some product, with the reason.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name.
    products : tuple of str
        Names of functions of `CurvatureOperator`.

    Raises
    ------
    ConventionError
        For a name that is no product.
    UnsupportedError
        For a block that lacks one.
    """
    for product in products:
        require_one_of("products", product, _ALL_PRODUCTS)
        for name, block in blocks.items():
            reason = block.approximation.lacks.get(product)
            if reason is not None:
                raise UnsupportedError(
                    f"Block {name!r} ({block.approximation.name}) has no {product}: "
                    f"{reason}."
                )


def vector_of(block: Block, parameters: Mapping[str, Any], /, *, name: str) -> Array:
    """Return parameter-shaped arrays of a block as its matrix, without their graphs.

    Raises
    ------
    ShapeError
        Naming the block.
    """
    given = {key: detached_array(x) for key, x in parameters.items()}
    try:
        return block.parameters_to_matrix(given)
    except ShapeError as error:
        raise ShapeError(f"Block {name!r}: {error}") from None


WORTH_THREADS = 10**9
"""The flops from which on products are shared out among threads: 10 ms on one core."""


def product_flops(block: Block, /) -> int:
    """Return how many flops a product with two full factors takes."""
    n, m = block.layer.matrix_shape
    return 2 * n * m * (n + m)


def apply_product(
    block: Block,
    operator: CurvatureOperator,
    parameters: Mapping[str, Any],
    /,
    *,
    product: str,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    name: str,
) -> tuple[dict[str, Any], CurvatureOperator]:
    """Apply a product to parameter-shaped arrays of one block.

    Parameters
    ----------
    block : Block
        Its description.
    operator : CurvatureOperator
        Its snapshot.
    parameters : mapping of str to array or SparseRows
        Never modified; gradient graphs are left behind.
    product : str
        One of `VECTOR_PRODUCTS`.
    arguments, options : tuple, mapping
        What the product takes besides the vector.
    name : str
        The block's name, for messages.

    Returns
    -------
    result : dict of str to array or SparseRows
        Of the same form.
    operator : CurvatureOperator
        With what was prepared for the product.

    Raises
    ------
    KFACError
        As the layer and the product.
    """
    weight = parameters.get("weight")
    if isinstance(weight, SparseRows):
        restricted: Any = operator
        small = restricted.at_rows(weight.indices)
        rows = getattr(small, product)(
            detached_array(weight.rows), *arguments, **options
        )
        return {"weight": SparseRows(weight.indices, rows)}, operator
    vector = vector_of(block, parameters, name=name)
    try:
        needed = _FACTORIZATION_OF.get(product)
        if needed is not None:
            operator = operator.prepared(needed, name=name)
        result = getattr(operator, product)(vector, *arguments, **options)
    except ShapeError as error:
        raise ShapeError(f"Block {name!r}: {error}") from None
    return block.matrix_to_parameters(result), operator
