"""What a wrong argument gets: its name, what came, and the way out; nothing changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_names

from composable_fsdp import (
    CheckpointWrapper,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    PlanError,
    SizePolicy,
    checkpoint_wrapper,
    clip_grad_norm_,
    fully_shard,
    is_sharded,
    no_sync,
    offload_wrapper,
    optim_state_dict,
    plan,
    register_forward_method,
    rekey_optim_state_dict,
    set_modules_to_forward_prefetch,
    set_requires_gradient_sync,
    transformer_auto_wrap_policy,
    unshard,
    unshard_params,
)
from tests.support.models import tiny_mlp
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World, fake_world

Call = Callable[[Any], object]

VERBS: dict[str, Call] = {
    "unshard": unshard,
    "is_sharded": is_sharded,
    "unshard_params": lambda m: unshard_params(m).__enter__(),
    "unshard_params(recurse=False)": lambda m: unshard_params(
        m, recurse=False
    ).__enter__(),
    "no_sync": lambda m: no_sync(m).__enter__(),
    "set_requires_gradient_sync": lambda m: set_requires_gradient_sync(m, True),
    "register_forward_method('forward')": lambda m: register_forward_method(
        m, "forward"
    ),
}


@pytest.mark.req("U-02")
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("given", [None, [nn.Linear(2, 2)], torch.ones(2)])
def test_a_verb_of_something_else_than_a_module_is_refused(
    name: str, given: object
) -> None:
    """By the verb's name and the kind of thing that came."""
    text = message_of(lambda: VERBS[name](given))

    plain = name.removesuffix("('forward')")
    kind = type(given).__name__
    assert text.startswith(f"TypeError: {plain} expects a module, got a {kind}.")


@pytest.mark.req("U-02")
@pytest.mark.parametrize("name", [name for name in VERBS if name != "unshard_params"])
def test_a_verb_of_a_submodule_names_the_unit_above(one_rank: World, name: str) -> None:
    """By class before the first forward, by class and name after it."""
    model = fully_shard(tiny_mlp())

    before = message_of(lambda: VERBS[name](model[0]))
    model(torch.ones(1, 8))
    after = message_of(lambda: VERBS[name](model[0]))

    start = f"CompositionError: {name} was called on a Linear that "
    assert before.startswith(start)
    assert "belong to the fully sharded Sequential above it. Pass that" in before
    assert "belong to the fully sharded Sequential (root) above it" in after


def test_a_verb_of_one_unit_names_that_there_are_some_below(one_rank: World) -> None:
    """A model whose blocks alone are units."""
    model = tiny_mlp()
    fully_shard(model[0])

    text = message_of(lambda: unshard(model))

    assert "no fully sharded module; there are such modules below it" in text


def one_argument(module: nn.Module) -> bool:
    """A policy of another library."""
    return True


REFUSED: dict[str, tuple[Call, str]] = {
    "one ignored module": (
        lambda m: fully_shard(m, ignored_modules=m[0]),
        "TypeError: ignored_modules expects a list, got a Linear. Pass [it].",
    ),
    "one ignored parameter": (
        lambda m: fully_shard(m, ignored_states=m[0].weight),
        "TypeError: ignored_states expects a list, got a Parameter. Pass [it].",
    ),
    "a policy of one argument": (
        lambda m: fully_shard(m, policy=one_argument),
        "For a function of one module, pass CustomPolicy(function)",
    ),
    "a policy with an argument left open": (
        lambda m: fully_shard(m, policy=transformer_auto_wrap_policy),
        "bind them with functools.partial",
    ),
    "no function": (
        lambda m: CustomPolicy(3),  # type: ignore[arg-type]  # the mistake
        "TypeError: CustomPolicy expects a function of a module, got a int.",
    ),
    "no number": (
        lambda m: SizePolicy("big"),  # type: ignore[arg-type]  # the mistake
        "SizePolicy expects min_numel >= 0, got 'big'.",
    ),
    "offload of a word": (
        lambda m: CPUOffload("yes"),  # type: ignore[arg-type]  # the mistake
        "TypeError: CPUOffload(offload_params=...) expects True or False, got 'yes'.",
    ),
    "parameters": (
        lambda m: fully_shard(list(m.parameters())),
        "fully_shard expects a list of modules, got a Parameter at position 0.",
    ),
    "a list in the wrapper": (
        lambda m: FullyShardedDataParallel([m]),  # type: ignore[arg-type]  # the mistake
        "TypeError: FullyShardedDataParallel expects a module, got a list.",
    ),
    "a plan of a list": (
        lambda m: plan([m], world_size=2),  # type: ignore[arg-type]  # the mistake
        "TypeError: plan expects a module, got a list.",
    ),
    "one module to prefetch": (
        lambda m: set_modules_to_forward_prefetch(fully_shard(tiny_mlp()), m),
        "expects a list of modules, got one Sequential. Pass [module];",
    ),
    "optimizer first": (
        lambda m: optim_state_dict(torch.optim.SGD(m.parameters()), m),  # type: ignore[arg-type]  # the mistake
        "optim_state_dict expects a model and its optimizer, got a SGD and a Sequ",
    ),
    "no state": (
        lambda m: rekey_optim_state_dict({}, 1, m),  # type: ignore[arg-type]  # the mistake
        "OptimStateKeyType.PARAM_NAME",
    ),
    "clipping nothing": (
        lambda m: clip_grad_norm_(None, 1.0),  # type: ignore[arg-type]  # the mistake
        "TypeError: clip_grad_norm_ expects a module or parameters, got a NoneType.",
    ),
    "a checkpoint of nothing": (
        lambda m: checkpoint_wrapper(None),  # type: ignore[arg-type]  # the mistake
        "TypeError: CheckpointWrapper expects a module, got a NoneType.",
    ),
    "activations of nothing": (
        lambda m: offload_wrapper(None),  # type: ignore[arg-type]  # the mistake
        "TypeError: OffloadWrapper expects a module, got a NoneType.",
    ),
    "no way to recompute": (
        lambda m: checkpoint_wrapper(m, checkpoint_impl="fast"),  # type: ignore[arg-type]  # the mistake
        "checkpoint_impl expects one of CheckpointImpl.REENTRANT",
    ),
}


