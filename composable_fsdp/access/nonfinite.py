"""Find gradients that are NaN or inf: which parameter, on which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.other_parts import count_common, require_one_world, route_of
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.flat.flat_parameter import find_flat, leaf_gradients
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle
from composable_fsdp.flat.param_ref import originals_by_vars, param_refs
from composable_fsdp.naming import quoted
from composable_fsdp.planning import walk
from composable_fsdp.tree.traversal import inside_wrappers

_named_modules = nn.Module.named_modules
_named_parameters = nn.Module.named_parameters


class NonFinite(NamedTuple):
    """A gradient with elements that are NaN or inf."""

    parameter: str
    """FQN of the parameter from the root."""
    unit: str
    """FQN of the unit that holds the parameter, quoted; empty without a unit."""
    ranks: tuple[int, ...]
    """Global ranks: of a reduced gradient those that hold such elements in their
    shards, and of an unreduced gradient those that computed them."""
    kind: str
    """``"nan"``, ``"inf"`` or ``"nan and inf"``."""
    elements: int
    """Number of such elements: of the full gradient, or of all unreduced gradients."""
    is_reduced: bool
    """Whether the gradient is reduced. False: it waits for a reduction (``no_sync``).
    """

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        state = "" if self.is_reduced else ", before the reduction"
        return (
            f"{quoted(self.parameter)} is {self.kind} in {self.elements} of its "
            f"elements (rank {ranks}{state})"
        )


@torch.no_grad()
def find_nonfinite(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor,
) -> tuple[NonFinite, ...]:
    """Return the gradients that are NaN or inf, on every rank alike.

    Call after backward. A reduction spreads a NaN of any rank, so the rank that
    computed the NaN is only known before: run the backward inside ``no_sync``, and call
    this function then.

    Args:
        module_or_params: A module, or parameters, as for ``clip_grad_norm_``.

    Returns: a ``NonFinite`` per gradient, by name; empty if all are finite. A plain
        parameter is only looked at on this rank, and goes by its position.
    Collective: over each shard and replicate group of the units, and the ranks of
        tensor parallelism, an all-reduce of one number, and, only if a gradient is not
        finite, an all-gather of objects. All ranks must pass the same parameters.
    Raises: DesyncError, if another rank does not make this call; CompositionError, for
        units whose gradients are over the data of different ranks; TypeError, for an
        argument that is no parameter.

    >>> for each in find_nonfinite(model):
    ...     print(each)
    """
    parameters = parameters_given(module_or_params, "find_nonfinite")
    _require_gradients(parameters)
    chosen = dict(zip(map(id, parameters), parameters, strict=True))
    handles, others = units_and_others(chosen)
    require_one_world(handles, "find_nonfinite")
    # Units over other groups exchange separately, in the order of the units, which is
    # equal on all ranks.
    routes: dict[tuple[dist.ProcessGroup, ...], dict[FlatParamHandle, None]] = {}
    held: dict[tuple[dist.ProcessGroup, ...], dict[int, Tensor]] = {}
    for handle in handles:
        # By index: ranks of tensor parallelism may have other regions.
        for ref in sorted(param_refs(handle), key=lambda each: each.slot.index):
            if id(ref.leaf) in chosen or id(ref.region.flat) in chosen:
                # Ranks with equal values look at the same elements, and find the same.
                held_by = route_of(handle, ref.slot.index)
                route = tuple(dict.fromkeys((*handle.groups.present, *held_by)))
                routes.setdefault(route, {})[handle] = None
                held.setdefault(route, {})[id(ref.leaf)] = ref.leaf
    call = Call("find_nonfinite", f"{count_common(chosen, handles)} parameters")
    meet(dict.fromkeys(g for route in routes for g in route), call, always=False)
    found: list[NonFinite] = []
    for route, among in routes.items():
        units = list(among)
        # The usual answer is that all gradients are finite, and costs a single number
        # per group. Names are only sent after a finding, which all ranks know of.
        mine = _own(units, held[route])
        flag = torch.tensor([len(mine)], device=units[0].layout.device)
        for group in route:
            collectives.all_reduce(flag, group, maximum=True)
        if flag.item():
            found += _collected(mine, units, route)
    # No unit knows the name of a plain parameter.
    positions = {key: f"parameter {i}" for i, key in enumerate(chosen)}
    plain = [(positions[id(p)], "", p.grad, True) for p in others if p.grad is not None]
    found += [each._replace(ranks=(_own_rank(),)) for each in _examined(plain)]
    return tuple(sorted(found))


def collect_nonfinite(
    units: Sequence[FlatParamHandle],
    chosen: Mapping[int, Tensor],
    groups: Sequence[dist.ProcessGroup],
) -> list[NonFinite]:
    """Return the gradients of ``units`` that are not finite on any rank, by name.

    Collective: an all-gather of objects over each of ``groups``.
    """
    return sorted(_collected(_own(units, chosen), units, groups))


def _collected(
    mine: list[NonFinite],
    units: Sequence[FlatParamHandle],
    groups: Sequence[dist.ProcessGroup],
) -> list[NonFinite]:
    """Exchange the findings of all ranks, and join those of a parameter."""
    rank = _own_rank()
    # Without a group this rank's findings are all that is returned.
    is_first = units[0].groups.in_first_replica or not groups
    # After the shard group a rank knows its replica's findings, and sends these over
    # the replicate group.
    told = [(rank, is_first, each) for each in mine]
    for group in groups:
        told = [
            one for part in collectives.all_gather_object(told, group) for one in part
        ]
    joined: dict[tuple[str, bool], NonFinite] = {}
    for rank, counts, each in told:
        # By parameter and by state: a gradient that waits is another than the reduced
        # one beside.
        known = joined.get((each.parameter, each.is_reduced), each._replace(elements=0))
        # Replicas have equal reduced gradients, which count once.
        more = each.elements if counts or not each.is_reduced else 0
        kinds = {*known.kind.split(" and "), *each.kind.split(" and ")}
        joined[each.parameter, each.is_reduced] = known._replace(
            ranks=tuple(sorted({*known.ranks, rank})),
            kind=" and ".join(sorted(kinds, reverse=True)),
            elements=known.elements + more,
        )
    return list(joined.values())


def _own_rank() -> int:
    """Return this rank's global number; 0 without torch.distributed."""
    is_alone = not dist.is_available() or not dist.is_initialized()
    return 0 if is_alone else dist.get_rank()


