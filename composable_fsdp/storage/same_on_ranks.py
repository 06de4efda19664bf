"""Compares over ranks what a checkpoint has once, before any file is written.

A value that only another rank has, or has differently, would be lost::

    tensors in no unit          names, shapes, dtypes, values of parameters    refused
    extra states of modules     values                                         refused
    options of the optimizer    per parameter                                  refused
    state of copies             dtypes of elements, values of scalars          refused
    buffers                     values                                         logged
    shards of replicas          values                                         warned

Each rank sends digests first, and names and texts only of what differs. Copies of an
element lie on the replicas of a unit, and on ranks of tensor parallelism beside a
parameter that is not cut; one of them writes. Replicas that differ (a write to one of
them, another learning rate there) are seen by no collective, and the checkpoint would
be a mixture that no rank has. Scalar state of a parameter that several ranks hold parts
of is compared in ``merge``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_form import groups_of
from composable_fsdp.flat.param_paths import slot_path
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted, ranks_text
from composable_fsdp.optim.names import is_absent
from composable_fsdp.storage.codec import Json
from composable_fsdp.storage.contents import Contents, Held, is_elementwise
from composable_fsdp.storage.mesh_copies import copies_of
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import in_host_memory
from composable_fsdp.tree.state import _FSDPState

_log = logging.getLogger(__name__)

Group = str | tuple[int, ...] | bytes
"""Who must tell the same: all ranks, of a kind; some; those at the same place."""
Facts = dict[Group, dict[str, Any]]
"""What a rank tells of the values that are saved once: a text or a hash by name."""


class _Kind(NamedTuple):
    """Values that ranks tell, and the words for a value that differs."""

    text: str
    is_shared: bool = True
    is_shown: bool = False


_LOCAL = (
    "local=[{first}] in SaveOptions (names, or patterns as 'experts.*'), "
    "which saves each rank's own"
)
_KINDS = {
    "chosen": _Kind(
        "{name} is not chosen on all ranks: {who}; nothing was written. Pass the same "
        "include, exclude and trainable_only on every rank, and freeze the same "
        "parameters.",
        is_shown=True,
    ),
    "experts": _Kind(
        "{name} is an expert on rank {a} and another on rank {b}, by their "
        "expert_mesh; a checkpoint expects another name for each expert. Nothing was "
        "written. Keep the numbers of the plain model: nn.ModuleList with None in the "
        "places of other ranks' experts. Or stack the experts and pass DTensors of "
        "distribute_tensor(weight, mesh['ep'], [Shard(0)]).",
        is_shared=False,
    ),
    "shapes": _Kind(
        "{name} is in no unit and not the same on all ranks: {who}. A single rank "
        "saves such tensors for all ranks, so the others' would be lost; nothing was "
        "written. Build the same modules on every rank, or pass {local}.",
        is_shown=True,
    ),
    "parameters": _Kind(
        "Parameter {name} is in no unit and has other values on {others} than on "
        "{ranks}; a checkpoint has such parameters once, and nothing was written. Give "
        "all ranks the same values (torch.distributed.broadcast), pass its module to "
        "fully_shard, or pass {local}.",
    ),
    "own_states": _Kind(
        "The extra state {name} is another on {others} than on {ranks}; a checkpoint "
        "has extra states once, and nothing was written. Let get_extra_state return "
        "the same on all ranks, or pass {local}.",
    ),
    "rectangles": _Kind(
        "The part of DTensor {name} is in no unit and has other values on {others} "
        "than on {ranks}; nothing was written. Give all ranks the same values, or pass "
        "the module around it to fully_shard.",
        is_shared=False,
    ),
    "options": _Kind(
        "The optimizer's {name} is {who}; a checkpoint has options once. Nothing was "
        "written. Give all ranks the same options, or pass {local}.",
        is_shared=False,
        is_shown=True,
    ),
    "copies": _Kind(
        "The optimizer's {name} is {who}, which hold copies of the parameter; a "
        "checkpoint has it once. Nothing was written. Step optimizers of all replicas "
        "alike, or pass local=[{first}] in SaveOptions, which saves each rank's own.",
        is_shown=True,
    ),
}
"""In the order of the comparison: values of tensors that all ranks have come later."""


def no_facts() -> Facts:
    """Return the facts of a rank that has none: of each kind, all ranks tell."""
    return {kind: {} for kind in (*_KINDS, "local", "buffers")}


def digests_of(facts: Facts) -> dict[Group, bytes]:
    """Return 16 bytes per group, which are equal on ranks that tell the same."""
    # Sorted: ranks may order groups and parameters differently, and a checkpoint goes
    # by names.
    return {group: _digest(sorted(told.items())) for group, told in facts.items()}


def _digest(value: object) -> bytes:
    """Return a digest of a value of plain types."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def unlike_groups(
    ranks: Sequence[int], told: Sequence[Mapping[Group, bytes]]
) -> list[Group]:
    """Return the groups whose ranks have told different digests, or one none."""
    by_rank = dict(zip(ranks, told, strict=True))
    found: dict[Group, set[bytes | None]] = {}
    for each in told:
        for group, digest in each.items():
            found.setdefault(group, set()).add(digest)
    for group, digests in found.items():
        # A rank that tells nothing of copies lacks all of their state.
        if isinstance(group, tuple):
            digests.update(by_rank[r].get(group) for r in group if r in by_rank)
    return [group for group, digests in found.items() if len(digests) > 1]


