"""Collects the part of a checkpoint that a rank writes: entries and their description.

::

    shard of a region                 written by the replicas in parts, or by turns
    slots of a region                 described by the writer of its first elements
    parameter that is a DTensor       written by the first rank with the same elements
    state that is not element-wise    written by the first rank with elements of the
                                      parameter
    large parameter in no unit        written by the ranks by turns
    other tensor, extra, options      written by rank 0 of the save

Rank 0 of the save merges the descriptions and the places of the entries (``merge``). A
rank writes each state that any rank has for parameters of a region;
``PartMaker.kinds`` and ``add_missing`` tell a rank about states that only other ranks
have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
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
    is_elementwise,
    named,
    not_in_module,
    readable_state,
)
from composable_fsdp.storage.cuts import StateForms, cut_parts, is_whole
from composable_fsdp.storage.expert_names import experts_in
from composable_fsdp.storage.file_part import (
    FilePart,
    Kinds,
    SinglePart,
)
from composable_fsdp.storage.manifest import Json, require_storable
from composable_fsdp.storage.mesh_copies import (
    is_first_copy,
    is_first_part,
    stores_loose,
)
from composable_fsdp.storage.region_part import (
    cut_shares,
    kinds_of,
    region_part,
    shares_of,
    tensors_of,
)
from composable_fsdp.storage.same_copies import copied_states
from composable_fsdp.storage.same_on_ranks import (
    RankValues,
    hash_rectangles,
    hash_tensors,
    text_of,
)
from composable_fsdp.storage.selection import ALL, Patterns, Selection, matcher
from composable_fsdp.storage.stateful import rng_state, states_of
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece, of_tensor

Groups = list[tuple[Any, dict[str, Any]]]
"""All param groups, each as (optimizer, group)."""

_MEMBERS = ("params", "param_names")
"""The keys of a group that list parameters; all others are options."""


class PartMaker:
    """Collects the pieces and the description of the part of this rank."""

    def __init__(
        self,
        contents: Contents,
        selection: Selection = ALL,
        local: Patterns = None,
        *,
        ranks: Sequence[int],
        rank: int,
    ) -> None:
        """Choose the tensors to save."""
        self.contents, self._rank, self._ranks = contents, rank, ranks
        self.is_first, self.is_alone = rank == 0, len(ranks) == 1
        # Names and ids of all are still needed: the optimizer may hold
        # parameters that are left out of the checkpoint.
        self.chosen = selection.of_contents(contents)
        self._is_local_name = matcher(local, "local")
        self.pieces: list[Piece] = []
        self.part = FilePart()
        self.told = RankValues()
        """What this rank tells of the values that rank 0 alone saves."""
        self.kinds: Kinds = {}
        """The states of each region that this rank has elements of."""

    def make(
        self,
        optims: Sequence[torch.optim.Optimizer],
        extra: Any,
        per_rank: dict[str, Any] | None = None,
    ) -> tuple[FilePart, list[Piece]]:
        """Return the description and the pieces of this rank.

        Scalars are read now; the elements of other tensors are read when the file is
        written.

        Raises: TypeError, for a value that ``extra`` or the optimizer may not hold;
        CheckpointError, for tensors that cannot be stored.
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
                self.told.own_states[name] = text_of(state, name)
            # Rank 0 alone keeps shared values.
            put = partial(self._put, keep=is_local)
            target = self.part.local if is_local else self.part
            target.own_states[name] = encode(state, name, put, python_values=True)
        shared, loose = self._tensors()
        # A rank's own tensors may be wrapped otherwise on each rank.
        facts = {
            each.name: each.facts
            for each in self.chosen.wrappers
            if not self._is_local_name(each.name)
        }
        # To hash the tensors takes time, and a single rank has nothing to compare.
        experts = experts_in(self.chosen)
        self._tell_experts(experts, groups)
        if not self.is_alone:
            self.told.local = self._local_names()
            hash_tensors(shared, self.told)
            hash_rectangles(loose, self.told)
            self.told.shapes.update(facts)
            if self.chosen is not self.contents:
                params = (p for held in self.chosen.regions for p in held.params)
                names = {param.names[0] for param in params} - experts.keys()
                self.told.chosen = dict.fromkeys(names, "chosen")
            self.told.experts = experts
            self._tell_states(shared, states)
            self._tell_scalars(loose, states)
            self._tell_options(groups)
        self._local(states, groups if optims else None)
        # After the scalars that each rank saves for itself were taken out.
        self.told.copies = copied_states(self.chosen, states, text_of)
        self._regions(states)
        mine = [each for each in loose if stores_loose(each.tensor, self._ranks[0])]
        self._cuts(mine, states)
        for number, tensor in tensors_of(shared, self._rank, len(self._ranks)):
            self.part.singles.append(self._single(tensor, states, number))
        if self.is_first:
            self.part.wrappers = facts
            self.part.extra = encoded
            if optims:
                self.part.param_groups = self._param_groups(groups, local=False)
        # Random states differ between ranks, so each rank keeps these loose
        # tensors.
        self.part.rng = encode(rng_state(), "rng", partial(self._put, keep=True))
        for piece in self.pieces:
            self.part.tensors[piece.key] = (piece.dtype, piece.shape)
        return self.part, self.pieces

    def _tensors(self) -> tuple[list[HeldTensor], list[HeldTensor]]:
        """Return the tensors in no unit that all ranks have, and those with rectangles.

        Raises: CheckpointError, for a DTensor that each rank is to save for itself.
        """
        shared, loose = [], []
        for held in self.chosen.tensors:
            if held.rectangle is None:
                if not self._is_local(held):
                    shared.append(held)
                continue
            if self._is_local(held):
                raise CheckpointError(
                    f"{quoted(held.names[0])} is a DTensor, of which each rank holds a "
                    "part; local=[..] expects names of tensors that are whole on a "
                    "rank. Nothing was written. Leave the name out of local."
                )
            loose.append(held)
        return shared, loose

    def _regions(self, states: dict[int, dict[str, Any]]) -> None:
        """Add this rank's shares of regions, and of parameters stored alone."""
        regions, groups = self.chosen.regions, self.contents.mesh_groups
        for held, share in shares_of(regions):
            # Copies of tensor parallelism hold equal shards, and the first writes.
            if is_first_copy(held.handle, None, groups):
                part, pieces = region_part(held, share, states, self._value)
                self.part.regions.append(part)
                self.pieces += pieces
        for held in cut_shares(regions):
            self._cuts(self._first_copies(held), states)
        whole = [held for held in regions if is_whole(held)]
        # Without replicas, the entries of this rank say the same.
        if any(held.handle.groups.replicas > 1 for held in whole):
            self.kinds = kinds_of(whole, states)
        else:
            self.kinds = self.part.kinds()

    def _first_copies(self, held: HeldRegion) -> Iterator[HeldParam]:
        """Yield the parameters of a region whose elements this rank stores."""
        for param in held.params:
            # Parameters of a region may be cut over other ranks each.
            form, groups = param.ref.form, self.contents.mesh_groups
            # An empty parameter is on all ranks of the unit.
            is_here = prod(param.shape) > 0 or is_first_part(held.handle, form)
            if is_here and is_first_copy(held.handle, form, groups):
                yield param

    def _cuts(
        self, params: Iterable[HeldParam | HeldTensor], states: dict[int, Any]
    ) -> None:
        """Add the entries and the description of parameters that are stored alone."""
        forms = StateForms(is_elementwise, self._value, text_of)
        for cut, pieces in cut_parts(params, states, forms):
            self.part.cuts.append(cut)
            self.pieces += pieces

    def _optimizer_states(self, groups: Groups) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter, by the ``id`` of the parameter."""
        known = named(self.contents)
        wrappers = {id(each.tensor) for each in self.contents.wrappers}
        found: dict[int, dict[str, Any]] = {}
        for g, (optim, group) in enumerate(groups):
            for i, parameter in enumerate(group["params"]):
                # ``get`` and not ``[]``: ``optim.state`` is a defaultdict, and a read
                # must not add a key.
                state = optim.state.get(parameter, {})
                # A quantized weight is frozen, and optimizers may hold it idly.
                if id(parameter) in wrappers and not state:
                    continue
                if id(parameter) not in known:
                    raise not_in_module(parameter, g, i, "saved")
                if state:
                    held, plain = known[id(parameter)], plain_values(optim, state)
                    found[id(parameter)] = {
                        key: readable_state(value, held, key)
                        for key, value in plain.items()
                    }
        return found

    def _is_local(self, held: HeldParam | HeldTensor) -> bool:
        """Return whether each rank saves its own values; a tied tensor by any name."""
        return any(map(self._is_local_name, held.names))

    def _local_names(self) -> dict[str, str]:
        """Return the names of tensors and extra states that each rank saves."""
        held = [each.names[0] for each in self.chosen.tensors if self._is_local(each)]
        own = [name for name in self.chosen.own_states if self._is_local_name(name)]
        return dict.fromkeys((*held, *own), "local")

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
                if is_elementwise(key, value, held.ref.leaf, name):
                    kept[key] = value
                else:
                    told = self._value(key, value, name)
                    own.values.setdefault(name, {})[key] = told
        if groups is not None:
            own.param_groups = self._param_groups(groups, local=True) or None

    def _tell_experts(self, experts: dict[str, int], groups: Groups) -> None:
        """Add the optimizer's groups of this rank's experts to the description."""
        # Other ranks hold other experts, of which rank 0 alone cannot know.
        if not experts:
            return
        known = named(self.chosen)
        for g, (_, group) in enumerate(groups):
            held = [known.get(id(p)) for p in group["params"]]
            names = [each.names[0] for each in held if each is not None]
            own = [name for name in names if name in experts]
            if own:
                self.part.experts[g] = own
                options = {k: v for k, v in group.items() if k not in _MEMBERS}
                where = f"param_groups[{g}]"
                self.told.options[where] = text_of(options, where)

    def _tell_states(
        self, shared: Sequence[HeldTensor], states: dict[int, dict[str, Any]]
    ) -> None:
        """Add the optimizer state of parameters in no unit to ``told``."""
        for held in shared:
            for key, value in states.get(id(held.tensor), {}).items():
                where = f"{held.names[0]} (state {key!r})"
                self.told.parameters[where] = text_of(value, where)

    def _tell_scalars(
        self, loose: Sequence[HeldTensor], states: dict[int, dict[str, Any]]
    ) -> None:
        """Add the scalar state of DTensors in no unit to ``told``."""
        # One of the ranks with copies of a rectangle stores it, and tells the scalars.
        for held in loose:
            for key, value in states.get(id(held.tensor), {}).items():
                if not is_elementwise(key, value, held.leaf, held.names[0]):
                    where = f"{held.names[0]} (state {key!r})"
                    self.told.rectangles[where] = text_of(value, where)

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
            if not local:
                self.part.group_numbers.append(g)
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

    def _value(self, name: str, value: Any, fqn: str) -> Json:
        """Encode a state that is not element-wise."""
        where = f"optimizer state {name!r} of {quoted(fqn)}"
        return encode(value, where, partial(self._put, keep=True), python_values=True)

    def _single(
        self, held: HeldTensor, states: dict[int, dict[str, Any]], number: int = 0
    ) -> SinglePart:
        """Add entries of a tensor in no unit and of the state; return the description.

        ``number`` is the place in the order of all such tensors of the save.

        Raises: CheckpointError, for a dtype that no file holds.
        """
        name = held.names[0]
        require_storable(held.dtype, quoted(name))
        part = SinglePart(held.names, f"tensor.{name}", number)
        self.pieces.append(of_tensor(part.key, held.tensor, held.dtype))
        for key, value in states.get(id(held.tensor), {}).items():
            if not is_scalar(key, value, held.tensor.shape):
                require_storable(value.dtype, f"optimizer state {key!r} of {name!r}")
                part.states[key] = f"tensor.{name}.{key}"
                self.pieces.append(of_tensor(part.states[key], value))
            else:
                part.values[key] = self._value(key, value, name)
        return part
