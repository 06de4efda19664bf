"""Compares over ranks what a checkpoint has once, before any file is written."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.param_ref import param_refs
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import by_value, listed, quoted, ranks_text
from composable_fsdp.storage.contents import Contents, Held
from composable_fsdp.storage.manifest import Json
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.tensors import copies_of, others_of, ranks_of
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import in_host_memory

_log = logging.getLogger(__name__)

Group = str | tuple[str, tuple[int, ...]]
"""Who must tell the same: all ranks; or ranks that hold copies, of a kind."""
Facts = dict[Group, dict[str, Any]]
"""What a rank tells of the values that are saved once: a text or a hash by name."""


class _Kind(NamedTuple):
    """Values that ranks tell, and the words for one that differs."""

    what: str
    way_out: str
    # Whether a rank that does not tell a name differs, and whether values are shown.
    is_shared: bool = True
    is_shown: bool = False


ONCE, PER_RANK = "once", "per rank"
_LOCAL = (
    "pass local=[{first}] in SaveOptions (names, or patterns as 'experts.*'), which "
    "saves each rank's own"
)
_KINDS = {
    "chosen": _Kind(
        "The choice of {name}",
        "Pass the same include, exclude and trainable_only on every rank, and freeze "
        "the same parameters.",
        is_shown=True,
    ),
    "local": _Kind(
        "{name}, by local=[..],",
        "It is saved once for all ranks, or by each rank for itself: pass the same "
        "local on every rank.",
        is_shared=False,
        is_shown=True,
    ),
    "shapes": _Kind(
        "{name}, in no unit,",
        f"Build the same modules on every rank, or {_LOCAL}.",
        is_shown=True,
    ),
    "parameters": _Kind(
        "Parameter {name}, in no unit,",
        "Give all ranks the same values (torch.distributed.broadcast), pass its module "
        f"to fully_shard, or {_LOCAL}.",
    ),
    "own_states": _Kind(
        "The extra state {name}",
        f"Let get_extra_state return the same on all ranks, or {_LOCAL}.",
    ),
    "rectangles": _Kind(
        "The part of DTensor {name}, in no unit,",
        "Give all ranks the same values, or pass the module around it to fully_shard.",
        is_shared=False,
    ),
    "options": _Kind(
        "The optimizer's option {name}",
        f"Give all ranks the same options, or, of what is in no unit, {_LOCAL}.",
        is_shared=False,
        is_shown=True,
    ),
    "copies": _Kind(
        "The optimizer's {name}, of which several ranks hold copies,",
        "Step optimizers of all replicas alike.",
        is_shared=False,
        is_shown=True,
    ),
}
"""In the order of the comparison; values come after names."""


def no_facts() -> Facts:
    """Return the facts of a rank that has none: of each kind, all ranks tell."""
    return {kind: {} for kind in (*_KINDS, "buffers")}


def digests_of(facts: Facts) -> dict[Group, bytes]:
    """Return 16 bytes per group, which are equal on ranks that tell the same."""
    texts = {group: repr(sorted(told.items())) for group, told in facts.items()}
    return {
        group: hashlib.blake2b(text.encode(), digest_size=16).digest()
        for group, text in texts.items()
    }


def unlike_groups(told: Sequence[Mapping[Group, bytes]]) -> list[Group]:
    """Return the groups of which ranks have told different digests."""
    # All ranks of a group of copies tell of it, even if they have no state.
    found = {group: each[group] for each in told for group in each}
    return [
        group
        for group, digest in found.items()
        if any(each.get(group, digest) != digest for each in told)
    ]


def tell_tensors(held: Sequence[Held], facts: Facts) -> None:
    """Add names, shapes and hashes of tensors in no unit."""
    hashes = _hashes([each.local for each in held])
    for each, value in zip(held, hashes, strict=True):
        name, span, is_parameter = each.names[0], each.span, each.is_parameter
        kind = "a parameter" if is_parameter else "a buffer"
        if each.is_cut:
            kind, box = "a DTensor", span.rectangle
            at = span.start if box is None else box.offset
            if span.numel:
                facts["rectangles"][f"{name} at {at}"] = value
        else:
            facts["parameters" if is_parameter else "buffers"][name] = value
        # Ties are part of the checkpoint: a tied tensor is saved once.
        tied = f", also named {listed(each.names[1:])}" if each.names[1:] else ""
        facts["local"][name] = ONCE
        facts["shapes"][name] = f"{kind} {each.shape} of {each.dtype}{tied}"


def _hashes(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of the values that each tensor represents."""
    plain = [in_host_memory(t) if t.is_conj() or t.is_neg() else t for t in tensors]
    # A copy of all hashes to the host at once: a GPU would be waited for per tensor.
    alike = len({tensor.device for tensor in plain}) == 1
    batches = [plain] if alike else [[tensor] for tensor in plain]
    return [value for batch in batches for value in hash_values(batch).tolist()]


def text_of(value: Any, where: str) -> str:
    """Return a text that is equal for equal values; tensors count by their hash."""
    found: Json = encode(
        value, where, lambda tensor, _: _hashes([tensor])[0], python_values=True
    )
    return json.dumps(found, sort_keys=True)


def tell_shards(states: Iterable[Any], facts: Facts) -> None:
    """Add hashes of the shards of replicas, unless ``check_weights`` is ``"off"``."""
    for state in states:
        group = state.handle.groups.replicate
        if not state.initial.is_checked or group is None:
            continue
        # By parameter, and not by region, so that the message has a name.
        refs = list(param_refs(state.handle))
        told = facts.setdefault(("replicas", ranks_of(group)), {})
        is_strict = state.options.check_weights == "error"
        # A copy of all hashes of a unit to the host at once.
        values = hash_values([ref.leaf for ref in refs]).tolist()
        for ref, value in zip(refs, values, strict=True):
            told[ref.name] = value, is_strict


