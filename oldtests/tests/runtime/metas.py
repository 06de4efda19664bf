"""Models on meta, and initialisers whose values are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.models import TinyGPT


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``make`` builds, without values."""
    with torch.device("meta"):
        return make()


def gpt() -> nn.Module:
    """A small GPT whose sizes no world size divides evenly."""
    return TinyGPT(width=6, vocab=13)


def tied_gpt() -> nn.Module:
    """The same with a head that is its embedding."""
    return TinyGPT(width=6, vocab=13, tied_head=True)


class Known(nn.Linear):
    """A linear whose ``reset_parameters`` draws nothing, and counts its calls."""

    start = 0

    def reset_parameters(self) -> None:
        """Numbers from the shape, other ones at each further call."""
        calls = vars(self).setdefault("calls", 0) + 1
        vars(self)["calls"] = calls
        fill(self, self.start + calls)


class Scale(nn.Module):
    """Multiplies by a buffer; it holds nothing else."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Two everywhere."""
        vars(self)["calls"] = vars(self).setdefault("calls", 0) + 1
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def known_model() -> nn.Sequential:
    """Odd sizes, buffers with and without parameters beside them, and a tie."""
    first, second = Known(6, 6), Known(6, 6)
    second.weight = first.weight
    second.start = 10
    model = nn.Sequential(
        nn.Sequential(Known(6, 7), nn.ReLU(), Known(7, 6)),
        nn.BatchNorm1d(6),
        Scale(),
        nn.Sequential(first, second),
    )
    for module in model.modules():
        vars(module).pop("calls", None)
    return model


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
    """A ``param_init_fn``: memory first, then numbers."""
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def filled(model: nn.Module) -> nn.Module:
    """A plain model with the numbers of ``fill``."""
    for module in model.modules():
        fill(module)
    return model


def call_counts(model: nn.Module) -> dict[str, int]:
    """How often each module was reset."""
    return {n: vars(m)["calls"] for n, m in model.named_modules() if "calls" in vars(m)}
