"""Refuse optimizers whose step on a shard differs from their step on the parameter.

An element-wise optimizer may step on any part of a parameter. An optimizer that uses
whole matrices, norms, or all parameters at once would silently compute something else.
Parameters that every rank holds whole (``NO_SHARD``, ``replicate``, ignored parameters,
a single rank) are not sharded, and any optimizer may train them.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp.comm.agreement import Peers, can_compare
from composable_fsdp.errors import CompositionError, FSDPError
from composable_fsdp.flat.flat_parameter import (
    FlatParamRecord,
    find_flat,
    flats_in,
    move_own_gradients,
)
from composable_fsdp.flat.handle import FlatParamHandle, find_leaf
from composable_fsdp.flat.param_paths import param_path, slot_path
from composable_fsdp.flat.param_ref import ParamRef, param_ref
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.names import Group

_PATIENCE = 5.0
"""Seconds to wait for ranks that do not step."""
_REASONS: Final = {
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "scales by means over rows, columns and whole parameters",
    "LBFGS": "takes inner products over all parameters together",
    "SparseAdam": "takes sparse gradients, and reduced ones are dense",
    "Lamb": "scales by norms of whole parameters",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
    "Shampoo": "preconditions whole matrices",
    "SOAP": "preconditions whole matrices",
}
"""Reasons by class name, because most of these classes are not in torch. Subclasses of
a named class are refused, too."""


def needs_whole_params(optim: object) -> str:
    """Return why ``optim`` cannot step on shards; empty if no reason is known.

    A class with ``works_on_shards = True`` is accepted.
    """
    if getattr(optim, "works_on_shards", False):
        return ""
    # Search the whole MRO, so that subclasses of a refused class are found.
    names = (kind.__name__ for kind in type(optim).__mro__)
    return next((_REASONS[name] for name in names if name in _REASONS), "")


def require_elementwise(optim: object) -> None:
    """Refuse an optimizer that needs whole parameters and holds sharded parameters.

    Raises: CompositionError, on all ranks alike.
    """
    reason = needs_whole_params(optim)
    if not reason:
        return
    groups: Iterable[dict[str, Any]] = getattr(optim, "param_groups", ())
    for parameter in (p for group in groups for p in group["params"]):
        # Refuse a flat parameter also on a single rank, because a flat parameter joins
        # several parameters in a vector.
        joined = find_flat(parameter)
        if joined is not None:
            raise CompositionError(
                f"{type(optim).__name__} {reason}, and {flat_name(*joined)} joins what "
                "this rank holds of several: its step would not be that of the whole "
                "model. Use an element-wise optimizer (SGD, Adam, AdamW, ...) for it, "
                "or give this one original parameters that are kept whole: "
                "replicate(module), strategy=ShardingStrategy.NO_SHARD, or "
                "ignored_states."
            )
        found = cut_leaf(parameter)
        if found is not None:
            raise CompositionError(
                f"{type(optim).__name__} {reason}, and of {leaf_name(*found)} each "
                "rank holds a part only: its step would not be that of the whole "
                "model. Use an element-wise optimizer (SGD, Adam, AdamW, ...) for it, "
                "or keep it whole: replicate(module), "
                "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
            )


def cut_leaf(parameter: object) -> tuple[FlatParamHandle, int] | None:
    """Return the unit of a sharded parameter and its number; None if held whole."""
    # A unit without a shard group keeps its parameters whole on every rank, unless
    # tensor parallelism cuts them.
    found = find_leaf(parameter)
    if found is None or found[0].groups.shard_ref is not None:
        return found
    return found if param_ref(*found).is_cut else None


def leaf_name(handle: FlatParamHandle, index: int) -> str:
    """Return the name of a parameter of ``handle`` for messages."""
    return quoted(param_path(handle, index))


def flat_name(handle: FlatParamHandle, flat: FlatParamRecord) -> str:
    """Return the name of a flat parameter of ``handle`` for messages."""
    slots = flat.layout.parameters
    names = (quoted(slot_path(handle, slot)) for slot in slots)
    return f"the flat parameter of {listed(names)}"


def prepare_flats(optim: torch.optim.Optimizer) -> None:
    """Move gradients of original parameters into the flat gradients.

    Runs before every step; costs a look-up per parameter.

    Raises: CompositionError, for a retired flat parameter.
    """
    flats = flats_in(optim.param_groups)
    for flat in flats:
        handle = flat()
        # A flat parameter without a region is retired: the unit was laid out anew,
        # after some of its parameters were frozen or unfrozen.
        if flat.region is None and handle is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {flat_name(handle, flat)}, of which "
                "some were frozen or unfrozen since: they have no flat gradient in "
                "common any more. Make a new optimizer of flat_parameters(module), "
                "and bring the state along by optim_state_dict(module, optimizer)."
            )
    # A user may have assigned ``.grad`` of an original since the last backward.
    move_own_gradients(flats)


def require_no_flat_originals(optim: torch.optim.Optimizer) -> None:
    """Refuse original parameters whose gradients go to a flat parameter.

    Raises: CompositionError.
    """
    for parameter in (p for group in optim.param_groups for p in group["params"]):
        found = find_leaf(parameter)
        if found is not None and param_ref(*found).region.flat is not None:
            raise CompositionError(
                f"{type(optim).__name__} holds {leaf_name(*found)}, of which "
                "flat_parameters(module) has handed out the flat parameter: that gets "
                "the gradient, and this optimizer would step on nothing, or on the "
                "same elements again. Make it of flat_parameters(module), or of "
                "module.parameters() and never call flat_parameters."
            )


def require_agreement(
    optim: torch.optim.Optimizer, refused: FSDPError | None, *, is_first: bool
) -> None:
    """Refuse state that does not fit the shards, and groups that differ by rank.

    Ranks tell each other through the key-value store, and wait for each other at most
    ``_PATIENCE`` seconds: in the first step always, else where a rank may not see by
    shapes what another one refuses.

    Raises: CompositionError, on all ranks.
    """
    own: CompositionError | None = None
    if refused is not None:
        # Of the class that the other ranks raise.
        own = CompositionError(str(refused.args[0]))
    else:
        try:
            _require_own_shapes(optim)
        except CompositionError as error:
            own = error
    told = None
    for group, handle in _groups_to_ask(optim, every=is_first).items():
        log = handle.logs.reduce
        # The peers of the order log, whose keys are the same on all ranks, whatever
        # optimizers of other models each rank has stepped. Without a log there was no
        # forward, and no gradient.
        if log is None or not log.comparison.peers:
            peers, place = Peers(group, "own state"), "own state"
        else:
            peers = log.comparison.peers[0]
            counts = _exchanges.setdefault(peers, Counter())
            counts[handle.name] += 1
            place = f"own state/{handle.name}/{counts[handle.name]}"
        if is_first and own is None:
            names, mine = _param_groups(optim, group)
            other = peers.say(f"{place}/groups", mine)
            if other is not None:
                own = _differing(optim, names, mine, other.value, other.rank)
        if own is not None:
            peers.say(f"{place}/refused", str(own.args[0]))
        refusals = peers.tally(place, [own is not None], _PATIENCE)
        if refusals is not None and is_first:
            peers.drop_later(f"{place}/groups")
        # Usually no rank refuses, and nothing is read.
        if refusals is not None and refusals[0]:
            told = peers.heard(f"{place}/refused") or told
            peers.drop_later(f"{place}/refused")
    if own is not None:
        raise own
    if told is not None:
        raise CompositionError(f"On another rank: {told}")


_exchanges: weakref.WeakKeyDictionary[Peers, Counter[str]] = weakref.WeakKeyDictionary()
"""Number of exchanges of the ranks of an order log, by the unit with the least name."""


def _param_groups(
    optim: torch.optim.Optimizer, group: dist.ProcessGroup
) -> tuple[list[str], list[Any]]:
    """Return the sorted names of ``group``, and what ranks compare, for JSON.

    That is a checksum of the names, the numbers among the options as texts, and for
    each name which text, one byte each. The order of the groups may differ.
    """
    held: dict[str, str] = {}
    for each in optim.param_groups:
        numbers = {k: v for k, v in each.items() if _is_number(v)}
        options = json.dumps(numbers, sort_keys=True)
        for parameter in each["params"]:
            leaf = find_leaf(parameter)
            if leaf is not None and leaf[0].groups.shard is group:
                held[param_path(*leaf)] = options
    names, texts = sorted(held), sorted(set(held.values()))
    place = {text: number % 256 for number, text in enumerate(texts)}
    # A few bytes for a thousand parameters: all ranks send them to one store.
    packed = zlib.compress(bytes([place[held[name]] for name in names]))
    return names, [zlib.crc32(repr(names).encode()), packed.hex(), texts]


def _is_number(value: object) -> bool:
    """Return whether an option is a number or a tuple of numbers, as betas are."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(each, (int, float)) for each in values)


