"""Chooses the units of a Lightning module, and shards the parameters outside of units.

With automatic optimization the LightningModule is one root, whose forwards are steps.
With manual optimization a step also runs backward, so each child is a root of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
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
_cast_here: WeakSet[nn.Module] = WeakSet()
"""Modules whose inputs a strategy has cast."""


def shard(
    module: nn.Module,
    options: Mapping[str, Any],
    mixed_precision: MixedPrecision | None,
    *,
    has_one_root: bool = True,
) -> None:
    """Shard the parameters of ``module`` that no unit holds yet, except of metrics.

    Raises: CompositionError, if an earlier strategy sharded the module differently, or
        if without one root a parameter is not in exactly one child with a forward.
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
    roots = [module] if has_one_root else _children(module, kept)
    # Roots that were sharded before are checked again for equal settings.
    roots = [each for each in roots if _is_to_shard(each, kept)]
    for root in roots:
        fully_shard(
            root,
            policy=NoSplitPolicy() if policy == AUTO else policy,
            # fully_shard refuses a root that is to be ignored.
            ignored_modules=[each for each in ignored if each is not root],
            # Of the second call on, for fit after fit: equal settings, or an error.
            if_sharded="skip",
            **chosen,
        )
        _sharded_here.add(root)
    # With several roots each root casts its own inputs; the user's own MixedPrecision
    # says itself which inputs are cast.
    dtype = mixed_precision and mixed_precision.param_dtype
    if dtype and own_precision is None and has_one_root:
        _cast_children(module, dtype, ignored)


def _cast_children(
    module: nn.Module, dtype: torch.dtype, ignored: list[nn.Module]
) -> None:
    """Have the children of ``module`` cast floating point inputs, once per child."""
    # Parameters that the root holds are gathered in half precision, and layers such
    # as LayerNorm refuse inputs of another dtype on a CPU, under autocast, too.
    cast = partial(_cast_inputs, dtype)
    for child in _callable_parts(module):
        left_out = child in ignored or next(child.parameters(), None) is None
        # A fit after a fit must not register the pre-hook again.
        if not left_out and child not in _cast_here:
            child.register_forward_pre_hook(cast, with_kwargs=True)
            _cast_here.add(child)


def _children(module: nn.Module, kept: set[int]) -> list[nn.Module]:
    """Return the roots of ``module`` if its steps run backward; or raise."""
    parts = list(_callable_parts(module))
    holders = Counter(id(p) for part in parts for p in part.parameters())
    # A parameter of the module itself, or of a container, has no forward that could
    # gather it (also if a child holds it, too), and a tied one has several.
    inner = {each for part in parts for each in part.modules()}
    for each in set(module.modules()) - inner:
        holders.update({id(p): 2 for p in each.parameters(recurse=False)})
    alone = [
        name
        for name, parameter in module.named_parameters()
        if holders[id(parameter)] != 1
        and id(parameter) not in kept
        and find_leaf(parameter) is None
    ]
    if alone:
        raise CompositionError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False),"
            " so each of its children is sharded on its own; its parameters "
            f"{listed(map(quoted, alone))} belong to no child with a forward, or to "
            "several. Put them into one module with a forward and call that module, or "
            "shard by hand in configure_model, or pass ignored_states=[...] to the "
            "strategy (each rank then holds them whole, and you average their "
            "gradients)."
        )
    return parts


def is_unit(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module`` itself."""
    return get_state(module, "fully_shard") is not None


def has_units(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied in ``module``: replicas are whole."""
    return any(map(is_unit, module.modules()))


def _is_to_shard(module: nn.Module, kept: set[int]) -> bool:
    """Return whether ``module`` is a root of a strategy, or has parameters for one."""
    # A module that the user made a unit by hand holds every parameter already.
    if is_unit(module):
        return module in _sharded_here
    return any(id(p) not in kept and find_leaf(p) is None for p in module.parameters())


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the nearest modules below ``module`` that have a forward."""
    for child in module.children():
        # A list of modules is never called; its entries are.
        if not has_forward(child):
            yield from _callable_parts(child)
        elif not isinstance(child, Metric):
            yield child


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating point tensors among the inputs; a forward pre-hook."""
    return cast_floating((args, kwargs), dtype)
