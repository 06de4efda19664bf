"""What bad input gets: an error that names the place and the way out, and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fsdp2

from composable_fsdp import (
    CompositionError,
    FSDPError,
    FullyShardedDataParallel,
    PhaseError,
    PlanError,
    ShardingStrategy,
    fully_shard,
    unshard_params,
)
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.reference import PATHS, backward, loss_of
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]
Snapshot = list[tuple[Any, ...]]

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def snapshot(model: nn.Module) -> Snapshot:
    """Everything an application could have changed, module by module."""
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            [len(getattr(module, hooks)) for hooks in _HOOKS],
            [
                (key, id(p), p.shape, p.data_ptr(), p.requires_grad)
                for key, p in module.named_parameters(recurse=False)
            ],
        )
        for name, module in model.named_modules()
    ]


def door(path: str) -> Callable[..., nn.Module]:
    """The entry of one path."""
    return fully_shard if path == "composable" else FullyShardedDataParallel


def refused(
    model: nn.Module,
    call: Callable[[], object],
    error: type[Exception],
    *parts: str,
) -> str:
    """Check that ``call`` raises, says all ``parts``, and leaves ``model`` alone."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)

    assert snapshot(model) == before
    assert [part for part in parts if part not in text] == [], text
    return text


# ---- applying ---------------------------------------------------------------


@pytest.mark.req("B-01", "S1-25", "S1-35")
@pytest.mark.parametrize("path", PATHS)
def test_a_second_application_is_refused(one_rank: World, path: str) -> None:
    """A module takes the API once; parameters and hooks stay those of the first."""
    model = fully_shard(tiny_mlp())

    refused(
        model,
        lambda: door(path)(model),
        CompositionError,
        "Sequential",
        "once",
        "Leave",
    )


@pytest.mark.req("S1-25")
@pytest.mark.parametrize("path", PATHS)
def test_a_child_of_a_unit_cannot_become_one_afterwards(
    one_rank: World, path: str
) -> None:
    """Its parameters belong to the parent: children come first."""
    model = fully_shard(TinyGPT())

    refused(
        model,
        lambda: door(path)(model.blocks[0]),
        CompositionError,
        "TinyBlock",
        "TinyGPT",
        "children first",
    )


@pytest.mark.req("B-02")
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
@pytest.mark.parametrize("path", PATHS)
def test_a_container_is_refused(
    one_rank: World, path: str, container: type[nn.Module]
) -> None:
    """Nothing calls a container, so nothing would ever unshard it."""
    inner = tiny_mlp()
    model = (
        nn.ModuleList([inner])
        if container is nn.ModuleList
        else nn.ModuleDict({"a": inner})
    )

    refused(
        model, lambda: door(path)(model), ValueError, container.__name__, "elements"
    )


@pytest.mark.req("D-10", "S0-07")
@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_tied_across_units_is_refused(one_rank: World, path: str) -> None:
    """Both places, their ancestor and the way out are named; nothing changes."""
    model = nn.Module()
    model.add_module("encoder", TinyGPT())
    model.encoder.head.weight = model.encoder.tokens.weight  # type: ignore[union-attr]
    policy = {nn.Embedding, nn.Linear}
    key = "policy" if path == "composable" else "auto_wrap_policy"

    def by_class(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or type(module) in policy

    refused(
        model,
        lambda: door(path)(model, **{key: by_class}),
        ValueError,
        "'encoder.tokens.weight'",
        "'encoder.head.weight'",
        "ancestor is 'encoder'",
        "tied_params='promote'",
    )


@pytest.mark.req("D-10", "X-29")
def test_a_parameter_tied_to_a_unit_made_by_hand_is_refused(one_rank: World) -> None:
    """The second call sees that the first one took the parameter."""
    model = TinyGPT(tied_head=True)
    fully_shard(model.tokens)

    refused(
        model,
        lambda: fully_shard(model),
        ValueError,
        "'head.weight'",
        "Embedding",
        "lowest module that holds both",
    )


@pytest.mark.req("X-34")
@pytest.mark.parametrize("path", PATHS)
def test_without_a_process_group_the_way_to_one_is_named(path: str) -> None:
    """No process group: what to call, and what needs none."""
    model = tiny_mlp()

    refused(
        model,
        lambda: door(path)(model),
        CompositionError,
        "init_process_group",
        "torchrun",
        "plan(",
    )


@pytest.mark.req("B-04")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", [None, ("a", "b", "c")])
def test_a_mesh_of_another_form_is_refused(
    one_rank: World, path: str, names: tuple[str, ...] | None
) -> None:
    """3-D is no ``(replicate, shard)``."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=names)
    model = tiny_mlp()

    refused(
        model,
        lambda: door(path)(model, device_mesh=mesh),
        ValueError,
        "1-D",
        "3-D",
        "mesh_dim_names",
    )


@pytest.mark.req("B-04")
@pytest.mark.parametrize("path", PATHS)
def test_a_mesh_whose_names_say_the_opposite_is_refused(
    one_rank: World, path: str
) -> None:
    """``(shard, replicate)`` would replicate where the user means to shard."""
    names = ("dp_shard", "dp_replicate")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
    model = tiny_mlp()

    refused(
        model,
        lambda: door(path)(model, device_mesh=mesh),
        ValueError,
        "dimension 0 to replicate",
        "'dp_shard' and 'dp_replicate'",
        "mesh_dim_names=('replicate', 'shard')",
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_mesh_with_ranks_of_other_parts_of_the_model_is_refused(
    one_rank: World, path: str
) -> None:
    """``("dp", "tp")`` given whole would average gradients of different rows."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = tiny_mlp()

    refused(
        model,
        lambda: door(path)(model, device_mesh=mesh),
        ValueError,
        "dimension named 'tp'",
        "Pass mesh['dp']",
        "_flatten('dp_cp')",
    )


def shard_on_mesh(world: World, ndim: int) -> tuple[int, int]:
    """Shard on a mesh; how many ranks cut the parameters, and how many copies exist."""
    model = tiny_mlp()
    if ndim == 1:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, device_mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    backward(loss_of(model, torch.ones(2, 8)))
    state = fully_shard.state(model)
    assert state is not None
    return state.handle.groups.shard_world_size, state.handle.groups.replicas


@pytest.mark.req("B-04")
@pytest.mark.parametrize(("ndim", "sizes"), [(1, (2, 1)), (2, (1, 2))])
def test_a_mesh_of_a_known_form_says_who_shards(
    ranks: RankCount, ndim: int, sizes: tuple[int, int]
) -> None:
    """1-D shards; 2-D with names replicates over the first dim."""
    assert ranks(2).run(shard_on_mesh, ndim) == [sizes] * 2


@pytest.mark.parametrize("path", PATHS)
def test_a_policy_that_names_a_foreign_module_is_refused(
    one_rank: World, path: str
) -> None:
    """A policy answers about the tree that it was asked about."""
    model, other = tiny_mlp(), TinyGPT()
    key = "policy" if path == "composable" else "auto_wrap_policy"

    def foreign(root: nn.Module, ignored: object, kwargs: dict[str, Any]) -> object:
        return {other.blocks[0]: kwargs}

    refused(
        model,
        lambda: door(path)(model, **{key: foreign}),
        PlanError,
        "TinyBlock",
        "Sequential",
        "root.modules()",
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (
            lambda m: TorchFSDP1(
                m, use_orig_params=True, device_id=torch.device("cpu")
            ),
            "FSDP1",
        ),
        (torch_fsdp2, "FSDP2"),
    ],
)
def test_torchs_own_fsdp_in_the_tree_is_refused(
    one_rank: World, path: str, wrap: Callable[..., nn.Module], name: str, below: bool
) -> None:
    """It is named with its place, inside or at the top, and the model stays its."""
    inner = wrap(tiny_mlp())
    model = nn.Sequential(nn.ReLU(), inner) if below else inner

    refused(
        model,
        lambda: door(path)(model),
        CompositionError,
        "'1'" if below else "(root)",
        name,
        "one of the two",
    )


