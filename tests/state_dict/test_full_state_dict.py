"""Claims on full state dicts: a sharded model saves and loads as the plain one does."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    optim_state_dict,
    set_state_dict_type,
    state_dict_type,
)
from composable_fsdp.comm import agreement
from tests.optim.models import INPUT, Mixed
from tests.optim.test_names import Parallel, put
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    differences,
    loss_of,
)
from tests.support.sharded import RankCount, both_paths, gpt, is_full, message_of
from tests.support.world import RankFailure, World


class Normed(nn.Module):
    """Buffers of both kinds, a versioned module, and names like the wrapper's own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.my_fsdp_wrapped_module = tiny_mlp(seed=seed)
        self._fsdp_wrapped_module_x = nn.ModuleList([tiny_mlp(seed=seed + 1)])
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((3,), float(seed)))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self._fsdp_wrapped_module_x[0](self.my_fsdp_wrapped_module(x))
        return self.norm(x)  # type: ignore[no-any-return]


SIMILAR = ["my_fsdp_wrapped_module", "_fsdp_wrapped_module_x.0", "norm"]


def metadata(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(state._metadata)  # type: ignore[attr-defined]
    return found


def names_of(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, _ in named]


@pytest.mark.req("S1-31", "S1-13", "S1-09", "D-01")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 3)
@both_paths
def test_a_fresh_model_saves_what_the_plain_one_saves(
    world: World, path: str, strategy: ShardingStrategy
) -> None:
    """Keys, order, bits, buffers, tied names and metadata, before anything has run."""
    plain_gpt = TinyGPT(tied_head=True)
    for model, plain in (
        (gpt(path, tied_head=True, strategy=strategy), plain_gpt),
        (apply_units(Normed(), SIMILAR, path=path, strategy=strategy), Normed()),
    ):
        saved, expected = model.state_dict(), plain.state_dict()

        assert differences(saved, expected) == {}
        assert metadata(saved) == metadata(expected)
        assert names_of(model) == names_of(plain)
        assert is_full(model) == [False] * len(is_full(model))
    tied = gpt(path, tied_head=True, strategy=strategy).state_dict()
    assert tied["tokens.weight"].data_ptr() == tied["head.weight"].data_ptr()


@pytest.mark.req("D-01")
@both_paths
@on_ranks(2)
def test_a_sparse_buffer_is_saved_and_loaded(world: World, path: str) -> None:
    """A graph's adjacency matrix has no storage that could be compared."""
    model = tiny_mlp()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    sharded = apply_units(model, ["0"], path=path)
    saved = sharded.state_dict()
    assert saved["graph"].is_sparse
    saved["graph"] = (2 * torch.eye(3)).to_sparse()
    sharded.load_state_dict(saved)
    assert sharded.state_dict()["graph"].to_dense().diag().tolist() == [2, 2, 2]


@pytest.mark.req("S1-31", "S1-34", "S3-05", "D-01")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(3)
def test_wrapper_composable_and_plain_load_from_each_other(
    world: World, strategy: ShardingStrategy
) -> None:
    """Through all and back, bit by bit; loading sends nothing and takes nothing out."""
    source = Normed(seed=3)
    state = source.state_dict()
    for path in (*PATHS, "plain", *reversed(PATHS)):
        target = Normed(seed=8)
        if path != "plain":
            target = apply_units(target, SIMILAR, path=path, strategy=strategy)  # type: ignore[assignment]
        given = dict(state)
        with record_steps() as calls:
            target.load_state_dict(state)

        assert calls == []
        assert dict(state).keys() == given.keys()
        assert all(state[key] is given[key] for key in given)
        state = target.state_dict()
        assert differences(state, source.state_dict()) == {}, path


