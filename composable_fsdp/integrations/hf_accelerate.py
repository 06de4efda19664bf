"""An ``Accelerator`` that shards the model, and the parts that the Trainer shares.

Checked with accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.config import MixedPrecision
from composable_fsdp.integrations.given_optimizers import full_state_dict, shard_state
from composable_fsdp.integrations.hf_config import HFSharding, from_hf_config
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.load import LoadOptions, load
from composable_fsdp.storage.save import SaveOptions, save
from composable_fsdp.tree.traversal import _get_unit_state

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""The mixed precision of ``bf16=True``, which averages gradients in float32."""
_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")
"""The types of accelerate that leave the model to DDP, and so to this package."""
SHARDED_STATE = "sharded_state"
"""The folder in a checkpoint of accelerate or of the Trainer that holds the shards."""


class ShardedAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` shards models in place.

    A model that is sharded already keeps the sharding.

    Args:
        args: the arguments of ``Accelerator``.
        sharding: an ``HFSharding``, or the settings that ``from_hf_config`` reads.
            Default None: a unit per layer that the model names in
            ``_no_split_modules``.
        kwargs: the keyword arguments of ``Accelerator``. ``mixed_precision="bf16"``
            becomes ``BF16`` unless ``sharding`` has a mixed precision.

    Raises: ValueError, for another engine of accelerate (its FSDP, DeepSpeed, a
        parallelism_config), or fp16 and fp8.

    ::

        accelerator = ShardedAccelerator()
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    def __init__(
        self,
        *args: Any,
        sharding: HFSharding | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._optimizers: list[Any]
        self._models: list[Any]
        # After the base class, which reads variables of ``accelerate launch``, too.
        _require_known_engine(self)
        self.sharding = as_sharding(sharding)
        # ``MixedPrecision`` casts the parameters themselves. Autocast on top would cast
        # every operation again.
        self.native_amp = False
        if not dist.is_initialized():
            # A script without torchrun. The group is needed by ``fully_shard`` alone.
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            store = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` in place as the accelerator's settings ask.

        Collective: as ``fully_shard``; all ranks must call.
        Raises: ValueError, if a sharded ``model`` lacks the mixed precision of bf16.
        """
        bf16 = self.mixed_precision == "bf16"
        if _get_unit_state(model) is not None:
            for state in units_in(model) if bf16 else ():
                # Chosen when the unit is made; one without would compute in float32.
                if state.options.mixed_precision is None:
                    raise ValueError(
                        "bf16 was asked for, and the model was sharded before without "
                        f"a mixed precision (unit {state.fqn or 'of the root'}). Pass "
                        "the model unsharded, or with fully_shard(..., mixed_precision"
                        "=MixedPrecision(param_dtype=torch.bfloat16))."
                    )
            return model
        options = dict(self.sharding.options)
        if bf16:
            # A mixed precision that the user has chosen has priority.
            options.setdefault("mixed_precision", BF16)
        # ``fully_shard`` moves a unit at a time, so the whole model never has to fit.
        if self.device.type != "cpu":
            options.setdefault("device_id", self.device)
        return replace(self.sharding, options=options).shard(model)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard ``model``, unless only an evaluation is asked for, as ``shard``."""
        if not evaluation_mode:
            self.shard(model)
        # The mode for evaluation wraps nothing around a sharded model. Plain is a
        # teacher, or a model of which only the forward is needed.
        if _get_unit_state(model) is not None:
            device_placement, evaluation_mode = False, True
        found: nn.Module
        found = super().prepare_model(model, device_placement, evaluation_mode)
        return found

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, as ``shard``, optimizers and loaders; see ``Accelerator``."""
        prepared = super().prepare(*args, device_placement=device_placement)
        # After all models, which may stand behind their optimizers.
        for each in self._optimizers:
            shard_state(each.optimizer)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients locally; see ``composable_fsdp.no_sync``."""
        # A plain model may be prepared beside a sharded model, as in a GAN.
        context = no_sync(model) if units_in(model) else super().no_sync(model)
        with context:
            yield

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> Tensor:
        """Clip by the norm over all ranks; see ``composable_fsdp.clip_grad_norm_``."""
        # Plain parameters, which are equal on all ranks, count once.
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict in host memory of the first rank; empty elsewhere.

        Collective: a gather per region; all ranks must call.
        """
        if units_in(model):
            return full_state_dict(model)
        # A plain model is complete on every rank.
        return dict(super().get_state_dict(model, unwrap=unwrap))

    def save_state(
        self, output_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save all that was prepared; models and their optimizers sharded, by ``save``.

        Returns: the folder, in which ``sharded_state`` of a save before is replaced.
        Collective, Raises: as ``save``; all ranks must call.
        """
        with self._plain_parts() as sharded:
            folder = super().save_state(output_dir, *args, **kwargs)
        # After accelerate has made the folder.
        for name, model, optims in sharded:
            state = os.path.join(folder, name)
            save(state, model, optims, options=SaveOptions(overwrite=True))
        return folder

    def load_state(
        self, input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Load a checkpoint of ``save_state``, at any number of ranks.

        Collective, Raises: as ``load``; all ranks must call.
        """
        found: list[str] = []
        # accelerate may choose the folder by number.
        hook = self.register_load_state_pre_hook(lambda _, chosen: found.append(chosen))
        try:
            with self._plain_parts() as sharded:
                super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        for name, model, optims in sharded:
            # accelerate has restored the random states.
            state = os.path.join(found[0], name)
            load(state, model, optims, options=LoadOptions(rng=False))

    @contextmanager
    def _plain_parts(self) -> Iterator[list[tuple[str, nn.Module, Any]]]:
        """Hide sharded models and their optimizers; yield them with folder names."""
        # accelerate pickles the state of every optimizer on the first rank alone.
        models, optimizers = self._models, self._optimizers
        sharded: list[tuple[str, nn.Module, Any]] = []
        for at, model in enumerate(models):
            if units_in(model):
                # By identity, which ``fully_shard`` keeps.
                own = {id(p) for p in model.parameters()}
                optims = [
                    # The wrapper's own class has no state of its own.
                    each.optimizer
                    for each in optimizers
                    if own & {id(p) for g in each.param_groups for p in g["params"]}
                ]
                # As accelerate names its own files. ``save`` takes no empty list.
                name = f"{SHARDED_STATE}_{at}" if at else SHARDED_STATE
                sharded.append((name, model, optims or None))
        hidden = {id(each) for _, _, optims in sharded for each in optims or ()}
        self._models = [each for each in models if not units_in(each)]
        self._optimizers = [o for o in optimizers if id(o.optimizer) not in hidden]
        try:
            yield sharded
        finally:
            self._models, self._optimizers = models, optimizers


def as_sharding(given: HFSharding | Mapping[str, Any] | None) -> HFSharding:
    """Return the sharding that a user has passed, or the default."""
    # ``HFSharding`` takes any argument of ``fully_shard``, as a mesh.
    if isinstance(given, HFSharding):
        return given
    return from_hf_config(given or {})


def _require_known_engine(accelerator: Accelerator) -> None:
    """Raise ValueError for settings that hand the model to another engine."""
    kind = accelerator.distributed_type
    # Those engines would wrap the model, or hold its parameters themselves.
    if kind.value not in _ENGINES:
        raise ValueError(
            f"ShardedAccelerator expects an Accelerator without an engine of its own, "
            f"got {kind}. Leave fsdp_plugin, deepspeed_plugin and ACCELERATE_USE_FSDP "
            "away, and pass the settings as sharding={...}."
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            "ShardedAccelerator expects no parallelism_config. Pass "
            "sharding=HFSharding({'device_mesh': ...}) for a mesh."
        )
    precision = accelerator.mixed_precision
    if precision not in ("no", "bf16"):
        raise ValueError(
            f"ShardedAccelerator expects mixed_precision 'no' or 'bf16', got "
            f"{precision!r}. With fp16 each rank would skip steps by its own shards: "
            "take bf16, or a loop of your own with ShardedGradScaler."
        )
