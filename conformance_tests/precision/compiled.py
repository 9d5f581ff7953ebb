"""The grid inside `jax.jit`: many cases of one block, rule and dtype as one program.

JAX compiles each operation for each shape, and calling them one by one costs a tenth of a
second a case.  With ``check="status"`` an operator and its products are one function of
statistics, damping and vectors, which `jax.vmap` takes over ranks, scales and dampings.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import kfac_core as kc

from . import grid
from .kinds import KINDS

PRODUCTS: dict[str, tuple[Any, ...]] = {
    "multiply": (),
    "multiply_inverse": (),
    "multiply_matpower": (-0.5,),
    "multiply_cholesky": (),
    "multiply_cholesky_inverse": (),
}


class Recorded:
    """The answers of a compiled program to one case, asked for as of an operator.

    Parameters
    ----------
    found : mapping
        Images of the vectors by product, samples of all unit vectors, and the
        log-determinant.
    vectors : array, shape (k, p)
        The vectors.
    """

    def __init__(self, found: dict[str, np.ndarray], vectors: np.ndarray) -> None:
        self.found, self.vectors = found, vectors

    def status(self) -> int:
        """Return the flags."""
        return int(self.found["status"])

    def logdet(self) -> float:
        """Return the log-determinant."""
        if "logdet" not in self.found:
            raise kc.UnsupportedError("logdet")
        return float(self.found["logdet"])

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        if name not in self.found:
            raise kc.UnsupportedError(name)
        return lambda v, *arguments: self.image(name, kc.to_numpy(v))

    def image(self, name: str, v: np.ndarray) -> np.ndarray:
        """Return the image of one of the vectors, or of a unit vector."""
        flat = v.ravel().astype(np.float64)
        every = np.concatenate([self.vectors, np.eye(flat.size)])
        place = int(np.argmin(np.max(np.abs(every - flat), axis=1)))
        found: np.ndarray = self.found[name][place]
        return found


def verdicts(cases: Iterable[grid.Case]) -> Iterator[tuple[grid.Case, str, str]]:
    """Yield the verdict of each case with ``check="status"``, from compiled programs."""

    def program(case: grid.Case) -> tuple[Any, ...]:
        return case.kind, case.rule, case.precision

    cases = [case for case in cases if not KINDS[case.kind].by_samples]
    for _, group in itertools.groupby(sorted(cases, key=program), key=program):
        yield from _of_one_program(list(group))


def _of_one_program(cases: list[grid.Case]) -> Iterator[tuple[grid.Case, str, str]]:
    import jax
    import jax.numpy as jnp

    first = cases[0]
    kind, precision = KINDS[first.kind], grid.PRECISIONS[first.precision][1]
    answers = [grid.answer_of(case, "jax") for case in cases]
    dtype = grid.vector_dtype(first)
    statistics = [grid.statistics_of(case, "jax") for case in cases]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *statistics)
    vectors = np.stack([answer.vectors for answer in answers]).astype(dtype)
    units = np.eye(vectors.shape[-1], dtype=dtype)

    def one(statistics: Any, damping: Any, given: Any) -> dict[str, Any]:
        operator = kc.operator_of(
            kind.block,
            statistics,
            kc.RefreshOptions(
                damping=damping,
                rule=first.rule,
                factorizations=grid.factorizations(first),
                check="status",
                precision=precision,
            ),
        )
        found = {"status": operator.status()}
        # Where it needs a factorization that the other products do not.
        with contextlib.suppress(kc.NotReadyError):
            found["logdet"] = operator.logdet()
        unsupported = operator.unsupported_products
        for name, arguments in PRODUCTS.items():
            if name in unsupported:
                continue
            product = getattr(operator, name)
            found[name] = jax.vmap(lambda v, p=product, a=arguments: p(v, *a))(
                given.reshape(-1, *kind.shape)
            )
        every = jnp.concatenate([given, jnp.asarray(units)])
        found["sample"] = jax.vmap(operator.sample)(every.reshape(-1, *kind.shape))
        return found

    dampings = jnp.asarray([case.damping for case in cases], dtype="float64")
    made = jax.jit(jax.vmap(one))(stacked, dampings, jnp.asarray(vectors))
    host = {name: np.asarray(x) for name, x in made.items()}
    for i, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        own = {name: x[i] for name, x in host.items()}
        operator = Recorded(own, answer.vectors.astype(np.float64))
        yield (case, *grid.judged(case, operator, answer, dtype))