@pytest.mark.req("D-01")
@both_paths
@on_ranks(2)
def test_assigned_values_of_another_dtype_cast_the_model(
    world: World, path: str
) -> None:
    """A unit of several modules takes them up together, and trains on."""
    model, plain = apply_units(tiny_mlp(seed=8), [], path=path), tiny_mlp(seed=3)
    saved = plain.double().state_dict()
    model.load_state_dict(saved, assign=True)
    assert differences(model.state_dict(), saved) == {}
    x = torch.ones(2, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.req("D-01")
@pytest.mark.parametrize("kind", StateDictType)
@both_paths
@on_ranks(2)
def test_inference_mode_saves_and_loads_as_usual(
    world: World, path: str, kind: StateDictType
) -> None:
    """Evaluation loops, and callbacks that save in them, run in this mode."""
    model, plain = apply_units(Normed(seed=8), SIMILAR, path=path), Normed(seed=3)
    with torch.inference_mode(), state_dict_type(model, kind):
        model.load_state_dict(plain.state_dict())
        model.load_state_dict(model.state_dict())
    assert differences(model.state_dict(), plain.state_dict()) == {}


@pytest.mark.req("U-04", "D-01")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("to_cpu", [False, True])
@on_ranks(1, 2)
def test_whole_values_are_the_callers_own(
    world: World, strategy: ShardingStrategy, to_cpu: bool
) -> None:
    """In memory of their own size; writes reach no model."""
    model = apply_units(Normed(), SIMILAR, path="composable", strategy=strategy)
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    configs: Any = (
        FullStateDictConfig(offload_to_cpu=to_cpu),
        FullOptimStateDictConfig(offload_to_cpu=to_cpu),
    )
    set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs)

    def taken() -> dict[str, Tensor]:
        state = model.state_dict()
        found = {name: state[name] for name, _ in model.named_parameters()}
        for name, values in optim_state_dict(model, optimizer)["state"].items():
            found |= {name + key: value for key, value in values.items()}
        return found

    values = taken()
    before = {name: value.clone() for name, value in values.items()}
    for value in values.values():
        assert value.untyped_storage().nbytes() == value.nbytes
        value.fill_(7)
    assert differences(taken(), before) == {}


def broken(what: str) -> dict[str, Any]:
    """A state dict of ``Normed`` with something wrong."""
    state: dict[str, Any] = Normed().state_dict()
    layer = "my_fsdp_wrapped_module.0."
    if what == "names":
        del state[layer + "bias"], state["scale"]
        state["norm.extra"] = state["other.weight"] = torch.ones(1)
    elif what == "shape":
        state[layer + "weight"] = torch.ones(3, 8)
    elif what == "buffer":
        state["norm.running_mean"] = torch.ones(3)
    elif what == "type":
        state[layer + "weight"] = [1.0, 2.0]
    elif what == "version":
        del state["norm.num_batches_tracked"]
    return state


@pytest.mark.req("D-01")
@both_paths
@on_ranks(2)
def test_what_does_not_fit_is_reported_as_by_the_plain_model(
    world: World, path: str
) -> None:
    """Missing and left-over keys, buffers and wrong values have their plain names."""
    model, plain = apply_units(Normed(), SIMILAR, path=path), Normed()
    for what in ("names", "buffer", "type", "version", "shape"):
        # Torch names the class it was called on; all else must be equal.
        found, expected = (
            message_of(partial(each.load_state_dict, broken(what))).replace(
                type(each).__name__, "Model"
            )
            for each in (model, plain)
        )
        assert found == expected
        assert is_full(model) == [False] * 4
    report = model.load_state_dict(broken("names"), strict=False)
    assert report == plain.load_state_dict(broken("names"), strict=False)
    model(torch.ones(4, 8)).sum().backward()


@both_paths
@on_ranks(2)
def test_inside_forward_and_backward_it_is_refused_between_them_it_works(
    world: World, path: str
) -> None:
    """The messages name the call and when to make it."""
    plain: Any = nn.Sequential(tiny_mlp())
    layer = plain[0][1]
    model = apply_units(plain, ["0"], path=path)
    state, x = model.state_dict(), torch.ones(2, 8)
    for name, act in (
        ("state_dict", model.state_dict),
        ("load_state_dict", lambda: model.load_state_dict(state)),
    ):
        handle = layer.register_forward_pre_hook(lambda *_, act=act: act() and None)
        text = message_of(lambda: model(x))
        handle.remove()
        assert text.startswith(
            f"PhaseError: {name} was called on (root) inside the forward of (root)"
        )
        y = model(x)
        y.register_hook(lambda _, act=act: act() and None)
        text = message_of(y.sum().backward)
        assert text.startswith(
            f"PhaseError: {name} was called on (root) inside backward"
        )
    loss = loss_of(model, x)
    assert differences(model.state_dict(), state) == {}
    loss.backward()  # type: ignore[no-untyped-call]


