"""Optimizer state and custom collectives through the door, against torch's FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fsdp2, fully_shard
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CheckpointError
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, loss_of, wide_input
from tests.support.world import World

TORCH = "torch.distributed.fsdp"
# torch 2.13 renamed both functions, and warns of the old names.
NEW = hasattr(dist, "all_gather_single")
ALL_GATHER: Any = getattr(
    dist, "all_gather_single" if NEW else "all_gather_into_tensor"
)
REDUCE_SCATTER: Any = getattr(
    dist, "reduce_scatter_single" if NEW else "reduce_scatter_tensor"
)


def trained(
    api: Any,
    world: World,
    settle: Callable[[Any], None] = lambda model: None,
    optimizer_of: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps, whose last layer has fewer rows than there are ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
    for layer in (model[0], model[2], model):
        api.fully_shard(layer, **options)
    settle(model)
    optimizer: torch.optim.Optimizer = optimizer_of(model.parameters(), lr=0.1)
    for step in range(2):
        backward(loss_of(model, wide_input(8)(step, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """What a script makes of ``optimizer.state_dict()`` on every rank."""
    return {
        (key, name): value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


@pytest.mark.req("N-05")
@on_ranks(4)
def test_state_of_an_optimizer_has_full_tensors_on_every_rank(world: World) -> None:
    """As FSDP2's DTensors, also of parameters that some ranks have no row of."""
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
    for kind in kinds:
        options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

        made = partial(kind, **options)

        # The models stay alive, as in a script.
        model, ours = trained(fsdp2, world, optimizer_of=made)
        other, theirs = trained(
            importlib.import_module(TORCH), world, optimizer_of=made
        )
        found, expected = whole_state(ours), whole_state(theirs)
        # Keys in the same order on all ranks, or the gathers would not match.
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected)
        # A state dict loads where it came from, with the entries of absent rows.
        ours.load_state_dict(ours.state_dict())
        torch.testing.assert_close(whole_state(ours), expected)
        assert len(model) == len(other)


@on_ranks(2)
@pytest.mark.req("N-05")
def test_state_of_other_units_sends_nothing(world: World) -> None:
    """The package's own ``fully_shard`` keeps state dicts without a collective."""
    model: Any = nn.Linear(8, 1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(loss_of(model, wide_input(8)(0, world.rank)))
    optimizer.step()

    with record() as calls:
        state = optimizer.state_dict()["state"]

    assert calls == []
    # Rank 0 holds the row of the weight, and rank 1 the bias.
    assert len(state) == 1
    if world.rank == 0:
        with pytest.raises(
            CheckpointError, match=r"full_tensor expects.*by optim_state_dict\("
        ):
            state[0]["exp_avg"].full_tensor()


class Counted:
    """A collective of the user: allocates on its own, counts, and doubles sums."""

    def __init__(self, start: Any, *, waits: bool) -> None:
        self.start, self.waits = start, waits
        self.allocated: list[int] = []
        self.calls: list[tuple[int, int]] = []

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated.append(torch.Size(size).numel())
        # Old values, so that a step which reads a buffer too early is wrong.
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        *op: Any,
        async_op: bool = False,
        **named: Any,
    ) -> Any:
        """Run torch's function; return the work, or wait as an object may."""
        if self.start is REDUCE_SCATTER:
            input_tensor.mul_(2.0)
            named = {"op": op[0] if op else named["op"]}
        work = self.start(
            output_tensor, input_tensor, group=group, async_op=async_op, **named
        )
        self.calls.append((output_tensor.numel(), input_tensor.numel()))
        if work is None or not self.waits:
            return work
        work.wait()
        return None


@pytest.mark.req("N-05")
@on_ranks(4)
def test_custom_collectives_run_in_every_forward_and_backward(world: World) -> None:
    """As often as under FSDP2, in buffers of the object, with the object's results."""
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for waits, policy in ((False, {}), (True, {}), (False, bf16)):
        full, made = [], []
        for api in (fsdp2, importlib.import_module(TORCH)):
            gather, scatter = (
                Counted(each, waits=waits) for each in (ALL_GATHER, REDUCE_SCATTER)
            )

            def settle(model: Any, one: Any = gather, other: Any = scatter) -> None:
                model[0].set_custom_all_gather(one)
                model[0].set_custom_reduce_scatter(other)

            # SGD, because Adam's steps do not show the factor of the sums.
            model, _ = trained(
                api,
                world,
                settle,
                torch.optim.SGD,
                mp_policy=api.MixedPrecisionPolicy(**policy),
            )
            full.append([v.full_tensor() for v in model.state_dict().values()])
            made.append((gather, scatter))
        torch.testing.assert_close(*full)
        assert [(len(g.calls), len(s.calls)) for g, s in made] == [(4, 2)] * 2
        (gather, scatter), _ = made
        # Parameters of the first layer: 8 x 6 and 6, rows on all ranks.
        padded = gather.calls[0][0]
        assert padded >= 54
        assert set(gather.calls) == {(padded, padded // world.world_size)}
        assert gather.allocated == [padded] * len(gather.calls)
        shard = padded // world.world_size
        assert scatter.allocated == [padded, shard] * len(scatter.calls)