def tell_tensors(held: Sequence[Held], facts: Facts) -> None:
    """Add names, shapes and hashes of tensors in no unit."""
    plain = [_hashable(each.tensor) for each in held]
    # A copy of all hashes to the host at once: a GPU would be waited for per tensor.
    alike = len({tensor.device for tensor in plain}) == 1
    hashes = hash_values(plain).tolist() if alike else map(_hash, plain)
    for each, value in zip(held, hashes, strict=True):
        name = each.names[0]
        is_parameter = isinstance(each.shown, nn.Parameter)
        kind = "a parameter" if is_parameter else "a buffer"
        # Ties are part of the checkpoint: a tied tensor is saved once.
        tied = f", also named {listed(each.names[1:])}" if each.names[1:] else ""
        facts["shapes"][name] = f"{kind} {each.shape} of {each.dtype}{tied}"
        facts["parameters" if is_parameter else "buffers"][name] = value


def tell_rectangles(held: Sequence[Held], facts: Facts) -> None:
    """Add names, shapes and hashes of the parts of DTensors in no unit."""
    for each in held:
        name, given = each.names[0], each.rectangle
        assert given is not None
        # The shape of the whole tensor, which all ranks tell alike.
        facts["shapes"][name] = f"a DTensor {each.shape} of {each.dtype}"
        # A rank without elements may have any offset.
        if given.numel:
            where = f"{name} at {given.offset}"
            facts["rectangles"][where] = _hash(_hashable(each.local))


def _hashable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the values in memory that the tensor represents."""
    # A lazily conjugated or negated tensor has other bytes than values.
    return in_host_memory(tensor) if tensor.is_conj() or tensor.is_neg() else tensor


def _hash(tensor: Tensor) -> int:
    """Return the hash of a tensor."""
    return int(hash_values([tensor]).item())


def text_of(value: Any, where: str) -> str:
    """Return a text that is equal for equal values; tensors count by their hash."""
    found: Json = encode(
        value, where, lambda tensor, _: _hash(_hashable(tensor)), python_values=True
    )
    return json.dumps(found, sort_keys=True)


def tell_shards(states: Iterable[_FSDPState], facts: Facts) -> None:
    """Add hashes of the shards of replicas, unless ``check_weights`` is ``"off"``."""
    places: list[Any] = []
    hashes: dict[str, Any] = {}
    for state in states:
        handle = state.handle
        groups = handle.groups
        if not state.initial.is_checked or groups.replicas < 2:
            continue
        refs = list(param_refs(handle))
        # Ranks of another part, or with other experts, hold other values of the name.
        parts = [
            g.rank() for g in (*groups_of(handle.layout.forms), groups.experts) if g
        ]
        at = groups.shard.rank() if groups.shard is not None else 0
        is_strict = state.options.check_weights == "error"
        places.append((handle.full_fqn, at, parts, is_strict))
        # By parameter, and not by region, so that the message has a name. The names are
        # read each time, because an outer unit may be applied in between.
        values = hash_values([ref.leaf for ref in refs]).tolist()
        for ref, value in zip(refs, values, strict=True):
            hashes[slot_path(handle, ref.slot)] = value, is_strict
    if places:
        facts[_digest(places)] = hashes


def tell_copies(
    contents: Contents, states: Mapping[int, Mapping[str, Any]], facts: Facts
) -> None:
    """Add the states of this rank's parameters in units that other ranks hold, too."""
    # Read together at the end: a GPU would be waited for at each number.
    waiting: list[tuple[str, Tensor, list[dict[str, Any]]]] = []
    for held in contents.regions:
        replicate = held.handle.groups.replicate
        # Most models: no rank has a copy.
        if replicate is None and not contents.mesh_groups:
            continue
        replicas = (
            [] if replicate is None else [dist.get_process_group_ranks(replicate)]
        )
        for param in held.params:
            # A rank without elements has no state to compare.
            if is_absent(param.ref.leaf):
                continue
            form, name = param.ref.form, param.names[0]
            others = copies_of(held.handle, form, contents.mesh_groups)
            told = [facts.setdefault(tuple(r), {}) for r in (*replicas, *others)]
            for key, value in states.get(id(param.tensor), {}).items():
                where = f"{name} (state {key!r})"
                # Elements would take a pass over memory; dtypes differ for free.
                if is_elementwise(key, value, param.ref.leaf, name):
                    said = f"elements of {value.dtype}"
                elif isinstance(value, Tensor) and value.ndim == 0:
                    waiting.append((where, value, told))
                    continue
                else:
                    said = text_of(value, where)
                for each in told:
                    each[where] = said
    alike: dict[Hashable, list[int]] = {}
    for i, (_, value, _) in enumerate(waiting):
        alike.setdefault((value.device, value.dtype), []).append(i)
    for numbers in alike.values():
        values = torch.stack([waiting[i][1].detach() for i in numbers]).tolist()
        for i, number in zip(numbers, values, strict=True):
            where, value, told = waiting[i]
            for each in told:
                each[where] = f"{number!r} of {value.dtype}"


