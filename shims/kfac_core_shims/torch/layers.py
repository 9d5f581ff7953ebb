"""Which modules are covered, and how each is a layer of ``kfac_core``.

A module is known by the class that defines its ``forward``: a subclass that inherits it is
covered too, and one that overrides it is not.  `register_layer` adds modules of other
libraries.

Conventions.  A *part* is one block: one weight, perhaps with a bias.  Most modules have one
part, attention has one for each projection.  A part is read in one of two ways.  A forward
hook takes the inputs of the module's call (`Part.read`); or, where the module reads its
weights itself, the inputs are those of the matrix products in the graph (``read=None``).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional as fn

import kfac_core as kc
from kfac_core_shims.torch import private


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The inputs of a layer's call, in the form of ``kfac_core``.

    Attributes
    ----------
    inputs : torch.Tensor
        Inputs of the layer, one row of examples after the other.
    mask : torch.Tensor of bool, optional
        Rows that count.
    grad_shape : tuple of int
        Shape that gradients of the module's output are brought into; empty to keep theirs.
    grad_scale : float
        What these gradients are multiplied by.
    transposed : bool
        Whether the call multiplied by the transpose of the block's weight.
    """

    inputs: Any
    mask: Any = None
    grad_shape: tuple[int, ...] = ()
    grad_scale: float = 1.0
    transposed: bool = False


Reader = Callable[[Any, tuple[Any, ...], Any], Reading | None]
"""``(module, arguments, output) -> Reading``; None for a call that cannot be read."""


def _same(x: Any) -> Any:
    return x


