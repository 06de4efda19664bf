"""Laws of placements: each trains as the plain model, sends what its plan says, has the
norm of the whole gradient, and reads what any other has written."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    Placement,
    StateDictType,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    grad_norm,
    load,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    plan,
    reshard,
    save,
    state_dict_type,
    unshard,
)
from composable_fsdp.comm import collectives
from composable_fsdp.config import Arena
from property_tests.live import examples
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
DIMS = "outer", "inner"
KINDS = "parameters", "between", "gradients", "states"
# By its level, a dim divides nothing, states, gradients too, parameters too, and these
# between forward and backward, too.
HIGHEST = {"states": 1, "gradients": 2, "parameters": 3, "between": 4}
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 3

Levels = tuple[int, int]


def placed(levels: Levels, *, pairs: bool = False) -> Placement:
    """The placement in which each dim divides up to its level.

    With ``pairs``, pairs of ranks of the inner dim divide what it divides in between.
    """
    rows = {
        kind: tuple(
            d for d, at in zip(DIMS, levels, strict=True) if at >= HIGHEST[kind]
        )
        for kind in KINDS
    }
    if pairs:
        rows["between"] = tuple(d.replace("inner", "inner:2") for d in rows["between"])
    return Placement(**rows)


def is_legal(levels: Levels) -> bool:
    """Whether not two pieces of the parameters would be kept."""
    at = placed(levels)
    return at.between in ((), at.parameters) or at.parameters == at.states


LEGAL = [(a, b) for a in range(5) for b in range(5) if is_legal((a, b))]


@dataclass(frozen=True)
class Case:
    """A program: the placements that train and that load, and what the steps do."""

    levels: Levels
    then: Levels = (4, 4)
    shape: tuple[int, int] = (2, 2)
    mixed: bool = False
    accumulates: bool = False
    clips: bool = False
    recomputes: bool = False
    freezes: bool = False
    offloads: bool = False
    arena: bool = False
    strided: bool = False
    """A weight is in channels_last, and the second step finds all in other memory."""
    pairs: bool = False
    """What lies in between is over pairs of the four ranks of the inner dim."""

    def placement(self) -> Placement:
        """The placement that trains."""
        at = placed(self.levels)
        legal = at.parameters == at.states and self.shape[1] == 4
        return placed(self.levels, pairs=self.pairs and legal)


def model_of(case: Case) -> nn.Sequential:
    torch.manual_seed(3)
    first: nn.Module = nn.Linear(6, 10)
    if case.strided:
        conv = nn.Conv2d(2, 5, (2, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
        first = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), conv, nn.Flatten())
    model = nn.Sequential(
        nn.Sequential(first, nn.Tanh()),
        nn.Sequential(nn.Linear(10, 9), nn.Tanh()),
        nn.Linear(9, 3),
    )
    if case.freezes:
        model.get_parameter("1.0.weight").requires_grad_(False)
    return model if case.mixed else model.double()


def shard(model: nn.Sequential, placement: Placement, case: Case) -> nn.Sequential:
    mesh: DeviceMesh = init_device_mesh("cpu", case.shape, mesh_dim_names=DIMS)
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "placement": placement,
        "mixed_precision": BF16 if case.mixed else None,
        "cpu_offload": CPUOffload(offload_params=case.offloads),
        "arena": Arena(poison=True) if case.arena else None,
    }
    for block in list(model)[:2]:
        if case.recomputes:
            checkpoint(block)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(case: Case, step: int, rank: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    dtype = torch.float32 if case.mixed else torch.float64
    return torch.randn(4, 6, generator=made, dtype=dtype)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, step: int, rank: int
) -> list[Tensor]:
    """A step on a sharded model, in two microbatches if the case accumulates; the norm
    of the gradients if it clips."""
    rows = batch(case, step, rank)
    parts = rows.chunk(2) if case.accumulates else (rows,)
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        with nullcontext() if last else no_sync(model):
            (model(part).square().mean() / len(parts)).backward()
    norms = [grad_norm(model)] if case.clips else []
    if case.clips:
        clip_grad_norm_(model, 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norms


def add_gradients(
    model: nn.Module, rows: Tensor, share: float, case: Case, size: int
) -> None:
    """Add the gradients of a rank's microbatch, averaged over ranks in float32."""
    runs = copy.deepcopy(model).bfloat16() if case.mixed else copy.deepcopy(model)
    runs.zero_grad()
    out = runs(rows.bfloat16() if case.mixed else rows)
    (out.square().mean() * share).backward()
    for own, low in zip(model.parameters(), runs.parameters(), strict=True):
        if low.grad is not None:
            part = low.grad.to(own.dtype) / size
            own.grad = part if own.grad is None else own.grad + part


