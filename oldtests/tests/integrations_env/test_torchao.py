"""Claims on torchao's Float8 training and on frozen quantized bases with adapters.

The other side is the same torchao model in each process, unsharded. Float8 matrices
are emulated, as the CPU has no kernel for them.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao")

from composable_fsdp import (
    MixedPrecision,
    fully_shard,
    load,
    open_wrapped_params,
    save,
    unshard_params,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.features import Float8Wire
from tests.support.on_ranks import on_ranks
from tests.support.page_names import page_names
from tests.support.place import World
from tests.support.reference import (
    adamw,
    assert_same_training,
    backward,
    loss_of,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import single_rank_group
from tests.test_pages import fragments

with warnings.catch_warnings():
    # Libraries of kernels for GPUs that a CPU build of torch cannot load.
    warnings.simplefilter("ignore")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (
        linear_nf4,
        to_nf4,
    )

WIDTH = 64
KINDS = ("int8", "nf4")
PAGE = "docs/how_to/torchao.md"


def blocks() -> nn.Sequential:
    """Three blocks of two matrices; equal calls give equal values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        ]
    return nn.Sequential(*made)


def float8(recipe: str) -> nn.Sequential:
    """The blocks, whose linear layers compute in float8."""
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=True
    )
    made: nn.Sequential = convert_to_float8_training(blocks(), config=config)
    return made


def sharded(model: Any, **options: Any) -> Any:
    """A unit per block, and a root."""
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@pytest.mark.req("M-04")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@on_ranks(1, 2, 4)
def test_float8_training_is_that_of_the_unsharded_model(
    world: World, recipe: str
) -> None:
    """Scales are those of whole matrices, so the number of ranks does not count."""
    reference, model = float8(recipe), sharded(float8(recipe))
    expected = train_reference(reference, world.world_size, wide_input(WIDTH), adamw)

    losses = train(model, world.rank, wide_input(WIDTH), adamw)

    assert_same_training(
        model,
        reference,
        losses,
        [step[world.rank] for step in expected],
        tolerance=10 * tolerance_at(world.world_size),
    )
    # The same blocks without float8 have other losses.
    plain = train_reference(blocks(), 1, lambda s, _: wide_input(WIDTH)(s, 0), adamw)
    assert plain[0][0] != expected[0][0]


@pytest.mark.req("M-04")
@on_ranks(2)
def test_float8_training_takes_mixed_precision(world: World) -> None:
    """The first loss is that of a model in bfloat16: matrices are quantized from it."""
    half = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = sharded(float8("tensorwise"), mixed_precision=half)
    x = wide_input(WIDTH)(0, world.rank)

    found = loss_of(model, x)

    expected = loss_of(float8("tensorwise").bfloat16(), x.bfloat16())
    assert torch.equal(found, expected)


@pytest.mark.req("M-04")
@on_ranks(2)
def test_float8_layers_take_the_wire_in_float8(world: World) -> None:
    """They quantize decoded values: the loss is near, and not the same."""
    x = wide_input(WIDTH)(0, world.rank)
    expected = loss_of(float8("rowwise"), x).item()
    model = sharded(float8("rowwise"), wire=Float8Wire())

    loss = loss_of(model, x)
    backward(loss)

    assert loss.item() != expected
    assert loss.item() == pytest.approx(expected, rel=0.1)


@pytest.mark.req("M-06")
@on_ranks(2)
def test_torchaos_own_gather_in_float8_is_refused_by_name(world: World) -> None:
    """Its weights are tensors for the hooks of FSDP2; the model stays as it was."""
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(blocks(), config=config)
    before = list(model.parameters())

    with pytest.raises(PlanError) as caught:
        fully_shard(model)

    text = str(caught.value)
    assert "'0.0.weight' is a WeightWithDynamicFloat8CastTensor" in text
    assert "enable_fsdp_float8_all_gather=False" in text
    assert "wire=Float8Wire()" in text
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


class NF4Linear(nn.Linear):
    """Multiplies by a matrix in NF4."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = linear_nf4(x, self.weight)
        return out


class Adapted(nn.Module):
    """A frozen quantized matrix and a trainable pair beside, as in QLoRA."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            base = nn.Linear if kind == "int8" else NF4Linear
            inner = base(WIDTH, WIDTH, bias=False).requires_grad_(False)
            self.down = nn.Parameter(0.1 * torch.randn(2, WIDTH))
            self.up = nn.Parameter(0.1 * torch.randn(WIDTH, 2))
        if kind == "int8":
            quantize_(inner, Int8WeightOnlyConfig())
        else:
            codes = to_nf4(inner.weight.detach(), scaler_block_size=8)
            inner.weight = nn.Parameter(codes, requires_grad=False)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.inner(x)
        return x + base + x @ self.down.t() @ self.up.t()


