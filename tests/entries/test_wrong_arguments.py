"""What a wrong call gets: the argument, what came, and the way out; nothing changes."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp as cf
from composable_fsdp.naming import listed
from tests.support.models import tiny_mlp
from tests.support.reference import backward
from tests.support.sharded import message_of
from tests.support.world import World

Wrong = Callable[[Any, Path], object]
api: Any = cf
"""The package without types: every call is a mistake."""


def wrapped(module: Any, **options: Any) -> Any:
    return api.FullyShardedDataParallel(module, **options)


def imported(name: str) -> Wrong:
    """``from composable_fsdp import name``."""
    return lambda m, path: exec(f"from composable_fsdp import {name}", {})


ALONE: dict[str, Wrong] = {
    r"FullyShardedDataParallel needs a process group.*torchrun": lambda m, p: wrapped(
        m
    ),
    r"replicate needs a process group.*init_process_group\(\)": (
        lambda m, p: api.replicate(m)
    ),
    r"is an empty directory.*manifest\.json": lambda m, p: api.load(p, m),
    r"FULL_SHARD for True.*composable_fsdp\.fsdp2": (
        lambda m, p: api.plan(m, world_size=2, reshard_after_forward=8)
    ),
    r"device_mesh \(here: world_size, and shard": (
        lambda m, p: api.plan(m, device_mesh=None)
    ),
    r"unit \(did you mean units\?\)": lambda m, p: api.plan(m, world_size=2, unit=[]),
    r"ImportError.*Import FSDPModule from composable_fsdp\.fsdp2": imported(
        "FSDPModule"
    ),
    r"ImportError.*here: MixedPrecision\(\.\.\.\), passed as mixed_precision": (
        imported("MixedPrecisionPolicy")
    ),
}


@pytest.mark.req("N-09")
@pytest.mark.parametrize("text", ALONE)
def test_a_wrong_call_without_ranks_says_the_way_out(text: str, tmp_path: Path) -> None:
    """By the API that was called."""
    found = message_of(lambda: ALONE[text](tiny_mlp(), tmp_path))

    assert re.search(text, found, re.DOTALL), found


def one_argument(module: nn.Module) -> bool:
    """A policy of another library."""
    return True


def an_operator(m: Any, path: Path) -> object:
    cf.set_state_dict_type(cf.fully_shard(m), cf.StateDictType.SHARDED_STATE_DICT)
    return torch.mv(next(iter(m.state_dict().values())), torch.ones(2))


def export_twice(m: Any, path: Path) -> None:
    cf.storage.export_safetensors(path / "out", cf.fully_shard(m))
    cf.storage.export_safetensors(path / "out", m)


def another_dtype(m: Any, path: Path) -> None:
    cf.save(path / "run", cf.fully_shard(m))
    cf.load(path / "run", cf.fully_shard(tiny_mlp().bfloat16()))


def another_shape_assigned(m: Any, path: Path) -> None:
    model = cf.fully_shard(tiny_mlp())
    model[0].weight = nn.Parameter(torch.zeros(1, 1))
    model(torch.ones(1, 8))


def block_without_with(m: Any, path: Path) -> None:
    """Raise the warning that Python prints when the block is collected."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cf.unshard_params(cf.fully_shard(tiny_mlp()))
    raise told[0].message  # type: ignore[misc]  # a Warning


