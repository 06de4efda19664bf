"""What ``composable_fsdp.fsdp2`` makes of a module, and what it refuses."""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import composable_fsdp
from composable_fsdp import fsdp2, fully_shard
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import CheckpointError, CompositionError, PhaseError
from composable_fsdp.state_dict.sharded import ShardedValue
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import backward, gpt_input, loss_of, wide_input
from tests.support.seam import destroy_subgroups
from tests.support.sharded import message_of
from tests.support.world import World, fake_world

TORCH = "torch.distributed.fsdp"


def sharded_mlp() -> Any:
    """A tiny MLP whose first layer is a unit of its own."""
    model: Any = tiny_mlp()
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    return model


@pytest.mark.req("N-05")
def test_the_class_is_a_readable_one_that_derives_from_both(one_rank: World) -> None:
    """Here alone: the package's own ``fully_shard`` leaves classes as they are."""
    model = sharded_mlp()
    other = composable_fsdp.fully_shard(nn.Linear(2, 2))

    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]).__name__ == "FSDPLinear"
    assert isinstance(model[0], fsdp2.FSDPModule)
    assert isinstance(model[0], nn.Linear)
    assert type(model[2]) is nn.Linear
    assert "(0): FSDPLinear(in_features=8" in repr(model)
    assert type(other) is nn.Linear
    # One class per plain class, so that isinstance and caches by type keep working.
    assert type(fsdp2.fully_shard(nn.Linear(2, 2))) is type(model[0])
    assert fsdp2.fully_shard.state(model) is composable_fsdp.fully_shard.state(model)


@on_ranks(2)
@pytest.mark.req("N-05")
def test_state_dicts_have_full_tensors_and_parameters_say_the_way_out(
    world: World,
) -> None:
    """Values of state dicts gather; a parameter is a plain tensor of rows."""
    reference: Any = TinyGPT()
    model: Any = TinyGPT()
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)

    found = model.state_dict()
    assert list(found) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert isinstance(found[name], ShardedValue)
        assert torch.equal(found[name].full_tensor(), value)
    # Full values of a plain model load, too.
    model.load_state_dict({k: v + 1 for k, v in reference.state_dict().items()})
    full = model.state_dict()["blocks.0.out.weight"].full_tensor()
    assert torch.equal(full, reference.blocks[0].out.weight + 1)
    model(gpt_input(0, 0))
    parameter: Any = model.blocks[0].out.weight
    assert type(parameter) is nn.Parameter
    assert not hasattr(parameter, "full_tensor")
    text = message_of(partial(getattr, parameter, "full_tensor"))
    assert "'blocks.0.out.weight'" in text
    assert "composable_fsdp.get_full_param(model, name)" in text
    for name in ("placements", "device_mesh", "to_local"):
        assert not hasattr(parameter, name)
        text = message_of(partial(getattr, parameter, name))
        assert f"no attribute {name!r}. It holds this rank's rows of 'blocks.0" in text
        assert "isinstance(parameter, DTensor)" in text or name == "to_local"
    with pytest.raises(AttributeError, match=r"no attribute 'full_tensor'$"):
        getattr(nn.Parameter(torch.ones(1)), "full_tensor")  # noqa: B009  # for mypy


@on_ranks(2)
@pytest.mark.req("N-05")
def test_torchs_own_clipping_clips_sharded_parameters(world: World) -> None:
    """Under every reference to the function; other parameters are clipped as before."""
    clip = torch.nn.utils.clip_grad_norm_  # as a script imports it, before the door
    model, reference = sharded_mlp(), tiny_mlp()
    for rank in range(2):
        backward(loss_of(reference, wide_input(8)(0, rank)) / 2)
    backward(loss_of(model, wide_input(8)(0, world.rank)))

    expected = clip(reference.parameters(), 0.1)
    norm = clip(model.parameters(), max_norm=0.1, error_if_nonfinite=True)

    assert torch.nn.utils.clip_grad_norm_ is clip
    torch.testing.assert_close(norm, expected)
    for name, parameter in reference.named_parameters():
        full = composable_fsdp.get_full_grad(model, name)
        torch.testing.assert_close(full, parameter.grad)
    single = clip(model[0].weight, 1e-3, foreach=False)
    assert 0 < single <= 0.1
    with pytest.raises(ValueError, match="norm_type above 0"):
        clip(model.parameters(), 1.0, -1.0)
    # A unit of the package's own ``fully_shard`` keeps the norm of this rank's rows,
    # which the optimizer's step refuses.
    other = composable_fsdp.fully_shard(tiny_mlp())
    backward(loss_of(other, wide_input(8)(0, world.rank)))
    parts = [p.grad for p in other.parameters() if p.grad is not None]
    torch.testing.assert_close(
        clip(other.parameters(), 1e9), torch.nn.utils.get_total_norm(parts)
    )
    # A copy is of the door, too.
    copied = copy.deepcopy(model)
    backward(loss_of(copied, wide_input(8)(0, world.rank)))
    norms = [torch.zeros(()) for _ in range(2)]
    torch.distributed.all_gather(norms, clip(copied.parameters(), 1.0))
    assert torch.equal(*norms)