def adapted(kind: str, seed: int = 0) -> nn.Sequential:
    """Three adapted blocks; equal arguments give equal values."""
    return nn.Sequential(*[Adapted(kind, seed + each) for each in range(3)])


def bases(model: nn.Sequential) -> list[Any]:
    """The quantized weights."""
    return [block.inner.weight for block in model]  # type: ignore[union-attr]  # blocks


def inner_of(model: nn.Sequential) -> list[Tensor]:
    """The tensors inside of the quantized weights; of sharded ones this rank's rows."""
    found: list[Tensor] = []
    for base in bases(model):
        if isinstance(base, nn.Module):
            found += base.parameters()
        else:
            found += [getattr(base, name) for name in base.__tensor_flatten__()[0]]
    return found


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Full adapters. Collective: gathers, if the model is sharded."""
    with unshard_params(model, writeback=False):
        named = model.named_parameters()
        return {n: p.detach().clone() for n, p in named if p.requires_grad}


def beside(kind: str, seed: int = 0) -> nn.Sequential:
    """Sharded blocks whose quantized weights each rank keeps whole."""
    model = adapted(kind, seed)
    made: nn.Sequential = sharded(model, ignored_states=bases(model))
    return made


def within(kind: str, seed: int = 0) -> nn.Sequential:
    """Blocks whose quantized weights are sharded through the tensors inside."""
    made: nn.Sequential = sharded(open_wrapped_params(adapted(kind, seed)))
    return made


def trainable(parameters: Any) -> torch.optim.Optimizer:
    """AdamW of the adapters."""
    return adamw(p for p in parameters if p.requires_grad)


@pytest.mark.req("M-04", "K-02")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [beside, within])
@on_ranks(1, 4)
def test_adapters_of_quantized_weights_train_as_unsharded(
    world: World, make: Any, kind: str, tmp_path: Path
) -> None:
    """Losses and adapters; after a load, another model goes on as this one."""
    reference, model = adapted(kind), make(kind)
    before = [each.clone() for each in inner_of(model)]
    data = wide_input(WIDTH)
    expected = train_reference(reference, world.world_size, data, trainable)

    losses = train(model, world.rank, data, trainable)
    optimizer = trainable(model.parameters())
    backward(loss_of(model, data(1, world.rank)))
    found = adapters(model)
    optimizer.step()
    save(tmp_path / "new", model, optimizer)
    again = make(kind, seed=9)
    other = trainable(again.parameters())
    load(tmp_path / "new", again, other)

    tolerance = tolerance_at(world.world_size)
    theirs = adapters_of_plain(reference)
    for (name, ours), its in zip(found.items(), theirs, strict=True):
        assert torch.allclose(ours, its, rtol=0, atol=tolerance), name
    own = torch.tensor([step[world.rank] for step in expected])
    assert torch.allclose(torch.tensor(losses), own, rtol=tolerance, atol=0)
    pairs = zip(inner_of(model), before, strict=True)
    assert make is within or all(torch.equal(a, b) for a, b in pairs)
    for net, each in ((model, optimizer), (again, other)):
        each.zero_grad()
        backward(loss_of(net, data(2, world.rank)))
        each.step()
    x = data(9, world.rank)
    assert torch.equal(loss_of(again, x), loss_of(model, x))


def adapters_of_plain(model: nn.Module) -> list[Tensor]:
    """The adapters of a plain model."""
    return [p.detach() for p in model.parameters() if p.requires_grad]


def test_the_code_of_the_page_runs() -> None:
    """Each block after those above it; the adapters of the last have gradients."""
    found = [*fragments("docs/how_to/freeze_and_lora.md"), *fragments(PAGE)]
    (lora,) = [block for block in found if "class LoRA" in block.text]

    with single_rank_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = page_names()
        lora.run(names)
        for block in fragments(PAGE):
            block.run(names)
        model: Any = names["model"]
        backward(loss_of(model, torch.zeros(2, 4, dtype=torch.long)))

    grads = {n for n, p in model.named_parameters() if p.grad is not None}
    assert len(fragments(PAGE)) == 3
    assert len(grads) == 4
