"""Which device computes, what is moved there, and what happens to parameters later.

Other devices than the CPU are played by fake tensors; the GPU tests have real ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from composable_fsdp import CPUOffload, MixedPrecision, fully_shard, no_sync
from composable_fsdp.comm.groups import RankLayout, operation_log
from composable_fsdp.comm.meshes import resolve_device
from composable_fsdp.comm.placements import grid_of
from composable_fsdp.errors import PlanError
from composable_fsdp.features.passages.containers import Given
from tests.support.models import TinyGPT
from tests.support.reference import (
    backward,
    gpt_input,
    loss_of,
)
from tests.support.world import World

ONE = grid_of({"shard": 1})
CPU = torch.device("cpu")
META = torch.device("meta")
CUDA = torch.device("cuda", 0)


def on_cuda(*shape: int) -> nn.Parameter:
    with FakeTensorMode():
        return nn.Parameter(torch.empty(shape, device=CUDA))


# ---- the compute device -----------------------------------------------------

CASES: list[tuple[Any, str | None, str, torch.device, torch.device]] = [
    # device_id, the mesh's type, backend, where parameters are, where compute is
    (None, None, "gloo", CUDA, CUDA),
    (None, None, "gloo", META, CPU),
    (None, None, "nccl", CPU, torch.device("cuda", 3)),
    # What init_process_group() makes without a backend, where there is a GPU.
    (None, None, "cpu:gloo,cuda:nccl", CPU, torch.device("cuda", 3)),
    # The current device is another.
    (None, None, "nccl", CUDA, CUDA),
    (None, "cpu", "nccl", CUDA, CPU),
    (None, "cuda", "gloo", CPU, torch.device("cuda", 3)),
    (1, "cuda", "nccl", CUDA, torch.device("cuda", 1)),
    (torch.device("cuda"), None, "gloo", CUDA, torch.device("cuda", 3)),
    (CPU, "cuda", "nccl", CUDA, CPU),
]


@pytest.mark.req("S2-09")
@pytest.mark.parametrize(("device_id", "mesh", "backend", "where", "expected"), CASES)
def test_the_compute_device_is_the_first_that_somebody_names(
    monkeypatch: pytest.MonkeyPatch,
    one_rank: World,
    device_id: Any,
    mesh: str | None,
    backend: str,
    where: torch.device,
    expected: torch.device,
) -> None:
    """``device_id``, the mesh's, cuda under NCCL, else where the parameters are."""
    served = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}.get(backend, backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: served)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    layout = RankLayout(operation_log(one_rank.group), None, ONE, [0], mesh)
    with FakeTensorMode():
        parameter = torch.empty(2, device=where)

    assert resolve_device(device_id, layout, [parameter]) == expected


@pytest.mark.req("S2-09")
@pytest.mark.parametrize(
    ("local_rank", "used", "bound", "expected"),
    [
        ("2", False, None, 2),
        ("2", True, None, 0),
        ("9", False, None, 0),
        ("", False, None, 0),
        ("2", False, 1, 1),
    ],
)
def test_ranks_of_a_node_do_not_meet_on_its_first_gpu(
    monkeypatch: pytest.MonkeyPatch,
    one_rank: World,
    local_rank: str,
    used: bool,
    bound: int | None,
    expected: int,
) -> None:
    """Nobody chose a GPU: that of torchrun's rank is, and it is made the current one,
    unless the process has used one or the group was bound to one."""
    current = [0]
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: current.append(at))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    if bound is not None:
        one_rank.group.bound_device_id = torch.device("cuda", bound)

    device = resolve_device(
        None, RankLayout(operation_log(one_rank.group), None, ONE, [0]), []
    )

    assert device == torch.device("cuda", expected)
    assert current[-1] == (expected if bound is None else 0)


@dataclass
class Result:
    """A dataclass that pytree does not know."""

    value: Tensor
    note: str = "kept"


class ModelOutput(OrderedDict[str, Tensor]):
    """A dict with attributes, as transformers has."""


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda o: o),
    "dataclass": (Result, lambda o: o.value),
    "nested": (lambda y: {"a": [(None, {"b": y})]}, lambda o: o["a"][0][1]["b"]),
    "output": (lambda y: ModelOutput(logits=y), lambda o: o["logits"]),
}


@pytest.mark.req("B-05")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_are_moved_at_any_depth(kind: str) -> None:
    """A gradient flows back through a move, and the caller's containers come back."""
    x, kept, given = torch.ones(2, requires_grad=True), object(), Given()
    wrap, open_ = CONTAINERS[kind]
    argument = wrap(x)
    (value, last), kwargs = given.replace(
        ((argument, kept), {"k": x, "n": 3}), methodcaller("to", META)
    )

    assert open_(value).is_meta
    assert last is kept
    assert kwargs["n"] == 3
    assert kwargs["k"].grad_fn is not None
    given.give_back()
    assert not open_(argument).is_meta


def waits(model: Any) -> None:
    """Gradients of ``no_sync`` are in the old dtype, and would be lost."""
    with no_sync(model):
        backward(loss_of(model, gpt_input(0, 0)))
    model.to(torch.float64)


def one_dtype(model: Any) -> None:
    model.norm.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(17, 8))


def to_a_gpu(model: Any) -> None:
    for layer in (model.tokens, model.norm):
        layer.weight = on_cuda(*layer.weight.shape)


@pytest.mark.req("S2-09")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            to_a_gpu,
            r"'tokens.weight' was moved to cuda:0 after fully_shard with",
        ),
        (waits, r"gradients of no_sync wait"),
        (one_dtype, r"'norm.bias' was changed after fully_shard"),
        (untied, r"places of tied parameter 'tokens.weight'"),
    ],
)
def test_changes_that_cannot_be_taken_up_are_refused(
    one_rank: World, change: Callable[[Any], None], match: str
) -> None:
    """By the next forward, which names the parameter."""
    option = CPUOffload(offload_params=change is to_a_gpu)
    model = fully_shard(TinyGPT(tied_head=change is not to_a_gpu), cpu_offload=option)
    change(model)

    with pytest.raises(PlanError, match=match):
        model(gpt_input(0, 0))


class _Recomputes(nn.Module):
    """Calls its layers in a checkpoint, with a dict of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return checkpoint(
            lambda given: self.layer(given["x"]).relu(), batch, use_reentrant=False
        )


def test_a_recomputation_inside_a_unit_finds_the_cast_inputs(one_rank: World) -> None:
    """In the dict that the checkpoint keeps; the caller's dict is as it was."""
    bf16 = MixedPrecision(param_dtype=torch.bfloat16)
    model = fully_shard(_Recomputes(), mixed_precision=bf16)
    for _ in range(4):
        batch = {"x": torch.ones(2, 4)}
        backward(model(batch).float().sum())

        assert batch["x"].dtype is torch.float32
