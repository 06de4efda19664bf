"""Before the first forward of a model made on meta: values are missing."""

from __future__ import annotations

from itertools import chain

import torch.distributed as dist

from composable_fsdp.errors import PlanError
from composable_fsdp.features.guard.compare import gather
from composable_fsdp.naming import listed, quoted
from composable_fsdp.runtime.meta_values import require_filled, unfilled_parameters
from composable_fsdp.tree.state import RuntimeContext, _FSDPState, root_of


def require_initialized(context: RuntimeContext) -> None:
    """Raise if a parameter or buffer has no values.

    Collective: of a model that was sharded on meta, an all-gather of objects per shard
        group.
    Raises: PlanError, on all ranks of a shard group alike.
    """
    states = root_of(context)._root_states
    by_group: dict[dist.ProcessGroup | None, list[_FSDPState]] = {}
    for state in states:
        by_group.setdefault(state.handle.groups.shard, []).append(state)
    for group, units in by_group.items():
        empty = [name for state in units for name in unfilled_parameters(state)]
        # ``same_models`` has told all ranks. Without a shard group this rank has whole
        # values, as its replicas have; in one a rank may have no rows of a parameter.
        if group is not None and any(s.initial.was_on_meta for s in units):
            empty = list(dict.fromkeys(chain(*gather(empty, [group]).values())))
        if empty:
            raise PlanError(
                f"Parameters {listed(map(quoted, empty))} were on meta and nothing has "
                "filled them since they got memory (to_empty): no checkpoint that was "
                "loaded has them, and no initialiser wrote to them. Call "
                "init_weights(module) with the module that holds them, or write to "
                "them inside of 'with unshard_params(model):', on every rank."
            )
    require_filled(states)
