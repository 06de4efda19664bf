"""Chooses the units of a Lightning module, and shards the parameters outside of units.

With automatic optimization the LightningModule is one root, whose forwards are steps.
With manual optimization a step also runs backward, so each child is a root of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torchmetrics import Metric

from composable_fsdp.compose.registry import get_state
from composable_fsdp.config import MixedPrecision
from composable_fsdp.entries.fully_shard import fully_shard
from composable_fsdp.errors import CompositionError
from composable_fsdp.features.passages.casts import cast_floating
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.walk import has_forward
from composable_fsdp.tools.model_units import NoSplitPolicy

AUTO = "auto"
"""The policy that makes repeated layers units."""

_sharded_here: WeakSet[nn.Module] = WeakSet()
"""Roots that a strategy made; the other roots are the user's."""


def shard(
    module: nn.Module,
    options: Mapping[str, Any],
    mixed_precision: MixedPrecision | None,
    *,
    has_one_root: bool = True,
) -> None:
    """Shard the parameters of ``module`` that no unit holds yet, except of metrics.

    Raises: CompositionError, if an earlier strategy sharded the module differently, or
        if without one root a parameter is in no child with a forward.
    """
    # Metrics such as FID hold networks of their own, which are replicated: torchmetrics
    # copies and moves their tensors as whole tensors.
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    chosen = dict(options)
    ignored = [*(chosen.pop("ignored_modules", None) or ()), *metrics]
    # By identity: comparing tensors would compare elements.
    kept = {id(p) for each in ignored for p in each.parameters()}
    kept.update(map(id, chosen.get("ignored_states") or ()))
    # An explicit MixedPrecision of the user wins over the precision of the trainer.
    own_precision = chosen.pop("mixed_precision", None)
    chosen["mixed_precision"] = own_precision or mixed_precision
    policy = chosen.pop("policy", AUTO)
    for root in _roots(module, kept, has_one_root=has_one_root):
        fully_shard(
            root,
            policy=_repeated_layers(root) if policy == AUTO else policy,
            # fully_shard refuses a root that is to be ignored.
            ignored_modules=[each for each in ignored if each is not root],
            # Of the second call on, for fit after fit: equal settings, or an error.
            if_sharded="skip",
            **chosen,
        )
        _sharded_here.add(root)
    # With several roots each root casts its own inputs; the user's own MixedPrecision
    # says itself which inputs are cast.
    if mixed_precision is not None and own_precision is None and has_one_root:
        _cast_inputs_of_children(module, mixed_precision, ignored)


def _roots(
    module: nn.Module, kept: set[int], *, has_one_root: bool
) -> Iterator[nn.Module]:
    """Yield the modules to shard, with those that a strategy sharded before."""
    if has_one_root:
        if _is_to_shard(module, kept):
            yield module
        return
    for name, child in _callable_parts(module):
        if _is_to_shard(child, kept):
            _refuse_shared(module, name, child)
            yield child
    # Parameters of the module itself, and of containers, have no forward that could
    # gather them.
    reached = {
        id(p) for _, child in _callable_parts(module) for p in child.parameters()
    }
    outside = [
        name
        for name, parameter in module.named_parameters()
        if id(parameter) not in reached | kept and find_leaf(parameter) is None
    ]
    if outside:
        raise CompositionError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False),"
            " so each of its children is sharded on its own; its parameters "
            f"{listed([quoted(each) for each in outside])} belong to no child with a "
            "forward. Put them into a module with a forward, or shard by hand in "
            "configure_model, or pass ignored_states=[...] to the strategy (each rank "
            "then holds them whole, and you average their gradients)."
        )


def is_unit(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module`` itself."""
    return get_state(module, "fully_shard") is not None


def has_units(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied in ``module``: replicas are whole."""
    return any(map(is_unit, module.modules()))


def _is_to_shard(module: nn.Module, kept: set[int]) -> bool:
    """Return whether ``module`` is a root of a strategy, or has parameters for one."""
    # Roots that were sharded before are checked again for equal settings. A module that
    # the user made a unit by hand holds every parameter already.
    if is_unit(module):
        return module in _sharded_here
    return any(id(p) not in kept and find_leaf(p) is None for p in module.parameters())


def _callable_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the nearest modules below ``module`` that have a forward, with names."""
    for name, child in module.named_children():
        if isinstance(child, Metric):
            continue
        # A list of modules is never called; its entries are.
        if has_forward(child):
            yield name, child
        else:
            for inner, part in _callable_parts(child):
                yield f"{name}.{inner}", part


def _refuse_shared(module: nn.Module, name: str, child: nn.Module) -> None:
    """Refuse a parameter that ``child`` shares with a module outside of ``child``."""
    # All names of tied parameters, because the first name alone would hide the tie.
    inside = dict(child.named_parameters(prefix=name, remove_duplicate=False))
    identities = {id(parameter): path for path, parameter in inside.items()}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in identities and path not in inside:
            raise CompositionError(
                f"{quoted(identities[id(parameter)])} and {quoted(path)} are the same "
                f"parameter, and {type(module).__name__} optimizes by hand "
                "(automatic_optimization=False), so each of its children is sharded on "
                "its own. Put both modules into one module with a forward, and call "
                "that module."
            )


def _repeated_layers(root: nn.Module) -> NoSplitPolicy:
    """Return the policy for layers that models below ``root`` name, or that repeat."""
    named = {
        each
        for module in root.modules()
        # transformers has None there in some classes.
        for each in getattr(module, "_no_split_modules", None) or ()
    }
    # The policy refuses names without a module, and models of transformers name classes
    # of variants that this model does not have.
    there = {type(module).__name__ for module in root.modules()}
    return NoSplitPolicy(sorted(named & there) or None)


def _cast_inputs_of_children(
    module: nn.Module, mixed_precision: MixedPrecision, ignored: list[nn.Module]
) -> None:
    """Have the children of ``module`` cast floating point inputs, once per child."""
    dtype = mixed_precision.param_dtype
    if dtype is None:
        return
    # Parameters that the root holds are gathered in half precision, and layers such as
    # LayerNorm refuse inputs of another dtype on a CPU, under autocast, too.
    cast = _InputCast(dtype)
    for _, child in _callable_parts(module):
        held = next(child.parameters(), None)
        if child in ignored or held is None:
            continue
        # A fit after a fit must not register the pre-hook again.
        hooks = child._forward_pre_hooks.values()
        if not any(isinstance(hook, _InputCast) for hook in hooks):
            child.register_forward_pre_hook(cast, with_kwargs=True)


class _InputCast:
    """A forward pre-hook that casts floating point tensors among the inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), self.dtype)
