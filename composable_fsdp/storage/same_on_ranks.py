"""Compares over ranks what a checkpoint has once, before any file is written.

A value that only another rank has, or has differently, would be lost::

    tensors in no unit          names, shapes, dtypes, values of parameters    refused
    extra states of modules     values                                         refused
    options of the optimizer    per parameter                                  refused
    state of copies             dtypes of elements, values of scalars          refused
    buffers                     values                                         logged
    shards of replicas          values                                         warned

Each rank sends digests first, and the names and texts only if digests differ. Copies of
an element lie on the replicas of a unit, and on ranks of tensor parallelism beside a
parameter that is not cut; one of them writes. Scalar state of a parameter that several
ranks hold parts of is compared in ``merge``.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted, ranks_text
from composable_fsdp.optim.names import is_absent
from composable_fsdp.storage.contents import Contents, HeldTensor, is_elementwise
from composable_fsdp.storage.manifest import Json
from composable_fsdp.storage.mesh_copies import (
    ReplicaShards,
    copies_of,
    digest_of,
    warning_of,
)
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import in_host_memory

_log = logging.getLogger(__name__)

Copies = dict[tuple[int, ...], dict[str, str]]
"""Per ranks with the same elements: a text for each state, by the parameter's name."""
Hashes = Mapping[tuple[int, ...], bytes]


class _Kind(NamedTuple):
    """Values that ranks tell, and the words for a value that differs.

    ``is_shared``: ranks that do not tell a name are compared, too. ``is_shown``: the
    values are texts for the message.
    """

    text: str
    is_shared: bool = True
    is_shown: bool = False


_LOCAL = (
    "local=[{first}] (names, or patterns such as 'experts.*' or '*._extra_state'), "
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
}
"""In the order of the comparison: values of tensors that all ranks have come later."""


@dataclass(slots=True)
class RankValues:
    """What a rank tells of the values that are saved once; small, to be sent."""

    values: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {kind: {} for kind in (*_KINDS, "buffers")}
    )
    """By kind and by name: a text, or a hash."""
    local: list[str] = field(default_factory=list)
    """The names in no unit that this rank saves for itself (``local=``)."""
    copies: Copies = field(default_factory=dict)
    """Optimizer state of parameters in units that other ranks hold as well."""

    def digest(self) -> bytes:
        """Return 16 bytes that are equal on ranks that tell the same.

        Without ``copies``, which differ over shards; see ``hashes_of``.
        """
        # Sorted: ranks may order groups and parameters differently, and a checkpoint
        # goes by names.
        return digest_of([sorted(part.items()) for part in self.values.values()])


def hash_tensors(held: Sequence[HeldTensor], told: RankValues) -> None:
    """Add names, shapes and hashes of tensors in no unit to ``told``."""
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
        told.values["shapes"][name] = f"{kind} {each.shape} of {each.dtype}{tied}"
        told.values["parameters" if is_parameter else "buffers"][name] = value


def hash_rectangles(held: Sequence[HeldTensor], told: RankValues) -> None:
    """Add names, shapes and hashes of the parts of DTensors in no unit to ``told``."""
    for each in held:
        name, given = each.names[0], each.rectangle
        assert given is not None
        # The shape of the whole tensor, which all ranks tell alike.
        told.values["shapes"][name] = f"a DTensor {each.shape} of {each.dtype}"
        # A rank without elements may have any offset.
        if given.numel:
            where = f"{name} at {given.offset}"
            told.values["rectangles"][where] = _hash(_hashable(each.local))


def _hashable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the values in memory that the tensor represents."""
    # A lazily conjugated or negated tensor has other bytes than values.
    return in_host_memory(tensor) if tensor.is_conj() or tensor.is_neg() else tensor


def _hash(tensor: Tensor) -> int:
    """Return the hash of a tensor."""
    return int(hash_values([tensor]).item())


def text_of(value: Any, where: str) -> str:
    """Return a text that is equal for equal values; tensors count by their hash."""

    def put(tensor: Tensor, _: str) -> int:
        return _hash(_hashable(tensor))

    found: Json = encode(value, where, put, python_values=True)
    return json.dumps(found, sort_keys=True)


def copied_states(
    contents: Contents, states: Mapping[int, Mapping[str, Any]]
) -> Copies:
    """Return the states of this rank's parameters in units that other ranks hold, too.

    Raises: CheckpointError, for a state that is neither element-wise nor a scalar.
    """
    found: Copies = {}
    # Read together at the end: a GPU would be waited for at each number.
    waiting: list[tuple[str, Tensor, list[dict[str, str]]]] = []
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
            told = [found.setdefault(tuple(r), {}) for r in (*replicas, *others)]
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
    _read(waiting)
    return found


def _read(waiting: Sequence[tuple[str, Tensor, list[dict[str, str]]]]) -> None:
    """Write the values of tensors of a single element into the dicts beside each."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (_, value, _) in enumerate(waiting):
        alike.setdefault((value.device, value.dtype), []).append(i)
    for (_, dtype), numbers in alike.items():
        values = torch.stack([waiting[i][1].detach() for i in numbers]).tolist()
        for i, value in zip(numbers, values, strict=True):
            where, _, told = waiting[i]
            for each in told:
                each[where] = f"{value!r} of {dtype}"