def trained_plain(case: Case, size: int, steps: int) -> tuple[nn.Module, list[Tensor]]:
    """The plain model after steps on the batches of all ranks, and norms; gradients, if
    the case is mixed, are those of a copy in bfloat16."""
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms: list[Tensor] = []
    for step in range(steps):
        for rank in range(size):
            rows = batch(case, step, rank)
            for part in rows.chunk(2) if case.accumulates else (rows,):
                add_gradients(model, part, len(part) / len(rows), case, size)
        if case.clips:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def sent(calls: list[collectives.CallRecord]) -> dict[str, tuple[int, int]]:
    times = Counter(call.op for call in calls)
    nbytes: Counter[str] = Counter()
    for call in calls:
        nbytes[call.op] += call.nbytes
    return {op: (times[op], nbytes[op]) for op in times}


def check_case(world: World, case: Case, folder: str) -> None:
    model = shard(model_of(case), case.placement(), case)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms: list[Tensor] = []
    for step in range(STEPS):
        for parameter in model.parameters() if case.strided and step == 1 else ():
            parameter.data = parameter.data.clone()
        with collectives.record() as calls:
            norms += step_of(model, optimizer, case, step, world.rank)
        evaluate_swapped(model, case)

    expected, wanted = trained_plain(case, world.world_size, STEPS)
    close({"": torch.tensor(norms)}, {"": torch.tensor(wanted)}, case)
    close(model.state_dict(), dict(expected.state_dict()), case)
    gathers = {call.world_size for call in calls if call.op == "all_gather"}
    for unit in plan(model).units:
        assert ("inner:2" in case.placement().between) <= (unit.between_ranks == 2)
        # Backward gathers what was kept, among the ranks that kept it together.
        if 1 < unit.between_ranks < unit.parameter_ranks:
            assert unit.between_ranks in gathers
    if not (case.accumulates or case.clips or case.recomputes):
        # Behind an evaluation a step gathers as it does behind an optimizer's step.
        said = plan(model).traffic.by_op()
        assert sent(calls) == {
            op: (n["calls"], n["bytes"]) for op, n in said.items() if n["calls"]
        }

    # What another placement reads: from a state dict, and from a checkpoint.
    written = model.state_dict(), optim_state_dict(model, optimizer)
    save(folder, model, optimizer)
    for reads in (lambda m, o: put(m, o, written), lambda m, o: load(folder, m, o)):
        other = shard(model_of(case), placed(case.then), case)
        second = torch.optim.AdamW(other.parameters(), 1e-2)
        reads(other, second)
        step_of(other, second, case, STEPS, world.rank)
        if "after" not in locals():
            step_of(model, optimizer, case, STEPS, world.rank)
            after = model.state_dict()
        close(other.state_dict(), after, case)


def evaluate_swapped(model: nn.Module, case: Case) -> None:
    """Evaluation sees weights that were swapped in through ``.data``."""
    own = [parameter.data for parameter in model.parameters()]
    for values in own:
        values.mul_(2)
    with torch.no_grad():
        found = model(batch(case, 0, 0))
        plain = model_of(case)
        plain.load_state_dict(model.state_dict())
        if not case.mixed:
            close({"": found}, {"": plain(batch(case, 0, 0))}, case)
    for values in own:
        values.div_(2)


