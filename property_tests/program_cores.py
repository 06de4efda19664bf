"""Cores: small modules, ordinary and odd, from ``(batch, width)`` to the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Hook = Callable[[Tensor], "Tensor | None"]
Compute = Callable[[Any, Tensor], Tensor]
CORES: dict[str, Callable[[int], nn.Module]] = {}


def core(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    CORES[make.__name__.lower()] = make
    return make


def on_grad(tensor: Tensor, hook: Hook) -> None:
    untyped: Any = tensor
    untyped.register_hook(hook)


def param(*shape: int, at: float = 0.0) -> nn.Parameter:
    return nn.Parameter(at + 0.3 * torch.randn(shape))


@core
class Linear(nn.Module):
    """The ordinary one; others change what it does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = param(width, width)
        self.bias = param(width)

    def affine(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.affine(x))


@core
class Plain(nn.Module):
    """No parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Vector(nn.Module):
    """One weight of ``width`` elements near 1.5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = param(width, at=1.5)


def vector(compute: Callable[[Tensor, Any], Tensor], name: str) -> None:
    """Enter a core that computes element by element with a weight."""

    def forward(self: Vector, x: Tensor) -> Tensor:
        return compute(x, self.weight)

    CORES[name] = type(name, (Vector,), {"forward": forward})


vector(lambda x, w: x * w, "mul")
vector(lambda x, w: x / w, "div")
vector(lambda x, w: x * torch.pow(w, 3), "pow")
vector(lambda x, w: F.prelu(x, w), "prelu")
vector(lambda x, w: F.rms_norm(x, (len(w),), w), "rms")
vector(lambda x, w: F.layer_norm(x, (len(w),), w), "layer_norm")
vector(lambda x, w: x * w.norm() / 3, "norm_of_weight")
vector(lambda x, w: x * float(w.sum()) / len(w), "python_value")
vector(lambda x, w: x + w.detach() * x, "detached")
vector(lambda x, w: x.clone().mul_(w).add_(w), "inplace_inside")
vector(lambda x, w: torch.func.vmap(lambda row: row * w)(x), "vmap")
vector(lambda x, w: x + torch.func.grad(lambda v: (v * w).pow(3).sum())(x), "func_grad")
vector(lambda x, w: cast(Any, _Scale).apply(x, w), "custom")
vector(lambda x, w: checkpoint(torch.mul, x, w, use_reentrant=False), "ckpt_inside")
vector(lambda x, w: x + _energy_gradient(x, w), "grad_inside")
vector(lambda x, w: _hooked(x * w, w), "tensor_hook")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


