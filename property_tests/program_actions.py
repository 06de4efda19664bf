"""What a script may do, to the sharded and to the plain model alike.

A recipe names one of these functions, and the arguments after the side. Each returns
what a script could look at, which is compared. ``side.sharded`` is asked only where the
package has a call of its own.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import (
    clip_grad_norm_,
    get_full_grad,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.access import (
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reduce_scatter_unused_params,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from composable_fsdp.features import released
from property_tests.program_cores import on_grad
from property_tests.program_model import (
    DTYPES,
    Piece,
    call,
    loss_of,
    named,
    output_of,
)
from property_tests.program_side import Broken, Side, Slot, optimizer_of

Seen = Any
"""Tensors, numbers, None, and lists and dicts of them."""


def pieces(side: Side) -> list[Piece]:
    return [m for m in side.model.modules() if isinstance(m, Piece)]


def piece(side: Side, index: int) -> Piece:
    found = pieces(side)
    return found[index % len(found)]


def pick(side: Side, index: int) -> tuple[str, nn.Parameter] | None:
    found = sorted(named(side.model).items())
    return found[index % len(found)] if found else None


# ---- the step ----------------------------------------------------------------


def forward(side: Side, batch: int, how: str = "train") -> Seen:
    """One forward; its loss waits for a backward."""
    x = side.inputs(batch)
    side.model.train(how != "evaluation")
    if how == "input_grad":
        x.requires_grad_()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "on_cpu": torch.autograd.graph.save_on_cpu,
        "anomaly": torch.autograd.detect_anomaly,
        "on_meta": lambda: torch.device("meta"),
    }
    torch.manual_seed(batch)
    with contexts.get(how, nullcontext)():
        y = output_of(side.model, x)
        loss = loss_of(side.model, y)
    if loss.requires_grad:
        side.slots.append(Slot(x, y, loss))
    return y.detach().clone(), loss.detach().clone()


def backward(side: Side, which: int = -1, how: str = "plain") -> Seen:
    """A backward of one of the losses that wait."""
    if not side.slots:
        return None
    slot = side.slots[which % len(side.slots)]
    if how in ("all", "twice"):
        total = torch.stack([s.loss for s in side.slots]).sum()
        side.slots.clear()
        if how == "twice":
            torch.autograd.backward(total, retain_graph=True)
        torch.autograd.backward(total)
        return None
    if how != "retain":
        side.slots.remove(slot)
    if how == "no_sync":
        with no_sync(side.model) if side.sharded else nullcontext():
            torch.autograd.backward(slot.loss)
    elif how == "replica":
        # Sums over the shard group wait for those of the replicas.
        if side.sharded:
            set_requires_all_reduce(side.model, False)
        torch.autograd.backward(slot.loss)
        if side.sharded:
            set_requires_all_reduce(side.model, True)
    elif how == "output":
        if slot.y.requires_grad:
            torch.autograd.backward(slot.y, torch.ones_like(slot.y))
    elif how == "create_graph":
        torch.autograd.backward(slot.loss, create_graph=True)
        if slot.x.grad is not None and slot.x.grad.requires_grad:
            grad, slot.x.grad = slot.x.grad, None
            torch.autograd.backward(grad.square().sum())
    elif how == "input_alone":
        if slot.x.requires_grad:
            torch.autograd.backward(slot.loss, inputs=[slot.x])
    elif how == "scaled":
        torch.autograd.backward(side.scaler.scale(slot.loss))
        side.scaled = True
    elif how == "half":
        torch.autograd.backward(slot.loss, torch.tensor(0.5))
    else:
        torch.autograd.backward(slot.loss, retain_graph=how == "retain")
    return None if slot.x.grad is None else slot.x.grad.clone()


def input_gradient(side: Side, which: int, then: str) -> Seen:
    """``autograd.grad`` with respect to the input, and what a script makes of it."""
    chosen = [s for s in side.slots if s.x.requires_grad]
    if not chosen:
        return None
    slot = chosen[which % len(chosen)]
    if then != "retain":
        side.slots.remove(slot)
    twice = then in ("penalty", "products", "product_and_backward")
    (grad,) = torch.autograd.grad(
        slot.loss, slot.x, create_graph=twice, retain_graph=twice or then == "retain"
    )
    found = [grad.detach().clone()]
    if then == "penalty" and grad.requires_grad:
        torch.autograd.backward(slot.loss + grad.square().sum())
    if then in ("products", "product_and_backward") and grad.requires_grad:
        for scale in (1.0, 2.0, 3.0):
            v = torch.linspace(0, scale, slot.x.numel()).view_as(slot.x)
            (product,) = torch.autograd.grad(
                grad, slot.x, v, retain_graph=True, allow_unused=True
            )
            found.append(product)
    if then == "product_and_backward":
        torch.autograd.backward(slot.loss)
    return found


def step(side: Side) -> Seen:
    forget_hidden(side)
    side.optimizer.step()


def forget_hidden(side: Side) -> None:
    """Drop graphs in which nothing tells that a step has changed weights."""
    kept_apart = {"argument:on_cpu", "call:on_cpu", "core:cpu"} & side.program.words()
    if side.optimizer.defaults.get("fused") or kept_apart:
        side.slots.clear()  # as a write through ``.data``


def zero(side: Side, how: str = "optimizer") -> Seen:
    """The ways to get rid of gradients."""
    if how == "optimizer":
        side.optimizer.zero_grad()
    elif how == "optimizer_zeros":
        side.optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        side.model.zero_grad()
    elif how == "model_zeros":
        side.model.zero_grad(set_to_none=False)
    else:
        for index, (_, p) in enumerate(sorted(named(side.model).items())):
            if how == "all" or index % 2 == (how == "odd"):
                p.grad = None


def clip(side: Side, limit: float, norm: float = 2.0) -> Seen:
    if side.sharded:
        # Asked of all ranks: one that holds nothing of a parameter has no gradient.
        names = [name for name, _ in side.model.named_parameters()]
        if all(get_full_grad(side.model, name) is None for name in names):
            return None
        return clip_grad_norm_(side.model, limit, norm).double()
    if all(p.grad is None for p in side.model.parameters()):
        return None
    return torch.nn.utils.clip_grad_norm_(
        [p for p in side.model.parameters() if p.numel()], limit, norm
    ).double()


def scaled(side: Side, how: str) -> Seen:
    """A scaler unscales, steps and updates; an infinity anywhere skips the step."""
    found = [(n, p) for n, p in sorted(named(side.model).items()) if has_grad(side, n)]
    if not found or not side.scaled:
        return None
    grad = found[len(found) // 2][1].grad
    # A fused first step that is skipped leaves torch's momentum uninitialised.
    if how == "infinite" and grad is not None and side.kind != "momentum_fused":
        grad.fill_(float("inf"))
    forget_hidden(side)
    if how == "unscale":
        side.scaler.unscale_(side.optimizer)
        clip(side, 0.3)
    side.scaler.step(side.optimizer)
    side.scaler.update()
    if how == "infinite":
        zero(side)
    return side.scaler.get_scale()


def has_grad(side: Side, name: str) -> bool:
    """On any rank: one that holds nothing of a parameter has no gradient."""
    if side.sharded:
        return get_full_grad(side.model, name) is not None
    return named(side.model)[name].grad is not None


# ---- gradients in the user's hands -------------------------------------------


def keep(side: Side, then: str) -> Seen:
    """Keep gradients, and clear all, some or none; what was kept is looked at later."""
    side.kept = {n: p.grad for n, p in named(side.model).items() if p.grad is not None}
    if then != "none":
        zero(side, then)


def change_gradients(side: Side, how: str) -> Seen:
    """Scale them, in place or by others; or let two parameters have one."""
    for _, p in sorted(named(side.model).items()):
        if how == "provide" and p.requires_grad:
            p.grad = torch.full_like(p, 0.1)
        if p.grad is None:
            continue
        if how == "mul_":
            p.grad.mul_(2)
        elif how == "assign":
            p.grad = p.grad * 2
        elif how == "clone":
            p.grad = p.grad.clone()
        elif how == "zero":
            p.grad.zero_()
        elif how == "replace_data":
            p.grad.data = p.grad.data * 2
    if how == "share" and not side.program.options.offload:
        table = named(side.model)
        for a, b in side.swappable[:1]:
            table[a].grad = table[b].grad


def swap(side: Side, first: int, second: int) -> Seen:
    """Two parameters of equal parts on every rank exchange their gradients."""
    pairs = side.swappable
    if not pairs:
        return
    a, b = pairs[(first + second) % len(pairs)]
    table = named(side.model)
    table[a].grad, table[b].grad = table[b].grad, table[a].grad


# ---- parameters ---------------------------------------------------------------


def freeze(side: Side, index: int) -> Seen:
    if (found := pick(side, index)) is not None:
        found[1].requires_grad_(not found[1].requires_grad)


def freeze_piece(side: Side, index: int, on: bool) -> Seen:
    for name in sorted(named(piece(side, index).core)):
        p = named(piece(side, index).core)[name]
        p.requires_grad_(on)


def write(side: Side, index: int, how: str) -> Seen:
    """A write to one parameter, on the shards or to the whole."""
    if (found := pick(side, index)) is None:
        return
    p = found[1]
    if how in ("data", "assign"):
        # Autograd does not see them, and a graph may have kept the old values or not.
        side.slots.clear()
    if how == "no_grad":
        with torch.no_grad():
            p.mul_(0.9)
    elif how == "data":
        p.data.mul_(0.9)
    elif how == "assign":
        p.data = p.data * 0.9
    elif how == "same_address":
        p.data = torch.from_numpy(p.data.numpy())
    elif how == "copy":
        with torch.no_grad():
            p.copy_(p * 0.9)
    elif how == "foreach":
        with torch.no_grad():
            torch._foreach_mul_(list(side.model.parameters()), 0.9)


def memory(side: Side, how: str) -> Seen:
    """Memory of parameters is kept, exchanged, flattened, written to, and put back."""
    side.slots.clear()
    table = named(side.model)
    every = sorted(table.items())
    if how == "keep":
        side.memory += [(name, p.data) for name, p in every]
    elif how == "new":
        for _, p in every:
            p.data = p.data * 0.5
    elif how == "restore":
        for name, tensor in side.memory:
            if tensor.dtype is table[name].dtype:
                table[name].data = tensor
    elif how == "write":
        for _, tensor in side.memory:
            tensor.mul_(2)
    elif how == "drop":
        side.memory.clear()
    elif how == "exchange":
        for a, b in side.swappable:
            table[a].data, table[b].data = table[b].data, table[a].data
    elif how == "flatten":
        buffer = torch.cat([p.data.reshape(-1) for _, p in every])
        views = torch.split(buffer, [p.numel() for _, p in every])
        for (_, p), view in zip(every, views, strict=True):
            p.data = view.view(p.shape)
        side.memory += [(name, p.data) for name, p in every]
    elif how == "swap":
        side.model.zero_grad()
        for _, p in every:
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 2))  # type: ignore[no-untyped-call]  # untyped in torch
        side.renew_optimizer()
    elif how == "empty":
        values = {k: v * 0.5 for k, v in side.model.state_dict().items()}
        side.model.zero_grad()  # ``to_empty`` gives gradients no values, either
        side.model.to_empty(device="cpu")
        side.model.load_state_dict(values)
        side.renew_optimizer()


def freeze_all(side: Side, on: bool) -> Seen:
    side.model.requires_grad_(on)


def mode(side: Side, train: bool) -> Seen:
    side.model.train(train)


def cast(side: Side, dtype: str, back: bool) -> Seen:
    """``model.to``, and back."""
    side.slots.clear()
    side.model.to(DTYPES[dtype])
    if back:
        side.model.to(torch.float64)
    side.optimizer.zero_grad()
    side.renew_optimizer()


def copy_model(side: Side, keep_optimizer_state: bool) -> Seen:
    """Go on with a deep copy."""
    side.slots.clear()
    state = side.optimizer.state_dict()
    side.optimizer.zero_grad()
    side.model = copy.deepcopy(side.model)
    side.renew_optimizer()
    if keep_optimizer_state:
        side.optimizer.load_state_dict(copy.deepcopy(state))


def copy_aside(side: Side, batch: int) -> Seen:
    """A deep copy is trained, and thrown away."""
    other = copy.deepcopy(side.model)
    torch.autograd.backward(loss_of(other, output_of(other, side.inputs(batch))))
    optimizer_of("sgd", other).step()
    return None


def new_optimizer(side: Side, kind: str) -> Seen:
    side.make_optimizer(kind)


def step_half(side: Side, odd: bool) -> Seen:
    """Another optimizer steps every other parameter, once."""
    forget_hidden(side)
    chosen = [p for _, p in sorted(named(side.model).items())][odd::2]
    torch.optim.SGD([{"params": chosen}], lr=0.05, momentum=0.9).step()


def module_hook(side: Side, index: int, kind: str) -> Seen:
    """A hook of a user on a module that may be a unit, after it was sharded."""
    module = piece(side, index)
    if kind == "scale":
        module.core.register_forward_hook(lambda _, args, y: y * 0.5)
    elif kind == "in_place":
        module.core.register_forward_hook(lambda _, args, y: (y * 1).mul_(0.5))
    elif kind == "input":
        module.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:]))
    elif kind == "input_in_place":
        module.register_forward_pre_hook(lambda _, args: (args[0].mul_(0.5), None)[1])
    elif kind == "gradient":
        module.core.register_full_backward_hook(lambda _, grads, outs: _halves(grads))
    elif kind == "output_gradient":
        module.core.register_full_backward_pre_hook(lambda _, grads: _halves(grads))


def _halves(grads: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in grads)


# ---- states ------------------------------------------------------------------


def save(side: Side) -> Seen:
    saved = side.model.state_dict()
    side.saved = {name: value.clone() for name, value in saved.items()}
    return dict(side.saved)


def load(side: Side, assign: bool = False) -> Seen:
    """What was saved last, into the parameters of now, or in their place."""
    if side.saved and assign:
        side.model.zero_grad()  # in a plain model they go with the old parameters
        saved = {name: value.clone() for name, value in side.saved.items()}
        side.model.load_state_dict(saved, assign=True)
        side.slots.clear()
        side.renew_optimizer()
    elif side.saved:
        side.model.load_state_dict(side.saved)


def optimizer_round_trip(side: Side) -> Seen:
    """Through names, which a plain optimizer does not have; compared as found."""
    names = {id(p): name for name, p in named(side.model).items()}
    if side.sharded:
        saved = optim_state_dict(side.model, side.optimizer)
        state = saved["state"]
        loaded = optim_state_dict_to_load(side.model, side.optimizer, saved)
        side.optimizer.load_state_dict(loaded)
    else:
        state = {names[id(p)]: dict(s) for p, s in side.optimizer.state.items()}
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    return {
        f"{name}.{key}": value.detach().clone()
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


# ---- full parameters ----------------------------------------------------------


def summon(side: Side, index: int, write_back: bool, grads: bool = False) -> Seen:
    """Full parameters of a unit and of those below it, looked at and changed."""
    name = side.units[index % len(side.units)]
    module = side.model.get_submodule(name)
    show: AbstractContextManager[Any] = nullcontext()
    if side.sharded:
        show = unshard_params(module, writeback=write_back, with_grads=grads)
    with show:
        seen: dict[str, Tensor | None] = {}
        for n, p in named(module).items():
            seen[n] = p.detach().clone()
        if grads:
            for n, p in named(module).items():
                seen[f"{n}.grad"] = None if p.grad is None else p.grad.clone()
        if write_back:
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(0.9)
    return seen if side.comparable(name) else None


def inside_summon(side: Side, what: str) -> Seen:
    """An optimizer is made, or steps, while parameters are full."""
    show: AbstractContextManager[Any] = nullcontext()
    if side.sharded:
        show = unshard_params(side.model)
    with show:
        if what == "make":
            side.renew_optimizer()
        else:
            side.optimizer.step()
    if what == "make":
        side.optimizer.step()


def unshard_unit(side: Side, index: int, async_op: bool) -> Seen:
    """And leave it so."""
    if side.sharded:
        name = side.units[index % len(side.units)]
        unshard(side.model.get_submodule(name), async_op=async_op)


def reshard_unit(side: Side, index: int) -> Seen:
    if side.sharded:
        name = side.units[index % len(side.units)]
        reshard(side.model.get_submodule(name))


def setting(side: Side, which: str, index: int, on: bool) -> Seen:
    """Switches that change when something is sent, and no number."""
    if not side.sharded:
        return
    calls: dict[str, Callable[..., None]] = {
        "after_backward": set_reshard_after_backward,
        "after_forward": set_reshard_after_forward,
    }
    name = side.units[index % len(side.units)]
    calls[which](side.model.get_submodule(name), on, recurse=False)


def prefetch(side: Side, when: str, index: int, targets: tuple[int, ...]) -> Seen:
    """A list of units of one tree to gather ahead."""
    if not side.sharded or side.program.options.apart:
        return
    lists = {
        "forward": set_modules_to_forward_prefetch,
        "backward": set_modules_to_backward_prefetch,
    }
    first, *ahead = (
        side.model.get_submodule(side.units[i % len(side.units)])
        for i in (index, *targets)
    )
    lists[when](first, ahead)


# ---- what goes wrong -----------------------------------------------------------


def raise_in_forward(
    side: Side, index: int, batch: int, after: bool, interrupt: bool = False
) -> Seen:
    """A module raises, or the user interrupts it, and the script goes on."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt if interrupt else Broken

    module = piece(side, index)
    register = (
        module.register_forward_hook if after else module.core.register_forward_pre_hook
    )
    hook = register(fail)
    try:
        output_of(side.model, side.inputs(batch))
    except (Broken, KeyboardInterrupt):
        return "raised"
    finally:
        hook.remove()
        for each in pieces(side):
            each.aux = each.kept = None
    return "nothing"