@pytest.mark.req("N-05")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_placement_fn": lambda p: "row"}, ["'row'", "apply fully_shard("]),
        ({"dp_mesh_dims": fsdp2.DataParallelMeshDims("a")}, ["mesh=mesh['shard']"]),
        ({"reshard_after_forward": 3}, ["a divisor of the 4 ranks", "got 3"]),
        ({"reshard_after_forward": "yes"}, ["True, False, None", "'yes'"]),
        ({"mp_policy": torch.bfloat16}, ["mp_policy", "composable_fsdp.fsdp2"]),
        ({"offload_policy": True}, ["offload_policy", "composable_fsdp.fsdp2"]),
    ],
)
def test_arguments_that_cannot_be_honored_are_refused_by_name(
    options: dict[str, Any], words: list[str]
) -> None:
    """Before the first change, with the way out."""
    model = tiny_mlp()
    with fake_world(4):
        text = message_of(lambda: fsdp2.fully_shard(model, **options))

        assert [word for word in words if word not in text] == []
        assert type(model) is nn.Sequential
        assert isinstance(fsdp2.fully_shard(model), fsdp2.FSDPModule)


REFUSED: dict[str, tuple[Any, ...]] = {
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_symm_mem_for_comm": (),
    "set_reduce_scatter_max_input_buffers": (2,),
}
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "set_allocate_memory_from_process_group_for_comm": (False,),
    "set_separate_reduce_scatter_group": (True,),
    "set_reduce_scatter_max_input_buffers": (1,),
    "set_unshard_in_backward": (True,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_reduce_scatter_unused_params": (True,),
}


