"""What FSDP1 keeps as attributes of its wrapper: the options in force, and the ranks.

Read from the unit's state each time, so that they cannot tell anything else than what
the unit does. Read-only: to set one would change nothing here.
"""

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


class Attributes:
    """FSDP1's names for the options of the unit that a wrapper holds. Holds nothing."""

    @property
    def _state(self) -> _FSDPState:
        raise NotImplementedError

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """What is kept and when; NO_SHARD where one rank holds everything."""
        if self.world_size == 1:
            return ShardingStrategy.NO_SHARD
        return self._state.options.strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards live on the host."""
        return self._state.options.cpu_offload or CPUOffload()

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Dtypes of compute, reduction and buffers."""
        return self._state.options.mixed_precision or MixedPrecision()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the next unit is gathered in backward."""
        return self._state.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether the next unit is gathered ahead in forward."""
        return self._state.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """Whether the memory of units that wait for the GPU is bounded."""
        return self._state.options.limit_all_gathers

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return self._state.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters; with NO_SHARD those that hold copies."""
        state = self._state
        if state.options.strategy is ShardingStrategy.NO_SHARD:
            return state.handle.groups.replicate or state.ranks.shard
        return state.handle.groups.shard or state.ranks.shard

    @property
    def rank(self) -> int:
        """This rank's place in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self.process_group.size()


def attribute_of(wrapper: nn.Module, module: nn.Module, name: str) -> object:
    """Return the attribute of the wrapped ``module``.

    Raises: AttributeError, naming the wrapper; one of the module's own is not touched.
    """
    try:
        return getattr(module, name)
    except AttributeError as error:
        if error.name not in (None, name) or hasattr(type(module), name):
            raise  # a property of the module's that met something else
        raise AttributeError(
            f"{type(wrapper).__name__} has no attribute {name!r}, and neither has the "
            f"{type(module).__name__} that it wraps.",
            name=name,
            obj=wrapper,
        ) from None
