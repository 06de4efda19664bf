"""Claims on quantized all-gathers: compute sees decoded values, all else exact ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    get_full_grad,
    plan,
    unshard_params,
)
from composable_fsdp.comm import collectives
from composable_fsdp.comm.collectives import record
from composable_fsdp.comm.wire_format import WireLayout
from composable_fsdp.errors import PlanError
from composable_fsdp.features import (
    DefaultState,
    Float8Wire,
    Int8Wire,
    WireFormat,
    int8_all_to_all_hook,
    register_comm_hook,
)
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.runtime.traffic import counts, planned
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    apply_units,
    averaged_gradients,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    tolerance_at,
)
from tests.support.sharded import gpt
from tests.support.tiny import TinyGPT, tiny_mlp
from tests.support.world import World, fake_world

FORMATS = [Int8Wire(16), Float8Wire()]
by_format = pytest.mark.parametrize("wire", FORMATS, ids=repr)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "zero2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"strategy": ShardingStrategy.NO_SHARD},
    "bf16": {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
    },
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "ahead": {"forward_prefetch": True},
}
by_options = pytest.mark.parametrize("options", OPTIONS)


def seen_weights(model: nn.Module) -> dict[str, Tensor]:
    """A dict that each forward of ``model`` fills with the weights of its compute."""
    seen: dict[str, Tensor] = {}
    prefix = "_fsdp_wrapped_module."

    def keep(name: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    seen[f"{name}.{key}".lstrip(".")] = parameter.detach().clone()

        return hook

    for name, module in model.named_modules():
        if module._parameters:
            module.register_forward_hook(keep(name.replace(prefix, "")))
    return seen


def as_sent(wire: WireFormat, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that ranks compute with, encoded as a whole."""
    if weight.ndim < 2:
        return weight.to(dtype)
    assert isinstance(wire, Float8Wire)
    scale = weight.flatten(1).abs().amax(1, keepdim=True) / 448
    encoded = (weight.flatten(1) / scale).to(torch.float8_e4m3fn).to(dtype)
    return (encoded.float() * scale).to(dtype).view_as(weight)


@pytest.mark.few(4)
@pytest.mark.req("M-04")
@by_format
@by_options
@pytest.mark.parametrize("path", PATHS)
@on_ranks(1, 2, 3)
def test_training_is_that_of_the_plain_model_with_the_decoded_weights(
    world: World, wire: WireFormat, options: str, path: str
) -> None:
    """Losses and gradients; the update, state dicts and full parameters are exact."""
    plain = TinyGPT()
    model = apply_units(
        copy.deepcopy(plain), gpt_units(plain), path=path, wire=wire, **OPTIONS[options]
    )
    seen = seen_weights(model)
    optimizer, expected = sgd(model.parameters()), sgd(plain.parameters())
    tolerance = tolerance_at(world.world_size)
    low = options == "bf16"
    for step in range(3):
        loss = loss_of(model, gpt_input(step, world.rank))
        backward(loss)

        exact = {name: value.clone() for name, value in plain.state_dict().items()}
        sent = {name: value.float() for name, value in seen.items()}
        assert list(sent) != []
        if isinstance(wire, Float8Wire):
            dtype = torch.bfloat16 if low else torch.float32
            for name, value in seen.items():
                torch.testing.assert_close(
                    value, as_sent(wire, exact[name], dtype), rtol=0, atol=tolerance
                )
        for name, value in sent.items():
            apart = (value - exact[name]).abs().max()
            assert apart <= exact[name].abs().max() / 15
            assert apart > 0 or value.ndim < 2 or low
        plain.load_state_dict({**exact, **sent})
        if low:
            plain.bfloat16()
        losses = averaged_gradients(
            plain, [gpt_input(step, rank) for rank in range(world.world_size)]
        )
        if low:
            # Also the gradients.
            plain.float()
        loose = 0.02 if low else tolerance
        assert abs(loss.item() - losses[world.rank]) <= loose * abs(loss.item())
        for name, parameter in plain.named_parameters():
            grad = get_full_grad(model, name)
            assert grad is not None, name
            torch.testing.assert_close(
                grad.cpu(), parameter.grad, rtol=loose, atol=loose
            )
            # From here on the same gradients, so that exact weights stay comparable.
            parameter.grad = grad.cpu()
        plain.load_state_dict(exact)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name]), name
    with unshard_params(model):
        for name, value in model.named_parameters():
            assert torch.equal(value.cpu(), plain.state_dict()[name]), name


