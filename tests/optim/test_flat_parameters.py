"""``flat_parameters``: the same training with one tensor per region."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_full_grad,
    no_sync,
    optim_state_dict,
    set_full_grad,
    unshard_params,
)
from composable_fsdp.errors import CompositionError
from composable_fsdp.features import flat_parameters
from composable_fsdp.tree.traversal import _get_fsdp_handles
from tests.optim.models import INPUT, mixed
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    adamw,
    apply_units,
    backward,
    differences,
    gpt_input,
    gpt_units,
    loss_of,
    sgd,
    train,
    wide_input,
)
from tests.support.sharded import gpt, message_of
from tests.support.world import World

x_of = wide_input(8)


def regions(model: nn.Module) -> list[Any]:
    return [r for handle in _get_fsdp_handles(model) for r in handle.layout.trainable]


def grad_of(model: nn.Module, name: str) -> Tensor:
    gradient = get_full_grad(model, name)
    assert gradient is not None
    return gradient


def hook_on(tensor: Any, kind: str, hook: Callable[..., object]) -> None:
    """Register a hook; torch's methods have no types."""
    getattr(tensor, kind)(hook)


def twins(**options: Any) -> tuple[nn.Module, nn.Module]:
    """The same sharded model twice."""
    model = TinyGPT()
    other = copy.deepcopy(model)
    return tuple(apply_units(m, gpt_units(m), **options) for m in (model, other))  # type: ignore[return-value]


@on_ranks(4)
def test_flat_parameters_of_replicas_train_as_the_originals(world: World) -> None:
    """Two replicas of two shards, clipped; all agree, and so does the state by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, theirs = twins(strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    optimizers = adamw(flat_parameters(ours)), adamw(theirs.parameters())
    clip = lambda m: clip_grad_norm_(m, 0.05)  # noqa: E731
    losses, expected = (
        train(model, world.rank, gpt_input, lambda _, o=optimizer: o, clip=clip)  # type: ignore[misc]
        for model, optimizer in zip((ours, theirs), optimizers, strict=True)
    )

    assert losses == pytest.approx(expected, rel=1e-6)
    assert world.all_equal(ours.state_dict())
    mine, other = map(optim_state_dict, (ours, theirs), optimizers)
    torch.testing.assert_close(mine["state"], other["state"], rtol=1e-5, atol=1e-7)


@on_ranks(3)
def test_gradients_in_low_precision_train_as_over_the_originals(world: World) -> None:
    """Weights and losses are equal; torch's AdamW takes no such gradients."""
    low = torch.bfloat16
    ours, theirs = twins(
        mixed_precision=MixedPrecision(low, low, keep_low_precision_grads=True)
    )
    flats = flat_parameters(ours)
    losses = train(ours, world.rank, gpt_input, lambda _: sgd(flats))
    expected = train(theirs, world.rank, gpt_input, sgd)

    assert losses == expected
    assert differences(ours.state_dict(), theirs.state_dict()) == {}