def tell_copies(
    contents: Contents, states: Mapping[int, Mapping[str, Any]], facts: Facts
) -> None:
    """Add the states of this rank's parameters in units that other ranks hold, too."""
    for param in contents.params():
        copies = copies_of(others_of(param.ref), contents.mesh_groups)
        if (replicas := param.ref.handle.groups.replicate) is not None:
            copies = [ranks_of(replicas), *copies]
        groups: list[Group] = [("copies", each) for each in copies]
        if not groups or param.is_absent:
            continue
        told = [facts.setdefault(group, {}) for group in groups]
        found = states.get(id(param.tensor), {})
        # A rank without elements tells nothing, and one without a state says so: ranks
        # whose rectangles differ in size divide the unit at other places.
        for each in told:
            each[f"{param.names[0]} (states)"] = listed(sorted(map(repr, found)))
        for key, value in found.items():
            where = f"{param.names[0]} (state {key!r})"
            # Elements would take a pass over memory; dtypes differ for free.
            if param.has_elements(key, value):
                text = f"elements of {value.dtype}"
            elif isinstance(value, Tensor) and value.ndim == 0:
                text = f"{value.item()!r} of {value.dtype}"
            else:
                text = text_of(value, where)
            for each in told:
                each[where] = text


def require_same_values(team: Team, facts: Facts, groups: Sequence[Group]) -> str:
    """Exchange what ranks have told of ``groups``; return a text to warn of, or "".

    Collective: one all-gather of objects over the team's group.
    """
    told = team.agree(None, {g: facts[g] for g in groups if g in facts})
    by_rank: dict[int, Facts] = dict(zip(team.ranks, told, strict=True))

    def among(group: Group) -> dict[int, dict[str, Any]]:
        ranks = group[1] if isinstance(group, tuple) else by_rank
        return {r: by_rank[r].get(group, {}) for r in ranks if r in by_rank}

    for kind in _KINDS:
        _refuse(kind, among(kind))
    for group in groups:
        if group[0] == "copies":
            _refuse("copies", among(group))
    # No error: the running means of a normalization differ in ordinary training.
    unlike = _unlike(among("buffers"))
    if unlike and team.rank == 0:
        _log.info(
            f"Buffers differ over ranks: {listed(map(quoted, unlike))}. "
            f"The checkpoint has those of rank {team.ranks[0]}, and load gives them to "
            "all ranks. Broadcast them before the save, or SaveOptions(local=[..]) "
            "with their names saves each rank's own."
        )
    return _told_of_replicas([among(g) for g in groups if g[0] == "replicas"])


def _told_of_replicas(groups: Sequence[dict[int, dict[str, Any]]]) -> str:
    """Return the text of a warning about replicas that differ, or ""."""
    found: dict[str, dict[int, Any]] = {}
    for told in groups:
        for name in _unlike(told):
            found.setdefault(name, {r: each.get(name) for r, each in told.items()})
    if not found:
        return ""
    # In the order of the units, so that all ranks name the same parameter.
    name, values = next(iter(found.items()))
    more = f" (and {len(found) - 1} more parameters)" if len(found) > 1 else ""
    text = (
        f"Replicas differ: parameter {quoted(name)}{more} has {_others(values)}, which "
        "hold the same part. Each replica writes a share, so the checkpoint is a "
        "mixture that no rank has. Load the last checkpoint, or broadcast the "
        "parameters, before the save. check_weights='error' refuses such a save, 'off' "
        "compares nothing."
    )
    if any(value and value[1] for each in found.values() for value in each.values()):
        raise CheckpointError(f"{text} Refused: nothing was written.")
    return text


def _refuse(kind: str, told: dict[int, dict[str, Any]]) -> None:
    """Raise CheckpointError for a name that ranks have told differently."""
    what, way_out, is_shared, is_shown = _KINDS[kind]
    unlike = _unlike(told, is_shared=is_shared)
    if not unlike:
        return
    name, *more = unlike
    values = {r: e.get(name) for r, e in told.items() if is_shared or name in e}
    shown = name if kind == "copies" else quoted(name)
    if kind == "options":
        # A group has many; the message has the first that differs.
        # As text: 1 and 1.0 are equal, and a checkpoint has one of them.
        options = {
            rank: {key: repr(value) for key, value in json.loads(str(text)).items()}
            for rank, text in values.items()
        }
        option = _unlike(options)[0]
        values = {rank: each.get(option) for rank, each in options.items()}
        shown = f"{option!r} of {shown}"
    elif more:
        shown += f" (and {len(more)} more: {listed(map(quoted, more))})"
    texts = {rank: str(value or "absent")[:200] for rank, value in values.items()}
    first = repr(name.partition(" (state ")[0])
    raise CheckpointError(
        f"{what.format(name=shown)} is not the same on all ranks: "
        f"{by_value(texts) if is_shown else _others(values)}; a checkpoint has it "
        f"once, and nothing was written. {way_out.format(first=first)}"
    )


def _others(values: Mapping[int, Any]) -> str:
    """Return which ranks have other values than the first, in words."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    first, *others = map(ranks_text, ranks.values())
    return f"other values on {listed(others)} than on {first}"


def _unlike(
    told: Mapping[int, Mapping[str, Any]], *, is_shared: bool = True
) -> list[str]:
    """Return the names whose values differ, or (``is_shared``) that a rank lacks."""
    names = dict.fromkeys(name for each in told.values() for name in each)
    found = {
        name: [each.get(name) for each in told.values() if is_shared or name in each]
        for name in names
    }
    return [n for n, values in found.items() if any(v != values[0] for v in values)]
