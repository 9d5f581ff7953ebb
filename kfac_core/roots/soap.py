r"""SOAP: Adam's second moments in the eigenbasis of a weight's two factors.

Conventions.  V is the gradient of a weight as a matrix of shape ``(..., n, m)``; leading
axes are a stack.  A side of n rows has a block-diagonal basis, an array of shape
``(..., c, b, b)`` with ``n = c b``: c orthogonal matrices Q with the directions in their
columns; ``c = 1`` is a whole basis, and None leaves the side as it is.  In the basis,

.. math:: \tilde V = Q_L^T V Q_R

The factors C of which Q are eigenvectors have the mean diagonal 1 at each average, since
their scale does not change the basis.  The second moments v are kept in the basis, and when
it changes become the diagonal in the new one.  A direction is the gradient over their root,
:math:`d = Q_L (\tilde V / \sqrt v) Q_R^T`; the momentum m is an average of directions, in
the parameter's own coordinates.

References
----------
George et al. (2018), "EKFAC", arXiv:1806.03884: second moments in the eigenbasis of the
factors of rows; Vyas et al. (2024), "SOAP", arXiv:2409.11321, algorithm 3: Adam in the
eigenbasis of the gradient's own factors; Lin et al. (2025), arXiv:2509.03378; Ma and Yarats
(2019), arXiv:1810.06801: steps between a direction and its average.
"""

from __future__ import annotations

import math

from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.linalg.factorize import eigendecomposition
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix


