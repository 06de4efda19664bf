"""DTensors become sharded parameters: the checks, and the exchange in the modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_form import NO_FORMS, Forms, ParamForm, form_of
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.dtensors import plain_parameter
from composable_fsdp.planning.planner import Target


def refuse_shared_ranks(targets: Iterable[Target], ranks: RankLayout) -> None:
    """Raise PlanError if tensor-parallel ranks are also ranks of the data.

    The shards of a parameter are parts of equal rectangles, so the ranks of a shard
    group and a replicate group must stand at the same place of the parameter's mesh.
    """
    for target in targets:
        for layout, parameters in zip(
            target.plan.regions, target.parameters, strict=True
        ):
            # Equal units share their layouts, so plain models pay one test per region.
            if layout.is_plain:
                continue
            for slot, parameter in zip(layout.parameters, parameters, strict=True):
                if slot.whole is None:
                    continue
                data = _ranks_in(ranks.shard) | _ranks_in(ranks.replicate)
                given: Any = parameter
                # This rank alone must be in both: the ranks of a row and a column.
                mesh = set(given.device_mesh.mesh.flatten().tolist())
                if mesh & data != {dist.get_rank()}:
                    name = join_name(target.plan.fqn, slot.fqn)
                    raise PlanError(
                        f"Parameter {quoted(name)} is a DTensor over ranks "
                        f"{sorted(mesh)}, and fully_shard got ranks {sorted(data)}; "
                        f"expected that they share only this rank, "
                        f"{dist.get_rank()}. Make one mesh, init_device_mesh(..., "
                        "mesh_dim_names=('dp', 'tp')), and pass mesh['tp'] to "
                        "parallelize_module, mesh['dp'] to fully_shard. Experts over "
                        "mesh['ep'] become a unit of their own before, over "
                        "mesh['edp']."
                    )


def _ranks_in(group: dist.ProcessGroup | None) -> set[int]:
    """Return the global ranks of a group; none for None."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def with_plain_parameters(target: Target) -> tuple[Target, Forms]:
    """Put plain parameters in the place of DTensors in the modules of a unit.

    Returns: the target with the plain parameters, and the forms of those it replaced.
    """
    # Plain models pass at once, without a copy of the target.
    if all(layout.is_plain for layout in target.plan.regions):
        return target, NO_FORMS
    forms: dict[int, ParamForm] = {}
    made: dict[int, nn.Parameter] = {}
    regions: list[tuple[nn.Parameter, ...]] = []
    for layout, parameters in zip(target.plan.regions, target.parameters, strict=True):
        region = []
        for slot, parameter in zip(layout.parameters, parameters, strict=True):
            if slot.whole is None:
                region.append(parameter)
                continue
            # From the DTensor, which the modules will not show any more.
            forms[slot.index] = form_of(parameter, slot.whole.offset)
            made[slot.index] = plain_parameter(parameter)
            region.append(made[slot.index])
        regions.append(tuple(region))
    # All places of a tied parameter get the same plain parameter.
    for place, owner in zip(target.places, target.owners, strict=True):
        if place.slot_index in made:
            owner._parameters[place.name] = made[place.slot_index]
    return target._replace(parameters=tuple(regions)), forms


def refuse_forms(handles: Iterable[FlatParamHandle], what: str) -> None:
    """Raise PlanError, naming a parameter, if a unit holds parameters with a form.

    For the functions that would take this rank's rectangle for the whole parameter.
    """
    for handle in handles:
        for region in handle.layout.regions:
            for slot in region.layout.parameters:
                # The first one is enough: all others have the same way out.
                if slot.whole is not None:
                    raise PlanError(
                        f"{what} expects parameters that are not cut by tensor "
                        f"parallelism; parameter {quoted(slot_path(handle, slot))} is "
                        f"{slot.whole}. state_dict() under FULL_STATE_DICT and "
                        "get_full_param(module, name) return whole values."
                    )
