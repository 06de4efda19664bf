"""Claims on quantized all-gathers: compute sees decoded values, all else exact ones."""

from __future__ import annotations

import copy
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    Block,
    CPUOffload,
    DefaultState,
    DesyncError,
    Float8Wire,
    Int8Wire,
    MixedPrecision,
    PlanError,
    ShardingStrategy,
    WireFormat,
    checkpoint,
    forecast,
    fully_shard,
    get_full_grad,
    int8_all_to_all_hook,
    load,
    no_sync,
    plan,
    register_comm_hook,
    save,
    simulate,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.comm.wire_format import WireLayout
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.planning.test_peak_memory import peak_of, text, unequal
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
from tests.support.sharded import gpt, message_of
from tests.support.tiny import TinyGPT, tiny_mlp
from tests.support.world import World

FORMATS = [Int8Wire(16), Float8Wire(), Float8Wire("tensor")]
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
    rows = weight.flatten(1).abs().amax(1, keepdim=True)
    scale = (rows.amax() if wire.scale == "tensor" else rows) / 448
    encoded = (weight.flatten(1) / scale).to(torch.float8_e4m3fn).to(dtype)
    return (encoded.float() * scale).to(dtype).view_as(weight)


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
    """All-gathers of encoded bytes, and all-reduces of largest magnitudes."""
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
    assert ("all_reduce" in sent) == wire.needs_maximum


@pytest.mark.few(5)
@pytest.mark.req("M-04", "U-03")
@by_format
@pytest.mark.parametrize("order", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        {"forward_prefetch": True},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ],
    ids=["own", "low", "ahead", "offload"],
)
@pytest.mark.parametrize("make", [unequal, text])
def test_the_planned_peak_is_that_of_a_step(
    make: Any, options: dict[str, Any], order: str, wire: WireFormat
) -> None:
    """With encoded values, until they are decoded, and what encoding needs."""
    found, measured = peak_of(make, 8, order, wire=wire, **options)

    assert found == pytest.approx(measured, rel=0.01)


@pytest.mark.few(2)
@pytest.mark.req("M-04")
@by_format
def test_the_simulator_runs_the_formats(wire: WireFormat) -> None:
    """Its peak is the plan's within 1 %."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    units: Any = list(model)
    options: dict[str, Any] = {"world_size": 8, "units": units, "wire": wire}

    found = simulate(model, batch=torch.zeros(2, 512), **options)

    planned = forecast(found.plan, optimizer="adamw", device_type="cuda")
    assert found.peak.memory.total == pytest.approx(planned.total, rel=0.01)
    sent = sum(each.nbytes for each in found.collectives if each.name == "all_gather")
    assert sent == found.plan.traffic.all_gather_bytes


@on_ranks(2)
@by_format
def test_forms_of_a_step_that_differ(world: World, wire: WireFormat) -> None:
    """Checkpointed blocks, accumulation, frozen blocks, evaluation, a deep copy."""
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    for block in model.blocks:
        checkpoint(block)
        fully_shard(block, wire=wire)
    fully_shard(model, wire=wire)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        with no_sync(each):
            backward(loss_of(each, gpt_input(0, world.rank)))
        backward(loss_of(each, gpt_input(1, world.rank)))
        with torch.no_grad():
            each(gpt_input(2, world.rank))
        each.requires_grad_(True)
        backward(loss_of(each, gpt_input(3, world.rank)))

    assert all(p.grad is not None or not p.numel() for p in model.parameters())
    for ours, others in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (others.grad is None)
        if ours.grad is not None and others.grad is not None:
            assert torch.equal(ours.grad, others.grad)


@on_ranks(2)
def test_evaluation_in_full_precision_is_exact(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP_USE_FULL_PREC_IN_EVAL asks for the parameters' own values."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    plain = tiny_mlp()
    low = MixedPrecision(torch.bfloat16)
    model = fully_shard(copy.deepcopy(plain), wire=Int8Wire(), mixed_precision=low)
    x = torch.ones(2, 8)
    for _ in range(2):
        model.train()
        rounded = model(x)
        model.eval()
        exact = model(x)

        assert torch.equal(exact, plain(x))
        assert rounded.dtype == torch.bfloat16
        backward(rounded.float().sum())


@on_ranks(1, 2)
@by_format
def test_a_unit_that_was_gathered_ahead_in_vain_is_sharded_again(
    world: World, wire: WireFormat
) -> None:
    """Its encoded values have no memory any more."""
    model: Any = gpt("composable", wire=wire, forward_prefetch=True)
    loss_of(model, gpt_input(0, world.rank))
    # The next unit is being gathered when this block raises.
    fails = model.blocks[0].down.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(gpt_input(1, world.rank))
    fails.remove()

    for handle in _get_fsdp_handles(model):
        for region in handle.layout.regions:
            wired = region.full.wire
            assert wired is None or wired.buffer.untyped_storage().nbytes() == 0
    backward(loss_of(model, gpt_input(2, world.rank)))


@on_ranks(2)
def test_a_checkpoint_has_the_exact_values(world: World, tmp_path: Path) -> None:
    """It loads into a model without a wire format, and back."""
    model = gpt("composable", wire=Int8Wire())
    backward(loss_of(model, gpt_input(0, world.rank)))
    save(tmp_path / "step-1", model)
    other = gpt("composable", seed=3)
    load(tmp_path / "step-1", other)

    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    fresh = gpt("composable", seed=4, wire=Float8Wire())
    load(tmp_path / "step-1", fresh)
    found = fresh.state_dict()
    assert all(torch.equal(ours[name], found[name]) for name in ours)


@on_ranks(2)
def test_a_write_in_forward_is_refused(world: World) -> None:
    """It would be lost at the next all-gather."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    model = fully_shard(Writes(8, 8), wire=Int8Wire())

    text = message_of(lambda: model(torch.ones(1, 8)))

    assert (
        "copy in torch.float32 of shards in torch.float32 (Int8Wire(block=128))" in text
    )
    assert "or give the unit no wire" in text


