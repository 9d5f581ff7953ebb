"""Finding the weights of a model that have a block, and why the others have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

import kfac_core as kc
from kfac_core_shims.torch.computed import ComputedSite
from kfac_core_shims.torch.layers import (
    Parts,
    describe,
    describe_tied,
    described_base,
)
from kfac_core_shims.torch.sites import ModelBlocks, Site


def find_sites(model: Any, /, *, skip_layers: Sequence[str] = ()) -> ModelBlocks:
    """Return the blocks of a model.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    skip_layers : sequence of str
        Names or class names of modules to leave alone, with all that is in them.

    Returns
    -------
    ModelBlocks
        Modules that share a weight share its block where they are of one kind.

    Raises
    ------
    kfac_core.UnsupportedError
        If no layer is covered.
    kfac_core.ConventionError
        For a name in `skip_layers` without a module.
    """
    blocks = ModelBlocks()
    skipped = _skipped(model, skip_layers)
    # A weight is known by the parameter, and by its rows where it is a part of one.
    of_key: dict[Any, str] = {}
    users = _users(model)
    for prefix, module in model.named_modules():
        trained = dict(module.named_parameters(recurse=False))
        if prefix in skipped:
            _explain(blocks, prefix, trained, "it was asked for")
        elif isinstance(module, torch.jit.ScriptModule):
            why = (
                "TorchScript hides its calls; leave it in Python, or take torch.compile"
            )
            _explain(blocks, prefix, trained, why)
        elif is_parametrized(module):
            _add_computed(blocks, prefix, module)
        elif trained:
            parts = _parts(module, users)
            if isinstance(parts, str):
                _explain(blocks, prefix, trained, parts)
                continue
            names = _add_parts(blocks, of_key, prefix, module, parts)
            for n, p in trained.items():
                if not _has_block(p, blocks.sites):
                    why = _reason(module, n, covered=bool(names), users=users)
                    _explain(blocks, prefix, {n: p}, parts.reasons.get(n, why))
    for site in blocks.sites.values():
        weight, bias = (site.parameters.get(role) for role in ("weight", "bias"))
        if weight is not None and bias is not None and not site.part.rows:
            modules = users[id(weight)]
            site.some_biases = any(getattr(m, "bias", bias) is None for m in modules)
    if not blocks.sites:
        reasons = sorted(set(blocks.reasons.values()))
        raise kc.UnsupportedError(
            "No layer of the model is covered that has a trained weight. Reasons: "
            f"{'; '.join(reasons) or 'the model has no parameters'}. See `register_layer`."
        )
    return blocks


def _add_computed(blocks: ModelBlocks, prefix: str, module: torch.nn.Module) -> None:
    """Add the block of a parametrized module, or the reason why it has none."""
    site = _computed(prefix, module)
    if isinstance(site, str):
        _explain(blocks, prefix, dict(module.named_parameters()), site)
    else:
        blocks.sites[prefix] = site
        blocks.users.append((module, [prefix], None))


def _add_parts(
    blocks: ModelBlocks, of_key: dict[Any, str], prefix: str, module: Any, parts: Parts
) -> list[str]:
    """Add the blocks of a module where they are new; return the names of all of them."""
    names = []
    for suffix, part in parts.of.items():
        parameters = {r: getattr(module, n) for r, n in part.parameters.items()}
        weight = next(iter(parameters.values()))
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            continue
        # Slices have no hash before Python 3.12.
        key = id(weight), repr(next(iter(part.rows.values()), None))
        if key not in of_key:
            name = ".".join(filter(None, (prefix, suffix)))
            of_key[key] = name
            blocks.sites[name] = Site(
                name=name, part=part, parameters=parameters, module=module
            )
        first = blocks.sites[of_key[key]]
        if "bias" in parameters and "bias" not in first.parameters:
            # Among tied modules, one after the first has the bias.
            blocks.sites[of_key[key]] = replace(
                first, part=part, parameters=parameters, module=module
            )
        names.append(of_key[key])
    if names:
        blocks.users.append((module, names, parts.around))
    return names


def _parts(module: torch.nn.Module, users: Mapping[int, list[Any]]) -> Parts | str:
    """Return the parts of a module, or why it has none."""
    weight = next(module.parameters(recurse=False))
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return "its numbers are complex; write it with real ones"
    alike = users[id(weight)]
    if len({_kind(user) for user in alike}) > 1:
        tied = describe_tied(module, alike)
        if tied is not None:
            return tied
        names = sorted({type(user).__name__ for user in alike})
        return (
            f"its weight is shared by modules of different kinds ({', '.join(names)})"
        )

    def owns(name: str) -> bool:
        parameter = getattr(module, name, None)
        if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
            return False
        holders = users[id(parameter)]
        others = [user for user in alike if user not in holders]
        if name == "bias" and others:
            # Some of the tied modules have this bias, and the others none.
            return all(getattr(user, "bias", None) is None for user in others)
        return holders == alike

    parts = describe(module, owns=owns)
    if parts is None:
        return f"{_unknown(module)}; `register_layer` can make it known"
    return parts


def _unknown(module: torch.nn.Module) -> str:
    """Return what there is to say of a module that no function describes."""
    name, base = type(module).__name__, described_base(module)
    if base is not None:
        return f"{name} overrides the forward of {base.__name__}"
    if any(True for _ in module.children()):
        return f"it is a parameter of {name} itself, which is not known"
    return f"{name} is not known"


def _reason(
    module: torch.nn.Module, name: str, *, covered: bool, users: Mapping[int, list[Any]]
) -> str:
    """Return why a parameter of a known module has no block."""
    parameter = getattr(module, name)
    if not parameter.requires_grad:
        return (
            "it was frozen when KFAC was created; create KFAC again once it is trained"
        )
    if covered and len(users[id(parameter)]) == 1:
        return "its weight is shared by other modules, and it is not"
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        return (
            "the weight that it belongs to was frozen when KFAC was created; create "
            "KFAC again once that is trained"
        )
    return (
        "its module's weight is computed from other parameters; take "
        "torch.nn.utils.parametrizations"
    )


def _computed(name: str, module: torch.nn.Module) -> Any:
    """Return the block of a parametrized module, or why it has none."""
    if [*module.parametrizations] != ["weight"]:
        return "another parameter than its weight is parametrized"
    bias = getattr(module, "bias", None)

    def owns(name: str) -> bool:
        return isinstance(bias, nn.Parameter) and bias.requires_grad and name == "bias"

    training = module.parametrizations.training
    module.parametrizations.eval()  # Spectral norm's power iteration stays where it is.
    try:
        with torch.no_grad():
            parts = describe(module, owns=owns)
    finally:
        module.parametrizations.train(training)
    if not isinstance(parts, Parts):
        return parts or f"{type(module).__mro__[1].__name__} is not known"
    part = parts.of.get("")
    if part is None or part.read is None or part.layer.kind not in ("dense", "conv"):
        return "its weight is parametrized, and it is neither linear nor a convolution"
    originals = list(module.parametrizations["weight"].parameters())
    if not all(original.requires_grad for original in originals):
        return "a part of what its weight is computed from is frozen"
    return ComputedSite(
        name=name,
        part=part,
        parameters={"bias": bias} if owns("bias") else {},
        module=module,
        originals=originals,
    )


def _users(model: torch.nn.Module) -> dict[int, list[Any]]:
    """Return the modules that hold each parameter."""
    users: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    return users


def _kind(module: torch.nn.Module) -> Any:
    """Return what modules must have in common to share a block."""
    return type(module).forward, module.extra_repr().replace("bias=True", "bias=False")


def _has_block(parameter: Any, sites: Mapping[str, Site]) -> bool:
    return any(parameter is known for site in sites.values() for known in site.trained)


def _explain(
    blocks: ModelBlocks, prefix: str, parameters: Mapping[str, Any], reason: str
) -> None:
    for name in parameters:
        blocks.reasons.setdefault(".".join(filter(None, (prefix, name))), reason)


def _skipped(model: torch.nn.Module, skip_layers: Sequence[str]) -> set[str]:
    """Return the names of the modules to leave alone."""
    if isinstance(skip_layers, str):
        skip_layers = [skip_layers]
    names: set[str] = set()
    modules = dict(model.named_modules())
    for name in skip_layers:
        matching = list(_matching(name, modules))
        if not matching:
            raise kc.ConventionError(
                f"`skip_layers` has {name!r}, which is neither the name nor the class name "
                f"of a module. Modules: {', '.join([n for n in modules if n][:20])}."
            )
        names.update(matching)
    return names


def _matching(name: str, modules: Mapping[str, Any]) -> Iterator[str]:
    for path in modules:
        parents = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)]
        classes = [type(modules[p]).__name__ for p in {path, *parents} if p in modules]
        if name in (path, *parents) or name in classes:
            yield path