@pytest.mark.req("U-02")
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_named_and_the_model_goes_on(
    one_rank: World, case: str
) -> None:
    """The module is as it was: it can be sharded and trains."""
    model: Any = tiny_mlp()
    act, expected = REFUSED[case]

    text = message_of(lambda: act(model))

    assert expected in text
    assert isinstance(model[0].weight, nn.Parameter)
    backward(fully_shard(model)(torch.ones(1, 8)).sum())


@pytest.mark.req("S0-11")
@pytest.mark.parametrize("path", ["composable", "wrapper", "plan"])
def test_ignored_parameters_may_come_from_an_iterator(
    one_rank: World, path: str
) -> None:
    """``module.parameters()`` is one; it used to be read twice, and was empty then."""
    model: Any = tiny_mlp()
    kept = model[0].weight.data_ptr()

    if path == "plan":
        made = plan(model, world_size=1, ignored_states=model[0].parameters())
        assert made.units[0].regions[0].numel == 12 * 8 + 8
        return
    door: Any = fully_shard if path == "composable" else FullyShardedDataParallel
    door(model, ignored_states=model[0].parameters())

    assert model[0].weight.data_ptr() == kept


def test_a_pair_of_groups_that_is_no_grid_is_refused() -> None:
    """The same two ranks cannot both share parameters and hold copies."""
    with fake_world(2) as world:
        group = world.group
        with pytest.raises(PlanError, match=r"one rank in common; got ranks \[0, 1\]"):
            fully_shard(tiny_mlp(), process_group=(group, group))
        assert dist.is_initialized()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("below", [True, False])
def test_torchscript_is_refused_by_name(one_rank: World, below: bool) -> None:
    """Its parameters cannot be swapped, at the top or inside."""
    script = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(script) if below else script

    name = "'0'" if below else r"\(root\)"
    with pytest.raises(PlanError, match=rf"{name} is compiled by TorchScript"):
        fully_shard(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is absent")
def test_a_device_that_is_not_there_is_refused(one_rank: World) -> None:
    """An index means a GPU."""
    with pytest.raises(PlanError, match=r"device is cuda:0 \(device_id=0\)"):
        fully_shard(tiny_mlp(), device_id=0)


def test_a_sharded_module_is_not_pickled(one_rank: World) -> None:
    """``torch.save(model)`` is told what to save."""
    model = fully_shard(tiny_mlp())

    with pytest.raises(TypeError, match=r"Save module.state_dict\(\) instead"):
        pickle.dumps(model)


def test_torchs_own_way_to_checkpoint_is_taken_by_name() -> None:
    """A script may import the enum from torch and the wrapper from here."""
    wrapped = checkpoint_wrapper(
        nn.Linear(2, 2),
        torch_names.CheckpointImpl.REENTRANT,  # type: ignore[arg-type]  # as such scripts do
    )

    assert isinstance(wrapped, CheckpointWrapper)
    assert wrapped.checkpoint_impl.name == "REENTRANT"


def test_the_norm_of_complex_gradients_is_that_of_torch(one_rank: World) -> None:
    """Of absolute values, as a real number."""
    plain = nn.Linear(3, 2, dtype=torch.complex64)
    torch.manual_seed(0)
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])  # type: ignore[misc]  # they are set

    norm = clip_grad_norm_(plain, 0.1)

    assert torch.allclose(norm, expected)