@on_ranks(2)
def test_ranks_with_other_formats_are_told(world: World) -> None:
    """Before the first gather, on every rank."""
    model = fully_shard(tiny_mlp(), wire=Int8Wire(16 * (1 + world.rank)))

    with pytest.raises(DesyncError, match=r"wire.*Int8Wire\(block=16\)") as caught:
        model(torch.ones(1, 8))

    assert "Int8Wire(block=32)" in str(caught.value)


def test_formats_that_a_unit_cannot_have_are_refused() -> None:
    """Rows that are cut, and values that are no format."""
    with pytest.raises(PlanError, match="scales whole rows, and block="):
        plan(tiny_mlp(), world_size=2, wire=Float8Wire(), block=Block.ELEMENT)
    wrong: Any = "int8"
    with pytest.raises(TypeError, match="wire expects None or a WireFormat"):
        plan(tiny_mlp(), world_size=2, wire=wrong)


@on_ranks(2, 3)
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
    assert sent == planned(plan(model))
    assert sent["all_to_all"][0] == 3
    assert not sent.keys() & {"reduce_scatter", "all_reduce"}
    exact_bytes = planned(plan(exact))
    reduced = exact_bytes.get("reduce_scatter", exact_bytes.get("all_reduce"))
    assert reduced is not None
    # Blocks of 128 elements are filled up, and the units are small.
    assert sent["all_to_all"][1] < reduced[1] / 2


@pytest.mark.few(2)
@pytest.mark.req("M-04", "U-03")
@pytest.mark.parametrize("order", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "mixed", [None, MixedPrecision(torch.bfloat16, torch.bfloat16)], ids=["own", "low"]
)
@pytest.mark.parametrize("world_size", [2, 8])
def test_the_planned_peak_counts_the_exchange_of_gradients(
    world_size: int, mixed: MixedPrecision | None, order: str
) -> None:
    """With what encoding, decoding and summing of int8 gradients need."""

    def hooked(model: nn.Module) -> None:
        state = DefaultState(torch.distributed.group.WORLD)  # type: ignore[arg-type]  # there is one
        register_comm_hook(model, state, int8_all_to_all_hook)

    found, measured = peak_of(
        unequal, world_size, order, prepare=hooked, mixed_precision=mixed
    )

    assert found == pytest.approx(measured, rel=0.01)


