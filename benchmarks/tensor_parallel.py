"""The step of a tensor-parallel model on four gloo ranks, beside FSDP2.

    python -m benchmarks.tensor_parallel                # a mesh of 2 x 2, 12 blocks
    python -m benchmarks.tensor_parallel --blocks 4 --rounds 5

Both libraries shard the same model of ``parallelize_module`` over the other mesh dim,
and take turns in each round. Forward and backward, clipping, and AdamW in its three
forms are timed apart, as CPU time of rank 0. FSDP2 steps DTensors of two dims, and this
library plain tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.tables import fixed, say_versions, table
from composable_fsdp import clip_grad_norm_, fully_shard
from tests.parallel.models import Block, mesh_of
from tests.support.world import RankPool, World

FORMS: dict[str, dict[str, Any]] = {
    "AdamW foreach=False": {"foreach": False},
    "AdamW foreach": {"foreach": True},
    "AdamW fused": {"fused": True},
}
DIM = 64
Figures = dict[str, dict[str, float]]
"""By library, and by part of the step: milliseconds."""


def built(library: str, mesh: DeviceMesh, blocks: int) -> nn.Sequential:
    """Return the sharded model; equal values for both libraries."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(DIM, 4 * DIM) for _ in range(blocks)])
    for block in model:
        # Norms become DTensors, too: FSDP2 cannot clip over parameters of two meshes.
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh["tp"], plan)
    for module in (*model, model):
        if library == "ours":
            fully_shard(module, device_mesh=mesh["dp"])
        else:
            fsdp2_fully_shard(module, mesh=mesh["dp"])
    return model


def milliseconds(function: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def clip(library: str, model: nn.Module) -> Tensor:
    """Clip as each library's documentation says; the norm is over both mesh dims."""
    if library == "ours":
        return clip_grad_norm_(model, 1.0)
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    whole: Tensor = norm.full_tensor()
    return whole


def measure(world: World, blocks: int, rounds: int) -> Figures:
    """Return the medians over rounds; called on every rank."""
    torch.set_num_threads(1)
    mesh = mesh_of(world, 2)
    x = torch.randn(8, DIM)
    trained = {}
    for library in ("ours", "fsdp2"):
        model = built(library, mesh, blocks)
        forms = {
            name: torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
            for name, how in FORMS.items()
        }
        trained[library] = model, forms
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trained}
    for number in range(rounds + 2):
        for library, (model, forms) in trained.items():

            def forward_backward(model: nn.Module = model) -> None:
                model(x).square().mean().backward()

            times = {"forward + backward": milliseconds(forward_backward)}
            norms: list[Tensor] = []
            times["clip"] = milliseconds(
                lambda norms=norms, library=library, model=model: norms.append(  # type: ignore[misc]  # defaults bind
                    clip(library, model)
                )
            )
            for name, form in forms.items():
                times[name] = milliseconds(form.step)
            model.zero_grad()
            # The first rounds make state, and plan operators of DTensors.
            if number >= 2:
                for name, value in times.items():
                    found[library].setdefault(name, []).append(value)
    return {
        library: {name: statistics.median(each) for name, each in times.items()}
        for library, times in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.tensor_parallel")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    with RankPool(4, "gloo") as pool:
        found: Figures = pool.run(measure, given.blocks, given.rounds, timeout=600)[0]
    say_versions(f"; {given.blocks} blocks, mesh of 2 x 2")
    table(
        "CPU ms on rank 0, median",
        ["", "ours", "FSDP2", "ours/FSDP2"],
        [
            [name, *fixed([own, other], 2), *fixed([own / other], 3)]
            for name, own in found["ours"].items()
            for other in (found["fsdp2"][name],)
        ],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
