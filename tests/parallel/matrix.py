"""The largest differences to the plain models, for every mesh that is supported.

::

    python -m tests.parallel.matrix             4 and 8 ranks
    python -m tests.parallel.matrix --ranks 4

Three steps of AdamW with clipping. The other side is the model of parallelize_module
alone with gradients averaged by hand; for experts, the plain model on all data. A cell
is the largest difference of a loss, and of a weight at the end. Then: bytes planned
and sent per wire format, and Muon beside ``torch.optim.Muon`` on whole matrices.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    Block,
    Float8Wire,
    Int8Wire,
    MixedPrecision,
    ShardingStrategy,
    clip_grad_norm_,
    get_full_param,
    plan,
)
from composable_fsdp.comm.collectives import record
from tests.optim import test_owners as muon
from tests.parallel import experts, models
from tests.runtime.traffic import counts, planned
from tests.support.reference import backward
from tests.support.world import RankPool, World

MAX_NORM = 0.5
LOW = MixedPrecision(torch.bfloat16, torch.float32)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"mixed_precision": LOW},
    "int8 wire": {"wire": Int8Wire()},
    "float8 wire": {"wire": Float8Wire()},
    "float8 wire, tensor": {"wire": Float8Wire("tensor")},
}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Row(NamedTuple):
    """A row of the table."""

    strategy: str
    dp: int
    tp: int
    replicas: int = 1
    sequence: bool = False
    ep: int = 1
    listed: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.replicas

    def cells(self) -> list[str]:
        """Return the first columns."""
        data = f"{self.replicas} x {self.dp}" if self.replicas > 1 else str(self.dp)
        kind = "-" if self.ep == 1 else f"{self.ep}, {self.form}"
        sp = "yes" if self.sequence else "-"
        return [self.strategy, data, str(self.tp), sp, kind]

    @property
    def form(self) -> str:
        """Whether experts are stacked DTensors, or modules of their own."""
        return "modules" if self.listed else "DTensors"


def rows(ranks: int) -> list[Row]:
    """Return the rows on so many ranks."""
    found = []
    for tp in (1, 2, 4, 8):
        if ranks % tp:
            continue
        dp = ranks // tp
        for strategy in STRATEGIES if ranks == 4 else STRATEGIES[:1]:
            # Four tokens: torch cannot normalise none on a rank.
            for sequence in (False, True) if 1 < tp < 8 else (False,):
                found.append(Row(strategy, dp, tp, sequence=sequence))
    hybrid = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if ranks == 8 else []
    found += [Row(each, 2, 2, replicas=2, sequence=True) for each in hybrid]
    for listed in (False, True):
        for strategy in STRATEGIES:
            sizes = [2, 4] if ranks == 4 else []
            found += [Row(strategy, 4, 1, ep=ep, listed=listed) for ep in sizes]
        found.append(Row("FULL_SHARD", ranks // 2, 2, ep=2, listed=listed))
    return found


def differences(world: World, row: Row, precision: str) -> tuple[float, float]:
    """Train both models; return the largest differences of losses and of weights."""
    options = {**PRECISIONS[precision], "strategy": ShardingStrategy[row.strategy]}
    run = _dense if row.ep == 1 else _experts
    return run(world, row, options)


def _dense(world: World, row: Row, options: dict[str, Any]) -> tuple[float, float]:
    mesh = models.mesh_of(world, row.dp, replicas=row.replicas)
    recipe = models.Recipe(sequence=row.sequence)
    model = models.sharded(recipe.parallel(mesh), mesh, **options)
    plain = recipe.parallel(mesh)
    rank, low = models.data_rank(mesh), "mixed_precision" in options

    def step(number: int) -> float:
        computes = copy.deepcopy(plain).bfloat16() if low else plain
        loss = models.loss_of(computes, models.batch(number, rank))
        backward(loss)
        for parameter, other in zip(
            plain.parameters(), computes.parameters(), strict=True
        ):
            parameter.grad = _placed(other.grad, parameter, parameter.dtype)
        models.average(plain, mesh)
        _scale(plain.parameters(), float(models.norm_of(plain)))
        return loss.item()

    return _compare(model, plain, lambda n: models.batch(n, rank), models, step)


def _placed(gradient: Any, parameter: Any, dtype: torch.dtype) -> Any:
    """Return a gradient in the placement of its parameter, and then in a dtype."""
    if isinstance(gradient, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        gradient = gradient.redistribute(mesh, placements)
    return gradient.to(dtype)


def _experts(world: World, row: Row, options: dict[str, Any]) -> tuple[float, float]:
    kind = experts.Recipe(experts=8, top=3, shared=True, listed=row.listed, ep=row.ep)
    tp: DeviceMesh | None = None
    if row.tp > 1:
        mesh, data = kind.mesh_with_tp(world)
        tp = mesh["tp"]
    else:
        mesh = kind.mesh(world)
        data = mesh._flatten("dp")
    model = kind.sharded(mesh["ep"], mesh["edp"], data, tp=tp, **options)
    plain, rank = kind.plain(), data.get_local_rank()

    def step(number: int) -> float:
        computes = plain
        if "mixed_precision" in options:
            computes = copy.deepcopy(plain).bfloat16()
        parts = range(data.size())
        losses = [experts.loss_of(computes, experts.batch(number, n)) for n in parts]
        backward(torch.stack(losses).mean())
        for parameter, other in zip(
            plain.parameters(), computes.parameters(), strict=True
        ):
            assert other.grad is not None
            parameter.grad = other.grad.to(parameter.dtype)
        _scale(plain.parameters(), float(models.norm_of(plain)))
        return losses[rank].item()

    return _compare(model, plain, lambda n: experts.batch(n, rank), experts, step)


def _scale(parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Clip the gradients of the plain model."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))


def _compare(
    model: nn.Module,
    plain: nn.Module,
    batch: Callable[[int], Tensor],
    of: Any,
    step: Callable[[int], float],
) -> tuple[float, float]:
    """Train both; ``step`` leaves the clipped gradients of a step in ``plain``."""
    # Without a large epsilon Adam turns rounding errors near 0 into whole steps.
    optims = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, plain)
    ]
    apart = 0.0
    for number in range(3):
        loss = of.loss_of(model, batch(number))
        backward(loss)
        clip_grad_norm_(model, MAX_NORM)
        apart = max(apart, abs(loss.item() - step(number)))
        for each in optims:
            each.step()
            each.zero_grad()
    own = dict(model.named_parameters())
    weights = [
        (get_full_param(model, name) - models.whole(parameter.detach())).abs().max()
        for name, parameter in plain.named_parameters()
        if name in own
    ]
    return apart, float(max(weights))


def wire_bytes(world: World, row: Row, precision: str) -> str:
    """Return the bytes planned and sent in a step, and the share of the exact bytes."""
    found = []
    for options in (PRECISIONS[precision], {}):
        mesh = models.mesh_of(world, row.dp)
        model = models.sharded(
            models.Recipe(hidden=256).parallel(mesh), mesh, **options
        )
        ids = models.batch(0, models.data_rank(mesh))
        # The first step compares ranks, too.
        backward(models.loss_of(model, ids))
        with record() as calls:
            backward(models.loss_of(model, ids))
        found.append((planned(plan(model)), counts(calls)))
    (expected, sent), (_, exact) = found
    share = sent["all_gather"][1] / exact["all_gather"][1]
    same = "equal" if expected == sent else f"PLANNED {expected}"
    nbytes = ", ".join(f"{name} {size:,}" for name, (_, size) in sent.items())
    return f"{nbytes} bytes sent; planned: {same}; all-gathers {share:.3f} of float32's"


def muon_beside_torch(world: World, block: str) -> str:
    """Return the difference to torch's Muon, and the elements that were exchanged."""
    options: dict[str, Any] = {"block": getattr(Block, block)}
    if block == "ROW" and world.world_size == 4:
        options |= muon.hybrid(world)
    model, plain = muon.sharded("composable", **options), muon.Matrices()
    optims = muon.optimizers(model, plain)
    with record() as calls:
        muon.train(world, model, plain, optims, range(muon.STEPS))
    apart = max(
        float((get_full_param(model, name) - p).detach().abs().max())
        for name, p in plain.named_parameters()
    )
    sent = sum(call.nbytes for call in calls if call.op == "all_to_all")
    total = sum(p.numel() for p in plain.parameters())
    strategy = "HYBRID_SHARD" if "strategy" in options else "FULL_SHARD"
    return (
        f"{world.world_size} ranks, {strategy}, {block}: {apart:g} apart; rank 0 puts "
        f"{sent // muon.STEPS:,} bytes into all-to-alls a step, of {total:,} elements"
    )


