"""Parameters of classes that wrap other tensors are refused by name when sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import FullyShardedDataParallel, PlanError, fully_shard, plan
from tests.support.world import World


class Opaque(Tensor):
    """Holds a tensor, and has no memory itself."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made  # type: ignore[no-any-return]  # Tensor has no type of this call

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.held if isinstance(each, Opaque) else each for each in args]
        result = func(*plain, **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


class Told(Opaque):
    """Also says which tensors it holds, as torchao's classes do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None


class FSDP2s(Told):
    """Encodes itself in FSDP2's all-gather, as torchao's Float8 weights may."""

    def fsdp_pre_all_gather(self, mesh: object) -> None:
        raise AssertionError(mesh)


@pytest.mark.req("M-06")
def test_a_weight_with_hooks_for_fsdp2_is_refused_with_the_wire_as_way_out(
    one_rank: World,
) -> None:
    """Ignored, each rank would train the weight alone, so this is not proposed."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(FSDP2s(torch.ones(4, 4)))

    with pytest.raises(PlanError, match=r"wire=Float8Wire\(\)") as caught:
        fully_shard(model)

    assert "enable_fsdp_float8_all_gather=False" in str(caught.value)
    assert "ignored_states" not in str(caught.value)


@pytest.mark.req("M-06")
@pytest.mark.parametrize("kind", [Opaque, Told])
@pytest.mark.parametrize("apply", [fully_shard, FullyShardedDataParallel])
def test_a_parameter_that_wraps_a_tensor_is_refused(
    one_rank: World, kind: type[Opaque], apply: Any
) -> None:
    """With its name and class; the module stays as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = nn.Parameter(kind(torch.ones(4, 4)), requires_grad=False)
    model[1].weight = wrapped
    before = list(model.parameters())

    with pytest.raises(PlanError) as caught:
        apply(model)

    text = str(caught.value)
    assert text.startswith(f"Parameter '1.weight' is a {kind.__name__}, a tensor class")
    assert "pass it in ignored_states" in text
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(PlanError, match="is a"):
        plan(model, world_size=2)
    fully_shard(model, ignored_states=[wrapped])
