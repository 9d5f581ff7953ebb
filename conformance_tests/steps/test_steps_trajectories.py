"""The steps of TensorFlow's K-FAC and of kfac-jax, composed of this library's parts.

Each reference is a loop over dense float64 vectors, written from those optimizers'
formulas and sharing nothing with the library; the other loop makes the same steps with
`kfac_core.steps`.  Preconditioning and exact products are done on the host for both:
they are not what is compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.steps import (
    add_l2,
    curvature_of_outputs,
    curvature_of_products,
    decay_decoupled,
    kl_clip,
    linear_combination,
    quadratic_model,
    reduction_ratio,
)

from ..builders.steps_reference import SIZE, Logistic, flat, put
from ..builders.tolerances import assert_close, assert_differs

STEPS = 5
OMEGA = 0.9


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of an optimizer; those of another kind are not used."""

    kind: str
    rate: float = 0.3
    momentum: float = 0.8
    clip: float | None = None
    decoupled: float = 0.0
    l2: float = 0.0
    rescale: float = 1.0
    interval: int = 2
    damping: float = 0.2
    minimum: float = 1e-3


@dataclasses.dataclass
class Path:
    """What an optimizer did, step by step."""

    theta: list[np.ndarray] = dataclasses.field(default_factory=list)
    damping: list[float] = dataclasses.field(default_factory=list)
    predicted: list[float] = dataclasses.field(default_factory=list)

    def add(self, theta: np.ndarray, damping: float, predicted: float) -> None:
        self.theta.append(theta)
        self.damping.append(damping)
        self.predicted.append(predicted)


# TensorFlow's K-FAC, dense.


def tensorflow_kfac(problem: Logistic, start: np.ndarray, s: Settings) -> Path:
    """Follow its optimizer; the damping has the l2 term in it, as there."""
    theta, velocity, lam, path = start, np.zeros(SIZE), s.damping, Path()
    for step in range(STEPS):
        g, loss = problem.gradient(theta), problem.loss(theta)
        damped = problem.blocks(theta) + lam * np.eye(SIZE)
        without = 1.0 - s.l2 / lam
        rate = s.rate
        if s.kind == "regular":
            pg = np.linalg.solve(damped, g)
            pg = pg * clip_of(s, g @ pg)
            raw = velocity = s.momentum * velocity + pg
            u = -rate * raw
            predicted = 0.5 * u @ damped @ u + u @ g - without * 0.5 * lam * u @ u
        elif s.kind == "adam":
            velocity = s.momentum * velocity + g
            raw = np.linalg.solve(damped, velocity)
            raw = raw * clip_of(s, velocity @ raw)
            predicted = 0.5 * rate**2 * raw @ velocity - rate * raw @ g
        else:
            rate = s.rescale
            pg, before = np.linalg.solve(damped, g), -velocity
            D = np.stack([pg, before], axis=1)
            b = lam * D.T @ D
            m, c = D.T @ problem.fisher(theta) @ D + b, D.T @ g
            if s.kind == "qmodel_fixedmu":
                alpha, mu = -(s.momentum * m[0, 1] + c[0]) / m[0, 0], s.momentum
            elif c[1] == 0.0:
                alpha, mu = -c[0] / m[0, 0], 0.0
            else:
                inverse = np.array([[m[1, 1], -m[0, 1]], [-m[1, 0], m[0, 0]]])
                alpha, mu = -inverse @ c / (m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0])
            x = rate * np.array([alpha, mu])
            predicted = 0.5 * x @ m @ x + c @ x - without * 0.5 * x @ b @ x
            raw = velocity = mu * velocity - alpha * pg
        theta = theta - rate * (raw + s.decoupled * theta)
        if (step + 1) % s.interval == 0:
            lam = marquardt(problem.loss(theta) - loss, predicted, lam, s)
        path.add(theta, lam, predicted)
    return path


def clip_of(s: Settings, product: float) -> float:
    """Return the factor that the update is multiplied with."""
    return 1.0 if s.clip is None else min(1.0, np.sqrt(s.clip / (s.rate**2 * product)))


