"""A simulated step of a model with tensor parallelism is the real one."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import (
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    forecast,
    fully_shard,
    simulate,
)
from composable_fsdp.doors.checkpoint_wrapper import apply_activation_checkpointing
from composable_fsdp.errors import PlanError
from composable_fsdp.features import recent_operations
from composable_fsdp.tools import Simulation
from composable_fsdp.tools.unit_costs import Traffic
from tests.parallel import models
from tests.support.memory import LiveBytes
from tests.support.reference import backward
from tests.support.world import World, fake_world, ranks

WIDTH = 128
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Text(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def parallel(mesh: DeviceMesh, *, sequence: bool = True) -> Text:
    """What a training script does with the mesh dim ``tp``."""
    model, here = Text(), Shard(1) if sequence else Replicate()
    norm: dict[str, Any] = {"norm": SequenceParallel()} if sequence else {}
    parallelize_module(
        model,
        mesh["tp"],
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=here),
            "head": ColwiseParallel(
                input_layouts=here, output_layouts=Shard(-1), use_local_output=False
            ),
            **norm,
        },
    )
    for block in model.blocks:
        up = ColwiseParallel(input_layouts=here)
        down = RowwiseParallel(output_layouts=here)
        parallelize_module(block, mesh["tp"], {"up": up, "down": down, **norm})
    return model


def sharded(dp: int, tp: int, *, sequence: bool = True, **options: Any) -> Text:
    """The model over a mesh ``(dp, tp)``."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = parallel(mesh, sequence=sequence)
    for block in model.blocks:
        fully_shard(block, device_mesh=mesh["dp"], **options)
    return fully_shard(model, device_mesh=mesh["dp"], **options)


def batch(time: int = 8) -> Tensor:
    """Token ids ``(2, time)``."""
    return torch.zeros(2, time, dtype=torch.long)


def loss_of(output: Any) -> Tensor:
    """The loss on logits that are cut over ``tp``."""
    targets = torch.zeros(output.shape[0] * output.shape[1], dtype=torch.long)
    return nn.functional.cross_entropy(output.flatten(0, 1), targets)


class Sent(NamedTuple):
    """A collective: when it was sent, its kind, and bytes of the whole buffers."""

    when: float
    op: str
    nbytes: int


