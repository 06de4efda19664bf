"""Tensors that wrap others are stored by those inside, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import return_and_correct_aliasing

from composable_fsdp import fully_shard, load, optim_state_dict, save
from composable_fsdp.storage import export_safetensors
from composable_fsdp.storage.native import NativeSource
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World


class Rows(Tensor):
    """Integers with a scale per row; the scales may be wrapped themselves."""

    codes: Tensor
    scale: Tensor
    bits: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, bits: int) -> Rows:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.bits = codes, scale, bits
        rows: Rows = made
        return rows

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"bits": self.bits, "by": object}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, *_: Any) -> Rows:
        return Rows(inner["codes"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            out = type(args[0])(args[0].codes, args[0].scale, args[0].bits)
            return return_and_correct_aliasing(func, args, kwargs or {}, out)  # type: ignore[no-untyped-call]  # untyped in torch
        raise NotImplementedError(func)


class Forgetful(Rows):
    """One that makes its tensors when asked."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["floats"], None

    @property
    def floats(self) -> Tensor:
        return self.codes.float()


class Quantised(nn.Module):
    """A trained part, a frozen matrix of rows, and a buffer."""

    def __init__(self, seed: int, bits: int = 8, kind: type[Rows] = Rows) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = tiny_mlp()
        codes = torch.randint(-128, 127, (6, 8), dtype=torch.int8)
        rows = kind(codes, Half(torch.rand(6, 1)), bits)
        self.base = nn.Parameter(rows, requires_grad=False)
        self.register_buffer("table", Half(torch.rand(4)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def make(seed: int, **options: Any) -> tuple[Quantised, torch.optim.Optimizer]:
    """The model, sharded, and an optimizer that holds the frozen matrix idly."""
    model = Quantised(seed, **options)
    fully_shard(model, ignored_states=[model.base])
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model(torch.ones(2, 8)).square().mean())
    optim.step()
    return model, optim


def inner(model: Quantised) -> dict[str, Tensor]:
    """All tensors that have memory, but those of units."""
    base: Any = model.base
    table: Any = model.table
    return {
        "base.codes": base.codes,
        "base.scale.stored": base.scale.stored,
        "table.stored": table.stored,
    }


@pytest.mark.req("K-02")
@on_ranks(2)
def test_tensors_inside_of_others_come_back_where_they_were(
    world: World, tmp_path: Path
) -> None:
    """Frozen, in a buffer, and in two levels; never by the address of the outer."""
    model, optim = make(1)
    expected = {name: value.clone() for name, value in inner(model).items()}
    save(tmp_path / "new", model, optim)
    again, other = make(2)
    load(tmp_path / "new", again, other)

    found = inner(again)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for mine, value in zip(
        again.body.parameters(), model.body.parameters(), strict=True
    ):
        assert torch.equal(mine, value)
        state, moments = other.state[mine], optim.state[value]
        # A rank without rows of a parameter has no state of it.
        assert state.keys() == moments.keys()
        assert all(torch.equal(state[key], moments[key]) for key in moments)
    with NativeSource(tmp_path / "new") as source:
        assert source.manifest.version == 1
        assert set(expected) < set(source.model)
        assert set(source.wrappers) == {"base", "base.scale", "table"}
        told = source.wrappers["base"]
    facts = "{'bits': 8, 'by': <class 'object'>}"
    assert told == f"Rows (6, 8) of torch.float32, {facts}"


@pytest.mark.req("K-02")
@on_ranks(2)
def test_a_wrapper_that_cannot_be_stored_is_refused_on_all_ranks(
    world: World, tmp_path: Path
) -> None:
    """By name, before a file is written."""
    model = Quantised(1)
    texts = []
    if world.rank:
        model.base.codes.add_(1)  # type: ignore[attr-defined]  # of Rows
    texts.append(message_of(lambda: save(tmp_path / "a", model)))
    forgetful = Quantised(1, kind=Forgetful)
    texts.append(message_of(lambda: save(tmp_path / "b", forgetful)))
    same = Quantised(1)
    optim = torch.optim.SGD(same.parameters(), lr=0.1)
    optim.state[same.base]["mean"] = torch.zeros(6)
    texts.append(message_of(lambda: save(tmp_path / "c", same, optim)))
    texts.append(message_of(lambda: export_safetensors(tmp_path / "d", same)))
    if world.rank == 0:
        assert not list(tmp_path.iterdir())
    (values, anew, state, export) = texts

    assert "Parameter 'base.codes', in no unit, is not the same" in values
    assert "'base' is a tests.storage.test_wrappers.Forgetful, which makes" in anew
    assert "tensor 'floats' anew when asked" in anew
    assert "test_wrappers.Rows, which wraps other tensors; its optimizer" in state
    assert "'base' is a tests.storage.test_wrappers.Rows, which wraps" in export


class Half(Tensor):
    """Values kept as half of themselves, in a tensor that has no memory of its own."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> Half:
        made = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)
        made.stored = stored
        wrapped: Half = made
        return wrapped

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Half:
        return Half(inner["stored"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as bound
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            out = Half(func(args[0].stored))
            return return_and_correct_aliasing(func, args, kwargs, out)  # type: ignore[no-untyped-call]  # untyped in torch
        if func is torch.ops.aten._to_copy.default:
            return func(args[0].stored * 2, **kwargs)
        raise NotImplementedError(func)


class Speaking(Half):
    """One that can say its values."""

    def dequantize(self) -> Tensor:
        return self.stored * 2


class Momentum(optim.SGD):
    """SGD whose momentum is quantised after each step; made for shards, it says."""

    works_on_shards = True
    kind: type[Half] = Speaking

    def step(self, closure: Any = None) -> Any:
        for values in self.state.values():
            held = values["momentum_buffer"]
            if isinstance(held, Half):
                values["momentum_buffer"] = held.stored * 2
        super().step(closure)
        for values in self.state.values():
            plain = values["momentum_buffer"]
            values["momentum_buffer"] = self.kind(plain / 2)


class Mute(Momentum):
    """The same, whose state cannot be asked."""

    kind = Half


@pytest.mark.req("P-16")
@on_ranks(2)
def test_quantised_state_is_saved_as_the_values_it_stands_for(
    world: World, tmp_path: Path
) -> None:
    """And refused by name where it cannot say them; to read its memory would crash."""
    model, plain = fully_shard(tiny_mlp()), fully_shard(tiny_mlp())
    ours = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    reference = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for each, optimizer in ((model, ours), (plain, reference)):
            backward(each(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    expected = optim_state_dict(plain, reference)["state"]
    save(tmp_path / "new", model, ours)
    fresh = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (fresh, ours):
        load(tmp_path / "new", model, optimizer)
        found = optim_state_dict(model, optimizer)["state"]
        for name, values in expected.items():
            assert torch.equal(
                found[name]["momentum_buffer"], values["momentum_buffer"]
            )
    backward(model(torch.ones(2, 8)).square().mean())
    ours.step()

    mute = Mute(model.parameters(), lr=0.1, momentum=0.9)
    mute.step()
    text = message_of(lambda: save(tmp_path / "mute", model, mute))

    assert text.startswith("CheckpointError: ")
    assert "Mute's state 'momentum_buffer' is a Half, which wraps" in text
