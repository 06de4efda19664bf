"""Reads this rank's part of an optimizer's state, by the names of the parameters.

Options and states are checked before a load changes anything: optimizers look at them
only in the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.optim.flat_state import SCALARS, is_scalar_shape
from composable_fsdp.optim.names import require_same_options
from composable_fsdp.optim.state_dict_hooks import originals_of
from composable_fsdp.storage.compare import NO_OPTIMIZER, LoadReport, Selection, find
from composable_fsdp.storage.contents import Contents, Held, named, not_in_module
from composable_fsdp.storage.source import Copy, Source, TensorInfo
from composable_fsdp.storage.tensors import is_wrapper, local_state

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


class Member(NamedTuple):
    """A parameter of the optimizer, and its name in the checkpoint."""

    name: str
    held: Held


def optimizer_loads(
    source: Source,
    contents: Contents,
    selection: Selection,
    report: LoadReport,
    optims: Sequence[torch.optim.Optimizer],
) -> list[OptimizerLoad]:
    """Compare each optimizer with the checkpoint; return what each will load."""
    if optims and source.param_groups is None:
        report.optimizer.append(NO_OPTIMIZER)
    # By id: a parameter that is left alone is still one of the model.
    chosen = set(named(selection.of_contents(contents)))
    loads = [OptimizerLoad(source, contents, chosen, o, report) for o in optims]
    # A saved parameter may be in any of the optimizers, so all are compared first.
    taken = {member.name for each in loads for member in each.members()}
    left = {name for each in loads for name in each.home} - taken
    leaves_out = selection.leaves_out(contents)
    report.optimizer += [
        f"{quoted(name)} is not in it" for name in sorted(left) if not leaves_out(name)
    ]
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
        # The checkpoint has state per original parameter, also of a flat one.
        self._source, self._report = source, report
        self._optim, self._view = optim, originals_of(optim)
        self._saved = source.param_groups or ()
        self.home = {n: g for g, each in enumerate(self._saved) for n in each["params"]}
        self._groups = self._members_of(contents, chosen)
        self._compare()
        # Per ``id(parameter)`` the state for ``load_state_dict``, filled by ``plan``.
        self._states: dict[int, dict[str, Any]] = {}

    def members(self) -> Iterator[Member]:
        """Yield the parameters that get a state."""
        for group in self._groups:
            yield from filter(None, group)

    def _members_of(
        self, contents: Contents, chosen: set[int]
    ) -> list[list[Member | None]]:
        """Return the members per group; None for a parameter that gets no state."""
        known = named(contents)
        wrappers = {id(each.tensor) for each in contents.wrappers}

        def member(parameter: Tensor, g: int, i: int) -> Member | None:
            key = id(parameter)
            if key not in known and key not in wrappers:
                raise not_in_module(parameter, g, i, "loaded")
            if key not in known or key not in chosen:
                return None
            names = known[key].names
            if (found := find(self._source, names)) in self.home:
                return Member(str(found), known[key])
            if self._source.param_groups is not None:
                self._report.optimizer.append(f"{quoted(names[0])} is missing")
            return None

        return [
            [member(parameter, g, i) for i, parameter in enumerate(group["params"])]
            for g, group in enumerate(self._view.param_groups)
        ]

    def _compare(self) -> None:
        """Report groups of another class of optimizer, and states of other shapes."""
        told, optim = self._report.optimizer, self._optim
        for g, members in enumerate(self._groups):
            for origin in {self.home[member.name] for member in members if member}:
                saved = self._saved[origin]
                # Another version of torch only adds options or only drops options.
                lacks = sorted(getattr(optim, "defaults", {}).keys() - saved.keys())
                others = sorted(saved.keys() - optim.param_groups[g].keys())
                if lacks and others:
                    told.append(
                        f"group {g} of this {type(optim).__name__} expects "
                        f"{listed(map(repr, lacks))} and the checkpoint has "
                        f"{listed(map(repr, others))} instead, as of another class "
                        "of optimizer"
                    )
        for name, held in self.members():
            for state, info in self._source.optim.get(name, {}).items():
                # No interval of such state corresponds to this rank's elements.
                if held.is_cut and info.shape not in ((), held.shape):
                    told.append(
                        f"state {state!r} of {quoted(name)} (expected {held.shape}, "
                        f"the checkpoint has {info.shape})"
                    )

    def plan(self) -> list[Copy]:
        """Return the reads into present state tensors, or into new memory for state."""
        self._require_types()
        found = {id(member.held.tensor): member for member in self.members()}
        self._view.require_joinable(
            lambda leaf: self._values_to_join(found.get(id(leaf)))
        )
        copies: list[Copy] = []
        for member in self.members():
            self._states[id(member.held.tensor)] = self._state(member, copies)
        return copies

    def _options(self, g: int) -> dict[str, Any]:
        """Return the options of a group: the saved ones over the present ones."""
        origins = {self.home[member.name] for member in self._groups[g] if member}
        require_same_options(g, origins, self._saved)
        own = self._view.param_groups[g]
        # An option that an older version did not save keeps the optimizer's value.
        return {**own, **self._saved[origins.pop()]} if origins else dict(own)

    def _require_types(self) -> None:
        """Raise CheckpointError for options and states of wrong types."""
        source, kind = self._source, type(self._optim)
        for g, members in enumerate(self._groups):
            chosen, own = self._options(g), self._view.param_groups[g]
            # What this version of torch does not know is kept, as ``initial_lr``.
            for name in own.keys() - {"params", "param_names"}:
                if not _is_alike(own[name], chosen[name]):
                    raise _refused(
                        f"option {name!r} of group {g} is {repr(chosen[name])[:80]} in "
                        f"the checkpoint; this {kind.__name__} expects a value such as "
                        f"{own[name]!r}"
                    )
            for member in filter(None, members):
                tensors = source.optim.get(member.name, {})
                values = source.optim_values.get(member.name, {})
                problem = _problem(kind, tensors, values, chosen)
                if problem:
                    of = f"the optimizer state of {quoted(member.name)}"
                    raise _refused(f"{of} {problem}")

    def _tensors(self, member: Member) -> Iterator[tuple[str, TensorInfo, bool]]:
        """Yield the saved state tensors that fit, and whether they are element-wise."""
        shape = member.held.shape
        for state, info in self._source.optim.get(member.name, {}).items():
            scalar = is_scalar_shape(state, info.shape, shape)
            is_elementwise = info.shape == shape and not scalar
            if is_elementwise or not (info.shape and member.held.is_cut):
                yield state, info, is_elementwise

    def _values_to_join(self, member: Member | None) -> dict[str, Any]:
        """Return the values that ``_state`` gives; ``...`` for element-wise tensors."""
        if member is None:
            return {}
        found = {
            state: ... if cut else self._source.read_optim(member.name, state, 0, n)
            for state, info, cut in self._tensors(member)
            for n in [info.numel]
        }
        return {**found, **self._source.optim_values.get(member.name, {})}

    def _state(self, member: Member, copies: list[Copy]) -> dict[str, Any]:
        """Return the parameter's state; tensors are valid after ``copies`` are done."""
        (name, held), source = member, self._source
        parameter = held.tensor
        present = self._view.state_of(parameter)
        state: dict[str, Any] = {}
        for key, info, is_elementwise in self._tensors(member):
            if not is_elementwise:
                value = source.read_optim(name, key, 0, info.numel)
                state[key] = value.view(info.shape)
                continue
            # A tensor that wraps others (quantised state) has no own memory.
            into: Any = present.get(key)
            is_new = False
            is_usable = isinstance(into, Tensor) and not is_wrapper(into)
            if not is_usable or into.shape != parameter.shape:
                into = self._view.new_state(parameter, key, info.dtype)
                is_new = True
            state[key] = into
            own = local_state(into, parameter, f"{name} (state {key!r})")
            copies.append(Copy(name, key, held.span, own, is_new))
        # Copies: an open source may give the values to another optimizer as well.
        for key, value in source.optim_values.get(name, {}).items():
            is_tensor = isinstance(value, Tensor)
            state[key] = value.clone() if is_tensor else copy.deepcopy(value)
        return state

    def install(self) -> None:
        """Give the optimizer the saved options and the state that has been read."""
        view = self._view
        states: dict[int, dict[str, Any]] = {}
        options: list[dict[str, Any]] = []
        given: list[tuple[Member, dict[str, Any]]] = []
        index = 0
        for g, members in enumerate(self._groups):
            own, chosen = view.param_groups[g], self._options(g)
            # ``param_names`` follows the order of the parameters in this optimizer.
            chosen.pop("param_names", None)
            if "param_names" in own:
                chosen["param_names"] = own["param_names"]
            # A range: torch looks up the position of every state's id in ``params``.
            ids = range(index, index + len(members))
            options.append({**chosen, "params": ids})
            index += len(members)
            for i, member, parameter in zip(ids, members, own["params"], strict=True):
                # An absent parameter (no element on this rank) keeps the present state.
                state = view.state_of(parameter)
                if member is not None and not member.held.is_absent:
                    state = self._states[id(parameter)]
                if state:
                    states[i] = state
                    given += [(member, state)] if member is not None else []
        self._optim.load_state_dict({"state": states, "param_groups": options})
        for (name, held), state in given:
            # ``load_state_dict`` has cast state of another dtype. If the parameter
            # itself was saved in another dtype, the cast is kept.
            if self._source.model[name].dtype == held.tensor.dtype:
                view.keep_given(held.tensor, state)


