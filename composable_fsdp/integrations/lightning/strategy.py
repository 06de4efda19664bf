"""What the strategies of Lightning's Trainer and of Fabric share."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import lightning.pytorch.plugins.precision as trainer
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric

from composable_fsdp.access.grads import clip_grad_norm_
from composable_fsdp.compose.registry import get_state
from composable_fsdp.config import HYBRID, CPUOffload, MixedPrecision, ShardingStrategy
from composable_fsdp.entries.fully_shard import FSDP2_NAMES, fully_shard, unknown_text
from composable_fsdp.errors import CompositionError
from composable_fsdp.features.grad_scaler import ShardedGradScaler
from composable_fsdp.features.passages.casts import cast_floating
from composable_fsdp.flat.handle import find_leaf
from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.options import by_name
from composable_fsdp.planning.walk import has_forward
from composable_fsdp.tools.models import NoSplitPolicy


class ShardedPrecision(trainer.Precision):
    """Lightning's precision plugin for ``32-true``, with clipping over all ranks.

    Derive your own precision plugin for ``ComposableFSDPStrategy`` from it.
    """

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the optimizer's gradients to a norm over all ranks of ``clip_val``."""
        # Lightning's own method would clip by the norm of this rank's shards.
        clip_grad_norm_(self.main_params(optimizer), float(clip_val))


def for_shards(plugin: Any, lightnings: Any) -> Any:
    """Return a plugin of the module ``lightnings``, changed for shards, or raise."""
    if plugin is None or isinstance(plugin, ShardedPrecision):
        return plugin
    names = ("Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision")
    # By exact class: a subclass may do anything with whole parameters.
    if type(plugin) not in [getattr(lightnings, name) for name in names]:
        raise CompositionError(
            f"The precision plugin {type(plugin).__name__} was given to a strategy of "
            "composable_fsdp, which does not know what it does with whole parameters. "
            "Pass precision= one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true "
            "and 64-true, or mixed_precision=MixedPrecision(...) to the strategy; or "
            "derive a plugin of the Trainer from "
            "composable_fsdp.lightning.ShardedPrecision."
        )
    # On the object: a class of our own would file the scaler's state under its name,
    # where a Trainer without this strategy does not look. Fabric clips elsewhere.
    if lightnings is trainer:
        plugin.clip_grad_by_norm = partial(ShardedPrecision.clip_grad_by_norm, plugin)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, ShardedGradScaler):
        # Settings of a scaler that the user has configured are kept.
        plugin.scaler = ShardedGradScaler(
            plugin.device,
            init_scale=scaler.get_scale(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_factor=scaler.get_growth_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
    return plugin


def precision_of(plugin: Any) -> MixedPrecision | None:
    """Return the dtypes of units under ``plugin``; None: those of the parameters."""
    # In half precision throughout (bf16-true), units have nothing to convert.
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    dtype = dtypes.get(getattr(plugin, "precision", ""))
    if dtype is None:
        return None
    # Sums over many ranks lose too much in half precision, and overflow in float16.
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)


AUTO = "auto"
"""The policy that makes repeated layers units."""

_sharded_here: WeakSet[nn.Module] = WeakSet()
"""Roots that a strategy made; the other roots are the user's."""
_cast_here: WeakSet[nn.Module] = WeakSet()
"""Modules whose inputs a strategy has cast."""


def shard(
    module: nn.Module,
    options: Mapping[str, Any],
    mixed_precision: MixedPrecision | None,
    *,
    has_one_root: bool = True,
) -> None:
    """Shard the parameters of ``module`` that no unit holds yet, except of metrics.

    Raises: CompositionError, if that was done otherwise, or a parameter is in no unit.
    """
    # Metrics such as FID hold networks of their own, which are replicated: torchmetrics
    # copies and moves their tensors as whole tensors.
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    chosen = dict(options)
    ignored = [*(chosen.pop("ignored_modules", None) or ()), *metrics]
    # By identity: comparing tensors would compare elements.
    kept = {id(p) for each in ignored for p in each.parameters()}
    kept.update(map(id, chosen.get("ignored_states") or ()))
    # An explicit MixedPrecision of the user wins over the precision of the trainer.
    own_precision = chosen.pop("mixed_precision", None)
    chosen["mixed_precision"] = own_precision or mixed_precision
    policy = chosen.pop("policy", AUTO)
    roots = [module] if has_one_root else _children(module, kept)
    # Roots that were sharded before are checked again for equal settings.
    roots = [each for each in roots if _is_to_shard(each, kept)]
    for root in roots:
        fully_shard(
            root,
            policy=NoSplitPolicy() if policy == AUTO else policy,
            # fully_shard refuses a root that is to be ignored.
            ignored_modules=[each for each in ignored if each is not root],
            # Of the second call on, for fit after fit: equal settings, or an error.
            if_sharded="skip",
            **chosen,
        )
        _sharded_here.add(root)
    # With several roots each root casts its own inputs; the user's own MixedPrecision
    # says itself which inputs are cast.
    dtype = mixed_precision and mixed_precision.param_dtype
    if dtype and own_precision is None and has_one_root:
        _cast_children(module, dtype, ignored)


def _cast_children(
    module: nn.Module, dtype: torch.dtype, ignored: list[nn.Module]
) -> None:
    """Have the children of ``module`` cast floating point inputs, once per child."""
    # Parameters that the root holds are gathered in half precision, and layers such
    # as LayerNorm refuse inputs of another dtype on a CPU, under autocast, too.
    cast = partial(_cast_inputs, dtype)
    for child in _callable_parts(module):
        left_out = child in ignored or next(child.parameters(), None) is None
        # A fit after a fit must not register the pre-hook again.
        if not left_out and child not in _cast_here:
            child.register_forward_pre_hook(cast, with_kwargs=True)
            _cast_here.add(child)


def _children(module: nn.Module, kept: set[int]) -> list[nn.Module]:
    """Return the roots of ``module`` if its steps run backward; or raise."""
    parts = list(_callable_parts(module))
    holders = Counter(id(p) for part in parts for p in part.parameters())
    # A parameter of the module itself, or of a container, has no forward that could
    # gather it (also if a child holds it, too), and a tied one has several.
    inner = {each for part in parts for each in part.modules()}
    for each in set(module.modules()) - inner:
        holders.update({id(p): 2 for p in each.parameters(recurse=False)})
    alone = [
        name
        for name, parameter in module.named_parameters()
        if holders[id(parameter)] != 1
        and id(parameter) not in kept
        and find_leaf(parameter) is None
    ]
    if alone:
        raise CompositionError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False),"
            " so each of its children is sharded on its own; its parameters "
            f"{listed(map(quoted, alone))} belong to no child with a forward, or to "
            "several. Put them into one module with a forward and call that module, or "
            "shard by hand in configure_model, or pass ignored_states=[...] to the "
            "strategy (each rank then holds them whole, and you average their "
            "gradients)."
        )
    return parts