def hashes_of(copies: Copies) -> Hashes:
    """Return a hash per set of ranks, which is equal where the texts are."""
    return {ranks: digest_of(sorted(told.items())) for ranks, told in copies.items()}


def copies_differ(ranks: Sequence[int], told: Sequence[Hashes]) -> bool:
    """Return whether two ranks have told different hashes of the same ranks."""
    by_rank = dict(zip(ranks, told, strict=True))
    # A rank that has told nothing of the set lacks all of its state.
    return any(
        by_rank[other].get(group) != mine
        for each in told
        for group, mine in each.items()
        for other in group
        if other in by_rank
    )


def _require_same_copies(by_rank: Mapping[int, RankValues]) -> None:
    """Raise CheckpointError for a state that two copies have differently."""
    for group in {group: None for each in by_rank.values() for group in each.copies}:
        told = {r: by_rank[r].copies.get(group, {}) for r in group if r in by_rank}
        for where in _unlike(told, is_shared=True):
            name = where.rpartition(" (state ")[0]
            raise CheckpointError(
                f"The optimizer's {where} is {_who(told, where)}, which hold copies of "
                "the parameter; a checkpoint has it once. Nothing was written. Step "
                "the optimizers of all replicas alike, or pass "
                f"local=[{name!r}], which saves each rank's own scalars."
            )


def require_same(ranks: Sequence[int], told: Sequence[RankValues]) -> str:
    """Compare the values of all ranks; return a line for the log, or "".

    Raises: CheckpointError, for values that would be lost.
    """
    by_rank = dict(zip(ranks, told, strict=True))
    for kind, (text, is_shared, is_shown) in _KINDS.items():
        # A name that is saved for all ranks and for one is told before its values.
        if kind == "shapes":
            _require_same_local(by_rank)
        values = {rank: each.values[kind] for rank, each in by_rank.items()}
        unlike = _unlike(values, is_shared=is_shared)
        if unlike:
            name, *more = unlike
            shown = quoted(name)
            if kind == "options":
                # A group has many; the message has the first that differs.
                option, values = _option(values, name)
                shown, more = f"option {option!r} of {shown}", []
            told_by = {r: each.get(name) for r, each in values.items()}
            if not is_shared:
                told_by = {
                    r: value for r, value in told_by.items() if value is not None
                }
            first = next(iter(told_by.values()))
            same = [rank for rank, value in told_by.items() if value == first]
            others = [rank for rank in told_by if rank not in same]
            words = f" (and {len(more)} more: {listed(map(quoted, more))})"
            raise CheckpointError(
                text.format(
                    name=shown + (words if more else ""),
                    who=_who(values, name) if is_shown else "",
                    others=ranks_text(others),
                    ranks=ranks_text(same),
                    a=same[0],
                    b=others[0],
                    local=_LOCAL.format(first=repr(name)),
                )
            )
    _require_same_copies(by_rank)
    # No error: the running means of a normalization differ in ordinary training, and
    # DistributedDataParallel gives all ranks those of rank 0, too.
    buffers = {rank: each.values["buffers"] for rank, each in by_rank.items()}
    unlike = _unlike(buffers, is_shared=True)
    if not unlike:
        return ""
    return (
        f"Buffers differ over ranks: {listed(map(quoted, unlike))}. "
        f"The checkpoint has those of rank {ranks[0]}, and load gives them to all "
        "ranks. Broadcast them before the save, or pass local=[..] with their names, "
        "which saves each rank's own."
    )


def _require_same_local(by_rank: Mapping[int, RankValues]) -> None:
    """Raise CheckpointError for a name that a rank saves for itself, and another not.

    A rank that does not have the tensor may name it or not.
    """
    for name in dict.fromkeys(name for each in by_rank.values() for name in each.local):
        without = [
            rank
            for rank, each in by_rank.items()
            if name in each.values["shapes"] or name in each.values["own_states"]
        ]
        if without:
            having = [rank for rank, each in by_rank.items() if name in each.local]
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


def require_same_values(
    team: Team,
    told: Sequence[tuple[RankValues | None, ReplicaShards | None]],
) -> Exception | None:
    """Compare what all ranks told in full; ``None`` stands for what was equal.

    Rank 0 alone warns; return the error if this process lets warnings raise.

    Raises: CheckpointError, the same on every rank.
    """
    values = [each for each, _ in told if each is not None]
    shards = [each for _, each in told if each is not None]
    if values:
        text = require_same(team.ranks, values)
        # Running means differ in ordinary training.
        if text and team.rank == 0:
            _log.info(text)
    text = warning_of(team.ranks, shards) if shards else ""
    # A warning per rank would say no more.
    if not text or team.rank:
        return None
    try:
        warnings.warn(text, stacklevel=4)
    except Warning as raised:
        # Raised here, the warning would end rank 0 alone, and the others would wait.
        error = CheckpointError(
            f"{text} Nothing was written, because warnings are errors in this process."
        )
        error.__cause__ = raised
        return error
    return None
