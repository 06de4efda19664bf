"""Wrapper of autograd's entry into the engine, ``_engine_run_backward``.

Graphs hold full parameters, so gradients of sharded ones are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from composable_fsdp.errors import PhaseError
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
        ours = partial(run_backward, found, _refuse)
        _AUTOGRAD._engine_run_backward = _GRAPH._engine_run_backward = ours


def _refuse(inputs: Sequence[Any]) -> NoReturn:
    """Refuse ``inputs`` with sharded or flat parameters, by the name of the first."""
    name = next(filter(None, map(find_held, inputs))).name
    raise PhaseError(
        "torch.autograd.grad, or a backward by inputs=[...], was asked for the "
        f"gradient of {name}, of which this rank holds a part; expected inputs of the "
        "model or activations. Call backward(), and read .grad; for some parameters "
        "only, set requires_grad to False for the others before the forward."
    )