@on_ranks(3)
def test_gradients_accumulate_with_and_without_reduction(
    world: World,
) -> None:
    """no_sync, two reductions, and zero_grad in both its ways."""
    ours, theirs = twins(cpu_offload=CPUOffload(offload_params=True))
    made = flat_parameters(ours), list(theirs.parameters())
    for model, parameters in zip((ours, theirs), made, strict=True):
        optimizer = adamw(parameters)
        for at in range(2):
            with no_sync(model):
                backward(loss_of(model, gpt_input(3 * at, world.rank)))
            # Reduced on its own, then added to.
            backward(loss_of(model, gpt_input(3 * at + 1, world.rank)))
            backward(loss_of(model, gpt_input(3 * at + 2, world.rank)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=at == 0)

    assert differences(ours.state_dict(), theirs.state_dict()) == {}


def test_each_trainable_region_has_one_that_stays_the_same_object(
    one_rank: World,
) -> None:
    """It shares the shard's memory; asked of the model, of a part, and after steps."""
    model = gpt("composable")
    model.get_submodule("positions").requires_grad_(False)
    first = flat_parameters(model)
    assert len(first) == len(regions(model)) == 3
    for flat, region in zip(first, regions(model), strict=True):
        assert type(flat) is nn.Parameter
        assert flat.shape == (region.layout.shard_numel,)
        assert flat.data_ptr() == region.shard.data_ptr()

    train(model, 0, gpt_input, lambda _: adamw(first))

    again = flat_parameters(model)
    part = flat_parameters(model.get_submodule("blocks.1"))
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert [id(p) for p in part] == [id(p) for p in first if p is part[0]]


@pytest.mark.parametrize(
    ("who", "set_to_none"), [("optimizer", True), ("model", False), ("unit", True)]
)
def test_zero_grad_of_optimizer_model_or_unit_clears_the_gradients(
    one_rank: World, who: str, set_to_none: bool
) -> None:
    """Clip finds a norm of zero and ``get_full_grad`` nothing afterwards."""
    model = apply_units(tiny_mlp(), [], path="wrapper")
    unit: nn.Module = getattr(model, "module", model)
    optimizer = adamw(flat_parameters(unit))
    # A gradient beside the unit's is in the flat one when backward ends.
    backward(penalty_of(model) + loss_of(model, x_of(0, 0)))
    assert clip_grad_norm_(model, 1.0) > 0
    cleared: Any = {"optimizer": optimizer, "model": model, "unit": unit}[who]

    cleared.zero_grad(set_to_none=set_to_none)

    assert clip_grad_norm_(model, 1.0) == 0
    name, _ = next(model.named_parameters())
    gradient = get_full_grad(model, name)
    assert gradient is None if set_to_none else not gradient.any()  # type: ignore[union-attr]


@on_ranks(3)
def test_gradients_by_name_are_read_and_written_in_the_flat_gradient(
    world: World,
) -> None:
    """get_full_grad, set_full_grad and unshard_params(with_grads=True)."""
    model = gpt("composable")
    backward(loss_of(model, gpt_input(0, world.rank)))
    name, parameter = next(iter(model.named_parameters()))
    seen = grad_of(model, name)
    # Gradients of before move to the flat parameters.
    flats = flat_parameters(model)
    assert torch.equal(grad_of(model, name), seen)
    assert all(p.grad is None for p in model.parameters())
    with unshard_params(model, with_grads=True):
        shown = dict(model.named_parameters())[name]
        assert shown.grad is not None
        assert torch.equal(shown.grad, seen)
        shown.grad.mul_(2)
    assert torch.equal(grad_of(model, name), 2 * seen)
    set_full_grad(model, name, None)
    assert not grad_of(model, name).any()
    set_full_grad(model, name, seen)
    assert torch.equal(grad_of(model, name), seen)
    assert parameter.grad is None
    assert all(flat.grad is not None for flat in flats)


def penalty_of(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize("how", ["before", "after", "clipped", "scaled"])
@on_ranks(1)
def test_gradients_that_the_originals_get_beside_their_unit_are_added(
    world: World, how: str
) -> None:
    """A penalty on the weights counts before and after the loss, in clip and scaler."""
    plain = tiny_mlp()
    model = fully_shard(copy.deepcopy(plain))
    made = {model: adamw(flat_parameters(model)), plain: adamw(plain.parameters())}
    for at in range(2):
        for each, optimizer in made.items():
            terms = [penalty_of(each), loss_of(each, x_of(at, 0))]
            for term in terms if how == "before" else reversed(terms):
                backward(term)
            if how == "clipped":
                clip_grad_norm_(each, 0.5)
            if how == "scaled":
                scaler = ShardedGradScaler("cpu", init_scale=1.0)
                scaler.scale(torch.zeros(()))
                scaler.unscale_(optimizer)
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    found = differences(model.state_dict(), plain.state_dict())
    assert max(found.values(), default=0.0) < 1e-6


@on_ranks(2)
def test_hooks_of_the_originals_see_and_replace_their_parts(world: World) -> None:
    """A tensor hook that gives zeros, and a hook after accumulation that looks."""
    model = fully_shard(tiny_mlp())
    seen: list[Tensor] = []
    weight, other, *_ = model.parameters()
    hook_on(weight, "register_hook", lambda g: g * 0)
    look: Any = lambda p: seen.append(p.grad.clone())  # noqa: E731
    hook_on(weight, "register_post_accumulate_grad_hook", look)
    (flat,) = flat_parameters(model)
    backward(loss_of(model, x_of(0, world.rank)))

    assert [value.shape for value in seen] == [weight.shape]
    assert not seen[0].any()
    assert weight.grad is other.grad is None
    assert not grad_of(model, "0.weight").any()
    assert flat.grad is not None
    assert flat.grad.any()


def test_trainable_parameters_that_no_unit_holds_come_last_as_they_are(
    one_rank: World,
) -> None:
    """Ignored ones would otherwise not train without a word."""
    model = tiny_mlp()
    ignored = model.get_parameter("2.weight")
    fully_shard(model, ignored_states=[ignored])

    *flats, last = flat_parameters(model)

    assert last is ignored
    assert len(flats) == len(regions(model))


@pytest.mark.parametrize("made", ["before", "after", "stepped before", "with both"])
def test_an_optimizer_over_the_originals_is_refused_beside_flat_parameters(
    one_rank: World, made: str
) -> None:
    """At its next step, before it changes anything, whenever it was made."""
    model = fully_shard(tiny_mlp())
    optimizer = adamw(model.parameters())
    if made == "stepped before":
        for at in range(3):
            backward(loss_of(model, x_of(at, 0)))
            optimizer.step()
    flats = flat_parameters(model)
    if made == "after":
        optimizer = adamw(model.parameters())
    elif made == "with both":
        optimizer = adamw([*flats, next(model.parameters())])
    before = [p.detach().clone() for p in model.parameters()]
    backward(loss_of(model, x_of(3, 0)))

    with pytest.raises(CompositionError, match=r"'0\.weight'.*has handed out"):
        optimizer.step()

    assert all(map(torch.equal, before, model.parameters()))


def test_optimizers_that_are_not_element_wise_are_refused_on_flat_parameters(
    one_rank: World,
) -> None:
    """Also where nothing is cut: the flat parameter joins several."""
    model = fully_shard(tiny_mlp())
    optimizer: Any = torch.optim.Adafactor(flat_parameters(model))
    backward(loss_of(model, x_of(0, 0)))

    with pytest.raises(CompositionError, match="joins what this rank holds of several"):
        optimizer.step()


def test_wrong_modules_and_moments_are_refused(one_rank: World) -> None:
    """The error says what to apply first, which module to pass, or where it was."""
    model = fully_shard(tiny_mlp())
    above = apply_units(nn.Sequential(tiny_mlp()), ["0.0"])
    texts = [
        message_of(lambda: flat_parameters(tiny_mlp())),
        message_of(lambda: flat_parameters(model[0])),
        message_of(lambda: flat_parameters([model])),  # type: ignore[arg-type]
        message_of(lambda: flat_parameters(above[0])),  # type: ignore[index]
    ]

    def ask(*_: object) -> None:
        texts.append(message_of(lambda: flat_parameters(model)))

    model[1].register_forward_hook(ask)
    loss = loss_of(model, x_of(0, 0))
    hook_on(loss, "register_hook", ask)
    backward(loss)

    for text, (kind, words) in zip(
        texts,
        [
            ("CompositionError", "Apply fully_shard first"),
            ("CompositionError", "belong to the fully sharded Sequential above it"),
            ("TypeError", "flat_parameters"),
            ("CompositionError", "holds parameter '2.weight' of fully sharded"),
            ("PhaseError", "inside the forward"),
            ("PhaseError", "inside backward"),
        ],
        strict=True,
    ):
        assert text.startswith(kind), text
        assert words in text
    assert all(region.flat is None for region in regions(above))


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "a unit"])
@on_ranks(3)
def test_what_is_frozen_has_the_step_refused_unless_it_is_a_whole_unit(
    world: World, whole: bool
) -> None:
    """The message names parameters and the way out; new flat parameters are there."""
    ours, theirs = twins()
    flats = flat_parameters(ours)
    optimizers = adamw(flats), adamw(theirs.parameters())
    texts = []
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        once = partial(
            train,
            model,
            world.rank,
            gpt_input,
            lambda _, o=optimizer: o,  # type: ignore[misc]
        )
        once()
        part = model.get_submodule("blocks.0" if whole else "blocks.0.up")
        part.requires_grad_(False)
        texts.append(message_of(once))
    found = differences(ours.state_dict(), theirs.state_dict())
    assert texts[1] == "nothing was raised"
    assert whole == (found == {}), found
    assert len(flat_parameters(ours)) == len(flats) - whole
    if whole:
        assert texts[0] == "nothing was raised"
    else:
        assert texts[0].startswith(
            "CompositionError: AdamW holds the flat parameter of"
        )
        assert "some were frozen or unfrozen since" in texts[0]


@on_ranks(3)
def test_padding_stays_zero_and_counts_nowhere(world: World) -> None:
    """Not in the norm of the gradients, and no step makes a value of it."""
    model = mixed("composable")
    flats = flat_parameters(model)
    optimizer = torch.optim.AdamW(flats, lr=0.1, weight_decay=0.5)
    for at in range(2):
        backward(loss_of(model, INPUT(at, world.rank)))
        norm = clip_grad_norm_(model, 100.0)
        named = model.named_parameters()
        by_hand = [grad_of(model, name).norm() for name, p in named if p.requires_grad]
        assert torch.allclose(norm, torch.stack(by_hand).norm())
        optimizer.step()
        optimizer.zero_grad()
    for region in regions(model):
        padding = torch.ones_like(region.shard, dtype=torch.bool)
        for start, stop, at in region.layout.shard_cuts(region.rank, rows=True).parts:
            padding[at : at + stop - start] = False
        assert not region.shard[padding].any()
