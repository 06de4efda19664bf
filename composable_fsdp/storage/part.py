"""Collects the part of a checkpoint that a rank writes: entries and their description.

Every rank computes who writes what from values that are equal on all; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.naming import quoted
from composable_fsdp.optim.state_dict_hooks import originals_of
from composable_fsdp.storage.compare import Patterns, Selection, matcher
from composable_fsdp.storage.contents import (
    Contents,
    Held,
    named,
    not_in_module,
    readable_state,
)
from composable_fsdp.storage.manifest import Json, Span, require_storable
from composable_fsdp.storage.merge import Draft, FilePart, TensorPart
from composable_fsdp.storage.same_on_ranks import (
    ONCE,
    PER_RANK,
    no_facts,
    tell_copies,
    tell_shards,
    tell_tensors,
    text_of,
)
from composable_fsdp.storage.save_parts import by_turns, writers_of
from composable_fsdp.storage.stateful import rng_state, states_of
from composable_fsdp.storage.team import Team
from composable_fsdp.storage.tensors import is_first_copy, others_of, stores_loose
from composable_fsdp.storage.values import encode
from composable_fsdp.storage.writer import Piece

SMALL = 1 << 20
"""Tensors in no unit of fewer bytes are written by rank 0, beside each other."""
Stored = tuple[Held, int, int]
"""A tensor, and elements ``[low, high)`` of those that this rank holds."""
States = dict[int, dict[str, Any]]
"""The optimizer state of each parameter, by the ``id`` of the parameter."""
_MEMBERS = ("params", "param_names")


class PartMaker(Draft):
    """Collects the pieces and the description of the part of this rank."""

    def __init__(
        self,
        contents: Contents,
        selection: Selection,
        local: Patterns,
        optims: Sequence[torch.optim.Optimizer],
        team: Team,
    ) -> None:
        super().__init__()
        self._contents, self._rank, self._ranks = contents, team.rank, team.ranks
        self._own = self.part.local = FilePart()
        self._is_local_name = matcher(local, "local")
        # Names and ids of all: the optimizer may hold parameters that are left out.
        self._chosen = selection.of_contents(contents)
        self._optims = [originals_of(each) for each in optims]
        self._groups = [(o, group) for o in self._optims for group in o.param_groups]
        self._states = self._optimizer_states()
        self.facts = no_facts()
        """What this rank tells of the values that rank 0 alone saves."""

    def make(self, extra: Any, per_rank: dict[str, Any] | None = None) -> None:
        """Collect all: scalars are read now, elements when the file is written."""
        part, chosen = self.part, self._chosen
        # On every rank: a value that cannot be stored raises, whoever passes it.
        encoded = encode(states_of(extra, "extra"), "extra", self._put_once)
        if per_rank is not None:
            own = states_of(per_rank, "per_rank")
            part.per_rank = encode(own, "per_rank", self.put)
        self._own_states()
        shared = [each for each in chosen.tensors if not self._is_local(each)]
        # A rank's own tensors may be wrapped otherwise on each rank.
        wrappers = {
            each.name: each.facts
            for each in chosen.wrappers
            if not self._is_local_name(each.name)
        }
        self._tell_options()
        if len(self._ranks) > 1:
            self._tell(shared, wrappers)
        self._local()
        tell_copies(chosen, self._states, self.facts)
        order = {held.names[0]: i for i, held in enumerate(chosen.each())}
        for held, low, high in (*self._of_units(), *self._in_no_unit(shared)):
            part.tensors.append(self._part_of(held, low, high, order[held.names[0]]))
        if self._rank == 0:
            part.wrappers, part.extra = wrappers, encoded
            if self._optims:
                part.param_groups = self._param_groups(local=False)
        part.rng = encode(rng_state(), "rng", self.put)

    def _own_states(self) -> None:
        """Add the extra states of modules, which are shared or of each rank."""
        for name, module in self._chosen.own_states.items():
            state, is_local = module.get_extra_state(), self._is_local_name(name)
            self.facts["local"][name] = PER_RANK if is_local else ONCE
            if not is_local and len(self._ranks) > 1:
                self.facts["own_states"][name] = text_of(state, name)
            put = self.put if is_local else self._put_once
            target = self._own if is_local else self.part
            target.own_states[name] = encode(state, name, put, python_values=True)

    def _is_local(self, held: Held) -> bool:
        """Return whether each rank saves its own values; a tied tensor by any name."""
        # Elements that are cut over ranks are no rank's own.
        return not held.is_cut and any(map(self._is_local_name, held.names))

    def _in_no_unit(self, shared: Sequence[Held]) -> Iterator[Stored]:
        """Yield the tensors in no unit that this rank stores."""
        whole = [each for each in shared if not each.is_cut]
        # All ranks take the same turns. Buffers may differ: rank 0's are saved.
        sizes = [each.local.nbytes if each.is_parameter else 0 for each in whole]
        ranks = len(self._ranks)
        turns = by_turns([("", ranks, size if size >= SMALL else 0) for size in sizes])
        mine = [each for each, i in zip(whole, turns, strict=True) if i == self._rank]
        first = self._ranks[0]
        cut = [e for e in shared if e.is_cut and stores_loose(e.tensor, first)]
        for each in (*cut, *mine):
            yield each, 0, each.local.numel()

    def _of_units(self) -> Iterator[Stored]:
        """Yield the parameters of units of which this rank stores elements."""
        regions, mesh = self._chosen.regions, self._contents.mesh_groups
        # Of all regions at once: the turns of small ones balance over the model.
        refs = [held.ref for held in regions]
        layouts = [(ref.region.layout, ref.handle.groups.replicas) for ref in refs]
        for held, writer in zip(regions, writers_of(layouts), strict=True):
            groups, numel = held.ref.handle.groups, held.ref.region.layout.shard_numel
            mine = 0 if groups.replicate is None else groups.replicate.rank()
            # The elements ``[start, stop)`` of the shard that this replica writes.
            start, stop = 0, numel if writer == mine else 0
            if writer is None:
                size = -(-numel // groups.replicas)
                start, stop = mine * size, min((mine + 1) * size, numel)
            for param in held.params:
                low = max(0, start - param.ref.offset)
                high = min(param.span.numel, stop - param.ref.offset)
                is_here = low < high
                # An empty parameter is on all ranks of the unit.
                if not prod(param.shape) and writer in (None, mine):
                    low = high = 0
                    others = param.ref.form.cut_over
                    is_first = groups.rank == 0 and all(g.rank() == 0 for g in others)
                    is_here = not start and is_first
                if is_here and is_first_copy(others_of(param.ref), mesh):
                    yield param, low, high

    def _part_of(self, held: Held, low: int, high: int, number: int = 0) -> TensorPart:
        """Add the entries of elements of a tensor; return the description."""
        name = held.names[0]
        require_storable(held.dtype, quoted(name))
        # No rank holds elements of an empty tensor, and no rectangle is needed.
        span = held.span.part(low, high) if prod(held.shape) else Span(0, 0)
        part = TensorPart(held.names, held.dtype, held.shape, span, number)
        self._add(part, None, held.dtype, held.local, low)
        for key, value in self._states.get(id(held.tensor), {}).items():
            where = f"optimizer state {key!r} of {quoted(name)}"
            if held.has_elements(key, value):
                require_storable(value.dtype, where)
                part.states[key] = value.dtype
                self._add(part, key, value.dtype, value, low)
                continue
            if not part.is_whole:
                part.shared[key] = text_of(value, where)
            # Once, because each loose tensor of the manifest has a single use.
            if not span.start and not any(part.offset):
                part.values[key] = self.value(key, value, name)
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
        numel = part.span.numel
        shape = part.shape if part.is_whole else (numel,)

        def elements() -> list[Tensor]:
            given = values.detach()
            if given.numel() != numel:
                given = given.reshape(-1)[low : low + numel]
            # Cast as late as this: mixed precision may hold it in another dtype.
            return [given.to(dtype)]

        self.pieces.append(Piece(dtype, shape, part.key(state), elements))

    def _optimizer_states(self) -> States:
        """Return the state of each parameter, by the ``id`` of the parameter."""
        known = named(self._contents)
        wrappers = {id(each.tensor) for each in self._contents.wrappers}
        found: States = {}
        for g, (optim, group) in enumerate(self._groups):
            for i, parameter in enumerate(group["params"]):
                state = optim.plain_state_of(parameter)
                # A quantized weight is frozen, and optimizers may hold it idly.
                if id(parameter) in wrappers and not state:
                    continue
                if id(parameter) not in known:
                    raise not_in_module(parameter, g, i, "saved")
                if state:
                    held = known[id(parameter)]
                    found[id(parameter)] = {
                        key: readable_state(value, held, key)
                        for key, value in state.items()
                    }
        return found

    def _local(self) -> None:
        """Collect the values of this rank alone."""
        own = self._own
        for held in filter(self._is_local, self._chosen.tensors):
            own.tensors.append(self._part_of(held, 0, held.local.numel()))
        if self._optims:
            own.param_groups = self._param_groups(local=True) or None

    def _tell(self, shared: Sequence[Held], wrappers: dict[str, str]) -> None:
        """Tell what is saved once of tensors, which other ranks must have alike."""
        facts, chosen = self.facts, self._chosen
        local = filter(self._is_local, chosen.tensors)
        facts["local"].update({held.names[0]: PER_RANK for held in local})
        tell_tensors(shared, facts)
        tell_shards(chosen.states, facts)
        facts["shapes"].update(wrappers)
        if chosen is not self._contents:
            names = (param.names[0] for param in chosen.params())
            facts["chosen"] = dict.fromkeys(names, "chosen")
        for each in shared:
            for key, value in self._states.get(id(each.tensor), {}).items():
                kind = "rectangles" if each.is_cut else "parameters"
                # One of the ranks with copies of a rectangle stores its elements.
                if not each.is_cut or not each.has_elements(key, value):
                    where = f"{each.names[0]} (state {key!r})"
                    facts[kind][where] = text_of(value, where)

    def _tell_options(self) -> None:
        """Tell the options of each parameter."""
        known = named(self._chosen)
        for g, (_, group) in enumerate(self._groups):
            options = {k: v for k, v in group.items() if k not in _MEMBERS}
            text = text_of(options, f"param_groups[{g}]")
            for each in (known[id(p)] for p in group["params"] if id(p) in known):
                if not self._is_local(each):
                    self.facts["options"][each.names[0]] = text

    def _param_groups(self, *, local: bool) -> dict[int, Json]:
        """Return the options of groups as JSON, by number, with names of parameters."""
        known = {
            key: held
            for key, held in named(self._chosen).items()
            if self._is_local(held) == local
        }
        result = {}
        for g, (_, group) in enumerate(self._groups):
            options = {k: v for k, v in group.items() if k != "params"}
            held = [known.get(id(p)) for p in group["params"]]
            members = [each.names[0] for each in held if each is not None]
            # A group whose parameters are all left out has nothing to come back to.
            if not members and (held or local):
                continue
            if "param_names" in options:
                pairs = zip(options["param_names"], held, strict=True)
                options["param_names"] = [n for n, each in pairs if each is not None]
            put = self.put if local else self._put_once
            encoded = encode(options, f"param_groups[{g}]", put, python_values=True)
            if "$map" in encoded:
                raise TypeError(
                    f"param_groups[{g}] has an option whose name starts with '$' or is "
                    "no text; rename it."
                )
            result[g] = {**encoded, "params": members}
        return result

    def _put_once(self, tensor: Tensor, where: str) -> int:
        """Add a loose tensor on rank 0; others need only know that it can be stored."""
        require_storable(tensor.dtype, where)
        return self.put(tensor, where) if self._rank == 0 else 0