def marquardt(change: float, predicted: float, lam: float, s: Settings) -> float:
    """Return the new damping, l2 term included."""
    assert predicted < 0.0, "the rules of the optimizers differ where this fails"
    rho, omega = change / predicted, OMEGA**s.interval
    lam = lam * omega if rho > 0.75 else lam / omega if rho < 0.25 else lam
    return max(lam, s.minimum + s.l2)


# kfac-jax, dense.


def kfac_jax(problem: Logistic, start: np.ndarray, s: Settings) -> Path:
    """Follow its optimizer; the l2 term is beside the damping, as there."""
    theta, velocity, lam, path = start, np.zeros(SIZE), s.damping, Path()
    for step in range(STEPS):
        g, loss = problem.gradient(theta), problem.loss(theta)
        pg = problem.precondition(theta, g, lam + s.l2)
        if s.kind == "fixed":
            pg = pg * clip_of(s, g @ pg)
            velocity = -s.rate * pg + s.momentum * velocity
            V, w, F = velocity[:, None], np.ones(1), problem.blocks(theta)
            A = V.T @ F @ V + s.l2 * V.T @ V
        else:
            V = np.stack([pg, velocity], axis=1)
            A = V.T @ problem.fisher(theta) @ V + s.l2 * V.T @ V
            damped, b = A + lam * V.T @ V, V.T @ g
            kept = 1 if not velocity.any() else 2
            w = np.zeros(2)
            w[:kept] = -np.linalg.solve(damped[:kept, :kept], b[:kept])
            velocity = V @ w
        predicted = 0.5 * w @ A @ w + w @ (V.T @ g)
        theta = theta + velocity
        if (step + 1) % s.interval == 0:
            change = problem.loss(theta) - loss
            lam = marquardt(change, predicted, lam, dataclasses.replace(s, l2=0.0))
        path.add(theta, lam, predicted)
    return path


# The same with the library.


def library(
    backend: Any, dtype: str, problem: Logistic, start: np.ndarray, s: Settings
) -> Path:
    """Make the steps with `kfac_core.steps`, for both families of optimizers."""

    def on(vector: np.ndarray) -> Any:
        return put(backend, vector, dtype)

    def off(vector: Any) -> np.ndarray:
        return flat(backend, vector)

    included = s.kind in ("regular", "adam", "qmodel", "qmodel_fixedmu")
    theta, velocity = on(start), on(np.zeros(SIZE))
    lam, path = s.damping - (s.l2 if included else 0.0), Path()
    for step in range(STEPS):
        here = off(theta)
        g, loss = on(problem.gradient(here)), problem.loss(here)

        def precondition(vector: Any, here: Any = here, total: Any = lam + s.l2) -> Any:
            return on(problem.precondition(here, off(vector), total))

        def clipped(vector: Any, direction: Any) -> Any:
            if s.clip is None:
                return direction
            nu = kl_clip(vector, direction, learning_rate=s.rate, bound=s.clip).scale
            return linear_combination([nu], [direction])

        if s.kind in ("regular", "fixed"):
            pg = clipped(g, precondition(g))
            if s.kind == "regular":  # the velocity lacks the learning rate
                velocity = linear_combination([s.momentum, 1.0], [velocity, pg])
                delta = linear_combination([-s.rate], [velocity])
            else:
                velocity = linear_combination([s.momentum, -s.rate], [velocity, pg])
                delta = velocity
            product = on(problem.blocks(here) @ off(delta))
            product = add_l2(product, delta, weight_decay=s.l2)
            C = curvature_of_products([delta], [product])
            model = quadratic_model(g, [delta], curvature=C, damping=lam)
            predicted = model.change([1.0], damped=False)
        elif s.kind == "adam":
            velocity = linear_combination([s.momentum, 1.0], [velocity, g])
            raw = clipped(velocity, precondition(velocity))
            delta = linear_combination([-s.rate], [raw])
            C = curvature_of_products([raw], [velocity])
            model = quadratic_model(g, [raw], curvature=C, damping=0.0)
            predicted = model.change([-s.rate], damped=True)
        else:
            D = linear_combination([-1.0], [precondition(g)])
            directions = [D, velocity]  # here the step before, without the rescaling
            p = 1.0 / (1.0 + np.exp(-problem.X @ here))
            changes = [problem.X @ off(d) for d in directions]
            C = curvature_of_outputs(
                [backend.asarray(x, dtype) for x in changes],
                [backend.asarray(p * (1.0 - p) * x, dtype) for x in changes],
                examples=len(p),
            )
            C = C + s.l2 * curvature_of_products(directions, directions)
            model = quadratic_model(g, directions, curvature=C, damping=lam)
            fixed = (None, s.momentum) if s.kind == "qmodel_fixedmu" else None
            c = model.minimize(fixed=fixed).coefficients
            velocity = linear_combination(c, directions)
            delta = linear_combination([s.rescale], [velocity])
            predicted = model.change(s.rescale * c, damped=False)
        rate = s.rescale if s.kind.startswith("qmodel") else s.rate
        step_taken = decay_decoupled(
            delta, theta, weight_decay=s.decoupled, learning_rate=rate
        )
        theta = linear_combination([1.0, 1.0], [theta, step_taken])
        if (step + 1) % s.interval == 0:
            after = problem.loss(off(theta))
            total = lam + (s.l2 if included else 0.0)
            total = kc.levenberg_marquardt(
                total,
                reduction_ratio(loss, after, predicted=float(predicted)),
                decay=OMEGA**s.interval,
                minimum=s.minimum + (s.l2 if included else 0.0),
            )
            lam = total - (s.l2 if included else 0.0)
        path.add(
            off(theta),
            lam + (s.l2 if included else 0.0),
            float(backend.to_numpy(predicted)),
        )
    return path


