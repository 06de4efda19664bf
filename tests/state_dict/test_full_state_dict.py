"""Claims on full state dicts: a sharded model saves and loads as the plain one does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import ShardingStrategy, fully_shard
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.recording import record_steps
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    apply_units,
    differences,
    gpt_input,
    loss_of,
    sgd,
    tolerance_at,
    train,
    train_reference,
)
from tests.support.sharded import (
    RankCount,
    both_paths,
    gpt,
    is_full,
    message_of,
    one_to_three_ranks,
    step,
)
from tests.support.world import World


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


@pytest.mark.req("S1-31", "S1-13", "D-01")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2, 3)
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


@pytest.mark.req("S1-31")
@on_ranks(1, 2, 3)
@both_paths
def test_a_trained_model_saves_what_the_trained_plain_one_saves(
    world: World, path: str
) -> None:
    """Equal on all ranks, and a later step does not change what was saved."""
    model, plain = gpt(path, tied_head=True), TinyGPT(tied_head=True)
    train_reference(plain, world.world_size, gpt_input, sgd)
    train(model, world.rank, gpt_input, sgd)

    saved = model.state_dict()
    kept = copy.deepcopy(saved)
    train(model, world.rank, gpt_input, sgd, steps=1)

    apart = differences(saved, plain.state_dict())
    assert all(value <= tolerance_at(world.world_size) for value in apart.values())
    assert world.all_equal(dict(saved))
    assert differences(saved, kept) == {}


@pytest.mark.req("S1-31", "D-01")
@on_ranks(1, 2, 3)
@both_paths
def test_a_fresh_model_loads_what_it_saved(world: World, path: str) -> None:
    """``load_state_dict(state_dict())`` right after construction changes nothing."""
    for model in (gpt(path), apply_units(Normed(), SIMILAR, path=path)):
        leaves = list(model.parameters())
        before = model.state_dict()

        report = model.load_state_dict(model.state_dict())

        assert report.missing_keys == report.unexpected_keys == []
        assert differences(model.state_dict(), before) == {}
        assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))


@pytest.mark.req("S1-31", "S1-34", "D-01")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2, 3)
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


@pytest.mark.req("S1-31")
@on_ranks(1, 2, 3)
@both_paths
def test_a_sharded_part_of_a_plain_model_saves_and_loads_in_its_place(
    world: World, path: str
) -> None:
    """The fully sharded module need not be the outermost one."""
    plain = nn.Sequential(nn.Linear(8, 8), Normed(seed=1), tiny_mlp())
    model = copy.deepcopy(plain)
    model[1] = apply_units(model[1], ["norm"], path=path)

    assert differences(model.state_dict(), plain.state_dict()) == {}
    assert metadata(model.state_dict()) == metadata(plain.state_dict())
    prefixed = model[1].state_dict(prefix="deep.1.")
    assert differences(prefixed, plain[1].state_dict(prefix="deep.1.")) == {}
    other = {key: value + 1 for key, value in plain.state_dict().items()}
    report = model.load_state_dict(other)
    assert report.missing_keys == report.unexpected_keys == []
    assert differences(model.state_dict(), other) == {}


@pytest.mark.req("S1-31")
@on_ranks(1, 2, 3)
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


@on_ranks(1, 2, 3)
@both_paths
def test_saving_costs_one_all_gather_per_unit(world: World, path: str) -> None:
    """Of a unit alone just its own, of the model those of all."""
    model = gpt(path)
    with record_steps() as whole:
        model.state_dict()
    with record_steps() as one:
        model.get_submodule("blocks")[1].state_dict()  # type: ignore[index]

    expected = ["all_gather"] * 3 if world.world_size > 1 else []
    assert [call.op for call in whole] == expected
    assert [call.op for call in one] == expected[:1]


@on_ranks(1, 2, 3)
@both_paths
def test_loading_with_assign_keeps_the_sharded_parameters(
    world: World, path: str
) -> None:
    """The values are taken up, the optimizer's objects stay, training goes on."""
    model = apply_units(Normed(), SIMILAR, path=path)
    leaves = list(model.parameters())
    shapes = [p.shape for p in leaves]
    other = Normed(seed=9).state_dict()

    model.load_state_dict(other, assign=True)

    assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
    assert [p.shape for p in leaves] == shapes
    assert differences(model.state_dict(), other) == {}
    model(torch.randn(4, 8)).sum().backward()


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


def check_error(world: World, path: str, what: str) -> str:
    model = apply_units(Normed(), SIMILAR, path=path)
    text = message_of(lambda: model.load_state_dict(broken(what)))
    # Torch names the class it was called on; all else must be equal on both paths.
    text = text.replace(type(model).__name__, "Model")

    assert is_full(model) == [False] * 4
    model(torch.ones(4, 8)).sum().backward()
    return text


