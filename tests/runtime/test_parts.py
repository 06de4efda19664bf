"""Parts of a unit that are called apart from it are refused, alike on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.func import functional_call

from composable_fsdp import (
    CPUOffload,
    PhaseError,
    ShardingStrategy,
    fully_shard,
    register_forward_method,
    reshard,
    unshard,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.flat.guards import REFUSE
from composable_fsdp.testing.models import TinyGPT, build, legal_units
from composable_fsdp.testing.recipes import ModelRecipe
from composable_fsdp.testing.strategies import FEATURES, model_recipes
from composable_fsdp.testing.world import RankPool, World
from composable_fsdp.tree.traversal import _get_fsdp_handles, _get_fsdp_states
from property_tests.live import batches, examples
from tests.runtime.reference import (
    PATHS,
    apply_units,
    assert_same_training,
    gpt_input,
    gpt_units,
    sgd,
    train,
    train_reference,
    wide_input,
)

RankCount = Callable[[int], RankPool]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Causal(nn.Module):
    """As models of Hugging Face: parts have getters, and methods call them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGPT()
        self.lm_head = nn.Linear(17, 17, bias=False)
        nn.init.normal_(self.lm_head.weight, generator=generator())

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def encode(self, tokens: Tensor) -> Tensor:
        """A method that calls parts."""
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encode(tokens)


def refused(world: World, act: Callable[[], object], *names: str) -> None:
    """``act`` raises one text on all ranks, with ``names``, and sends nothing."""
    with record() as calls, pytest.raises(PhaseError) as caught:
        act()

    text = caught.value.args[0]
    assert world.all_equal(text)
    assert not calls
    for name in (*names, "this rank's rows", "register_forward_method"):
        assert name in text, text


def check_idioms(world: World, path: str) -> None:
    """Each idiom is refused; then the model trains as the plain one does."""
    tokens, hidden = gpt_input(0, world.rank), torch.randn(2, 5, 17)
    units = [f"model.{name}" for name in gpt_units(TinyGPT())]
    model = apply_units(Causal(), units, path=path)
    core: Any = getattr(model, "module", model)

    for _ in range(2):  # before a first forward, and after a step
        refused(world, lambda: core.lm_head(hidden), "Linear 'lm_head'", "'lm_head.w")
        refused(world, lambda: core.get_input_embeddings()(tokens), "'model.tokens'")
        refused(world, lambda: core.model(tokens), "Embedding 'model.tokens'")
        refused(world, lambda: core.encode(tokens), "module (Causal)")
        refused(world, lambda: core.model.blocks[1].up(hidden), "Linear", "up'")
        with torch.no_grad():
            refused(world, lambda: core.eval().lm_head(hidden), "'lm_head'")
        reference = copy.deepcopy(plain_of(model))
        losses = train(model, world.rank, gpt_input, sgd)
        expected = train_reference(reference, world.world_size, gpt_input, sgd)
        mine = [each[world.rank] for each in expected]
        assert_same_training(model, reference, losses, mine)


def plain_of(model: nn.Module) -> Causal:
    """A plain model with the values of ``model``. Collective: that of a state dict."""
    plain = Causal()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.req("P-12")
@pytest.mark.parametrize("path", PATHS)
def test_parts_called_apart_are_refused_on_every_rank(
    ranks: RankCount, path: str
) -> None:
    """A head, an embedding, the model below the head, a method and a unit's layer."""
    ranks(2).run(check_idioms, path)


class Later(nn.Module):
    """A forward whose body runs after it has returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(4, 4))

    def _steps(self, x: Tensor) -> Iterator[Tensor]:
        yield x @ self.weight

    async def _waits(self, x: Tensor) -> Tensor:
        return x @ self.weight

    async def _streams(self, x: Tensor) -> Any:
        yield x @ self.weight

    def forward(self, x: Tensor) -> Any:
        if self.kind == "map":
            return map(self.weight.matmul, [x])
        late: dict[str, Callable[[Tensor], Any]] = {
            "generator": self._steps,
            "coroutine": self._waits,
            "async_generator": self._streams,
            "tensor": self.weight.matmul,
        }
        return late[self.kind](x)


def check_late(world: World, path: str) -> None:
    for kind in ("generator", "coroutine", "async_generator", "map"):
        model = apply_units(nn.Sequential(Later(kind)), ["0"], path=path)

        with pytest.raises(PhaseError, match=f"module '0' returned a {kind}, which"):
            model(torch.ones(4, 4))

        assert not any(handle.gathered for handle in _get_fsdp_handles(model))
        late: Any = model.get_submodule("0")
        late = getattr(late, "module", late)
        late.kind = "tensor"
        model(torch.ones(4, 4)).sum().backward()


@pytest.mark.req("P-12")
@pytest.mark.parametrize("path", PATHS)
def test_outputs_that_compute_later_are_refused(ranks: RankCount, path: str) -> None:
    """Generators, coroutines and lazy maps; the unit is sharded and works after."""
    ranks(2).run(check_late, path)


def check_legal(world: World) -> None:
    x = torch.randn(2, 8, generator=generator())
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for parameter in plain.parameters():
        nn.init.normal_(parameter, generator=generator())
    part, expected = copy.deepcopy(plain), plain[0](x)
    model = fully_shard(part)
    given = {name: p.detach() for name, p in plain[0].named_parameters()}

    assert torch.equal(functional_call(model[0], given, (x,)), expected)
    with unshard_params(model):
        assert torch.equal(model[0](x), expected)
    with unshard_params(model, offload_to_cpu=True):
        assert torch.equal(model[0](x), expected)
    unshard(model)
    assert torch.equal(model[0](x), expected)
    reshard(model)
    with pytest.raises(PhaseError, match="Linear '0' was called"):
        model[0](x)
    model[1](x)  # holds no parameters
    model[0]._forward_pre_hooks.clear()
    model(x).sum().backward()
    with pytest.raises(PhaseError, match="Linear '0' was called"):
        model[0](x)


@pytest.mark.req("P-12")
def test_parts_that_see_whole_values_may_be_called(ranks: RankCount) -> None:
    """Inside ``unshard_params``, after ``unshard``, by ``functional_call``."""
    ranks(2).run(check_legal)


def test_nothing_is_refused_where_nothing_is_cut(one_rank: World) -> None:
    """With one rank, and with NO_SHARD, a part's parameters are whole."""
    for options in (
        {"strategy": ShardingStrategy.NO_SHARD},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)), **options)

        model[0](torch.ones(1, 4))

        assert REFUSE not in model[0]._forward_pre_hooks


