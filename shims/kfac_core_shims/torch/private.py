"""All that is used of PyTorch and is not public, in one place.

What a release of PyTorch may change without notice stands here, so that one file shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch._dynamo.eval_frame import remove_from_cache
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad, graph
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer, optimizer

P = ParamSpec("P")
R = TypeVar("R")


def backward_pass() -> int:
    """Return the number of the backward pass that is running; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def is_graph_kept() -> bool:
    """Whether the graph of the backward pass that is running may be gone through again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backpropagated(output: Any, edges: Sequence[Any], v: Any, /) -> Sequence[Any]:
    """Return what comes back to edges of the graph of a vector at one; None for nothing.

    As ``torch.autograd.grad``, whose checks take a third of the time of a small pass.  The
    graph stays.
    """
    run: Any = graph._engine_run_backward
    gradients: Sequence[Any] = run(
        (output,), (v,), True, False, tuple(edges), True, accumulate_grad=False
    )
    return gradients


def accumulates(parameters: Iterable[Any], /) -> bool | None:
    """Whether the backward pass that is running adds to the `.grad` of any parameters.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
        Trained parameters.

    Returns
    -------
    bool or None
        False for `torch.autograd.grad`, which returns their gradients; None where the pass
        reaches none of them, as for an attack or a saliency map.
    """
    for p in parameters:
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                return True
        except RuntimeError:
            return False  # It says so of a leaf whose gradient is returned.
    return None


def saved(node: Any, name: str, /, default: Any = None) -> Any:
    """Return what a node of the graph has saved for the backward pass.

    Parameters
    ----------
    node : torch.autograd.graph.Node
        The node.
    name : str
        Name of an argument of its operation.
    default : object
        Returned where the node has no such argument.
    """
    return getattr(node, f"_saved_{name}", default)


def numbers_of(node: Any, /) -> list[tuple[str, Any]]:
    """Return the attributes of a node that are no saved tensors, and their values."""
    names = {name for name in dir(node) if name.startswith("_saved_")}
    # Reading a tensor may compute it anew, as in a checkpoint.
    numbers = [name for name in names if f"_raw{name}" not in dir(node)]
    return [(name, getattr(node, name)) for name in sorted(numbers)]


def shapes_of(node: Any, /) -> list[tuple[int, ...]]:
    """Return the shapes of what a node's operation returned."""
    return [tuple(output.shape) for output in node._input_metadata]


def signed(node: Any, name: str, /) -> Any:
    """Return a saved axis or index, or several, which nodes show without their sign."""
    value = saved(node, name)
    if isinstance(value, tuple):
        return tuple(x - 2**64 if x >= 2**63 else x for x in value)
    return value - 2**64 if value >= 2**63 else value


def outside_compilers(hook: Callable[P, R], /) -> Callable[P, R]:
    """Let a hook run as it is written where its module is compiled.

    As ``torch.compiler.disable``, whose wrapper would cost a plain call more than most
    hooks do.
    """
    disabled: Callable[P, R] = torch.compiler.disable(hook)

    @wraps(hook)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return disabled(*arguments, **options)
        return hook(*arguments, **options)

    return called


@contextmanager
def without_autocast(device: torch.device, /) -> Iterator[Callable[[Any], Any]]:
    """Leave the caller's autocast; yield what makes a function run within it."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        yield lambda function: function
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        # A cache would hold the weights of an earlier call.
        yield torch.autocast(kind, dtype, cache_enabled=False)


def hooked(step: Callable[P, R], /) -> Callable[P, R]:
    """Call the hooks of an optimizer around its step, and PyTorch's profiler where it runs.

    PyTorch's own wrapper enters the profiler always, which takes 80 microseconds where
    the caches are full of other things.
    """
    profiled: Callable[P, R] = Optimizer.profile_hook_step(step)

    @wraps(step)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        own: Any = arguments[0]
        hooks = own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks
        hooks = hooks or optimizer._global_optimizer_pre_hooks
        hooks = hooks or optimizer._global_optimizer_post_hooks
        plain = not (hooks or torch.autograd._profiler_enabled())
        return (step if plain else profiled)(*arguments, **options)

    # Not to be wrapped again.
    called.hooked = True  # type: ignore[attr-defined]
    return called


def forget_compiled(model: torch.nn.Module, /) -> None:
    """Have ``torch.compile`` compile the modules of a model again.

    What it made of another model of the same classes, which had no hooks, would be used for
    this one too: that modules have no hooks is not among its guards.
    """
    for kind in {type(module) for module in model.modules()}:
        function = getattr(kind, "forward", None)
        # Where a graph breaks below a decorator, the inner function has code of its own.
        while isinstance(function, FunctionType):
            remove_from_cache(function)
            function = getattr(function, "__wrapped__", None)


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Have recurrent modules computed by matrix products, which the graph then shows."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def filled_copy(module: torch.nn.Module, values: Mapping[str, float], /) -> Any:
    """Return a copy of a module with the same number in each parameter; 0 by default.

    Not a deep copy, which fully_shard forbids: it divides the parameters, and puts classes
    of its own before the module's.
    """
    kinds = type(module).__mro__
    kind: Any = next(
        t for t in kinds if not t.__module__.startswith("torch.distributed.")
    )
    # Past `__init__`, whose arguments are not known here.
    copied = kind.__new__(kind)
    vars(copied).update(vars(module))
    copied._buffers = {name: deepcopy(x) for name, x in module._buffers.items()}
    # `vars().update` has shared the dictionary of the original.
    copied._parameters = {}
    for name, p in module._parameters.items():
        if p is not None:
            number = values.get(name, 0.0)
            filled = torch.full(tuple(p.shape), number, dtype=p.dtype, device=p.device)
            p = torch.nn.Parameter(filled, requires_grad=False)
        copied._parameters[name] = p
    return copied


def padding_widths(module: torch.nn.Module, /) -> Any:
    """Return the widths by which a convolution pads, as ``functional.pad`` takes them."""
    return module._reversed_padding_repeated_twice


def unbatched_ndim(module: torch.nn.Module, /) -> int | None:
    """Return the number of axes of one example that a norm takes by itself, if it does."""
    ndim = getattr(module, "_get_no_batch_dim", None)
    return None if ndim is None else int(ndim())


def unwrapped(model: torch.nn.Module, /) -> Any:
    """Return the module that ``torch.compile`` has wrapped, or the module itself."""
    return getattr(model, "_orig_mod", model)


def is_transformed(x: Any, /) -> bool:
    """Whether a tensor is one of a function that `torch.func` transforms."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def levels(x: Any, /) -> list[Any]:
    """Return a tensor below each transformation of `torch.func`, the caller's the last."""
    if not is_transformed(x):
        return [x]
    return [x, *levels(torch._C._functorch.get_unwrapped(x))]