def plain_error(what: str) -> str:
    text = message_of(lambda: Normed().load_state_dict(broken(what)))
    return text.replace("Normed", "Model")


@pytest.mark.req("D-01")
@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("composable", "names"),
        ("wrapper", "names"),
        ("composable", "buffer"),
        ("wrapper", "buffer"),
        ("composable", "type"),
        ("wrapper", "type"),
        ("composable", "version"),
        ("wrapper", "version"),
    ],
)
def test_what_does_not_fit_is_reported_as_by_the_plain_model(
    ranks: RankCount, path: str, what: str
) -> None:
    """Missing and left-over keys, buffers and wrong values have their plain names."""
    for text in ranks(2).run(check_error, path, what):
        assert text == plain_error(what)


@one_to_three_ranks
@both_paths
def test_a_wrong_shape_is_refused_by_name_with_both_shapes(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """The message asks for the plain model's shape, not for that of a shard."""
    for text in ranks(world_size).run(check_error, path, "shape"):
        assert (
            "'my_fsdp_wrapped_module.0.weight': expected the full parameter of shape "
            "(12, 8), got (3, 8). Load a state dict of the plain model's shapes, on "
            "every rank." in text
        )


@on_ranks(2, 3)
@both_paths
def test_loading_without_strict_reports_plain_names(world: World, path: str) -> None:
    """What is missing and what is left over is returned, not raised."""
    model = apply_units(Normed(), SIMILAR, path=path)

    report = model.load_state_dict(broken("names"), strict=False)

    assert report.missing_keys == ["scale", "my_fsdp_wrapped_module.0.bias"]
    assert report.unexpected_keys == ["norm.extra", "other.weight"] or (
        report.unexpected_keys == ["other.weight", "norm.extra"]
    )


def save_after_a_step(world: World, path: str) -> dict[str, Tensor]:
    model = gpt(path)
    step(model, sgd(model.parameters()), world.rank, 0)
    return dict(model.state_dict())


def load_and_save(
    world: World, path: str, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    model = gpt(path, seed=4)
    model.load_state_dict(state)
    return dict(model.state_dict())


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1), (1, 3)])
@both_paths
def test_another_number_of_ranks_loads_the_same_bits(
    ranks: RankCount, path: str, before: int, after: int
) -> None:
    """A state saved by some ranks on one path is loaded by others on the other path."""
    saved = ranks(before).run(save_after_a_step, path)[0]
    other = PATHS[1 - PATHS.index(path)]

    for loaded in ranks(after).run(load_and_save, other, saved):
        assert differences(loaded, saved) == {}


class Saves(nn.Module):
    """Does something in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_mlp()
        self.act: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.act is not None:
            self.act()
        y: Tensor = self.inner(x)
        return y


def check_moments(world: World, path: str) -> list[str]:
    inner = Saves()
    model = apply_units(inner, ["inner"], path=path)
    state, x = model.state_dict(), torch.ones(2, 8)
    texts = []
    for act in (model.state_dict, lambda: model.load_state_dict(state)):
        inner.act = act
        texts.append(message_of(lambda: model(x)))
        inner.act = None
        y = model(x)
        y.register_hook(lambda _, act=act: act() and None)
        texts.append(message_of(y.sum().backward))
    loss = loss_of(model, x)
    between = model.state_dict()
    loss.backward()  # type: ignore[no-untyped-call]
    loss = loss_of(model, x)
    model.load_state_dict(between)
    # As on a plain model: backward would be that of other weights.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]

    assert differences(between, state) == {}
    assert differences(model.state_dict(), state) == {}
    assert all((p.grad is None) == (not p.numel()) for p in model.parameters())
    return texts


@one_to_three_ranks
@both_paths
def test_inside_forward_and_backward_it_is_refused_between_them_it_works(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """The messages name the call and when to make it."""
    for texts in ranks(world_size).run(check_moments, path):
        in_forward, in_backward, load_in_forward, load_in_backward = texts
        assert in_forward == (
            "PhaseError: state_dict was called on (root) inside the forward of "
            "(root), where units are full by turns. Call it between steps."
        )
        assert in_backward == (
            "PhaseError: state_dict was called on (root) inside backward, where units "
            "are full by turns. Call it after loss.backward() has returned."
        )
        assert load_in_forward.startswith(
            "PhaseError: load_state_dict was called on (root) inside the forward"
        )
        assert load_in_backward.startswith(
            "PhaseError: load_state_dict was called on (root) inside backward"
        )