def _energy_gradient(x: Tensor, w: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return 2 * x * w.square()
    inner = x if x.requires_grad else x.detach().requires_grad_()
    energy = (inner * w).square().sum()
    return torch.autograd.grad(energy, inner, create_graph=True)[0]


def _hooked(y: Tensor, w: Tensor) -> Tensor:
    if y.requires_grad:
        on_grad(y, lambda grad: grad * w.detach().abs())
    return y


@core
class Scalar(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = param()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x) * self.scale


@core
class Tiny(nn.Module):
    """One element: other ranks hold nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = param(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@core
class Zero(nn.Module):
    """A parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = param(0, width)
        self.bias = param(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias + self.nothing.sum()


@core
class Lists(nn.Module):
    """A ParameterList and a ParameterDict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([param(width, at=1.0), param(1, at=1.0)])
        self.named = nn.ParameterDict({"shift": param(width)})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x + cast(Tensor, self.named["shift"])


@core
class Tied(Linear):
    """One parameter under two names, one of them in a module below."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.below = nn.Linear(width, width)
        self.below.weight = self.weight
        self.same = self.below

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, super().forward(x) + self.below(x))


def line(name: str, compute: Callable[[Any, Tensor], Tensor]) -> None:
    CORES[name] = type(name, (Linear,), {"forward": compute})


def _own_penalty(self: Linear, x: Tensor) -> Tensor:
    total = sum(p.square().sum() for _, p in self.named_parameters())
    return Linear.forward(self, x) + 0.01 * total


def _clamped(self: Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.weight.clamp_(-0.2, 0.2)
    return Linear.forward(self, x)


def _clamped_data(self: Linear, x: Tensor) -> Tensor:
    self.weight.data.clamp_(-0.2, 0.2)
    return Linear.forward(self, x)


def _reentrant_inside(self: Linear, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(self.affine, x, use_reentrant=True)
    return x + torch.tanh(y)


def _saved_by_hooks(self: Linear, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return Linear.forward(self, x)


line("dropout", lambda m, x: F.dropout(Linear.forward(m, x), 0.25, m.training))
line("ownpenalty", _own_penalty)  # reads all of its own parameters by name
# Its bias is used before and after its weight.
line("twoinputs", lambda m, x: x + F.linear(x + m.bias, m.weight).tanh() * m.bias)
# Freezes its own bias in evaluation, and uses it or not by what it finds.
line("changing", lambda m, x: Linear.forward(m, x) * (1 + m.bias.requires_grad))
line("clamp", _clamped)
line("dataclamp", _clamped_data)
line("reentrantinside", _reentrant_inside)
line("cpu", _saved_by_hooks)


class Holder(nn.Module):
    """A module of torch, and what is computed with it."""

    def __init__(self, inner: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.inner, self.compute = inner, compute

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.inner, x)


def holder(
    name: str,
    make: Callable[[int], nn.Module],
    compute: Compute = lambda m, x: torch.tanh(m(x)),
) -> None:
    CORES[name] = lambda width: Holder(make(width), compute)


def _old_weight_norm(width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(nn.Linear(width, width))


def _attend(m: nn.Module, x: Tensor) -> Tensor:
    y = x.unsqueeze(0)
    return cast(Tensor, m(y, y, y, need_weights=False)[0][0])


def _several_steps(m: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        state = m(x, state)
    return state


def _look_up(m: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, m(torch.arange(len(x), device=x.device) % 3))


holder(
    "modules",
    lambda w: nn.Sequential(nn.Sequential(nn.Linear(w, w), nn.GELU()), nn.LayerNorm(w)),
)
holder("batchnorm", nn.BatchNorm1d, lambda m, x: m(x))  # forward writes its buffers
holder(
    "conv",
    lambda w: nn.Conv1d(1, 1, 3, padding=1),
    lambda m, x: m(x.unsqueeze(1)).squeeze(1),
)
holder("lstm", lambda w: nn.LSTM(w, w), lambda m, x: m(x.unsqueeze(0))[0].squeeze(0))
holder("gru", lambda w: nn.GRUCell(w, w), _several_steps)
holder("attention", lambda w: nn.MultiheadAttention(w, 1, batch_first=True), _attend)
holder("bilinear", lambda w: nn.Bilinear(w, w, w), lambda m, x: torch.tanh(m(x, x)))
holder("embedding", lambda w: nn.Embedding(3, w), _look_up)
# It scales its own rows down in forward.
holder("maxnorm", lambda w: nn.Embedding(3, w, max_norm=0.5), _look_up)
holder("weightnorm", lambda w: parametrizations.weight_norm(nn.Linear(w, w)))
holder("orthogonal", lambda w: parametrizations.orthogonal(nn.Linear(w, w)))
holder("spectralnorm", lambda w: parametrizations.spectral_norm(nn.Linear(w, w)))
holder("oldweightnorm", _old_weight_norm)  # the weight is an attribute


@core
class Counter(Linear):
    """A buffer that counts forwards, and is used."""

    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
        return super().forward(x) / (1 + 0.1 * self.count.detach().clone())


@core
class Images(nn.Module):
    """A weight in channels_last, whose shards are contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it

    def forward(self, x: Tensor) -> Tensor:
        images = torch.stack([x, x * x], 1).unsqueeze(2)
        return x + cast(Tensor, self.conv(images)).squeeze(2).squeeze(1)


@core
class Normalized(Linear):
    """Forced weight norm, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight))
        return super().forward(x)


@core
class Quantized(Linear):
    """``.data`` replaced for the time of forward, and put back."""

    def forward(self, x: Tensor) -> Tensor:
        whole = self.weight.data
        self.weight.data = torch.round(whole * 8) / 8
        y = super().forward(x)
        self.weight.data = whole
        return y


@core
class Hooked(Linear):
    """Hooks of a user: before and after forward, and after backward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen: list[int] = []
        self.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        self.register_forward_hook(lambda _, args, out: out * 0.5)
        self.register_full_backward_hook(self._after_backward)

    def _after_backward(self, module: nn.Module, *grads: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in grads[0])


@core
class NoGradPart(Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.affine(x)
        return super().forward(x) + y


@core
class OneRowOnly(Linear):
    """Uses the weight, and the bias in evaluation alone: it gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return x + torch.tanh(x @ self.weight.t())


@core
class Jvp(Vector):
    """Forward-mode differentiation of its own function."""

    def forward(self, x: Tensor) -> Tensor:
        tangents = torch.func.jvp(
            lambda v: torch.tanh(v * self.weight), (x,), (torch.ones_like(x),)
        )
        return x + cast(Tensor, tangents[1])


@core
class Complex(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.weight).abs() * 0.3


@core
class Turned(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width, width + 1).t()[:width])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


@core
class Whole(Linear):
    """A parameter of integers, which nobody trains."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        order = torch.arange(width).flip(0)
        self.order = nn.Parameter(order, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.order.long()])


@core
class NoBias(Linear):
    """A parameter that is None."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = None  # type: ignore[assignment]  # as nn.Linear(bias=False)

    def affine(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@core
class Falsy(Linear):
    """A module that is false, as an empty container is."""

    def __len__(self) -> int:
        return 0


@core
class Memory(Linear):
    """Computes with what it computed before."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        last, self.last = self.last, y.detach().clone()
        return y if last is None or last.shape != y.shape else y + 0.1 * last
