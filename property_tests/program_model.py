"""Building the model of a program: pieces that call pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp.naming import strip_wrapper
from property_tests.program_cores import CORES, on_grad
from property_tests.program_forms import FORMS, WIDTH, Call
from property_tests.program_recipes import Part, Program

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
Once = Callable[[Tensor], Tensor]


class Stop(Exception):
    """How a module tells its caller to do without it."""


class Piece(nn.Module):
    """A core, then the children, each called and used as its part says."""

    core: nn.Module
    aux: Tensor | None
    kept: Tensor | None
    low = False
    """Units cast to float32; what is between them may promote to float64 again."""

    def __init__(self, part: Part, width: int, finished: list[Piece]) -> None:
        super().__init__()
        self.part, self.turn = part, 0
        self.aux = self.kept = None
        self.core = CORES[part.core](width)
        for index, p in enumerate(self.core.parameters()):
            p.requires_grad_(p.requires_grad and index >= part.frozen)
        self.shapes = {n: p.shape for n, p in self.core.named_parameters()}
        if part.dtype != "float64":
            self.core.to(DTYPES[part.dtype])
        self.below = nn.ModuleList()
        for child in part.children:
            again = child.again is not None and finished
            made = finished[(child.again or 0) % len(finished)] if again else None
            self.below.append(made or Piece(child, width, finished))
        finished.append(self)

    def forward(self, x: Tensor, bag: Any = None, depth: int = 0) -> Any:
        """Whatever the form says."""
        if depth < 0:
            self.compute(x)
            raise Stop
        if depth:
            x = take(self, x, bag, self(x, bag, depth - 1))
        y = self.compute(x)
        for child, part in zip(self.below, self.part.children, strict=True):
            y = USES[part.use](y, CALLS[part.call](child, y), child)
        return FORMS[self.part.form][0](self, x, y, bag)

    def compute(self, x: Tensor) -> Tensor:
        """The core, in the dtype of its parameters."""
        dtype = DTYPES[self.part.dtype]
        if self.low:
            found = (p.dtype for p in self.core.parameters() if p.is_floating_point())
            return cast(Tensor, self.core(x.to(next(found, x.dtype))))
        if dtype is x.dtype or dtype is torch.float64:
            return cast(Tensor, self.core(x))
        return cast(Tensor, self.core(x.to(dtype))).to(x.dtype)


def take(child: Any, passed: Tensor, bag: Any, result: Any) -> Tensor:
    return FORMS[child.part.form][1](Call(child, passed, bag, result))


def call(child: Any, x: Tensor, how: str = "args") -> Tensor:
    """Call a piece once."""
    passed = x * 1  # it may be changed in place
    if child.low:
        passed = passed.double()  # which units cast
    bag = FORMS[child.part.form][2]()
    if how == "keywords":
        result = child(x=passed, bag=bag)
    elif how == "forward":
        result = child.forward(passed, bag)
    elif how == "deep":
        result = child(passed, bag, depth=2)
    else:
        result = child(passed, bag)
    return take(child, passed, bag, result)


def _under(context: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def inside(child: Any, x: Tensor) -> Tensor:
        with context():
            call(child, x)
        return call(child, x)

    return inside


def _checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def inside(child: Any, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda z: call(child, z), x, use_reentrant=reentrant)
        return y

    return inside


def _without_grad(child: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return call(child, x)


def _skip(child: Any, x: Tensor) -> Tensor:
    child.turn = child.turn + 1
    return call(child, x) if child.turn % 2 else x


def _caught(child: Any, x: Tensor) -> Tensor:
    """The child gives up half way, and its caller goes on without it."""
    try:
        child(x * 1, None, depth=-1)
    except Stop:
        return x * 0.5
    raise AssertionError("the child did not stop")


def _caught_and_again(child: Any, x: Tensor) -> Tensor:
    return call(child, _caught(child, x))


class _Recompute(torch.autograd.Function):
    """Forward without a graph, and a second forward in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Once) -> Tensor:
        ctx.run, ctx.random = run, torch.random.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng([]):
            torch.random.set_rng_state(ctx.random)
            y = ctx.run(x)
        torch.autograd.backward(y, grads[0])
        return cast(Tensor, x.grad), None


