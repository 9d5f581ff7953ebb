"""Estimators of options that are given one by one, as parametrized tests have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import kfac_core as kc

GROUPS = {
    "averaging": kc.Averaging,
    "refreshing": kc.Refreshing,
    "coupling": kc.Coupling,
    "execution": kc.Execution,
}


def make_estimator(blocks: Any, /, **options: Any) -> kc.Estimator:
    """Return an estimator; an option of a group may stand beside the others."""
    for group, cls in GROUPS.items():
        names = [field.name for field in dataclasses.fields(cls)]
        alone = {name: options.pop(name) for name in names if name in options}
        if alone:
            held = options.get(group, cls())
            options[group] = dataclasses.replace(held, **alone)
    return kc.Estimator(blocks, **options)