def is_unit(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``module`` itself."""
    return get_state(module, "fully_shard") is not None


def has_units(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied in ``module``: replicas are whole."""
    return any(map(is_unit, module.modules()))


def _is_to_shard(module: nn.Module, kept: set[int]) -> bool:
    """Return whether ``module`` is a root of a strategy, or has parameters for one."""
    # A module that the user made a unit by hand holds every parameter already.
    if is_unit(module):
        return module in _sharded_here
    return any(id(p) not in kept and find_leaf(p) is None for p in module.parameters())


def _callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the nearest modules below ``module`` that have a forward."""
    for child in module.children():
        # A list of modules is never called; its entries are.
        if not has_forward(child):
            yield from _callable_parts(child)
        elif not isinstance(child, Metric):
            yield child


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating point tensors among the inputs; a forward pre-hook."""
    return cast_floating((args, kwargs), dtype)


NAMES: dict[str, dict[str, Any]] = {
    "composable_fsdp": {},
    "composable_fsdp_offload": {"cpu_offload": True},
    "composable_fsdp_hybrid": {"strategy": HYBRID[0]},
}
"""Names for ``strategy=``, with the arguments that they stand for."""

_LIGHTNINGS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision", "precision_plugin", "process_group_backend", "timeout"),
    "start_method",
)
"""Arguments of Lightning's ``DDPStrategy`` that do not concern DDP."""

FULL, SHARDED = STATE_DICT_TYPES = ("full", "sharded")

_CHECKPOINT = "checkpoint(block) in configure_model"
_OTHER_NAMES = {
    **FSDP2_NAMES,
    "activation_checkpointing_policy": _CHECKPOINT,
    "activation_checkpointing": _CHECKPOINT,
}
_ORIGIN = "these are names of torch's FSDP and of Lightning's FSDPStrategy: {}"


