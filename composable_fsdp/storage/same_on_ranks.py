"""Compares over ranks what rank 0 alone saves, before any file is written.

A checkpoint holds tensors in no unit, optimizer options and modules' extra states once,
from rank 0. A value that only another rank has, or has differently, would be lost::

    tensors in no unit          names, shapes, dtypes, values of parameters    refused
    extra states of modules     values                                         refused
    buffers                     values                                         logged
    options of the optimizer    per parameter                                  refused

Scalar optimizer state of a parameter that several ranks hold is compared in ``merge``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.flat.value_hash import hash_values
from composable_fsdp.naming import listed, quoted
from composable_fsdp.storage.contents import HeldTensor
from composable_fsdp.storage.expert_names import require_own_names
from composable_fsdp.storage.manifest import Json
from composable_fsdp.storage.same_copies import Copies, require_same_copies, warning_of
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import in_host_memory
from composable_fsdp.tree.fingerprint import ranks_text

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankValues:
    """What a rank tells of the values that rank 0 alone saves; small, to be sent."""

    shapes: dict[str, str] = field(default_factory=dict)
    """Kind, shape and dtype of each tensor in no unit, by name."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """A hash of each parameter in no unit, and of the optimizer state, by name."""
    buffers: dict[str, Any] = field(default_factory=dict)
    """The same of each buffer."""
    own_states: dict[str, str] = field(default_factory=dict)
    """The extra state of each module as a text, by name."""
    chosen: dict[str, str] = field(default_factory=dict)
    """The names of parameters of units, if only a part of the model is saved."""
    rectangles: dict[str, Any] = field(default_factory=dict)
    """A hash of this rank's rectangle of each DTensor in no unit, by name and place;
    and its scalar optimizer state, by name."""
    local: dict[str, str] = field(default_factory=dict)
    """The names in no unit that this rank saves for itself (``local=``)."""
    experts: dict[str, int] = field(default_factory=dict)
    """The names of this rank's experts, with the place in the ``expert_mesh``."""
    options: dict[str, str] = field(default_factory=dict)
    """The options of the optimizer, as JSON, by the name of the parameter."""
    copies: Copies = field(default_factory=dict)
    """Optimizer state of parameters in units that other ranks hold as well."""

    def digest(self) -> bytes:
        """Return 16 bytes that are equal on ranks that tell the same.

        Without ``copies``, which differ over shards; see ``hashes_of``.
        """
        # Sorted: ranks may order groups and parameters differently, and a checkpoint
        # goes by names.
        parts = [self.shapes, self.parameters, self.buffers, self.options, self.chosen]
        parts += [self.rectangles, self.experts, self.own_states]
        text = repr([sorted(part.items()) for part in parts])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def hash_tensors(held: Sequence[HeldTensor], told: RankValues) -> None:
    """Add names, shapes and hashes of tensors in no unit to ``told``."""
    plain = [_hashable(each.tensor) for each in held]
    # A copy of all hashes to the host at once: a GPU would be waited for per tensor.
    hashes = hash_values(plain).tolist() if _on_a_device(plain) else map(_hash, plain)
    for each, value in zip(held, hashes, strict=True):
        name = each.names[0]
        is_parameter = isinstance(each.shown, nn.Parameter)
        kind = "a parameter" if is_parameter else "a buffer"
        # Ties are part of the checkpoint: a tied tensor is saved once.
        tied = f", also named {listed(each.names[1:])}" if each.names[1:] else ""
        told.shapes[name] = f"{kind} {each.shape} of {each.dtype}{tied}"
        (told.parameters if is_parameter else told.buffers)[name] = value


def hash_rectangles(held: Sequence[HeldTensor], told: RankValues) -> None:
    """Add names, shapes and hashes of the parts of DTensors in no unit to ``told``."""
    for each in held:
        name, given = each.names[0], each.rectangle
        assert given is not None
        # The shape of the whole tensor, which all ranks tell alike.
        told.shapes[name] = f"a DTensor {each.shape} of {each.dtype}"
        # A rank without elements may have any offset.
        if given.numel:
            where = f"{name} at {given.offset}"
            told.rectangles[where] = _hash(_hashable(each.local))


