"""``ComposableFSDPFabricStrategy``: Fabric of Lightning over fully sharded modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import precision as plugins
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import (
    _apply_filter,
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.comm.collectives import all_gather_object
from composable_fsdp.errors import CheckpointError
from composable_fsdp.integrations.given_optimizers import shard_state
from composable_fsdp.integrations.lightning import checkpoints
from composable_fsdp.integrations.lightning.strategy import (
    FULL,
    ShardingStrategyMixin,
    for_shards,
    has_units,
    move_to_device,
    precision_of,
    shard,
)
from composable_fsdp.storage.stateful import rng_state, set_rng_state

RANDOM = "composable_fsdp_random_states"
"""The key in a full checkpoint of the random states, rank by rank."""


class ComposableFSDPFabricStrategy(ShardingStrategyMixin, DDPStrategy):
    """Shards modules with ``fully_shard`` in ``Fabric.setup``.

    Importing ``composable_fsdp.lightning`` also registers the names "composable_fsdp",
    "composable_fsdp_offload" and "composable_fsdp_hybrid" for ``Fabric(strategy=...)``.
    A model and its optimizers may be set up together or apart: parameters stay the same
    objects, and state that an optimizer has is cut to this rank's rows.

    Args:
        options: see ``ShardingStrategyMixin``. ``mark_forward_method`` of the module
            that ``Fabric.setup`` returns adds to ``forward_methods``.

    Raises: TypeError, for an unknown argument; ValueError, for a ``state_dict_type``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Any:
        """The precision plugin, with a scaler that decides alike on all ranks."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = for_shards(plugin, plugins)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing before sharding: a whole model need not fit into a GPU."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the parameters that no unit holds; return ``module``."""
        # Fabric casts the inputs and the outputs of the module itself.
        mixed = precision_of(self.precision)
        shard(module, self._options_here(), mixed)
        move_to_device(module, self.root_device)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Cut the state that ``optimizer`` has already; return ``optimizer``."""
        shard_state(optimizer)
        return optimizer

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules on the CPU, or on meta with ``empty_init``."""
        with (
            torch.device("meta") if empty_init else nullcontext(),
            self.precision.module_init_context(),
        ):
            yield

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks, and return the norm before clipping."""
        # Gradients are still multiplied by the scale of 16-mixed.
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict on rank 0. Collective: as ``state_dict``."""
        return checkpoints.full_model_state(module)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write ``state`` at rank 0's path, in the form that ``state_dict_type`` says.

        Raises: CheckpointError, on all ranks.
        """
        path = self.broadcast(path)
        modules, optimizers, rest = _parts(state)
        if self._state_dict_type == FULL:
            # Every rank takes part in the gathers, and rank 0 alone holds the results.
            full: dict[str, Any] = {}
            for name, value in state.items():
                _apply_filter(name, filter or {}, _full(state, value), full)
            # As ``composable_fsdp.save``: weights alone need no random states.
            if optimizers:
                world = dist.group.WORLD
                assert world is not None  # launched
                full[RANDOM] = all_gather_object(rng_state(), world)
            with checkpoints.alike_on_all_ranks():
                if self.is_global_zero:
                    self.checkpoint_io.save_checkpoint(
                        full, path, storage_options=storage_options
                    )
            return
        with checkpoints.alike_on_all_ranks():
            module = _only_module(modules, state)
            if filter or storage_options is not None:
                raise CheckpointError(
                    "A sharded checkpoint holds all of a model, and no CheckpointIO "
                    "writes it. Leave filter and storage_options away, or pass "
                    "state_dict_type='full'."
                )
        # Tensors go into the files of the ranks, everything else into ``extra``.
        plain = {name: _full(state, value) for name, value in rest.items()}
        checkpoints.write_sharded(path, module, [*optimizers.values()], plain)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at rank 0's path into ``state``; return what is left.

        ``state`` may be a module, for a file of its state dict, or None to return all.

        Raises: CheckpointError or KeyError, on all ranks.
        """
        path = self.broadcast(path)
        if checkpoints.is_sharded_checkpoint(path):
            return self._load_sharded(path, state, strict, weights_only)
        with checkpoints.alike_on_all_ranks():
            found: dict[str, Any] = checkpoints.read_file(
                path, weights_only, self.checkpoint_io
            )
            if not state:
                return found
            # ``fabric.load_raw``: the file is the state dict itself.
            if isinstance(state, nn.Module):
                state.load_state_dict(found, strict=strict)
                return {}
            if isinstance(state, Optimizer):
                _module_of({}, state)  # raises: the names come from a module
            _validate_keys_for_strict_loading(state.keys(), found.keys(), strict)
            _load_full(state, found, strict)
            random = found.pop(RANDOM, ())
            # A rank that did not save keeps its own.
            if _parts(state)[1] and self.global_rank < len(random):
                set_rng_state(random[self.global_rank], str(path))
            return found

    def _load_sharded(
        self, path: str, state: Any, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load ``state`` from a sharded checkpoint; return the remainder."""
        with checkpoints.alike_on_all_ranks():
            if not state:
                return checkpoints.read_whole(path, weights_only)
            given = {"model": state} if isinstance(state, nn.Module) else state
            modules, optimizers, others = _parts(given)
            module = _only_module(modules, given)
        optims = [*optimizers.values()] or None
        rest = checkpoints.read_sharded(
            path, module, optims, strict=strict, weights_only=weights_only
        )
        # Written for ``consolidate``, and of no use to the caller.
        rest.pop(checkpoints.NAMES, None)
        # Values of the caller change only after model and optimizers are loaded.
        with checkpoints.alike_on_all_ranks():
            _validate_keys_for_strict_loading(others.keys(), rest.keys(), strict)
            _load_values(given, rest, others)
        return rest


class _NoSync(_BackwardSyncControl):
    """Accumulation without communication, for ``fabric.no_backward_sync``."""

    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce."""
        return no_sync(module) if enabled and has_units(module) else nullcontext()


def _parts(state: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the modules, the optimizers and the other values of ``state``."""
    modules = {k: v for k, v in state.items() if isinstance(v, nn.Module)}
    optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
    rest = {k: v for k, v in state.items() if k not in modules.keys() | optimizers}
    return modules, optimizers, rest


def _only_module(modules: dict[str, nn.Module], state: dict[str, Any]) -> nn.Module:
    """Return the module of ``state``. Raises: CheckpointError, unless there is one."""
    if len(modules) != 1:
        raise CheckpointError(
            f"A sharded checkpoint holds one model, and the state has {len(modules)}: "
            f"{', '.join(state)}. Save each model under a path of its own, or pass "
            "state_dict_type='full'."
        )
    return next(iter(modules.values()))


def _full(state: dict[str, Any], value: Any) -> Any:
    """Return the content of a full checkpoint for ``value``."""
    if isinstance(value, nn.Module):
        return checkpoints.full_model_state(value)
    if isinstance(value, Optimizer):
        return checkpoints.full_optimizer_state(_module_of(state, value), value)
    return value.state_dict() if isinstance(value, _Stateful) else value


def _module_of(state: dict[str, Any], optimizer: Optimizer) -> Any:
    """Return the module of ``state`` whose parameters ``optimizer`` holds."""
    # Several models in a state are told apart by their parameters.
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in _parts(state)[0].values():
        if held <= set(map(id, module.parameters())):
            return module
    raise CheckpointError(
        "The state has an optimizer and no module with its parameters; names and "
        "shapes of sharded parameters come from the module. Add the module: "
        "state={'model': model, 'optimizer': optimizer}."
    )


def _load_full(state: dict[str, Any], found: dict[str, Any], strict: bool) -> None:
    """Load modules, then optimizers, then other values; remove them from ``found``."""
    saved = {name: value for name, value in state.items() if name in found}
    modules, optimizers, rest = _parts(saved)
    # Modules come first: a wrong model should be told by its own error.
    for name, module in modules.items():
        module.load_state_dict(found.pop(name), strict=strict)
    for name, optimizer in optimizers.items():
        module = _module_of(state, optimizer)
        checkpoints.load_full_optimizer_state(module, optimizer, found.pop(name))
    _load_values(state, found, rest)


def _load_values(
    state: dict[str, Any], found: dict[str, Any], names: Iterable[str]
) -> None:
    """Give objects of ``state`` their saved state, and other values in its place."""
    for name in names:
        if name in found and isinstance(state[name], _Stateful):
            state[name].load_state_dict(found.pop(name))
        elif name in found:
            state[name] = found.pop(name)


def _redirects(own: Any) -> Any:
    """Return ``_FabricModule.__getattr__`` that redirects for this strategy, too."""

    @wraps(own)
    def find(self: Any, name: str) -> Any:
        # From ``__dict__``: this method finds the names that are in no dictionary.
        strategy, marked = map(vars(self).get, ("_strategy", "_forward_methods"))
        if isinstance(strategy, ComposableFSDPFabricStrategy) and (
            name in (marked or ()) or name in strategy.forward_methods
        ):
            return self._redirection_through_forward(name)
        return own(self, name)

    return find


if not hasattr(_FabricModule.__getattr__, "__wrapped__"):
    _FabricModule.__getattr__ = _redirects(_FabricModule.__getattr__)
ComposableFSDPFabricStrategy.register_strategies(STRATEGY_REGISTRY)
