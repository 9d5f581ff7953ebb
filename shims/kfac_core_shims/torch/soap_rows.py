"""Rows of a model's layers, recorded on the steps that renew the bases of `SOAP`."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.graph import Reached, calls_below
from kfac_core_shims.torch.hooks import Around, Inert
from kfac_core_shims.torch.layers import Part
from kfac_core_shims.torch.sites import ModelBlocks, Site


class Rows:
    """One call's rows on one side of a layer, which several layers may share.

    Parameters
    ----------
    array : torch.Tensor
        Rows along the last axis; inputs of a convolution as they are.
    layer : kfac_core.layers.Layer, optional
        Convolution whose patches are the rows.
    mask : torch.Tensor of bool, optional
        Rows that count.
    """

    def __init__(self, array: Any, /, *, layer: Any = None, mask: Any = None) -> None:
        self._array, self._layer, self._mask = array, layer, mask
        self._grams: dict[int, Any] = {}
        self._sums: list[tuple[Any, Any]] = []

    def added(self, before: Any, count: int, /, *, largest: int, dtype: Any) -> Any:
        """Return a sum of Gram matrices with that of these rows, the same for equal ones.

        Parameters
        ----------
        before : torch.Tensor, shape (c, b, b), or None
            Sum over earlier calls.
        count : int
            Number c of diagonal blocks.
        largest : int
            Rows at most; of more, every k-th counts.
        dtype : torch.dtype
            Dtype of the sum.
        """
        if count not in self._grams:
            self._grams[count] = self._gram(count, largest, dtype)
        for known, total in self._sums:
            if known is before and total.shape[0] == count:
                return total
        total = self._grams[count] if before is None else before + self._grams[count]
        self._sums.append((before, total))
        return total

    def _gram(self, count: int, largest: int, dtype: torch.dtype) -> Any:
        x, mask = self._array, self._mask
        if self._layer is None:
            x = x.reshape(-1, x.shape[-1])
            every = max(1, len(x) // largest)
            x = x[::every].to(dtype)
            if mask is not None:
                x = x * mask.reshape(-1, 1)[::every]
        else:
            every = max(1, len(x) * x.shape[2:].numel() // largest)
            x = _patches(self._layer, x[::every].to(dtype))
        return kc.roots.diagonal_blocks(x, count)


class RowRecorder:
    """Hooks on a model's layers, which are there on steps that record only.

    Parameters
    ----------
    model : torch.nn.Module
        Module that is called: also compiled, or a ``DistributedDataParallel``.
    plain : torch.nn.Module
        The same without wrappers.
    largest : int
        Most rows of one call that are kept.

    Attributes
    ----------
    sites : dict of str to Site
        Layers whose rows are recorded, by name.
    counts : dict of (str, bool) to int
        Sides whose rows are wanted: a layer and whether its inputs, with the number of
        diagonal blocks.
    grams : dict of (str, bool) to torch.Tensor
        Their Gram matrices, summed over the differentiated calls.
    """

    def __init__(self, model: torch.nn.Module, plain: Any, /, *, largest: int) -> None:
        try:
            model_blocks = find_sites(plain)
        except kc.UnsupportedError:
            model_blocks = ModelBlocks()
        self.sites = {n: s for n, s in model_blocks.sites.items() if _is_recorded(s)}
        self._users = self._users_of(model_blocks)
        self._wrappers = [m for m in (model, *model.modules()) if _is_compiled(m)]
        self._largest = largest
        self.counts: dict[tuple[str, bool], int] = {}
        self.grams: dict[tuple[str, bool], Any] = {}
        self._inputs: dict[Any, tuple[Any, int, Any]] = {}
        self._undo: list[Callable[[], Any]] = []
        self.wants_statistics = False

    def _users_of(
        self, model_blocks: ModelBlocks
    ) -> list[tuple[Any, list[Site], list[Site], Any]]:
        """Return modules, sites whose calls they are, and sites that they read themselves.

        Attention reads the weight of its output projection, a module that it never calls.
        """
        users = []
        inside: set[str] = set()
        for module, names, context in model_blocks.users:
            sites = [self.sites[n] for n in names if n in self.sites]
            read = [site for site in sites if site.part.read is None]
            if read:
                parts = [*module.modules()][1:]
                read += [s for s in self.sites.values() if s.module in parts]
                inside |= {site.name for site in read}
            called = [site for site in sites if site.name not in inside]
            if called or read:
                users.append((module, called, read, context))
        return users

    def install(self) -> None:
        """Begin to record; compiled modules run as they are written until `remove`."""
        self.remove()
        self.wants_statistics = True
        for wrapper in self._wrappers:
            self._undo.append(private.uncompiled(wrapper))
        hooks: list[Any] = []
        for module, called, read, context in self._users:
            if context is not None:
                hooks += Around(self, context).install(module)
            hook = _CallHook(self, called, read)
            hooks.append(
                module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            )
        self._undo += [hook.remove for hook in hooks]

    def remove(self) -> None:
        """Leave the model as it was without hooks, and keep what was recorded."""
        self.wants_statistics = False
        while self._undo:
            self._undo.pop()()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.grams = {}
        self._inputs = {}

    def record(self, site: Site, inputs: Rows | None, outputs: Rows) -> None:
        """Take the rows of a call when its output gradients have come."""
        # A pass that makes a graph, as for a penalty, is not the loss's own.
        if not self.wants_statistics or torch.is_grad_enabled():
            return
        weight = site.parameters["weight"]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with private.without_autocast(weight.device):
            for rows, is_input in ((inputs, True), (outputs, False)):
                key = site.name, is_input
                if rows is not None and key in self.counts:
                    self.grams[key] = rows.added(
                        self.grams.get(key),
                        self.counts[key],
                        largest=self._largest,
                        dtype=dtype,
                    )

    def input_rows(self, site: Site, x: Any, argument: Any) -> Rows | None:
        """Return the inputs of a call as rows, the same ones for calls that share them."""
        if site.kind == "embedding":
            return None
        layer = site.layer if site.kind == "conv" else None
        key = id(argument), layer
        argument_ref, version, known = self._inputs.get(key, (_nothing, 0, _nothing))
        rows: Rows | None = known()
        if (
            rows is None
            or argument_ref() is not argument
            or version != private.version(x)
        ):
            rows = Rows(x.detach(), layer=layer)
            self._inputs[key] = (
                weakref.ref(argument),
                private.version(x),
                weakref.ref(rows),
            )
        return rows


class _CallHook(Inert):
    """Records calls of a module."""

    def __init__(
        self, recorder: RowRecorder, called: list[Site], read: list[Site]
    ) -> None:
        self.recorder = weakref.ref(recorder)
        self.called, self.read = called, read

    def __call__(self, module: torch.nn.Module, a: Any, k: Any, y: Any) -> None:
        """Have the gradient of the output taken when it comes."""
        recorder = self.recorder()
        # Compiled code that somebody else calls runs on other steps too.
        if recorder is None or torch.compiler.is_compiling():
            return
        y = next((t for t in _tensors(y) if t.requires_grad), None)
        if y is None or private.is_transformed(y):
            return
        arguments = (*a, *k.values())
        for site in self.called:
            read: Any = site.part.read
            if not site.is_in(module):
                continue
            with torch.no_grad():
                reading = read(module, arguments, y)
            if reading is not None:
                rows = recorder.input_rows(site, reading.inputs, arguments[0])
                y.register_hook(partial(_came, self.recorder, site, rows, reading))
        if self.read:
            reached, _ = calls_below(
                y.grad_fn,
                token=id(recorder),
                sites={site.name: site for site in self.read},
                stop={t.grad_fn for t in _tensors(arguments)} - {None},
            )
            for r in reached:
                came = partial(
                    _came_to_product,
                    self.recorder,
                    recorder.sites[r.call.block],
                    # A hook that held the node that it is of would keep the graph.
                    dataclasses.replace(r, edge=None),
                    r.edge.output_nr,
                )
                r.edge.node.register_prehook(came)


def _came(recorder: Any, site: Site, rows: Rows | None, reading: Any, g: Any) -> None:
    if (taken := recorder()) is None:
        return
    if reading.grad_shape:
        g = g.reshape(reading.grad_shape)
    if site.kind == "conv":
        g = g.movedim(1, -1)
    mask = reading.mask if site.kind == "embedding" else None
    taken.record(site, rows, Rows(g.detach(), mask=mask))


def _came_to_product(
    recorder: Any, site: Site, reached: Reached, index: int, gradients: Any
) -> None:
    taken, g = recorder(), reached.take(gradients[index])
    if taken is None or g is None:
        return
    x: Any = reached.call.inputs
    if reached.call.turned:
        x, g = g, x
    taken.record(site, Rows(x.detach()), Rows(g.detach()))


def _is_recorded(site: Site) -> bool:
    """Whether the rows of a layer are those of the parameter's matrix as it lies there."""
    part, weight = site.part, site.parameters.get("weight")
    if weight is None or part.tied or part.to_layer is not Part.to_layer:
        return False
    if site.kind == "conv":
        return bool(site.layer.groups == 1)
    return site.kind in ("dense", "embedding")


def _patches(layer: Any, x: Any) -> Any:
    """Return the patches of a convolution, features in the order of its weight."""
    if not len(x):
        return x.new_zeros(0, x.shape[1] * math.prod(layer.kernel_size))
    shape = layer.output_size(tuple(x.shape[2:]))
    g = x.new_zeros(()).expand(len(x), layer.out_channels, *shape)
    rows = layer.rows(kc.Batch(x, g)).inputs
    # Patches have kernel positions before channels, and the weight channels first.
    channels = x.shape[1]
    split = rows.reshape(-1, rows.shape[-1] // channels, channels)
    return split.transpose(1, 2).reshape(-1, rows.shape[-1])


def _nothing() -> None:
    return None


def _is_compiled(module: torch.nn.Module) -> bool:
    return private.unwrapped(module) is not module or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


def _tensors(x: Any) -> Iterator[Any]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _tensors(y)