def _own(
    units: Sequence[FlatParamHandle], chosen: Mapping[int, Tensor]
) -> list[NonFinite]:
    """Return the gradients on this rank that are not finite."""
    return list(_examined([each for unit in units for each in _held(unit, chosen)]))


_Held = tuple[str, str, Tensor, bool]
"""A gradient: the parameter, the unit, the values, whether they are reduced."""


def _held(handle: FlatParamHandle, chosen: Mapping[int, Tensor]) -> Iterator[_Held]:
    """Yield the gradients of a unit on this rank, reduced and not yet reduced."""
    for ref in param_refs(handle):
        flat = ref.region.flat
        if id(ref.leaf) not in chosen and (flat is None or id(flat) not in chosen):
            continue
        name = ref.name
        # A frozen parameter may have a gradient from before, which optimizers use.
        gradient = ref.leaf.grad
        if ref.region.layout.trainable:
            gradient = leaf_gradients(ref.region)[ref.index]
        if gradient is not None:
            yield name, handle.name, gradient, True
        # Gradients of ``no_sync`` are in the reduce buffer, or still as autograd has
        # produced them.
        reduce = getattr(ref.region, "reduce", None)
        if reduce is not None and reduce.arrived[ref.index]:
            waiting = reduce.waiting[ref.index]
            local = reduce.views[ref.index] if waiting is None else waiting
            yield name, handle.name, local, False


def _examined(held: Sequence[_Held]) -> Iterator[NonFinite]:
    """Yield those of the gradients that are not finite; ``ranks`` is empty."""
    if not held:
        return
    # A single read from the device, for all gradients together: on a GPU each read
    # waits for the kernels before.
    flags = torch.stack(
        [values.isfinite().all().to(held[0][2].device) for *_, values, _ in held]
    )
    for (name, unit, values, is_reduced), is_finite in zip(
        held, flags.tolist(), strict=True
    ):
        if not is_finite:
            # Only now, for the few gradients that the error will name.
            nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
            # A complex number may be both.
            count = int((~values.isfinite()).sum())
            kinds = [kind for kind, n in (("nan", nans), ("inf", infs)) if n]
            kind = " and ".join(kinds)
            yield NonFinite(name, unit, (), kind, count, is_reduced)