@pytest.mark.req("M-04")
@by_format
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2, 3)
def test_the_plan_counts_the_bytes_that_are_sent(
    world: World, wire: WireFormat, strategy: str
) -> None:
    """All-gathers of encoded bytes."""
    chosen = ShardingStrategy[strategy]
    model = gpt("composable", wire=wire, strategy=chosen)
    optimizer = sgd(model.parameters())
    # The first step compares ranks, too.
    backward(loss_of(model, gpt_input(0, world.rank)))
    optimizer.step()
    with record_steps() as calls:
        backward(loss_of(model, gpt_input(1, world.rank)))
        optimizer.step()
    sent = counts(calls)

    assert sent == planned(plan(model))
    exact = gpt("composable", strategy=chosen)
    assert sent["all_gather"][1] < planned(plan(exact))["all_gather"][1] / 1.5
    assert "all_reduce" not in sent


@on_ranks(3)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_are_exchanged_as_int8(world: World, strategy: str) -> None:
    """Near the averages, equal on all ranks, with an eighth of the bytes and scales."""
    chosen = ShardingStrategy[strategy]
    exact = gpt("composable", strategy=chosen)
    model = gpt("composable", strategy=chosen)
    group: Any = torch.distributed.group.WORLD
    register_comm_hook(model, DefaultState(group), int8_all_to_all_hook)
    backward(loss_of(exact, gpt_input(0, world.rank)))
    with record() as calls:
        backward(loss_of(model, gpt_input(0, world.rank)))

    for name, _ in model.named_parameters():
        got, want = get_full_grad(model, name), get_full_grad(exact, name)
        assert got is not None
        assert want is not None
        # A block of 128 elements may hold larger gradients of another parameter.
        assert (got - want).abs().max() <= 0.05, name
        everywhere = [torch.empty_like(got) for _ in range(world.world_size)]
        torch.distributed.all_gather(everywhere, got)
        assert all(torch.equal(each, got) for each in everywhere)
    model.zero_grad()
    with record() as calls:
        backward(loss_of(model, gpt_input(1, world.rank)))
    sent = counts(calls)
    assert sent["all_to_all"][0] == 3
    assert not sent.keys() & {"reduce_scatter", "all_reduce"}
    exact_bytes = planned(plan(exact))
    reduced = exact_bytes.get("reduce_scatter", exact_bytes.get("all_reduce"))
    assert reduced is not None
    # Blocks of 128 elements are filled up, and the units are small.
    assert sent["all_to_all"][1] < reduced[1] / 2


class WholeBytes(WireFormat):
    """The bytes of the values, row by row in blocks of 32: a format of the user's."""

    needs_rows = True

    def nbytes(self, layout: WireLayout) -> int:
        return -(-4 * layout.shard_numel // 16) * 16

    def encode(self, shard: Tensor, out: Tensor, layout: WireLayout, rank: int) -> None:
        # The claim of ``Block.rows(32)``: no shard begins inside of a block.
        assert all(first % 32 == 0 for _, first, _ in layout.parts(rank))
        out.zero_()
        out[: 4 * len(shard)].view(torch.float32).copy_(shard * 2)

    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        sent = wire.view(layout.world_size, -1)[:, : 4 * layout.shard_numel]
        full.view(layout.world_size, -1).copy_(sent.view(torch.float32))


@pytest.mark.req("M-04")
@on_ranks(1, 2, 3)
def test_a_format_of_the_users_own_gets_whole_blocks(world: World) -> None:
    """Compute sees what it decodes; the plan has its bytes."""
    torch.manual_seed(2)
    # The last block of each matrix has fewer rows.
    plain: Any = nn.Sequential(nn.Linear(24, 112), nn.ReLU(), nn.Linear(112, 40))
    model = copy.deepcopy(plain)
    fully_shard(model, wire=WholeBytes(), block=Block.rows(32))
    x = torch.randn(5, 24)
    backward(model(x).square().sum())
    with record_steps() as calls:
        y = model(x)
    with torch.no_grad():
        for number in (0, 2):
            plain[number].weight.mul_(2)  # biases are sent as they are

    torch.testing.assert_close(y, plain(x))
    sent = counts(calls).get("all_gather")
    assert sent == planned(plan(model)).get("all_gather")


def test_formats_that_a_unit_cannot_have_are_refused() -> None:
    """Rows that are cut, and values that are no format."""
    with pytest.raises(PlanError, match="scales whole rows, and block="):
        plan(tiny_mlp(), world_size=2, wire=Float8Wire(), block=Block.ELEMENT)
    wrong: Any = "int8"
    with pytest.raises(TypeError, match="wire expects None or a WireFormat"):
        plan(tiny_mlp(), world_size=2, wire=wrong)


def test_encoded_values_have_no_memory_after_an_all_gather_that_was_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error is raised, and the full parameters have none, either."""
    monkeypatch.setattr(collectives, "all_gather_flat", lambda *_, **__: 1 / 0)
    with fake_world(2):
        model = fully_shard(tiny_mlp(), wire=Float8Wire())
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 8))

        form = _get_fsdp_handles(model)[0].form
        assert form.source is not None
        buffers = {id(each): each for each in (*form.fulls, *form.source.kept)}
        held = [buffer.untyped_storage().nbytes() for buffer in buffers.values()]
    assert held == [0, 0, 0]  # one region of two is encoded
