"""One script with its model: the sharded one of this rank, or the plain one of any."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
    register_forward_method,
)
from composable_fsdp.access import (
    set_gradient_divide_factor,
    set_reduce_scatter_unused_params,
    set_reshard_after_backward,
)
from composable_fsdp.doors.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from composable_fsdp.features import (
    Arena,
    DefaultState,
    WireFormat,
    WireLayout,
    allreduce_hook,
    flat_parameters,
    reduce_scatter_hook,
    register_comm_hook,
)
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.program_model import Piece, build, named, unit_paths
from property_tests.program_recipes import Options, Program
from tests.support.models import legal_units
from tests.support.reference import apply_units
from tests.support.strategies import block_named
from tests.support.world import World

if TYPE_CHECKING:
    from property_tests.program_states import Taken

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": False}),
    "momentum_fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3}),
    "adamw_single": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "foreach": False}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-3, "fused": True}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
    "adagrad_fused": (torch.optim.Adagrad, {"lr": 0.02, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.02, "eps": 1e-3}),
}


FP32, FP64 = torch.float32, torch.float64
MIXES: dict[str, dict[str, Any]] = {
    "compute": {"param_dtype": FP32, "reduce_dtype": FP64},
    "float32": {"param_dtype": FP32},
    "reduce": {"reduce_dtype": FP32},
    "output": {"param_dtype": FP32, "reduce_dtype": FP64, "output_dtype": FP64},
}


class Broken(RuntimeError):
    """What a user's code raises."""


@dataclass(eq=False)
class Slot:
    """A forward that waits for its backward."""

    x: Tensor
    y: Tensor
    loss: Tensor


def optimizer_of(
    kind: str, model: nn.Module, groups: bool = False, flat: bool = False
) -> torch.optim.Optimizer:
    """In a group, because a model may have no parameters at all; or in two."""
    made, arguments = OPTIMIZERS[kind]
    if not groups:
        every = flat_parameters(model) if flat else model.parameters()
        return made([{"params": list(every)}], **arguments)
    parameters = [p for _, p in sorted(named(model).items())]
    second = {"params": parameters[::2], "lr": 0.5 * arguments["lr"]}
    return made([{"params": parameters[1::2]}, second], **arguments)


class Side:
    """What a script holds: model, optimizer, graphs, gradients and states it kept."""

    model: nn.Module

    def __init__(
        self,
        program: Program,
        rank: int,
        world: World | None = None,
        folder: str = "",
    ) -> None:
        self.program, self.rank, self.sharded = program, rank, world is not None
        self.folder, self.directories = folder, 0
        model = build(program)
        self.shapes = {name: p.shape for name, p in named(model).items()}
        self.units = ["", *legal_units(model, unit_paths(model))]
        if program.options.apart:
            self.units = self.units[1:]
        self.kind, groups = program.options.optimizer, program.options.groups
        early = program.options.early
        optimizer = optimizer_of(self.kind, model, groups) if early else None
        self.model = shard(model, self.units, program.options, world)
        if program.options.wrapped:
            wrap(self.model, program.options.wrapped)
        self.flat = program.options.flat and self.sharded
        self.optimizer = optimizer or optimizer_of(
            self.kind, self.model, groups, self.flat
        )
        self.slots: list[Slot] = []
        self.kept: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.memory: list[tuple[str, Tensor]] = []
        self.taken: Taken | None = None
        self.pending: Future[None] | None = None
        scaler = ShardedGradScaler if self.sharded else torch.amp.GradScaler
        self.scaled = False
        self.scaler = scaler("cpu", init_scale=2.0, growth_interval=2)
        self.swappable: list[tuple[str, str]] = []
        self.synced, self.filled = True, program.options.fill

    def inputs(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * batch + self.rank)
        return torch.randn(3, self.program.width, generator=generator)

    def renew_optimizer(self) -> None:
        self.make_optimizer(self.program.options.optimizer)

    def make_optimizer(self, kind: str) -> None:
        groups = self.program.options.groups
        self.kind = kind
        self.optimizer = optimizer_of(kind, self.model, groups, self.flat)

    def comparable(self, unit: str) -> bool:
        return all(part.again is None for part in self.program.parts())


_meshes: dict[tuple[int, int], DeviceMesh] = {}
"""Of this run: the pool takes the groups of one run away before the next."""


def forget_meshes() -> None:
    _meshes.clear()


