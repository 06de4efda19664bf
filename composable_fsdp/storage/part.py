"""Collects the part of a checkpoint that a rank writes: entries and their description.

::

    parameter of a unit            the elements of this rank; of replicas, each writes
                                   a part of a large shard, and small regions by turns
    parameter that is a DTensor    written by the first rank with the same elements
    large parameter in no unit     written by the ranks by turns
    other tensor, extra, options   written by rank 0 of the save

Every rank computes who writes what from layouts, sizes and numbers of ranks, which are
equal on all ranks; nothing is sent. Rank 0 of the save merges the descriptions and the
places of the entries (``merge``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.optim.names import is_absent
from composable_fsdp.optim.original_view import over_originals
from composable_fsdp.optim.own_state_dict import plain_values
from composable_fsdp.optim.scalars import is_scalar
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.storage.codec import Json, require_storable
from composable_fsdp.storage.contents import (
    Contents,
    Held,
    HeldParam,
    HeldRegion,
    is_elementwise,
    named,
    not_in_module,
    readable_state,
)
from composable_fsdp.storage.merge import FilePart, TensorPart
from composable_fsdp.storage.mesh_copies import (
    is_first_copy,
    is_first_part,
    stores_loose,
)
from composable_fsdp.storage.same_on_ranks import (
    no_facts,
    tell_copies,
    tell_rectangles,
    tell_shards,
    tell_tensors,
    text_of,
)
from composable_fsdp.storage.save_parts import by_turns, writers_of
from composable_fsdp.storage.selection import ALL, Patterns, Selection, matcher
from composable_fsdp.storage.stateful import rng_state, states_of
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece, of_tensor

Groups = list[tuple[Any, dict[str, Any]]]
"""All param groups, each as (optimizer, group)."""

SMALL = 1 << 20
"""Tensors in no unit of fewer bytes are written by rank 0, beside each other."""
Stored = tuple[Held, int, int]
"""A tensor, and elements ``[low, high)`` of those that this rank holds."""
States = dict[int, dict[str, Any]]
"""The optimizer state of each parameter, by the ``id`` of the parameter."""

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
        self.facts = no_facts()
        """What this rank tells of the values that rank 0 alone saves."""

    def make(
        self,
        optims: Sequence[torch.optim.Optimizer],
        extra: Any,
        per_rank: dict[str, Any] | None = None,
    ) -> tuple[FilePart, list[Piece]]:
        """Return the description and the pieces of this rank."""
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
                self.facts["own_states"][name] = text_of(state, name)
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
            self.facts["local"] = dict.fromkeys(self._local_names())
            tell_tensors(shared, self.facts)
            tell_rectangles(loose, self.facts)
            tell_shards(self.chosen.states, self.facts)
            self.facts["shapes"].update(facts)
            if self.chosen is not self.contents:
                params = (p for held in self.chosen.regions for p in held.params)
                names = {param.names[0] for param in params} - experts.keys()
                self.facts["chosen"] = dict.fromkeys(names, "chosen")
            self.facts["experts"] = experts
            self._tell_states([*shared, *loose], states)
            self._tell_options(groups)
        self._local(states, groups if optims else None)
        # After the scalars that each rank saves for itself were taken out.
        tell_copies(self.chosen, states, self.facts)
        for number, (held, low, high) in self._stored(shared, loose):
            part = self._part_of(held, low, high, states, number)
            self.part.tensors.append(part)
        if self.is_first:
            self.part.wrappers = facts
            self.part.extra = encoded
            if optims:
                self.part.param_groups = self._param_groups(groups, local=False)
        # Random states differ between ranks, so each rank keeps these loose
        # tensors.
        self.part.rng = encode(rng_state(), "rng", partial(self._put, keep=True))
        return self.part, self.pieces

    def _tensors(self) -> tuple[list[Held], list[Held]]:
        """Return the tensors in no unit: those that all ranks have, and DTensors."""
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

    def _stored(
        self, shared: Sequence[Held], loose: Sequence[Held]
    ) -> Iterator[tuple[int, Stored]]:
        """Yield what this rank stores, with the place in the order of the model."""
        names = (held.names[0] for held in self.chosen.each())
        order = {name: i for i, name in enumerate(names)}
        mine = [each for each in loose if stores_loose(each.tensor, self._ranks[0])]
        mine += tensors_of(shared, self._rank, len(self._ranks))
        found = [(held, 0, held.local.numel()) for held in mine]
        for stored in (*self._of_units(), *found):
            yield order[stored[0].names[0]], stored

    def _of_units(self) -> Iterator[Stored]:
        """Yield the parameters of units of which this rank stores elements."""
        groups = self.contents.mesh_groups
        for held, start, stop in shares_of(self.chosen.regions):
            for param in held.params:
                form, offset = param.ref.form, param.ref.offset
                first, last = param.interval
                low = max(0, start - offset)
                high = min(last - first, stop - offset)
                is_here = low < high
                # An empty parameter is on all ranks of the unit.
                if not prod(param.shape):
                    low = high = 0
                    is_here = not start and is_first_part(held.handle, form)
                # Copies of tensor parallelism hold equal values, and the first writes.
                if is_here and is_first_copy(held.handle, form, groups):
                    yield param, low, high

    def _part_of(
        self,
        held: Held,
        low: int,
        high: int,
        states: States,
        number: int = 0,
    ) -> TensorPart:
        """Add the entries of elements of a tensor; return the description."""
        name, rectangle, (start, stop) = held.names[0], held.rectangle, held.interval
        require_storable(held.dtype, quoted(name))
        # In the whole tensor where possible: a load on another mesh reads intervals.
        if rectangle is not None:
            rectangle, start, stop = rectangle.moved(start, stop)
        # No rank holds elements of an empty tensor, and no rectangle is needed.
        if not prod(held.shape):
            rectangle, start = None, 0
        span = start + low, start + high
        part = TensorPart(held.names, held.dtype, held.shape, *span, number, rectangle)
        self._add(part, None, held.dtype, held.local, low)
        for key, value in states.get(id(held.tensor), {}).items():
            where = f"optimizer state {key!r} of {quoted(name)}"
            if _has_elements(key, value, held):
                require_storable(value.dtype, where)
                part.states[key] = value.dtype
                self._add(part, key, value.dtype, value, low)
                continue
            # Ranks with other elements must tell the same.
            if not part.is_whole:
                part.shared[key] = text_of(value, where)
            # Once, because each loose tensor of the manifest has a single use.
            if not part.start and not any(part.offset):
                part.values[key] = self._value(key, value, name)
        return part

    def _add(
        self,
        part: TensorPart,
        state: str | None,
        dtype: torch.dtype,
        values: Tensor,
        low: int,
    ) -> None:
        """Add the entry of the elements of a part, from ``low`` on in ``values``."""
        numel = part.stop - part.start
        shape = part.shape if part.is_whole else (numel,)

        def elements() -> list[Tensor]:
            given = values.detach()
            # Most are whole, and need no view.
            if given.numel() != numel:
                given = given.reshape(-1)[low : low + numel]
            # Read when the file is written, and cast as late: mixed precision may hold
            # a tensor in another dtype than the checkpoint.
            return [given.to(dtype)]

        self.pieces.append(Piece(part.key(state), dtype, shape, elements))

    def _optimizer_states(self, groups: Groups) -> States:
        """Return the state of each parameter, by the ``id`` of the parameter."""
        known = named(self.contents)
        wrappers = {id(each.tensor) for each in self.contents.wrappers}
        found: States = {}
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

    def _is_local(self, held: Held) -> bool:
        """Return whether each rank saves its own values; a tied tensor by any name."""
        return any(map(self._is_local_name, held.names))

    def _local_names(self) -> list[str]:
        """Return the names of tensors and extra states that each rank saves."""
        held = [each.names[0] for each in self.chosen.tensors if self._is_local(each)]
        own = [name for name in self.chosen.own_states if self._is_local_name(name)]
        return [*held, *own]

    def _local(self, states: States, groups: Groups | None) -> None:
        """Collect the values of this rank alone; take scalars out of ``states``."""
        own = self.part.local
        for held in self.chosen.each():
            name, found = held.names[0], states.get(id(held.tensor), {})
            if not self._is_local(held):
                continue
            if not isinstance(held, HeldParam):
                count = held.local.numel()
                own.tensors.append(self._part_of(held, 0, count, states))
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
                self.facts["options"][where] = text_of(options, where)

    def _tell_states(self, held: Sequence[Held], states: States) -> None:
        """Add the optimizer state of parameters in no unit to the facts."""
        for each in held:
            for key, value in states.get(id(each.tensor), {}).items():
                name, kind = each.names[0], "parameters"
                # One of the ranks with copies of a rectangle stores it, and tells the
                # scalars.
                if each.rectangle is not None:
                    if is_elementwise(key, value, each.leaf, name):
                        continue
                    kind = "rectangles"
                where = f"{name} (state {key!r})"
                self.facts[kind][where] = text_of(value, where)

    def _tell_options(self, groups: Groups) -> None:
        """Add the options of each parameter to the facts."""
        known = named(self.chosen)
        for g, (_, group) in enumerate(groups):
            # The order of names is the rank's own.
            options = {k: v for k, v in group.items() if k not in _MEMBERS}
            text = text_of(options, f"param_groups[{g}]")
            for parameter in group["params"]:
                held = known.get(id(parameter))
                if held is not None and not self._is_local(held):
                    self.facts["options"][held.names[0]] = text

    def _param_groups(self, groups: Groups, *, local: bool) -> list[Json]:
        """Return the options of all groups as JSON, with the parameters by name."""
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
        """Add a loose tensor and return the index, for ``encode``."""
        require_storable(tensor.dtype, where)
        if self.is_first or keep:
            key = f"loose.{len(self.part.loose)}"
            self.part.loose[key] = tensor.dtype, tuple(tensor.shape)
            self.pieces.append(of_tensor(key, tensor))
        return len(self.part.loose) - 1

    def _value(self, name: str, value: Any, fqn: str) -> Json:
        """Encode a state that is not element-wise."""
        where = f"optimizer state {name!r} of {quoted(fqn)}"
        return encode(value, where, partial(self._put, keep=True), python_values=True)


def _has_elements(key: str, value: Any, held: Held) -> bool:
    """Return whether a state has an element for each element on this rank."""
    if held.is_cut:
        return is_elementwise(key, value, held.leaf, held.names[0])
    # A tensor that one rank has whole may have state of any shape.
    shape = held.tensor.shape
    return not is_scalar(key, value, shape) and bool(value.shape == shape)


def shares_of(regions: Sequence[HeldRegion]) -> Iterator[tuple[HeldRegion, int, int]]:
    """Yield the elements ``[start, stop)`` of shards that this replica writes."""
    # Of all regions at once: the turns of small regions balance over the model, and
    # each replica finds the same turns.
    layouts = [(held.region.layout, held.handle.groups.replicas) for held in regions]
    for held, writer in zip(regions, writers_of(layouts), strict=True):
        group, numel = held.handle.groups.replicate, held.region.layout.shard_numel
        mine = 0 if group is None else group.rank()
        if writer is None:
            size = -(-numel // held.handle.groups.replicas)
            yield held, min(mine * size, numel), min((mine + 1) * size, numel)
        elif writer == mine:
            yield held, 0, numel


def tensors_of(tensors: Sequence[Held], rank: int, ranks: int) -> list[Held]:
    """Return the tensors in no unit that ``rank`` of a save writes."""
    # The names, shapes and values of these tensors are compared over ranks before a
    # file is written: ranks that would take other turns end with an error.
    # Buffers may differ, and then rank 0's are told to be saved.
    sizes = [
        held.tensor.numel() * held.dtype.itemsize
        if isinstance(held.tensor, nn.Parameter)
        else 0
        for held in tensors
    ]
    # What has no size stays with the first writer.
    writers = by_turns([("", ranks, size if size >= SMALL else 0) for size in sizes])
    return [each for i, each in enumerate(tensors) if writers[i] == rank]


def experts_in(contents: Contents) -> dict[str, int]:
    """Return this rank's experts by name, with the place in the ``expert_mesh``."""
    found: dict[str, int] = {}
    for region in contents.regions:
        # The place and no rank: of a grid of ranks, only a row and a column are known.
        group = region.handle.groups.experts
        if group is not None:
            names = [param.names[0] for param in region.params]
            found.update(dict.fromkeys(names, group.rank()))
    return found