def put(model: nn.Module, optimizer: torch.optim.Optimizer, written: Any) -> None:
    weights, states = copy.deepcopy(written)
    model.load_state_dict(weights)
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, states))


def close(found: dict[str, Tensor], expected: dict[str, Tensor], case: Case) -> None:
    rtol, atol = (1e-4, 1e-5) if case.mixed else (1e-9, 1e-12)
    torch.testing.assert_close(dict(found), dict(expected), rtol=rtol, atol=atol)


LEVELS = st.sampled_from(LEGAL)
FLAGS = (
    *("mixed", "accumulates", "clips", "recomputes", "freezes", "offloads"),
    *("arena", "strided", "pairs"),
)
CASES = st.builds(
    Case,
    levels=LEVELS,
    then=LEVELS,
    shape=st.sampled_from([(2, 2), (1, 4), (1, 2), (2, 1), (1, 1)]),
    **{flag: st.booleans() for flag in FLAGS},
)


@pytest.mark.req("L-01", "L-02", "L-03")
@examples(4)
@given(case=CASES)
@example(case=Case((1, 1), then=(2, 2)))  # ZERO1 over both dims
@example(case=Case((2, 2), then=(0, 0), freezes=True))  # ZERO2
@example(case=Case((2, 4), then=(1, 1), offloads=True))  # HFSDP
@example(case=Case((3, 3), then=(2, 4), arena=True))
@example(case=Case((1, 1), then=(3, 4), arena=True, accumulates=True))
@example(case=Case((2, 4), then=(2, 4), mixed=True, clips=True))
@example(case=Case((3, 4), then=(2, 4), recomputes=True))  # a partial reshard
@example(case=Case((3, 4), strided=True))
@example(case=Case((2, 4), mixed=True, strided=True))
@example(case=Case((4, 4), shape=(1, 4), pairs=True))
@example(case=Case((3, 4), then=(1, 1), shape=(1, 4), pairs=True, accumulates=True))
@example(case=Case((1, 1), mixed=True, accumulates=True, clips=True))
@example(case=Case((4, 3), then=(2, 3), accumulates=True, freezes=True, clips=True))
def test_every_placement_trains_as_the_plain_model(
    case: Case, ranks: RankCount, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On 1, 2 and 4 ranks: weights, bytes against the plan, and what others read."""
    folder: Path = tmp_path_factory.mktemp("placement") / "saved"

    ranks(case.shape[0] * case.shape[1]).run(check_case, case, str(folder))


def check_by_hand(world: World, levels: Levels) -> None:
    """A loop without an optimizer, which writes where a gradient is; and a load.

    Full parameters that are shown by hand are those of the last write.
    """
    case = Case(levels)
    model, plain = shard(model_of(case), placed(levels), case), model_of(case)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(5):
        if step == 3:
            model(batch(case, step, world.rank))
            model.load_state_dict(start)
            plain.load_state_dict(start)
        if step == 1 and world.rank == 0:
            with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                model.state_dict()  # by itself
        model(batch(case, step, world.rank)).square().mean().backward()
        for rank in range(world.world_size):
            (
                plain(batch(case, step, rank)).square().mean() / world.world_size
            ).backward()
        for each in (*model.parameters(), *plain.parameters()):
            if each.grad is not None:
                each.detach().sub_(each.grad, alpha=0.1)
                each.grad = None
        unshard(model[0])
        close(
            dict(model[0].named_parameters()), dict(plain[0].named_parameters()), case
        )
        reshard(model[0])
    close(model.state_dict(), plain.state_dict(), case)


@pytest.mark.req("L-01", "L-02")
@pytest.mark.parametrize("levels", [(1, 1), (2, 4), (3, 4)])
def test_ranks_agree_when_values_are_old(ranks: RankCount, levels: Levels) -> None:
    """Also if only ranks with elements of a parameter write to it."""
    ranks(4).run(check_by_hand, levels)
