"""The vectors of an estimation mode with the noise that they need, from a seed."""

from __future__ import annotations

from kfac_core.array.backend import Array
from kfac_core.constraints import validated
from kfac_core.losses.loss import Loss
from kfac_core.losses.modes import EstimationMode, noise_spec
from kfac_core.losses.noise import NoiseSpec, draw_noise
from kfac_core.losses.sources import SourceVectors, vectors, with_random_signs

__all__ = ["drawn_vectors"]


@validated
def drawn_vectors(
    loss: Loss,
    natural: Array,
    /,
    *,
    mode: EstimationMode,
    seed: int,
    shared: bool,
) -> SourceVectors:
    """Return the vectors that a mode backpropagates, with its own noise.

    Parameters
    ----------
    loss : Loss
        Loss of the network.
    natural : array, shape (N, ..., P)
        The network's outputs; never differentiated through.
    mode : EstimationMode
        Any but ``"empirical"``, which needs the data's targets.
    seed : int
        Seed of all random numbers: the same seed gives the same vectors.
    shared : bool
        Whether some layer has fewer examples than there are rows of outputs.  Then the
        rows that share an example get random signs where the mode has none, since the
        square of their sum would hold their products too; see `with_random_signs`.

    Returns
    -------
    SourceVectors
        As `vectors`.

    Raises
    ------
    ConventionError, UnsupportedError, ShapeError, DtypeError
        See `vectors`.

    Notes
    -----
    Draws on the host; see `draw_noise`.
    """
    spec = noise_spec(loss, natural, mode=mode)
    if spec is not None:
        noise = draw_noise(spec, like=natural, rng=seed)
        return vectors(loss, natural, mode=mode, noise=noise)
    made = vectors(loss, natural, mode=mode)
    if not shared:
        return made
    signs = NoiseSpec("uniform", tuple(made.vectors.shape[:-1]))
    return with_random_signs(made, draw_noise(signs, like=natural, rng=seed))
