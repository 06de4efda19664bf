"""Collects the part of a checkpoint that a rank writes: entries and their description.

::

    shard of a region                 written by the first replica
    slots of a region                 described by the first rank of the unit
    state that is not element-wise    written by the first rank with elements of the
                                      parameter
    tensor in no unit, extra, options written by rank 0 of the save

Rank 0 of the save merges the descriptions and the places of the entries (``merge``). A
rank writes each state that any rank has for parameters of a region;
``FilePart.kinds`` and ``add_missing`` tell a rank about states that only other ranks
have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import is_absent
from composable_fsdp.optim.original_view import over_originals
from composable_fsdp.optim.own_state_dict import plain_values
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.storage.contents import (
    Contents,
    HeldParam,
    HeldRegion,
    HeldTensor,
    named,
    not_in_module,
    require_readable,
)
from composable_fsdp.storage.cuts import StateForms, cut_parts, is_whole
from composable_fsdp.storage.file_part import (
    FilePart,
    Kinds,
    RegionPart,
    SinglePart,
    StateKey,
)
from composable_fsdp.storage.manifest import Json, Slot, require_storable
from composable_fsdp.storage.rng import rng_state
from composable_fsdp.storage.same_on_ranks import RankValues, hash_tensors, text_of
from composable_fsdp.storage.selection import ALL, Patterns, Selection, matcher
from composable_fsdp.storage.stateful import states_of
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece, of_tensor, shard_pieces

Groups = list[tuple[Any, dict[str, Any]]]
"""All param groups, each as (optimizer, group)."""

_MEMBERS = ("params", "param_names")
"""The keys of a group that list parameters; all others are options."""


def add_missing(part: FilePart, pieces: list[Piece], told: Iterable[Kinds]) -> None:
    """Add entries of zeros for states of regions that only other ranks have.

    Args:
        part: the part of this rank, changed in place.
        pieces: the entries of this rank's file; new entries are appended.
        told: ``FilePart.kinds`` of all ranks.

    Collective: none.
    """
    # This rank has no element of the parameters with such a state, so zeros lose
    # nothing. If this rank has elements, the slots stay empty here, and ``merge``
    # raises.
    everyone: Kinds = {}
    for kinds in told:
        for region, states in kinds.items():
            everyone.setdefault(region, {}).update(states)
    for own in part.regions:
        for (name, kind), dtype in everyone[own.unit, own.index].items():
            if (name, kind) in own.states:
                continue
            entry = f"{own.key}.{name}"
            # A state of the same name and another dtype already has an entry with this
            # key.
            if entry in part.tensors:
                entry = f"{entry}.{dtype}"
            numel = own.shard_numel
            own.states[name, kind] = dtype, (), entry
            # ``make`` has already listed the other entries in ``part.tensors``.
            part.tensors[entry] = dtype, (numel,)
            pieces.append(
                Piece(entry, dtype, (numel,), partial(_state_pieces, [], numel, dtype))
            )


class PartMaker:
    """Collects the pieces and the description of the part of this rank."""

    def __init__(
        self,
        contents: Contents,
        selection: Selection = ALL,
        local: Patterns = None,
        *,
        is_first: bool,
        is_alone: bool,
    ) -> None:
        self.contents, self.is_first, self.is_alone = contents, is_first, is_alone
        # Names and ids of all are still needed: the optimizer may hold
        # parameters that are left out of the checkpoint.
        self.chosen = selection.of_contents(contents)
        self._is_local_name = matcher(local, "local")
        self.pieces: list[Piece] = []
        self.part = FilePart()
        self.told = RankValues()
        """What this rank tells of the values that rank 0 alone saves."""

    def make(
        self,
        optims: Sequence[torch.optim.Optimizer],
        extra: Any,
        per_rank: dict[str, Any] | None = None,
    ) -> tuple[FilePart, list[Piece]]:
        """Return the description and the pieces of this rank.

        Scalars are read now; the elements of other tensors are read when the file is
        written.

        Args:
            optims: the optimizers.
            extra: the values that rank 0 saves for all ranks.
            per_rank: the values that each rank saves. Default None: no values.

        Raises: TypeError, for a value that ``extra`` or the optimizer may not hold;
        CheckpointError, for tensors that cannot be stored.
        Collective: none.
        """
        for each in optims:
            # State that was loaded before the optimizer's first step is taken up.
            install_optimizer_hooks(each)
        groups = [
            (each, group)
            for each in map(over_originals, optims)
            for group in each.param_groups
        ]
        states = self._optimizer_states(groups)
        # Every rank encodes ``extra``, although only rank 0's is saved: a value that
        # cannot be stored raises, whichever rank passes the value.
        encoded = encode(states_of(extra, "extra"), "extra", self._put)
        if per_rank is not None:
            own = states_of(per_rank, "per_rank")
            self.part.per_rank = encode(own, "per_rank", partial(self._put, keep=True))
        for name, module in self.chosen.own_states.items():
            state, is_local = module.get_extra_state(), self._is_local_name(name)
            if not self.is_alone and not is_local:
                self.told.buffers[name] = text_of(state, name)
            # Rank 0 alone keeps shared values.
            put = partial(self._put, keep=is_local)
            target = self.part.local if is_local else self.part
            target.own_states[name] = encode(state, name, put, python_values=True)
        shared = [held for held in self.chosen.tensors if not self._is_local(held)]
        # To hash the tensors takes time, and a single rank has nothing to compare.
        if not self.is_alone:
            hash_tensors(shared, self.told)
            if self.chosen is not self.contents:
                params = (p for held in self.chosen.regions for p in held.params)
                self.told.chosen = {param.names[0]: "chosen" for param in params}
            self._tell_states(shared, states)
            self._tell_options(groups)
        self._local(states, groups if optims else None)
        for held in self.chosen.regions:
            # All replicas hold equal shards, so the first replica alone writes them.
            if not held.handle.groups.in_first_replica:
                continue
            if is_whole(held):
                self._region(held, states)
                continue
            forms = StateForms(_is_elementwise, self._value, text_of)
            for cut, pieces in cut_parts(held, states, forms):
                self.part.cuts.append(cut)
                self.pieces += pieces
        if self.is_first:
            self.part.extra = encoded
            for tensor in shared:
                self.part.singles.append(self._single(tensor, states))
            if optims:
                self.part.param_groups = self._param_groups(groups, local=False)
        # Random states differ between ranks, so each rank keeps these loose
        # tensors.
        self.part.rng = encode(rng_state(), "rng", partial(self._put, keep=True))
        for piece in self.pieces:
            self.part.tensors[piece.key] = (piece.dtype, piece.shape)
        return self.part, self.pieces

    def _optimizer_states(self, groups: Groups) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter, by the ``id`` of the parameter."""
        known = named(self.contents)
        found: dict[int, dict[str, Any]] = {}
        for g, (optim, group) in enumerate(groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise not_in_module(parameter, g, i, "saved")
                # ``get`` and not ``[]``: ``optim.state`` is a defaultdict, and a read
                # must not add a key.
                state = optim.state.get(parameter, {})
                if state:
                    found[id(parameter)] = plain_values(optim, state)
                    name = known[id(parameter)].names[0]
                    for key, value in found[id(parameter)].items():
                        if isinstance(value, Tensor):
                            require_readable(value, f"{name} (state {key!r})", "save")
        return found

    def _is_local(self, held: HeldParam | HeldTensor) -> bool:
        """Return whether each rank saves its own values; a tied tensor by any name."""
        return any(map(self._is_local_name, held.names))

    def _local(self, states: dict[int, dict[str, Any]], groups: Groups | None) -> None:
        """Collect the values of this rank alone; take scalars out of ``states``."""
        own = self.part.local
        for held in self.chosen.each():
            name, found = held.names[0], states.get(id(held.tensor), {})
            if not self._is_local(held):
                continue
            if isinstance(held, HeldTensor):
                own.singles.append(self._single(held, states))
                continue
            # As for a region: state without an element here need not be up to date.
            if is_absent(held.ref.leaf):
                continue
            # A new dict: the present one may be the optimizer's own.
            kept = states[id(held.tensor)] = {}
            for key, value in found.items():
                # Elements are cut over ranks, and no rank has them for itself.
                if _is_elementwise(key, value, held.ref.leaf, name):
                    kept[key] = value
                else:
                    told = self._value(key, value, name)
                    own.values.setdefault(name, {})[key] = told
        if groups is not None:
            own.param_groups = self._param_groups(groups, local=True) or None

    def _tell_states(
        self, shared: Sequence[HeldTensor], states: dict[int, dict[str, Any]]
    ) -> None:
        """Add the optimizer state of parameters in no unit to ``told``."""
        for held in shared:
            for key, value in states.get(id(held.tensor), {}).items():
                where = f"{held.names[0]} (state {key!r})"
                self.told.parameters[where] = text_of(value, where)

    def _tell_options(self, groups: Groups) -> None:
        """Add the options of each parameter to ``told``."""
        known = named(self.chosen)
        for g, (_, group) in enumerate(groups):
            # The order of names is the rank's own.
            options = {k: v for k, v in group.items() if k not in _MEMBERS}
            text = text_of(options, f"param_groups[{g}]")
            for parameter in group["params"]:
                held = known.get(id(parameter))
                if held is not None and not self._is_local(held):
                    self.told.options[held.names[0]] = text

    def _param_groups(self, groups: Groups, *, local: bool) -> list[Json]:
        """Return the options of all groups as JSON, with the parameters by name.

        Only of parameters whose options each rank saves for itself, or of all others.
        """
        known = {
            key: held
            for key, held in named(self.chosen).items()
            if self._is_local(held) == local
        }
        result = []
        for g, (_, group) in enumerate(groups):
            options = {k: v for k, v in group.items() if k != "params"}
            held = [known.get(id(p)) for p in group["params"]]
            members = [each.names[0] for each in held if each is not None]
            # A group whose parameters are all left out has nothing to come back to.
            if not members and (held or local):
                continue
            # Names of parameters that are left out would not be in the model.
            if "param_names" in options:
                pairs = zip(options["param_names"], held, strict=True)
                options["param_names"] = [n for n, each in pairs if each is not None]
            put = partial(self._put, keep=local)
            encoded = encode(options, f"param_groups[{g}]", put, python_values=True)
            # ``encode`` writes a dict with other keys as pairs, and ``params`` cannot
            # be added to pairs.
            if "$dict" in encoded or "$map" in encoded:
                raise TypeError(
                    f"param_groups[{g}] has an option whose name starts with '$' or is "
                    "no text; rename it."
                )
            result.append({**encoded, "params": members})
        return result

    def _put(self, tensor: Tensor, where: str, *, keep: bool = False) -> int:
        """Add a loose tensor and return the index, for ``encode``.

        Only rank 0 keeps loose tensors, unless ``keep`` says that each rank has values
        of its own. The index on a rank that does not keep the tensor is never used.
        """
        require_storable(tensor.dtype, where)
        if self.is_first or keep:
            key = f"loose.{len(self.part.loose)}"
            self.part.loose.append(key)
            self.pieces.append(of_tensor(key, tensor))
        return len(self.part.loose) - 1

    def _region(self, held: HeldRegion, states: dict[int, dict[str, Any]]) -> None:
        """Add entries and description of a region and of the optimizer state."""
        layout, region = held.region.layout, held.region
        first = held.params[0].names[0] if held.params else ""
        require_storable(layout.dtype, quoted(first))
        key = f"region.{held.unit}.{held.index}"
        numel = (layout.shard_numel,)
        self.pieces.append(Piece(key, layout.dtype, numel, lambda: [region.shard]))
        part = RegionPart(
            held.unit,
            held.index,
            region.rank,
            layout.world_size,
            layout.dtype,
            layout.shard_numel,
            first,
            key,
            {},
        )
        self.part.regions.append(part)
        members: dict[StateKey, list[tuple[int, int, Tensor]]] = {}
        for i, param in enumerate(held.params):
            # This rank has no element of the parameter, so an optimizer need not keep
            # the state here up to date. A rank with elements writes the state.
            if i in region.absent:
                continue
            ref, fqn = param.ref, param.names[0]
            holders = layout.holders(ref.slot)
            for name, value in states.get(id(ref.leaf), {}).items():
                # An entry has a single dtype, so parameters whose states differ in
                # dtype get separate entries of the region.
                if _is_elementwise(name, value, ref.leaf, fqn):
                    state = (name, str(value.dtype))
                    members.setdefault(state, []).append((i, ref.offset, value))
                    continue
                if len(holders) > 1:
                    # ``merge`` compares the texts: the checkpoint has a single value.
                    where = f"optimizer state {name!r} of {quoted(fqn)}"
                    part.shared.setdefault(i, {})[name] = text_of(value, where)
                if holders[0] == region.rank:
                    told = self._value(name, value, fqn)
                    part.values.setdefault(i, {})[name] = told
        for (name, _), found in members.items():
            dtype = found[0][2].dtype
            require_storable(dtype, f"optimizer state {name!r} of {part.first!r}")
            # The dtype is part of the key only if several entries of the region have
            # the name.
            entry = (
                f"{key}.{name}"
                if len({k for k in members if k[0] == name}) == 1
                else f"{key}.{name}.{dtype}"
            )
            indices = tuple(i for i, _, _ in found)
            part.states[name, str(dtype)] = (dtype, indices, entry)
            pieces = partial(_state_pieces, found, numel[0], dtype)
            self.pieces.append(Piece(entry, dtype, numel, pieces))
        # The values are added by ``merge``: they come from other ranks' parts, too.
        if held.handle.groups.is_first:
            part.slots = tuple(
                Slot(param.names, param.shape, param.ref.slot.offset, {})
                for param in held.params
            )

    def _value(self, name: str, value: Any, fqn: str) -> Json:
        """Encode a state that is not element-wise."""
        where = f"optimizer state {name!r} of {quoted(fqn)}"
        return encode(value, where, partial(self._put, keep=True), python_values=True)

    def _single(
        self, held: HeldTensor, states: dict[int, dict[str, Any]]
    ) -> SinglePart:
        """Add entries of a tensor in no unit and of the state; return the description.

        Raises: CheckpointError, for a dtype that no file holds.
        """
        name = held.names[0]
        require_storable(held.dtype, quoted(name))
        part = SinglePart(held.names, f"tensor.{name}")
        self.pieces.append(of_tensor(part.key, held.tensor, held.dtype))
        for key, value in states.get(id(held.tensor), {}).items():
            if not is_scalar(key, value, held.tensor.shape):
                require_storable(value.dtype, f"optimizer state {key!r} of {name!r}")
                part.states[key] = f"tensor.{name}.{key}"
                self.pieces.append(of_tensor(part.states[key], value))
            else:
                part.values[key] = self._value(key, value, name)
        return part


def _is_elementwise(name: str, value: Any, leaf: Tensor, fqn: str) -> bool:
    """Return whether ``value`` has an element for each element of the shard.

    If not, the state has the same value on all ranks.

    Args:
        name: the name of the state.
        value: the state; need not be a tensor.
        leaf: the sharded parameter.
        fqn: the parameter's name, for messages.

    Raises: CheckpointError, for a tensor that is neither a scalar nor element-wise.
    """
    if is_scalar(name, value, leaf.shape):
        return False
    if value.shape == leaf.shape:
        return True
    raise CheckpointError(
        f"Optimizer state {name!r} of {quoted(fqn)} has shape {tuple(value.shape)}; "
        f"expected a number or the shape of this rank's shard, {tuple(leaf.shape)}. "
        "State that is not element-wise, or was made before fully_shard, cannot be "
        "saved in shards: use an element-wise optimizer, and make it hold state only "
        "after fully_shard."
    )


def _state_pieces(
    found: list[tuple[int, int, Tensor]], shard_numel: int, dtype: torch.dtype
) -> Iterator[Tensor | int]:
    """Yield the elements of a state's shard, with zeros for all other parameters."""
    parts = ((at, value) for _, at, value in found)
    return shard_pieces(parts, shard_numel, dtype.itemsize)
