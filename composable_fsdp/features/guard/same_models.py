"""Before the first gather of a tree, all ranks compare the models that they sharded.

All ranks see digests of all models, and decide alike. Ranks that hold other parts of
the same parameters, or other experts, compare what they have in common.
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from composable_fsdp.comm import collectives
from composable_fsdp.comm.agreement import can_compare
from composable_fsdp.comm.device import outside_transforms
from composable_fsdp.comm.groups import Groups, RankLayout
from composable_fsdp.comm.meeting import Call
from composable_fsdp.errors import DesyncError, warn
from composable_fsdp.features.guard.compare import (
    first_difference,
    gather,
    tag_of,
)
from composable_fsdp.features.guard.meetings import announce
from composable_fsdp.features.guard.same_weights import (
    Units,
    require_same_weights,
    starts,
    weights_tag,
)
from composable_fsdp.features.guard.watch import leave_others, watch
from composable_fsdp.flat.handle import FlatParamHandle
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_ref import ParamRef, slot_paths
from composable_fsdp.flat.value_hash import WAY_OUT
from composable_fsdp.naming import by_value, join_name, listed, quoted, ranks_text
from composable_fsdp.planning.options import PER_MODULE
from composable_fsdp.tree.changed_settings import option_text, setting_values
from composable_fsdp.tree.root import outermost, set_param_paths
from composable_fsdp.tree.state import (
    ALL_RANKS,
    SHARD_RANKS,
    _FSDPState,
    _RootFSDPState,
)
from composable_fsdp.tree.traversal import walk_states

_WAY_OUT = (
    "Build the same model on every rank, and call fully_shard (or replicate) in the "
    "same order with the same arguments. No parameter has been sent yet."
)

_FIRST_GATHER = (
    "Ranks compare a model before its parameters are gathered for the first time, also "
    "a copy of a model: run forward, state_dict, save, ... of the model on every rank, "
    "outside of any 'if rank == 0'."
)

LOGGER = logging.getLogger("composable_fsdp")


class Scope(NamedTuple):
    """Units that the same ranks hold."""

    route: tuple[dist.ProcessGroup, ...]  # reach all these ranks, in turn
    units: list[tuple[str, _FSDPState]]
    parts: dist.ProcessGroup | None = None  # whose ranks hold other parts of the units


def compare_models(state: _FSDPState, *, replicas: bool, written: bool = False) -> None:
    """Do as ``tree.root.compare_models``; warn of weights, if the options say so.

    Collective: an all-gather of 64 bytes over each scope; of objects, if they differ.
    Raises: DesyncError with the first difference, on all ranks alike.
    """
    top = outermost(state)
    if top.initial.compared >= (ALL_RANKS if replicas else SHARD_RANKS):
        return
    units = _units(top)
    # Without replicas all ranks call anyway.
    replicas = replicas or all(u.handle.groups.replicate is None for _, u in units)
    scopes = _scopes(units, replicas=replicas)
    if replicas:
        scopes += _scopes_of_parts(units)
    # Watched, so that a difference reaches ranks that wait.
    routes = [group for each in scopes for group in each.route]
    watch(routes, agree=True)
    meet_if_used(routes, Call("first_gather", top.title, way_out=_FIRST_GATHER))
    _used.update(routes)
    for groups in {state.handle.groups for _, state in units}:
        _used.update(groups.sending)
    due = _compare_scopes(top, units, scopes)
    if written and due:
        return
    # Set before a warning, which the user may have turned into an error.
    top.initial.compared = ALL_RANKS if replicas else SHARD_RANKS
    for text in due:
        warn(text)


def _compare_scopes(
    top: _FSDPState, units: Units, scopes: Sequence[Scope]
) -> list[str]:
    """Compare the units of each scope; return the texts of warnings that are due."""
    due = []
    for scope in scopes:
        parts = scope.parts is not None
        facts = _facts_of(scope.units, parts=parts)
        try:
            due.append(_compare(top, scope, facts))
        except DesyncError as error:
            # Ranks outside of this scope found no difference, and wait for this rank in
            # the next scope or in the first forward.
            leave_others(scope.route[0], scope.route, str(error.args[0]))
            raise
    return list(filter(None, due))


def _units(top: _FSDPState) -> Units:
    """Return the units of the tree of ``top``, outermost first."""
    # Lazy initialization has walked over the modules already.
    if isinstance(top, _RootFSDPState):
        return [(each.fqn, each) for each in top._root_states]
    found = {
        id(each): (name, each)
        for module in top.modules
        for name, _, each in walk_states(module)
    }
    set_param_paths(top.module, [each for _, each in found.values()])
    return list(found.values())


def _scopes(units: Units, *, replicas: bool) -> list[Scope]:
    """Return the units by the ranks that hold them, most ranks first."""
    routes: dict[Groups, tuple[dist.ProcessGroup, ...]] = {}
    found: dict[tuple[str, ...], Scope] = {}
    for name, state in units:
        groups = state.handle.groups
        if groups not in routes:
            routes[groups] = _route(groups, replicas=replicas)
        if route := routes[groups]:
            key = tuple([group.group_name for group in route])
            found.setdefault(key, Scope(route, [])).units.append((name, state))
    # The largest first, because ranks with different trees most likely agree in the
    # default group.
    return sorted(found.values(), key=lambda s: -s.units[0][1].handle.groups.world_size)


def _route(groups: Groups, *, replicas: bool) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a message reaches all ranks of ``groups``."""
    if not groups.has_peers:
        return ()
    if not replicas:
        return () if groups.shard is None else (groups.shard,)
    everyone = dist.group.WORLD
    # The default group does not depend on the strategy: a rank with FULL_SHARD and a
    # rank with HYBRID_SHARD meet there. In a second thread, the first may be sending
    # over it.
    is_first = threading.current_thread() is threading.main_thread()
    if everyone is not None and is_first and groups.world_size == everyone.size():
        return (everyone,)
    return groups.present


