"""What a newcomer does wrong first, and the words that the answer has to contain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp
from composable_fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    StateDictType,
    clip_grad_norm_,
    export_safetensors,
    find_nonfinite,
    fully_shard,
    load,
    plan,
    replicate,
    save,
    set_state_dict_type,
    unshard_params,
    verify,
)
from composable_fsdp.doors.fsdp2_module import FSDPModule
from composable_fsdp.doors.wrapper_attributes import FUNCTIONS
from composable_fsdp.naming import listed
from tests.support.models import tiny_mlp
from tests.support.sharded import message_of
from tests.support.world import World

Misuse = Callable[[Path], object]


def import_of(name: str) -> Misuse:
    """``from composable_fsdp import name``."""

    def run(_: Path) -> None:
        exec(f"from composable_fsdp import {name}", {})

    return run


def without_group(path: Path) -> object:
    return load(path / "none", tiny_mlp())


ALONE: dict[str, tuple[Misuse, tuple[str, ...]]] = {
    "the wrapper without a group": (
        lambda _: FullyShardedDataParallel(tiny_mlp()),
        ("FullyShardedDataParallel needs a process group", "torchrun"),
    ),
    "replicate without a group": (
        lambda _: replicate(tiny_mlp()),
        ("replicate needs a process group", "init_process_group()"),
    ),
    "a path that does not exist": (
        without_group,
        ("none does not exist; ", "holds nothing", "manifest.json"),
    ),
    "an empty directory": (
        lambda path: load(path, tiny_mlp()),
        ("is an empty directory", "manifest.json"),
    ),
    "names of FSDP2 for plan": (
        lambda _: plan(tiny_mlp(), world_size=2, reshard_after_forward=8),  # type: ignore[call-arg]  # meant
        ("ShardingStrategy.FULL_SHARD for True", "composable_fsdp.fsdp2"),
    ),
    "an import of FSDPModule": (
        import_of("FSDPModule"),
        ("ImportError", "Import FSDPModule from composable_fsdp.fsdp2"),
    ),
    "an import of MixedPrecisionPolicy": (
        import_of("MixedPrecisionPolicy"),
        ("ImportError", "here: MixedPrecision(...), passed as mixed_precision"),
    ),
}


@pytest.mark.req("N-09")
@pytest.mark.parametrize("case", ALONE)
def test_a_misuse_without_ranks_says_the_way_out(case: str, tmp_path: Path) -> None:
    """By the API that was called."""
    act, words = ALONE[case]

    text = message_of(lambda: act(tmp_path))

    assert [word for word in words if word not in text] == [], text


def data_parallel(_: Path) -> object:
    return nn.DataParallel(fully_shard(tiny_mlp()))


def tied(_: Path) -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    return fully_shard(model[1])


def two_dtypes(_: Path) -> object:
    model = tiny_mlp()
    fully_shard(model[0], mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    return fully_shard(model)(torch.ones(1, 8))


def an_operator(_: Path) -> object:
    model = fully_shard(tiny_mlp())
    set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return next(iter(model.state_dict().values())) @ torch.ones(2)


def export_twice(path: Path) -> None:
    model = fully_shard(tiny_mlp())
    export_safetensors(path / "out", model)
    export_safetensors(path / "out", model)


def other_shapes(path: Path) -> None:
    save(path / "run", fully_shard(tiny_mlp()))
    load(
        path / "run", fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))))
    )


def another_dtype(path: Path) -> None:
    save(path / "run", fully_shard(tiny_mlp()))
    load(path / "run", fully_shard(tiny_mlp().bfloat16()))


def no_optimizer(path: Path) -> None:
    model = fully_shard(tiny_mlp())
    save(path / "run", model)
    load(path / "run", model, torch.optim.SGD(model.parameters()))


def another_shape_assigned(_: Path) -> None:
    model = fully_shard(tiny_mlp())
    model[0].weight = nn.Parameter(torch.zeros(1, 1))
    model(torch.ones(1, 8))


def block_without_with(_: Path) -> None:
    """Raise the warning that Python prints when the block is collected."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        unshard_params(fully_shard(tiny_mlp()))
    raise told[0].message  # type: ignore[misc]  # a Warning


