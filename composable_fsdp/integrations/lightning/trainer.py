"""``ComposableFSDPStrategy``: the Trainer of Lightning over fully sharded modules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partialmethod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import precision as plugins
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree

from composable_fsdp.access.grads import no_sync
from composable_fsdp.access.manual import register_forward_method
from composable_fsdp.errors import CheckpointError, CompositionError
from composable_fsdp.integrations.lightning import checkpoints
from composable_fsdp.integrations.lightning.strategy import (
    FULL,
    SHARDED,
    ShardedPrecision,
    ShardingStrategyMixin,
    for_shards,
    has_units,
    move_to_device,
    precision_of,
    shard,
)
from composable_fsdp.naming import listed
from composable_fsdp.runtime.forward import call_method
from composable_fsdp.tree.traversal import _get_unit_state

_LOADED = "composable_fsdp_loaded"
"""A key in a checkpoint whose model and optimizers are loaded already."""


class ComposableFSDPStrategy(ShardingStrategyMixin, DDPStrategy):
    """Shards the LightningModule with ``fully_shard``; for ``Trainer(strategy=...)``.

    Importing ``composable_fsdp.lightning`` also registers the names "composable_fsdp",
    "composable_fsdp_offload" (``cpu_offload=True``) and "composable_fsdp_hybrid"
    (shards within a machine, replicates across machines).

    The module stays the same object with the same names, so ``self.parameters()``,
    metrics, callbacks and ``load_from_checkpoint`` work as with one device. Units that
    ``configure_model`` made stay as they are; the strategy shards the rest.

    Args:
        weights_only: see ``torch.load``; for ``ckpt_path``, because Lightning does not
            hand its own ``weights_only`` to strategies that shard. Default None:
            torch's default, True.
        options: see ``ShardingStrategyMixin``: ``state_dict_type``,
            ``forward_methods``, ``timeout``, the arguments of ``fully_shard``, ...

    Raises: TypeError, for an unknown argument; ValueError, for a ``state_dict_type``.
    """

    def __init__(self, *, weights_only: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._weights_only = weights_only

    restore_checkpoint_after_setup = True
    """Checkpoints are loaded into the sharded model."""

    @property
    def precision_plugin(self) -> Any:
        """The plugin for sharded models; see ``ShardedPrecision``."""
        return self._precision_plugin or ShardedPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = for_shards(plugin, plugins)

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module and create the optimizers, as ``fully_shard``."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        # Lightning takes a subclass of DDPStrategy for one that can.
        if module._compiler_ctx is not None:
            raise CompositionError(
                f"{type(self).__name__} got a compiled {type(module).__name__}, "
                "expected a plain one. Compile its layers instead: layer.compile()."
            )
        # Lightning creates optimizers to fit only.
        fits = trainer.state.fn == TrainerFn.FITTING
        # Before sharding, because the conversion replaces modules.
        if fits and self._layer_sync is not None and not has_units(module):
            module = self._layer_sync.apply(module)
        # Before sharding, too: shards are cut from parameters of the final dtype.
        module = self.precision_plugin.convert_module(module)
        # Units gather in this dtype; autocast of the plugin covers the code around.
        mixed = precision_of(self.precision_plugin)
        steps = module.automatic_optimization
        # The process group exists from here on, so a mesh can be made.
        options = self._options_here()
        if steps and mixed is not None:
            # A root whose forwards are steps casts no batch.
            mixed = replace(mixed, cast_root_forward_inputs=False)
        shard(module, options, mixed, has_one_root=steps)
        for name in self.forward_methods:
            register_forward_method(module, name)
        self.model = module
        self.model_to_device()
        if fits:
            # Those of an earlier fit would be saved beside the new optimizers.
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move tensors outside of units; units are where ``fully_shard`` put them."""
        move_to_device(self.lightning_module, self.root_device)

    def _step(self, name: str, context: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method ``name`` of the module, with full root parameters."""
        module = self.lightning_module
        method = getattr(module, name)
        with getattr(self.precision_plugin, f"{context}_step_context")():
            state = _get_unit_state(module)
            # Units may be children alone, made by hand. With manual optimization a step
            # runs backward, which no forward may contain.
            if state is None or not module.automatic_optimization:
                return method(*args, **kwargs)
            return call_method(state, module, method, *args, **kwargs)

    # Each as a forward of the root.
    training_step: Any = partialmethod(_step, "training_step", "train")
    validation_step: Any = partialmethod(_step, "validation_step", "val")
    test_step: Any = partialmethod(_step, "test_step", "test")
    predict_step: Any = partialmethod(_step, "predict_step", "predict")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        module = self.lightning_module
        with no_sync(module) if has_units(module) else nullcontext():
            yield

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules on the CPU, or on meta with ``empty_init``."""
        with (
            torch.device("meta") if empty_init else nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on rank 0; ``{}`` for sharded checkpoints."""
        # ``save_checkpoint`` lets each rank write its own part instead.
        if self._state_dict_type == SHARDED:
            return {}
        return checkpoints.full_model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state on rank 0; ``{}`` for sharded checkpoints."""
        if self._state_dict_type == SHARDED:
            return {}
        # The wrapper has no parameters of its own.
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return checkpoints.full_optimizer_state(self.lightning_module, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint at rank 0's path, in the form of ``state_dict_type``.

        Raises: CheckpointError, on all ranks.
        """
        # Names with metrics or times in them may differ between ranks.
        path = self.broadcast(filepath)
        if self._state_dict_type == FULL:
            with checkpoints.alike_on_all_ranks():
                checkpoints.require_form(path, sharded=False)
                super().save_checkpoint(checkpoint, path, storage_options)
            return
        # Lightning sets its default CheckpointIO by itself.
        is_default = type(self._checkpoint_io) in (type(None), TorchCheckpointIO)
        with checkpoints.alike_on_all_ranks():
            # A hook of the user changed the dictionary, and expects it to be saved.
            if checkpoint.get("state_dict"):
                raise CheckpointError(
                    f"on_save_checkpoint put {listed(checkpoint['state_dict'])} into "
                    "checkpoint['state_dict'], which is empty for a sharded checkpoint:"
                    " each rank writes its own weights. Put other values under another "
                    "key of checkpoint, or pass state_dict_type='full'."
                )
            if storage_options is not None or not is_default:
                raise CheckpointError(
                    "Each rank writes its part of a sharded checkpoint, without a "
                    "CheckpointIO. Leave CheckpointIO and storage_options away, or "
                    "pass state_dict_type='full'."
                )
        # Without the key, the callback asked for weights alone.
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        left_out = ("state_dict", "optimizer_states")
        rest = {key: v for key, v in checkpoint.items() if key not in left_out}
        checkpoints.write_sharded(path, self.lightning_module, optimizers, rest)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at rank 0's path; a sharded one is also loaded.

        Raises: CheckpointError or FileNotFoundError, on all ranks.
        """
        # A rank whose "best" or "last" differs would load other weights.
        path = self.broadcast(checkpoint_path)
        if weights_only is None:
            weights_only = self._weights_only
        if checkpoints.is_sharded_checkpoint(path):
            return self._load_sharded(path, weights_only)
        with checkpoints.alike_on_all_ranks():
            found: dict[str, Any] = checkpoints.read_file(
                path, weights_only, self.checkpoint_io
            )
            return found

    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load the weights of a full checkpoint."""
        if _LOADED not in checkpoint:
            with checkpoints.alike_on_all_ranks():
                super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers of a full checkpoint."""
        if _LOADED in checkpoint:
            return
        states = checkpoint["optimizer_states"]
        with checkpoints.alike_on_all_ranks():
            if len(states) != len(self.optimizers):
                raise CheckpointError(
                    f"The checkpoint has {len(states)} optimizers; expected the "
                    f"{len(self.optimizers)} of configure_optimizers. To start from "
                    "the weights alone, call load_from_checkpoint."
                )
            # By position: Lightning saves a list in the order of configure_optimizers.
            for optimizer, state in zip(self.optimizers, states, strict=True):
                checkpoints.load_full_optimizer_state(
                    self.lightning_module, optimizer, state
                )

    def teardown(self) -> None:
        """Release the precision plugin and the cluster; the model stays sharded."""
        # Lightning's own teardown would move the model to the CPU, and a later fit or
        # test move it back.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _load_sharded(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Load model and, to fit, optimizers; return the rest of the dictionary."""
        module = self.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        # test and predict need the weights alone, also of a checkpoint with optimizers.
        with checkpoints.alike_on_all_ranks():
            resumes = fits and checkpoints.holds_optimizers(path)
        rest = checkpoints.read_sharded(
            path,
            module,
            self.optimizers if resumes else None,
            strict=module.strict_loading,
            weights_only=weights_only,
        )
        # Epochs and schedulers would silently start from zero.
        if not rest and fits:
            raise CheckpointError(
                f"{path} holds a model and no state of the Trainer: composable_fsdp."
                "save wrote it, or a Trainer wrote it without epochs. Load it in "
                "on_fit_start by composable_fsdp.load(path, self), and call fit "
                "without ckpt_path."
            )
        # Lightning migrates dictionaries by this version.
        rest.setdefault("pytorch-lightning_version", pl.__version__)
        # Without the key, Lightning says that the checkpoint has weights alone.
        if resumes:
            rest["optimizer_states"] = []
        return {"state_dict": {}, **rest, _LOADED: True}


def _reads_shards(own: Any) -> Any:
    """Return ``pl_load`` of ``load_from_checkpoint`` that reads sharded ones, too."""

    def read_shards(
        path: Any, map_location: Any = None, weights_only: Any = None
    ) -> Any:
        # Users also pass open files.
        is_path = isinstance(path, (str, os.PathLike))
        if not is_path or not checkpoints.is_sharded_checkpoint(path):
            return own(path, map_location=map_location, weights_only=weights_only)
        whole = checkpoints.read_whole(path, weights_only)
        # A function or a table, as Lightning's default, chooses for devices that
        # storages were on; here all are on the CPU.
        if not isinstance(map_location, (str, int, torch.device)):
            return whole
        return _pytree.tree_map_only(Tensor, lambda each: each.to(map_location), whole)

    return read_shards


# The module may be reloaded, as in notebooks.
if getattr(saving.pl_load, "__name__", "") != "read_shards":
    saving.pl_load = _reads_shards(saving.pl_load)
ComposableFSDPStrategy.register_strategies(StrategyRegistry)
