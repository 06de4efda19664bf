"""Find gradients that are NaN or inf: which parameter, on which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.access.grads import (
    Norm,
    by_route,
    parameters_given,
    units_and_others,
)
from composable_fsdp.access.other_parts import (
    Route,
    require_one_world,
)
from composable_fsdp.access.unshard_params import require_awake
from composable_fsdp.comm import collectives
from composable_fsdp.comm.meeting import Call, meet
from composable_fsdp.flat.flat_parameter import leaf_gradients
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_ref import ParamRef
from composable_fsdp.naming import listed, quoted


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

    Call after backward. A reduction spreads a NaN of any rank: to know which rank
    computed it, run the backward inside ``no_sync``, and call this function then.

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
    chosen = parameters_given(module_or_params, "find_nonfinite")
    for each in chosen.values():
        lost = each.grad_fn is not None and not each.retains_grad
        if lost or not (each.requires_grad or isinstance(each, nn.Parameter)):
            raise TypeError(
                "find_nonfinite looks at the gradients of parameters; got a tensor of "
                f"shape {tuple(each.shape)} that gets none. For a loss or an output "
                "ask torch.isfinite(tensor).all()."
            )
    handles, others = units_and_others(chosen)
    require_awake(handles, "find_nonfinite")
    require_one_world(handles, "find_nonfinite")
    routes = _routes(handles, chosen, replicas=True)
    call = Call("find_nonfinite", f"{len(chosen)} parameters")
    meet(dict.fromkeys(g for route in routes for g in route), call, always=False)
    found = _found(routes)
    # No unit knows the name of a plain parameter.
    positions = {key: f"parameter {i}" for i, key in enumerate(chosen)}
    plain = [(positions[id(p)], "", p.grad, True) for p in others if p.grad is not None]
    return tuple(sorted([*found, *_examined(plain)]))


def name_nonfinite(norm: Norm) -> str:
    """Return the gradients that make a norm NaN or inf, in words.

    Collective: an all-gather of objects over each group whose norm is not finite.
    """
    # The norm over a group is equal on the group's ranks, so they decide alike. Other
    # replicas may have a finite norm, and send nothing.
    pairs = zip(norm.routes, norm.parts, strict=True)
    bad = [route for route, part in pairs if not part.isfinite()]
    routes = _routes(norm.handles, norm.chosen, replicas=False)
    # Units without a shard group hold whole gradients, equal on all ranks.
    found = sorted(_found({r: refs for r, refs in routes.items() if not r or r in bad}))
    # Finite gradients may have a norm that is too large for the dtype of the sum.
    none = "No gradient of a unit is NaN or inf: the norm overflows, or a plain one"
    return f"{listed(found, '; ') or none}."


def _routes(
    handles: Iterable[FlatParamHandle], chosen: dict[int, Tensor], *, replicas: bool
) -> dict[Route, list[ParamRef]]:
    """Return the chosen parameters by the groups over which findings travel."""
    routes: dict[Route, list[ParamRef]] = {}
    for handle in handles:
        more = handle.groups.present if replicas else ()
        for route, ref in by_route(handle, chosen):
            route = tuple(dict.fromkeys((*more, *route)))
            routes.setdefault(route, []).append(ref)
    return routes


def _found(routes: Mapping[Route, Sequence[ParamRef]]) -> list[NonFinite]:
    """Return the gradients that are not finite on any rank of their route."""
    found: list[NonFinite] = []
    for route, refs in routes.items():
        mine = _examined([each for ref in refs for each in _held(ref)])
        # The usual answer is that all gradients are finite, and costs a single number
        # per group. Names are only sent after a finding, which all ranks know of.
        flag = torch.tensor([len(mine)], device=refs[0].handle.layout.device)
        for group in route:
            collectives.all_reduce(flag, group, maximum=True)
        if flag.item():
            is_first = refs[0].handle.groups.in_first_replica or not route
            # After the shard group a rank knows its replica's findings, and sends these
            # over the replicate group.
            told = [(is_first, each) for each in mine]
            for group in route:
                told = list(chain(*collectives.all_gather_object(told, group)))
            found += _joined(told)
    return found


def _joined(told: Iterable[tuple[bool, NonFinite]]) -> Iterable[NonFinite]:
    """Join the findings of all ranks for each parameter."""
    joined: dict[tuple[str, bool], NonFinite] = {}
    for counts, each in told:
        # By parameter and by state: a gradient that waits is another than the reduced
        # one beside.
        known = joined.get((each.parameter, each.is_reduced), each._replace(elements=0))
        # Replicas have equal reduced gradients, which count once.
        more = each.elements if counts or not each.is_reduced else 0
        kinds = {*known.kind.split(" and "), *each.kind.split(" and ")}
        joined[each.parameter, each.is_reduced] = known._replace(
            ranks=tuple(sorted({*known.ranks, *each.ranks})),
            kind=" and ".join(sorted(kinds, reverse=True)),
            elements=known.elements + more,
        )
    return joined.values()


_Held = tuple[str, str, Tensor, bool]
"""A gradient: the parameter, the unit, the values, whether they are reduced."""


def _held(ref: ParamRef) -> Iterator[_Held]:
    """Yield the gradients of a parameter on this rank, reduced and not yet reduced."""
    # A frozen parameter may have a gradient from before, which optimizers use.
    gradient = ref.leaf.grad
    if ref.region.layout.trainable:
        gradient = leaf_gradients(ref.region)[ref.index]
    if gradient is not None:
        yield ref.name, ref.handle.name, gradient, True
    # Gradients of ``no_sync`` are in the reduce buffer, or still as autograd has
    # produced them.
    reduce = getattr(ref.region, "reduce", None)
    if reduce is not None and reduce.arrived[ref.index]:
        waiting = reduce.waiting[ref.index]
        local = reduce.views[ref.index] if waiting is None else waiting
        yield ref.name, ref.handle.name, local, False


def _examined(held: Sequence[_Held]) -> list[NonFinite]:
    """Return those of the gradients on this rank that are not finite."""
    if not held:
        return []
    rank = dist.get_rank() if dist.is_initialized() else 0
    # A single read from the device, for all gradients together: on a GPU each read
    # waits for the kernels before.
    flags = torch.stack(
        [values.isfinite().all().to(held[0][2].device) for *_, values, _ in held]
    )
    found = []
    for each, is_finite in zip(held, flags.tolist(), strict=True):
        if not is_finite:
            name, unit, values, is_reduced = each
            kinds = ("nan", values.isnan()), ("inf", values.isinf())
            kind = " and ".join(kind for kind, where in kinds if where.any())
            # A complex number may be both.
            count = int((~values.isfinite()).sum())
            found.append(NonFinite(name, unit, (rank,), kind, count, is_reduced))
    return found