def raise_in_backward(
    side: Side, index: int, batch: int, cleared: str, interrupt: bool = False
) -> Seen:
    """A hook in backward raises; the script clears all gradients and goes on."""

    def fail(grad: Tensor) -> Tensor:
        raise KeyboardInterrupt if interrupt else Broken

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            on_grad(output, fail)

    # What a backward adds before it raises is not defined: a sharded model adds a
    # unit's gradients at once. So no ``.grad`` that is still in place is looked at.
    shown = {id(p.grad) for p in side.model.parameters()}
    side.kept = {n: kept for n, kept in side.kept.items() if id(kept) not in shown}
    handle = piece(side, index).core.register_forward_hook(hook)
    torch.manual_seed(batch)
    y = output_of(side.model, side.inputs(batch))
    loss = loss_of(side.model, y)
    handle.remove()
    raised = "nothing"
    try:
        if loss.requires_grad:
            torch.autograd.backward(loss)
    except (Broken, KeyboardInterrupt):
        raised = "raised"
    # A .grad of an earlier backward is gone on both sides, or on neither.
    zero(side, cleared)
    return raised


def raise_in_leaf_hooks(side: Side, index: int, batch: int) -> Seen:
    """Hooks of parameters raise, maybe at the end of backward, and all is cleared."""

    def fail(_: Tensor) -> None:
        raise Broken

    untyped: list[Any] = list(piece(side, index).core.parameters())
    hooks = [p.register_post_accumulate_grad_hook(fail) for p in untyped]
    loss = loss_of(side.model, output_of(side.model, side.inputs(batch)))
    try:
        torch.autograd.backward(loss)
    except Broken:
        return "raised"
    finally:
        for hook in hooks:
            hook.remove()
        zero(side, "model")
    return "nothing"


