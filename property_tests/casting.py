"""A plain model that computes with other tensors than its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from composable_fsdp.naming import strip_wrapper


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under the names of the plain model."""
    return {strip_wrapper(name): p for name, p in model.named_parameters()}


@contextmanager
def shown(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Have ``model`` compute with ``tensors``, wherever it holds their parameters.

    torch's ``functional_call`` leaves the tensors behind in a module of two names.
    """
    by_id = {id(p): tensors[name] for name, p in named(model).items()}
    swaps = [
        (module._parameters, key, p)
        for module in model.modules()
        for key, p in module._parameters.items()
        if p is not None
    ]
    for table, key, p in swaps:
        table[key] = by_id[id(p)]  # type: ignore[assignment]  # plain tensors serve
    try:
        yield
    finally:
        for table, key, p in swaps:
            table[key] = p