ON_A_RANK: dict[str, tuple[Misuse, tuple[str, ...]]] = {
    "a positional argument": (
        lambda _: fully_shard(tiny_mlp(), 1),  # type: ignore[arg-type, call-arg]  # meant
        ("fully_shard expects 1 positional argument(s)", "and got 2", "by keyword"),
    ),
    "a device that is none": (
        lambda _: fully_shard(tiny_mlp(), device_id="gpu:0"),  # type: ignore[arg-type]  # meant
        ("device_id expects a torch.device", "'gpu:0'"),
    ),
    "a policy of one module": (
        lambda _: fully_shard(tiny_mlp(), policy=lambda m: True),
        ("which takes (m)", "pass CustomPolicy(function)"),
    ),
    "a wrapper with fully_shard's names": (
        lambda _: FullyShardedDataParallel(  # type: ignore[call-arg]  # meant
            tiny_mlp(), policy=ModuleWrapPolicy({nn.Linear})
        ),
        ("policy (here: auto_wrap_policy)",),
    ),
    "a method of FSDP2 on the wrapper": (
        lambda _: FullyShardedDataParallel(tiny_mlp()).set_requires_gradient_sync(True),
        ("composable_fsdp.set_requires_gradient_sync(model, ...)",),
    ),
    "DataParallel around it": (
        data_parallel,
        ("whose parameter '", "is fully sharded", "torchrun"),
    ),
    "ties over two calls": (
        tied,
        ("In this Linear, parameter 'weight' is tied to", "fully_shard([", "promote"),
    ),
    "units of two dtypes": (
        two_dtypes,
        ("units compute in different dtypes", "cast_forward_inputs=True"),
    ),
    "an operator on a sharded value": (
        an_operator,
        ("expects a whole tensor of shape", "value.full_tensor()"),
    ),
    "a norm that is no number": (
        lambda _: clip_grad_norm_(fully_shard(tiny_mlp()), "abc"),  # type: ignore[arg-type]  # meant
        ("clip_grad_norm_ expects a number for max_norm, got 'abc'",),
    ),
    "a norm in a text": (
        lambda _: clip_grad_norm_(fully_shard(tiny_mlp()), "1"),  # type: ignore[arg-type]  # meant
        ("clip_grad_norm_ expects a number for max_norm, got '1'",),
    ),
    "a loss looked at for NaN": (
        lambda _: find_nonfinite(fully_shard(tiny_mlp())(torch.ones(2, 8)).sum()),
        ("looks at the gradients of parameters", "torch.isfinite(tensor)"),
    ),
    "DataParallel inside": (
        lambda _: fully_shard(nn.DataParallel(tiny_mlp())),
        ("fully_shard got an nn.DataParallel", ".module", "torchrun"),
    ),
    "a mesh dim of tensor parallelism": (
        lambda _: fully_shard(
            tiny_mlp(),
            device_mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))[
                "tp"
            ],
        ),
        ("dimension named 'tp'", "Pass a mesh of data-parallel ranks"),
    ),
    "a block without with": (
        block_without_with,
        ("unshard_params(...) without `with` did nothing",),
    ),
    "an export that is there": (export_twice, ("exists already", "another name")),
    "a checkpoint of another model": (
        other_shapes,
        ("load: the checkpoint", " and 31 more.", "that was saved."),
    ),
    "a checkpoint of another dtype": (
        another_dtype,
        ("Of another dtype: '0.weight'", "cast=True) converts dtypes"),
    ),
    "a checkpoint without an optimizer": (
        no_optimizer,
        ("saved without an optimizer", "load(path, model) without the optimizer"),
    ),
    "a parameter of another shape": (
        another_shape_assigned,
        ("Parameter '0.weight' was changed", "found (1, 1)", "set_full_param"),
    ),
}


@pytest.mark.req("N-09")
@pytest.mark.parametrize("case", ON_A_RANK)
def test_a_misuse_says_what_was_expected_and_the_way_out(
    one_rank: World, case: str, tmp_path: Path
) -> None:
    """With the name of the argument or of the parameter."""
    act, words = ON_A_RANK[case]

    text = message_of(lambda: act(tmp_path))

    assert [word for word in words if word not in text] == [], text
    assert "save(" not in text or case != "an export that is there"


@pytest.mark.req("N-09")
def test_a_message_shows_five_items_at_most() -> None:
    """And the number of the others."""
    assert listed("abcde") == "a, b, c, d, e"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"


@pytest.mark.req("N-09")
def test_a_missing_path_is_not_called_damaged(tmp_path: Path) -> None:
    """Nor is an empty directory."""
    assert "damaged" not in str(verify(tmp_path / "none"))
    assert "is an empty directory" in str(verify(tmp_path))


@pytest.mark.req("N-09")
def test_names_of_fsdp2_stay_unknown_to_questions() -> None:
    """Asking for a name of FSDP2 raises nothing; the functions named are all that are.

    A method of ``FSDPModule`` that is no function here has no way out to tell.
    """
    assert not hasattr(composable_fsdp, "FSDPModule")
    assert set(composable_fsdp.__all__) & set(vars(FSDPModule)) == FUNCTIONS
