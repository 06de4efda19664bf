"""Parameters of an optimizer that are not what its user takes them for.

Two mistakes train wrongly without a word: an optimizer made before the parameters were
replaced steps on objects that nobody uses; and a part of the model that no unit holds,
because the root was forgotten, is stepped by each rank on its own gradients.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.replaced import successor
from composable_fsdp.optim.step_checks import leaf_name
from composable_fsdp.tree.late_registration import IGNORED, PENDING, warn_of_added

_SHOWN = 3


def mark_ignored(ignored: Iterable[nn.Parameter]) -> None:
    """Leave what becomes of ``ignored`` parameters to the user, who named them."""
    for parameter in ignored:
        setattr(parameter, IGNORED, True)


def check_unmanaged_params(optim: torch.optim.Optimizer) -> None:
    """Refuse parameters that others replaced, warn of gradients nobody reduces.

    Two round trips to the key-value store, if no unit holds some of them; waits for
    nobody, sends no tensor. Raises: CompositionError, on all ranks alike.
    """
    parameters = [p for group in optim.param_groups for p in group["params"]]
    _require_current(optim, parameters)
    if PENDING:
        held = set(map(id, parameters))
        warn_of_added(lambda _, added: any(id(p) in held for p in added))
    _compare_unmanaged(optim, parameters)


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


def _compare_unmanaged(
    optim: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    """Warn if parameters beside those of units have other gradients on other ranks.

    What something else reduces (DDP, a hook of the user's) is equal and stays unsaid.
    """
    owners = [find_leaf(p) or find_flat(p) for p in parameters]
    shards = (owner[0].groups.shard for owner in owners if owner)
    group = next((shard for shard in shards if shard is not None), None)
    # Whether they have gradients may differ over ranks; who takes part may not.
    plain = [
        p
        for p, owner in zip(parameters, owners, strict=True)
        if owner is None and p.requires_grad and not hasattr(p, IGNORED)
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
        stacklevel=5,
    )


@torch.no_grad()
def _fingerprint(parameters: list[nn.Parameter]) -> str:
    """A few characters that differ if a gradient does."""
    digest = hashlib.sha256()
    for parameter in parameters:
        gradient = parameter.grad
        values = []
        # A subclass may send something, and says itself who reduces it.
        if type(gradient) is Tensor and gradient.layout is torch.strided:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float64))
            values = [wide.sum().item(), wide.norm().item()]
        digest.update(repr(values).encode())
    return digest.hexdigest()[:16]
