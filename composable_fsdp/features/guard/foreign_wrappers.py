"""Refuses wrappers of others that would take shards for whole parameters."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import quoted

_DDP = (
    "Units average their gradients themselves: leave DistributedDataParallel away, and "
    "give replicate(model) of this package what no unit holds."
)
_DP = "Call the sharded module itself, with one process per GPU (torchrun)."
_LIGHTNING = (
    'import composable_fsdp.lightning and pass strategy="composable_fsdp": it keeps '
    "the units that you made, and shards the rest."
)
_WHOLE = (
    "It trains and averages whole weights on each rank: units average their gradients "
    "themselves in each step; leave LocalSGD out."
)
_REFUSED = "DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"
_OF_TORCH = (
    ("torch.nn.parallel", ("DistributedDataParallel",), "__init__", _DDP),
    ("torch.nn.parallel", ("DataParallel",), "__init__", _DP),
)
_PLACES = (
    # The Trainer, in both distributions; the module is an attribute of the strategy.
    ("lightning.pytorch.strategies", _REFUSED, "setup", _LIGHTNING),
    ("pytorch_lightning.strategies", _REFUSED, "setup", _LIGHTNING),
    # Fabric; the module is the argument.
    ("lightning.fabric.strategies", _REFUSED, "setup_module", _LIGHTNING),
    ("lightning_fabric.strategies", _REFUSED, "setup_module", _LIGHTNING),
    # The module is an attribute, if LocalSGD is enabled.
    ("accelerate.local_sgd", ("LocalSGD",), "__enter__", _WHOLE),
)
_guarded: set[type] = set()


def guard_wrappers() -> None:
    """Guard DDP, DataParallel, and what is imported of Lightning and accelerate."""
    # Each application looks again for a library that was imported since.
    for place, names, method, way_out in (*(() if _guarded else _OF_TORCH), *_PLACES):
        # A look-up and no import: sharding must work without the library.
        home = sys.modules.get(place)
        for name in names if home is not None else ():
            # Older or newer versions may lack a class.
            kind = getattr(home, name, None)
            if isinstance(kind, type) and kind not in _guarded:
                _guarded.add(kind)
                own = getattr(kind, method)
                setattr(kind, method, _guarded_method(own, way_out))


def _guarded_method(own: Any, way_out: str) -> Any:
    """Return the method ``own`` of a wrapper, which first refuses a sharded module."""

    @functools.wraps(own)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = (getattr(self, name, None) for name in ("lightning_module", "model"))
        given = (*args, *kwargs.values(), *held)
        module = next((each for each in given if isinstance(each, nn.Module)), None)
        if module is not None:
            _require_plain(type(self).__name__, module, way_out)
        return own(self, *args, **kwargs)

    return guarded


def _require_plain(what: str, module: nn.Module, way_out: str) -> None:
    """Raise CompositionError if ``module`` holds a sharded parameter."""
    # DDP leaves out what this attribute of the module names.
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, parameter in module.named_parameters():
        if find_leaf(parameter) is not None and name not in ignored:
            raise CompositionError(
                f"{what} was put around a {type(module).__name__} whose parameter "
                f"{quoted(name)} is fully sharded; it would take this rank's rows for "
                f"the whole parameter. {way_out}"
            )
