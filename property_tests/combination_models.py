"""Building the two models of a combination: the sharded one, and the plain one.

The plain one stands for all ranks. Where units cast, it computes what they should: the
parameters of a unit are cast for a forward, gradients go on in the dtype of the
reduction, inputs and outputs are cast by hooks at the places of the units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    Block,
    CheckpointImpl,
    CPUOffload,
    CustomPolicy,
    DefaultState,
    FullyShardedDataParallel,
    LowPrecisionState,
    MixedPrecision,
    ShardingStrategy,
    allreduce_hook,
    apply_activation_checkpointing,
    bf16_compress_hook,
    checkpoint,
    checkpoint_wrapper,
    fully_shard,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
)
from composable_fsdp.planning.wrapping import post_order_apply
from composable_fsdp.testing.models import Node, build, legal_units, module_at
from composable_fsdp.testing.world import World
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from property_tests.combination_recipes import HYBRID, Combination, Unit

BF16, FP32 = torch.bfloat16, torch.float32
MIXED: dict[str, MixedPrecision | None] = {
    "none": None,
    "compute": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32),
    "low": MixedPrecision(param_dtype=BF16),
    "reduce": MixedPrecision(reduce_dtype=BF16),
    "kept": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
    "inputs": MixedPrecision(
        param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=True
    ),
    "output": MixedPrecision(param_dtype=BF16, output_dtype=FP32),
}


class Switch:
    """A hook by which a module passes its input on, and drops what it computed."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return args[0] if self.on else None


def places(model: nn.Module) -> list[nn.Module]:
    """The modules below the root that compute, in ``.modules()`` order."""
    return [m for m in model.modules() if isinstance(m, Node)][1:]


def add_switches(model: nn.Module) -> list[Switch]:
    """Give every place a switch."""
    switches = []
    for module in places(model):
        switches.append(Switch())
        module.register_forward_hook(switches[-1])
    return switches


class Layout:
    """Where the units, checkpoints and replicated subtrees of ``model`` are."""

    def __init__(self, model: nn.Module, combination: Combination) -> None:
        self.model, self.combination = model, combination
        recipe = combination.model
        promote = combination.promote and combination.style == "auto"
        paths = recipe.sharded if promote else legal_units(model, recipe.sharded)
        self.inner = {path: module_at(model, path) for path in paths}
        self.units = dict(self.inner)
        self.replicated = [
            m for p in recipe.replicated_paths() if isinstance(m := module_at(model, p), Node)
        ]
        options = combination.units
        self.options = {
            path: options[i % len(options)] for i, path in enumerate(("", *paths))
        }
        self.inside = add_switches(model)

    def checkpoint(self) -> None:
        """Put the checkpoints in."""
        combination, below = self.combination, places(self.model)
        kinds: dict[nn.Module, str] = {}
        for index, kind in combination.checkpoints:
            if below:
                kinds[below[index % len(below)]] = kind

        def put(module: nn.Module) -> nn.Module:
            kind = kinds[module]
            if "wrapper" not in kind:
                return checkpoint(module, use_reentrant=kind == "reentrant")
            impl = CheckpointImpl.NO_REENTRANT
            if kind != "wrapper":
                impl = CheckpointImpl.REENTRANT
            made = checkpoint_wrapper(module, impl)
            for path, unit in self.inner.items():
                if unit is module and combination.outside and not combination.late:
                    self.units[path] = made
            return made

        apply_activation_checkpointing(
            self.model, checkpoint_wrapper_fn=put, check_fn=lambda m: m in kinds
        )


def keywords(unit: Unit, world: World, path: str) -> dict[str, Any]:
    """What ``fully_shard`` or the wrapper is called with."""
    given: dict[str, Any] = {
        "mixed_precision": MIXED[unit.mixed],
        "cpu_offload": CPUOffload(offload_params=True) if unit.offload else None,
        "backward_prefetch": unit.prefetch and _prefetch(unit.prefetch),
        "forward_prefetch": unit.forward_prefetch,
    }
    strategy = ShardingStrategy[unit.strategy]
    if path == "wrapper":
        return {**given, "sharding_strategy": strategy}
    return {**given, "strategy": strategy, "block": Block[unit.block]}