def side_blocks(
    n: int, other: int, /, *, least: int = 128, block: int = 1024, largest: int = 8192
) -> tuple[int, int] | None:
    """Return how many equal blocks the basis of a side has, and their size.

    A side has a whole basis up to the length of the other side or `least`, and else
    blocks of at most that size.  Products with blocks take at most
    ``2 n m max(m, least)`` flops, those of the shorter side.

    Parameters
    ----------
    n, other : int
        Length of the side, and the length m of the other.
    least : int
        Sides up to this length have a whole basis.
    block : int
        Largest block.
    largest : int
        Largest side that has a basis.

    Returns
    -------
    tuple of int, or None
        ``(c, b)`` with ``c b = n``; None for a side of length 1 and for one above
        `largest`.  Where n has no divisor between a quarter of the size and the size, as a
        prime, the basis is whole if it is at most `block`, and else None.

    Examples
    --------
    >>> from kfac_core.roots import side_blocks
    >>> side_blocks(1024, 256), side_blocks(256, 1024)
    ((4, 256), (1, 256))
    """
    if n == 1 or n > largest:
        return None
    # A side much longer than the other costs n^3 for little; its blocks are about as
    # long as the other side.
    limit = min(max(other, least), block)
    count = math.ceil(n / limit)
    # Equal blocks only, which make one stack.
    while n % count:
        count += 1
    if 4 * (n // count) >= min(n, limit):
        return count, n // count
    return (1, n) if n <= block else None


def diagonal_blocks(rows: Array, count: int, /) -> Array:
    """Return the c diagonal blocks of ``X^T X`` for rows X.

    Parameters
    ----------
    rows : array, shape (R, n)
        Rows X.
    count : int
        Number c of blocks, which divides n.

    Returns
    -------
    array, shape (c, b, b)
        Sums over the rows, ``2 R n b`` flops.
    """
    xp = ns.own_namespace(rows)
    R, n = rows.shape
    blocks = xp.permute_dims(xp.reshape(rows, (R, count, n // count)), (1, 0, 2))
    return blocks.mT @ blocks


def averaged_factor(factor: Array | None, gram: Array, /, *, decay: Scalar) -> Array:
    r"""Return the average of Gram matrices, each with the mean diagonal 1.

    .. math:: C \leftarrow \beta C + (1 - \beta) B \, / \, (\operatorname{tr} B / b)

    Parameters
    ----------
    factor : array, shape (..., b, b), or None
        Average C so far; None for the first update, which sets it.
    gram : array, shape (..., b, b)
        Gram matrix B of rows in any units.
    decay : float
        Decay ``beta``.

    Returns
    -------
    array, shape (..., b, b)
        Left as it was where B is zero or not finite; there the first is the identity.
    """
    xp = ns.namespace_of(gram=gram)
    size = gram.shape[-1]
    scale = xp.mean(xp.linalg.diagonal(gram), axis=-1)[..., None, None]
    # The trace, a sum of squares, is finite only if all rows are.
    good = xp.isfinite(scale) & (scale > 0)
    # Unit mean diagonal, so that one step with large gradients does not take over.
    gram = gram / xp.where(good, scale, xp.ones_like(scale))
    if factor is None:
        eye = xp.eye(size, dtype=gram.dtype, device=ns.device_of(gram))
        return xp.where(good, gram, eye)
    return xp.where(good, decay * factor + (1 - decay) * gram, factor)


def renewed_basis(basis: Array | None, factor: Array, /) -> tuple[Array, Array]:
    r"""Return the basis after one step of orthogonal iteration, and a residual.

    .. math:: Q \leftarrow \operatorname{qr}(C Q \, \Pi), \qquad
        r = |B - \operatorname{diag} B|_F \, / \, |B|_F, \quad B = Q^T C Q

    Parameters
    ----------
    basis : array, shape (..., b, b), or None
        Basis Q of before; None for an eigendecomposition.
    factor : array, shape (..., b, b)
        Factor C: symmetric, positive semidefinite and finite.

    Returns
    -------
    basis : array, shape (..., b, b)
        New Q; the permutation sorts its columns by Rayleigh quotients, descending.
    residual : array, shape (...)
        r of the basis of before, for the factor of now; of an eigendecomposition its
        residual check.

    Notes
    -----
    One product and a QR decomposition with its Q, about ``5 b^3`` flops; an
    eigendecomposition takes about ``11 b^3``.  r is a difference, and reads zero below the
    root of the roundoff.

    References
    ----------
    Golub and Van Loan (2013), "Matrix Computations", section 8.2.4 (orthogonal iteration).
    """
    if basis is None:
        xp = ns.namespace_of(factor=factor)
        one = ns.full_of(xp, 1.0, factor)
        C = SymmetricMatrix(factor, full_storage=True)
        unshifted = ScaledMatrix(C, one, xp.zeros_like(one))
        made = eigendecomposition(unshifted, check="status", name="factor")
        Q = made.eigenvectors
        w = xp.sum(Q * (factor @ Q), axis=-2)
        return _descending(Q, w), made.residual
    xp = ns.namespace_of(basis=basis, factor=factor)
    CQ = factor @ basis
    w = xp.sum(basis * CQ, axis=-2)
    # Q is orthogonal, so that |Q^T C Q| = |C Q|.
    squares = xp.sum(CQ * CQ, axis=(-2, -1))
    outside = (squares - xp.sum(w * w, axis=-1)) / squares
    residual = xp.where(outside > 0, outside, xp.zeros_like(outside)) ** 0.5
    # A step from a basis in ascending order would destroy it.
    return xp.linalg.qr(_descending(CQ, w)).Q, residual


def in_basis(V: Array, rows: Array | None, columns: Array | None, /) -> Array:
    r"""Return :math:`Q_L^T V Q_R`.

    Parameters
    ----------
    V : array, shape (..., n, m)
        Matrices, such as gradients.
    rows : array, shape (..., c, b, b) with c b = n, or None
        Basis of the rows, Q_L; None for the identity.
    columns : array, shape (..., c', b', b') with c' b' = m, or None
        Basis of the columns, Q_R.

    Returns
    -------
    array, shape (..., n, m)
        ``2 n m (b + b')`` flops each.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import from_basis, in_basis
    >>> V = np.arange(6.0).reshape(2, 3)
    >>> Q, _ = np.linalg.qr(V.T @ V + np.eye(3))
    >>> bool(np.allclose(from_basis(in_basis(V, None, Q[None]), None, Q[None]), V))
    True
    """
    if rows is not None:
        V = _times_rows(rows.mT, V)
    return V if columns is None else _times_columns(V, columns)


def from_basis(V: Array, rows: Array | None, columns: Array | None, /) -> Array:
    r"""Return :math:`Q_L V Q_R^T`, which undoes `in_basis`; the same arguments."""
    if rows is not None:
        V = _times_rows(rows, V)
    return V if columns is None else _times_columns(V, columns.mT)


def carried_moments(
    second: Array,
    /,
    *,
    left: tuple[Array | None, Array | None],
    right: tuple[Array | None, Array | None],
) -> Array:
    r"""Return Adam's second moments in new bases.

    With :math:`S = Q_{old}^T Q_{new}` of each side,

    .. math:: v \leftarrow (S_L \circ S_L)^T v (S_R \circ S_R)

    the diagonal of the covariance that has the diagonal v in the old basis.  It keeps the
    sum of v, and is a permutation where S is one.

    Parameters
    ----------
    second : array, shape (..., n, m)
        Moments v in the old bases.
    left, right : tuple of array of shape (..., c, b, b) or None
        Old and new basis of each side; None is the identity.

    Returns
    -------
    array, shape (..., n, m)
        Moments in the new bases.
    """
    # Second moments are variances of coordinates.  Under a rotation S, variances of
    # uncorrelated coordinates mix by the squares of S.
    return in_basis(second, _squared_change(*left), _squared_change(*right))


_UNBOUNDED_STEPS = 5
"""Second moments of fewer steps say too little of what is usual."""


def bounded_gradient(
    gradient: Array,
    second: Array,
    /,
    *,
    steps: Scalar,
    decay: float,
    bound: float | None = 2.0,
) -> Array:
    r"""Return a gradient whose coordinates are at most a multiple of what is usual.

    .. math:: g_i \leftarrow \operatorname{sign}(g_i)
        \min\left(|g_i|, c \sqrt{v_i / (1 - \beta_2^t)}\right)

    Late in a run gradients are small, and one batch that is not fitted yet has a hundred
    times the usual gradient: it moves all coordinates at once, and the first moment goes on
    for ten more steps.  Here a change of scale takes some steps to be believed.

    Parameters
    ----------
    gradient, second : array, shape (...)
        Gradient g, and Adam's second moment v of the steps before, in the same coordinates.
    steps : int or 0-d array
        Steps t that v is of; there is no bound after fewer than five.
    decay : float
        Decay beta_2 of v.
    bound : float, optional
        Multiple c; None for the gradient as it is.

    Returns
    -------
    array, shape (...)
        The gradient.  A coordinate that was zero so far has no bound.

    Notes
    -----
    The second moment of a coordinate that is bounded grows by ``1 + (1 - decay) (c^2 - 1)``
    a step, so that steps are of the usual length while a new scale is learned.  Coordinates
    that are zero for long and then are not, as the rows of rare tokens, should have no
    bound.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import bounded_gradient
    >>> v = np.array([1.0, 1.0, 0.0]) * (1 - 0.95**10)
    >>> bounded_gradient(np.array([0.5, -9.0, 9.0]), v, steps=10, decay=0.95)
    array([ 0.5, -2. ,  9. ])
    """
    if bound is None:
        return gradient
    enough = steps >= _UNBOUNDED_STEPS
    if enough is False:
        return gradient
    xp = ns.own_namespace(gradient)
    # At step 0, which a traced number may be, there is no v to divide.
    usual = second**0.5
    limit = bound / (1 - decay ** (steps + (steps < 1))) ** 0.5 * usual
    is_bounded = limit > 0 if enough is True else (limit > 0) & enough
    return xp.where(is_bounded, xp.clip(gradient, -limit, limit), gradient)


def normalized_gradient(
    second: Array, gradient: Array, /, *, step: Scalar, decay: float, eps: float
) -> tuple[Array, Array]:
    r"""Return Adam's second moments after a gradient, and the gradient over their root.

    .. math:: v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
        d = \frac{g}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Parameters
    ----------
    second, gradient : array, shape (...)
        Second moments v, and the gradient g, in the same coordinates.
    step : int or 0-d array
        Step t, from 1.
    decay : float
        Decay beta_2 of v.
    eps : float
        Added to the root.

    Returns
    -------
    second, direction : array, shape (...)
        New v, and d.

    References
    ----------
    Kingma and Ba (2015), arXiv:1412.6980, algorithm 1 with beta_1 = 0.
    """
    v = decay * second + (1 - decay) * gradient * gradient
    return v, gradient / ((v / (1 - decay**step)) ** 0.5 + eps)


def width_factor(inputs: int, /) -> float:
    r"""Return the factor of a weight's steps for its number of inputs.

    .. math:: f = \min\left(1, \sqrt{32 / n}\right)

    All coordinates of a direction have about the size 1, and weights at first about
    :math:`n^{-1/2}`: steps of one rate would change wide layers by more.

    Parameters
    ----------
    inputs : int
        Number n of inputs of an output; of an embedding its features, the inputs of the
        layers that read it.

    Returns
    -------
    float
        f.

    References
    ----------
    Yang et al. (2022), arXiv:2203.03466, for rates of Adam that fall with the width.
    """
    return min(1.0, math.sqrt(32 / inputs))


_HORIZON = 10.0
"""Momentum is an average over so many steps at first, and a tenth of all later."""


def average_weights(*, steps: Scalar, share: Scalar) -> tuple[Scalar, Scalar]:
    r"""Return the weights of a direction in the momentum and in the step.

    .. math:: m \leftarrow m + \frac{10}{10 + t} (d - m), \qquad
        \Delta = m + \frac{a}{10} (d - m), \qquad
        a = \min\left(1, s^2 \left(1 + \frac{t}{400}\right)\right)^2

    The momentum m averages directions over the last tenth of the steps, so that the noise
    of gradients averages out, the more the longer a run is.  The direction of now damps the
    swings that a long average alone would have.  Where the share s is below its bound,
    because steps point back, it counts less: its own noise would be what limits the loss.

    Parameters
    ----------
    steps : int or 0-d array
        Number t of steps taken.
    share : float or 0-d array
        Share s of the rate; see `adapted_share`.

    Returns
    -------
    tuple of float or 0-d array
        ``10 / (10 + t)``, which is 1 at the first step, and ``a / 10``.

    References
    ----------
    Ma and Yarats (2019), arXiv:1810.06801, equation 3, with nu = 1 - a / 10; Defazio et
    al. (2024), arXiv:2405.15682, for gradients taken near the average of all iterates.
    """
    relative = share * share * (1 + steps / 400)
    # The smaller of it and one, which a share that is not adapted is above.
    relative = (relative + 1 - abs(relative - 1)) / 2
    return _HORIZON / (_HORIZON + steps), relative * relative / _HORIZON


def agreement(direction: Array, momentum: Array, /) -> Array:
    r"""Return sums that compare a direction with the average of those before it.

    Parameters
    ----------
    direction, momentum : array, shape (...)
        Direction d, and the momentum m before it.

    Returns
    -------
    array, shape (3,)
        :math:`d \cdot m`, :math:`d \cdot d` and :math:`m \cdot m`, to be added over all
        parameters.
    """
    xp = ns.own_namespace(direction)
    d, m = xp.reshape(direction, (-1,)), xp.reshape(momentum, (-1,))
    return xp.stack([d @ m, d @ d, m @ m])


def squared_sizes(
    gradient: Array, second: Array, /, *, steps: Scalar, decay: float
) -> Array:
    r"""Return the squared size of a gradient, and what is usual.

    .. math:: \left(\textstyle\sum_i g_i^2, \; \sum_i v_i / (1 - \beta_2^t)\right)

    Parameters
    ----------
    gradient, second : array, shape (...)
        Gradient g of a new batch, and Adam's second moments v of the steps before.
    steps : int or 0-d array
        Steps t that v is of; after fewer than five, the first sum is zero.
    decay : float
        Decay beta_2 of v.

    Returns
    -------
    array, shape (2,)
        Sums, to be added over all parameters.
    """
    xp = ns.own_namespace(gradient)
    g = xp.reshape(gradient, (-1,))
    squares = (g @ g) * (1 * (steps >= _UNBOUNDED_STEPS))
    usual = xp.sum(second) / (1 - decay ** (steps + (steps < 1)))
    return xp.stack([squares, usual])


_JUMP = 1.5
"""Batches differ by less than this in the root mean square of their gradients."""


_BOUNDS = (1.0, 400.0), (5.0, 20.0)
"""Least and most of the share's reciprocal: its first value, and in how many steps its
square grows by one."""


def gradient_jump(sums: Array, /) -> Array:
    r"""Return by how much a gradient is larger than usual: a jump of the loss.

    .. math:: r^2 = \sum_i g_i^2 \Big/ \sum_i v_i / (1 - \beta_2^t)

    Where coordinates of gradients are bounded, v takes dozens of steps to learn of a jump.
    ``v <- (1 + (1 - decay) r^2) v`` takes it at once, in all coordinates alike, so that the
    next steps are shorter.

    Parameters
    ----------
    sums : array, shape (2,)
        Sums of `squared_sizes`, over all parameters.

    Returns
    -------
    array, 0-d
        The square of r, and zero for r below 1.5 or not finite.
    """
    xp = ns.own_namespace(sums)
    squares, usual = sums[0], sums[1]
    is_jump = (squares > _JUMP**2 * usual) & (usual > 0) & xp.isfinite(squares)
    ratio = squares / xp.where(is_jump, usual, xp.ones_like(usual))
    return xp.where(is_jump, ratio, xp.zeros_like(ratio))


_LARGE_JUMP = 4.0
"""Losses of fits jump by less at first, and need no shorter momentum."""


def momentum_factor(jump: Scalar, /) -> Scalar:
    r"""Return the factor of the momentum where the loss jumps.

    .. math:: m \leftarrow \min(1, 4 / r) \, m

    The momentum averages directions of the usual length 1.  Beside gradients that are r
    times as large, those before would have been 1 / r as long; without this, late in a
    run, hundreds of steps would go on in their direction.

    Parameters
    ----------
    jump : float or 0-d array
        The square of r, of `gradient_jump`.

    Returns
    -------
    float or 0-d array
        The factor, 1 for r up to 4.
    """
    # The larger of the two.
    square = (jump + _LARGE_JUMP**2 + abs(jump - _LARGE_JUMP**2)) / 2
    return _LARGE_JUMP * square**-0.5


def adapted_share(
    share: Scalar, sums: Array, /, *, jump: Scalar, steps: Scalar, gain: float
) -> Array:
    r"""Return the share of its rate that an optimizer takes, after a gradient.

    .. math:: \frac{1}{s} \leftarrow \min\left(\sqrt{25 + \frac{t}{20}}, \;
        \max\left(\sqrt{1 + \frac{t}{400}}, \, \frac{1}{s} - \gamma \cos
        + \gamma \log^+ \frac{r}{1.5}\right)\right),
        \qquad \cos = \frac{d \cdot m}{\sqrt{(d \cdot d) (m \cdot m)}}

    Where directions agree with the average of those before, as in a classifier whose
    margins grow, the rate stays; where they point back, because steps are longer than the
    loss's valley is wide, it falls, after t steps of a constant cosine like 1 / t.  It also
    falls where a step made the gradient r times as large as is usual; see `gradient_jump`.

    In long runs it falls like :math:`t^{-1/2}`, whatever the cosines are: those of few
    batches, drawn without replacement, are below zero however short the steps are, so that
    steps would end; and those of many are close to zero, however noisy.

    Parameters
    ----------
    share : float or 0-d array
        Share s so far, at first 1.
    sums : array, shape (3,)
        Sums of `agreement`, over all parameters.
    jump : float or 0-d array
        The square of r, of `gradient_jump`.
    steps : int or 0-d array
        Number t of steps taken.
    gain : float
        Gain gamma.

    Returns
    -------
    array, 0-d
        New share; the old one where the cosine is not defined, as before the first step.

    References
    ----------
    Almeida et al. (1998), "Parameter adaptation in stochastic optimization", and Baydin et
    al. (2018), arXiv:1703.04782, for rates that follow the sign or size of such products.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import adapted_share, agreement
    >>> d = np.array([1.0, 1.0])
    >>> float(adapted_share(1.0, agreement(d, -d), jump=0.0, steps=9, gain=0.25))
    0.8
    """
    xp = ns.own_namespace(sums)
    # Not finite in a pass that a gradient scaler leaves out, zero before the first step.
    sums = xp.where(xp.all(xp.isfinite(sums)), sums, xp.zeros_like(sums))
    norm = sums[1] ** 0.5 * sums[2] ** 0.5
    is_defined = norm > 0
    one = xp.ones_like(norm)
    cosine = xp.where(is_defined, sums[0] / xp.where(is_defined, norm, one), 0 * one)
    excess = xp.log(xp.maximum(one * jump / _JUMP**2, one)) / 2
    least, most = (one * (c**2 + steps / tau) ** 0.5 for c, tau in _BOUNDS)
    reciprocal = xp.maximum(1 / share - gain * (cosine - excess), least)
    return 1 / xp.minimum(reciprocal, most)


def _descending(X: Array, w: Array) -> Array:
    """Return the columns of matrices in the descending order of a number of each."""
    xp = ns.own_namespace(X)
    order = xp.argsort(w, axis=-1, descending=True)
    columns = xp.broadcast_to(order[..., None, :], X.shape)
    return xp.take_along_axis(X, columns, axis=-1)


def _times_rows(Q: Array, V: Array) -> Array:
    """Return the blocks of Q times the blocks of rows of V."""
    count, size = Q.shape[-3], Q.shape[-1]
    if count == 1:
        # A plain product, without reshaping.
        return Q[..., 0, :, :] @ V
    xp = ns.own_namespace(V)
    *lead, _, m = V.shape
    return xp.reshape(Q @ xp.reshape(V, (*lead, count, size, m)), V.shape)


def _times_columns(V: Array, Q: Array) -> Array:
    """Return the blocks of columns of V times the blocks of Q."""
    count, size = Q.shape[-3], Q.shape[-1]
    if count == 1:
        return V @ Q[..., 0, :, :]
    xp = ns.own_namespace(V)
    *lead, n, _ = V.shape
    axes = (*range(len(lead)), len(lead) + 1, len(lead), len(lead) + 2)
    blocks = xp.permute_dims(xp.reshape(V, (*lead, n, count, size)), axes)
    return xp.reshape(xp.permute_dims(blocks @ Q, axes), V.shape)


def _change(old: Array | None, new: Array | None) -> Array | None:
    """Return ``old^T new``; None for the identity."""
    if old is None or new is None:
        return new if old is None else old.mT
    return old.mT @ new


def _squared_change(old: Array | None, new: Array | None) -> Array | None:
    """Return the squares of ``old^T new``; None for the identity."""
    S = _change(old, new)
    return None if S is None else S * S