def between(model: nn.Module, path: str) -> nn.Module:
    """A module between the unit's and its parameters does."""
    unit: nn.Module = put(nn.Sequential(Parallel(model)), path)
    return unit


def twice(model: nn.Module, path: str) -> nn.Module:
    """One that does in another one."""
    unit: nn.Module = put(Parallel(Parallel(model)), path)
    return unit


def plain_of(make: Any) -> nn.Module:
    made = Parallel(Mixed())
    return nn.Sequential(made) if make is between else made


@pytest.mark.req("S1-07")
@pytest.mark.parametrize("make", [between, twice])
@both_paths
@on_ranks(2)
def test_calls_that_a_module_passes_on_still_give_full_parameters(
    world: World, make: Any, path: str
) -> None:
    """Under the plain_of model's names; never a shard that looks like a whole."""
    expected = plain_of(make).state_dict()
    model = make(Mixed(), path)

    found = model.state_dict()
    first = FullStateDictConfig(rank0_only=True)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, first):
        once = model.state_dict()
    model(INPUT(0, 0))
    if make is twice:  # torch asks no module below for its ``load_state_dict``
        other = {key: value + 1 for key, value in expected.items()}
        model.load_state_dict(other)
        assert _same(dict(model.state_dict()), other)

    assert _same(dict(found), dict(expected))
    assert _same(dict(once), dict(expected) if world.rank == 0 else {})


def first_rank_alone(world: World) -> None:
    model = gpt("composable")
    if world.rank == 0:
        os.environ[agreement.TIMEOUT_VARIABLE] = "0.2"  # nobody will come
        model.state_dict()


@pytest.mark.req("X-12", "U-02")
def test_a_state_dict_on_one_rank_alone_is_an_error_that_says_so(
    ranks: RankCount,
) -> None:
    """``if rank == 0: model.state_dict()``, before it sends anything."""
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(first_rank_alone, timeout=20, patience=10)

    text = str(caught.value)
    assert "DesyncError: This rank is in state_dict() of TinyGPT. " in text
    assert "Rank 1 did not come within 0.2 s" in text
    assert "call state_dict() on every rank" in text


@pytest.mark.req("S1-31")
@on_ranks(3)
def test_a_sharded_part_of_a_plain_model_saves_and_loads_in_its_place(
    world: World,
) -> None:
    """The fully sharded module need not be the outermost one."""
    plain = nn.Sequential(nn.Linear(8, 8), Normed(seed=1), tiny_mlp())
    model = copy.deepcopy(plain)
    model[1] = apply_units(model[1], ["norm"], path="wrapper")

    assert differences(model.state_dict(), plain.state_dict()) == {}
    assert metadata(model.state_dict()) == metadata(plain.state_dict())
    prefixed = model[1].state_dict(prefix="deep.1.")
    assert differences(prefixed, plain[1].state_dict(prefix="deep.1.")) == {}
    other = {key: value + 1 for key, value in plain.state_dict().items()}
    report = model.load_state_dict(other)
    assert report.missing_keys == report.unexpected_keys == []
    assert differences(model.state_dict(), other) == {}


@pytest.mark.req("S1-31")
@on_ranks(3)
def test_members_of_a_unit_made_from_a_list_save_their_own_names(world: World) -> None:
    """Two modules that share buffers keep the names that they have in the model."""
    model, plain = TinyGPT(), TinyGPT()
    fully_shard([model.blocks[0], model.norm])
    fully_shard(model)

    assert differences(model.state_dict(), plain.state_dict()) == {}
    assert differences(model.norm.state_dict(), plain.norm.state_dict()) == {}
    model.norm.load_state_dict({"weight": torch.ones(8), "bias": torch.ones(8)})
    model.load_state_dict(model.state_dict())
    plain.norm.load_state_dict({"weight": torch.ones(8), "bias": torch.ones(8)})
    assert differences(model.state_dict(), plain.state_dict()) == {}
