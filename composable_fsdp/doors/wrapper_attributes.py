"""Read-only attributes of FSDP1's wrapper: the options and the ranks of its unit."""

from __future__ import annotations

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

FUNCTIONS = frozenset(
    {
        "reshard",
        "set_gradient_divide_factor",
        "set_is_last_backward",
        "set_modules_to_backward_prefetch",
        "set_modules_to_forward_prefetch",
        "set_reduce_scatter_unused_params",
        "set_requires_all_reduce",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
        "set_reshard_after_forward",
        "set_separate_reduce_scatter_group",
        "unshard",
    }
)
"""Methods of FSDP2's modules that are functions of this package, of the same name."""


class Attributes:
    """Mixin with FSDP1's names for the options of a wrapper's unit; no own data."""

    @property
    def _state(self) -> _FSDPState:
        """Return the state of the wrapped unit; implemented by the wrapper class."""
        raise NotImplementedError

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Return the strategy; NO_SHARD if ``process_group`` has a single rank."""
        # FSDP1 reports NO_SHARD for a group of a single rank, too.
        if self.world_size == 1:
            return ShardingStrategy.NO_SHARD
        return self._state.options.strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """Return whether shards are in host memory."""
        # FSDP1's attributes cpu_offload and mixed_precision hold a default, never None.
        return self._state.options.cpu_offload or CPUOffload()

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Return the dtypes of compute, reduction and buffers."""
        return self._state.options.mixed_precision or MixedPrecision()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """Return when backward all-gathers the next unit."""
        return self._state.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Return whether forward all-gathers the next unit early."""
        return self._state.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """Return whether the memory of units that wait for the GPU is limited."""
        return self._state.options.limit_all_gathers

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
        way_out = ""
        if name in FUNCTIONS:
            home = "composable_fsdp" + (".access" if name.startswith("set_") else "")
            way_out = f" Call the function: {home}.{name}(model, ...)."
        raise AttributeError(
            f"{type(wrapper).__name__} has no attribute {name!r}, and neither has the "
            f"{type(module).__name__} that it wraps.{way_out}",
            name=name,
            obj=wrapper,
        ) from None
