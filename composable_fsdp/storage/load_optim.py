"""Reading an optimizer's state by the names of its parameters, this rank's part alone.

What the optimizer has already is written over in place, so its memory does not double;
what it lacks, before its first step, is read into new memory. Both go through its own
``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.naming import quoted
from composable_fsdp.optim.keys import require_same_options
from composable_fsdp.optim.names import is_absent
from composable_fsdp.optim.original_view import OverOriginals, over_originals
from composable_fsdp.optim.own_state_dict import is_wrapper
from composable_fsdp.optim.scalars import SCALARS
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.storage.compare import LoadReport, find
from composable_fsdp.storage.contents import Contents, HeldTensor, named, not_in_module
from composable_fsdp.storage.source import Copy, Source


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of the optimizer: its name in the checkpoint, and its part here."""

    parameter: Tensor
    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    """In the plain model."""
    is_cut: bool


def optimizer_loads(
    source: Source,
    contents: Contents,
    optims: Sequence[torch.optim.Optimizer],
    report: LoadReport,
) -> list[OptimizerLoad]:
    """What this rank reads of each; what they and ``source`` lack goes to ``report``.

    Raises: CheckpointError, for a parameter that is not in the module.
    """
    if optims and source.param_groups is None:
        report.optimizer.append("the checkpoint was saved without an optimizer")
    loads = [OptimizerLoad(source, contents, each, report) for each in optims]
    taken = {m.name for each in loads for group in each.groups for m in group if m}
    left = {name for each in loads for name in each.home} - taken
    report.optimizer += [f"{quoted(name)} is not in it" for name in sorted(left)]
    return loads


