"""An ``Accelerator`` that shards the model, and the parts that the Trainer shares.

accelerate has no registry of strategies, so ``ShardedAccelerator`` overrides the public
methods that would see this rank's shards alone. Checked with accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType
from torch import Tensor, nn

from composable_fsdp.access.grads import clip_grad_norm_, no_sync
from composable_fsdp.config import MixedPrecision
from composable_fsdp.errors import CompositionError
from composable_fsdp.integrations.given_optimizers import (
    full_state_dict,
    next_state,
    shard_state,
)
from composable_fsdp.integrations.hf_config import HFSharding, from_hf_config
from composable_fsdp.storage.contents import units_in
from composable_fsdp.storage.load import LoadOptions, load
from composable_fsdp.storage.save import SaveOptions, save
from composable_fsdp.tree.traversal import _get_unit_state

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""The mixed precision of ``bf16=True``: as autocast under DDP, gradients are averaged
in float32."""
_ENGINES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
)
"""The types of accelerate that leave the model to DDP, and so to this package."""
SHARDED_STATE = "sharded_state"
"""The folder in a checkpoint of accelerate or of the Trainer that holds the shards."""


class ShardedAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` shards models in place.

    A model that is sharded already keeps the sharding. Everything else is as in
    ``Accelerator``: loaders, accumulation, trackers, ``gather_for_metrics``.

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
        # After the base class, which reads variables of ``accelerate launch``, too.
        _require_known_engine(self)
        self.sharding = as_sharding(sharding)
        self._saving = False
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
                        "the model unsharded, or call fully_shard(..., mixed_precision"
                        "=MixedPrecision(param_dtype=torch.bfloat16)) yourself, or "
                        "leave bf16 away."
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
        """Shard ``model``, unless only an evaluation is asked for; see ``Accelerator``.

        Collective: as ``fully_shard``; all ranks must call. Raises: as ``shard``.
        """
        if not evaluation_mode:
            self.shard(model)
        # The mode for evaluation wraps nothing around a sharded model. Plain is a
        # teacher, or a model of which only the forward is needed.
        if _get_unit_state(model) is not None:
            device_placement, evaluation_mode = False, True
        found: nn.Module = super().prepare_model(
            model, device_placement, evaluation_mode
        )
        return found

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers and loaders; see ``Accelerator.prepare``.

        Collective: as ``fully_shard``; all ranks must call. Raises: as ``shard``.
        """
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
        # A plain model is complete on every rank.
        if not units_in(model):
            return dict(super().get_state_dict(model, unwrap=unwrap))
        # ``save_state`` writes shards, and needs no full values.
        if self._saving:
            return {}
        return full_state_dict(model)

    def save_state(
        self, output_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save all that was prepared; models and their optimizers sharded, by ``save``.

        Returns: the folder, in which ``sharded_state`` of a save before is replaced.
        Collective, Raises: as ``save``; all ranks must call.
        """

        def drop(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            # In place: accelerate continues with the same list.
            weights[:] = [
                value
                for model, value in zip(models, weights, strict=True)
                if not units_in(model)
            ]

        # ``Accelerator.save_state`` asks for the state dict of each model.
        self._saving = True
        try:
            with self._plain_parts(self.register_save_state_pre_hook(drop)):
                folder = super().save_state(output_dir, *args, **kwargs)
        finally:
            self._saving = False
        # After accelerate has made the folder.
        for at, model in self._sharded_models():
            state = os.path.join(folder, _folder_of(at))
            own = self._optimizers_of(model)
            save(next_state(state), model, own, options=SaveOptions(keep=1))
        return folder

    def load_state(
        self, input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Load a checkpoint of ``save_state``, at any number of ranks.

        Collective, Raises: as ``load``; all ranks must call.
        """
        found: list[str] = []

        def take(models: list[nn.Module], folder: str) -> None:
            models[:] = [model for model in models if not units_in(model)]
            # accelerate may have chosen the folder by number.
            found.append(folder)

        with self._plain_parts(self.register_load_state_pre_hook(take)):
            super().load_state(input_dir, *args, **kwargs)
        for at, model in self._sharded_models():
            state = os.path.join(found[0], _folder_of(at))
            # accelerate has restored the random states.
            own = self._optimizers_of(model)
            load(state, model, own, options=LoadOptions(rng=False))

    @contextmanager
    def _plain_parts(self, hook: Any) -> Iterator[None]:
        """Hide the optimizers of sharded models in this block; remove ``hook`` then."""
        # accelerate pickles the state of every optimizer on the first rank alone.
        sharded = {
            id(each)
            for _, model in self._sharded_models()
            for each in self._optimizers_of(model) or ()
        }
        kept = self._optimizers
        self._optimizers = [o for o in kept if id(o.optimizer) not in sharded]
        try:
            yield
        finally:
            self._optimizers = kept
            hook.remove()

    def _sharded_models(self) -> list[tuple[int, nn.Module]]:
        """Return the sharded models with their positions among all models."""
        return [(i, m) for i, m in enumerate(self._models) if units_in(m)]

    def _optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer] | None:
        """Return the optimizers that hold a parameter of ``model``."""
        # By identity, which ``fully_shard`` keeps.
        own = {id(p) for p in model.parameters()}
        found = [
            # The wrapper's own class has no state of its own.
            each.optimizer
            for each in self._optimizers
            if any(id(p) in own for group in each.param_groups for p in group["params"])
        ]
        # ``save`` takes no empty list.
        return found or None


def _refuse_sharded(own: Any) -> Any:
    """Return ``LocalSGD.__init__`` that refuses a sharded model by name."""

    @wraps(own)
    def init(
        self: Any, accelerator: Any, model: nn.Module, *rest: Any, **kw: Any
    ) -> None:
        if units_in(model):
            raise CompositionError(
                f"LocalSGD expects a model that every rank holds whole, got a sharded "
                f"{type(model).__name__}: it trains and averages whole weights on each "
                "rank. Take the plain Accelerator, or leave LocalSGD out."
            )
        own(self, accelerator, model, *rest, **kw)

    return init


if not hasattr(LocalSGD.__init__, "__wrapped__"):
    LocalSGD.__init__ = _refuse_sharded(LocalSGD.__init__)


def as_sharding(given: HFSharding | Mapping[str, Any] | None) -> HFSharding:
    """Return the sharding that a user has passed, or the default."""
    # ``HFSharding`` takes any argument of ``fully_shard``, as a mesh.
    if isinstance(given, HFSharding):
        return given
    return from_hf_config(given or {})


def _folder_of(at: int) -> str:
    """Return the folder's name for the model at position ``at``."""
    # As accelerate names its own files.
    return SHARDED_STATE if at == 0 else f"{SHARDED_STATE}_{at}"


def _require_known_engine(accelerator: Accelerator) -> None:
    """Raise ValueError for settings that hand the model to another engine."""
    kind = accelerator.distributed_type
    # Those engines would wrap the model, or hold its parameters themselves.
    if kind not in _ENGINES:
        raise ValueError(
            f"ShardedAccelerator expects an Accelerator without an engine of its own, "
            f"got {kind}. Leave fsdp_plugin, deepspeed_plugin and ACCELERATE_USE_FSDP "
            "away (accelerate config: no FSDP, no DeepSpeed), and pass the settings as "
            "sharding={...}."
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