def require_same_values(team: Team, facts: Facts, groups: Sequence[Group]) -> str:
    """Exchange what ranks have told of ``groups``; return a text to warn of, or "".

    Collective: one all-gather of objects over the team's group.
    """
    told = team.agree(None, {g: facts[g] for g in groups if g in facts})
    by_rank: dict[int, Facts] = dict(zip(team.ranks, told, strict=True))
    for kind in _KINDS:
        # A name that is saved for all ranks and for one is told before its values.
        if kind == "shapes":
            _require_same_local(by_rank)
        _refuse(kind, {rank: each.get(kind, {}) for rank, each in by_rank.items()})
    for group in groups:
        if isinstance(group, tuple):
            among = {r: by_rank[r] for r in group if r in by_rank}
            _refuse("copies", {r: each.get(group, {}) for r, each in among.items()})
    # No error: the running means of a normalization differ in ordinary training, and
    # DistributedDataParallel gives all ranks those of rank 0, too.
    buffers = {rank: each.get("buffers", {}) for rank, each in by_rank.items()}
    unlike = _unlike(buffers, is_shared=True)
    if unlike and team.rank == 0:
        _log.info(
            f"Buffers differ over ranks: {listed(map(quoted, unlike))}. "
            f"The checkpoint has those of rank {team.ranks[0]}, and load gives them to "
            "all ranks. Broadcast them before the save, or SaveOptions(local=[..]) "
            "with their names saves each rank's own."
        )
    return _told_of_replicas(by_rank)