def tangents(x: Any, /) -> list[Any]:
    """Return the forward derivatives of a tensor, and theirs, at all levels."""
    derivatives: list[Any] = []
    if not torch._C._functorch.is_batchedtensor(x):
        tangent = forward_ad.unpack_dual(x).tangent
        if tangent is not None:
            derivatives += [tangent, *tangents(tangent)]
    if is_transformed(x):
        with temporarily_pop_interpreter_stack():
            derivatives += tangents(torch._C._functorch.get_unwrapped(x))
    return derivatives


def uncompiled(module: torch.nn.Module, /) -> Callable[[], None]:
    """Let a compiled module run as it is written; return a function that undoes it."""
    original = module._compiled_call_impl
    forward = module.forward
    # `module.compile()` replaces the call, and `torch.compile(module)` the module.
    module._compiled_call_impl = None
    if unwrapped(module) is not module:
        module.forward = unwrapped(module).__call__

    def undo() -> None:
        module._compiled_call_impl = original
        if unwrapped(module) is not module:
            module.forward = forward

    return undo


def replicas_may_leave() -> bool:
    """Whether a DistributedDataParallel is being called within its ``join()``."""
    model = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return model is not None and bool(model._join_config.enable)


def overflows(scaler: Any, /) -> list[Any]:
    """Return what a gradient scaler found of each optimizer and device; > 0: infinite."""
    states = scaler._per_optimizer_states.values()
    return [x for state in states for x in state["found_inf_per_device"].values()]


def versions(tensors: Iterable[Any], /) -> list[int]:
    """Return `version` of each of some tensors."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [version(x) for x in tensors]


def version(x: Any, /) -> int:
    """Return how often autograd has seen the memory of a tensor written to."""
    try:
        number: int = x._version
    except RuntimeError:
        return 0  # A tensor of inference mode has none.
    return number


def ids_in(modules: Iterable[torch.nn.Module], /) -> list[int]:
    """Return the ids of modules, each with those of its own children and parameters."""
    return [
        id(x)
        for module in modules
        for x in (module, *module._modules.values(), *module._parameters.values())
    ]


def write_product(x: Any, factor: float, target: Any, /) -> None:
    """Write a tensor, or an array of NumPy's, times a number into a tensor.

    Of NumPy's the tensor gets no new version.
    """
    x = x if x.shape == target.shape else x.reshape(target.shape)
    if not isinstance(x, np.ndarray):
        torch.mul(x, factor, out=target)
        return
    np.multiply(x, factor, out=target.numpy())


def multiply_each(tensors: Sequence[Any], factor: Any, /) -> None:
    """Multiply tensors in place by one number, in a few kernels."""
    # On the CPU each of them would make a tensor of the number.
    if tensors and tensors[0].is_cpu and not torch.is_tensor(factor):
        factor = torch.tensor(factor, dtype=torch.float64)
    torch._foreach_mul_(tensors, factor)


def add_to_each(
    tensors: Sequence[Any], steps: Sequence[Any], /, *, alpha: float = 1.0
) -> None:
    """Add alpha times a step to each tensor in place, in a few kernels."""
    torch._foreach_add_(tensors, steps, alpha=alpha)
