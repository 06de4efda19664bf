"""What is checked before a step: whole parameters, their state, and their gradients."""

from __future__ import annotations

import hashlib
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.access.unshard_params import NO_STEPS
from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError, PhaseError, warn
from composable_fsdp.flat.flat_parameter import (
    FLAT_PARAMS,
    FlatParamRecord,
    find_flat,
    flats_in,
    move_own_gradients,
)
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_ref import (
    ParamRef,
    find_param,
    originals_by_vars,
    param_ref,
    slot_path,
    successor,
    times_replaced,
)
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted
from composable_fsdp.phases import Phase
from composable_fsdp.tree.state import IGNORED

_REASONS: Final = {
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "scales by means over rows, columns and whole parameters",
    "LBFGS": "takes inner products over all parameters together",
    "SparseAdam": "takes sparse gradients, and reduced ones are dense",
}
"""Optimizers of torch, whose calls the audit passes by. Subclasses are refused, too."""


class Held(NamedTuple):
    """A parameter that an optimizer and a unit hold, original or flat."""

    handle: FlatParamHandle
    ref: ParamRef | None
    """The place of an original; None for a flat parameter."""
    flat: FlatParamRecord | None = None

    @property
    def name(self) -> str:
        """The name for messages."""
        if self.flat is not None:
            return flat_name(self.handle, self.flat)
        assert self.ref is not None
        return quoted(self.ref.name)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of an original parameter."""
        # A flat parameter also on a single rank: it joins several in a vector.
        return self.ref is not None and not self.ref.is_cut


def parameters_of(optim: Any) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    # A list: the hook after each step asks, and each ``yield`` would be a call.
    return [p for group in getattr(optim, "param_groups", ()) for p in group["params"]]


def find_held(parameter: Tensor) -> Held | None:
    """Return the parameter with its unit; None if no unit holds it."""
    if (ref := find_param(parameter)) is not None:
        return Held(ref.handle, ref)
    flat = find_flat(parameter)
    return None if flat is None else Held(flat[0], None, flat[1])


def find_unit(parameter: Tensor) -> FlatParamHandle | None:
    """Return the unit that holds a parameter, original or flat."""
    found = find_leaf(parameter) or find_flat(parameter)
    return None if found is None else found[0]


def held_by(optim: object) -> list[Held]:
    """Return what an optimizer holds of units, in order."""
    return [held for held in map(find_held, parameters_of(optim)) if held is not None]


def handles_of(optim: Optimizer) -> list[FlatParamHandle]:
    """Return the units whose parameters or flat parameters ``optim`` holds."""
    keys = [*map(id, parameters_of(optim))]
    # Without a call per parameter, since several checks of a first step ask. The
    # parameters of a unit share a weak reference, and flat ones are references.
    found = chain(map(LEAVES.get, keys), map(FLAT_PARAMS.get, keys))
    links = {id(link): link for link in found if link is not None}.values()
    return [*dict.fromkeys(unit for link in links if (unit := link()) is not None)]


def cut_leaf(parameter: object) -> ParamRef | None:
    """Return the place of a sharded parameter; None if every rank holds it whole."""
    ref = find_param(parameter)
    return ref if ref is not None and ref.is_cut else None


def flat_name(handle: FlatParamHandle, flat: FlatParamRecord) -> str:
    """Return the name of a flat parameter of ``handle`` for messages."""
    names = (quoted(slot_path(handle, slot)) for slot in flat.layout.parameters)
    return f"the flat parameter of {listed(names)}"


def needs_whole_params(optim: object) -> str:
    """Return why ``optim`` cannot step on shards; empty if no reason is known."""
    if getattr(optim, "works_on_shards", False):
        return ""
    names = (kind.__name__ for kind in type(optim).__mro__)
    return next((_REASONS[name] for name in names if name in _REASONS), "")


def require_elementwise(optim: object) -> None:
    """Refuse an optimizer that needs whole parameters and holds sharded parameters."""
    reason = needs_whole_params(optim)
    cut = (held for held in held_by(optim) if not held.is_whole) if reason else ()
    for held in cut:
        part = (
            f"of {held.name} each rank holds a part only"
            if held.flat is None
            else f"{held.name} joins what this rank holds of several"
        )
        raise CompositionError(
            f"{type(optim).__name__} {reason}, and {part}: its step would not be that "
            "of the whole model. Use an element-wise optimizer (SGD, Adam, AdamW, ...) "
            "for it, or keep it whole: replicate(module), "
            "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
        )


def require_outside_unshard_params(optim: Optimizer) -> None:
    """Refuse a step on sharded parameters that are shown full, or asleep."""
    for held in held_by(optim) if NO_STEPS else ():
        if why := NO_STEPS.get(held.handle):
            call = f"{type(optim).__name__}.step() was called"
            raise PhaseError(f"{call} {why.format(held.name)}")


def steps_on_full_params(optim: Optimizer) -> bool:
    """Return whether ``optim`` steps on full parameters that have gradients."""
    strangers = [p for p in parameters_of(optim) if find_unit(p) is None]
    # Full and sharded parameter share a ``__dict__``.
    originals = originals_by_vars() if strangers else {}
    found = [
        (p, *originals[key])
        for p in strangers
        if (key := id(getattr(p, "__dict__", None))) in originals
    ]
    if not found:
        return False
    # A block with ``with_grads=True`` gives gradients, and keeps the step at its end.
    if all(handle.phase is Phase.SUMMON for _, handle, _ in found) and any(
        p.grad is not None for p, *_ in found
    ):
        return True
    names = listed(quoted(param_ref(handle, i).name) for _, handle, i in found)
    raise CompositionError(
        f"{type(optim).__name__} holds the full parameters of {names}, which "
        "modules showed when it was given them (inside unshard_params, after unshard, "
        "or inside a forward); expected the sharded ones, which get the gradients: "
        "its steps would change nothing. Make the optimizer of module.parameters() "
        "after the block, or after reshard(module)."
    )


def prepare_flats(optim: Optimizer) -> None:
    """Move gradients of originals into the flat gradients; refuse retired ones."""
    flats = flats_in(optim.param_groups)
    for flat in flats:
        handle = flat()
        # Without a region it is retired.
        if flat.region is None and handle is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {flat_name(handle, flat)}, of which "
                "some were frozen or unfrozen since: they have no flat gradient in "
                "common any more. Make a new optimizer of flat_parameters(module), "
                "and bring the state along by optim_state_dict(module, optimizer)."
            )
    # A user may have assigned ``.grad`` of an original since the last backward.
    move_own_gradients(flats)


def require_no_flat_originals(optim: Optimizer) -> None:
    """Refuse original parameters whose gradients go to a flat parameter."""
    regions = (r for handle in handles_of(optim) for r in handle.layout.regions)
    for held in held_by(optim) if any(r.flat is not None for r in regions) else ():
        if held.ref is not None and held.ref.region.flat is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {held.name}, of which "
                "flat_parameters(module) has handed out the flat parameter: that gets "
                "the gradient, and this optimizer would step on nothing, or on the "
                "same elements again. Make it of features.flat_parameters(module), or "
                "of module.parameters() and never call flat_parameters."
            )


def require_current(optim: Optimizer) -> None:
    """Refuse parameters that were replaced in their module, unless both are held."""
    own = set(map(id, parameters_of(optim)))
    if not times_replaced():
        return
    # Each with the parameter that is in its place now.
    replaced = [found[1] for p in parameters_of(optim) if (found := successor(p))]
    new = [find_held(p) for p in replaced if id(p) not in own and p.requires_grad]
    gone = [held.name for held in new if held is not None and held.flat is None]
    if gone:
        raise CompositionError(
            f"{type(optim).__name__} holds what {listed(gone)} were "
            "before others took their places (to_empty, load_state_dict(assign=True), "
            "an assignment): it would step on parameters that the model does not use. "
            "Make the optimizer after that, or of flat_parameters(module), which go "
            "along."
        )


def require_agreement(optim: Optimizer, refused: str | None, *, is_first: bool) -> None:
    """Refuse, on all ranks and by the store, misfitting state and unequal options."""
    own = refused or _misfit(optim)
    told = None
    plain = list(filter(is_unmanaged, parameters_of(optim)))
    for group, handle in _groups_of(optim).items():
        # The number tells models apart, of whose optimizers ranks may step others in
        # between. Without an order there was no forward, and no gradient.
        order = handle.logs.reduce
        of = "" if order is None else f"/{order.number}/{handle.name}"
        peers = Peers(group, f"optimizer{of}")
        if is_first:
            # The first rank writes what it holds, and the others compare.
            ours, gradients = _options(optim, group), _fingerprint(plain)
            other = peers.say([ours, gradients])
            if other is not None:
                rank, (theirs, their_gradients) = other
                own = own or _difference(optim, ours, theirs, rank=rank)
                if gradients != their_gradients:
                    _warn_of_unreduced(optim, plain, rank)
        # Passed on, for ranks that share no group with the one that refuses.
        told = peers.share(own or told, _PATIENCE, said=is_first) or told
    if own:
        raise CompositionError(own)
    if told:
        raise CompositionError(f"On another rank: {told}")


_PATIENCE: Final = 5.0
"""Seconds that a rank waits in its step for ranks that do not step."""


def _options(optim: Optimizer, group: dist.ProcessGroup) -> list[list[Any]]:
    """Return rows of numbers among the options, and names in units of ``group``."""
    rows: dict[str, list[Any]] = {}
    for each in optim.param_groups:
        # Lists, as JSON returns them. Betas are several numbers.
        several = {k: [*v] if isinstance(v, tuple) else [v] for k, v in each.items()}
        numbers = {
            key: values
            for key, values in several.items()
            if all(isinstance(value, (int, float)) for value in values)
        }
        leaves = filter(None, map(find_leaf, each["params"]))
        own = [leaf for leaf in leaves if leaf[0].groups.shard is group]
        names = [param_ref(*leaf).name for leaf in own]
        if names:
            rows.setdefault(repr(numbers), [numbers, []])[1].extend(names)
    # By name, because the order of the groups may differ.
    named = [[numbers, sorted(names)] for numbers, names in rows.values()]
    return sorted(named, key=itemgetter(1))


def _difference(optim: Optimizer, *rows: list[list[Any]], rank: int) -> str | None:
    """Return the error for options that another rank has otherwise."""
    ours, theirs = ({name: of for of, names in r for name in names} for r in rows)
    for name in {**ours, **theirs}:
        one, two = ours.get(name, {}), theirs.get(name, {})
        if one == two:  # 1 and 1.0
            continue
        key = min(k for k in {**one, **two} if one.get(k) != two.get(k))
        pairs = sorted([(dist.get_rank(), one.get(key)), (rank, two.get(key))])
        told = (f"{listed(v) if v else None} on rank {r}" for r, v in pairs)
        return (
            f"{type(optim).__name__} expects on all ranks one {key!r} for "
            f"{quoted(name)}, got {listed(told)}. Each rank would train its rows of a "
            "parameter with settings of its own. p.shape and p.numel() of a sharded "
            "parameter are those of this rank's rows: choose groups and rates by name, "
            "by composable_fsdp.access.full_shape(p), or before fully_shard."
        )
    return None


def _groups_of(optim: Optimizer) -> dict[dist.ProcessGroup, FlatParamHandle]:
    """Return each shard group, with the unit of the optimizer of the least name."""
    firsts: dict[dist.ProcessGroup, FlatParamHandle] = {}
    # Ranks may order the parameters of an optimizer differently.
    leaves = filter(None, map(find_leaf, parameters_of(optim)))
    handles = dict.fromkeys(handle for handle, _ in leaves)
    for handle in sorted(handles, key=attrgetter("full_fqn")):
        # Not by ``optim.state``: a rank whose elements are all frozen has no state, and
        # the other ranks would wait for that rank.
        group = handle.groups.shard
        if group is not None and can_compare(group):
            firsts.setdefault(group, handle)
    return firsts


def _misfit(optim: Optimizer) -> str | None:
    """Return the error for state whose shapes do not fit this rank's shards."""
    for parameter, values in optim.state.items():
        held = find_held(parameter)
        if held is None or held.is_whole or not isinstance(values, dict):
            continue
        for key, value in values.items():
            # Shapes cannot tell counters of a single element from other state.
            if (
                isinstance(value, Tensor)
                and value.numel() != 1
                and value.shape != parameter.shape
            ):
                who = f"{type(optim).__name__}'s state {key!r} of {held.name}"
                whole = None if held.ref is None else held.ref.shape
                return misfit_text(who, tuple(value.shape), parameter, whole)
    return None