def _differing(
    optim: torch.optim.Optimizer,
    names: list[str],
    mine: list[Any],
    theirs: list[Any],
    rank: int,
) -> CompositionError:
    """Return the error of ranks that step a parameter with different options."""
    what = "the same parameters"
    pair: tuple[Any, ...] = (f"{len(names)} parameters", "others")
    if mine[0] == theirs[0]:
        own, other = (
            [json.loads(texts[n]) for n in zlib.decompress(bytes.fromhex(packed))]
            for _, packed, texts in (mine, theirs)
        )
        at = next(n for n in range(len(names)) if own[n] != other[n])
        key = min(
            k for k in {**own[at], **other[at]} if own[at].get(k) != other[at].get(k)
        )
        what = f"one {key!r} for {quoted(names[at])}"
        pair = own[at].get(key), other[at].get(key)
    told = sorted(zip((dist.get_rank(), rank), pair, strict=True))
    return CompositionError(
        f"{type(optim).__name__} expects on all ranks {what}, got "
        f"{listed(f'{value} on rank {each}' for each, value in told)}. Each rank would "
        "train its rows of a parameter with settings of its own. p.shape and p.numel() "
        "of a sharded parameter are those of this rank's rows: choose groups and rates "
        "by name, by full_shape(p), or before fully_shard."
    )