def _scopes_of_parts(units: Units) -> list[Scope]:
    """Return the units by the groups whose ranks hold other parts of them."""
    found: dict[dist.ProcessGroup, None] = {}
    for _, state in units:
        found |= dict.fromkeys(groups_of(state.handle.layout.forms))
    scopes = []
    for group in found:
        ranks = set(dist.get_process_group_ranks(group))
        there = [pair for pair in units if not ranks <= pair[1].handle.groups.ranks]
        if there and can_compare(group):
            scopes.append(Scope((group,), there, group))
    return scopes


def meet_if_used(groups: Iterable[dist.ProcessGroup], call: Call) -> None:
    """Wait in the store for all ranks, over groups that an earlier tree has used."""
    # A rank alone may use a new tree, as a copy for averages, while the others are in a
    # step of an older tree: what the new tree sends would pair with an all-gather of
    # another size, which aborts the process. Before the first tree is used, no rank has
    # a tree to be in.
    for group in dict.fromkeys(groups):
        if group in _used and can_compare(group):
            # No ``meet``: these calls come once and are no part of the order of calls.
            announce(group, call)


_used: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups over which a tree was compared, and those of its units."""

_SYNC_EVERYWHERE = (
    "The values of the first rank are broadcast: shard the model on every rank, "
    "outside of any 'if rank == 0'."
)


def meet_to_sync(
    api: str, module: nn.Module, ranks: RankLayout, forms: dict[str, str]
) -> None:
    """Before a broadcast wait for ranks that train another model; compare ``forms``.

    Collective: an all-gather of objects over each group, and another if forms differ.
    """
    details = ("sync_module_states=True",)
    call = Call(api, type(module).__name__, details, _SYNC_EVERYWHERE)
    groups = [g for g in (ranks.shard, ranks.replicate) if g and g.size() > 1]
    meet_if_used(groups, call)
    if len(set(gather(tag_of(forms), groups).values())) > 1:
        named = {name: (quoted(name), form) for name, form in forms.items()}
        if difference := first_difference(gather(named, groups)):
            raise DesyncError(
                f"sync_module_states=True: {difference}. Make the model with equal "
                "names, shapes and dtypes on every rank; values may differ."
            )


class _Said(NamedTuple):
    """What a rank sends in the first exchange: integers, which every backend sends."""

    rank: int
    facts: int
    weights: int
    written: int  # whether replicated parameters were written to since ``fully_shard``
    shared: int  # the tag of the ranks of the shard groups
    sharing: int  # number of ranks that are in all shard groups of this rank, or 0
    on_meta: int  # whether shards were on meta then
    start: int  # that of the first shard that was written to since; 0 for none


# The first forward may run inside a transform, where hashes would have no memory.
@outside_transforms
def _compare(top: _FSDPState, scope: Scope, facts: Sequence[UnitFacts]) -> str | None:
    """Compare the units of ``scope``; return the text of a warning that is due."""
    states = [state for _, state in scope.units]
    # Shard groups of other parts are other groups.
    shared = [] if scope.parts else _shard_groups(states)
    # One start is enough: each rank's first draw under a seed has the same numbers.
    start, of = next(starts(top, states), (0, None))
    sent: Sequence[int] = (
        dist.get_rank(),
        _fingerprint(facts),
        *weights_tag(scope.units, scope.parts),
        tag_of(shared),
        len(set.intersection(*map(set, shared))) if shared else 0,
        any(state.handle.writes.at_build == -1 for state in states),
        start,
    )
    for group in scope.route:
        sent = collectives.all_gather_numbers(
            "all_gather_digests", sent, group, "comparison of the models"
        )
    told = [_Said(*sent[i : i + 8]) for i in range(0, len(sent), 8)]
    for _, state in scope.units:
        state.initial.was_on_meta |= any(each.on_meta for each in told)
    if len({each.facts for each in told}) > 1:
        raise DesyncError(_difference(told, facts, scope.route))
    _require_same_groups(told, shared, scope.route)
    if of is not None:
        _log_equal_start(told, start, of)
    if len({each.weights for each in told}) == 1 and not any(e.written for e in told):
        return None
    return require_same_weights(scope.units, scope.route, scope.parts)


def _shard_groups(states: Iterable[_FSDPState]) -> list[tuple[int, ...]]:
    """Return the ranks of each shard group, in the order of the units."""
    shards = dict.fromkeys(state.handle.groups.shard for state in states)
    return [tuple(dist.get_process_group_ranks(shard)) for shard in shards if shard]


def _log_equal_start(told: Sequence[_Said], start: int, of: ParamRef) -> None:
    """Log that an earlier rank of the shard group has an equal start."""
    group = of.handle.groups.shard
    peers = () if group is None else dist.get_process_group_ranks(group)
    equal = [e.rank for e in told if e.start == start and e.rank in peers]
    # Not an error: values of a checkpoint may repeat.
    if min(equal) < dist.get_rank():
        LOGGER.warning(
            "Shards were written to, and %s begins on this rank as a parameter does on "
            "rank %s. If they were initialised: %s",
            quoted(of.name),
            min(equal),
            WAY_OUT,
        )


def _difference(
    told: Sequence[_Said],
    facts: Sequence[UnitFacts],
    route: tuple[dist.ProcessGroup, ...],
) -> str:
    """Return the first difference between the models in words, equal on all ranks.

    Collective: an all-gather of objects over the groups of ``route``.
    """
    # One rank per model sends, compressed: a gather gives every rank room for the
    # longest message of each rank.
    first = {each.facts: each.rank for each in sorted(told, reverse=True)}
    speaks = dist.get_rank() in first.values()
    sent = zlib.compress(pickle.dumps(tuple(facts))) if speaks else b""
    received = gather(sent, route)
    models = {
        tag: _told(pickle.loads(zlib.decompress(received[rank])))
        for tag, rank in first.items()
    }
    known = {each.rank: models[each.facts] for each in told}
    return (
        "Ranks have sharded different models. They differ first in "
        f"{first_difference(known)}. {_WAY_OUT}"
    )


def _require_same_groups(
    said: Sequence[_Said],
    shared: Sequence[tuple[int, ...]],
    route: tuple[dist.ProcessGroup, ...],
) -> None:
    """Raise DesyncError, on all ranks alike, if ranks name other shard groups."""
    # Ranks with the same shard groups are those that share all of them. A rank whose
    # peers name other groups finds too few. Counted once: to count for each rank takes
    # the square of the number of ranks.
    alike = Counter(each.shared for each in said)
    if all(alike[each.shared] >= each.sharing for each in said):
        return
    told = gather(shared, route)
    words = {rank: listed(map(ranks_text, told[rank])) for rank in told}
    raise DesyncError(
        f"Ranks disagree on who shares parameters, sharded over {by_value(words)}. "
        "Pass the same process_group or device_mesh on all ranks. No parameter has "
        "been sent yet."
    )


# ---- facts in which all ranks must agree: texts, in the order of comparison ----

_NAMES, _SHAPE, _DTYPE, _FLAG, _OPTION, _PLACE = range(6)
_WORDS = {
    _SHAPE: "the shape",
    _DTYPE: "the dtype",
    _FLAG: "requires_grad",
    _PLACE: "the flat buffer",
}


class UnitFacts(NamedTuple):
    """The facts of a unit."""

    name: str
    parameters: tuple[tuple[int, int, tuple[str, ...], str], ...]
    """Kind, number in the unit, the names that the fact is about, and its value."""
    options: tuple[tuple[str, str], ...]
    above: str


def _facts_of(units: Units, *, parts: bool) -> tuple[UnitFacts, ...]:
    """Return the facts of ``units``; with ``parts`` those equal over other parts."""
    names = {id(state): name for name, state in units}
    # Most units are alike: their plans share the objects with these identities.
    parameters: dict[int, Any] = {}
    options: dict[tuple[object, ...], Any] = {}
    found = []
    for name, state in units:
        handle, several = state.handle, len(state.modules) > 1
        # Units of several modules may share a plan; their paths differ. Nor do parts of
        # parameters, whose forms belong to the unit.
        key = id(handle if several or parts else handle.layout.plan.regions)
        if key not in parameters:
            told_of = _parameter_facts(handle, several, parts)
            # Parts of other sizes may lie in another order in the flat buffer.
            parameters[key] = tuple(sorted(told_of) if parts else told_of)
        settings = {
            # Numbers of ranks and not the ranks, which differ between replicas.
            "ranks per shard group": handle.groups.shard_world_size,
            "number of replicas": handle.groups.replicas,
            "device type": handle.layout.device.type,
            # A backward compares this one by itself: ``no_sync`` changes often.
            "reduction of gradients in backward": state.settings.sync_gradients,
            **setting_values(state, names),
        }
        setting = id(state.options), *settings.values()
        if setting not in options:
            # ``forward_prefetch`` is told in detail elsewhere.
            per_module = [each for each in PER_MODULE if each != "forward_prefetch"]
            told = {k: option_text(getattr(state.options, k)) for k in per_module}
            told |= {key: str(value) for key, value in settings.items()}
            options[setting] = tuple(told.items())
        above = "" if several else name
        found.append(UnitFacts(name, parameters[key], options[setting], above))
    return tuple(found)


def _parameter_facts(
    handle: FlatParamHandle, several: bool, parts: bool
) -> Iterator[tuple[int, int, tuple[str, ...], str]]:
    """Yield the facts of a unit's parameters; with ``parts`` of all parts of them."""
    forms = handle.layout.forms
    for number, region in enumerate(handle.layout.plan.regions):
        for slot in region.parameters:
            names = tuple(slot_paths(handle, slot) if several else slot.fqns)
            i, one = slot.index, names[:1]
            shape = forms[i].whole_shape(slot.shape) if parts else slot.shape
            yield _NAMES, i, names, ""
            yield _SHAPE, i, one, str(tuple(shape))
            yield _DTYPE, i, one, option_text(region.dtype)
            yield _FLAG, i, one, str(region.trainable)
            # Regions hold what a rank has, and parts differ in size.
            if not parts:
                place = f"number {number + 1} from element {slot.offset}"
                yield _PLACE, i, one, place


