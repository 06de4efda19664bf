"""Models on meta, and initialisers whose values are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.support.models import TinyGPT


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tied_gpt() -> nn.Module:
    return TinyGPT(width=6, vocab=13, tied_head=True)


@torch.no_grad()
def fill(module: nn.Module, start: int = 0) -> None:
    """Give what the module holds directly small numbers that depend on the shape."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_floating_point():
            numbers = torch.arange(tensor.numel(), dtype=tensor.dtype) * 0.37 + start
            tensor.copy_(numbers.sin().view(tensor.shape) * 0.3)
        elif tensor is not None:
            tensor.zero_()


def fill_from_meta(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def filled(model: nn.Module) -> nn.Module:
    """A plain model with the numbers of ``fill``."""
    for module in model.modules():
        fill(module)
    return model