def _groups_to_ask(
    optim: torch.optim.Optimizer, *, every: bool
) -> dict[dist.ProcessGroup, FlatParamHandle]:
    """Return every shard group, or those in which state may fit some ranks' shards.

    With each group comes the unit of the optimizer whose name is the least.
    """
    firsts: dict[dist.ProcessGroup, FlatParamHandle] = {}
    partly: dict[dist.ProcessGroup, set[int]] = {}
    uneven: set[dist.ProcessGroup] = set()
    for parameter in (p for group in optim.param_groups for p in group["params"]):
        found = cut_leaf(parameter)
        if found is None:
            continue
        ref = param_ref(*found)
        group = ref.handle.groups.shard
        if group is None:  # tensor parallelism alone cuts it, and all ranks hold a part
            continue
        # Ranks may order the parameters of an optimizer differently.
        first = firsts.setdefault(group, ref.handle)
        if ref.handle.full_fqn < first.full_fqn:
            firsts[group] = ref.handle
        ranks = partly.setdefault(group, set())
        holders = ref.region.layout.holders(ref.slot)
        if len(holders) > 1:
            ranks.update(holders)
        if not _is_even(ref):
            uneven.add(group)
    # Not ``if optim.state``: a rank whose elements are all frozen has no state, and
    # the other ranks would wait for that rank.
    return {
        g: firsts[g]
        for g, ranks in partly.items()
        if (every or g in uneven or len(ranks) < g.size()) and can_compare(g)
    }


def _is_even(ref: ParamRef) -> bool:
    """Return whether all ranks hold equally many elements of the parameter."""
    layout, slot = ref.region.layout, ref.slot
    last = layout.world_size - 1
    if len(layout.holders(slot)) <= last:
        return False
    # Of the holders, only the first and the last may hold less than a whole shard.
    ends = [layout.interval(slot, rank) for rank in (0, 1, last)]
    return len({stop - start for start, stop in ends}) == 1


def _require_own_shapes(optim: torch.optim.Optimizer) -> None:
    """Refuse state whose shapes do not fit this rank's shards.

    Raises: CompositionError.
    """
    for parameter, values in optim.state.items():
        if not isinstance(values, dict):
            continue
        flat = find_flat(parameter)
        if flat is not None:
            _require_flat_state(optim, parameter, values, flat_name(*flat))
            continue
        found = cut_leaf(parameter)
        if found is None:
            continue
        whole = param_ref(*found).shape
        for key, value in values.items():
            # Skip tensors of a single element, which may be counters. Shapes cannot
            # tell counters from element-wise state there.
            if (
                not isinstance(value, Tensor)
                or value.numel() == 1
                or value.shape == parameter.shape
            ):
                continue
            who = f"{type(optim).__name__}'s state {key!r} of {leaf_name(*found)}"
            # State of a plain model can be converted; the message says how.
            if tuple(value.shape) == whole:
                raise CompositionError(
                    f"{who} has the full shape {whole}; expected this rank's shard, "
                    f"{tuple(parameter.shape)}. It was made before fully_shard, or "
                    "loaded from a plain model. Bring it along: take "
                    "state = optim_state_dict(model, optim) while the model is still "
                    "plain, and after fully_shard call optim_state_dict_to_load("
                    "model, optim, state, load_directly=True); or make the optimizer "
                    "after fully_shard."
                )
            raise CompositionError(
                f"{who} has shape {tuple(value.shape)}; expected a scalar or this "
                f"rank's shard, {tuple(parameter.shape)}. State that is not "
                "element-wise is another one on each rank. Use an element-wise "
                "optimizer, or keep the parameter whole: replicate(module), "
                "strategy=ShardingStrategy.NO_SHARD, or ignored_states."
            )


def _require_flat_state(
    optim: torch.optim.Optimizer, parameter: Tensor, values: Group, name: str
) -> None:
    """Refuse state whose shape is not that of the flat parameter's shard."""
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            continue
        if value.shape != parameter.shape:
            raise CompositionError(
                f"{type(optim).__name__}'s state {key!r} of {name} has shape "
                f"{tuple(value.shape)}; expected a scalar or this rank's shard, "
                f"{tuple(parameter.shape)}. State that is not element-wise cannot be "
                "told apart by parameters. Use an element-wise optimizer."
            )
