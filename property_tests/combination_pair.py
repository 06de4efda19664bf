"""The sharded model of this rank, and the plain one that stands for all ranks.

Where units cast, the plain one computes what they should: it is shown its parameters in
the dtype of their unit, and casts inputs and outputs at the places of the units.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    replicate,
)
from composable_fsdp.access import set_reduce_scatter_unused_params
from composable_fsdp.doors.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from composable_fsdp.doors.wrapping import post_order_apply
from composable_fsdp.features import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    reduce_scatter_hook,
    register_comm_hook,
)
from composable_fsdp.flat.region import FlatParameter
from composable_fsdp.planning.layout import ParameterSlot
from composable_fsdp.tree.root import ensure_root
from composable_fsdp.tree.state import _FSDPState, _get_module_fsdp_state
from property_tests.casting import named
from property_tests.combination_recipes import HYBRID, Combination, Unit
from tests.support.models import Node, build, legal_units, module_at
from tests.support.reference import sgd, wide_input
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


Leaves = dict[str, Tensor]


class Owned(NamedTuple):
    """Where a parameter is in the sharded model."""

    state: _FSDPState
    region: FlatParameter
    slot: ParameterSlot
    leaf: nn.Parameter


def states_of(model: nn.Module) -> list[_FSDPState]:
    """Every unit, those of replicated subtrees included, in ``.modules()`` order."""
    found = (_get_module_fsdp_state(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def tops_of(model: nn.Module) -> list[nn.Module]:
    """The root, and the tops of replicated subtrees."""
    tops = [s.module for s in states_of(model) if s.parent is None]
    return [model, *tops[1:]]


class Pair:
    """Both models, their optimizers, and what no reduction has averaged yet."""

    def __init__(self, world: World, combination: Combination) -> None:
        self.world, self.combination = world, combination
        exact = combination.is_exact(world.world_size)
        self.dtype = torch.float32 if exact else torch.float64
        self.tolerance = 0.0 if exact else 1e-6
        layout, twin = (
            Layout(model if exact else model.double(), combination)
            for model in (build(combination.model), build(combination.model))
        )
        twin.checkpoint()
        if not combination.late:
            layout.checkpoint()
        self.model, self.plain = shard(layout, world), twin.model
        add_hook(self.model, combination, world)
        if combination.late:
            layout.checkpoint()
        self.meet_names()
        self._cast_as(layout, twin)
        # After the hooks of the units: what they drop, the unit has computed.
        self.switches = layout.inside, add_switches(layout.model)
        self.twin_switches = twin.inside, add_switches(twin.model)
        self.optimizers = [sgd(m.parameters()) for m in (self.model, self.plain)]
        self.sums: list[Leaves] = [{} for _ in range(world.world_size)]
        """Per rank, gradients of the plain model in the dtype of their reduction."""
        self.waiting: list[Leaves] = [{} for _ in range(world.world_size)]
        """The same, of those that were reduced without the replicas."""
        self.batch = 0
        self.fill(on=combination.by_rank)

    def meet_names(self) -> None:
        """Find where each parameter is, by name."""
        names = {id(p): name for name, p in named(self.model).items()}
        self.owner = {
            names[id(leaf)]: Owned(state, region, slot, leaf)
            for state in states_of(self.model)
            for region in state.handle.layout.regions
            for slot, leaf in zip(region.layout.parameters, region.leaves, strict=True)
        }
        assert self.owner.keys() == named(self.plain).keys()

    def _cast_as(self, layout: Layout, twin: Layout) -> None:
        """Have the plain model cast where the units do."""
        for top in tops_of(self.model):
            ensure_root(states_of(top)[0])
        wrapped = [
            each.module
            for each in self.model.modules()
            if isinstance(each, FullyShardedDataParallel)
        ]
        pairs = [(layout.units[path], twin.units[path]) for path in layout.units]
        for module, plain in [*pairs, (layout.model, twin.model)]:
            state = _get_module_fsdp_state(module)
            assert state is not None
            mixed = state.options.mixed_precision
            if mixed is not None and any(module is m for m in state.modules):
                auto = layout.combination.style == "auto"
                own_call = not auto or module is layout.model
                # Without a wrapper the root of each call casts, too.
                is_local = own_call and all(module is not each for each in wrapped)
                cast_like(plain, mixed, is_root=state._is_root is True or is_local)

    def fill(self, *, on: bool) -> None:
        """Have units without a gradient take part, or not."""
        for top in tops_of(self.model):
            set_reduce_scatter_unused_params(top, on)

    def unit(self, index: int) -> _FSDPState:
        """One of the units, counted round."""
        states = states_of(self.model)
        return states[index % len(states)]

    def inputs(self, rank: int, at: int) -> Tensor:
        """The input of a rank in the next forward but ``at``."""
        x = wide_input(self.combination.model.width)(self.batch + at, rank)
        return x.to(self.dtype).requires_grad_(self.combination.needs_input_grad)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """A scalar that depends on every output."""
        loss: Tensor = model(x).to(self.dtype).square().mean()
        return loss

    def dtype_of(self, name: str, use: str) -> torch.dtype:
        """In which ``compute``, ``reduce`` and ``gradient`` are for a parameter."""
        dtypes = self.owner[name].state.options.dtypes(named(self.plain)[name].dtype)
        found: torch.dtype = getattr(dtypes, use)
        return found

    def leaves(self) -> Leaves:
        """Each parameter of the plain model as its unit computes with it."""
        return {
            name: p.detach()
            .to(self.dtype_of(name, "compute"))
            .requires_grad_(p.requires_grad)
            for name, p in named(self.plain).items()
        }

    def equal(self, value: Tensor, expected: Tensor, what: str) -> None:
        """Compare, bit by bit unless sums have another order."""
        value, expected = value.detach(), expected.detach()
        assert value.dtype is expected.dtype, (what, value.dtype, expected.dtype)
        if self.tolerance:
            t = self.tolerance
            near = torch.allclose(value, expected, rtol=t, atol=t)
        else:
            near = torch.equal(value, expected)
        assert near, (what, value, expected)


def cast_like(module: nn.Module, mixed: MixedPrecision, *, is_root: bool) -> None:
    """Have a plain module cast as a unit with ``mixed`` does."""
    inputs = mixed.cast_forward_inputs or (is_root and mixed.cast_root_forward_inputs)
    if inputs and mixed.param_dtype is not None:
        module.register_forward_pre_hook(
            lambda _, args: tuple(a.to(mixed.param_dtype) for a in args), prepend=True
        )
    if mixed.output_dtype is not None:
        module.register_forward_hook(lambda *given: given[-1].to(mixed.output_dtype))