def _prefetch(name: str) -> Any:
    from composable_fsdp import BackwardPrefetch

    return BackwardPrefetch[name]


def mesh_of(combination: Combination, world: World) -> DeviceMesh | None:
    """A (replicate, shard) mesh, if a unit wants one."""
    if not any(unit.strategy in HYBRID for unit in combination.units):
        return None
    shape = (world.world_size // 2, 2) if world.world_size > 2 else (2, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(layout: Layout, world: World) -> nn.Module:
    """Apply replicate and fully_shard as the combination says; returns the root."""
    combination, model = layout.combination, layout.model
    path, auto = combination.path, combination.style == "auto"
    common: dict[str, Any] = {"limit_all_gathers": combination.limit}
    options = {
        module: keywords(layout.options[at], world, path)
        for at, module in layout.units.items()
    }
    root_options = keywords(layout.options[""], world, path)
    hybrid = {at: u.strategy in HYBRID for at, u in layout.options.items()}
    mesh = mesh_of(combination, world)
    meshes: dict[nn.Module | None, Any] = {
        layout.units.get(at): mesh if is_hybrid else None
        for at, is_hybrid in hybrid.items()
    }
    apply: Callable[..., Any] = (
        fully_shard if path == "composable" else FullyShardedDataParallel
    )
    pairs = _pairs(layout) if combination.pairs and path == "composable" else {}

    def one(module: nn.Module, _: object = None) -> nn.Module | None:
        if module in layout.replicated and module not in options:
            replicate(module, limit_all_gathers=combination.limit)
            return module
        if module in pairs:
            both = pairs[module]
            if module is both[-1]:
                apply(list(both), device_mesh=meshes[module], **options[module], **common)
            return module
        return apply(module, device_mesh=meshes[module], **options[module], **common)  # type: ignore[no-any-return]

    by_hand = list(layout.replicated) if auto else [*layout.units.values(), *layout.replicated]
    post_order_apply(model, {m: {} for m in by_hand if m is not model}, one)
    if not auto:
        return apply(model, device_mesh=meshes[None], **root_options, **common)  # type: ignore[no-any-return]
    policy = CustomPolicy(lambda module: options.get(module, False))
    name = "policy" if path == "composable" else "auto_wrap_policy"
    return apply(  # type: ignore[no-any-return]
        model,
        **{name: policy},
        device_mesh=mesh,
        tied_params="promote" if combination.promote else "error",
        **root_options,
        **common,
    )


def _pairs(layout: Layout) -> dict[nn.Module, tuple[nn.Module, nn.Module]]:
    """Units that are neighbours among the units of one parent, two by two.

    In the order in which they are applied, the last one first.
    """
    families: dict[str, list[nn.Module]] = {}
    for path, unit in layout.units.items():
        families.setdefault(path.rpartition(".")[0], []).append(unit)
    found = {}
    for family in families.values():
        for second, first in zip(family[1::2], family[::2], strict=False):
            pair = (second, first)
            found.update(dict.fromkeys(pair, pair))
    return found


def add_hook(model: nn.Module, combination: Combination, world: World) -> None:
    """Have a communication hook reduce, if the combination says so."""
    if combination.hook == "default":
        register_comm_hook(model, DefaultState(world.group), average)
    elif combination.hook == "bf16":
        register_comm_hook(model, LowPrecisionState(world.group), bf16_compress_hook)


def average(state: DefaultState, grad: Tensor, output: Tensor | None = None) -> None:
    """Either default hook, by what it is given."""
    if output is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, output)


def states_of(model: nn.Module) -> list[_FSDPState]:
    """Every unit, those of replicated subtrees included, in ``.modules()`` order."""
    found = (_get_module_fsdp_state(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def tops_of(model: nn.Module) -> list[nn.Module]:
    """The root, and the tops of replicated subtrees."""
    tops = [s.module for s in states_of(model) if s.parent is None]
    return [model if i == 0 else top for i, top in enumerate(tops)]