def line(cells: Sequence[str]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def say(text: str = "") -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_mesh(pool: RankPool, ranks: int) -> None:
    """Print the table of so many ranks, and the bytes of each wire format."""
    header = ["strategy", "data", "TP", "SP", "EP", *PRECISIONS]
    say(f"\n{ranks} ranks; largest difference of a loss / of a weight\n")
    say(line(header))
    say(line(["---"] * len(header)))
    for row in rows(ranks):
        cells = row.cells()
        for name in PRECISIONS:
            found = pool.run(differences, row, name)
            loss, weight = map(max, zip(*found, strict=True))
            cells.append(f"{loss:.1e} / {weight:.1e}")
        say(line(cells))
    for row in rows(ranks):
        is_first = row.strategy == "FULL_SHARD" and row.ep == 1 and not row.sequence
        for name in PRECISIONS if is_first and row.dp > 1 else ():
            told = pool.run(wire_bytes, row, name)[0]
            say(f"\ndata {row.dp}, TP {row.tp}, {name}: {told}")


def main() -> None:
    """Print the differences of every mesh, wire format and optimizer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, action="append", choices=[4, 8])
    for ranks in parser.parse_args().ranks or [4, 8]:
        with RankPool(ranks, "gloo") as pool:
            say_mesh(pool, ranks)
    for ranks in (2, 4):
        with RankPool(ranks, "gloo") as pool:
            for block in ("ROW", "TENSOR"):
                say(f"\nMuon: {pool.run(muon_beside_torch, block)[0]}")


if __name__ == "__main__":
    main()
