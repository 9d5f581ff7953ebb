"""Which weights have which block, which have none, and every reason why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any
from warnings import warn

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import ModelBlocks

ASKED = "it was asked for"
"""The reason for a parameter that an option leaves alone."""

APPROXIMATIONS: dict[str, Any] = {
    "dense": kc.Kronecker(),
    "conv": kc.Kronecker(),
    "embedding": kc.Kronecker(input="diagonal"),
    "scale_shift": kc.Diagonal(),
}
"""The default approximation of each kind of layer."""

LARGEST_FACTOR = 8192
"""A dense layer's side with more features than this has a diagonal factor by default."""


_REPLACED = (
    "it was replaced after KFAC was created, as by a new module or by "
    "load_state_dict(assign=True); create KFAC and the optimizer again"
)


class Coverage:
    """Why parameters have no block, and why passes were not seen.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    sites : mapping of str to Site
        Its blocks.
    reasons : mapping of str to str
        Why parameters without a block have none, by the parameters' names.
    watches : bool
        Whether the model's parameters stay where they are, as those that are divided among
        processes do not.

    Attributes
    ----------
    skipped : dict of str to str
        Trained parameters that keep their gradients, with the reason.
    replaced : set of str
        Blocks of parameters that the model no longer has, or reads in another way.
    """

    def __init__(
        self,
        model: Any,
        sites: Mapping[str, Any],
        reasons: Mapping[str, str],
        *,
        watches: bool,
    ) -> None:
        self._model, self._sites, self._reasons = model, sites, dict(reasons)
        # A parameter that was frozen then and is trained now was not replaced.
        self._trained_at_first = {
            name for name, p in model.named_parameters() if p.requires_grad
        }
        self.skipped: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._notes: dict[str, None] = {}
        self._preconditioned = len(sites)
        self._watches = watches
        self._note_modules()

    def _note_modules(self) -> None:
        self._modules = [*self._model.modules()]
        self._ids_then = private.ids_in(self._modules)

    def note(self, why: str, /) -> None:
        """Remember why a pass was not observed, for the error of a step without any."""
        self._notes[why] = None

    def forget(self) -> None:
        """Forget the passes of a step."""
        self._notes.clear()

    def explain(self, block: str, why: str, /) -> None:
        """Say why the parameters of a block are not covered."""
        for name in self._names(self._sites[block]):
            self._reasons[name] = why

    def reason(self, block: str, /) -> str:
        """Return what was said of a block."""
        return self._reasons[self._names(self._sites[block])[0]]

    def find_replaced(self) -> None:
        """Find the blocks of parameters that the model no longer has, or not there."""
        if not self._watches:
            return
        # A walk over the whole model takes ten times as long as this comparison.
        if self._ids_then == private.ids_in(self._modules):
            return
        self._note_modules()
        now = dict(self._model.named_parameters())
        live = {id(p) for p in now.values()}
        for name, site in self._sites.items():
            in_model = all(id(p) in live for p in site.trained)
            if not (in_model and site.is_in(site.module)):
                self.replaced.add(name)
        # The parameter itself may still be there, read by another module.
        known, moved = self._ids(self._sites), self._ids(self.replaced)
        for name, p in now.items():
            if id(p) in moved:
                self._reasons[name] = (
                    "its module reads it in another way than when KFAC was created, as "
                    "after pruning or tying; create KFAC again"
                )
            elif id(p) not in known and name in self._trained_at_first:
                self._reasons.setdefault(name, _REPLACED)

    def warn_of_others(
        self, blocks: Collection[str], /, *, refreshed: bool, steps: int = 1
    ) -> None:
        """Warn once of each trained parameter that is in none of these blocks.

        Parameters
        ----------
        blocks : collection of str
            Blocks whose gradients a step has replaced.
        refreshed : bool
            Whether to look, also if these are no fewer than before.
        steps : int
            Steps taken; before the first, parameters without gradients count too.
        """
        # A layer that drops out of a step is reported between refreshes too.
        fewer, self._preconditioned = (
            len(blocks) < self._preconditioned,
            len(blocks),
        )
        if not (refreshed or fewer):
            return
        covered, with_site = self._ids(blocks), self._ids(self._sites)
        others: dict[str, str] = {}
        for name, p in self._model.named_parameters():
            trained = p.requires_grad and (p.grad is not None or steps == 0)
            if not trained or id(p) in covered or name in self.skipped:
                continue
            default = "it was added after KFAC was created; create KFAC again"
            if id(p) in with_site:
                default = (
                    "it took no part in the observed outputs, or another parameter of its "
                    "block is frozen or has no gradient"
                )
            others[name] = self._reasons.get(name, default)
        self.skipped |= others
        unasked = [name for name, why in others.items() if why != ASKED]
        if unasked:
            reasons = sorted({others[name] for name in unasked})
            warn(
                f"K-FAC leaves the gradients of {unasked} alone: {'; '.join(reasons)}.",
                # The caller of the constructor, or of `step`, which has a wrapper.
                stacklevel=5 if steps else 4,
            )

    def nothing_seen(
        self, message: str, /, *, seen: bool, came: bool, called: bool, by_hand: bool
    ) -> str:
        """Return a message of a step without rows, with the reason that holds.

        Parameters
        ----------
        message : str
            What is missing.
        seen : bool
            Whether passes were observed.
        came : bool
            Whether ``backward()`` has reached the parameters of a block.
        called : bool
            Whether the model was called itself.
        by_hand : bool
            Whether only outputs that are given to `KFAC.observe` count.
        """
        if seen or self._notes:
            return f"{message} What K-FAC saw: {'; '.join(self._notes)}."
        if self.replaced:
            return f"{message} The model was changed: its parameters were replaced."
        if not came:
            return (
                f"Call kfac.step() after loss.backward(). {message} No backward() has "
                "come to the parameters of a block; gradients of torch.autograd.grad and "
                "torch.func count where the outputs are given to observe()."
            )
        if by_hand:
            return f"{message} With output=None nothing counts but observe(outputs)."
        if not called:
            return (
                f"{message} The model was not called itself (`model(x)`) but its parts."
            )
        return (
            f"{message} No gradient came back to what the model returned, as where its "
            "outputs were modified in place, or torch.vmap called it: give it a batch."
        )

    def _names(self, site: Any) -> list[str]:
        ids = {id(p) for p in site.trained}
        return [n for n, p in self._model.named_parameters() if id(p) in ids]

    def _ids(self, blocks: Iterable[str]) -> set[int]:
        return {id(p) for name in blocks for p in self._sites[name].trained}


