"""Units over other ranks than the units around them: experts on a mesh of their own.

A rank's experts have gradients of the losses of all ranks of ``ep`` before any
reduction. So experts are divided by as many ranks as the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from math import prod

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.build import set_divisions
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.naming import join_name, listed, quoted

Units = Sequence[tuple[str, FlatParamHandle]]


def count_expert_ranks(top: FlatParamHandle, units: Units) -> None:
    """Set how many ranks' tokens the experts of each unit compute."""
    found = [
        (handle, _expert_ranks(top, name, handle))
        for name, handle in units
        if handle.layout.forms
    ]
    for handle, ranks in found:
        # A copy of a unit, and a tree that was made again, have the number already.
        if handle.rule.expert_ranks != ranks:
            handle.rule.expert_ranks = ranks
            set_divisions(handle)


def _expert_ranks(top: FlatParamHandle, name: str, handle: FlatParamHandle) -> int:
    """Return how many ranks' tokens a unit of experts computes."""
    # Sizes, which are equal on all ranks: all raise or none.
    own, everyone = handle.groups.world_size, top.groups.world_size
    if own == everyone:
        return 1
    forms = handle.layout.forms
    # All mesh dims that cut any parameter, each once.
    cuts = dict.fromkeys(chain(*(forms[index].cut_over for index in sorted(forms))))
    sizes = [group.size() for group in cuts]
    # Experts may be cut by tensor parallelism, too, whose ranks have no other data.
    products = {
        prod(chosen)
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
    }
    if all(own * count != everyone for count in products):
        raise CompositionError(
            f"Unit {quoted(name)} holds DTensors over {listed(sizes) or 1} ranks and "
            f"is sharded over {own}; the model is sharded over {everyone}. Expected "
            "that the numbers multiply to that of the model, so that all data reaches "
            "each expert. Make one mesh of all data ranks, (edp, ep): distribute the "
            "experts over mesh['ep'], and pass mesh['edp'] to their fully_shard."
        )
    for region in handle.layout.trainable:
        for slot in region.layout.parameters:
            if slot.whole is None:
                # Its gradients would be summed over a part of the data ranks only.
                raise CompositionError(
                    f"Parameter {quoted(join_name(name, slot.fqn))} is plain, in a "
                    "unit of DTensors over other ranks: its gradient would be summed "
                    f"over {own} ranks alone, and another on the others. Make it a "
                    "DTensor over the same mesh (Replicate), or move it out of the "
                    "unit."
                )
    return everyone // own