class OptimizerLoad:
    """What this rank reads of one optimizer; compared when it is made."""

    def __init__(
        self,
        source: Source,
        contents: Contents,
        optim: torch.optim.Optimizer,
        report: LoadReport,
    ) -> None:
        self.source, self.report = source, report
        self.optim = over_originals(optim)
        self.home = {
            name: g
            for g, group in enumerate(source.param_groups or ())
            for name in group["params"]
        }
        self.groups = self._members(contents)
        self._compare_options()
        for members in self.groups:
            for member in members:
                if member is not None:
                    self._compare(member)
        self.copies: list[Copy] = []
        self.states: dict[int, dict[str, Any]] = {}

    def _members(self, contents: Contents) -> list[list[Member | None]]:
        known = named(contents)
        groups: list[list[Member | None]] = []
        for g, group in enumerate(self.optim.param_groups):
            members: list[Member | None] = []
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise not_in_module(parameter, g, i, "loaded")
                members.append(self._member(parameter, known[id(parameter)]))
            groups.append(members)
        return groups

    def _member(self, parameter: Tensor, held: Any) -> Member | None:
        if isinstance(held, HeldTensor):
            names, shape = held.names, tuple(held.tensor.shape)
            start, stop = 0, held.tensor.numel()
        else:
            region, i = held
            slot = region.region.layout.parameters[i]
            names, shape = region.names[i], slot.shape
            start, stop, _ = region.part(slot)
        found = find(self.source, names)
        if found is None or found not in self.home:
            if self.source.param_groups is not None:
                self.report.optimizer.append(f"{quoted(names[0])} is missing")
            return None
        is_cut = not isinstance(held, HeldTensor)
        return Member(parameter, found, start, stop, shape, is_cut)

    def _compare_options(self) -> None:
        """Report groups that another kind of optimizer saved: it lacks some of this
        one's options and has others. Another version of torch only adds or drops some.
        """
        for g, members in enumerate(self.groups):
            for origin in {self.home[member.name] for member in members if member}:
                saved = (self.source.param_groups or ())[origin]
                lacks = sorted(self.optim.defaults.keys() - saved.keys())
                others = sorted(saved.keys() - self.optim.param_groups[g].keys())
                if lacks and others:
                    self.report.optimizer.append(
                        f"group {g} expects {', '.join(map(repr, lacks))} and the "
                        f"checkpoint has {', '.join(map(repr, others))} instead, as "
                        "of another kind of optimizer"
                    )

    def _compare(self, member: Member) -> None:
        for state, info in self.source.optim.get(member.name, {}).items():
            if info.shape == member.shape or (not info.shape and state in SCALARS):
                continue
            if info.shape and member.is_cut:
                self.report.optimizer.append(
                    f"state {state!r} of {quoted(member.name)} (expected "
                    f"{member.shape}, the checkpoint has {info.shape})"
                )

    def _is_elementwise(self, member: Member, state: str) -> bool:
        info = self.source.optim[member.name][state]
        if not info.shape and (member.shape or state in SCALARS):
            return False
        return info.shape == member.shape

    def _range(self, member: Member, state: str) -> tuple[int, int] | None:
        """Which elements of a state this rank reads; None if it does not fit."""
        if self._is_elementwise(member, state):
            return member.start, member.stop
        info = self.source.optim[member.name][state]
        if info.shape and member.is_cut:
            return None
        return 0, info.numel

    def plan(self) -> list[Copy]:
        """What is to be read, into the state that is there or new memory for it.

        Raises: CheckpointError, if a group of the optimizer has its parameters from
        several saved groups whose options differ.
        """
        self._origins()
        if isinstance(self.optim, OverOriginals):
            found = {id(m.parameter): m for group in self.groups for m in group if m}
            self.optim.require_joinable(
                lambda leaf: self._values_to_join(found.get(id(leaf)))
            )
        for members in self.groups:
            for member in filter(None, members):
                present = self.optim.state.get(member.parameter, {})
                self.states[id(member)] = self._state(member, present)
        return self.copies

    def _new_state(self, leaf: Any, name: str, dtype: torch.dtype) -> Tensor:
        if isinstance(self.optim, OverOriginals):
            made: Tensor = self.optim.new_state(leaf, name, dtype)
            return made
        return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)

    def _values_to_join(self, member: Member | None) -> dict[str, Any]:
        """What ``_state`` will give; ``...`` stands for an element-wise tensor."""
        found: dict[str, Any] = {}
        if member is None:
            return found
        for name in self.source.optim.get(member.name, {}):
            span = self._range(member, name)
            if self._is_elementwise(member, name):
                found[name] = ...
            elif span is not None:
                found[name] = self.source.read_optim(member.name, name, *span)
        return {**found, **self.source.optim_values.get(member.name, {})}

    def _origins(self) -> list[int | None]:
        """The saved group that each of the optimizer's groups gets its options from."""
        found: list[int | None] = []
        for g, members in enumerate(self.groups):
            origins = {self.home[member.name] for member in members if member}
            require_same_options(g, origins, self.source.param_groups or ())
            found.append(origins.pop() if origins else None)
        return found

    def install(self) -> None:
        """Give the optimizer its options, and the state that has been read."""
        states: dict[int, dict[str, Any]] = {}
        options: list[dict[str, Any]] = []
        index = 0
        for g, origin in enumerate(self._origins()):
            own = self.optim.param_groups[g]
            saved = self.source.param_groups or ()
            # What an older version did not save stays as it is.
            chosen = own if origin is None else {**own, **saved[origin]}
            if "param_names" in own:
                # They go with the order of the parameters, which is the optimizer's.
                chosen["param_names"] = own["param_names"]
            else:
                chosen.pop("param_names", None)
            # A range: torch looks each number up in it, once per state.
            ids = range(index, index + len(self.groups[g]))
            options.append({**chosen, "params": ids})
            for i, member, parameter in zip(
                ids, self.groups[g], own["params"], strict=True
            ):
                state = self.optim.state.get(parameter, {})
                if member is not None and not is_absent(parameter):
                    state = self.states[id(member)]
                if state:
                    states[i] = state
            index += len(ids)
        install_optimizer_hooks(self.optim)
        self.optim.load_state_dict({"state": states, "param_groups": options})
        self._keep_dtypes(states)

    def _keep_dtypes(self, states: dict[int, dict[str, Any]]) -> None:
        """Give back what torch has cast: it gives all state the parameter's dtype.

        Unless the parameter itself was saved in another one.
        """
        members = [member for group in self.groups for member in group]
        for i, state in states.items():
            member = members[i]
            if member is None:
                continue
            parameter = member.parameter
            if self.source.model[member.name].dtype != parameter.dtype:
                continue
            present = self.optim.state[parameter]
            for name in self.source.optim.get(member.name, {}):
                value, cast = state.get(name), present.get(name)
                if (
                    isinstance(value, Tensor)
                    and isinstance(cast, Tensor)
                    and cast.dtype != value.dtype
                    and name not in SCALARS
                ):
                    present[name] = value.to(cast.device)

    def _state(self, member: Member, present: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter as it will be once ``copies`` are done."""
        source, parameter = self.source, member.parameter
        state: dict[str, Any] = {}
        for name, info in source.optim.get(member.name, {}).items():
            span = self._range(member, name)
            if span is None:
                continue
            if not self._is_elementwise(member, name):
                value = source.read_optim(member.name, name, *span)
                state[name] = value.view(info.shape)
                continue
            into, shape = present.get(name), parameter.shape
            is_new = False
            if not isinstance(into, Tensor) or into.shape != shape or is_wrapper(into):
                into, is_new = self._new_state(parameter, name, info.dtype), True
            state[name] = into
            self.copies.append(Copy(member.name, name, *span, into, is_new))
        state.update(source.optim_values.get(member.name, {}))
        return state
