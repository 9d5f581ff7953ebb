"""Every method with its rule and its grid: as many settings for one as for another.

A grid is four learning rates times three values of one more option: that which matters
most beside the rate.  The rates and dampings of a grid are where trial runs of a few
steps, on one seed, had their best ones.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from methods.adam import Adam
from methods.kfac import EKFAC, kfac, kfoc, tnt
from methods.kl_shampoo import KLShampoo
from methods.sgd import SGD
from methods.shampoo import Shampoo
from methods.soap import SOAP, CarriedSOAP
from methods.step import Momentum, Plain, QuadraticModel
from methods.tridiagonal import tridiagonal

CLIP = 0.1
# Of the way to the minimum of the quadratic model, which is as far as one should go.
PARTS = (0.3, 0.5, 0.7, 1.0)
DAMPINGS = (0.001, 0.01, 0.1)

RULES = {
    "model": QuadraticModel,
    "clip": partial(Momentum, clip=CLIP),
    "momentum": Momentum,
    "own": Plain,
}
RULE_NAMES = {
    "model": "quadratic model",
    "clip": "momentum 0.9, KL clip",
    "momentum": "momentum",
    "own": "its own momentum",
}


@dataclass(frozen=True)
class Method:
    """A direction, one of the `RULES`, and the two options that are searched.

    `option` names the one beside the learning rate, which is the rule's where
    `of_rule`; `only_dense` says that there must be no convolutions.
    """

    name: str
    direction: Callable[..., Any]
    rule: str
    option: str
    learning_rates: tuple[float, ...]
    values: tuple[float, ...]
    of_rule: bool = False
    only_dense: bool = False

    def settings(self):
        """Return the settings that are searched."""
        pairs = itertools.product(self.learning_rates, self.values)
        return [{"learning_rate": lr, self.option: other} for lr, other in pairs]

    def fits(self, problem):
        """Say whether it is defined for a problem."""
        kinds = {layer.kind for layer in problem.layers.values()}
        return not self.only_dense or kinds == {"dense"}

    def made(self, problem, setting):
        """Return the direction and the rule of one setting."""
        other = {self.option: setting[self.option]}
        rule = partial(RULES[self.rule], learning_rate=setting["learning_rate"])
        if self.of_rule:
            return self.direction(problem), rule(**other)
        return self.direction(problem, **other), rule()


def with_model(name, direction, **more):
    """Return a method whose step is that of the quadratic model."""
    return Method(name, direction, "model", "damping", PARTS, DAMPINGS, **more)


ROTATED = "own", "epsilon", (0.01, 0.03, 0.1, 0.3), (1e-5, 1e-4, 1e-3)

METHODS = (
    with_model("KFAC", kfac),
    with_model("EKFAC", EKFAC),
    with_model("KFOC", kfoc),
    with_model("TNT", tnt),
    with_model("block-tridiagonal", tridiagonal, only_dense=True),
    Method("SOAP", SOAP, *ROTATED),
    Method(
        "Shampoo", Shampoo, "momentum", "damping", (0.03, 0.1, 0.3, 1), (1e-4, 1e-2, 1)
    ),
    Method(
        "KL-Shampoo",
        KLShampoo,
        "momentum",
        "damping",
        (0.001, 0.003, 0.01, 0.03),
        (1e-5, 1e-4, 1e-3),
    ),
    Method("Adam", Adam, "own", "beta2", (0.003, 0.01, 0.03, 0.1), (0.8, 0.95, 0.999)),
    Method(
        "SGD",
        SGD,
        "momentum",
        "momentum",
        (0.03, 0.1, 0.3, 1.0),
        (0.7, 0.8, 0.9),
        of_rule=True,
    ),
    # Controls: what of K-FAC's result is the step's, what is the curvature's, and what of
    # SOAP's is due to squares that stay behind?
    Method("KFAC, no model", kfac, "clip", "damping", (0.03, 0.1, 0.3, 1.0), DAMPINGS),
    with_model("gradient, model", SGD),
    Method("SOAP, carried", CarriedSOAP, *ROTATED),
)
