"""The static methods of ``FullyShardedDataParallel`` on model and optimizer states.

FSDP1's names and arguments; each calls the function that says what it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.config import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from composable_fsdp.optim import legacy, load, rekey, save
from composable_fsdp.state_dict import settings


class StateMethods:
    """What FSDP1 has as static methods of its class. Holds nothing."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """See ``composable_fsdp.set_state_dict_type``."""
        return settings.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """See ``composable_fsdp.get_state_dict_type``."""
        return settings.get_state_dict_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """See ``composable_fsdp.state_dict_type``."""
        return settings.state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """See ``composable_fsdp.optim_state_dict``."""
        return save.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """See ``composable_fsdp.optim_state_dict_to_load``."""
        return load.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Iterable[Any] | None = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` with full tensors on the CPU, whatever type is set."""
        return legacy.full_optim_state_dict(
            model, optim, optim_input, rank0_only, group
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict_to_load`` of a state that every rank holds in full."""
        return legacy.shard_full_optim_state_dict(
            full_optim_state_dict, model, optim_input, optim
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict_to_load`` of a state that only the first rank holds."""
        return legacy.scatter_full_optim_state_dict(
            full_optim_state_dict, model, optim_input, optim, group
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` with sharded values, whatever type is set."""
        return legacy.sharded_optim_state_dict(model, optim, group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """``optim_state_dict_to_load`` of what ``sharded_optim_state_dict`` gave."""
        return legacy.flatten_sharded_optim_state_dict(
            sharded_optim_state_dict, model, optim
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """See ``composable_fsdp.rekey_optim_state_dict``."""
        return rekey.rekey_optim_state_dict(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )
