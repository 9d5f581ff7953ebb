"""All private names of Keras 3 that this integration uses.

The other files use public names only: check this file with each new version of Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend import get_keras_mask


def mask_of(x: Any, /) -> Any:
    """Return the mask that Keras carries with an array, None without one."""
    return get_keras_mask(x)


def layers_of(model: Any, /) -> list[Any]:
    """Return all layers of a model, those within layers included."""
    return [*model._flatten_layers(include_self=False)]


def recomputed_layers(model: Any, /) -> list[tuple[Any, dict[str, Any]]]:
    """Return what to set so that no layer is computed again in the backward pass."""
    return [
        (layer, {"_remat_mode": None})
        for layer in model._flatten_layers()
        if getattr(layer, "_remat_mode", None)
    ]


def own_variables(owner: Any, /) -> list[Any]:
    """Return the variables of a layer alone, or those that an optimizer moves."""
    variables: list[Any] = owner._trainable_variables
    return variables


def training_option(model: Any, /) -> dict[str, bool]:
    """Return ``training=True`` for a model whose call takes it."""
    return {"training": True} if model._call_has_training_arg else {}


def optimizer_variables(optimizer: Any, /) -> list[Any]:
    """Return the list in which an optimizer holds its variables."""
    variables: list[Any] = optimizer._variables
    return variables


def is_compiled(model: Any, /) -> bool:
    """Whether a model was compiled with a loss."""
    return getattr(model, "_compile_loss", None) is not None


def compiled_losses(model: Any, /) -> list[tuple[Any, Any, float]] | None:
    """Return the path, loss and weight of each output, None where they are not built.

    Empty for a model that is compiled without a loss.
    """
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return []
    if compiled.built:
        return [
            (one.path, one.loss, 1.0 if one.loss_weights is None else one.loss_weights)
            for one in compiled._flat_losses
        ]
    # Keras builds its losses with the first batch. The loss of an only output is known
    # before.
    names = getattr(model, "output_names", None)
    user, weights = compiled._user_loss, compiled._user_loss_weights
    if keras.tree.is_nested(user) or (names and len(names) > 1):
        return None
    return [((), user, 1.0 if weights is None else float(weights))]


def compiled_reductions(model: Any, /) -> set[Any]:
    """Return the reductions of the losses that a model was compiled with."""
    user = getattr(getattr(model, "_compile_loss", None), "_user_loss", None)
    return {getattr(one, "reduction", None) for one in keras.tree.flatten(user)}


def loss_options(loss: Any, /) -> dict[str, Any]:
    """Return the options of a loss of Keras, such as ``from_logits``."""
    options: dict[str, Any] = getattr(loss, "_fn_kwargs", {})
    return options


def trace_state() -> Callable[[], Any]:
    """Return a function whose result changes within what is traced or mapped by itself."""
    if keras.backend.backend() == "torch":
        import torch

        level: Callable[[], Any] = torch._C._functorch.maybe_current_level
        return level
    import jax
    import jax.extend

    # JAX 0.10 moved this function.
    moved = hasattr(jax.extend.core, "get_opaque_trace_state")
    owner: Any = jax.extend.core if moved else jax.core
    return lambda: owner.get_opaque_trace_state(convention="flax")
