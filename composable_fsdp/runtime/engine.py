"""Wrapper of autograd's entry into the engine, ``_engine_run_backward``.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all call
``torch.autograd._engine_run_backward``. The first ``fully_shard`` wraps that function
(as ``torch.compiler`` does during tracing), for two purposes:

* gradients with respect to sharded parameters. The graph of a forward holds the full
  parameters, so the engine would find the sharded parameters unreachable and return
  None or zeros. The wrapper passes the full parameters instead and returns reduced
  gradients.
* a clear error for a read of parameters while the unit is sharded (``flat.residency``):
  torch's message has a shape and two version numbers, ours names the parameter.

Any other backward pays a single function call. ``torch._C._vmapmode_*_nesting`` are
private; used only here, checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.flat_parameter import (
    find_flat,
    leaf_gradients,
    move_gradients_in,
)
from composable_fsdp.flat.handle import NO_TASK, FlatParamHandle, find_leaf
from composable_fsdp.flat.param_paths import param_path
from composable_fsdp.flat.param_ref import find_param, originals_by_vars
from composable_fsdp.naming import quoted
from composable_fsdp.runtime.graph_task import (
    current_task,
    full_param_requested,
    run_backward,
)
from composable_fsdp.runtime.offload import finish_d2h_grad_copies
from composable_fsdp.runtime.reduce import finish_reduction
from composable_fsdp.runtime.second_order import capture, reduced
from composable_fsdp.tree.state import RuntimeContext, root_of

_GRAPH: Any = torch.autograd.graph
_AUTOGRAD: Any = torch.autograd


def install() -> None:
    """Wrap ``_engine_run_backward`` with ``run_backward``, unless already outermost."""
    # If another library has wrapped the function since, wrap again. That wrapper may
    # call an earlier wrapper of ours, so each wrapper stores the function that it
    # wraps.
    found = _AUTOGRAD._engine_run_backward
    if not (isinstance(found, partial) and found.func is run_backward):
        ours = partial(run_backward, found, _for_parameters)
        _AUTOGRAD._engine_run_backward = _GRAPH._engine_run_backward = ours


def _for_parameters(
    run: Callable[..., Any],
    outputs: Sequence[Any],
    grad_outputs: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = False,
    accumulate_grad: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a backward with respect to sharded parameters, among other inputs.

    ``torch.autograd.backward(inputs=...)`` accumulates into ``.grad`` of the
    parameters; ``torch.autograd.grad`` gets this rank's parts of the averaged
    gradients.
    """
    allow_unused = kwargs.pop("allow_unreachable", allow_unused)
    accumulate_grad = kwargs.pop("accumulate_grad", accumulate_grad)
    # Check before the engine runs, so that all ranks raise before any collective.
    _require_no_fill(inputs)
    in_graph = [_in_graph(each) for each in inputs]
    engine = partial(
        run,
        outputs,
        grad_outputs,
        retain_graph,
        create_graph,
        tuple(chain.from_iterable(in_graph)),
        allow_unreachable=True,
        **kwargs,
    )
    # ``torch.autograd.backward(inputs=...)``: the hooks of the full parameters run and
    # reduce as in a backward without ``inputs``.
    if accumulate_grad:
        return engine(accumulate_grad=True)
    _require_own_reduction(inputs)
    _require_no_full(inputs)
    if create_graph:
        return _with_graph(engine, inputs, in_graph, allow_unused=allow_unused)
    with (
        _Finishing(_units(inputs)),
        _SetAside(inputs) as aside,
        _Reached(in_graph, outputs) as reached,
    ):
        # Accumulate instead of capture, so that the hooks of the full parameters
        # reduce.
        engine(accumulate_grad=True)
        found = aside.gradients()
    _require_no_backward_inside(inputs, reached)
    if not allow_unused:
        _require_all(inputs, [i in reached.indices for i in range(len(inputs))])
    # A parameter without elements on this rank has no gradient here. Return zeros if
    # the graph leads to the parameter, as on the other ranks.
    return tuple(
        None
        if index not in reached.indices
        else torch.zeros_like(each)
        if gradient is None
        else gradient
        for index, (each, gradient) in enumerate(zip(inputs, found, strict=True))
    )