class BlockScaled(WireFormat):
    """float8 with a power of two per 32 rows and column, as MXFP8 has along a dim."""

    needs_rows = True

    def _scales(self, layout: WireLayout) -> int:
        return max(
            sum(
                ceil((last - first) / 32) * layout.matrices[index].width
                for index, first, last in layout.parts(rank)
            )
            for rank in range(layout.world_size)
        )

    def nbytes(self, layout: WireLayout) -> int:
        return 16 * ceil((layout.shard_numel + self._scales(layout)) / 16)

    def encode(
        self,
        shard: Tensor,
        out: Tensor,
        layout: WireLayout,
        rank: int,
        largest: Tensor | None,
    ) -> None:
        out.zero_()
        scales = out[layout.shard_numel :]
        for index, first, last in layout.parts(rank):
            offset, _, width = layout.matrices[index]
            # The claim of ``Block.rows(32)``: no shard begins inside of a block.
            assert first % 32 == 0
            begin = offset + first * width - rank * layout.shard_numel
            rows = shard[begin : begin + (last - first) * width].view(-1, width)
            encoded, exponents = scaled_by_blocks(rows)
            out[begin : begin + rows.numel()] = encoded.flatten().view(torch.uint8)
            scales[: exponents.numel()] = exponents.flatten()
            scales = scales[exponents.numel() :]

    def decode(self, wire: Tensor, full: Tensor, layout: WireLayout) -> None:
        for rank, own in enumerate(wire.view(layout.world_size, -1)):
            scales = own[layout.shard_numel :]
            for index, first, last in layout.parts(rank):
                offset, _, width = layout.matrices[index]
                at, count = offset + first * width, (last - first) * width
                begin = at - rank * layout.shard_numel
                encoded = own[begin : begin + count].view(torch.float8_e4m3fn)
                blocks = ceil((last - first) / 32)
                exponents = scales[: blocks * width].view(blocks, width)
                scales = scales[blocks * width :]
                full[at : at + count] = unscaled(
                    encoded.view(-1, width), exponents
                ).flatten()


def scaled_by_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Values in float8, and the exponents of the blocks of 32 rows, plus 127."""
    found = torch.stack([b.abs().amax(0) for b in torch.split(matrix, 32)])
    exponents = (found.clamp(min=1e-30).log2().floor() - 8 + 127).to(torch.uint8)
    scales = (exponents.float() - 127).exp2().repeat_interleave(32, 0)
    scaled = (matrix / scales[: len(matrix)]).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn), exponents


def unscaled(encoded: Tensor, exponents: Tensor) -> Tensor:
    scales = (exponents.float() - 127).exp2().repeat_interleave(32, 0)
    return encoded.float() * scales[: len(encoded)]


@pytest.mark.req("M-04")
@on_ranks(1, 2, 3)
def test_blocks_of_32_rows_are_scaled_as_in_whole_matrices(world: World) -> None:
    """Encoding shards and gathering equals encoding the whole; the plan's bytes."""
    torch.manual_seed(2)
    # The last block of each matrix has fewer rows.
    plain: Any = nn.Sequential(nn.Linear(24, 112), nn.ReLU(), nn.Linear(112, 40))
    model = copy.deepcopy(plain)
    seen = seen_weights(model)
    fully_shard(model, wire=BlockScaled(), block=Block.rows(32))
    x = torch.randn(5, 24)

    backward(model(x).square().sum())
    with record_steps() as calls:
        model(x)

    for number in (0, 2):
        weight = plain[number].weight.detach()
        expected = unscaled(*scaled_by_blocks(weight))
        assert torch.equal(seen[f"{number}.weight"], expected)
        assert not torch.equal(weight, expected)
        with torch.no_grad():
            plain[number].weight.copy_(expected)
    assert torch.equal(model(x), plain(x))
    sent = counts(calls).get("all_gather")
    assert sent == planned(plan(model)).get("all_gather")
