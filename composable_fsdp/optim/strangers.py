"""Parameters of an optimizer that are not what its user takes them for.

Two mistakes train wrongly without a word: an optimizer made before the parameters were
replaced steps on objects that nobody uses; and a part of the model that no unit holds,
because the root was forgotten, is stepped by each rank on its own gradients.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handed_out import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.replaced import successor, times_replaced
from composable_fsdp.optim.guard import cut_leaf, leaf_name

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)
"""Per optimizer: how many applications and replacements there had been."""
_LEFT_ALONE = "_composable_fsdp_left_alone"
"""Attribute of ignored parameters: a weak reference would forbid to swap them."""
_applications = 0
_SHOWN = 3


def watch_for_strangers(ignored: Iterable[nn.Parameter]) -> None:
    """Have every optimizer looked at in its next step; called when a module is cut.

    ``ignored`` parameters are left to the user, who named them.
    """
    global _applications
    if not _applications:
        register_optimizer_step_pre_hook(_before_step)
    _applications += 1
    for parameter in ignored:
        setattr(parameter, _LEFT_ALONE, True)


def _before_step(optim: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    now = _applications, times_replaced()
    if _seen.get(optim) == now or torch.compiler.is_compiling():
        return
    parameters = [p for group in optim.param_groups for p in group["params"]]
    _require_current(optim, parameters)
    _compare_unheld(optim, parameters)
    _seen[optim] = now


def _require_current(
    optim: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Refuse parameters whose places others have taken, unless those are here too.

    Raises: CompositionError, on all ranks alike; nothing was stepped.
    """
    held = set(map(id, parameters))
    gone = []
    for parameter in parameters:
        found = successor(parameter)
        if found is None or id(found[1]) in held or not found[1].requires_grad:
            continue
        known = find_leaf(found[1])
        assert known is not None
        gone.append(leaf_name(*known))
    if gone:
        more = f" and {len(gone) - _SHOWN} more" if gone[_SHOWN:] else ""
        raise CompositionError(
            f"{type(optim).__name__} holds what {', '.join(gone[:_SHOWN])}{more} were "
            "before others took their places (to_empty, load_state_dict(assign=True), "
            "an assignment): it would step on parameters that the model does not use. "
            "Make the optimizer after that, or of flat_parameters(module), which go "
            "along."
        )


def _compare_unheld(
    optim: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Warn if parameters beside those of units have other gradients on other ranks.

    Two round trips to the key-value store; waits for nobody, sends no tensor. What
    something else reduces (DDP, a hook of the user's) is equal and stays unsaid.
    """
    group = next((f[0].groups.shard for f in map(cut_leaf, parameters) if f), None)
    plain = [
        p
        for p in parameters
        if type(p.grad) is Tensor
        and p.grad.layout is torch.strided
        and find_leaf(p) is None
        and find_flat(p) is None
        and not hasattr(p, _LEFT_ALONE)
    ]
    if group is None or not plain or not can_compare(group):
        return
    peers = Peers(group, "unheld")
    said = peers.say("step", _fingerprint(plain))
    peers.leave("left", ["step"])
    if said is None:
        return
    shapes = ", ".join(str(tuple(p.shape)) for p in plain[:_SHOWN])
    more = f" and {len(plain) - _SHOWN} more" if plain[_SHOWN:] else ""
    warnings.warn(
        f"{type(optim).__name__} steps {len(plain)} parameters that no unit holds, of "
        f"shapes {shapes}{more}; expected equal gradients on all ranks, and those of "
        f"ranks {dist.get_rank()} and {said.rank} differ: nothing reduces them, and "
        "the ranks drift apart. Call fully_shard on the whole model after its parts, "
        "or replicate on what is left, or name them in ignored_states.",
        stacklevel=4,
    )


@torch.no_grad()
def _fingerprint(parameters: list[nn.Parameter]) -> str:
    """A few characters that differ if a gradient does."""
    digest = hashlib.sha256()
    for parameter in parameters:
        gradient = parameter.grad
        assert isinstance(gradient, Tensor)
        both = gradient.double().sum(), gradient.double().norm()
        digest.update(repr([value.item() for value in both]).encode())
    return digest.hexdigest()[:16]
