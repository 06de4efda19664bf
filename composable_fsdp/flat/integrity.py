"""Finding leaves that something tore out of their shard since build.

``module.to(dtype)``, ``to_empty``, ``load_state_dict(assign=True)`` or an assignment
gives a module parameters with memory of their own; training on would read the old
values. Checked once per iteration, for a tenth of a microsecond a leaf.
"""

from __future__ import annotations

import torch
from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.parameter import full_views
from composable_fsdp.naming import join, shown


def require_leaves(handle: FlatParamHandle) -> bool:
    """Bring leaves that were torn out, but fit, back into the shard; refuse the others.

    Returns whether ``requires_grad`` of a leaf is not what its region has. The sharded
    form must be current. Everything is checked before anything is copied. Sends
    nothing.

    Raises: PlanError, naming the parameter: it is on meta, or has another dtype or
    shape, or is no parameter.
    """
    for parameters, name, leaf, full in handle.swaps:
        if (
            parameters.get(name) is not leaf
            or leaf.requires_grad is not full.requires_grad
        ):
            break
    else:
        for leaf, pointer in handle.gather_check:
            if leaf.data_ptr() != pointer:
                break
        else:
            if not any(region.shard.is_meta for region in handle.regions):
                return False
    return _repair(handle)


def _repair(handle: FlatParamHandle) -> bool:
    names = {}
    changed = False
    replaced = []
    for info, (parameters, key, leaf, full) in zip(
        handle.infos, handle.swaps, strict=True
    ):
        fqn = join(handle.full_fqn, info.fqn)
        names[id(leaf)] = fqn
        current = parameters.get(key)
        if leaf.is_meta:
            raise PlanError(
                f"Parameter {shown(fqn)} is still on the meta device at the first "
                "forward, so it has no values. Give the model real values before "
                "fully_shard (module.to_empty(device=...) and reset_parameters(), or "
                "load_state_dict with assign=True), then shard it."
            )
        if current is not leaf:
            _require_like(leaf, current, fqn)
            replaced.append((parameters, key, leaf, current))
        changed = changed or leaf.requires_grad is not full.requires_grad
    for parameters, key, leaf, current in replaced:
        assert current is not None
        with torch.no_grad():
            leaf.copy_(current)
        parameters[key] = leaf
    _reattach(handle, names)
    return changed


def _require_like(leaf: nn.Parameter, current: object, fqn: str) -> None:
    """Refuse what cannot take the leaf's place for good."""
    if not isinstance(current, nn.Parameter):
        raise PlanError(
            f"Parameter {shown(fqn)} was removed or replaced by a "
            f"{type(current).__name__} after fully_shard (torch.func.functional_call "
            "does so for a while). Change modules before fully_shard."
        )
    if current.shape != leaf.shape or current.dtype != leaf.dtype:
        raise _misfit(fqn, leaf, current)


def _reattach(handle: FlatParamHandle, names: dict[int, str]) -> None:
    """Copy leaves with memory of their own into the shard and make them views again."""
    torn: list[tuple[nn.Parameter, torch.Tensor]] = []
    for region in handle.regions:
        for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True):
            start, stop = region.layout.interval(slot, region.rank)
            at = region.layout.shard_offset(slot, region.rank)
            home = region.shard[at : at + stop - start]
            if stop > start and leaf.data_ptr() == home.data_ptr():
                continue
            if leaf.numel() != stop - start or leaf.dtype != region.shard.dtype:
                raise _misfit(names[id(leaf)], home, leaf)
            torn.append((leaf, home))
    for leaf, home in torn:
        home.copy_(leaf.detach().reshape(-1))
        leaf.data = home.view(leaf.shape)


def _misfit(fqn: str, expected: torch.Tensor, got: torch.Tensor) -> PlanError:
    return PlanError(
        f"Parameter {shown(fqn)} was changed after fully_shard: its shard on this rank "
        f"is {tuple(expected.shape)} {expected.dtype} ({expected.numel()} elements), "
        f"found {tuple(got.shape)} {got.dtype}. Cast or replace parameters before "
        "fully_shard; inside unshard_params they can be written in place."
    )


def full_homes(handle: FlatParamHandle) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each full leaf, and the view of ``full`` that its data has to be.

    ``full`` must have its memory.
    """
    return [
        pair
        for region in handle.regions
        for pair in zip(
            region.full_leaves, full_views(region.layout, region.full)[0], strict=True
        )
    ]


def is_at(leaf: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether ``leaf`` is the same view of the same memory as ``home``."""
    return (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) == (
        home.data_ptr(),
        home.dtype,
        home.shape,
        home.stride(),
    )


def reattach_full(handle: FlatParamHandle) -> None:
    """Make full leaves whose ``.data`` was replaced views of ``full`` again.

    What they held is lost, unless it was copied before. ``full`` must have its memory.
    """
    for leaf, home in full_homes(handle):
        if not is_at(leaf, home):
            leaf.data = home