def misfit_text(
    who: str, shape: Any, parameter: Tensor, whole: tuple[int, ...] | None
) -> str:
    """Return the error for state of a shape that is not the sharded parameter's."""
    way_out = (
        "It was made before fully_shard, or loaded from a plain model. Bring it along: "
        "take state = optim_state_dict(model, optim) while the model is still plain, "
        "and after fully_shard call optim_state_dict_to_load(model, optim, state, "
        "load_directly=True); or make the optimizer after fully_shard."
        if shape == whole
        else "State that is not element-wise is another one on each rank. Use an "
        "element-wise optimizer, or keep the parameter whole: replicate(module), "
        "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
    )
    return (
        f"{who} has {'the full ' if shape == whole else ''}shape {shape}; expected a "
        f"scalar or this rank's shard, {tuple(parameter.shape)}. {way_out}"
    )


def _warn_of_unreduced(optim: Optimizer, plain: list[nn.Parameter], rank: int) -> None:
    """Warn of gradients, of parameters outside units, that differ between ranks."""
    warn(
        f"{type(optim).__name__} steps {len(plain)} parameters that no unit holds, of "
        f"shapes {listed(tuple(p.shape) for p in plain)}; expected equal gradients on "
        f"all ranks, and those of ranks {dist.get_rank()} and {rank} differ: nothing "
        "reduces them, and the ranks drift apart. Call fully_shard on the whole model "
        "after its parts, replicate what is left, or name them in ignored_states.",
    )


def is_unmanaged(parameter: nn.Parameter) -> bool:
    """Return whether no unit holds the trainable parameter, and no option names it."""
    if find_unit(parameter) is not None:
        return False
    # By ``requires_grad`` and not by ``.grad``, which may differ between ranks.
    return parameter.requires_grad and not hasattr(parameter, IGNORED)


@torch.no_grad()
def _fingerprint(parameters: list[nn.Parameter]) -> str:
    """Return a short text that differs if a gradient differs."""
    # Without tensor subclasses: their operations may call collectives, and their own
    # library reduces them.
    told = [
        hash_values([g.resolve_conj().resolve_neg()]).tolist()
        if type(g := p.grad) is Tensor and g.layout is torch.strided
        else None
        for p in parameters
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
