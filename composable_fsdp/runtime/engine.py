"""The one way into autograd's engine, as torch's functions for backward call it.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all call
``torch.autograd._engine_run_backward``. The first ``fully_shard`` puts a function of
ours in front of it (as ``torch.compiler`` does while it traces), because two mistakes
can be seen nowhere else:

* gradients with respect to sharded parameters. The graph of a forward holds the full
  leaves, so the engine would find the originals unreachable and return nothing, or
  zeros. Here the full leaves take their place, and the gradients come out reduced.
* a read of weights outside their window (``flat.versions``): torch's message knows a
  shape and two numbers, ours names the parameter.

A backward that has nothing of both pays one call. Checked on torch 2.13 and 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.handed_out import FLATS, find_flat
from composable_fsdp.flat.handle import LEAVES, FlatParamHandle, find_leaf
from composable_fsdp.flat.versions import find_unreadable
from composable_fsdp.naming import join, shown
from composable_fsdp.runtime.asked import for_others
from composable_fsdp.runtime.second_order import capture, reduced

_GRAPH: Any = torch.autograd.graph
_AUTOGRAD: Any = torch.autograd
_torch_run: Callable[..., Any] = _GRAPH._engine_run_backward


def install() -> None:
    """Put ``run_backward`` in front of torch's way into the engine, once."""
    global _torch_run
    if _AUTOGRAD._engine_run_backward is not run_backward:
        _torch_run = _AUTOGRAD._engine_run_backward
        _AUTOGRAD._engine_run_backward = _GRAPH._engine_run_backward = run_backward


def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Run the engine; gradients of sharded parameters are those of their unit.

    Collective: as the backward; the reductions of units whose parameters are asked for.
    Raises: PhaseError, naming a parameter that the graph reads while it is sharded, or
    whose gradient cannot be had by itself.
    """
    try:
        if len(args) > 3 and args[3]:
            if _holds_ours(args[3]):
                return _for_parameters(outputs, *args, **kwargs)
            with for_others():
                return _torch_run(outputs, *args, **kwargs)
        return _torch_run(outputs, *args, **kwargs)
    except RuntimeError as error:
        name = find_unreadable(str(error))
        if name is None:
            raise
        raise PhaseError(
            f"Backward needs parameter {name} while it is sharded: it came to the "
            "parameter's unit through a tensor that the unit's forward did not return, "
            "or after the unit had given its weights up. Return the tensor from the "
            "forward (an auxiliary loss as a second output), or keep it on an "
            "attribute of the unit's module from the first forward on."
        ) from error


def _holds_ours(inputs: Sequence[Any]) -> bool:
    ids = set(map(id, inputs))
    return not (LEAVES.keys().isdisjoint(ids) and FLATS.keys().isdisjoint(ids))


def _for_parameters(
    outputs: Sequence[Any],
    grad_outputs: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = False,
    accumulate_grad: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a backward with respect to parameters of units, among others.

    ``torch.autograd.backward(inputs=...)`` accumulates into their ``.grad``; for
    ``torch.autograd.grad`` this rank's parts of the averaged gradients are returned.
    """
    allow_unused = kwargs.pop("allow_unreachable", allow_unused)
    accumulate_grad = kwargs.pop("accumulate_grad", accumulate_grad)
    _require_no_fill(inputs)
    full = [_in_graph(each) for each in inputs]
    if not accumulate_grad:
        _require_own_reduction(inputs)
    run = (grad_outputs, retain_graph, create_graph, tuple(chain.from_iterable(full)))
    if create_graph and not accumulate_grad:
        return _with_graph(outputs, run, inputs, full, allow_unused=allow_unused)
    if accumulate_grad:
        return _torch_run(
            outputs, *run, allow_unreachable=True, accumulate_grad=True, **kwargs
        )
    with _SetAside(inputs) as aside, _Reached(full) as reached:
        _torch_run(outputs, *run, allow_unreachable=True, accumulate_grad=True)
        found = aside.gradients()
    if not allow_unused:
        _require_all(inputs, [i in reached.indices for i in range(len(inputs))])
    # A parameter of which this rank holds nothing has no gradient here.
    return tuple(
        torch.zeros_like(each)
        if gradient is None and index in reached.indices
        else gradient
        for index, (each, gradient) in enumerate(zip(inputs, found, strict=True))
    )