@dataclass(frozen=True, kw_only=True)
class Part:
    """A weight of a module, with its bias, as one layer.

    Attributes
    ----------
    layer : kfac_core.layers.Layer
        The geometry.
    parameters : dict of str to str
        For each parameter of the layer the attribute of the module.
    rows : dict of str to slice
        For each parameter of the layer that is a part of the attribute: the rows of it.
    read : callable or None
        Reads a call; None where the graph's matrix products are read instead.
    to_layer, to_module : callable
        Bring a weight into the layer's layout and back.
    tied : bool
        Whether the weight is an embedding's, and makes logits too.
    """

    layer: Any
    parameters: Mapping[str, str]
    rows: Mapping[str, slice] = field(default_factory=dict)
    read: Reader | None = None
    to_layer: Callable[[Any], Any] = _same
    to_module: Callable[[Any], Any] = _same
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a module by name.

    Attributes
    ----------
    of : dict of str to Part
        The parts; the name of an only part is empty.
    around : callable, optional
        Returns a context in which the module is called where its graph is to be read.
    reasons : dict of str to str
        Why parameters of the module are in none of its parts.
    """

    of: Mapping[str, Part]
    around: Callable[[], AbstractContextManager[Any]] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


Owns = Callable[[str], bool]
"""Whether a parameter is there, trained, and used wherever the weight is."""

Describe = Callable[[Any, Owns], Parts | str]
"""``(module, owns) -> Parts``, or the reason why a module is left alone."""

_BY_TYPE: dict[type, Describe] = {}
_BY_NAME: dict[str, Describe] = {}


def register_layer(
    kind: type | str,
    how: Literal["linear", "experts", "norm"] | Describe,
    /,
    *,
    weight: str = "weight",
    bias: str = "bias",
    weight_layout: Literal["oi", "io"] = "oi",
) -> None:
    """Cover modules of another library.

    Parameters
    ----------
    kind : type or str
        The class that defines ``forward``; or its full name, in which ``*`` stands for any
        letters, so that its library need not be imported.
    how : {"linear", "experts", "norm"} or callable
        ``"linear"``: ``y = x W + b`` along the last axis, of the argument x and the
        parameter W themselves, which the first call checks.  ``"experts"``: the weight is a
        stack of such W, each a block, and is read by `torch.bmm`, ``einsum`` of one product
        for each expert, ``x @ weight[e]`` or ``grouped_mm``.  ``"norm"``: the weight
        multiplies a normalized input, and the bias is added, along the last axes.  Or
        ``(module, owns) -> Parts`` for anything else, where ``owns(name)`` says whether a
        parameter is trained and belongs to the weight.  A part without ``read`` is any
        product with a matrix in the module's forward pass, wherever it stands there.
    weight, bias : str
        Attributes of the module that hold the parameters.
    weight_layout : {"oi", "io"}
        For ``"linear"`` and ``"experts"``: whether a W is (out, in) or (in, out).

    Raises
    ------
    kfac_core.ConventionError
        For something else than these; from a module's first call, where it is no product
        as ``"linear"`` says.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import register_layer
    >>> class Columns(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.kernel = torch.nn.Parameter(torch.zeros(3, 2))
    ...     def forward(self, x):
    ...         return x @ self.kernel
    >>> register_layer(Columns, "linear", weight="kernel", weight_layout="io")
    """
    if not isinstance(kind, type | str):
        raise kc.ArgumentError(
            f"Expected `kind` to be a class or its name, got {kind!r}."
        )
    if weight_layout not in ("oi", "io"):
        raise kc.ConventionError(
            f"Expected `weight_layout` to be 'oi' or 'io', got {weight_layout!r}."
        )
    if how == "linear":
        read = _checked_features(weight, weight_layout)
        described: Any = _linear_of(weight, bias, weight_layout, read)
    elif how == "experts":
        described = _experts_of((weight, bias), layout=weight_layout)
    elif how == "norm":
        described = _norm_of(weight, bias)
    elif callable(how):
        described = how
    else:
        raise kc.ConventionError(
            f"Expected `how` to be 'linear', 'experts', 'norm' or a callable, got {how!r}."
        )
    if isinstance(kind, str):
        _BY_NAME[kind] = described
    else:
        _BY_TYPE[kind] = described


def describe(module: torch.nn.Module, /, *, owns: Owns) -> Parts | str | None:
    """Return the parts of a module, a reason why it has none, or None if it is not known.

    Parameters
    ----------
    module : torch.nn.Module
        Module with parameters of its own.
    owns : callable
        Whether a parameter of the module belongs to its weight.

    Returns
    -------
    Parts, str or None
        Parts of a covered module.
    """
    forward = type(module).forward
    for kind in type(module).__mro__:
        if kind.__dict__.get("forward") is not forward:
            continue
        if kind in _BY_TYPE:
            return _BY_TYPE[kind](module, owns)
        name = f"{kind.__module__}.{kind.__qualname__}"
        for pattern, how in _BY_NAME.items():
            if fnmatch.fnmatchcase(name, pattern):
                return how(module, owns)
    base = described_base(module)
    if base is None or base not in (nn.Linear, nn.Embedding):
        return None
    parts = _BY_TYPE[base](module, owns)
    if isinstance(parts, str):
        return parts
    # What another forward makes of the product or the lookup is seen in the graph.
    read = {n: replace(part, read=None) for n, part in parts.of.items()}
    why = f"it is a parameter of {type(module).__name__} itself, which is not known"
    others = (n for n, _ in module.named_parameters(recurse=False))
    reasons = {n: why for n in others if n not in ("weight", "bias")}
    return Parts(of=read, reasons=reasons)


def described_base(module: torch.nn.Module, /) -> type | None:
    """Return the covered class whose ``forward`` the class of a module overrides."""
    return next((kind for kind in type(module).__mro__ if kind in _BY_TYPE), None)


def _whole(
    layer: Any,
    read: Reader | None,
    *,
    bias: bool,
    names: tuple[str, str] = ("weight", "bias"),
    **options: Any,
) -> Parts:
    """Return the only part of a module with a weight and perhaps a bias, of some names."""
    roles = ("scale", "shift") if layer.kind == "scale_shift" else ("weight", "bias")
    count = 2 if bias else 1
    parameters = dict(zip(roles[:count], names[:count], strict=True))
    return Parts(
        of={"": Part(layer=layer, parameters=parameters, read=read, **options)}
    )


# Linear layers and what multiplies like one.


def _linear_of(
    weight: str, bias: str, layout: Literal["oi", "io"], read: Reader
) -> Describe:
    def described(module: torch.nn.Module, owns: Owns) -> Parts | str:
        own_bias = owns(bias)
        first, second = getattr(module, weight).shape
        out, inputs = (first, second) if layout == "oi" else (second, first)
        layer = kc.Dense(
            in_features=inputs,
            out_features=out,
            bias=own_bias,
            weight_layout=layout,
        )
        return _whole(layer, read, bias=own_bias, names=(weight, bias))

    return described


def _read_features(module: Any, arguments: tuple[Any, ...], y: Any) -> Reading:
    x = arguments[0]
    if x.ndim == 1:
        return Reading(inputs=x[None], grad_shape=(1, *y.shape))
    return Reading(inputs=x)


def _checked_features(weight: str, layout: Literal["oi", "io"]) -> Reader:
    """Read the features of a call; the first of each module must multiply them by W."""
    checked: WeakSet[Any] = WeakSet()

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x, W = arguments[0], getattr(module, weight)
        plain = type(x) is torch.Tensor is type(y) and type(W) is nn.Parameter
        plain = plain and W.requires_grad and not private.is_transformed(y)
        alike = y.numel() and x.shape[:-1] == y.shape[:-1]
        if plain and alike and module not in checked:
            checked.add(module)
            v = torch.linspace(1.0, 2.0, y.numel(), dtype=y.dtype, device=y.device)
            v = v.reshape(y.shape)
            # Not y itself: what is summed over processes is no product of one's own x.
            (gradient,) = torch.autograd.grad(
                y, W, v, retain_graph=True, allow_unused=True
            )
            rows = x.to(y.dtype).reshape(-1, x.shape[-1])
            expected = v.reshape(-1, y.shape[-1]).mT @ rows
            if layout == "io":
                expected = expected.mT
            if (
                gradient is None
                or (gradient - expected).norm() > 0.05 * expected.norm()
            ):
                raise kc.ConventionError(
                    f'`register_layer` describes {type(module).__name__} as "linear", but '
                    f"its output is not its argument times `{weight}`: forward changes one "
                    "of them first, or the product. Register a function that returns a "
                    "`Part` without `read`: its product is found in the graph."
                )
        return _read_features(module, arguments, y)

    return read


def _bilinear(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """``y_o = x_i W_oij z_j``: a linear layer of all products of the two inputs."""
    bias = owns("bias")
    out, first, second = module.weight.shape
    layer = kc.Dense(
        in_features=first * second, out_features=out, bias=bias, weight_layout="oi"
    )

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x, z = arguments
        products = (x[..., :, None] * z[..., None, :]).flatten(-2)
        return _read_features(module, (products,), y)

    return _whole(layer, read, bias=bias, to_layer=lambda w: w.reshape(out, -1))


# Convolutions.


def _conv(module: torch.nn.Module, owns: Owns) -> Parts | str:
    bias = owns("bias")
    padded = module.padding_mode != "zeros"
    layer = kc.integration.framework_conv(
        module.weight.shape,
        strides=module.stride,
        padding=0 if padded else module.padding,
        dilation=module.dilation,
        groups=module.groups,
        bias=bias,
        channels="first",
    )
    d = module.weight.ndim - 2

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x = arguments[0]
        if padded:
            widths = private.padding_widths(module)
            x = fn.pad(x, widths, mode=module.padding_mode)
        return _batched(x, y, d)

    return _whole(layer, read, bias=bias)


def _transposed_conv(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """Describe it as a convolution of the inputs with zeros between them.

    The kernel is flipped.
    """
    bias = owns("bias")
    inputs, out, *kernel = module.weight.shape
    groups, d = module.groups, len(kernel)
    spatial = tuple(range(-d, 0))
    layer = kc.integration.framework_conv(
        (out * groups, inputs // groups, *kernel),
        padding=0,
        dilation=module.dilation,
        groups=groups,
        bias=bias,
        channels="first",
    )

    # PyTorch stores (in, out / groups, ...), and a convolution (out, in / groups, ...).
    def to_layer(w: Any) -> Any:
        split = w.reshape(groups, inputs // groups, out, *kernel).transpose(1, 2)
        return split.reshape(groups * out, inputs // groups, *kernel).flip(spatial)

    def to_module(w: Any) -> Any:
        split = w.reshape(groups, out, inputs // groups, *kernel).transpose(1, 2)
        return split.reshape(inputs, out, *kernel).flip(spatial)

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x = arguments[0]
        strides, dilations = module.stride, module.dilation
        lengths = [(n - 1) * s + 1 for n, s in zip(x.shape[-d:], strides, strict=True)]
        # A stride of the transposed convolution puts zeros between the inputs.
        z = x.new_zeros(*x.shape[:-d], *lengths)
        z[(..., *(slice(None, None, s) for s in strides))] = x
        widths: list[int] = []
        for i in reversed(range(d)):
            reach = dilations[i] * (kernel[i] - 1)
            before = reach - module.padding[i]
            widths += [before, y.shape[i - d] + reach - before - lengths[i]]
        return _batched(fn.pad(z, widths), y, d)

    return _whole(layer, read, bias=bias, to_layer=to_layer, to_module=to_module)


def _batched(x: Any, y: Any, d: int) -> Reading:
    """Return inputs with an axis of examples, which an unbatched call lacks."""
    if x.ndim == d + 1:
        return Reading(inputs=x[None], grad_shape=(1, *y.shape))
    return Reading(inputs=x)


# Embeddings.


def _embedding(module: torch.nn.Module, owns: Owns) -> Parts | str:
    if module.sparse:
        return "its gradients are sparse; take sparse=False"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq scales its gradients; take scale_grad_by_freq=False"
    rows, features = module.weight.shape
    layer = kc.Embedding(num_embeddings=rows, features=features, weight_layout="io")

    return _whole(layer, _read_ids, bias=False)


def _read_ids(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
    return read_lookup(module.weight, arguments[0], padding=module.padding_idx)


def read_lookup(
    weight: Any, ids: Any, /, *, padding: int | None, tied: bool = False
) -> Reading:
    """Return the inputs of a lookup of rows of a weight.

    Parameters
    ----------
    weight : torch.Tensor, shape (V, d)
        The weight.
    ids : torch.Tensor of int
        Which rows.
    padding : int or None
        The row that does not count: PyTorch never moves it, whatever gradient its
        examples have.
    tied : bool
        Whether the weight makes logits too, and ids are given as one-hot vectors.

    Returns
    -------
    Reading
        The ids, or a row for each.
    """
    grad_shape: tuple[int, ...] = ()
    if tied or ids.ndim == 0:
        ids = ids.reshape(-1)
        grad_shape = len(ids), weight.shape[1]
    mask = None if padding is None else ids != padding
    if tied:
        # `one_hot` makes integers of eight bytes, twice as large as what is made of them.
        hits = ids[:, None] == torch.arange(len(weight), device=ids.device)
        ids = hits.to(weight.dtype)
    return Reading(inputs=ids, mask=mask, grad_shape=grad_shape)


def describe_tied(module: torch.nn.Module, users: Sequence[Any], /) -> Parts | None:
    """Return the parts of a module whose weight both embeds ids and makes logits.

    With the weight W of shape (V, d), an embedding multiplies one-hot vectors by W, and a
    linear layer its inputs by the transpose of W.  The gradient of W is the sum of
    ``x g^T`` over the rows of both, where the linear layer has as x what comes back to its
    logits, and as g its inputs.

    Parameters
    ----------
    module : torch.nn.Module
        One of `users`.
    users : sequence of torch.nn.Module
        All modules with this weight.

    Returns
    -------
    Parts or None
        The block of the weight, and one of the linear layer's own bias.  None where the
        modules are anything else.
    """
    if {_tied_kind(user) for user in users} != {"embedding", "dense"}:
        return None
    vocabulary, features = module.weight.shape
    layer = kc.Dense(
        in_features=vocabulary, out_features=features, bias=False, weight_layout="io"
    )
    names = {"weight": "weight"}
    parts = {"": Part(layer=layer, parameters=names, read=_read_tied, tied=True)}
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter) and bias.requires_grad:
        shift = kc.ScaleShift(scale_shape=None, shift_shape=tuple(bias.shape))
        parts["bias"] = Part(
            layer=shift, parameters={"shift": "bias"}, read=_read_shift
        )
    return Parts(of=parts)


def _tied_kind(user: Any) -> str:
    """Return the kind of a module that may share an embedding's weight."""
    parts = describe(user, owns=lambda name: name == "weight")
    part = parts.of.get("") if isinstance(parts, Parts) else None
    if part is None or part.parameters != {"weight": "weight"}:
        return ""
    layer = part.layer
    if layer.kind == "embedding" and not layer.bag:
        return "embedding"
    # Logits are what the module returns, unless it overrides `forward`.
    transposed = layer.kind == "dense" and layer.weight_layout == "oi"
    return "dense" if transposed and part.read is not None else ""


def _read_tied(
    module: torch.nn.Module, arguments: tuple[Any, ...], y: Any
) -> Reading | None:
    x = arguments[0]
    vocabulary, features = module.weight.shape
    if x.is_floating_point():
        return Reading(
            inputs=x.reshape(-1, features),
            grad_shape=(y[..., 0].numel(), vocabulary),
            transposed=True,
        )
    if type(module).forward is not nn.Embedding.forward:
        return None  # The lookup is seen in the graph.
    return read_lookup(module.weight, x, padding=module.padding_idx, tied=True)


def _read_shift(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
    # A shift does not read its inputs, and the logits may be written to.
    shape = y[..., 0].numel(), y.shape[-1]
    return Reading(inputs=y.new_zeros(()).expand(shape), grad_shape=shape)


def _embedding_bag(module: torch.nn.Module, owns: Owns) -> Parts | str:
    if module.sparse or module.scale_grad_by_freq or module.padding_idx is not None:
        return "it has sparse gradients, scale_grad_by_freq or padding_idx"
    if module.mode == "max":
        return "mode='max' is not linear in the weight"
    rows, features = module.weight.shape
    layer = kc.Embedding(
        num_embeddings=rows,
        features=features,
        weight_layout="io",
        bag=True,
        duplicates="count",
    )

    def read(module: Any, arguments: tuple[Any, ...], y: Any) -> Reading | None:
        ids, *others = arguments
        if ids.ndim != 2 or any(other is not None for other in others):
            return None
        # The factor belongs to the output gradient: ids have no scale.
        scale = 1.0 / ids.shape[1] if module.mode == "mean" else 1.0
        return Reading(inputs=ids, grad_scale=scale)

    return _whole(layer, read, bias=False)


# Normalizations and other elementwise scales.


class _Unit:
    """A module's output with unit scale and no shift, by a copy of the module.

    Where the module may add something to its scale (Gemma's ``1 + w``), the difference
    between scales of one and zero is taken.
    """

    def __init__(self, module: torch.nn.Module, weight: str, *, plain: bool) -> None:
        values = (1.0,) if plain else (1.0, 0.0)
        self.copies = [private.filled_copy(module, {weight: v}) for v in values]
        self.weight, self.buffers = weight, any(True for _ in module.buffers())

    def __call__(self, module: torch.nn.Module, x: Any) -> Any:
        outputs = []
        for copied in self.copies:
            if copied.training != module.training:
                copied.training = module.training
            # The model may have been moved, or brought into another dtype, since.
            scale, dtype = (
                getattr(copied, self.weight),
                getattr(module, self.weight).dtype,
            )
            if scale.device != x.device or scale.dtype != dtype:
                copied.to(x.device, dtype)
            if self.buffers:
                pairs = zip(copied.buffers(), module.buffers(), strict=True)
                for mine, buffer in pairs:
                    mine.copy_(buffer)
            outputs.append(copied.forward(x))
        return outputs[0] if len(outputs) == 1 else outputs[0] - outputs[1]


def _norm_of(weight: str, bias: str, *, plain: bool = False) -> Describe:
    """Norms of the last axes: every position counts as an example, in any layout."""

    def described(module: torch.nn.Module, owns: Owns) -> Parts | str:
        own_bias = owns(bias)
        shape = tuple(getattr(module, weight).shape)
        unit = _Unit(module, weight, plain=plain)
        layer = kc.ScaleShift(
            scale_shape=shape, shift_shape=shape if own_bias else None
        )

        def read(module: Any, arguments: tuple[Any, ...], y: Any) -> Reading:
            x = unit(module, arguments[0]).reshape(-1, *shape)
            return Reading(inputs=x, grad_shape=tuple(x.shape))

        return _whole(layer, read, bias=own_bias, names=(weight, bias))

    return described


def _channel_norm(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """Norms with one scale a channel, which is the axis after the examples."""
    bias = owns("bias")
    channels = len(module.weight)
    unit = _Unit(module, "weight", plain=True)
    shape = (channels, 1)
    layer = kc.ScaleShift(scale_shape=shape, shift_shape=shape if bias else None)

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x = arguments[0]
        lone = x.ndim == private.unbatched_ndim(module)
        x = unit(module, x)
        x = x.reshape(1, *x.shape) if lone else x
        # The number of positions cannot be left to PyTorch where there are no examples.
        x = x.reshape(len(x), channels, math.prod(x.shape[2:]))
        return Reading(inputs=x, grad_shape=tuple(x.shape))

    return _whole(layer, read, bias=bias)


def _prelu(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """``max(x, 0) + a min(x, 0)``: a scale on the negative part."""
    channels = len(module.weight)

    def read(module: torch.nn.Module, arguments: tuple[Any, ...], y: Any) -> Reading:
        x = arguments[0].clamp(max=0)
        x = x if x.ndim > 1 else x.reshape(1, -1)
        rest = x.shape[1:] if channels == 1 else x.shape[2:]
        x = x.reshape(len(x), channels, math.prod(rest))
        return Reading(inputs=x, grad_shape=tuple(x.shape))

    layer = kc.ScaleShift(scale_shape=(channels, 1), shift_shape=None)
    return _whole(layer, read, bias=False)


# Modules that read their weights themselves.


def _attention(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """Describe the three projections of the inputs; ``out_proj`` is a module."""
    width = module.embed_dim
    biased = owns("in_proj_bias")
    packed = module.in_proj_weight is not None
    sizes = {"q": width, "k": module.kdim, "v": module.vdim}
    parts: dict[str, Part] = {}
    for place, (name, inputs) in enumerate(sizes.items()):
        layer = kc.Dense(
            in_features=inputs, out_features=width, bias=biased, weight_layout="oi"
        )
        rows = slice(place * width, (place + 1) * width)
        weight = "in_proj_weight" if packed else f"{name}_proj_weight"
        names, taken = {"weight": weight}, {"weight": rows} if packed else {}
        if biased:
            names["bias"] = "in_proj_bias"
            taken["bias"] = rows
        parts[f"{name}_proj"] = Part(layer=layer, parameters=names, rows=taken)
    why = (
        "it is one more key or value for all examples and multiplies nothing; take "
        "add_bias_kv=False to have none"
    )
    return Parts(of=parts, reasons=dict.fromkeys(("bias_k", "bias_v"), why))


def _recurrent(module: torch.nn.Module, owns: Owns) -> Parts | str:
    """Each weight of each layer and direction, as a linear layer shared over time."""
    parts: dict[str, Part] = {}
    for name, weight in module.named_parameters(recurse=False):
        if not name.startswith("weight"):
            continue
        # Inputs and states have a bias each, though only the sum of both matters.
        biased = owns(name.replace("weight", "bias"))
        layer = kc.Dense(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            bias=biased,
            weight_layout="oi",
        )
        names = {"weight": name}
        if biased:
            names["bias"] = name.replace("weight", "bias")
        parts[name.removeprefix("weight_")] = Part(layer=layer, parameters=names)
    return Parts(of=parts, around=private.without_fused_kernels)


def _experts_of(
    *names: tuple[str, str], layout: Literal["oi", "io"] | None = None
) -> Describe:
    """Stacks of the weights of all experts, and of their biases."""

    def described(module: torch.nn.Module, owns: Owns) -> Parts | str:
        way = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if way == "batched_mm":
            return "each token has a copy of its expert; take another implementation"
        stacks = [pair for pair in names if hasattr(module, pair[0])]
        own_layout = layout
        if own_layout is None:
            # The model's width is the inputs' of the first, and the outputs' of the last.
            first, last = (getattr(module, stacks[i][0]).shape for i in (0, -1))
            own_layout = "io" if first[1] == last[2] else "oi"
        parts: dict[str, Part] = {}
        for weight, bias in stacks:
            shape = getattr(module, weight).shape
            n, m = shape[1:] if own_layout == "io" else (shape[2], shape[1])
            roles = {"weight": weight}
            if owns(bias):
                roles["bias"] = bias
            layer = kc.Dense(
                in_features=n, out_features=m, bias=owns(bias), weight_layout=own_layout
            )
            for e in range(shape[0]):
                rows = dict.fromkeys(roles, slice(e, e + 1))
                parts[f"{weight}.{e}"] = Part(layer=layer, parameters=roles, rows=rows)
        return Parts(of=parts)

    return described


# Documentation pages say what each of them covers.
_TORCH: tuple[tuple[tuple[Any, ...], Describe], ...] = (
    ((nn.Linear,), _linear_of("weight", "bias", "oi", _read_features)),
    ((nn.Bilinear,), _bilinear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_conv),
    ((nn.Embedding,), _embedding),
    ((nn.EmbeddingBag,), _embedding_bag),
    ((nn.LayerNorm, nn.RMSNorm), _norm_of("weight", "bias", plain=True)),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _channel_norm),
    ((nn.GroupNorm,), _channel_norm),
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _channel_norm),
    ((nn.PReLU,), _prelu),
    ((nn.MultiheadAttention,), _attention),
    ((nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell), _recurrent),
)

_EXPERTS = (
    ("gate_up_proj", "gate_up_proj_bias"),
    ("up_proj", "up_proj_bias"),
    ("down_proj", "down_proj_bias"),
)

_TRANSFORMERS: tuple[tuple[str, Describe], ...] = (
    (
        "transformers.pytorch_utils.Conv1D",
        _linear_of("weight", "bias", "io", _read_features),
    ),
    ("transformers.models.*Experts", _experts_of(*_EXPERTS)),
    ("transformers.models.*RMSNorm", _norm_of("weight", "bias")),
    ("transformers.models.*LayerNorm", _norm_of("weight", "bias")),
)

for _kinds, _how in _TORCH:
    for _kind in _kinds:
        # The class that defines `forward`: BatchNorm2d inherits BatchNorm1d's.
        _defining = [t for t in _kind.__mro__ if "forward" in vars(t)]
        _BY_TYPE[_defining[0] if _defining else _kind] = _how
for _name, _how in _TRANSFORMERS:
    register_layer(_name, _how)