def _refused(what: str) -> CheckpointError:
    """Return the error for a value that an optimizer could not use."""
    return CheckpointError(
        f"load: {what}. Nothing was loaded. The checkpoint is damaged, or of another "
        "optimizer; load(path, model) without it reads the model alone."
    )


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether a saved option can stand where ``own`` stands."""
    if own is None or saved is None:
        return not _is_number(own) and not isinstance(saved, (list, dict))
    if _is_number(own):
        return _is_number(saved)
    # JSON and torch.save may exchange lists and tuples; the length has a meaning.
    if isinstance(own, (list, tuple)):
        is_list = isinstance(saved, (list, tuple)) and len(own) == len(saved)
        return is_list and all(map(_is_alike, own, saved))
    # In Python, a bool is an int; a subclass of the user stands for its base class.
    is_bool = isinstance(own, bool) == isinstance(saved, bool)
    return is_bool and (isinstance(saved, type(own)) or isinstance(own, type(saved)))


def _is_number(value: Any) -> bool:
    """Return whether the value is a real number, also as a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _problem(
    kind: type[Any],
    tensors: Mapping[str, Any],
    values: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """Return what is wrong with the states of a parameter, or ""."""
    # A class of the user may have any states, and a parameter without a step has none.
    is_known = getattr(torch.optim, kind.__name__, None) is kind
    expected = STATES.get(kind.__name__, ()) if is_known else ()
    if not tensors and not values:
        return ""
    if expected and options.get("amsgrad"):
        expected = (*expected, "max_exp_avg_sq")
    missing = [each for each in expected if each not in {**tensors, **values}]
    if missing:
        return (
            f"lacks {listed(map(repr, missing))}, which a step of {kind.__name__} reads"
        )
    for state, value in values.items():
        if state in expected and not (state in SCALARS and _is_number(value)):
            wanted = "a number" if state in SCALARS else "a tensor"
            return f"has {state!r} {repr(value)[:80]}; expected {wanted}"
    return ""
