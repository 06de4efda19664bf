"""``init_weights``: the values of the plain model under the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import FullyShardedDataParallel, fsdp2, fully_shard, init_weights
from composable_fsdp.errors import CompositionError, PlanError
from tests.runtime.metas import on_meta
from tests.support.on_ranks import on_ranks
from tests.support.sharded import is_full
from tests.support.world import World

Init = Callable[[nn.Module], object]


class Part(nn.Module):
    """A unit with another unit inside, and a module that torch initialises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm(6)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(n, 6)``."""
        y = self.inner(x)
        z: Tensor = self.norm(self.attention(y, y, y)[0])
        return z


class Model(nn.Module):
    """Ties, buffers, frozen and ignored parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.parts = nn.ModuleList([Part(), Part()])
        self.batch = nn.BatchNorm1d(6)
        self.kept = nn.Linear(6, 3)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of token ids ``(n,)``."""
        y = self.embed(x)
        for part in self.parts:
            y = part(y)
        logits: Tensor = self.head(self.batch(y))
        return logits


@torch.no_grad()
def own(module: nn.Module) -> None:
    """Draw into what the module holds, in the ways that programs do."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.5, a=-0.5, b=0.5)
        nn.init.uniform_(module.bias)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(0, 0.02)
        module.weight[0].fill_(0.0)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.orthogonal_(module.in_proj_weight)
        module.in_proj_bias = nn.Parameter(torch.randn(18))
    elif isinstance(module, (nn.LayerNorm, nn.BatchNorm1d)):
        module.reset_parameters()
    if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
        module.running_mean.normal_()


@torch.no_grad()
def far(module: nn.Module) -> None:
    """Do as ``own``; parents also write to parameters of units below, as GPT-2's."""
    own(module)
    if isinstance(module, (Model, Part)):
        for name, parameter in module.named_parameters():
            if name.endswith("inner.weight"):
                parameter.data.mul_(parameter.shape[0])
                torch._foreach_add_([parameter], 0.5)


def by_method(module: nn.Module) -> None:
    """What ``fn=None`` means for the modules of torch."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            break


def shard(model: nn.Module, door: str, **options: Any) -> nn.Module:
    """Make units of a part, of a module in it, and of the model."""
    for name in ("parts.0.inner", "parts.0", "parts.1", ""):
        each: Any = model.get_submodule(name)
        if door == "fsdp2":
            fsdp2.fully_shard(each)
        elif door == "composable":
            fully_shard(each, **options)
        elif name:
            parent, _, key = name.rpartition(".")
            made = FullyShardedDataParallel(each, **options)
            setattr(model.get_submodule(parent), key, made)
        else:
            return FullyShardedDataParallel(model, **options)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """The full state dict, also of FSDP2's door."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def unlike(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of entries that differ in any bit."""
    found, wanted = values(model), plain.state_dict()
    assert list(found) == list(wanted)
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.req("B-08")
@pytest.mark.parametrize(
    ("door", "fn"),
    [("composable", None), ("wrapper", own), ("fsdp2", far)],
    ids=["methods", "own", "far"],
)
@on_ranks(3)
def test_values_and_random_state_are_the_plain_models(
    world: World, door: str, fn: Init | None
) -> None:
    """Built on meta and on the CPU; by function, by methods, and by ``apply``."""
    plain = Model()
    torch.manual_seed(0)
    plain.apply(fn or by_method)  # type: ignore[arg-type]  # torch wants None back
    state = torch.get_rng_state()
    # The wrapper takes a model on meta by its own initialiser.
    for meta in (False, True) if door != "wrapper" else (False,):
        model: Any = shard(on_meta(Model) if meta else Model(), door)
        torch.manual_seed(0)
        init_weights(model, fn)
        assert torch.equal(torch.get_rng_state(), state)
        assert unlike(model, plain) == []
        x = torch.arange(5)
        model(x)
        if fn is not None and door != "composable" and not meta:
            torch.manual_seed(0)
            assert model.apply(fn) is model
            assert torch.equal(torch.get_rng_state(), state)
            plain_again = Model()
            torch.manual_seed(0)
            plain_again.apply(fn)  # type: ignore[arg-type]  # torch wants None back
            assert unlike(model, plain_again) == []


@pytest.mark.req("B-08")
@on_ranks(2)
def test_at_most_one_unit_is_full(world: World) -> None:
    """Also the root, while a block is full."""
    model = shard(on_meta(Model), "composable", ignored_modules=[])
    seen: list[int] = []

    def note(module: nn.Module) -> None:
        own(module)
        seen.append(sum(is_full(model)))

    init_weights(model, note)

    assert set(seen) == {1}


@pytest.mark.req("B-08", "R-03")
@on_ranks(2)
def test_weights_of_a_million_elements(world: World) -> None:
    """Above every threshold on sizes, with rows that no rank count divides."""

    def make() -> nn.Module:
        return nn.Linear(1000, 1003)

    model, plain = fully_shard(on_meta(make)), make()
    torch.manual_seed(1)
    init_weights(model)
    torch.manual_seed(1)
    by_method(plain)
    assert unlike(model, plain) == []


class Bare(nn.Module):
    """Has a parameter, and no method to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


def test_what_cannot_be_initialised_is_refused_before_any_change(
    one_rank: World,
) -> None:
    """With the class, the name and the way out; a plain model, too."""
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Bare())))

    with pytest.raises(PlanError, match=r"Bare '1' holds 'gain' on meta .*\(model, fn"):
        init_weights(model)
    with pytest.raises(CompositionError, match="init_weights was called on a Linear"):
        init_weights(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="init_weights expects a module"):
        init_weights([model])  # type: ignore[arg-type]  # on purpose

    assert all(p.is_meta for p in model.parameters())
    init_weights(model, lambda m: [p.data.fill_(1) for p in m.parameters(False)])
    assert all((p == 1).all() for p in model.parameters())


@on_ranks(2)
def test_a_new_unit_is_initialised_before_the_units_around_it(world: World) -> None:
    """A tree that was not initialised stays so, and can grow."""
    model = nn.Sequential(on_meta(lambda: nn.Linear(6, 6)), nn.Linear(6, 6))
    fully_shard(model[0])
    init_weights(model[0])
    fully_shard(model)
    model(torch.ones(1, 6)).sum().backward()
