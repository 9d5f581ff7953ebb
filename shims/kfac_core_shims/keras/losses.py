"""The likelihoods of a model's outputs, from its compiled losses.

Conventions.  A *row* is one vector of P outputs, of which a loss of Keras makes one number
c l, with l its likelihood's negative log and c the factor of `RowLoss` times the
``loss_weights`` of the output; the loss is ``sum(w c l) / D``, with w the sample weights
times the mask, and D what the loss's reduction divides by.  All is divided by the largest
c of the outputs.  The Fisher matrix is then ``sum(w F) / D``, F that of a row: each row's
vectors are multiplied by ``sqrt(w)``, and D is the number of rows.  The mean of a layer's
``x x^T`` has weights too: see `layer_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

import kfac_core as kc
from kfac_core_shims.keras import private

RowLoss = kc.integration.RowLoss
CATEGORICAL = RowLoss(likelihood=kc.losses.Categorical())
BERNOULLI = RowLoss(likelihood=kc.losses.Bernoulli(), mean_over_outputs=True)
# Keras's squared error has no factor of one half.
SQUARED = RowLoss(
    likelihood=kc.losses.Gaussian(variance=1.0), factor=2.0, mean_over_outputs=True
)
MEANS = "sum_over_batch_size", "mean", "mean_with_sample_weight"
EPSILON = 1e-7  # Keras's own bound on probabilities


@dataclass(frozen=True)
class OutputLoss:
    """The loss of one output of a model.

    Attributes
    ----------
    row : RowLoss
        Likelihood of a row.
    path : tuple
        Where the output is among a model's outputs.
    reduction : str
        Of Keras: "sum", "sum_over_batch_size", "mean" or "mean_with_sample_weight".
    weight : float
        The ``loss_weights`` of the output.
    natural : callable
        Takes the output to what the likelihood reads: probabilities to logits.
    smoothing : float
        The ``label_smoothing`` of the loss.
    """

    row: Any
    path: tuple[Any, ...] = ()
    reduction: str = "sum_over_batch_size"
    weight: float = 1.0
    natural: Callable[[Any], Any] = lambda z: z
    smoothing: float = 0.0

    def multiple(self, outputs: int) -> float:
        """Return c: what the loss of a row of P outputs is of its negative log."""
        multiple: float = self.row.multiple(int(outputs))
        return float(self.weight) * multiple

    def at(self, tree: Any) -> Any:
        """Return what is at the path in a structure; the structure itself without one."""
        for key in self.path:
            tree = tree[key]
        return tree


def losses_of(model: Any, likelihood: Any, reduction: str) -> list[OutputLoss]:
    """Return the losses of a model's outputs.

    Parameters
    ----------
    model : keras.Model
        The model; where it is compiled, its losses say what the outputs are.
    likelihood : object
        Of `KFAC`: None where the compiled losses say it; a list for several outputs.
    reduction : {"mean", "sum"}
        What the caller expects of all of them.

    Returns
    -------
    list of OutputLoss
        One for each output that has a loss.

    Raises
    ------
    ConventionError
        Where the caller and a loss do not agree, and where nothing says what an output is.
    UnsupportedError
        For a loss that no likelihood is known of.

    Notes
    -----
    Where a model overrides `compute_loss` or `train_step`, the caller's likelihood counts.
    """
    likelihoods = None
    if likelihood is not None:
        several = likelihood if isinstance(likelihood, list | tuple) else [likelihood]
        likelihoods = [kc.integration.row_loss(one) for one in several]
    override = own_loss_of(model)
    if override and likelihoods is None:
        raise kc.ConventionError(
            f"{type(model).__name__} overrides `{override}`, so the compiled loss may "
            "not be the one that is differentiated. Pass the likelihood of the "
            "outputs: KFAC(model, likelihood='categorical'), 'bernoulli' or 'gaussian' "
            "(half the squared error). It replaces that of the compiled loss."
        )
    compiled = private.compiled_losses(model)
    if compiled is None:
        raise kc.ConventionError(
            "The losses of a model with several outputs are not built yet. Call first "
            "model.build_from_data, model.evaluate or model.train_on_batch on a batch."
        )
    if not compiled:
        if likelihoods is None:
            raise kc.ConventionError(
                "Expected `likelihood`: the model is not compiled with a loss that "
                "determines it. Compile it before KFAC(model), or pass for example "
                "likelihood='categorical'."
            )
        single = len(likelihoods) == 1
        name = "sum" if reduction == "sum" else "sum_over_batch_size"
        return [
            OutputLoss(row, () if single else (i,), name)
            for i, row in enumerate(likelihoods)
        ]
    if likelihoods is not None and len(likelihoods) != len(compiled):
        raise kc.ConventionError(
            f"Expected as many likelihoods as the model has losses, {len(compiled)}, got "
            f"{len(likelihoods)}."
        )
    return [
        _output_loss(
            loss,
            path,
            weight,
            likelihoods[i] if likelihoods else None,
            reduction,
            overridden=bool(override),
        )
        for i, (path, loss, weight) in enumerate(compiled)
    ]


def own_loss_of(model: Any, /) -> str:
    """Return which method of a model computes a loss of its own, "" for none."""
    for name in ("compute_loss", "train_step"):
        if getattr(type(model), name, None) is not getattr(keras.Model, name):
            return name
    return "compute_loss" if "compute_loss" in vars(model) else ""


def rows_of(loss: OutputLoss, output: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return what the likelihood reads, the weight of each row (or None), and D.

    Parameters
    ----------
    loss : OutputLoss
        The loss.
    output : array, shape (N, ..., P)
        The model's output, with Keras's mask where it has one.
    sample_weight : array, shape (N,) or of the rows, optional
        For this output.

    Returns
    -------
    natural : array, shape (N, ..., P)
        In float32 or wider.
    weight : array, shape (N, ...), or None
        Weight of each row.
    rows : int or 0-d array
        What the sum of the rows' losses is divided by; with the reduction "sum", their
        number.
    """
    if len(output.shape) < 2:
        raise kc.ShapeError(
            f"Expected outputs of shape (N, ..., P), got {tuple(output.shape)}. Add a last "
            "axis, as Dense(1) has it."
        )
    mask = private.mask_of(output)
    narrow = keras.backend.standardize_dtype(output.dtype) in ("float16", "bfloat16")
    z = loss.natural(ops.cast(output, "float32") if narrow else output)
    shape = tuple(output.shape[:-1])
    count = 1
    for length in shape:
        count *= length
    rows: Any = count
    weight = None
    if sample_weight is not None:
        weight = sample_weights(sample_weight, z)
    if mask is not None:
        counted = ops.cast(ops.broadcast_to(mask, shape), z.dtype)
        if loss.reduction in ("mean", "sum_over_batch_size"):
            counted = counted * (count / ops.maximum(ops.sum(counted), 1.0))
        weight = counted if weight is None else weight * counted
    if weight is not None and loss.reduction == "mean_with_sample_weight":
        rows = ops.sum(weight)
    return z, weight, rows