@dataclass(frozen=True)
class Verbatim(WireFormat):
    """Sends floating point matrices in float64, with the number of the rank behind."""

    grid = 3

    def nbytes(self, layout: WireLayout) -> int:
        return 16 * (layout.shard_numel // 2 + 2)

    def encode(self, shard: Tensor, out: Tensor, layout: WireLayout, rank: int) -> None:
        assert shard.shape == (layout.shard_numel,)
        out.fill_(rank)
        out[: 8 * layout.shard_numel].view(torch.float64).copy_(shard)

    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        slices = wire.view(layout.world_size, -1)
        assert slices[:, -1].tolist() == list(range(layout.world_size))
        sent = slices[:, : 8 * layout.shard_numel].view(torch.float64)
        full.view(layout.world_size, -1).copy_(sent)


def mesh_of(world: World, replicas: int) -> DeviceMesh:
    """Made once per shape, because each makes groups."""
    replicas = math.gcd(replicas, world.world_size)
    shape = replicas, world.world_size // replicas
    if shape not in _meshes:
        names = ("replicate", "shard")
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def shard(
    model: nn.Module, units: list[str], options: Options, world: World | None
) -> nn.Module:
    """Apply either door to the modules at ``units``, the root's the empty name."""
    if world is None:
        return model
    offload = CPUOffload(offload_params=True) if options.offload else None
    arguments: dict[str, Any] = {
        "backward_prefetch": options.prefetch and BackwardPrefetch[options.prefetch],
        "forward_prefetch": options.forward_prefetch,
        "cpu_offload": offload,
        "limit_all_gathers": options.limit,
    }
    if options.low:
        arguments["mixed_precision"] = MixedPrecision(
            cast_forward_inputs=True,
            _module_classes_to_ignore=(),
            **MIXES[options.mix],
        )
        for module in model.modules():
            if isinstance(module, Piece):
                module.low = True
    if options.wire:
        arguments["wire"] = Verbatim()
    if options.arena:
        arguments["arena"] = Arena(options.arena == "shared", poison=True)
    if options.door == "composable":
        arguments["block"] = block_named(options.block)
    below = [unit for unit in units if unit]
    ways = [
        {**arguments, **ranks_of(name or options.strategy, options, world)}
        for name in (options.strategy, options.second)
    ]
    if options.door == "composable" and (
        options.pairs or options.apart or options.second
    ):
        for index, group in enumerate(families(units, 2 if options.pairs else 1)):
            modules = [model.get_submodule(unit) for unit in group]
            way = ways[index % 2]
            fully_shard(modules if len(modules) > 1 else modules[0], **way)
    else:
        model = apply_units(
            model, below, path=options.door, style=options.style, **ways[0]
        )
    if options.hook:
        register_comm_hook(model, DefaultState(world.group), average)
    for unit in units if options.factor else ():
        set_gradient_divide_factor(model.get_submodule(unit), options.factor)
    for unit in units if options.methods else ():
        if isinstance(model.get_submodule(unit), Piece):
            register_forward_method(model.get_submodule(unit), "compute")
    if options.keep_full:
        set_reshard_after_backward(model, False)
    if options.fill:
        set_reduce_scatter_unused_params(model, True)
    return model


def wrap(model: nn.Module, how: str) -> None:
    """Put a checkpoint wrapper around each piece below the root."""
    name = "REENTRANT" if how == "reentered" else "NO_REENTRANT"
    root = next(each for each in model.modules() if isinstance(each, Piece))
    apply_activation_checkpointing(
        model,
        lambda module: checkpoint_wrapper(module, CheckpointImpl[name]),
        lambda module: isinstance(module, Piece) and module is not root,
    )


def ranks_of(name: str, options: Options, world: World) -> dict[str, Any]:
    mesh = mesh_of(world, options.replicas) if "HYBRID" in name else None
    return {"strategy": ShardingStrategy[name], "device_mesh": mesh}


def average(state: DefaultState, grad: Tensor, output: Tensor | None = None) -> None:
    """Either default hook, by what it is given."""
    if output is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, output)


def families(units: list[str], size: int) -> list[list[str]]:
    """The units in groups of neighbours of one parent, inner ones first."""
    found: dict[str, list[list[str]]] = {}
    for unit in units:
        groups = found.setdefault(unit.rpartition(".")[0] if unit else "-", [])
        if not groups or len(groups[-1]) == size:
            groups.append([])
        groups[-1].append(unit)
    every = [group for groups in found.values() for group in groups]
    return sorted(every, key=lambda group: -group[0].count(".") - bool(group[0]))


def equal_parts(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of parameters of which every rank holds the same part."""
    names = {id(p): name for name, p in named(model).items()}
    parts: dict[Any, list[str]] = {}
    for state in _get_fsdp_states(model):
        for region in state.handle.layout.regions:
            slots = zip(region.layout.parameters, region.leaves, strict=True)
            for slot, leaf in slots:
                spans = [
                    region.layout.interval(slot, rank)
                    for rank in range(region.layout.world_size)
                ]
                shape = (
                    slot.shape,
                    leaf.dtype,
                    tuple(spans) if region.full.is_own else (),
                )
                if id(leaf) in names:
                    parts.setdefault(shape, []).append(names[id(leaf)])
    return [(a, b) for group in parts.values() for a in group for b in group if a < b]
