"""Optimizer state that wraps other tensors, as that of 8-bit optimizers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.utils._python_dispatch import return_and_correct_aliasing

from composable_fsdp import fully_shard, load, optim_state_dict, save
from tests.support.models import tiny_mlp
from tests.support.reference import backward
from tests.support.sharded import RankCount, message_of
from tests.support.world import World


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


def check_saved(world: World, folder: Path) -> str:
    """What a process that wrote past the end of memory could not return."""
    model, plain = fully_shard(tiny_mlp()), fully_shard(tiny_mlp())
    ours = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    reference = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for each, optimizer in ((model, ours), (plain, reference)):
            backward(each(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    expected = optim_state_dict(plain, reference)["state"]
    save(folder / "new", model, ours)
    fresh = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (fresh, ours):
        load(folder / "new", model, optimizer)
        found = optim_state_dict(model, optimizer)["state"]
        for name, values in expected.items():
            assert torch.equal(
                found[name]["momentum_buffer"], values["momentum_buffer"]
            )
    backward(model(torch.ones(2, 8)).square().mean())
    ours.step()

    mute = Mute(model.parameters(), lr=0.1, momentum=0.9)
    mute.step()
    return message_of(lambda: save(folder / "mute", model, mute))


@pytest.mark.req("P-16")
def test_quantised_state_is_saved_as_the_values_it_stands_for(
    ranks: RankCount, tmp_path: Path
) -> None:
    """And refused by name where it cannot say them; to read its memory would crash."""
    for text in ranks(2).run(check_saved, tmp_path):
        assert text.startswith("CheckpointError: ")
        assert "Mute's state 'momentum_buffer' is a Half, which wraps" in text