def check_no_shard(world: World) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, strategy=ShardingStrategy.NO_SHARD)

    assert model[0](torch.ones(1, 4)).shape == (1, 4)


def test_parts_of_units_that_are_not_cut_may_be_called(ranks: RankCount) -> None:
    """A NO_SHARD unit shows whole parameters always."""
    ranks(2).run(check_no_shard)


def check_fast_path(world: World, path: str) -> None:
    """The encoder layer's fast path asks that no module in it has hooks."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator())
    plain: Any = nn.Sequential(layer).eval()
    model = apply_units(copy.deepcopy(plain), [], path=path).eval()
    x = torch.randn(2, 3, 8, generator=generator())
    taken: list[bool] = []
    real = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Tensor:
        taken.append(True)
        fast: Tensor = real(*args)
        return fast

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
        assert torch.equal(model(x), plain(x))

    assert taken == [True, True]
    core: Any = getattr(model, "module", model)
    calls: list[Callable[[], object]] = [
        lambda: core[0].linear1(x),
        lambda: core[0].self_attn(x, x, x),
        lambda: core[0](x),
    ]
    for call in calls:
        with pytest.raises(PhaseError, match="was called while"):
            call()


@pytest.mark.req("P-12")
@pytest.mark.parametrize("path", PATHS)
def test_the_encoder_layers_fast_path_stays(ranks: RankCount, path: str) -> None:
    """Parts have no hook while their unit is full."""
    ranks(2).run(check_fast_path, path)


class Adapted(nn.Module):
    """As PEFT does: ``generate`` is the base model's, which calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Causal()

    def generate(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.base_model(tokens)
        return logits.argmax(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.base_model(tokens)
        return logits


def check_generate(world: World) -> None:
    tokens = gpt_input(0, 0)
    expected = Adapted().generate(tokens)
    model = fully_shard(Adapted())
    refused(world, lambda: model.generate(tokens), "'base_model.model.tokens'")

    register_forward_method(model, "generate")

    assert torch.equal(model.generate(tokens), expected)


@pytest.mark.req("P-12")
def test_the_way_out_that_the_error_names_works(ranks: RankCount) -> None:
    """``register_forward_method`` on the unit makes the method right."""
    ranks(2).run(check_generate)


def check_copies(world: World) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.ones(1, 4)
    twin = copy.deepcopy(model)
    model(x)
    for each in (model, twin, copy.deepcopy(twin)):
        with pytest.raises(PhaseError, match="Linear '1' was called"):
            each[1](x)
    assert torch.equal(twin(x), model(x))
    unshard(model)
    opened = copy.deepcopy(model)
    with pytest.raises(PhaseError, match="Linear '1' was called"):
        opened[1](x)
    model[1](x)


def test_copies_refuse_calls_of_their_parts(ranks: RankCount) -> None:
    """A copy of a sharded unit, of a copy, and of a unit that is full by hand."""
    ranks(2).run(check_copies)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Modules that own parameters of a unit and are no unit."""
    states = _get_fsdp_states(model)
    units = {id(module) for state in states for module in state.modules}
    owners = [owner for state in states for owner in state.handle.owners]
    return [owner for owner in owners if id(owner) not in units]


def check_programs(world: World, recipes: list[ModelRecipe]) -> None:
    for recipe in recipes:
        make_input = wide_input(recipe.width)
        plain, model = build(recipe), build(recipe)
        model = apply_units(model, legal_units(model, recipe.sharded))
        for part in parts_of(model):
            refused(world, partial(part, make_input(0, 0)), type(part).__name__)
        expected = train_reference(plain, world.world_size, make_input, sgd)
        losses = train(model, world.rank, make_input, sgd)
        for part in parts_of(model):
            refused(world, partial(part, make_input(0, 0)), type(part).__name__)

        mine = [each[world.rank] for each in expected]
        assert_same_training(model, plain, losses, mine)


@pytest.mark.req("P-12")
@examples(10)
@given(recipes=batches(model_recipes(2, 2, FEATURES - {"replicate"})))
def test_every_part_of_every_model_is_refused(
    ranks: RankCount, recipes: list[ModelRecipe]
) -> None:
    """Alike on all ranks, with nothing sent and nothing changed for training."""
    ranks(2).run(check_programs, recipes)
