"""The all-reduce over replicas has a stream and a communicator of its own.

The clocks of ``tests.support.streams`` tell the order of the work of each stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    PlanError,
    ShardingStrategy,
    fully_shard,
    set_is_last_backward,
)
from composable_fsdp.comm import collectives
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.support.models import TinyGPT
from tests.support.reference import backward
from tests.support.streams import Clock, FakeStream, StreamOrder, stream_order
from tests.support.world import fake_world

pytestmark = pytest.mark.req("M-07")
HYBRID = ShardingStrategy.HYBRID_SHARD
TOKENS = torch.arange(12).view(2, 6)


class Sent(NamedTuple):
    """A reduction as it was issued."""

    unit: str
    stream: FakeStream
    time: int
    seen: Clock
    """What the stream waits for first."""
    compute: Clock
    """What compute has waited for by then."""


@contextmanager
def hybrid(
    *, single: bool = False, **options: Any
) -> Iterator[tuple[StreamOrder, Any]]:
    """Three blocks, or a ``single`` unit, on a rank of two shards and two replicas."""
    with fake_world(4), stream_order() as order:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = TinyGPT(layers=3)
        for module in (*(() if single else model.blocks), model):
            fully_shard(module, strategy=HYBRID, device_mesh=mesh, **options)
        yield order, model
    assert order.problems == []


def loss_of(model: nn.Module) -> Tensor:
    """A scalar."""
    loss: Tensor = model(TOKENS).float().square().mean()
    return loss


def sent(
    order: StreamOrder, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Sent]]:
    """The reductions of a backward in the steady state, by kind, in order."""
    found: dict[str, list[Sent]] = {}

    def note(op: str, plain: Any) -> Any:
        def noting(*args: Any, operation: Any = None, **kwargs: Any) -> Any:
            stream, seen = order.current, dict(order.current.clock)
            result = plain(*args, operation=operation, **kwargs)
            clock = dict(order.compute.clock)
            made = Sent(operation.unit, stream, stream.clock[stream], seen, clock)
            found.setdefault(op, []).append(made)
            return result

        return noting

    backward(loss_of(model))
    for name in ("reduce_scatter_flat", "all_reduce"):
        monkeypatch.setattr(collectives, name, note(name, getattr(collectives, name)))
    backward(loss_of(model))
    return found


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["own", "low"])
def test_the_next_reduce_scatter_does_not_wait_for_the_all_reduce(
    precision: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does compute, until the reduction after next; each all-reduce is behind
    its own reduce-scatter."""
    low = MixedPrecision(param_dtype=precision)
    with hybrid(mixed_precision=low) as (order, model):
        found = sent(order, model, monkeypatch)
        end = dict(order.compute.clock)
    scattered, summed = found["reduce_scatter_flat"], found["all_reduce"]

    assert [each.unit for each in scattered] == [each.unit for each in summed]
    assert len(scattered) == 4
    assert len({scattered[0].stream, summed[0].stream, order.compute}) == 3
    for own, result in zip(scattered, summed, strict=True):
        assert result.seen[own.stream] >= own.time
    for before, following in zip(summed, scattered[1:], strict=False):
        assert following.seen.get(before.stream, 0) < before.time
        assert following.compute.get(before.stream, 0) < before.time
    for before, following in zip(summed, scattered[2:], strict=False):
        assert following.seen[before.stream] >= before.time
    assert end[summed[-1].stream] >= summed[-1].time


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["own", "low"])
def test_gradients_are_cleared_and_kept_while_an_all_reduce_runs(
    precision: torch.dtype | None, last: bool, offload: bool
) -> None:
    """Through an end of backward that does not wait, and evaluation."""
    low = MixedPrecision(param_dtype=precision)
    with hybrid(
        mixed_precision=low, cpu_offload=CPUOffload(offload_params=offload)
    ) as (_, model):
        for _ in range(2):
            set_is_last_backward(model, last)
            backward(loss_of(model))
            with torch.no_grad():
                loss_of(model)
            set_is_last_backward(model, True)
            backward(loss_of(model))
            model.zero_grad()
            backward(loss_of(model))


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["own", "low"])
def test_a_unit_that_is_reduced_twice_in_a_row_waits_for_itself(
    precision: torch.dtype | None,
) -> None:
    """Both reductions write the same outputs."""
    low = MixedPrecision(param_dtype=precision)
    with hybrid(single=True, mixed_precision=low) as (_, model):
        set_is_last_backward(model, False)
        for _ in range(2):
            backward(loss_of(model))
        set_is_last_backward(model, True)
        backward(loss_of(model))


@pytest.mark.parametrize("unit", ["", "blocks.0", "blocks.1"])
def test_a_hook_that_raises_behind_an_all_reduce_keeps_no_memory(unit: str) -> None:
    """The next forward frees the gradients, and the next backward is as any other."""
    with hybrid(mixed_precision=MixedPrecision(torch.bfloat16)) as (_, model):
        backward(loss_of(model))
        parameter = next(model.get_submodule(unit).parameters())
        hook = parameter.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(loss_of(model))
        hook.remove()
        model.zero_grad()
        with torch.no_grad():
            loss_of(model)
        for handle in _get_fsdp_handles(model):
            for region in handle.layout.trainable:
                assert region.gradient.shard is None
                assert region.reduce.temporary is None
        backward(loss_of(model))


@pytest.mark.parametrize("unit", ["", "blocks.0"])
def test_a_cast_while_an_all_reduce_runs_is_refused(unit: str) -> None:
    """Of the root, which is reduced last, and of the unit before."""
    with hybrid() as (_, model):
        set_is_last_backward(model, False)
        backward(loss_of(model))
        model.get_submodule(unit).double()
        with pytest.raises(PlanError, match="were cast while its gradients are being"):
            loss_of(model)


def test_replicas_have_a_communicator_of_their_own() -> None:
    """Not that of gathers and reduce-scatters."""
    with hybrid() as (_, model):
        for handle in _get_fsdp_handles(model):
            shard, replicate, _ = handle.groups.names
            assert shard != replicate


class TwoDtypes(nn.Module):
    """A unit of two regions, whose gradients are reduced in the same dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to the same."""
        y: Tensor = self.second(self.first(x).double())
        return y


@pytest.mark.parametrize("strategy", [HYBRID, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("nccl", [False, True])
def test_regions_of_a_dtype_share_an_all_reduce(
    nccl: bool, strategy: ShardingStrategy
) -> None:
    """One collective of both; NCCL gets them in one call."""
    with fake_world(4), ExitStack() as stack:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        low = MixedPrecision(reduce_dtype=torch.float32)
        model = fully_shard(
            TwoDtypes(), device_mesh=mesh, strategy=strategy, mixed_precision=low
        )
        (handle,) = _get_fsdp_handles(model)
        assert handle.groups.replicate_ref is not None
        handle.groups.replicate_ref.operations.is_nccl = nccl
        calls = stack.enter_context(_ops())
        noted = stack.enter_context(collectives.record())
        backward(model(torch.ones(2, 4)).sum())

    reduced = [each for each in noted if each.op == "all_reduce"]
    assert [len(each.numel) for each in reduced] == [2]
    assert calls.count("c10d::allreduce_coalesced_") == nccl
    assert calls.count("c10d::allreduce_") == (0 if nccl else 2)


@contextmanager
def _ops() -> Iterator[list[str]]:
    """The names of all operators that run."""
    names: list[str] = []

    class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names():  # type: ignore[no-untyped-call]
        yield names