def nap(side: Side, keep: str) -> Seen:
    """Sleep and wake between steps, with the gradients or without."""
    side.slots.clear()
    if keep == "none":
        zero(side)
    if side.sharded and not side.program.options.apart:
        with released(side.model, side.optimizer, keep=keep):
            assert not any(
                p.untyped_storage().nbytes() for p in side.model.parameters()
            )


def collect(side: Side) -> Seen:
    gc.collect()


def call_core(side: Side, index: int, batch: int) -> Seen:
    """A part of a unit, or a unit, called by itself."""
    torch.manual_seed(batch)
    with torch.no_grad():
        x = side.inputs(batch)
        return piece(side, index).compute(x).to(x.dtype)


def alone(side: Side, index: int, batch: int) -> Seen:
    """A forward of one unit by itself, and its backward."""
    name = side.units[index % len(side.units)]
    above, _, last = name.rpartition(".")
    module: Any = side.model.get_submodule(above if last == "core" else name)
    torch.manual_seed(batch)
    x = side.inputs(batch)
    y = module.compute(x) if last == "core" else call(module, x)
    loss = loss_of(side.model, y)
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return y.detach().clone()


def sync(side: Side, on: bool) -> Seen:
    """The switch of ``no_sync``; the plain side's averages follow it."""
    side.synced = on
    if side.sharded:
        set_requires_gradient_sync(side.model, on)


def fill(side: Side, on: bool) -> Seen:
    side.filled = on
    if side.sharded:
        set_reduce_scatter_unused_params(side.model, on)


def leaf_hook(side: Side, index: int, kind: str) -> Seen:
    """A hook of a user on a parameter."""
    if (found := pick(side, index)) is None:
        return
    p = found[1]
    if not p.requires_grad:
        return
    if kind == "tensor":
        on_grad(p, lambda grad: grad * 2)
    else:
        untyped: Any = p
        untyped.register_post_accumulate_grad_hook(_keep_as_it_is)


def _keep_as_it_is(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(1.0)
