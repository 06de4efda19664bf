"""Read-only attributes of FSDP1's wrapper: the options and the ranks of its unit."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from composable_fsdp.tree.state import _FSDPState


def _option(name: str, doc: str, default: object = None) -> Any:
    """Return a property: the option ``name`` of the unit, or ``default`` for None."""

    def read(wrapper: Attributes) -> object:
        found = getattr(wrapper._state.options, name)
        return default if found is None else found

    return property(read, doc=doc)


class Attributes:
    """Mixin with FSDP1's names for the options of a wrapper's unit; no own data."""

    @property
    def _state(self) -> _FSDPState:
        """Return the state of the wrapped unit; implemented by the wrapper class."""
        raise NotImplementedError

    # FSDP1's attributes cpu_offload and mixed_precision hold a default, never None.
    cpu_offload: CPUOffload = _option(
        "cpu_offload", "Whether shards are in host memory.", CPUOffload()
    )
    mixed_precision: MixedPrecision = _option(
        "mixed_precision",
        "The dtypes of compute, reduction and buffers.",
        MixedPrecision(),
    )
    backward_prefetch: BackwardPrefetch | None = _option(
        "backward_prefetch", "When backward all-gathers the next unit."
    )
    forward_prefetch: bool = _option(
        "forward_prefetch", "Whether forward all-gathers the next unit early."
    )
    limit_all_gathers: bool = _option(
        "limit_all_gathers", "Whether the memory of waiting units is limited."
    )

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Return the strategy; NO_SHARD if ``process_group`` has a single rank."""
        # FSDP1 reports NO_SHARD for a group of a single rank, too.
        if self.world_size == 1:
            return ShardingStrategy.NO_SHARD
        return self._state.options.strategy

    @property
    def compute_device(self) -> torch.device:
        """Return the device on which the module computes."""
        return self._state.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the shard group; with NO_SHARD the replicate group."""
        # A group of a single rank is None in ``handle.groups``; the caller's group then
        # remains.
        state = self._state
        if state.options.strategy is ShardingStrategy.NO_SHARD:
            return state.handle.groups.replicate or state.ranks.shard
        return state.handle.groups.shard or state.ranks.shard

    @property
    def rank(self) -> int:
        """Return this rank's index in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Return the number of ranks in ``process_group``."""
        return self.process_group.size()


def attribute_of(wrapper: nn.Module, module: nn.Module, name: str) -> object:
    """Return an attribute of the wrapped ``module``, or raise as the wrapper."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        if error.name not in (None, name) or hasattr(type(module), name):
            raise  # a property of the module failed on another attribute
        # FSDP2's methods are functions of this package, of the same name.
        homes = ("composable_fsdp", "composable_fsdp.access") if name.islower() else ()
        ways_out = [
            f" Call the function: {home}.{name}(model, ...)."
            for home in homes
            if name in import_module(home).__all__
        ]
        raise AttributeError(
            f"{type(wrapper).__name__} has no attribute {name!r}, and neither has the "
            f"{type(module).__name__} that it wraps.{''.join(ways_out)}",
            name=name,
            obj=wrapper,
        ) from None
