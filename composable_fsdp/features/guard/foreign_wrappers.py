"""Refuses wrappers of others that would take shards for whole parameters.

They would broadcast rank 0's rows, copy or cut shards again, average the rows of
different ranks, or clip by the norm of one rank's rows. A user who shards by hand need
not import our Lightning strategy::

    nn.DataParallel, DDP        where ``__init__`` registers the attribute ``module``
    strategies of Lightning     before the method that gets the module
    LocalSGD of accelerate      where its block begins
"""

from __future__ import annotations

import functools
import sys
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from composable_fsdp.compose.registry import TORCH_DDP, incompatible_api
from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.flat.param_ref import first_sharded
from composable_fsdp.naming import quoted

_LIGHTNING = (
    'import composable_fsdp.lightning and pass strategy="composable_fsdp": it keeps '
    "the units that you made, and shards the rest."
)
_WHOLE = (
    "It trains and averages whole weights on each rank: units average their gradients "
    "themselves in each step; leave LocalSGD out."
)
_REFUSED = "DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"
_PLACES = {
    # The Trainer, in both distributions; the module is an attribute of the strategy.
    "lightning.pytorch.strategies": (_REFUSED, "setup", _LIGHTNING),
    "pytorch_lightning.strategies": (_REFUSED, "setup", _LIGHTNING),
    # Fabric; the module is the argument.
    "lightning.fabric.strategies": (_REFUSED, "setup_module", _LIGHTNING),
    "lightning_fabric.strategies": (_REFUSED, "setup_module", _LIGHTNING),
    # The module is an attribute, if LocalSGD is enabled.
    "accelerate.local_sgd": (("LocalSGD",), "__enter__", _WHOLE),
}
_guarded: set[type] = set()


def guard_wrappers() -> None:
    """Guard DDP, DataParallel, and what is imported of Lightning and accelerate."""
    if nn.Module not in _guarded:
        _guarded.add(nn.Module)
        register_module_module_registration_hook(_on_registration)
    for place, (names, method, way_out) in _PLACES.items():
        # A look-up and no import: sharding must work without the library.
        home = sys.modules.get(place)
        for name in names if home is not None else ():
            # Older or newer versions may lack a class.
            kind = getattr(home, name, None)
            if isinstance(kind, type) and kind not in _guarded:
                _guarded.add(kind)
                own = getattr(kind, method)
                setattr(kind, method, _guarded_method(own, way_out))


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse a DDP or DataParallel when ``__init__`` registers its ``module``."""
    if name != "module" or child is None:
        return
    if isinstance(parent, nn.DataParallel):
        _require_plain(
            "nn.DataParallel",
            child,
            first_sharded(child),
            "Call the sharded module itself, with one process per GPU (torchrun).",
        )
    elif incompatible_api(parent) == TORCH_DDP:
        # DDP.__init__ sets this before it registers ``module``, and broadcasts
        # afterwards (checked on torch 2.13 and 2.11).
        ignored: Any = parent.parameters_to_ignore
        names = (
            fqn
            for fqn, parameter in child.named_parameters()
            if find_leaf(parameter) is not None and fqn not in ignored
        )
        _require_plain(
            "DistributedDataParallel",
            child,
            next(names, None),
            "Units average their gradients themselves: leave DistributedDataParallel "
            "away, and give replicate(model) of this package what no unit holds.",
        )


def _require_plain(
    what: str, module: nn.Module, first: str | None, way_out: str
) -> None:
    """Raise CompositionError if ``first`` names a sharded parameter."""
    if first is not None:
        raise CompositionError(
            f"{what} was put around a {type(module).__name__} whose parameter "
            f"{quoted(first)} is fully sharded; it would take this rank's rows for the "
            f"whole parameter. {way_out}"
        )


def _guarded_method(own: Any, way_out: str) -> Any:
    """Return the method ``own`` of a wrapper, which first refuses a sharded module."""

    @functools.wraps(own)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = (getattr(self, name, None) for name in ("lightning_module", "model"))
        given = (each for each in (*args, *held) if isinstance(each, nn.Module))
        for module in islice(given, 1):
            name = type(self).__name__
            _require_plain(name, module, first_sharded(module), way_out)
        return own(self, *args, **kwargs)

    return guarded