def _told_of_replicas(by_rank: Mapping[int, Facts]) -> str:
    """Return the text of a warning about replicas that differ, or ""."""
    places = {g: None for each in by_rank.values() for g in each if type(g) is bytes}
    found: dict[str, dict[int, Any]] = {}
    for place in places:
        told = {r: each[place] for r, each in by_rank.items() if place in each}
        for name in _unlike(told, is_shared=True):
            found.setdefault(name, {rank: each[name] for rank, each in told.items()})
    if not found:
        return ""
    # In the order of the units, so that all ranks name the same parameter.
    name, values = next(iter(found.items()))
    by_value: dict[Any, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    first, *others = map(ranks_text, by_value.values())
    more = f" (and {len(found) - 1} more parameters)" if len(found) > 1 else ""
    text = (
        f"Replicas differ: parameter {quoted(name)}{more} has other values on {first} "
        f"than on {listed(others)}, which hold the same part"
    )
    causes = (
        "A write to one replica, or a step with other options there, leads to this. "
        "Give all replicas the same values before the save: load the last "
        "checkpoint, or broadcast the parameters."
    )
    if any(is_strict for each in found.values() for _, is_strict in each.values()):
        raise CheckpointError(f"{text}; nothing was written. {causes}")
    return (
        f"{text}. Each replica writes a share, so the checkpoint is a mixture that no "
        f"rank has. {causes} check_weights='error' refuses such a save, "
        "check_weights='off' compares nothing."
    )


def warn_of(text: str) -> Exception | None:
    """Warn; return the error if this process lets warnings raise."""
    try:
        warnings.warn(text, stacklevel=4)
    except Warning as raised:
        # Raised here, the warning would end this rank alone, and the others would wait.
        error = CheckpointError(
            f"{text} Nothing was written, because warnings are errors in this process."
        )
        error.__cause__ = raised
        return error
    return None


def _refuse(kind: str, values: dict[int, dict[str, Any]]) -> None:
    """Raise CheckpointError for a name that ranks have told differently."""
    text, is_shared, is_shown = _KINDS[kind]
    unlike = _unlike(values, is_shared=is_shared)
    if not unlike:
        return
    name, *more = unlike
    shown = name if kind == "copies" else quoted(name)
    if kind == "options":
        # A group has many; the message has the first that differs.
        option, values = _option(values, name)
        shown, more = f"option {option!r} of {shown}", []
    told_by = {rank: each.get(name) for rank, each in values.items()}
    if not is_shared:
        told_by = {rank: value for rank, value in told_by.items() if value is not None}
    first = next(iter(told_by.values()))
    same = [rank for rank, value in told_by.items() if value == first]
    others = [rank for rank in told_by if rank not in same]
    words = f" (and {len(more)} more: {listed(map(quoted, more))})"
    pattern = repr(name.partition(" (state ")[0])
    raise CheckpointError(
        text.format(
            name=shown + (words if more else ""),
            who=_who(values, name) if is_shown else "",
            others=ranks_text(others),
            ranks=ranks_text(same),
            a=same[0],
            b=others[0],
            first=pattern,
            local=_LOCAL.format(first=pattern),
        )
    )


def _require_same_local(by_rank: Mapping[int, Facts]) -> None:
    """Refuse a name that a rank saves for itself, and another not."""
    shared = {
        rank: each.get("shapes", {}).keys() | each.get("own_states", {}).keys()
        for rank, each in by_rank.items()
    }
    local = {rank: each.get("local", {}) for rank, each in by_rank.items()}
    for name in dict.fromkeys(name for each in local.values() for name in each):
        if without := [rank for rank, names in shared.items() if name in names]:
            having = [rank for rank, names in local.items() if name in names]
            raise CheckpointError(
                f"{quoted(name)} is in local=[..] on {ranks_text(having)} and not on "
                f"{ranks_text(without)}; a tensor is saved once for all ranks, or by "
                "each rank for itself. Nothing was written. Pass the same local on "
                "every rank."
            )


def _unlike(told: Mapping[int, Mapping[str, Any]], *, is_shared: bool) -> list[str]:
    """Return the names whose values differ, or (``is_shared``) that a rank lacks."""
    found: dict[str, set[Any]] = {}
    for each in told.values():
        for name, value in each.items():
            found.setdefault(name, set()).add(value)
    if is_shared:
        for each in told.values():
            for name in found.keys() - each.keys():
                found[name].add(None)
    return [name for name, values in found.items() if len(values) > 1]


def _option(
    told: Mapping[int, Mapping[str, str]], name: str
) -> tuple[str, dict[int, dict[str, str]]]:
    """Return the first option of ``name`` that differs, and the values of the ranks."""
    # A rank may leave out parameters that it holds no elements of.
    options = {r: json.loads(each[name]) for r, each in told.items() if name in each}
    keys = dict.fromkeys(key for each in options.values() for key in each)
    found = {
        key: {rank: {name: repr(each.get(key))} for rank, each in options.items()}
        for key in keys
    }
    return next((k, v) for k, v in found.items() if _unlike(v, is_shared=False))


def _who(told: Mapping[int, Mapping[str, Any]], name: str) -> str:
    """Return the ranks of each text, in words."""
    by_text: dict[Any, list[int]] = {}
    for rank, each in told.items():
        by_text.setdefault(each.get(name), []).append(rank)
    return " and ".join(
        f"{str(text or 'absent')[:200]} on {ranks_text(ranks)}"
        for text, ranks in by_text.items()
    )
