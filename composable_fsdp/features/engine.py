"""Wrapper of autograd's entry into the engine, ``_engine_run_backward``.

For ``backward(inputs=...)`` with sharded parameters, in whose place graphs hold full
ones, and for clear errors; any other backward pays a single function call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from composable_fsdp.errors import PhaseError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.optim.step_checks import find_held
from composable_fsdp.runtime.graph_task import run_backward

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
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    """Run ``backward(inputs=...)`` with sharded parameters among the inputs."""
    if not accumulate_grad:
        raise PhaseError(
            "torch.autograd.grad was asked for the gradient of "
            f"{_first_name(inputs)}, of which this rank holds a part; expected inputs "
            "of the model or activations. Call backward(), or backward(inputs=[...]) "
            "for some parameters, and read .grad."
        )
    _require_no_fill(inputs)
    # The hooks of the full parameters run and reduce as in a backward without
    # ``inputs``. A parameter that the graph does not hold gets no gradient.
    in_graph = tuple(chain.from_iterable(map(_in_graph, inputs)))
    return run(
        outputs,
        grad_outputs,
        retain_graph,
        create_graph,
        in_graph,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _in_graph(given: Any) -> tuple[Any, ...]:
    """Return the tensors that stand for ``given`` in graphs."""
    flat = find_flat(given)
    if flat is not None:
        region = flat[1].region
        leaves = () if region is None else region.leaves
        return (given, *chain.from_iterable(map(_in_graph, leaves)))
    found = find_leaf(given)
    if found is None or not given.requires_grad:
        return (given,)  # for a frozen parameter torch raises the usual error
    handle, index = found
    full = [*chain.from_iterable(r.full.leaves for r in handle.layout.regions)][index]
    # A parameter that was unfrozen since the forward is in no graph, as in the plain
    # model, and torch refuses tensors that require no grad.
    return (given, full) if full.requires_grad else (given,)


def _require_no_fill(inputs: Sequence[Any]) -> None:
    """Raise PhaseError if zeros would be reduced for parameters not in ``inputs``."""
    found = filter(None, map(find_held, inputs))
    # A dict keeps the order of the inputs, which is equal on all ranks.
    handles = dict.fromkeys(each.handle for each in found)
    for region in chain.from_iterable(h.layout.trainable[:1] for h in handles):
        owner = region.reduce.owner()
        context = None if owner is None else owner.context
        if context is not None and any(each.rule.fill for each in context.handles):
            name = _first_name(inputs)
            raise PhaseError(
                f"A backward was asked for the gradient of {name} "
                "by inputs=..., while set_reduce_scatter_unused_params gives every "
                "parameter one. Call backward without inputs, or turn the setting off "
                "before the forward."
            )


def _first_name(inputs: Sequence[Any]) -> str:
    """Return the name of the first sharded or flat parameter, for error messages."""
    return next(filter(None, map(find_held, inputs))).name
