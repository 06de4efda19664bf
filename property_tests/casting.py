"""Names that a plain and a sharded model have in common."""

from __future__ import annotations

from torch import nn

from composable_fsdp.naming import strip_wrapper


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under the names of the plain model."""
    return {strip_wrapper(name): p for name, p in model.named_parameters()}
