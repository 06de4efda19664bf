"""One script with its model: the sharded one of this rank, or the plain one of any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composable_fsdp import (
    BackwardPrefetch,
    Block,
    CPUOffload,
    ShardingStrategy,
    fully_shard,
    set_reduce_scatter_unused_params,
    set_reshard_after_backward,
)
from composable_fsdp.state_dict.full import part_of
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests.casting import named
from property_tests.program_model import build, unit_paths
from property_tests.program_recipes import Options, Program
from tests.support.models import legal_units
from tests.support.reference import apply_units
from tests.support.world import World

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


class Broken(RuntimeError):
    """What a user's code raises."""


@dataclass(eq=False)
class Slot:
    """A forward that waits for its backward."""

    x: Tensor
    y: Tensor
    loss: Tensor


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """In a group, because a model may have no parameters at all."""
    made, arguments = OPTIMIZERS[kind]
    return made([{"params": list(model.parameters())}], **arguments)


class Side:
    """What a script holds: model, optimizer, graphs, gradients and states it kept."""

    model: nn.Module

    def __init__(self, program: Program, rank: int, world: World | None = None) -> None:
        self.program, self.rank, self.sharded = program, rank, world is not None
        model = build(program)
        self.units = ["", *legal_units(model, unit_paths(model))]
        if program.options.apart:
            self.units = self.units[1:]
        kind = program.options.optimizer
        optimizer = optimizer_of(kind, model) if program.options.early else None
        self.model = shard(model, self.units, program.options) if world else model
        self.optimizer = optimizer or optimizer_of(kind, self.model)
        self.slots: list[Slot] = []
        self.kept: dict[str, Tensor] = {}
        self.asked: dict[str, Tensor | None] = {}
        self.average: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.swappable: list[tuple[str, str]] = []
        self.synced, self.filled = True, program.options.fill

    def inputs(self, batch: int) -> Tensor:
        """The input of this side's rank."""
        generator = torch.Generator().manual_seed(100 * batch + self.rank)
        return torch.randn(3, self.program.width, generator=generator)

    def renew_optimizer(self) -> None:
        """A new one of the kind that the program names."""
        self.optimizer = optimizer_of(self.program.options.optimizer, self.model)

    def comparable(self, unit: str) -> bool:
        """Whether the unit owns all that is below it: no place of a shared module."""
        return all(part.again is None for part in self.program.parts())


def shard(model: nn.Module, units: list[str], options: Options) -> nn.Module:
    """Apply either door to the modules at ``units``, the root's the empty name."""
    offload = CPUOffload(offload_params=True) if options.offload else None
    arguments: dict[str, Any] = {
        "strategy": ShardingStrategy[options.strategy],
        "backward_prefetch": options.prefetch and BackwardPrefetch[options.prefetch],
        "forward_prefetch": options.forward_prefetch,
        "cpu_offload": offload,
        "limit_all_gathers": options.limit,
    }
    if options.door == "composable":
        arguments["block"] = Block[options.block]
    below = [unit for unit in units if unit]
    if options.door == "composable" and (options.pairs or options.apart):
        for group in families(units, 2 if options.pairs else 1):
            modules = [model.get_submodule(unit) for unit in group]
            fully_shard(modules if len(modules) > 1 else modules[0], **arguments)
    else:
        model = apply_units(
            model, below, path=options.door, style=options.style, **arguments
        )
    if options.keep_full:
        set_reshard_after_backward(model, False)
    if options.fill:
        set_reduce_scatter_unused_params(model, True)
    return model


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


def own_parts(
    model: nn.Module, full: dict[str, Tensor]
) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Per name, the sharded leaf and this rank's part of ``full[name]``."""
    names = {id(p): name for name, p in named(model).items()}
    found = {}
    for state in _get_fsdp_states(model):
        handle = state.handle
        # Of a unit that is full by hand the modules show the full leaves.
        shown = {id(leaf): id(other) for _, _, leaf, other in handle.swaps}
        for region in handle.regions:
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True):
                name = names.get(id(leaf)) or names[shown[id(leaf)]]
                found[name] = leaf, part_of(region, slot, full[name], like=leaf)
    return found


def equal_parts(model: nn.Module, world_size: int) -> list[tuple[str, str]]:
    """Pairs of parameters of which every rank holds the same part."""
    names = {id(p): name for name, p in named(model).items()}
    parts: dict[Any, list[str]] = {}
    for state in _get_fsdp_states(model):
        for region in state.handle.regions:
            slots = zip(region.layout.parameters, region.leaves, strict=True)
            for slot, leaf in slots:
                spans = [
                    region.layout.interval(slot, rank) for rank in range(world_size)
                ]
                shape = slot.shape, leaf.dtype, tuple(spans) if region.is_cut else ()
                if id(leaf) in names:
                    parts.setdefault(shape, []).append(names[id(leaf)])
    return [(a, b) for group in parts.values() for a in group for b in group if a < b]
