"""Static methods of ``FullyShardedDataParallel`` for model and optimizer state dicts.

Names and arguments are FSDP1's. Each method calls the function of this package that
documents the behavior.
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


# Methods and not aliases of the functions, so that names, arguments and defaults are
# FSDP1's.
class StateMethods:
    """Mixin with FSDP1's static state dict methods; no own data."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the state dict type; see ``composable_fsdp.set_state_dict_type``.

        Args:
            module: A module that holds fully sharded modules.
            state_dict_type: The type from now on.
            state_dict_config: The model's configuration. Default: the type's default.
            optim_state_dict_config: The optimizer's configuration. Default: as above.

        Returns: the settings before the call.
        Collective: none.
        """
        return settings.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings; see ``composable_fsdp.get_state_dict_type``."""
        return settings.get_state_dict_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Set the type while a block runs; see ``composable_fsdp.state_dict_type``.

        Args:
            module: A module that holds fully sharded modules.
            state_dict_type: The type inside the block.
            state_dict_config: The model's configuration. Default: the type's default.
            optim_state_dict_config: The optimizer's configuration. Default: as above.

        Returns: the context manager.
        Collective: none.
        """
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
        """Return the optimizer's state; see ``composable_fsdp.optim_state_dict``.

        Args:
            model: The sharded model.
            optim: The optimizer over the model's parameters.
            optim_state_dict: A result of ``optim.state_dict()``. Default: the current
                state.
            group: Ignored; present because FSDP1 has this argument.

        Returns: the state, keyed by parameter names.
        Collective, Raises: as the function.
        """
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
        """Return state to load; see ``composable_fsdp.optim_state_dict_to_load``.

        Args:
            model: The sharded model.
            optim: The optimizer that loads the result.
            optim_state_dict: The result of ``optim_state_dict``, or a plain model's
                state.
            is_named_optimizer: Keep names as keys instead of ids. Default False.
            load_directly: Also call ``optim.load_state_dict``. Default False.
            group: The ranks of the broadcasts. Default: the model's ranks.

        Returns: this rank's part of the state.
        Collective, Raises: as the function.
        """
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
        """Return the state with full tensors on the CPU, whatever type is set.

        Args:
            model: The sharded model.
            optim: The optimizer over the model's parameters.
            optim_input: Ignored; present because FSDP1 has this argument.
            rank0_only: Return ``{}`` on all ranks but the first. Default True.
            group: Ignored; present because FSDP1 has this argument.

        Returns: the state, keyed by parameter names.
        Collective, Raises: as ``optim_state_dict``.
        """
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
        """Return this rank's part of a full state that every rank holds.

        Args:
            full_optim_state_dict: The full state, on every rank.
            model: The sharded model.
            optim_input: The parameters or groups of an optimizer that does not exist
                yet. Default None: read from ``optim``.
            optim: The optimizer that loads the result. Default None.

        Returns: the state for ``optim.load_state_dict``.
        Collective: none. Raises: as ``optim_state_dict_to_load``.
        """
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
        """Return this rank's part of a full state that only the first rank holds.

        Args:
            full_optim_state_dict: The full state on the first rank; ignored on other
                ranks.
            model: The sharded model.
            optim_input: The parameters or groups of an optimizer that does not exist
                yet. Default None: read from ``optim``.
            optim: The optimizer that loads the result. Default None.
            group: The ranks of the broadcasts. Default: the model's ranks.

        Returns: the state for ``optim.load_state_dict``.
        Collective: a broadcast of the structure, an exchange of refusals, and a
            broadcast per tensor, over ``group`` or the model's ranks.
        Raises: as ``optim_state_dict_to_load``, on all ranks alike.
        """
        return legacy.scatter_full_optim_state_dict(
            full_optim_state_dict, model, optim_input, optim, group
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state with sharded values, whatever type is set.

        Args:
            model: The sharded model.
            optim: The optimizer over the model's parameters.
            group: Ignored; present because FSDP1 has this argument.

        Returns: the state, keyed by parameter names, in the optimizer's own memory.
        Collective, Raises: as ``optim_state_dict``.
        """
        return legacy.sharded_optim_state_dict(model, optim, group)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Return state to load from a result of ``sharded_optim_state_dict``.

        Args:
            sharded_optim_state_dict: Sharded values of the same plan.
            model: The sharded model.
            optim: The optimizer that loads the result.

        Returns: the state for ``optim.load_state_dict``.
        Collective: none. Raises: as ``optim_state_dict_to_load``.
        """
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
        """Exchange names and numbers; see ``composable_fsdp.rekey_optim_state_dict``.

        Args:
            optim_state_dict: A state keyed by names or by numbers.
            optim_state_key_type: The type of the keys in the result.
            model: The model that knows the names; sharded or plain.
            optim_input: The parameters or groups of the optimizer. Default None: read
                from ``optim``.
            optim: The optimizer that knows the numbers. Default None.

        Returns: a new dict around the same values.
        Collective: none. Raises: as the function.
        """
        return rekey.rekey_optim_state_dict(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )
