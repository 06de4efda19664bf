"""Reads this rank's part of an optimizer's state, by the names of the parameters.

State tensors that the optimizer already has are overwritten in place, so the memory of
the state does not double. State that the optimizer lacks (before the first step) is
read into new memory. Both reach the optimizer through ``load_state_dict``.

Checks saved options and states of an optimizer before a load changes anything.

Optimizers look at their options and states only when the state has been replaced, or in
the next step. A value of a wrong type there would leave a model that is half loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.keys import require_same_options
from composable_fsdp.optim.names import is_absent
from composable_fsdp.optim.original_view import (
    OverOriginals,
    keep_given,
    over_originals,
)
from composable_fsdp.optim.own_state_dict import is_wrapper
from composable_fsdp.optim.scalars import SCALARS, is_scalar_shape
from composable_fsdp.optim.state_dict_hooks import install_optimizer_hooks
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.storage.compare import NO_OPTIMIZER, LoadReport, copy_of, find
from composable_fsdp.storage.contents import (
    Contents,
    Held,
    named,
    not_in_module,
)
from composable_fsdp.storage.mesh_copies import local_state
from composable_fsdp.storage.selection import ALL, Selection
from composable_fsdp.storage.source import Copy, Source

STATES: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}
"""The states that a step of torch's own optimizers reads, if a parameter has any."""