RUNS = {
    "regular": Settings("regular", clip=0.02, decoupled=0.05, l2=0.01),
    "adam": Settings("adam", clip=0.05),
    "qmodel": Settings("qmodel"),
    "qmodel, rescaled, l2": Settings("qmodel", rescale=0.7, l2=0.05, interval=1),
    "qmodel_fixedmu": Settings("qmodel_fixedmu", momentum=0.5, decoupled=0.02),
    "kfac-jax": Settings("adaptive", l2=0.02),
    "kfac-jax, fixed": Settings("fixed", clip=0.01, l2=0.02, interval=1),
}


@pytest.fixture
def start(rng):
    """Where all runs begin."""
    return 0.5 * rng.normal(size=SIZE)


def reference_path(problem: Logistic, start: np.ndarray, s: Settings) -> Path:
    """Return the dense loop of the optimizer that has such settings."""
    of_jax = s.kind in ("adaptive", "fixed")
    return (kfac_jax if of_jax else tensorflow_kfac)(problem, start, s)


@pytest.mark.parametrize("name", RUNS)
def test_the_trajectory_is_that_of_the_optimizer(backend, dtype, rng, start, name):
    """Parameters, damping and predicted changes agree after each of five steps."""
    s = RUNS[name]
    problem = Logistic(rng, l2=s.l2)

    got = library(backend, dtype, problem, start, s)

    expected = reference_path(problem, start, s)
    assert_close(got.theta, expected.theta, "trajectory", dtype)
    assert_close(got.predicted, expected.predicted, "trajectory", dtype)
    assert_close(got.damping, expected.damping, "trajectory", dtype)
    assert expected.damping[-1] != s.damping, "the damping was never adapted"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("regular", {"clip": None}),
        ("regular", {"decoupled": 0.0}),
        ("adam", {"kind": "regular"}),
        ("qmodel, rescaled, l2", {"rescale": 1.0}),
        ("qmodel", {"kind": "qmodel_fixedmu"}),
        ("kfac-jax", {"l2": 0.0}),
        ("kfac-jax, fixed", {"clip": None}),
    ],
)
def test_every_option_changes_the_trajectory(rng, start, name, change):
    """The rows that must differ: each option changes where the reference goes."""
    s = RUNS[name]
    problem = Logistic(rng, l2=s.l2)

    other = reference_path(problem, start, dataclasses.replace(s, **change))

    expected = reference_path(problem, start, s)
    assert_differs(other.theta[-1], expected.theta[-1])