@pytest.mark.req("S1-24")
def test_settings_that_must_be_equal_in_a_tree_are_compared(one_rank: World) -> None:
    """The first forward names both units and both values."""
    model = TinyGPT()
    fully_shard(model.blocks[1], limit_all_gathers=False)
    fully_shard(model)

    refused(
        model,
        lambda: model(torch.zeros(1, 2, dtype=torch.long)),
        ValueError,
        "limit_all_gathers",
        "(root) has True",
        "'blocks.1' has False",
    )


# ---- running ----------------------------------------------------------------


@pytest.mark.req("B-08")
def test_a_forward_with_parameters_on_meta_names_them(one_rank: World) -> None:
    """No kernel ever runs on meta: the first forward says which and what to do."""
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(2, 2))
    model = fully_shard(plain)

    refused(
        model,
        lambda: model(torch.ones(1, 2)),
        PlanError,
        "'0.weight'",
        "meta",
        "to_empty",
    )


class Summons(nn.Module):
    """Asks for full parameters of ``target`` in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.target: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by ``weight``."""
        for target in self.target:
            with unshard_params(target):
                pass
        return x @ self.weight


@pytest.mark.parametrize("path", PATHS)
def test_unshard_params_inside_forward_is_refused(one_rank: World, path: str) -> None:
    """Units are full by turns in forward; afterwards the same call works."""
    inner = Summons()
    model = door(path)(nn.Sequential(inner))
    inner.target.append(model)

    with pytest.raises(PhaseError, match=r"unshard_params .* inside the forward of"):
        model(torch.ones(1, 2))

    with unshard_params(model):
        assert inner.weight.shape == (2, 2)


@pytest.mark.parametrize("path", PATHS)
def test_unshard_params_does_not_nest(one_rank: World, path: str) -> None:
    """Two blocks would write the same shards; the outer one goes on."""
    model = door(path)(tiny_mlp())

    with unshard_params(model):
        with pytest.raises(PhaseError, match="after the block"), unshard_params(model):
            pass  # never entered
        with pytest.raises(PhaseError, match="after the block"):
            model(torch.ones(1, 8))

    backward(model(torch.ones(1, 8)).sum())


def test_unshard_params_inside_backward_is_refused(one_rank: World) -> None:
    """A hook of the graph may not ask for full parameters."""
    model = fully_shard(tiny_mlp())
    y = model(torch.ones(1, 8))

    def summon(gradient: Tensor) -> None:
        with unshard_params(model):
            pass

    y.register_hook(summon)
    with pytest.raises(PhaseError, match=r"inside backward.*after loss.backward\(\)"):
        backward(y.sum())


@pytest.mark.req("B-06")
def test_a_parent_applied_after_a_child_ran_is_refused(one_rank: World) -> None:
    """The child has begun as a root of its own; it is named."""
    model = TinyGPT()
    fully_shard(model.blocks[1])
    model.blocks[1](torch.ones(1, 2, 8))

    text = refused(
        model, lambda: fully_shard(model), CompositionError, "'blocks.1'", "TinyBlock"
    )
    assert "before its first forward" in text


def test_every_error_of_this_package_is_one_of_ours() -> None:
    """The classes caught above have one base, and the promised built-in one."""
    for ours, builtin in ((CompositionError, ValueError), (PhaseError, RuntimeError)):
        assert issubclass(ours, FSDPError)
        assert issubclass(ours, builtin)
    assert issubclass(PlanError, ValueError)