def _require_gradients(tensors: list[Tensor]) -> None:
    """Raise TypeError for a tensor that never gets a gradient, such as a loss."""
    for each in tensors:
        lost = each.grad_fn is not None and not each.retains_grad
        if lost or not (each.requires_grad or isinstance(each, nn.Parameter)):
            raise TypeError(
                "find_nonfinite looks at the gradients of parameters; got a tensor of "
                f"shape {tuple(each.shape)} that gets none. For a loss or an output "
                "ask torch.isfinite(tensor).all()."
            )


def parameters_given(
    module_or_params: nn.Module | Iterable[Tensor] | Tensor, what: str
) -> list[Tensor]:
    """Return the parameters that the argument of the function ``what`` names.

    Raises: TypeError, for an argument that is neither a module nor tensors.
    """
    if isinstance(module_or_params, nn.Module):
        return _parameters_in(module_or_params)
    if isinstance(module_or_params, Tensor):
        return [module_or_params]
    if not isinstance(module_or_params, Iterable):
        raise TypeError(
            f"{what} expects a module or parameters, got a "
            f"{type(module_or_params).__name__}."
        )
    parameters = list(module_or_params)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{what} expects a module or parameters, got an iterable with "
                f"a {type(parameter).__name__}. Pass the values, not (name, parameter) "
                "pairs."
            )
    return parameters


def _parameters_in(module: nn.Module) -> list[Tensor]:
    """Return ``list(module.parameters())``; usually at a fifth of the cost."""
    top = inside_wrappers(module)
    # ``nn.Module.parameters`` builds the names of all parameters, which takes about
    # half of the time of clipping. The names are not needed here.
    found: list[Tensor | None] = []
    for each in walk.modules(top):
        # A class that overrides named_modules or named_parameters may return other
        # parameters.
        if type(each).named_modules is not _named_modules:
            return list(module.parameters())
        found += each._parameters.values()
    if type(top).named_parameters is not _named_parameters:
        return list(module.parameters())
    return [parameter for parameter in found if parameter is not None]


def units_and_others(
    chosen: dict[int, Tensor],
) -> tuple[list[FlatParamHandle], list[Tensor]]:
    """Return the units that hold chosen parameters, and the other parameters.

    In ``chosen``, sharded parameters take the places of full parameters that modules
    show instead (after ``unshard``, inside ``unshard_params``), unless the latter have
    gradients (``with_grads=True``).
    """
    # Dictionary operations only, without a Python loop per parameter, if units hold all
    # parameters: plain modules are clipped in a few microseconds per parameter.
    links = dict.fromkeys(map(LEAVES.get, chosen))
    others: list[Tensor] = []
    handles = dict.fromkeys([link() for link in links if link is not None])
    if None in links:
        for key, parameter in chosen.items():
            if key not in LEAVES:
                # LEAVES has no flat parameters, which the caller may pass, too.
                found = find_flat(parameter)
                if found is None:
                    others.append(parameter)
                else:
                    handles[found[0]] = None
        if LEAVES:
            others = _without_full(others, chosen, handles)
    return [handle for handle in handles if handle is not None], others


def _without_full(
    others: list[Tensor],
    chosen: dict[int, Tensor],
    handles: dict[FlatParamHandle | None, None],
) -> list[Tensor]:
    """Replace full parameters by the sharded parameters, which have the gradients.

    Returns: ``others`` without the full parameters.
    """
    originals = originals_by_vars() if any(p.grad is None for p in others) else {}
    left = []
    for parameter in others:
        found = originals.get(id(vars(parameter)))
        if parameter.grad is not None or found is None:
            left.append(parameter)
            continue
        handle, index = found
        del chosen[id(parameter)]
        leaf = handle.leaves[index]
        chosen[id(leaf)] = leaf
        handles[handle] = None
    return left
