"""Forward hooks that leave what layers were called with in the graph of their outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge

from kfac_core_shims.torch.graph import RecordedCall
from kfac_core_shims.torch.private import forget_compiled, outside_compilers
from kfac_core_shims.torch.sites import ModelBlocks, Site


class Inert:
    """A hook whose copies and pickles do nothing."""

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *arguments: Any) -> None:
        """Do nothing, as a hook of a copied module."""


class _CallHook(Inert):
    """Records calls of a module."""

    def __init__(self, kfac: Any, sites: list[Site]) -> None:
        self.kfac, self.sites = ref(kfac), sites

    @outside_compilers
    def __call__(self, module: torch.nn.Module, a: Any, k: Any, y: Any) -> None:
        """Record a call, in the graph node of its output."""
        kfac = self.kfac()
        if kfac is None or not isinstance(y, torch.Tensor):
            return
        if not (y.requires_grad and kfac.wants_statistics):
            return
        # A tied weight may have been replaced in this module only.
        for site in self.sites:
            if not site.is_in(module):
                continue
            values = (*a, *(k.values() if len(k) < 2 else _in_order(module, k)))
            arguments = tuple(x.detach() if _is_tensor(x) else x for x in values)
            examples = None
            if kfac.share is not None:
                examples = len(arguments[0])
                arguments = kfac.share(arguments[0]), *arguments[1:]
            read: Any = site.part.read
            with torch.no_grad():
                reading = read(module, arguments, y)
            if reading is None:
                continue
            call = RecordedCall(
                site.name,
                reading.inputs,
                mask=reading.mask,
                grad_shape=reading.grad_shape,
                grad_scale=reading.grad_scale,
                transposed=reading.transposed,
                examples=examples,
                bias=not site.some_biases or module.bias is not None,
            )
            node = y.grad_fn or get_gradient_edge(y).node
            # The graph holds the call, so that it goes when the graph goes.
            node.metadata.setdefault(id(kfac), []).append((y.output_nr, call))


class _WeightHook(Inert):
    """Takes the gradients of a weight that a parametrization computes."""

    def __init__(self, kfac: Any, site: Any) -> None:
        self.kfac, self.site = ref(kfac), site

    @outside_compilers
    def __call__(self, module: torch.nn.Module, arguments: Any, weight: Any) -> None:
        """Take the gradient of a weight when it comes, and mark the node that made it."""
        self.site.take(module, arguments, weight)
        kfac = self.kfac()
        if kfac is not None and weight.grad_fn is not None:
            edge = get_gradient_edge(weight)
            marks = edge.node.metadata.setdefault(id(kfac), [])
            if (edge.output_nr, self.site.name) not in marks:
                marks.append((edge.output_nr, self.site.name))


class Around(Inert):
    """Calls a module in a context that leaves its matrix products in the graph."""

    def __init__(self, kfac: Any, context: Any) -> None:
        self.kfac, self.context = ref(kfac), context
        self.entered: list[Any] = []

    def install(self, module: torch.nn.Module) -> list[Any]:
        """Set the hooks of a module, and return their handles."""
        return [
            module.register_forward_pre_hook(self),
            module.register_forward_hook(self, always_call=True),
        ]

    @outside_compilers
    def __call__(self, module: torch.nn.Module, arguments: Any, *outputs: Any) -> None:
        """Enter the context before a call, where statistics are due, or leave it."""
        kfac = self.kfac()
        if outputs:  # None where the call raised.
            if self.entered:
                self.entered.pop().__exit__(None, None, None)
        elif kfac is not None and torch.is_grad_enabled() and kfac.wants_statistics:
            entered = self.context()
            entered.__enter__()
            self.entered.append(entered)


def install(kfac: Any, blocks: ModelBlocks, /) -> list[Any]:
    """Set the forward hooks of a model's modules; they hold `kfac` weakly.

    Parameters
    ----------
    kfac : KFAC
        Whose ``wants_statistics`` says whether calls are recorded.
    blocks : ModelBlocks
        Modules and blocks.

    Returns
    -------
    list of torch.utils.hooks.RemovableHandle
        Handles of the hooks.
    """
    handles: list[Any] = []
    forget_compiled(kfac.model)
    for site in blocks.sites.values():
        computes = getattr(site, "computes", None)
        if computes is not None:
            handles.append(computes.register_forward_hook(_WeightHook(kfac, site)))
    for module, names, context in blocks.users:
        read = [blocks.sites[name] for name in names]
        read = [site for site in read if site.part.read is not None]
        if read:
            hook = _CallHook(kfac, read)
            # Before hooks that change what the module returned, and those that make whole
            # parameters, or whole outputs, parts again.
            handles.append(
                module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            )
        if context is not None:
            handles += Around(kfac, context).install(module)
    return handles


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _in_order(module: torch.nn.Module, named: Mapping[str, Any]) -> list[Any]:
    """Return keyword arguments in the order of ``forward``'s parameters."""
    order = [*inspect.signature(module.forward).parameters]
    known = [name for name in order if name in named]
    return [named[n] for n in (*known, *(n for n in named if n not in known))]