def _with_graph(
    engine: Callable[..., Any],
    inputs: Sequence[Any],
    in_graph: Sequence[tuple[Any, ...]],
    *,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
    """Run a backward with ``create_graph``; the gradients have a graph, too."""
    flat = next((each for each in inputs if find_flat(each)), None)
    if flat is not None:
        raise PhaseError(
            "torch.autograd.grad(create_graph=True) was asked for the gradient of "
            f"{_name(flat)}. Ask for those of module.parameters()."
        )
    _require_no_hook(inputs)
    handles = [handle for handle in _units(inputs) if handle.layout.trainable]
    captured = iter(capture(handles, partial(engine, accumulate_grad=False)))
    found: list[Tensor | None] = []
    by_unit: dict[FlatParamHandle, dict[int, Tensor]] = {each: {} for each in handles}
    places = [find_leaf(each) for each in inputs]
    for place, (_, *forms) in zip(places, in_graph, strict=True):
        found.append(next(captured))
        # A parameter has up to two full forms (``wide`` or not); the graph holds a
        # single form.
        for full in [next(captured) for _ in forms]:
            if place is not None and full is not None:
                by_unit[place[0]][place[1]] = full
    shards = {handle: reduced(handle, by_unit[handle]) for handle in handles}
    for index, place in enumerate(places):
        if place is not None and place[0] in shards:
            own, shard = found[index], shards[place[0]].get(place[1])
            # ``own`` is the gradient through the sharded parameter itself (a penalty on
            # weights).
            if shard is not None:
                found[index] = shard if own is None else own + shard
    if not allow_unused:
        _require_all(inputs, [each is not None for each in found])
    return tuple(found)


def _require_all(inputs: Sequence[Any], reached: Sequence[bool]) -> None:
    """Raise if the graph does not lead to every input. Raises: PhaseError."""
    for each, is_reached in zip(inputs, reached, strict=True):
        if not is_reached:
            raise PhaseError(
                "torch.autograd.grad found no path from the output to "
                f"{_name(each)}. Pass allow_unused=True, if that is intended."
            )


def _require_no_backward_inside(inputs: Sequence[Any], reached: _Reached) -> None:
    """Raise if a backward inside the requested backward reached an input.

    Raises: PhaseError, on all ranks alike.
    """
    # Autograd would add the gradients of the inner backward to ``.grad``, and return
    # those of the outer backward; one reduction has summed both.
    if reached.inside:
        raise PhaseError(
            "torch.autograd.grad was asked for the gradient of sharded parameter "
            f"{_name(inputs[min(reached.inside)])}, which a backward inside this "
            "backward computes (a forward that is recomputed, most likely). Call "
            "backward() and read .grad, or recompute by "
            "checkpoint(use_reentrant=False)."
        )


def _in_graph(given: Any) -> tuple[Any, ...]:
    """Return the tensors that stand for ``given`` in graphs.

    For a sharded parameter: the full parameters of a forward, and the sharded parameter
    itself, because a penalty on weights uses the sharded parameter.
    """
    flat = find_flat(given)
    if flat is not None:
        region = flat[1].region
        leaves = () if region is None else region.leaves
        return (given, *chain.from_iterable(map(_in_graph, leaves)))
    found = find_leaf(given)
    if found is None or not given.requires_grad:
        return (given,)  # for a frozen parameter torch raises the usual error
    handle, index = found
    forms = [[r.full.leaves for r in handle.layout.regions]]
    if handle.other_form is not None:
        forms.append([each.leaves for each in handle.other_form.regions])
    # A parameter that was unfrozen since the forward is in no graph, as in the plain
    # model, and torch refuses tensors that require no grad.
    full = [list(chain.from_iterable(form))[index] for form in forms]
    # A graph of before a change of ``requires_grad`` holds the full leaf of then.
    full += [
        leaf
        for link in handle.layout.earlier
        if (form := link()) is not None
        for own, leaf in zip(form.sharded, form.placed, strict=True)
        if own is given
    ]
    return (given, *[leaf for leaf in full if leaf.requires_grad])


def _units(inputs: Sequence[Any]) -> list[FlatParamHandle]:
    """Return the units of all sharded and flat parameters in ``inputs``, each once."""
    # A dict keeps the order of the inputs, which is equal on all ranks.
    found = [find_flat(each) or find_leaf(each) for each in inputs]
    return list(dict.fromkeys(each[0] for each in found if each is not None))


def _require_no_fill(inputs: Sequence[Any]) -> None:
    """Raise if zeros would be reduced for parameters that are not in ``inputs``.

    Raises: PhaseError, on all ranks alike.
    """
    for handle in _units(inputs):
        owner = (
            handle.layout.trainable[0].reduce.owner()
            if handle.layout.trainable
            else None
        )
        context = None if owner is None else owner.context
        if context is not None and any(each.rule.fill for each in context.handles):
            name = _first_name(inputs)
            raise PhaseError(
                f"A backward was asked for the gradient of sharded parameter {name} "
                "by inputs=..., while set_reduce_scatter_unused_params gives every "
                "parameter one. Call backward without inputs, or turn the setting off "
                "before the forward."
            )


def _require_no_full(inputs: Sequence[Any]) -> None:
    """Raise if full parameters are requested beside sharded ones.

    Raises: PhaseError, on all ranks alike, before the engine runs.
    """
    others = [each for each in inputs if isinstance(each, nn.Parameter)]
    others = [each for each in others if not (find_leaf(each) or find_flat(each))]
    # A search of all units, which a request of sharded parameters alone does not need.
    originals = originals_by_vars() if others else {}
    for each in others:
        found = originals.get(id(vars(each)))
        if found is not None:
            raise full_param_requested(found[0], param_path(*found))


def _require_own_reduction(inputs: Sequence[Any]) -> None:
    """Raise if ``torch.autograd.grad`` cannot return the gradients.

    Raises: PhaseError, on all ranks alike, before the engine runs.
    """
    if not all(isinstance(each, Tensor) for each in inputs):
        raise PhaseError(
            "torch.autograd.grad was asked for gradients of sharded parameters and of "
            "GradientEdges in one call. Ask for them in two."
        )
    name = _first_name(inputs)
    if _is_batched():
        raise PhaseError(
            f"torch.autograd.grad was asked for gradients of sharded parameter {name} "
            "under vmap (is_grads_batched=True), where they cannot be reduced over "
            "ranks. Ask for one row at a time."
        )
    if current_task() != NO_TASK:
        raise PhaseError(
            f"torch.autograd.grad was asked for the gradient of sharded parameter "
            f"{name} inside another backward, whose end reduces. Call it after the "
            "backward has returned."
        )
    for handle in _units(inputs):
        owner = (
            handle.layout.trainable[0].reduce.owner()
            if handle.layout.trainable
            else None
        )
        # Before the question about replicas: ``set_requires_gradient_sync`` turns both
        # settings off, and only this message names the call.
        if owner is not None and not owner.settings.sync_gradients:
            raise PhaseError(
                f"torch.autograd.grad was asked for the gradient of sharded parameter "
                f"{name} inside no_sync, where gradients are not reduced. Call it "
                "outside, or after set_requires_gradient_sync(module, True)."
            )
        if not handle.rule.all_reduce and handle.groups.replicas > 1:
            raise PhaseError(
                f"torch.autograd.grad was asked for the gradient of sharded parameter "
                f"{name} while replicas do not reduce "
                "(set_requires_all_reduce(module, False)). Set it to True before."
            )
        if handle.reduction.due or handle.reduction.held is not None:
            raise PhaseError(
                f"torch.autograd.grad was asked for the gradient of sharded parameter "
                f"{name} while gradients of no_sync wait to be reduced in unit "
                f"{handle.name}. Run a backward outside no_sync before."
            )


def _require_no_hook(inputs: Sequence[Any]) -> None:
    """Raise if a hook of the user reduces, which has no graph.

    Raises: PhaseError, on all ranks alike, before the engine runs.
    """
    for handle in _units(inputs):
        # The collectives alone would give other gradients than ``backward``.
        if handle.rule.hook is not None or handle.rule.after_sum is not None:
            raise PhaseError(
                "torch.autograd.grad(create_graph=True) was asked for the gradient of "
                f"sharded parameter {_first_name(inputs)}, and a hook without a graph "
                f"reduces unit {handle.name} (register_comm_hook, set_all_reduce_hook)."
                " Ask for it without create_graph, or leave the hook out."
            )


def _first_name(inputs: Sequence[Any]) -> str:
    """Return the name of the first sharded or flat parameter, for error messages."""
    return next(_name(each) for each in inputs if find_leaf(each) or find_flat(each))


def _is_batched() -> bool:
    """Return whether this code runs inside the vmap of ``is_grads_batched=True``."""
    # ``_vmapmode_increment_nesting`` returns the new depth: 1 outside of vmap.
    depth: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return depth > 1


def _name(each: Any) -> str:
    """Return the name of an input for error messages."""
    found = find_leaf(each)
    if found is None:
        flat = find_flat(each)
        return "a flat parameter" if flat is not None else "an input"
    return quoted(param_path(*found))


class _Finishing:
    """Finish reductions with this backward; ``set_is_last_backward`` has no effect."""

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        owners = [
            h.layout.trainable[0].reduce.owner() for h in handles if h.layout.trainable
        ]
        contexts = [owner.context for owner in owners if owner is not None]
        self.contexts: list[RuntimeContext] = [
            *dict.fromkeys(each for each in contexts if each is not None)
        ]

    def __enter__(self) -> None:
        self.before = [
            root_of(each).settings.is_last_backward for each in self.contexts
        ]
        for context in self.contexts:
            # A reduction of an earlier backward must not be part of the requested
            # gradients.
            finish_reduction(context)
            finish_d2h_grad_copies(context)
            move_gradients_in(context.handles)
            root_of(context).settings.is_last_backward = True

    def __exit__(self, *_: object) -> None:
        for context, before in zip(self.contexts, self.before, strict=True):
            root_of(context).settings.is_last_backward = before


class _SetAside:
    """Save and clear ``.grad`` and hooks of tensors for a single backward."""

    def __init__(self, asked: Sequence[Tensor]) -> None:
        self.asked = asked
        # If the region has a flat parameter, the gradients are in ``.grad`` of the flat
        # parameter.
        flats = [
            found.region.flat for found in map(find_param, asked) if found is not None
        ]
        held = {id(each): each for each in (*asked, *flats) if each is not None}
        self.tensors = tuple(held.values())

    def __enter__(self) -> _SetAside:
        self.before = [(_gradient(t), _hooks(t)) for t in self.tensors]
        # Hooks of the user must not see gradients that are only returned.
        for tensor in self.tensors:
            tensor.grad = None
            if tensor.is_leaf:
                _set_hooks(tensor, None)
        return self

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return copies of the gradients of this backward."""
        # Copies, because the gradients are views of ``gradient.shard``, which a later
        # reduction may overwrite.
        return tuple(None if g is None else g.clone() for g in map(_came, self.asked))

    def __exit__(self, *_: object) -> None:
        for tensor, (gradient, hooks) in zip(self.tensors, self.before, strict=True):
            tensor.grad = gradient
            if tensor.is_leaf:
                _set_hooks(tensor, hooks)


def _came(asked: Tensor) -> Tensor | None:
    """Return the gradient of ``asked``, in or outside the flat parameter's gradient."""
    found = find_param(asked)
    if found is not None and found.region.flat is not None:
        return leaf_gradients(found.region)[found.index]
    return _gradient(asked)


class _Reached:
    """Record the groups of tensors for which a backward computes a gradient.

    The record is equal on all ranks, unlike ``.grad``: a rank may have no elements of a
    parameter.
    """

    def __init__(
        self, groups: Sequence[tuple[Any, ...]], outputs: Sequence[Any]
    ) -> None:
        self.groups, self.outputs = groups, outputs
        self.indices = set[int]()
        """Indices of the groups that a gradient of this backward reached."""
        self.inside = set[int]()
        """Indices of the groups that a backward inside this backward reached."""
        self.task = NO_TASK
        """The graph task of this backward."""

    def __enter__(self) -> _Reached:
        self.hooks = [
            tensor.register_hook(partial(self._note, index))
            for index, group in enumerate(self.groups)
            for tensor in group
        ]
        # An output gets its gradient before any backward inside can begin.
        for each in self.outputs:
            if isinstance(each, _GRAPH.GradientEdge):
                self.hooks.append(each.node.register_prehook(self._begin))
            elif each.requires_grad:
                self.hooks.append(each.register_hook(self._begin))
        return self

    def _begin(self, _: object) -> None:
        """Hook of the outputs: record the graph task of this backward."""
        if self.task == NO_TASK:
            self.task = current_task()

    def _note(self, index: int, _: Tensor) -> None:
        """Tensor hook: record that a gradient reached the group."""
        # A parameter may itself be the output.
        self._begin(_)
        (self.indices if current_task() == self.task else self.inside).add(index)

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _gradient(tensor: Tensor) -> Tensor | None:
    # Torch warns if ``.grad`` of a non-leaf tensor without ``retain_grad`` is read.
    """Return ``.grad``, or None for a tensor that keeps no gradient."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _hooks(tensor: Tensor) -> Any:
    """Return the post-accumulate-grad hooks of a leaf tensor."""
    return tensor._post_accumulate_grad_hooks if tensor.is_leaf else None


def _set_hooks(tensor: Tensor, hooks: Any) -> None:
    """Replace the post-accumulate-grad hooks of a leaf tensor."""
    tensor._post_accumulate_grad_hooks = hooks
