"""Find optimizer parameters that the model does not use or that no unit manages.

Two mistakes silently train wrongly: an optimizer that was made before its parameters
were replaced steps on unused tensors; and parameters outside all units, for example
because ``fully_shard`` was not called on the root, are stepped with unreduced
gradients.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.replaced_params import successor
from composable_fsdp.naming import listed
from composable_fsdp.optim.step_checks import leaf_name
from composable_fsdp.tree.moments import OPTIMIZER_CHECKED
from composable_fsdp.tree.unit_settings import IGNORED


def check_unmanaged_params(optim: torch.optim.Optimizer) -> None:
    """Refuse replaced parameters; warn of gradients that no collective reduces.

    If no unit holds some of the parameters: two round trips to the
    key-value store, which wait for no other rank.
    Raises: CompositionError, on all ranks alike.
    """
    parameters = [p for group in optim.param_groups for p in group["params"]]
    _require_current(optim, parameters)
    for call in OPTIMIZER_CHECKED:
        call(parameters)
    _compare_unmanaged(optim, parameters)


def _require_current(
    optim: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Refuse parameters that were replaced in their module.

    A replaced parameter is accepted if the optimizer holds the new parameter, too.

    Raises: CompositionError, on all ranks alike, before any parameter has changed.
    """
    held = set(map(id, parameters))
    gone = []
    for parameter in parameters:
        found = successor(parameter)
        # ``found[1]`` is the parameter that is now in the place of the old parameter.
        if found is None or id(found[1]) in held or not found[1].requires_grad:
            continue
        known = find_leaf(found[1])
        assert known is not None
        gone.append(leaf_name(*known))
    if gone:
        raise CompositionError(
            f"{type(optim).__name__} holds what {listed(gone)} were "
            "before others took their places (to_empty, load_state_dict(assign=True), "
            "an assignment): it would step on parameters that the model does not use. "
            "Make the optimizer after that, or of flat_parameters(module), which go "
            "along."
        )


def _compare_unmanaged(
    optim: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Warn if the gradients of parameters outside units differ between ranks."""
    owners = [find_leaf(p) or find_flat(p) for p in parameters]
    shards = (owner[0].groups.shard for owner in owners if owner)
    group = next((shard for shard in shards if shard is not None), None)
    # Select by ``requires_grad`` and not by ``.grad``: all ranks must select the same
    # parameters, and the presence of gradients may differ between ranks.
    plain = [
        p
        for p, owner in zip(parameters, owners, strict=True)
        if owner is None and p.requires_grad and not hasattr(p, IGNORED)
    ]
    if group is None or not plain or not can_compare(group):
        return
    # Gradients that something else reduces (DDP, a hook of the user) are equal on all
    # ranks and give no warning.
    peers = Peers(group, "unheld")
    said = peers.say("step", _fingerprint(plain))
    shapes = listed(tuple(p.shape) for p in plain)
    text = (
        f"{type(optim).__name__} steps {len(plain)} parameters that no unit holds, of "
        f"shapes {shapes}; expected equal gradients on all ranks, and those of "
        "ranks {0} and {1} differ: nothing reduces them, and "
        "the ranks drift apart. Call fully_shard on the whole model after its parts, "
        "or replicate on what is left, or name them in ignored_states."
    )
    if said is None:
        _unwarned[optim] = peers, text
    else:
        ranks = dist.get_rank(), said.rank
        # This key stays in the store, once per program that trains wrongly.
        peers.say("differ", ranks)
        warnings.warn(text.format(*ranks), stacklevel=5)
    # The last rank to leave removes the keys.
    peers.leave("left", ["step"])


_unwarned: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Peers, str]] = (
    weakref.WeakKeyDictionary()
)
"""The text of ranks that came before the rank that could compare."""


def warn_of_unmanaged_params(optim: torch.optim.Optimizer) -> None:
    """Warn in the second step on the ranks that have seen no difference in the first.

    Rank 0 mostly steps first, and many users read the log of rank 0 alone. Every rank
    has begun another forward meanwhile, and so made its first step.

    Collective: none; a round trip to the key-value store.
    """
    peers, text = _unwarned.pop(optim, (None, ""))
    ranks = peers and peers.heard("differ")
    if ranks:
        warnings.warn(text.format(*ranks), stacklevel=4)


@torch.no_grad()
def _fingerprint(parameters: list[nn.Parameter]) -> str:
    """Return a short text that differs if a gradient differs."""
    digest = hashlib.sha256()
    for parameter in parameters:
        gradient = parameter.grad
        values = []
        # Skip tensor subclasses: their operations may call collectives, and their own
        # library reduces them.
        if type(gradient) is Tensor and gradient.layout is torch.strided:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float64))
            values = [wide.sum().item(), wide.norm().item()]
        digest.update(repr(values).encode())
    return digest.hexdigest()[:16]
