"""Refuses strategies of Lightning that would take shards for whole parameters.

``DDPStrategy`` would broadcast rank 0's rows, ``FSDPStrategy`` and DeepSpeed cut shards
again, and ``ModelParallelStrategy`` clip by the norm of one rank's rows (checked on
Lightning 2.6.6). A user who shards by hand need not import our Lightning strategy.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.param_ref import first_sharded
from composable_fsdp.naming import quoted

REFUSED = (
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
)
_PLACES = {
    # The Trainer, in both distributions; the module is an attribute of the strategy.
    "lightning.pytorch.strategies": "setup",
    "pytorch_lightning.strategies": "setup",
    # Fabric; the module is the argument.
    "lightning.fabric.strategies": "setup_module",
    "lightning_fabric.strategies": "setup_module",
}
_guarded: set[type] = set()


def guard_strategies() -> None:
    """Guard the strategies of the distributions of Lightning that are imported."""
    for place, method in _PLACES.items():
        # A look-up and no import: sharding must work without Lightning.
        if (strategies := sys.modules.get(place)) is None:
            continue
        for name in REFUSED:
            # Older or newer versions may lack a strategy.
            kind = getattr(strategies, name, None)
            if isinstance(kind, type) and kind not in _guarded:
                _guarded.add(kind)
                setattr(kind, method, _guarded_method(getattr(kind, method)))


def _guarded_method(own: Any) -> Any:
    """Return the method ``own`` of a strategy, which first refuses a sharded module."""

    @functools.wraps(own)
    def guarded(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        # ``Trainer`` passes itself; ``Fabric`` passes the module.
        module = given if isinstance(given, nn.Module) else self.lightning_module
        if (first := first_sharded(module)) is not None:
            raise CompositionError(
                f"Lightning's {type(self).__name__} was put around a "
                f"{type(module).__name__} whose parameter {quoted(first)} is fully "
                "sharded; the strategy would take this rank's rows for the whole "
                'parameter. import composable_fsdp.lightning and pass strategy="'
                'composable_fsdp": it keeps the units that you made, and shards the '
                "rest."
            )
        return own(self, given, *args, **kwargs)

    return guarded