def _with_graph(
    outputs: Sequence[Any],
    run: tuple[Any, ...],
    inputs: Sequence[Any],
    full: Sequence[tuple[Any, ...]],
    *,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
    """Run a backward whose gradients, of parameters too, have a graph."""
    flat = next((each for each in inputs if find_flat(each)), None)
    if flat is not None:
        raise PhaseError(
            "torch.autograd.grad(create_graph=True) was asked for the gradient of "
            f"{_name(flat)}. Ask for those of module.parameters()."
        )
    handles = _units(inputs)
    captured: tuple[Tensor | None, ...] = capture(
        handles,
        partial(
            _torch_run, outputs, *run, allow_unreachable=True, accumulate_grad=False
        ),
    )
    # Of the two forms of a leaf the graph holds one.
    rest = iter(captured)
    found = [
        next((g for g in [next(rest) for _ in group] if g is not None), None)
        for group in full
    ]
    if not allow_unused:
        _require_all(inputs, [each is not None for each in found])
    by_unit: dict[FlatParamHandle, dict[int, Tensor]] = {each: {} for each in handles}
    places = [find_leaf(each) for each in inputs]
    for place, gradient in zip(places, found, strict=True):
        if place is not None and gradient is not None:
            by_unit[place[0]][place[1]] = gradient
    shards = {handle: reduced(handle, by_unit[handle]) for handle in handles}
    return tuple(
        gradient if place is None or gradient is None else shards[place[0]][place[1]]
        for place, gradient in zip(places, found, strict=True)
    )


def _require_all(inputs: Sequence[Any], reached: Sequence[bool]) -> None:
    """Refuse an input that the graph does not lead to. Raises: PhaseError."""
    for each, is_reached in zip(inputs, reached, strict=True):
        if not is_reached:
            raise PhaseError(
                "torch.autograd.grad found no path from the output to "
                f"{_name(each)}. Pass allow_unused=True, if that is intended."
            )


def _in_graph(given: Any) -> tuple[Any, ...]:
    """The tensors that stand for ``given`` in the graphs of forwards."""
    flat = find_flat(given)
    if flat is not None:
        region = flat[1].region
        leaves = () if region is None else region.leaves
        return tuple(chain.from_iterable(map(_in_graph, leaves)))
    found = find_leaf(given)
    if found is None or not given.requires_grad:
        return (given,)  # of a frozen parameter torch says what it says of any
    handle, index = found
    forms = [[r.full_leaves for r in handle.regions]]
    if handle.other_form is not None:
        forms.append([each[3] for each in handle.other_form.regions])
    return tuple([list(chain.from_iterable(form))[index] for form in forms])


def _units(inputs: Sequence[Any]) -> list[FlatParamHandle]:
    found = [find_flat(each) or find_leaf(each) for each in inputs]
    return list(dict.fromkeys(each[0] for each in found if each is not None))


def _require_no_fill(inputs: Sequence[Any]) -> None:
    """Refuse to give zeros to parameters that were not asked for.

    Raises: PhaseError, on all ranks alike.
    """
    for handle in _units(inputs):
        owner = handle.trainable[0].owner() if handle.trainable else None
        context = None if owner is None else owner.context
        if context is not None and any(each.rule.fill for each in context.handles):
            name = _first_name(inputs)
            raise PhaseError(
                f"A backward was asked for the gradient of sharded parameter {name} "
                "by inputs=..., while set_reduce_scatter_unused_params gives every "
                "parameter one. Call backward without inputs, or turn the setting off "
                "before the forward."
            )


def _require_own_reduction(inputs: Sequence[Any]) -> None:
    """Refuse what ``torch.autograd.grad`` cannot give of parameters, before it runs.

    Raises: PhaseError, on all ranks alike.
    """
    if not all(isinstance(each, Tensor) for each in inputs):
        raise PhaseError(
            "torch.autograd.grad was asked for gradients of sharded parameters and of "
            "GradientEdges in one call. Ask for them in two."
        )
    name = _first_name(inputs)
    for handle in _units(inputs):
        if handle.reduce_due or handle.held is not None:
            raise PhaseError(
                f"torch.autograd.grad was asked for the gradient of sharded parameter "
                f"{name} while gradients of no_sync wait to be reduced in unit "
                f"{handle.name}. Run a backward outside no_sync before."
            )
        owner = handle.trainable[0].owner() if handle.trainable else None
        if owner is not None and not owner.sync_gradients:
            raise PhaseError(
                f"torch.autograd.grad was asked for the gradient of sharded parameter "
                f"{name} inside no_sync, where gradients are not reduced. Call it "
                "outside."
            )


def _first_name(inputs: Sequence[Any]) -> str:
    return next(_name(each) for each in inputs if find_leaf(each) or find_flat(each))


def _name(each: Any) -> str:
    found = find_leaf(each)
    if found is None:
        flat = find_flat(each)
        return "a flat parameter" if flat is not None else "an input"
    return shown(join(found[0].full_fqn, found[0]._fqns[found[1]]))


class _SetAside:
    """``.grad`` of some tensors, and their hooks on it, set aside for one backward."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __enter__(self) -> _SetAside:
        self.before = [(_gradient(t), _hooks(t)) for t in self.tensors]
        for tensor in self.tensors:
            tensor.grad = None
            if tensor.is_leaf:
                _set_hooks(tensor, None)
        return self

    def gradients(self) -> tuple[Tensor | None, ...]:
        """What came meanwhile, in memory of its own."""
        found = [_gradient(tensor) for tensor in self.tensors]
        return tuple(each if each is None else each.clone() for each in found)

    def __exit__(self, *_: object) -> None:
        for tensor, (gradient, hooks) in zip(self.tensors, self.before, strict=True):
            tensor.grad = gradient
            if tensor.is_leaf:
                _set_hooks(tensor, hooks)


class _Reached:
    """Which of some groups of tensors a backward brings a gradient to.

    Equal on all ranks, where ``.grad`` is not: a rank may hold nothing of a parameter.
    """

    def __init__(self, groups: Sequence[tuple[Any, ...]]) -> None:
        self.groups, self.indices = groups, set[int]()

    def __enter__(self) -> _Reached:
        self.hooks = [
            tensor.register_hook(partial(self._note, index))
            for index, group in enumerate(self.groups)
            for tensor in group
        ]
        return self

    def _note(self, index: int, _: Tensor) -> None:
        self.indices.add(index)

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _gradient(tensor: Tensor) -> Tensor | None:
    # Torch warns of a question for the gradient of a tensor that keeps none.
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _hooks(tensor: Tensor) -> Any:
    return tensor._post_accumulate_grad_hooks if tensor.is_leaf else None


def _set_hooks(tensor: Tensor, hooks: Any) -> None:
    tensor._post_accumulate_grad_hooks = hooks