class ShardingStrategyMixin:
    """The arguments of both strategies; stands before Lightning's ``DDPStrategy``.

    From ``DDPStrategy`` come the processes, the group and its functions.

    Args:
        state_dict_type: "full" (default): a checkpoint is a file as of any strategy,
            gathered on rank 0. "sharded": a directory; each rank writes its part.
        forward_methods: names of methods of the module, beside ``forward`` and the
            steps, that compute with parameters and are called from outside of a step.
        process_group_backend: the backend. Default: NCCL for GPUs, else gloo.
        timeout: the timeout of the process group. Default 30 minutes.
        start_method: how the ranks start, if torchrun or a cluster did not start them:
            "popen" (default), or "spawn", "fork", "forkserver".
        accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin (of the Trainer), precision (of Fabric): see Lightning's
            ``DDPStrategy``.
        **sharding: arguments of ``fully_shard``, with other defaults: ``policy="auto"``
            makes repeated layers units, ``sync_module_states=True`` gives all ranks the
            weights of rank 0, and ``tied_params="promote"``. ``cpu_offload`` may be a
            bool, ``device_mesh`` a shape ``(replicas, shards)``.

    Raises: TypeError, for an unknown argument; ValueError, for a ``state_dict_type``.
    """

    root_device: torch.device
    num_nodes: int
    num_processes: int

    def __init__(
        self,
        *,
        state_dict_type: str = FULL,
        forward_methods: tuple[str, ...] = (),
        **sharding: Any,
    ) -> None:
        api = type(self).__name__
        if state_dict_type not in STATE_DICT_TYPES:
            raise ValueError(
                f"{api} expects state_dict_type='full' (a file) or 'sharded' (a "
                f"directory, each rank writes its part), got {state_dict_type!r}."
            )
        theirs = inspect.signature(super().__init__).parameters
        own = [name for name in _LIGHTNINGS if name in theirs]
        super().__init__(**{n: sharding.pop(n) for n in own if n in sharding})
        # In the constructor: at the first fit, errors come from within Lightning.
        # fully_shard would name its own arguments alone, and not those of the strategy.
        taken = ["state_dict_type", "forward_methods", *own]
        taken += inspect.signature(fully_shard).parameters
        taken = [name for name in taken if name not in ("module", "if_sharded")]
        if unknown := sorted(sharding.keys() - set(taken)):
            raise TypeError(unknown_text(unknown, taken, api, _OTHER_NAMES, _ORIGIN))
        self._options = {
            "policy": AUTO,
            # As with DDP: ranks that were not seeded alike start from the weights of
            # rank 0.
            "sync_module_states": True,
            # Two modules of a model may share a parameter; the root then holds it.
            "tied_params": "promote",
            **sharding,
        }
        offload = sharding.get("cpu_offload")
        if isinstance(offload, bool):
            self._options["cpu_offload"] = CPUOffload(offload_params=offload)
        if "strategy" in sharding:
            self._options["strategy"] = by_name(
                ShardingStrategy, sharding["strategy"], argument="strategy"
            )
        self._state_dict_type = state_dict_type
        self.forward_methods = tuple(forward_methods)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy."""
        for name, defaults in NAMES.items():
            # ``register`` has an argument ``strategy`` of its own, so ours are bound.
            made = partial(cls, **defaults)
            strategy_registry.register(name, made, cls.__name__, override=True)

    def _options_here(self) -> dict[str, Any]:
        """Return the options of ``fully_shard``, with the device and the mesh."""
        # The whole model may be on the CPU: only shards and buffers go to the device.
        chosen = {"device_id": self.root_device, **self._options}
        mesh = chosen.get("device_mesh")
        is_hybrid = chosen.get("strategy") in HYBRID
        if mesh is None and chosen.get("process_group") is None and is_hybrid:
            # Lightning's own launcher does not tell the ranks per node to torch.
            mesh = (self.num_nodes, self.num_processes)
        if isinstance(mesh, tuple):
            # fully_shard reads a mesh by position; names are for a reader of messages.
            chosen["device_mesh"] = init_device_mesh(
                self.root_device.type,
                mesh,
                mesh_dim_names=("replicate", "shard")[-len(mesh) :],
            )
        return chosen


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move plain parameters, buffers and metrics of ``module`` to ``device``."""
    for each in module.modules():
        # States of metrics are attributes, which only the metric itself can move.
        if isinstance(each, Metric):
            each.to(device)
            continue
        for parameter in each._parameters.values():
            if parameter is not None and find_leaf(parameter) is None:
                # Through .data, because optimizers and ties hold the parameter.
                parameter.data = parameter.to(device)
        for name, buffer in each._buffers.items():
            # Buffers on meta wait for a checkpoint, and the first forward refuses them.
            if buffer is not None and not buffer.is_meta:
                each._buffers[name] = buffer.to(device)
    # A LightningModule returns this device as ``self.device``.
    _update_properties(module, device=device)