def _fingerprint(facts: Sequence[UnitFacts]) -> int:
    """Return a tag that is equal for equal facts, on every rank."""
    # The tag of facts that units share is computed once.
    shared = {id(p): p for each in facts for p in (each.parameters, each.options)}
    tags = {key: tag_of(part) for key, part in shared.items()}
    return tag_of(
        [(e.name, tags[id(e.parameters)], tags[id(e.options)]) for e in facts]
    )


def _told(units: Sequence[UnitFacts]) -> dict[tuple[int, ...], tuple[str, str]]:
    """Return each fact by its place in the comparison: what it is, and its value."""
    found: dict[tuple[int, ...], tuple[str, str]] = {}
    for k, unit in enumerate(units):
        # Names of units come before all else: a module that is a unit on some ranks
        # only would be told as parameters that are missing in the unit above.
        found[0, k] = f"unit number {k + 1} of the model", quoted(unit.name)
        at = f"of unit {quoted(unit.name)}"
        for number, (name, value) in enumerate(unit.options):
            found[1, k, _OPTION, number] = f"the option {name} {at}", value
        for kind, number, names, value in unit.parameters:
            full, *tied = (quoted(join_name(unit.above, name)) for name in names)
            told = f"{_WORDS.get(kind)} of parameter {full}", value
            if kind == _NAMES:
                others = f" (tied to {', '.join(tied)})" if tied else ""
                told = f"parameter {number + 1} {at}", full + others
            found[1, k, kind, number] = told
    return found
