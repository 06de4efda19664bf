"""Gather the full parameters of a unit."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_fsdp.access.gather import gather_whole
from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import in_model_order, param_refs
from composable_fsdp.phases import Phase
from composable_fsdp.planning.dtensors import local_of
from composable_fsdp.runtime.offload import on_device
from composable_fsdp.runtime.recover import require_between_steps
from composable_fsdp.state_dict.shown import placed
from composable_fsdp.tree.state import _FSDPState


@torch.no_grad()
def full_values(
    state: _FSDPState, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return new full tensors by slot index: of all, also where a block shows them.

    With ``first_only`` the other ranks get zeros without memory of their own, so that
    hooks of users run alike on all ranks.

    Collective: as ``gather_unit``; inside ``unshard_params`` none but of parameters
        that tensor parallelism cuts.
    """
    handle, context = state.handle, state.context
    # Other ranks show sharded parameters and cannot gather inside a block.
    summoned = None if context is None else context.summoned
    if summoned is not None and summoned.rank0_only:
        raise PhaseError(
            f"state_dict of {state.name} was called inside unshard_params("
            "rank0_only=True), where only the first rank has full parameters. Call it "
            "before or after the block, on every rank."
        )
    if handle.phase is Phase.SUMMON and handle.is_full:
        # The tensors in the modules, because the block may have replaced parameters.
        shown = {
            index: held.detach()
            for index, table, key, _ in placed(handle)
            if (held := table.get(key)) is not None
        }
        # Inside a block the modules show DTensors, whole over the data ranks alone.
        return {
            index: handle.layout.forms[index].whole(local_of(shown[index].clone()))
            for index in sorted(shown)
        }
    require_between_steps(state, "state_dict")
    values = gather_unit(handle, first_only=first_only, to_cpu=to_cpu)
    if first_only and not handle.groups.is_first:
        return {
            ref.slot.index: torch.zeros(
                (), dtype=ref.region.layout.dtype, device="cpu"
            ).expand(ref.shape)
            for ref in param_refs(handle)
        }
    return values


@torch.no_grad()
def gather_unit(
    handle: FlatParamHandle, *, first_only: bool = False, to_cpu: bool = False
) -> dict[int, Tensor]:
    """Return full parameters by slot index. Collective: as ``gather_whole``."""
    # As in plain torch, the state dict of a model on meta has keys, shapes and dtypes.
    if handle.layout.on_meta:
        return {
            ref.slot.index: torch.empty(
                ref.shape, dtype=ref.region.layout.dtype, device="meta"
            )
            for ref in param_refs(handle)
        }
    # By index: ranks of tensor parallelism may have other regions, and must send alike.
    refs = in_model_order(handle)
    # Offloaded shards are copied to the compute device, from which the backend sends.
    shards = [on_device(handle, region.shard) for region in handle.layout.regions]
    values = gather_whole(handle, shards, refs, first_only=first_only, to_cpu=to_cpu)
    return {ref.slot.index: value for ref, value in zip(refs, values, strict=False)}