def require_options(
    optim: object, own: Mapping[str, Any], saved: Mapping[str, Any], g: int
) -> None:
    """Raise CheckpointError for a saved option of another type than the present one."""
    # Options that this version of torch does not know are kept, and no code reads them;
    # ``initial_lr`` of a scheduler is one.
    for name, value in saved.items():
        if name in own and name not in ("params", "param_names"):
            if _is_alike(own[name], value):
                continue
            raise CheckpointError(
                f"load: option {name!r} of group {g} is {repr(value)[:80]} in the "
                f"checkpoint; this {type(optim).__name__} expects a value such as "
                f"{own[name]!r}. Nothing was loaded. The checkpoint is damaged, or of "
                "another optimizer; load(path, model) without it reads the model alone."
            )


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether ``saved`` can stand where ``own`` stands."""
    # None: the optimizer chooses (``foreach``, ``fused``), or has switched it off.
    if own is None or saved is None:
        return not _is_number(own) and not isinstance(saved, (list, dict))
    # Before numbers: in Python, a bool is an int.
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if _is_number(own):
        return _is_number(saved)
    # JSON and torch.save may exchange lists and tuples; the length is part of the
    # meaning (``betas``).
    if isinstance(own, (list, tuple)):
        return (
            isinstance(saved, (list, tuple))
            and len(own) == len(saved)
            and all(map(_is_alike, own, saved))
        )
    # A subclass of the user stands for its base class in both directions.
    return isinstance(saved, type(own)) or isinstance(own, type(saved))


def _is_number(value: Any) -> bool:
    """Return whether the value is a real number, also as a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def require_states(
    optim: object,
    name: str,
    tensors: Mapping[str, Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> None:
    """Raise CheckpointError for a state that is missing, or of a wrong type."""
    # The first problem is enough: a reader fixes the checkpoint, not the state.
    for problem in _problems(optim, tensors, values, own):
        raise CheckpointError(
            f"load: the optimizer state of {quoted(name)} {problem}. Nothing was "
            "loaded. The checkpoint is damaged, or of another optimizer; load(path, "
            "model) without it reads the model alone."
        )


def _problems(
    optim: object,
    tensors: Mapping[str, Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what is wrong with the states of a parameter; see ``require_states``."""
    kind = type(optim)
    # A class of the user may have any states, and a parameter without a step has none.
    is_known = getattr(torch.optim, kind.__name__, None) is kind
    expected = STATES.get(kind.__name__, ()) if is_known else ()
    if not expected or not (tensors or values):
        return
    # A further state that only one option of Adam makes.
    if own.get("amsgrad"):
        expected = (*expected, "max_exp_avg_sq")
    # All names at once: a user sees from them which optimizer has saved the state.
    missing = [each for each in expected if each not in {**tensors, **values}]
    if missing:
        yield (
            f"lacks {listed(map(repr, missing))}, which a step of {kind.__name__} reads"
        )
    for state, value in values.items():
        if state in expected and not (state in SCALARS and _is_number(value)):
            wanted = "a number" if state in SCALARS else "a tensor"
            yield f"has {state!r} {repr(value)[:80]}; expected {wanted}"


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of the optimizer, and its name in the checkpoint."""

    name: str
    held: Held


def optimizer_loads(
    source: Source,
    contents: Contents,
    optims: Sequence[torch.optim.Optimizer],
    report: LoadReport,
    selection: Selection = ALL,
) -> list[OptimizerLoad]:
    """Compare each optimizer with the checkpoint; return what each will load."""
    if optims and source.param_groups is None:
        report.optimizer.append(NO_OPTIMIZER)
    # By id: a parameter that is left alone is still one of the model.
    chosen = set(named(selection.of_contents(contents)))
    loads = [OptimizerLoad(source, contents, chosen, o, report) for o in optims]
    # A saved parameter may be in any of the optimizers, so the names that are left over
    # are known only after all optimizers have been compared.
    taken = {m.name for each in loads for group in each.groups for m in group if m}
    left = {name for each in loads for name in each.home} - taken
    # A whole checkpoint may be loaded in part, by an optimizer of that part.
    leaves_out = selection.leaves_out(contents)
    left = {name for name in left if not leaves_out(name)}
    report.optimizer += [f"{quoted(name)} is not in it" for name in sorted(left)]
    return loads


class OptimizerLoad:
    """The state that this rank reads for an optimizer; compared on construction."""

    def __init__(
        self,
        source: Source,
        contents: Contents,
        chosen: set[int],
        optim: torch.optim.Optimizer,
        report: LoadReport,
    ) -> None:
        """Compare the optimizer with the checkpoint."""
        self.source, self.report = source, report
        # An optimizer over flat parameters is viewed as an optimizer over the original
        # parameters: the checkpoint stores state per original parameter.
        self.optim = over_originals(optim)
        # Parameter name in the checkpoint -> index of the saved group.
        self.home = {
            name: g
            for g, group in enumerate(source.param_groups or ())
            for name in group["params"]
        }
        self.groups = self._members(contents, chosen)
        self._compare_options()
        for members in self.groups:
            for member in members:
                if member is not None:
                    self._compare(member)
        # Filled by ``plan``: the reads of element-wise state, and per ``id(member)``
        # the state dict of the parameter as ``load_state_dict`` will get the state.
        self.copies: list[Copy] = []
        self.states: dict[int, dict[str, Any]] = {}

    def _members(
        self, contents: Contents, chosen: set[int]
    ) -> list[list[Member | None]]:
        """Return the members per group; None for a parameter that gets no state."""
        known = named(contents)
        # Their inner tensors are no parameters of an optimizer.
        wrappers = {id(each.tensor) for each in contents.wrappers}
        groups: list[list[Member | None]] = []
        for g, group in enumerate(self.optim.param_groups):
            members: list[Member | None] = []
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in wrappers:
                    members.append(None)
                    continue
                if id(parameter) not in known:
                    raise not_in_module(parameter, g, i, "loaded")
                held, is_chosen = known[id(parameter)], id(parameter) in chosen
                members.append(self._member(held) if is_chosen else None)
            groups.append(members)
        return groups

    def _member(self, held: Held) -> Member | None:
        """Return the member, or report a missing parameter and return None."""
        found = find(self.source, held.names)
        if found is None or found not in self.home:
            if self.source.param_groups is not None:
                self.report.optimizer.append(f"{quoted(held.names[0])} is missing")
            return None
        return Member(found, held)

    def _compare_options(self) -> None:
        """Report groups that another kind of optimizer (another class) saved."""
        for g, members in enumerate(self.groups):
            for origin in {self.home[member.name] for member in members if member}:
                saved = (self.source.param_groups or ())[origin]
                # Another version of torch only adds options or only drops options. A
                # saved group that lacks options of this optimizer and also has unknown
                # options comes from another class.
                lacks = sorted(self.optim.defaults.keys() - saved.keys())
                others = sorted(saved.keys() - self.optim.param_groups[g].keys())
                if lacks and others:
                    self.report.optimizer.append(
                        f"group {g} of this {type(self.optim).__name__} expects "
                        f"{listed(map(repr, lacks))} and the checkpoint has "
                        f"{listed(map(repr, others))} instead, as of another class "
                        "of optimizer"
                    )

    def _compare(self, member: Member) -> None:
        """Report state of a cut parameter with another shape, except scalars."""
        for state, info in self.source.optim.get(member.name, {}).items():
            # A parameter that no unit cuts can take state of any shape as a whole. For
            # a cut parameter, no interval of such state corresponds to this rank's
            # elements.
            if member.held.is_cut and info.shape not in ((), member.held.shape):
                self.report.optimizer.append(
                    f"state {state!r} of {quoted(member.name)} (expected "
                    f"{member.held.shape}, the checkpoint has {info.shape})"
                )

    def _is_elementwise(self, member: Member, state: str) -> bool:
        """Return whether the state has an element for each element of the parameter."""
        info = self.source.optim[member.name][state]
        scalar = is_scalar_shape(state, info.shape, member.held.shape)
        return info.shape == member.held.shape and not scalar

    def _range(self, member: Member, state: str) -> tuple[int, int] | None:
        """Return the elements of a state to read on this rank; None without a fit."""
        if self._is_elementwise(member, state):
            return member.held.interval
        info = self.source.optim[member.name][state]
        if info.shape and member.held.is_cut:
            return None
        return 0, info.numel

    def plan(self) -> list[Copy]:
        """Return the reads into present state tensors, or into new memory for state."""
        # Raise for groups that do not fit before any memory is allocated.
        self._require_types(self._origins())
        if isinstance(self.optim, OverOriginals):
            found = {id(m.held.tensor): m for group in self.groups for m in group if m}
            self.optim.require_joinable(
                lambda leaf: self._values_to_join(found.get(id(leaf)))
            )
        for members in self.groups:
            for member in filter(None, members):
                present = self.optim.state.get(member.held.tensor, {})
                self.states[id(member)] = self._state(member, present)
        return self.copies

    def _require_types(self, origins: list[int | None]) -> None:
        """Raise CheckpointError for options and states of wrong types."""
        real = self.optim.optim if isinstance(self.optim, OverOriginals) else self.optim
        source, saved = self.source, self.source.param_groups or ()
        for g, (origin, members) in enumerate(zip(origins, self.groups, strict=True)):
            own = self.optim.param_groups[g]
            chosen = own if origin is None else {**own, **saved[origin]}
            require_options(real, own, chosen, g)
            for member in filter(None, members):
                tensors = source.optim.get(member.name, {})
                values = source.optim_values.get(member.name, {})
                require_states(real, member.name, tensors, values, chosen)

    def _new_state(self, leaf: Any, name: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a state tensor in the shape of ``leaf``."""
        if isinstance(self.optim, OverOriginals):
            # A part of the flat parameter's state tensor, which ``load_state_dict``
            # then takes over without a copy.
            made: Tensor = self.optim.new_state(leaf, name, dtype)
            return made
        if is_dtensor(leaf):
            # Placed as the parameter: an optimizer steps on both together.
            return torch.empty_like(leaf, dtype=dtype, requires_grad=False)
        return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)

    def _values_to_join(self, member: Member | None) -> dict[str, Any]:
        """Return the values that ``_state`` gives; ``...`` for element-wise tensors."""
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
        """Return the index of the saved group for each group's options, or None."""
        found: list[int | None] = []
        for g, members in enumerate(self.groups):
            origins = {self.home[member.name] for member in members if member}
            require_same_options(g, origins, self.source.param_groups or ())
            found.append(origins.pop() if origins else None)
        return found

    def install(self) -> None:
        """Give the optimizer the saved options and the state that has been read."""
        states: dict[int, dict[str, Any]] = {}
        options: list[dict[str, Any]] = []
        index = 0
        for g, origin in enumerate(self._origins()):
            own = self.optim.param_groups[g]
            saved = self.source.param_groups or ()
            # An option that an older version did not save keeps the optimizer's value.
            chosen = own if origin is None else {**own, **saved[origin]}
            if "param_names" in own:
                # ``param_names`` follows the order of the group's parameters, which is
                # the order in this optimizer and not the saved order.
                chosen["param_names"] = own["param_names"]
            else:
                chosen.pop("param_names", None)
            # A range and not a list: torch looks up the position of every state's id in
            # ``params``, and a range answers in constant time.
            ids = range(index, index + len(self.groups[g]))
            options.append({**chosen, "params": ids})
            for i, member, parameter in zip(
                ids, self.groups[g], own["params"], strict=True
            ):
                # An absent parameter (no element on this rank) keeps the present state.
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
        """Restore state that ``load_state_dict`` has changed."""
        members = [member for group in self.groups for member in group]
        for i, state in states.items():
            member = members[i]
            if member is None:
                continue
            parameter = member.held.tensor
            if self.source.model[member.name].dtype != parameter.dtype:
                continue
            if isinstance(self.optim, OverOriginals):
                self.optim.keep_given(parameter)
            else:
                keep_given(state, self.optim.state[parameter])

    def _state(self, member: Member, present: dict[str, Any]) -> dict[str, Any]:
        """Return the parameter's state; tensors are valid after ``copies`` are done."""
        source, parameter = self.source, member.held.tensor
        state: dict[str, Any] = {}
        for name, info in source.optim.get(member.name, {}).items():
            span = self._range(member, name)
            if span is None:
                continue
            if not self._is_elementwise(member, name):
                value = source.read_optim(member.name, name, *span)
                state[name] = value.view(info.shape)
                continue
            # A tensor that wraps others (quantised state) has no own memory to
            # overwrite.
            into, shape = present.get(name), parameter.shape
            is_new = False
            if not isinstance(into, Tensor) or into.shape != shape or is_wrapper(into):
                into, is_new = self._new_state(parameter, name, info.dtype), True
            state[name] = into
            own = local_state(into, parameter, f"{member.name} (state {name!r})")
            self.copies.append(
                copy_of(member.held, member.name, name, own, is_new=is_new)
            )
        # Copies: an open source may give the values to another optimizer as well.
        for name, value in source.optim_values.get(member.name, {}).items():
            is_tensor = isinstance(value, Tensor)
            state[name] = value.clone() if is_tensor else copy.deepcopy(value)
        return state