def sample_weights(sample_weight: Any, z: Any) -> Any:
    """Return the weight of each row of outputs, shape (N, ...), as Keras reads it."""
    shape = tuple(z.shape[:-1])
    if sample_weight is None:
        return ops.ones(shape, z.dtype)
    weight = ops.cast(ops.convert_to_tensor(sample_weight), z.dtype)
    if len(weight.shape) == len(shape) + 1 and weight.shape[-1] == 1:
        weight = ops.squeeze(weight, -1)
    axes = (1,) * (len(shape) - len(weight.shape))
    return ops.broadcast_to(ops.reshape(weight, (*weight.shape, *axes)), shape)


def layer_weights(weights: list[Any], reached: Any, block: str) -> Any:
    """Return the weights of the rows of a layer, from those of the rows of outputs.

    Parameters
    ----------
    weights : list of array, shape (N, ...)
        The weights of the rows of each output.
    reached : array of bool, shape (N, ...)
        The rows of the layer that anything came back to.
    block : str
        The layer's block, for the message.

    Returns
    -------
    array, shape (N, ...)
        Sum over the outputs, scaled so that a weight common to all rows drops out.  A row
        has the weight of the row of outputs at its place, if the layer has those places
        and nothing comes back to those of weight zero; else the mean weight of its example.
    """
    places = tuple(reached.shape)
    examples = weights[0].shape[0]
    if places[0] != examples:
        raise kc.UnsupportedError(
            f"The layer of {block!r} has {places[0]} rows on its first axis, and "
            f"`sample_weight` is of {examples} examples. Keep the examples as an axis of "
            "their own, or leave the weights out."
        )
    total: Any = 0.0
    for weight in weights:
        mean = ops.mean(ops.reshape(weight, (examples, -1)), axis=1)
        mean = ops.reshape(mean, (examples, *(1,) * (len(places) - 1)))
        here = ops.broadcast_to(mean, places)
        if tuple(weight.shape) == places:
            # Where positions are mixed, one of weight zero takes part in others' losses.
            alone = ops.all((weight > 0) | ops.logical_not(reached))
            here = ops.where(alone, weight, here)
        total = total + here
    # The core takes the mean weight of an example for the number of its positions.
    counted = ops.cast(total > 0, total.dtype)
    weighted = ops.sum(ops.max(ops.reshape(counted, (examples, -1)), axis=1))
    positions = ops.sum(counted) / ops.maximum(weighted, 1.0)
    return total * (examples * positions / ops.maximum(ops.sum(total), 1e-30))