def _recomputed(child: Any, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return call(child, x)
    x = x if x.requires_grad else x.detach().requires_grad_()
    y: Tensor = _Recompute.apply(x, lambda z: call(child, z))  # type: ignore[no-untyped-call]  # untyped in torch
    return y


def _gradient(child: Any, x: Tensor) -> Tensor:
    """What the child's output would have its input be."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return call(child, x)
    inner = x if x.requires_grad else x.detach().requires_grad_()
    y = call(child, inner)
    if not y.requires_grad:
        return y
    (grad,) = torch.autograd.grad(
        y.square().sum(), inner, create_graph=True, materialize_grads=True
    )
    return y + 0.1 * grad


def _vjp(child: Any, x: Tensor) -> Tensor:
    y, pull = torch.func.vjp(lambda z: call(child, z), x)[:2]
    return cast(Tensor, y + 0.1 * pull(torch.ones_like(y))[0])


def _jvp(child: Any, x: Tensor) -> Tensor:
    y, tangent = torch.func.jvp(lambda z: call(child, z), (x,), (torch.ones_like(x),))[
        :2
    ]
    return cast(Tensor, y + 0.1 * tangent)


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": call,
    "keywords": lambda child, x: call(child, x, "keywords"),
    "twice": lambda child, x: call(child, call(child, x)),
    "beside": lambda child, x: call(child, x) + call(child, x * 0.5),
    "deep": lambda child, x: call(child, x, "deep"),
    "checkpoint": _checkpointed(False),
    "reentrant": _checkpointed(True),
    "no_grad": _without_grad,
    "after_no_grad": _under(torch.no_grad),
    "after_inference": _under(torch.inference_mode),
    "on_cpu": _under(torch.autograd.graph.save_on_cpu),
    "skip": _skip,
    "never": lambda child, x: x,
    "caught": _caught,
    "caught_and_again": _caught_and_again,
    "recomputed": _recomputed,
    "gradient": _gradient,
    "vjp": _vjp,
    "jvp": _jvp,
    "vmap": lambda child, x: torch.func.vmap(lambda row: call(child, row[None])[0])(x),
    "forward": lambda child, x: call(child, x, "forward"),
    "method": lambda child, x: cast(Tensor, child.compute(x)),
    "core": lambda child, x: cast(Tensor, child.core(x)),
}


def _set(h: Tensor, y: Tensor, child: Any) -> Tensor:
    y[:, 0] = 0.5 * h[:, 0]
    return y


def _mul_view(h: Tensor, y: Tensor, child: Any) -> Tensor:
    y[:, 1:].mul_(0.5)
    return y


def _add_to(h: Tensor, y: Tensor, child: Any) -> Tensor:
    h = h * 1
    h.add_(y)
    return h


def _hook(h: Tensor, y: Tensor, child: Any) -> Tensor:
    if y.requires_grad:
        on_grad(y, lambda grad: grad * 0.5)
    return y


def _retain(h: Tensor, y: Tensor, child: Any) -> Tensor:
    if y.requires_grad:
        y.retain_grad()
    return y


def _weight(h: Tensor, y: Tensor, child: Any) -> Tensor:
    weight = next(child.core.parameters(), None)
    if weight is None or weight.dim() != 2:
        return y
    return y + F.linear(h, weight.to(h.dtype))


def _norm(h: Tensor, y: Tensor, child: Any) -> Tensor:
    return y + 0.01 * sum(
        (p.square().sum().to(y.dtype) for p in child.parameters()), y.new_zeros(())
    )


def _data(h: Tensor, y: Tensor, child: Any) -> Tensor:
    y.data.mul_(0.5)
    return y


USES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "take": lambda h, y, child: y,
    "residual": lambda h, y, child: h + y,
    "mul_": lambda h, y, child: y.mul_(0.5),
    "iadd": lambda h, y, child: y.__iadd__(h),
    "relu_": lambda h, y, child: F.relu_(y),
    "set": _set,
    "mul_view": _mul_view,
    "mul_data": _data,
    "add_to": _add_to,
    "ignore": lambda h, y, child: h,
    "square": lambda h, y, child: y * y * 0.3,
    "detach": lambda h, y, child: h + y.detach(),
    "hook": _hook,
    "retain_grad": _retain,
    "one_row": lambda h, y, child: h + y[0],
    "weight": _weight,
    "penalty": _norm,
}


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {strip_wrapper(name): p for name, p in model.named_parameters()}


def build(program: Program) -> Piece:
    """Build the model; equal programs give equal values."""
    with torch.random.fork_rng([]):
        torch.manual_seed(program.seed)
        return Piece(program.root, program.width, [])


def unit_paths(model: Piece) -> list[str]:
    """Where the units are below the root."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, Piece):
            here = [path] if path and module.part.unit in ("piece", "both") else []
            core = [f"{path}.core".lstrip(".")]
            found += here + (core if module.part.unit in ("core", "both") else [])
    return found


def output_of(model: Any, x: Tensor) -> Tensor:
    """What the root gives; it may be called on its own output, or call itself."""
    WIDTH[0] = x.shape[1]
    how = model.part.call if model.part.call in ("twice", "deep") else "plain"
    return CALLS[how](model, x).to(x.dtype)


def loss_of(model: Any, y: Tensor) -> Tensor:
    """A scalar that depends on the output, and on what the modules keep for it."""
    loss = y.square().mean()
    for module in model.modules():
        if isinstance(module, Piece):
            if module.aux is not None and module.part.form != "aux_for_parent":
                loss = loss + 0.1 * module.aux
            module.aux = module.kept = None
    return loss
