"""DTensors of ``parallelize_module`` as parameters of units: a ``ParamForm``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.comm.groups import RankLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.flat.param_form import Forms, ParamForm
from composable_fsdp.naming import join_name, quoted
from composable_fsdp.planning.dtensors import is_dtensor, local_of
from composable_fsdp.planning.planner import Target


@dataclass(frozen=True, slots=True)
class DTensorForm(ParamForm):
    """The form of a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size
    offset: tuple[int, ...]
    """Index of this rank's first element in the global parameter."""

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.shape)

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        # Looked up each time: a form must not keep a destroyed group alive.
        return tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim))

    @property
    def cut_over(self) -> tuple[dist.ProcessGroup, ...]:
        # The ranks of a replicated dim hold equal values, which a norm counts once.
        return tuple(
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if placement.is_shard()
        )

    def full_leaf(
        self, part: Tensor, leaf: nn.Parameter, *, trainable: bool
    ) -> nn.Parameter:
        """Return a DTensor over ``part`` that shares ``__dict__`` with ``leaf``."""
        # ``nn.Parameter`` of a DTensor is the DTensor itself, with a mark.
        made = nn.Parameter(self.shown(part), requires_grad=trainable)
        # The mark of parameters of other classes; on a plain one without effect.
        vars(leaf)["_is_param"] = True
        made.__dict__ = leaf.__dict__
        return made

    def shown(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        # A node of the graph would make the full leaf no leaf.
        with torch.no_grad():
            return DTensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                # Given, because the parts of ranks may differ in size.
                shape=self.shape,
                stride=self.stride,
            )

    @torch.no_grad()
    def gradient(self, gradient: Tensor) -> Tensor:
        # All ranks of the mesh run the same graph, so all of them redistribute here, in
        # the same order.
        given: Any = gradient
        if is_dtensor(gradient) and tuple(given.placements) != self.placements:
            # Each rank of a sequence-parallel norm has the sum over its own tokens.
            given = given.redistribute(self.mesh, self.placements)
        return local_of(given)

    @torch.no_grad()
    def whole(self, local: Tensor) -> Tensor:
        shown: Any = self.shown(local)
        # Of a replicated parameter nothing is sent.
        whole: Tensor = shown.full_tensor()
        return whole

    def part(self, whole: Tensor) -> Tensor:
        for dim, (start, size) in enumerate(
            zip(self.offset, self.local_shape, strict=True)
        ):
            # A rank without rows starts behind the end.
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole


def _form_of(parameter: nn.Parameter, offset: tuple[int, ...]) -> DTensorForm:
    """Return the form of a DTensor whose rectangle begins at ``offset``."""
    # The stride of the global parameter: torch asks for both, or computes both from
    # this rank's part, which is wrong for parts of other sizes.
    given: Any = parameter
    return DTensorForm(
        given.device_mesh,
        tuple(given.placements),
        given.shape,
        given.stride(),
        local_of(parameter).shape,
        offset,
    )


def refuse_shared_ranks(
    targets: Iterable[Target], ranks: RankLayout, device: torch.device
) -> None:
    """Raise PlanError if tensor-parallel ranks are also ranks of the data."""
    for target in targets:
        for layout, parameters in zip(
            target.plan.regions, target.parameters, strict=True
        ):
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
    """Put plain parameters in the place of DTensors in the modules of a unit."""
    forms = Forms()
    made: dict[int, nn.Parameter] = {}
    regions: list[tuple[nn.Parameter, ...]] = []
    for layout, parameters in zip(target.plan.regions, target.parameters, strict=True):
        region = []
        for slot, parameter in zip(layout.parameters, parameters, strict=True):
            if slot.whole is None:
                region.append(parameter)
                continue
            # From the DTensor, which the modules will not show any more.
            forms[slot.index] = _form_of(parameter, slot.whole.offset)
            made[slot.index] = _plain_parameter(parameter)
            region.append(made[slot.index])
        regions.append(tuple(region))
    # All places of a tied parameter get the same plain parameter.
    for place, owner in zip(target.places, target.owners, strict=True):
        if place.slot_index in made:
            owner._parameters[place.name] = made[place.slot_index]
    return target._replace(parameters=tuple(regions)), forms


def _plain_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter with this rank's rectangle of a DTensor."""
    # Detached: the parameter must not lead into the graph of the DTensor.
    with torch.no_grad():
        made = nn.Parameter(
            local_of(parameter).detach(), requires_grad=parameter.requires_grad
        )
    for name, value in vars(parameter).items():
        # The mark by which torch knows a parameter of another class.
        if name != "_is_param":
            setattr(made, name, value)
    return made
