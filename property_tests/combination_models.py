"""Building the models of a combination, and sharding one of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
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
from property_tests.combination_recipes import HYBRID, Combination, Unit
from tests.support.models import Node, legal_units, module_at
from tests.support.strategies import block_named
from tests.support.world import World

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
    found: list[nn.Module] = [m for m in model.modules() if isinstance(m, Node)]
    return found[1:]


def add_switches(model: nn.Module) -> list[Switch]:
    """Give every place a switch."""
    switches = []
    for module in places(model):
        switches.append(Switch())
        module.register_forward_hook(switches[-1])
    return switches


class Layout:
    """Where the units, checkpoints and replicated subtrees of ``model`` are.

    ``inner``: the modules at the units' paths; ``units``: those that are sharded, which
    may be wrappers around the former.
    """

    def __init__(self, model: nn.Module, combination: Combination) -> None:
        self.model, self.combination = model, combination
        recipe = combination.model
        promote = combination.promote and combination.style == "auto"
        paths = recipe.sharded if promote else legal_units(model, recipe.sharded)
        self.inner = {path: module_at(model, path) for path in paths}
        self.units = dict(self.inner)
        marked = (module_at(model, path) for path in recipe.replicated_paths())
        self.replicated: list[nn.Module] = [m for m in marked if isinstance(m, Node)]
        options = combination.units
        self.options = {
            path: options[i % len(options)] for i, path in enumerate(("", *paths))
        }
        self.inside = add_switches(model)

    def checkpoint(self) -> None:
        """Put the checkpoints in."""
        below = places(self.model)
        kinds: dict[nn.Module, str] = {
            below[index % len(below)]: kind
            for index, kind in self.combination.checkpoints
            if below
        }
        outside = self.combination.outside and not self.combination.late

        def put(module: nn.Module) -> nn.Module:
            kind = kinds[module]
            if "wrapper" not in kind:
                return checkpoint(module, use_reentrant=kind == "reentrant")
            plain = kind == "wrapper"
            made = checkpoint_wrapper(
                module,
                CheckpointImpl.NO_REENTRANT if plain else CheckpointImpl.REENTRANT,
            )
            for path, unit in self.inner.items():
                if unit is module and outside:
                    self.units[path] = made
            return made

        apply_activation_checkpointing(
            self.model, checkpoint_wrapper_fn=put, check_fn=lambda m: m in kinds
        )

    def pairs(self) -> dict[nn.Module, list[nn.Module]]:
        """Units that are neighbours among the units of one parent, two by two.

        In the order in which they are applied, the last one first.
        """
        families: dict[str, list[nn.Module]] = {}
        for path, unit in self.units.items():
            families.setdefault(path.rpartition(".")[0], []).append(unit)
        found = {}
        for family in families.values():
            for second, first in zip(family[1::2], family[::2], strict=False):
                found[first] = found[second] = [second, first]
        return found


def keywords(unit: Unit, path: str) -> dict[str, Any]:
    """What a policy says of a unit."""
    strategy = ShardingStrategy[unit.strategy]
    given: dict[str, Any] = {
        "mixed_precision": MIXED[unit.mixed],
        "cpu_offload": CPUOffload(offload_params=True) if unit.offload else None,
        "backward_prefetch": unit.prefetch and BackwardPrefetch[unit.prefetch],
        "forward_prefetch": unit.forward_prefetch,
    }
    if path == "wrapper":
        return {**given, "sharding_strategy": strategy}
    return {**given, "strategy": strategy, "block": block_named(unit.block)}


def mesh_of(combination: Combination, world: World) -> DeviceMesh | None:
    """A (replicate, shard) mesh, if a unit wants one; groups end with the job."""
    if not any(unit.strategy in HYBRID for unit in combination.units):
        return None
    shape = (world.world_size // 2, 2) if world.world_size > 2 else (2, 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(layout: Layout, world: World) -> nn.Module:
    """Apply replicate and fully_shard as the combination says; returns the root."""
    combination, model = layout.combination, layout.model
    path, auto = combination.path, combination.style == "auto"
    mesh = mesh_of(combination, world)
    options = {at: keywords(unit, path) for at, unit in layout.options.items()}
    chosen = {module: options[at] for at, module in layout.units.items()}
    if auto:
        policy = CustomPolicy(lambda module: chosen.get(module, False))
        root = {
            **options[""],
            "policy" if path == "composable" else "auto_wrap_policy": policy,
            "tied_params": "promote" if combination.promote else "error",
            "device_mesh": mesh,
        }
    else:
        for at, unit in layout.options.items():
            options[at]["device_mesh"] = mesh if unit.strategy in HYBRID else None
        root = options[""]
    pairs = layout.pairs() if combination.pairs and path == "composable" else {}
    apply: Any = partial(
        fully_shard if path == "composable" else FullyShardedDataParallel,
        limit_all_gathers=combination.limit,
    )

    def one(module: nn.Module, _: object = None) -> nn.Module:
        if module not in chosen:
            return replicate(module, limit_all_gathers=combination.limit)
        if module not in pairs:
            return apply(module, **chosen[module])  # type: ignore[no-any-return]
        if module is pairs[module][-1]:
            apply(pairs[module], **chosen[module])
        return module

    by_hand = [*([] if auto else layout.units.values()), *layout.replicated]
    post_order_apply(model, {m: {} for m in by_hand if m is not model}, one)
    return apply(model, **root)  # type: ignore[no-any-return]


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