class Functional(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Notes the functional collectives of the model itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and note it."""
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        when = time.time()
        result = func(*args, **(kwargs or {}))
        name = str(func.name())
        op = next((op for op in KINDS if op in name), "")
        if name.startswith("_c10d_functional::") and op:
            whole = result if op == "all_gather" else args[0]
            nbytes = sum(t.nbytes for t in pytree.tree_leaves(whole))
            self.sent.append(Sent(when, op, nbytes))
        return result


KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def real_step(
    world: World, make: Callable[[], nn.Module], loss: Any, inputs: Tensor
) -> tuple[int, list[tuple[str, int]], list[tuple[str, str]]]:
    """Peak of the third step on real ranks, and what model and runtime have sent."""
    models.forget_meshes()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss(model(inputs)).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        model.zero_grad()

    with loss_parallel():
        # The first step compares weights, and DTensor computes shapes on fake tensors.
        step()
        gc.collect()
        with Functional() as calls, LiveBytes() as live:
            step()
            before = time.time()
            live.reset()
            step()
    own = [(each.op, each.nbytes) for each in calls.sent if each.when >= before]
    sent = [each for each in recent_operations() if each.issued >= before]
    runtime = [
        (each.op, each.unit.strip("'\"")) for each in sent if "digest" not in each.op
    ]
    return live.peak, own, runtime


def run(make: Callable[..., Any], world_size: int, **options: Any) -> Simulation:
    """Simulate a step as ``real_step`` runs it."""
    given = {"optimizer": "adamw-fused", "max_norm": 1.0, "device_type": "cpu"}
    # The backward of the loss is in the block, too, as it has to be.
    with loss_parallel():
        return simulate(make, world_size=world_size, **{**given, **options})


def assert_same(
    found: Simulation, real: tuple[int, list[tuple[str, int]], list[tuple[str, str]]]
) -> None:
    """The peak within 5 %; kinds, bytes and order of all collectives."""
    peak, own, runtime = real
    assert own
    assert [
        (each.name, each.nbytes) for each in found.collectives if each.by_model
    ] == own
    assert [
        (each.name, "(root)" if each.unit == "" else each.unit or "")
        for each in found.collectives
        if not each.by_model
    ] == runtime
    assert found.peak.memory.total == pytest.approx(peak, rel=0.05)


def checkpointed() -> Text:
    """The model with activation checkpointing of its blocks, on 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(mesh)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    for block in model.blocks:
        fully_shard(block, device_mesh=mesh["dp"], mixed_precision=LOW)
    return fully_shard(model, device_mesh=mesh["dp"], mixed_precision=LOW)


@pytest.mark.few(2)
@pytest.mark.req("N-02")
@pytest.mark.parametrize("make", [partial(sharded, 4, 1, sequence=False), checkpointed])
def test_a_tensor_parallel_step_is_the_real_one(make: Callable[[], Text]) -> None:
    """Each collective of layers, of their recomputation, and of the runtime, with its
    bytes, and the peak."""
    real = ranks(4).run(real_step, make, loss_of, batch())[0]

    assert_same(run(make, 4, batch=batch(), loss=loss_of), real)


@pytest.mark.few(1)
@pytest.mark.req("N-02")
@pytest.mark.parametrize(
    ("dp", "tp", "device_type", "optimizer", "options"),
    [
        (2, 2, "cpu", "sgd", {}),
        (256, 8, "cuda", "adamw-fused", {}),
        (8, 4, "cuda", "adamw", {"mixed_precision": LOW}),
    ],
)
def test_the_peak_is_the_planned_one(
    dp: int, tp: int, device_type: Any, optimizer: str, options: dict[str, Any]
) -> None:
    """Within 1 %, and the runtime's collectives are those of the plan."""
    with patch.object(sys.modules[__name__], "WIDTH", 1024):
        found = run(
            partial(sharded, dp, tp, **options),
            dp * tp,
            batch=batch(tp)[:1],
            loss=loss_of,
            device_type=device_type,
            optimizer=optimizer,
            max_norm=None,
        )

    planned = forecast(found.plan, optimizer=optimizer, device_type=device_type)
    assert found.peak.memory.total == pytest.approx(planned.total, rel=0.01)
    sent: Counter[str] = Counter()
    for each in found.collectives:
        sent[f"{each.name}_calls"] += not each.by_model
        sent[f"{each.name}_bytes"] += 0 if each.by_model else each.nbytes
    assert Traffic(**sent) == found.plan.traffic
    assert (found.world_size, found.plan.world_size) == (dp * tp, dp)


def test_the_function_gets_the_mesh_of_the_job() -> None:
    """With units and options of the call, and the dims of a hybrid mesh by name."""
    seen: list[Any] = []

    def make(mesh: DeviceMesh) -> Text:
        seen.append((mesh.mesh_dim_names, tuple(mesh.shape)))
        return parallel(mesh)

    before = {name: getattr(DeviceMesh, name) for name in ("__init__", "__getitem__")}
    found = run(
        make,
        8,
        tensor_parallel_size=2,
        shard_world_size=2,
        batch=batch(),
        loss=loss_of,
        units=["blocks.*"],
        mixed_precision=LOW,
        strategy=ShardingStrategy.HYBRID_SHARD,
    )

    assert seen == [(("replicate", "shard", "tp"), (2, 2, 2))]
    assert [unit.shard_world_size for unit in found.plan.units] == [2] * 3
    assert {(each.group, each.ranks) for each in found.collectives} == {
        *(("shard", 2), ("replicate", 2), ("tp", 2))
    }
    # No mesh stays behind: DTensor's caches are empty, so that groups which are gone
    # are not used.
    assert {name: getattr(DeviceMesh, name) for name in before} == before
    hits_and_misses = _get_fast_path_sharding_prop_cache_stats()  # type: ignore[no-untyped-call]  # torch
    assert hits_and_misses == (0, 0)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(mesh)
        with loss_parallel():
            backward(loss_of(model(batch())))
    models.forget_meshes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "divides world_size=8, got 3"),
        ({"tensor_parallel_size": True}, "divides world_size=8, got True"),
        (
            {"shard_world_size": 8},
            "divides the 4 data ranks of world_size=8 and tensor_parallel_size=2, got",
        ),
        ({"model": Text()}, "expects a function that makes the model, and got a Text"),
        ({"model": Text}, "none of whose parameters is a DTensor.*parallelize_module"),
        ({"tensor_parallel_size": None}, "needs arguments: mesh.*tensor_parallel_size"),
        ({"model": lambda mesh: mesh}, "expects to return a module.*got DeviceMesh"),
    ],
)
def test_a_wrong_mesh_is_named(options: dict[str, Any], message: str) -> None:
    """What is expected, what was given, and the way out."""
    given = {"tensor_parallel_size": 2, "batch": batch(), "loss": loss_of, **options}

    with pytest.raises(PlanError, match=message):
        run(given.pop("model", parallel), 8, **given)