def _on_a_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are on the same device."""
    return len({tensor.device for tensor in tensors}) == 1


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


def require_same(ranks: Sequence[int], told: Sequence[RankValues]) -> str:
    """Compare the values of all ranks; return a line for the log, or "".

    Raises: CheckpointError, for tensors and options that would be lost.
    """
    unlike = _unlike(told, lambda each: each.chosen)
    if unlike:
        name = unlike[0]
        raise CheckpointError(
            f"{quoted(name)}{_more(unlike)} is not chosen on all ranks: "
            f"{_who(ranks, [each.chosen.get(name) for each in told])}; nothing was "
            "written. Pass the same include, exclude and trainable_only on every rank, "
            "and freeze the same parameters."
        )
    require_own_names(ranks, [each.experts for each in told])
    _require_same_local(ranks, told)
    # Names and shapes first: hashes of values are compared for tensors that all ranks
    # have.
    unlike = _unlike(told, lambda each: each.shapes)
    if unlike:
        name = unlike[0]
        raise CheckpointError(
            f"{quoted(name)}{_more(unlike)} is in no unit and not the same on all "
            f"ranks: {_who(ranks, [each.shapes.get(name) for each in told])}. Rank "
            f"{ranks[0]} saves such tensors for all ranks, so the others' would be "
            "lost; nothing was written. Build the same modules on every rank, or pass "
            f"local=[{name!r}] (names, or patterns such as 'experts.*'), which saves "
            "each rank's own."
        )
    # Experts of a rank alone, or modules that no rank synchronizes: the values are the
    # result of training, and only this rank has them.
    unlike = _unlike(told, lambda each: each.parameters)
    if unlike:
        raise CheckpointError(
            f"Parameter {quoted(unlike[0])}{_more(unlike)} is in no unit and has other "
            f"values on {_others(ranks, [each.parameters for each in told], unlike[0])}"
            f" than on rank {ranks[0]}, "
            "which saves such parameters for all ranks; nothing was written. Give all "
            "ranks the same values (torch.distributed.broadcast), pass its module to "
            f"fully_shard, or pass local=[{unlike[0]!r}] (names, or patterns such as "
            "'experts.*'), which saves each rank's own."
        )
    _require_same_own_states(ranks, told)
    _require_same_rectangles(ranks, told)
    _require_same_options(ranks, told)
    require_same_copies(ranks, [each.copies for each in told])
    # No error: the running means of a normalization differ in ordinary
    # training, and DistributedDataParallel gives all ranks those of rank 0, too.
    unlike = _unlike(told, lambda each: each.buffers)
    if not unlike:
        return ""
    return (
        f"Buffers differ over ranks: {listed(map(quoted, unlike))}. "
        f"The checkpoint has those of rank {ranks[0]}, and load gives them to all "
        "ranks. Broadcast them before the save, or pass local=[..] with their names, "
        "which saves each rank's own."
    )


def _require_same_own_states(ranks: Sequence[int], told: Sequence[RankValues]) -> None:
    """Raise CheckpointError for an extra state that differs over ranks."""
    # No trainer gives all ranks the extra states of one, as is done with buffers, so a
    # difference is what only this rank has learnt or counted.
    unlike = _unlike(told, lambda each: each.own_states)
    if unlike:
        name = unlike[0]
        others = _others(ranks, [each.own_states for each in told], name)
        raise CheckpointError(
            f"The extra state {quoted(name)}{_more(unlike)} is another on {others} "
            f"than on rank {ranks[0]}, which saves extra states for all ranks; nothing "
            "was written. Let get_extra_state return the same on all ranks, or pass "
            f"local=[{name!r}] (names, or patterns such as '*._extra_state'), which "
            "saves each rank's own."
        )


def _require_same_local(ranks: Sequence[int], told: Sequence[RankValues]) -> None:
    """Raise CheckpointError for a name that a rank saves for itself, and another not.

    A rank that does not have the tensor may name it or not.
    """
    for name in dict.fromkeys(name for each in told for name in each.local):
        without = [
            rank
            for rank, each in zip(ranks, told, strict=True)
            if name in each.shapes or name in each.own_states
        ]
        if without:
            having = [r for r, t in zip(ranks, told, strict=True) if name in t.local]
            raise CheckpointError(
                f"{quoted(name)} is in local=[..] on {ranks_text(having)} and not on "
                f"{ranks_text(without)}; a tensor is saved once for all ranks, or by "
                "each rank for itself. Nothing was written. Pass the same local on "
                "every rank."
            )


def _require_same_rectangles(ranks: Sequence[int], told: Sequence[RankValues]) -> None:
    """Raise CheckpointError for a rectangle of a DTensor that has two values."""
    known: dict[str, tuple[int, Any]] = {}
    for rank, each in zip(ranks, told, strict=True):
        for where, value in each.rectangles.items():
            first, expected = known.setdefault(where, (rank, value))
            if value != expected:
                raise CheckpointError(
                    f"The part of DTensor {where} is in no unit and has other values "
                    f"on rank {rank} than on rank {first}, which would save the part; "
                    "nothing was written. Give all ranks the same values, or pass the "
                    "module around it to fully_shard."
                )


def _require_same_options(ranks: Sequence[int], told: Sequence[RankValues]) -> None:
    """Raise CheckpointError for optimizer options that differ over ranks."""
    for name in told[0].options:
        texts = [each.options.get(name) for each in told]
        first = texts[0]
        assert first is not None
        # A rank may leave out parameters that it holds no elements of.
        other = next(
            (i for i, text in enumerate(texts) if text not in (None, first)), 0
        )
        if other:
            # A group has many options; the message names the first that differs.
            left, right = json.loads(first), json.loads(str(texts[other]))
            key = next(k for k in {**left, **right} if left.get(k) != right.get(k))
            raise CheckpointError(
                f"The optimizer's option {key!r} of {quoted(name)} is "
                f"{left.get(key)!r} on rank {ranks[0]} and {right.get(key)!r} on rank "
                f"{ranks[other]}; a checkpoint has options once, for all ranks. "
                "Nothing was written. Give all ranks the same options, or pass "
                f"local=[{name!r}], which saves each rank's own."
            )


def _unlike(
    told: Sequence[RankValues], part: Callable[[RankValues], Mapping[str, Any]]
) -> list[str]:
    """Return the names whose values differ, or which a rank lacks."""
    # Names of all ranks, because rank 0 may lack the tensor.
    names = dict.fromkeys(name for each in told for name in part(each))
    return [n for n in names if len({part(each).get(n) for each in told}) > 1]


def _more(names: Sequence[str]) -> str:
    """Return words for the names after the first."""
    count = len(names) - 1
    return f" (and {count} more: {listed(map(quoted, names[1:]))})" if count else ""


def _who(ranks: Sequence[int], texts: Sequence[str | None]) -> str:
    """Return the ranks of each text, in words."""
    # A dict and no set: the ranks must build the same text.
    kinds = dict.fromkeys(texts)
    return "; ".join(
        f"{kind or 'absent'} on "
        + ranks_text(r for r, text in zip(ranks, texts, strict=True) if text == kind)
        for kind in kinds
    )


def _others(ranks: Sequence[int], told: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the ranks whose value of a name is not the first rank's, in words."""
    first = told[0].get(name)
    return ranks_text(
        rank for rank, each in zip(ranks, told, strict=True) if each.get(name) != first
    )


def require_same_values(
    team: Team, told: Sequence[tuple[Any, ...]]
) -> Exception | None:
    """Compare what all ranks told in full: kinds, ``RankValues``, ``ReplicaShards``.

    ``None`` stands for what was equal. Rank 0 alone warns.

    Raises: CheckpointError, the same on every rank.
    """
    texts, (_, values, shards) = [], zip(*told, strict=True)
    if values[0] is not None:
        text = require_same(team.ranks, values)
        # Running means differ in ordinary training.
        if text and team.rank == 0:
            _log.info(text)
    if shards[0] is not None:
        texts.append(warning_of(team.ranks, shards))
    # A warning per rank would say no more.
    warned = [_warned(text) for text in texts if text and team.rank == 0]
    return next(filter(None, warned), None)


def _warned(text: str) -> Exception | None:
    """Warn; return the error for ``write`` if this process lets warnings raise."""
    try:
        warnings.warn(text, stacklevel=5)
    except Warning as raised:
        # Raised here, the warning would end rank 0 alone, and the others would wait.
        error = CheckpointError(
            f"{text} Nothing was written, because warnings are errors in this process."
        )
        error.__cause__ = raised
        return error
    return None
