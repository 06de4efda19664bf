"""Refuses strategies of Lightning that would take shards for whole parameters.

``DDPStrategy`` broadcasts rank 0's parameters before it validates, which overwrites the
shards of all other ranks; ``FSDPStrategy`` and DeepSpeed would cut shards again;
``ModelParallelStrategy`` clips by the norm of one rank's shards. A user who shards by
hand need not import ``composable_fsdp.lightning``, so the guard is installed when a
module is sharded and Lightning is there (checked on Lightning 2.6.6)::

    Trainer.fit -> configure_model: fully_shard -> guard -> Strategy.setup: refused
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
        strategies = sys.modules.get(place)
        if strategies is None:
            continue
        for name in REFUSED:
            # Older or newer versions may lack a strategy.
            kind = getattr(strategies, name, None)
            if isinstance(kind, type) and kind not in _guarded:
                _guarded.add(kind)
                setattr(kind, method, _guarded_method(kind, method))


def _guarded_method(kind: type, method: str) -> Any:
    """Return the method of ``kind`` that first refuses a sharded module."""
    own = getattr(kind, method)

    @functools.wraps(own)
    def guarded(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        # ``Trainer`` passes itself; ``Fabric`` passes the module.
        module = given if isinstance(given, nn.Module) else self.lightning_module
        _refuse_sharded(module, type(self).__name__)
        return own(self, given, *args, **kwargs)

    return guarded


def _refuse_sharded(module: nn.Module, strategy: str) -> None:
    """Raise CompositionError if a unit holds a parameter of ``module``."""
    first = first_sharded(module)
    if first is not None:
        raise CompositionError(
            f"Lightning's {strategy} was put around a {type(module).__name__} whose "
            f"parameter {quoted(first)} is fully sharded; the strategy would take this "
            "rank's rows for the whole parameter. import composable_fsdp.lightning and "
            'pass strategy="composable_fsdp": it keeps the units that you made, and '
            "shards the rest."
        )