@pytest.mark.req("N-05")
def test_methods_that_cannot_be_honored_are_refused_with_the_way_out(
    one_rank: World,
) -> None:
    """And accepted with the argument that asks for the state that there is."""
    model = sharded_mlp()

    for name, given in REFUSED.items():
        text = message_of(partial(getattr(model, name), *given))
        assert name in text
        assert "no value depends on it" in text
    for name, given in ACCEPTED.items():
        getattr(model, name)(*given)
    for wrong in (True, 0):
        with pytest.raises(ValueError, match="set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(2.0)
    with pytest.raises(ValueError, match="share_comm_ctx expects FSDPModules"):
        fsdp2.share_comm_ctx([nn.Linear(2, 2)])  # type: ignore[list-item]  # on purpose
    with pytest.raises(TypeError, match="set_all_reduce_hook expects"):
        model.set_all_reduce_hook(None)
    fsdp2.register_fsdp_forward_method(nn.Linear(2, 2), "absent")
    with pytest.raises(CompositionError, match="no method 'absent'"):
        fsdp2.register_fsdp_forward_method(model, "absent")


@on_ranks(2)
@pytest.mark.req("N-05")
def test_an_iteration_that_raised_is_reset_at_the_root(world: World) -> None:
    """With what was accumulated; other modules and running steps are refused."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    x = torch.ones(2, 4)
    backward(loss_of(model, x))
    once = model[0].weight.grad.clone()
    model.zero_grad()

    model.set_requires_gradient_sync(False)
    backward(loss_of(model, x))
    model.set_requires_gradient_sync(True)
    hook = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    model.reset_iter_state()
    hook.remove()
    backward(loss_of(model, x))

    torch.testing.assert_close(model[0].weight.grad, once)
    with pytest.raises(PhaseError, match="outermost"):
        model[0].reset_iter_state()
    model[1].register_forward_hook(lambda *_: model.reset_iter_state())
    with pytest.raises(PhaseError, match="is running"):
        model(x)


@on_ranks(2)
@pytest.mark.req("N-05")
def test_modules_inside_others_of_a_list_and_torchs_own_policies_are_taken(
    world: World,
) -> None:
    """As FSDP2 does; a policy that a script still imports from torch is copied."""
    theirs = importlib.import_module(TORCH)
    model: Any = TinyGPT()
    block = model.blocks[0]
    policy = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given: list[nn.Module] = [block, block.qkv]
    made: list[fsdp2.FSDPModule] = fsdp2.fully_shard(
        given,
        mp_policy=policy,
        offload_policy=theirs.OffloadPolicy(),
        mesh=init_device_mesh("cpu", (2,)),
    )
    fsdp2.fully_shard(model, mp_policy=policy)

    assert list(map(id, made)) == list(map(id, given))
    assert type(block).__name__ == "FSDPTinyBlock"
    assert not isinstance(block.qkv, fsdp2.FSDPModule)
    state = fsdp2.fully_shard.state(block)
    assert state is not None
    assert state.options.mixed_precision is not None
    assert state.options.mixed_precision.param_dtype is torch.bfloat16
    assert state.options.mixed_precision.cast_root_forward_inputs
    backward(loss_of(model, gpt_input(0, world.rank)))


def trained(api: Any, world: World, **options: Any) -> list[torch.Tensor]:
    """The loss of each of two steps, and the weights behind them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in (model[0], model[2], model):
        api.fully_shard(layer, **options)
    model[0].set_unshard_in_backward(bool(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        loss = loss_of(model, wide_input(8)(step, world.rank))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(v.full_tensor() for v in model.state_dict().values())]


@pytest.mark.req("N-05")
@on_ranks(4)
def test_options_of_memory_alone_are_taken_with_a_warning(world: World) -> None:
    """Fewer ranks to reshard to, columns, a backward without gather: equal numbers."""
    choices: list[dict[str, Any]] = [
        {"reshard_after_forward": world.world_size // 2},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        {},
    ]
    texts = []
    for options in choices:
        theirs = trained(importlib.import_module(TORCH), world, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = trained(fsdp2, world, **options)
        torch.testing.assert_close(ours, theirs)
        texts += [str(each.message) for each in caught]

    for words in (
        "another dim than 0 for 'weight' (Shard(dim=1))",
        "set_unshard_in_backward(False) is ignored",
    ):
        assert any(words in text for text in texts)


@on_ranks(4)
def test_groups_that_a_program_has_destroyed_are_made_anew(world: World) -> None:
    """Those that the package made for a placement; the ranks of the model stay."""
    for _ in range(2):
        trained(fsdp2, world, reshard_after_forward=2)
        destroy_subgroups()


# ---- states of optimizers, against torch's FSDP2 ----


def trained_beside(
    api: Any,
    world: World,
    optimizer_of: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps, whose last layer has fewer rows than there are ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
    for layer in (model[0], model[2], model):
        api.fully_shard(layer, **options)
    optimizer: torch.optim.Optimizer = optimizer_of(model.parameters(), lr=0.1)
    for step in range(2):
        backward(loss_of(model, wide_input(8)(step, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Any]:
    """What a script makes of ``optimizer.state_dict()`` on every rank."""
    return {
        (key, name): value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


@pytest.mark.req("N-05")
@on_ranks(4)
def test_state_of_an_optimizer_has_full_tensors_on_every_rank(world: World) -> None:
    """As FSDP2's DTensors, also of parameters that some ranks have no row of."""
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
    for kind in kinds:
        options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

        made = partial(kind, **options)

        # The models stay alive, as in a script.
        model, ours = trained_beside(fsdp2, world, optimizer_of=made)
        other, theirs = trained_beside(
            importlib.import_module(TORCH), world, optimizer_of=made
        )
        found, expected = whole_state(ours), whole_state(theirs)
        # Keys in the same order on all ranks, or the gathers would not match.
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected)
        # A state dict loads where it came from, with the entries of absent rows.
        ours.load_state_dict(ours.state_dict())
        torch.testing.assert_close(whole_state(ours), expected)
        assert len(model) == len(other)


@on_ranks(2)
@pytest.mark.req("N-05")
def test_state_of_other_units_sends_nothing(world: World) -> None:
    """The package's own ``fully_shard`` keeps state dicts without a collective."""
    model: Any = nn.Linear(8, 1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(loss_of(model, wide_input(8)(0, world.rank)))
    optimizer.step()

    with record() as calls:
        state = optimizer.state_dict()["state"]

    assert calls == []
    # Rank 0 holds the row of the weight, and rank 1 the bias.
    assert len(state) == 1
    if world.rank == 0:
        with pytest.raises(
            CheckpointError, match=r"full_tensor expects.*by optim_state_dict\("
        ):
            state[0]["exp_avg"].full_tensor()