def tensor_parallel_mesh(m: Any, path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    cf.fully_shard(m, device_mesh=mesh["tp"])


def sharded() -> Any:
    return cf.fully_shard(tiny_mlp())


REFUSED: dict[str, Wrong] = {
    r"expects 1 positional argument\(s\).*and got 2.*by keyword": (
        lambda m, p: api.fully_shard(m, 1)
    ),
    r"mixed_precison \(did you mean mixed_precision\?\).*It takes process_group, dev": (
        lambda m, p: api.fully_shard(m, mixed_precison=None)
    ),
    r"mesh \(here: device_mesh\)": lambda m, p: api.fully_shard(m, mesh=None),
    r"device_id expects a torch\.device.*'gpu:0'": (
        lambda m, p: api.fully_shard(m, device_id="gpu:0")
    ),
    r"'error' or 'skip', got 'replace'": (
        lambda m, p: api.fully_shard(m, if_sharded="replace")
    ),
    r"which takes \(module.*pass CustomPolicy\(function\)": (
        lambda m, p: api.fully_shard(m, policy=one_argument)
    ),
    r"bind them with functools\.partial": (
        lambda m, p: api.fully_shard(m, policy=api.wrap.transformer_auto_wrap_policy)
    ),
    r"TypeError: ignored_modules expects a list, got a Linear\. Pass \[it\]\.": (
        lambda m, p: api.fully_shard(m, ignored_modules=m[0])
    ),
    r"TypeError: ignored_states expects a list, got a Parameter": (
        lambda m, p: api.fully_shard(m, ignored_states=m[0].weight)
    ),
    r"fully_shard expects a list of modules, got a Parameter at position 0\.": (
        lambda m, p: api.fully_shard(list(m.parameters()))
    ),
    r"replicate expects one module, got a list": lambda m, p: api.replicate(
        [m, tiny_mlp()]
    ),
    r"TypeError: FullyShardedDataParallel expects a module, got a list\.": (
        lambda m, p: wrapped([m])
    ),
    r"TypeError: plan expects a module, got a list\.": (
        lambda m, p: api.plan([m], world_size=2)
    ),
    r"policy \(here: auto_wrap_policy\)": lambda m, p: wrapped(m, policy=None),
    r"composable_fsdp\.access\.set_requires_gradient_sync\(model, \.\.\.\)": (
        lambda m, p: wrapped(tiny_mlp()).set_requires_gradient_sync(True)
    ),
    r"TypeError: CustomPolicy expects a function of a module, got a int\.": (
        lambda m, p: api.CustomPolicy(3)
    ),
    r"SizePolicy expects min_numel >= 0, got 'big'\.": (
        lambda m, p: api.wrap.SizePolicy("big")
    ),
    r"CPUOffload\(offload_params=\.\.\.\) expects True or False, got 'yes'": (
        lambda m, p: api.CPUOffload("yes")
    ),
    r"OptimStateKeyType\.PARAM_NAME": (
        lambda m, p: api.optim.rekey_optim_state_dict({}, 1, m)
    ),
    r"clip_grad_norm_ expects a module or parameters, got a NoneType\.": (
        lambda m, p: api.clip_grad_norm_(None, 1.0)
    ),
    r"clip_grad_norm_ expects a number for max_norm, got '1'": (
        lambda m, p: api.clip_grad_norm_(sharded(), "1")
    ),
    r"looks at the gradients of parameters.*torch\.isfinite\(tensor\)": (
        lambda m, p: api.features.find_nonfinite(sharded()(torch.ones(2, 8)).sum())
    ),
    r"TypeError: CheckpointWrapper expects a module, got a NoneType\.": (
        lambda m, p: api.doors.checkpoint_wrapper.checkpoint_wrapper(None)
    ),
    r"checkpoint_impl expects one of CheckpointImpl\.REENTRANT": (
        lambda m, p: api.doors.checkpoint_wrapper.checkpoint_wrapper(
            m, checkpoint_impl="fast"
        )
    ),
    r"whose parameter '.*is fully sharded.*torchrun": (
        lambda m, p: nn.DataParallel(sharded())
    ),
    r"fully_shard got an nn\.DataParallel.*\.module.*torchrun": (
        lambda m, p: api.fully_shard(nn.DataParallel(tiny_mlp()))
    ),
    r"expects a whole tensor of shape.*value\.full_tensor\(\)": (an_operator),
    r"^TypeError.* options; did you mean options=SaveOptions\(keep=2\)\?": (
        lambda m, p: api.save(p, m, keep=2)
    ),
    r"^TypeError.* did you mean options=LoadOptions\(strict=0\)\?": (
        lambda m, p: api.load(p, m, strict=0)
    ),
    r"Save module\.state_dict\(\) instead": lambda m, p: pickle.dumps(sharded()),
    r"no fully sharded module; there are such modules below it": (
        lambda m, p: api.unshard(nn.Sequential(sharded()))
    ),
    r"got 1-D, dims named 'tp'.*must not be passed": tensor_parallel_mesh,
    r"unshard_params\(\.\.\.\) without `with` did nothing": block_without_with,
    r"^TypeError: .*unexpected keyword argument 'write_back'": (
        lambda m, p: api.unshard_params(m, write_back=True)
    ),
    r"exists already.*another name": export_twice,
    r"Of another dtype: '0\.weight'.*cast=True converts dtypes": another_dtype,
    r"Parameter '0\.weight' was changed.*found \(1, 1\).*set_full_param": (
        another_shape_assigned
    ),
    r"'0' is compiled by TorchScript": (
        lambda m, p: api.fully_shard(nn.Sequential(torch.jit.script(nn.ReLU())))
    ),
}


@pytest.mark.req("U-02", "N-09")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_call_is_named_and_the_model_goes_on(
    one_rank: World, text: str, tmp_path: Path
) -> None:
    """The module is as it was: it can be sharded and trains."""
    model: Any = tiny_mlp()

    found = message_of(lambda: REFUSED[text](model, tmp_path))

    assert re.search(text, found, re.DOTALL), found
    assert isinstance(model[0].weight, nn.Parameter)
    cf.fully_shard(model, if_sharded="skip")
    backward(model(torch.ones(1, 8)).sum())


def functions() -> dict[str, Any]:
    """The public functions of two arguments or more that may be passed by position."""
    homes = [cf, cf.access, cf.features, cf.optim, cf.storage, cf.tools]
    found = {name: getattr(home, name) for home in homes for name in home.__all__}
    return {
        name: function
        for name, function in found.items()
        if inspect.isfunction(function)
        # The backward alone calls hooks; map_on_owners begins with two lists.
        if len(positional(function)) > 1 and not name.endswith(("_hook", "_owners"))
    }


def positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.req("N-09")
@pytest.mark.parametrize("name", functions())
def test_a_swapped_first_argument_is_named(
    one_rank: World, name: str, tmp_path: Path
) -> None:
    """The function, or the argument, says what it expects; nothing is written."""
    model, function = sharded(), functions()[name]
    optimizer = torch.optim.AdamW(model.parameters())
    values = dict.fromkeys(("module", "model", "module_or_params", "source"), model)
    values.update(optim=optimizer, path=str(tmp_path / "new"), fqn="0.weight")
    values.update(max_norm=1.0, norm_type=2.0, name="generate", to="dcp", extra={})
    second, first, *rest = (values.get(each, object()) for each in positional(function))

    # A context manager looks at its arguments when the block begins.
    text = message_of(lambda: ExitStack().enter_context(function(first, second, *rest)))

    told_by = "|".join([name.removeprefix("async_"), *positional(function)])
    assert re.match(rf"(Type|Value)Error: ({told_by}) expects ", text), text
    assert not any(tmp_path.iterdir())


@pytest.mark.req("N-09")
@pytest.mark.parametrize(
    "name",
    [n for n, function in functions().items() if "optim" in positional(function)],
)
def test_optimizer_is_another_name_of_optim(name: str) -> None:
    """In every public function with an ``optim``; both at once are refused."""
    text = message_of(lambda: functions()[name](optim=None, optimizer=None))

    assert "optim= and optimizer=, two names of one argument" in text


def test_a_checkpoint_is_saved_and_loaded_by_the_other_name(
    one_rank: World, tmp_path: Path
) -> None:
    """``optimizer=`` reaches ``optim``."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    api.save(tmp_path / "run", model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.1

    api.load(tmp_path / "run", model, optimizer=optimizer)

    assert optimizer.param_groups[0]["lr"] == 0.5


VERBS: dict[str, Callable[[Any], object]] = {
    "unshard": cf.unshard,
    "is_sharded": cf.is_sharded,
    "unshard_params": lambda m: cf.unshard_params(m).__enter__(),
    "unshard_params(recurse=False)": (
        lambda m: cf.unshard_params(m, recurse=False).__enter__()
    ),
    "no_sync": lambda m: cf.no_sync(m).__enter__(),
    "set_requires_gradient_sync": (
        lambda m: cf.access.set_requires_gradient_sync(m, True)
    ),
    "register_forward_method('forward')": (
        lambda m: cf.register_forward_method(m, "forward")
    ),
}


@pytest.mark.req("U-02")
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_of_something_else_than_a_unit_is_refused(
    one_rank: World, name: str
) -> None:
    """By the kind of thing; a submodule names the unit above it, with its name once
    the first forward has run."""
    plain = name.removesuffix("('forward')")
    for given in (None, [nn.Linear(2, 2)], torch.ones(2)):
        text = message_of(lambda: VERBS[name](given))  # noqa: B023  # called now
        kind = type(given).__name__
        assert text.startswith(f"TypeError: {plain} expects a module, got a {kind}.")
    if name == "unshard_params":
        return
    model = sharded()
    for above in ("Sequential", "Sequential (root)"):
        text = message_of(lambda: VERBS[name](model[0]))
        start = f"CompositionError: {name} was called on a Linear that "
        assert text.startswith(start)
        assert f"belong to the fully sharded {above} above it. Pass that" in text
        model(torch.ones(1, 8))


@pytest.mark.req("N-09")
def test_lists_are_short_and_absent_paths_are_not_called_damaged(
    tmp_path: Path,
) -> None:
    """Five items at most, and the number of the others."""
    assert listed("abcde") == "a, b, c, d, e"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert "damaged" not in str(cf.verify(tmp_path / "none"))
    assert "is an empty directory" in str(cf.verify(tmp_path))


@pytest.mark.req("N-09")
def test_names_of_fsdp2_stay_unknown_to_questions() -> None:
    """Asking for a name of FSDP2 raises nothing."""
    assert not hasattr(cf, "FSDPModule")