def _output_loss(
    loss: Any,
    path: Any,
    weight: float,
    expected: Any,
    reduction: str,
    *,
    overridden: bool,
) -> OutputLoss:
    """Return what a loss of Keras says, and compare it with what the caller says.

    `overridden`: the model differentiates a loss of its own, which the caller knows.
    """
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    # A function is a loss of Keras's default reduction.
    loss_reduction = getattr(loss, "reduction", "sum_over_batch_size")
    name = getattr(loss, "__name__", type(loss).__name__)
    allowed = ("sum",) if reduction == "sum" else MEANS
    if loss_reduction not in allowed:
        raise kc.ConventionError(
            f"The model is compiled with {name}(reduction={loss_reduction!r}), and KFAC "
            f"has reduction={reduction!r}. Say the same in both: 'mean' for Keras's "
            f"{', '.join(map(repr, MEANS))}, 'sum' for 'sum'."
        )
    row, natural = _likelihood(loss)
    if overridden and expected is not None and expected != row:
        return OutputLoss(expected, path, loss_reduction, weight)
    if row is None:
        if expected is None:
            raise kc.UnsupportedError(
                f"{name} is not the loss of a known likelihood. Pass that of the "
                "outputs: KFAC(model, likelihood=...)."
            )
        return OutputLoss(expected, path, loss_reduction, weight)
    if expected is not None and expected != row:
        raise kc.ConventionError(
            f"The model is compiled with {name}, whose rows have {row}, and KFAC has "
            f"likelihood={expected}. Leave `likelihood` out to take it from the loss."
        )
    smoothing = float(private.loss_options(loss).get("label_smoothing") or 0.0)
    return OutputLoss(row, path, loss_reduction, weight, natural, smoothing=smoothing)


def _likelihood(loss: Any) -> tuple[Any, Any]:
    """Return the likelihood of a loss's rows, and what takes outputs to its parameters."""
    function = getattr(loss, "fn", loss)
    options = private.loss_options(loss)
    # A function or a class of somebody else may compute anything.
    custom = callable(loss) and type(loss).__module__.split(".")[0] not in (
        "keras",
        "builtins",
    )
    last = options.get("axis", -1) == -1 and options.get("ignore_class") is None
    if custom or not last:
        return None, None
    logits = bool(options.get("from_logits"))
    if function in (
        keras.losses.categorical_crossentropy,
        keras.losses.sparse_categorical_crossentropy,
    ):
        return CATEGORICAL, (_same if logits else _log)
    if function is keras.losses.binary_crossentropy:
        return BERNOULLI, (_same if logits else _logit)
    if function is keras.losses.mean_squared_error:
        return SQUARED, _same
    return None, None


def _same(z: Any) -> Any:
    return z


def _log(p: Any) -> Any:
    # softmax(log p) = p: the logits up to a constant, and the same Fisher matrix.
    return ops.log(ops.clip(p, EPSILON, 1.0 - EPSILON))


def _logit(p: Any) -> Any:
    p = ops.clip(p, EPSILON, 1.0 - EPSILON)
    return ops.log(p) - ops.log1p(-p)