def approximation_of(site: Any, chosen: Mapping[Any, Any], /) -> Any:
    """Return the approximation of a block; None where it is to be left alone.

    Parameters
    ----------
    site : Site
        The block.
    chosen : mapping
        Approximations by name of the block, class of its module, or kind of layer, the
        first of these that is there.

    Returns
    -------
    Approximation or None
        That which was chosen, or the default of its kind; diagonal on sides of more than
        `LARGEST_FACTOR` features, such as the logits of a large vocabulary.

    Raises
    ------
    kfac_core.ConventionError
        For another approximation of a weight that embeds ids and makes logits too.
    """
    approximation = _chosen_or_default(site, chosen)
    if site.part.tied and approximation not in (None, APPROXIMATIONS["embedding"]):
        raise kc.ConventionError(
            f"{site.name!r} is an embedding whose weight also makes logits: expected "
            f"{APPROXIMATIONS['embedding']!r} or None in `approximations`, got "
            f"{approximation!r}."
        )
    return approximation


def _chosen_or_default(site: Any, chosen: Mapping[Any, Any]) -> Any:
    if site.name in chosen:
        return chosen[site.name]
    for kind in type(site.module).__mro__:
        if kind in chosen:
            return chosen[kind]
    if site.kind in chosen:
        return chosen[site.kind]
    if site.kind != "dense":
        return APPROXIMATIONS[site.kind]
    sides = zip(("input", "output"), site.layer.matrix_shape, strict=True)
    large = {side: "diagonal" for side, n in sides if n > LARGEST_FACTOR}
    return replace(APPROXIMATIONS["dense"], **large)


def choose(
    model: Any, model_blocks: ModelBlocks, chosen: Mapping[Any, Any], /
) -> dict[str, Any]:
    """Return the approximations of the blocks that are not left alone.

    Parameters
    ----------
    model : torch.nn.Module
        For the names of its parameters.
    model_blocks : ModelBlocks
        The blocks of a model; the reasons of those that are left alone are added.
    chosen : mapping
        See `approximation_of`.

    Returns
    -------
    dict of str to Approximation
        By name of the block.
    """
    _require_known(chosen, model_blocks.sites)
    approximations = {
        n: approximation_of(s, chosen) for n, s in model_blocks.sites.items()
    }
    covered = {n: a for n, a in approximations.items() if a is not None}
    alone = [site for name, site in model_blocks.sites.items() if name not in covered]
    left_alone = {id(p) for site in alone for p in site.trained}
    for name, p in model.named_parameters():
        if id(p) in left_alone:
            model_blocks.reasons[name] = ASKED
    model_blocks.users = [
        (module, [name for name in names if name in covered], context)
        for module, names, context in model_blocks.users
    ]
    return covered


def _require_known(chosen: Mapping[Any, Any], sites: Mapping[str, Any]) -> None:
    """Raise `ConventionError` for approximations of nothing.

    Parameters
    ----------
    chosen : mapping
        See `approximation_of`.
    sites : mapping of str to Site
        All blocks.
    """
    for key, approximation in chosen.items():
        matches = any(
            key in (site.name, site.kind) or key in type(site.module).__mro__
            for site in sites.values()
        )
        # A kind that this model has no layer of is fine: one mapping may serve several
        # models.
        if not matches and key not in APPROXIMATIONS:
            raise kc.ConventionError(
                f"`approximations` has {key!r}, which is not the name of a block "
                f"({', '.join(sites)}), the class of a covered module, or a kind of layer "
                f"({', '.join(APPROXIMATIONS)})."
            )
        if approximation is not None and not hasattr(approximation, "problem_with"):
            raise kc.ConventionError(
                f"Expected `approximations` to hold approximations such as Kronecker(), or "
                f"None to leave a layer alone; got {approximation!r} for {key!r}."
            )
