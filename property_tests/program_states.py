"""Actions that take a state and put it back: directories, torch's functions, by name.

As in ``program_actions``: the plain side does by hand what ours has a call for.
"""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from composable_fsdp import (
    LoadOptions,
    StateDictType,
    async_save,
    get_full_grad,
    get_full_param,
    load,
    optim_state_dict,
    optim_state_dict_to_load,
    save,
    set_full_grad,
    set_full_param,
    state_dict_type,
)
from composable_fsdp.optim import get_full_optim_state
from property_tests.program_model import named
from property_tests.program_side import Side

Seen = Any


class Taken(NamedTuple):
    """A state of model and optimizer, how it was taken, and of what optimizer."""

    how: str
    model: Any
    optimizer: Any
    kind: Any


def kind_of(side: Side) -> Any:
    return type(side.optimizer), side.optimizer.defaults


def fits(side: Side, *ways: str) -> bool:
    taken = side.taken
    return taken is not None and taken.how in ways and taken.kind == kind_of(side)


def take_plain(side: Side, how: str) -> None:
    """What a plain script holds of model and optimizer."""
    optimizer = copy.deepcopy(side.optimizer.state_dict())
    model = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.taken = Taken(how, model, optimizer, kind_of(side))


def put_plain(side: Side, with_optimizer: bool = True) -> None:
    assert side.taken is not None
    side.model.load_state_dict(side.taken.model)
    if with_optimizer:
        side.optimizer.load_state_dict(copy.deepcopy(side.taken.optimizer))


# ---- directories ---------------------------------------------------------------


def save_directory(side: Side, with_optimizer: bool, in_background: bool) -> Seen:
    """A checkpoint; what is written in the background is older than what follows."""
    side.directories += 1
    how = "directory and optimizer" if with_optimizer else "directory"
    if not side.sharded:
        take_plain(side, how)
    else:
        path = os.path.join(side.folder, str(side.directories))
        optimizer = side.optimizer if with_optimizer else None
        side.taken = Taken(how, path, None, kind_of(side))
        if not in_background:
            save(path, side.model, optimizer)
        else:
            side.pending = async_save(path, side.model, optimizer)
    if in_background:
        with torch.no_grad():
            for _, p in sorted(named(side.model).items()):
                if p.is_floating_point():
                    p.mul_(0.9)
    if side.pending is not None:
        side.pending.result(timeout=20)
        side.pending = None


def load_directory(side: Side) -> Seen:
    if not fits(side, "directory", "directory and optimizer"):
        return
    assert side.taken is not None
    with_optimizer = side.taken.how != "directory"
    if side.sharded:
        optimizer = side.optimizer if with_optimizer else None
        load(
            side.taken.model,
            side.model,
            optimizer,
            options=LoadOptions(cast=True, rng=False),
        )
    else:
        put_plain(side, with_optimizer)


# ---- torch.distributed.checkpoint.state_dict -----------------------------------


def torch_get(side: Side, how: str) -> Seen:
    """torch's functions, which make state where there is none: on both sides."""
    options = StateDictOptions(full_state_dict=how == "full")
    model = copy.deepcopy(get_model_state_dict(side.model, options=options))
    optimizer = get_optimizer_state_dict(side.model, side.optimizer, options=options)
    side.taken = Taken(how, model, copy.deepcopy(optimizer), kind_of(side))
    if how != "full":
        return None
    states: Any = optimizer["state"]
    return dict(model), {n: tensors_of(state) for n, state in states.items()}


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in state.items() if isinstance(v, Tensor)}


def torch_set(side: Side) -> Seen:
    if not fits(side, "full", "sharded"):
        return
    assert side.taken is not None
    options = StateDictOptions(full_state_dict=side.taken.how == "full")
    model, optimizer = copy.deepcopy((side.taken.model, side.taken.optimizer))
    set_model_state_dict(side.model, model, options=options)
    set_optimizer_state_dict(side.model, side.optimizer, optimizer, options=options)


# ---- states of a type, and as bytes --------------------------------------------


def typed_save(side: Side, kind: str, pickled: bool) -> Seen:
    """Sharded, local or full values of model and optimizer, through a pickle."""
    if not side.sharded:
        take_plain(side, kind)
        return
    with state_dict_type(side.model, StateDictType[kind]):
        both = (
            copy.deepcopy(side.model.state_dict()),  # with its metadata
            copy.deepcopy(optim_state_dict(side.model, side.optimizer)),
        )
    model, optimizer = pickle.loads(pickle.dumps(both)) if pickled else both
    side.taken = Taken(kind, model, optimizer, kind_of(side))


def typed_load(side: Side) -> Seen:
    if not fits(side, *(kind.name for kind in StateDictType)):
        return
    assert side.taken is not None
    if not side.sharded:
        put_plain(side)
        return
    model, optimizer = copy.deepcopy((side.taken.model, side.taken.optimizer))
    with state_dict_type(side.model, StateDictType[side.taken.how]):
        side.model.load_state_dict(model)
        side.optimizer.load_state_dict(
            optim_state_dict_to_load(side.model, side.optimizer, optimizer)
        )


def raw_round_trip(side: Side) -> Seen:
    """``optimizer.state_dict()`` as it is, and back."""
    state = copy.deepcopy(side.optimizer.state_dict())
    side.make_optimizer(side.kind)
    side.optimizer.load_state_dict(state)


# ---- one parameter by its name --------------------------------------------------


def single(side: Side, index: int, what: str) -> Seen:
    """One parameter, its gradient or its state, read or written whole."""
    names = sorted(named(side.model))
    if not names:
        return None
    name = names[index % len(names)]
    p = named(side.model)[name]
    if what == "get_param":
        return get_full_param(side.model, name) if side.sharded else p.detach().clone()
    if what == "get_grad":
        if side.sharded:
            return get_full_grad(side.model, name)
        return None if p.grad is None else p.grad.detach().clone()
    if what == "get_state":
        if side.sharded:
            state = get_full_optim_state(side.model, side.optimizer, name)
        else:
            state = side.optimizer.state.get(p, {})
        return tensors_of(state)
    if not p.dtype.is_floating_point or not p.requires_grad:
        return None
    shape = side.shapes[name]
    value = torch.linspace(0.1, 0.5, max(1, shape.numel()), dtype=p.dtype)
    value = value[: shape.numel()].view(shape)
    if what == "set_param" and side.sharded:
        set_full_param(side.model, name, value)
    elif what == "set_param":
        with torch.no_grad():
            p.copy_(value)
    elif side.sharded:
        set_full_grad(side.model, name, value if what == "set_grad" else None)
    else:
        p.grad = value if what == "set_grad" else None
    return None
