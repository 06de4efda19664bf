"""The default device that a user sets is for the user's tensors, not for ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import composable_fsdp as cf
from tests.support.models import TinyGPT
from tests.support.on_ranks import on_ranks
from tests.support.reference import apply_units, gpt_input
from tests.support.sharded import UNITS
from tests.support.world import World


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def program(world: World, folder: Path, inside: Any) -> list[Any]:
    """Shard, train, and read or write all that is; the results."""
    plain, tokens = TinyGPT(), gpt_input(0, world.rank)
    with inside:
        model = apply_units(plain, UNITS, path="wrapper", sync_module_states=True)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found: list[Any] = []
        for _ in range(2):
            loss = model(tokens).square().mean()
            loss.backward()
            found += [loss.detach(), cf.clip_grad_norm_(model, 1.0)]
            optim.step()
        grad = cf.get_full_grad(model, "head.weight")
        found += [grad, cf.features.find_nonfinite(model)]
        optim.zero_grad()
        state = cf.optim.get_full_optim_state(model, optim, "head.weight")
        cf.optim.set_full_optim_state(model, optim, "head.weight", state)
        found += [state, model.state_dict()]
        model.load_state_dict(found[-1])
        saved = cf.optim_state_dict(model, optim)
        optim.load_state_dict(cf.optim_state_dict_to_load(model, optim, saved))
        found.append(saved["state"])
        cf.save(folder / "a", model, optim, extra={"rng": torch.get_rng_state()})
        cf.load(folder / "a", model, optim)
        cf.async_save(folder / "b", model, optim).result()
        cf.load(folder / "b", model, optim)
        cf.storage.export_safetensors(folder / "c", model)
        cf.load(folder / "c", model)
        for kind in cf.StateDictType:
            with cf.state_dict_type(model, kind):
                model.load_state_dict(model.state_dict())
                given = cf.optim_state_dict(model, optim)
                cf.optim_state_dict_to_load(model, optim, given)
        with cf.unshard_params(model, with_grads=True):
            found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.req("R-06")
@on_ranks(2)
def test_a_default_device_changes_no_value(world: World, tmp_path: Path) -> None:
    """``torch.device("meta")`` around a whole program, from sharding to files."""
    results = [
        program(world, tmp_path / str(i), inside)
        for i, inside in enumerate(
            (nullcontext(), torch.device("meta"), default_device())
        )
    ]

    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
