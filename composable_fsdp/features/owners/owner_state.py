"""``OwnerState``: state of any shape, which the owner of a matrix alone holds.

Shampoo keeps two matrices per matrix of m rows and n columns, and neither has the shape
of a shard. Both stay with the owner, on which ``map_on_owners`` computes, and travel
only into a checkpoint and out of it::

    step      rank 0 {0: L, R}           rank 1 {1: L, R}
    save      {0: L, R, 1: L, R} on all ranks, in host memory
    load      rank 0 {1: L, R}    rank 1 {0: L, R}    rank 2 {}    by the new owners
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from composable_fsdp.access.other_parts import refuse_forms
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.features.owners.map_on_owners import owners_of
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef, find_param
from composable_fsdp.state_dict.sent import Described, described, send


class OwnerState:
    """The state of an optimizer that calls ``map_on_owners``, by parameter.

    ``state[parameter]`` is a dict of tensors of any shape and of numbers, also in
    lists, tuples and dicts. The function of ``map_on_owners`` fills the dict on the
    owner; other ranks hold nothing. ``save`` and ``load`` take the object in ``extra``,
    for every world size and every packing::

        state = OwnerState(matrices)
        map_on_owners(matrices, gradients, partial(precondition, state))
        save(path, model, extra={"shampoo": state})

    Args:
        parameters: those of each call of ``map_on_owners``, in the same order.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._numbers = {id(p): n for n, p in enumerate(self._parameters)}
        self._values: dict[int, dict[str, Any]] = {}
        self._units: list[FlatParamHandle] = []
        self._packing: tuple[int, ...] | None = None
        self._here: list[bool] = []

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter on its owner, empty at first.

        Raises: CompositionError, for a parameter of another rank or of no rank, and
            for units whose parameters were frozen or unfrozen since.
        """
        number = self._numbers.get(id(parameter))
        if self._packing is None:
            refs = self._refs()
            self._settle(refs, self._owned(refs))
        # Parameters that were frozen move others to other ranks, which lack the state.
        elif self._packing != tuple(unit.layout.structure for unit in self._units):
            raise CompositionError(
                "OwnerState expects the units as they were; parameters were frozen or "
                "unfrozen since, and other ranks may own the matrices. Move the state "
                "on all ranks: state.load_state_dict(state.state_dict())."
            )
        if number is None or not self._here[number]:
            ref = find_param(parameter)
            name = "a parameter" if ref is None else f"parameter {ref.name!r}"
            raise CompositionError(
                f"OwnerState expects parameters that this rank owns, got {name}. Pass "
                "map_on_owners the parameters of OwnerState, all of them in the same "
                "order, and read the state inside of its function."
            )
        return self._values.setdefault(number, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all owners, equal on all ranks, in host memory.

        Returns: ``shapes``, those of the whole parameters, and ``state`` by number.
        Collective: over the shard and the replicate group of each unit an all-gather
            of objects and a broadcast per tensor.
        Raises: DesyncError, if another rank does not make this call with parameters of
            the same shapes.
        """
        refs = self._refs()
        refuse_forms((ref.handle for ref in refs if ref), "OwnerState.state_dict")
        places: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for number, each in enumerate(refs):
            if each is not None:
                places.setdefault(each.handle.groups.present, []).append(number)
        details = tuple(map(str, self._shapes(refs)))
        call = Call("OwnerState.state_dict", details=details)
        meet(dict.fromkeys(chain(*places)), call)
        # Parameters in no unit have equal state on all ranks, which needs no message.
        found = {n: v for n, v in self._values.items() if refs[n] is None}
        for groups, numbers in places.items():
            own = {str(n): self._values[n] for n in numbers if n in self._values}
            ref = refs[numbers[0]]
            assert ref is not None
            # First over the shards of this replica, then over the replicas.
            for group in groups:
                own = _from_all_ranks(own, group, ref.handle.layout.device)
            found |= {int(n): value for n, value in own.items()}
        cpu = torch.device("cpu")
        state = {n: _copied(found[n], cpu) for n in sorted(found)}
        return {"shapes": self._shapes(refs), "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Keep those values of ``state_dict()`` whose parameters this rank owns.

        Collective: none; all ranks pass the same values.
        Raises: CheckpointError, for parameters of other shapes; nothing is changed.
        """
        refs = self._refs()
        own = self._shapes(refs)
        given = [tuple(shape) for shape in saved["shapes"]]
        if given != own:
            raise CheckpointError(
                f"OwnerState expects the state of parameters of the shapes {own}, got "
                f"{given}. Make OwnerState of the same matrices in the same order."
            )
        here, found = self._owned(refs), {}
        for n, values in saved["state"].items():
            if here[n]:
                p, ref = self._parameters[n], refs[n]
                device = p.device if ref is None else ref.handle.layout.device
                found[n] = _copied(values, device)
        # All or nothing: a copy may fail for want of memory.
        self._settle(refs, here)
        self._values = found

    def _refs(self) -> list[ParamRef | None]:
        """Return the places of the parameters, which change if any is frozen."""
        return [find_param(parameter) for parameter in self._parameters]

    def _shapes(self, refs: list[ParamRef | None]) -> list[tuple[int, ...]]:
        """Return the shapes of the whole parameters."""
        return [
            tuple(p.shape) if ref is None else tuple(ref.slot.shape)
            for p, ref in zip(self._parameters, refs, strict=True)
        ]

    def _settle(self, refs: list[ParamRef | None], here: list[bool]) -> None:
        """Note which parameters this rank owns while the units are as now."""
        self._units = list(dict.fromkeys(ref.handle for ref in refs if ref is not None))
        self._packing = tuple(unit.layout.structure for unit in self._units)
        self._here = here

    def _owned(self, refs: list[ParamRef | None]) -> list[bool]:
        """Return for each parameter whether this rank owns its state."""
        known = [n for n, ref in enumerate(refs) if ref is not None]
        found = [True] * len(refs)
        owners = owners_of([ref for ref in refs if ref is not None])
        for number, place in zip(known, owners, strict=True):
            ref = refs[number]
            assert ref is not None
            groups = ref.handle.groups
            replica = 0 if groups.replicate is None else groups.replicate.rank()
            found[number] = place == (replica, groups.rank)
        return found


def _copied(values: Any, device: torch.device) -> Any:
    """Return ``values`` with copies of the tensors: a step writes into them."""
    # 0-d tensors stay on the CPU, as the step counts of torch's optimizers.
    return _pytree.tree_map_only(
        Tensor,
        lambda t: t.detach().to(device if t.dim() else "cpu", copy=True),
        values,
    )


def _from_all_ranks(
    own: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """Return the values of all ranks by name, with tensors in host memory.

    Collective: an all-gather of objects and a broadcast per tensor over ``group``.
    """
    told = collectives.all_gather_object(_pytree.tree_map(described, dict(own)), group)
    found: dict[str, Any] = {}
    # All ranks go through the descriptions, and so the broadcasts, in the same order.
    for rank, each in enumerate(told):
        # Only the sender has elements; the others make room.
        values = own if rank == group.rank() else each

        def move(value: Any, rank: int = rank) -> Any:
            if isinstance(value, Described) or (
                isinstance(value, Tensor) and value.dim() > 0
            ):
                return send(value, [group], device, rank=rank).cpu()
            return value

        for name in each:
            found.setdefault(name, _pytree.tree_map(move, values[name]))
    return {**found, **own}
