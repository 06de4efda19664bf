"""Models, options and weights that differ between ranks are told before data moves.

Every rank raises the same error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    get_full_param,
    replicate,
    unshard,
    unshard_params,
)
from composable_fsdp.comm import collectives
from composable_fsdp.errors import PlanError
from composable_fsdp.features import flat_parameters
from tests.faults.fingerprints import (
    OPTIONS,
    SETTINGS,
    SHAPE,
    Outcome,
    build,
    outcome,
    shard,
    step,
    with_other_shape,
    wrapped,
)
from tests.parallel.models import forget_meshes
from tests.support.on_ranks import on_ranks
from tests.support.sharded import RankCount
from tests.support.world import World, fake_world, single_rank_group

NO_SHARD = ShardingStrategy.NO_SHARD


def agreed(outcomes: list[Outcome]) -> Outcome:
    assert all(each == outcomes[0] for each in outcomes), outcomes
    return outcomes[0]


# Models and options


@pytest.mark.req("X-09", "X-10", "X-11")
@on_ranks(2)
def test_an_option_of_one_rank_is_told_by_name_on_every_rank(world: World) -> None:
    """The first difference, both values, and which rank has which, before a parameter
    is gathered."""
    found, is_odd = [], world.rank == 1
    for options in OPTIONS.values():
        model = shard(build(), **(options if is_odd else {}))
        with collectives.record() as calls:
            found.append(outcome(partial(step, model)))
        assert {c.op for c in calls} == {"all_gather_digests", "all_gather_object"}
    for change in SETTINGS.values():
        model = shard(build())
        if is_odd:
            change(model)
        found.append(outcome(partial(step, model)))

    assert world.all_equal(found)
    for told, (error, warned) in zip((*OPTIONS, *SETTINGS), found, strict=True):
        assert error is not None
        assert told in error
        assert "No parameter has been sent yet." in error
        assert warned == ()


@pytest.mark.req("X-11")
@on_ranks(2)
def test_a_wrapped_rank_goes_with_an_unwrapped_one(world: World) -> None:
    """Both doors issue the same collectives, so nothing differs."""
    model = wrapped() if world.rank else shard(build())

    assert outcome(lambda: step(model)) == Outcome(None, ())


ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "forward": step,
    "forward of a part": lambda model: model.get_submodule("0")(torch.ones(1, 4)),
    "evaluation": lambda model: torch.no_grad()(step)(model.eval()),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a unit": lambda model: model.get_submodule("0").state_dict(),
    "state_dict of a part": lambda model: model.get_submodule("0.first").state_dict(),
    "unshard_params": lambda model: unshard_params(model).__enter__(),
    "unshard": unshard,
    "get_full_param": lambda model: get_full_param(model, "1.scale"),
}


@pytest.mark.req("X-10", "D-16")
@on_ranks(2)
def test_models_are_compared_before_whatever_gathers_first(world: World) -> None:
    """A full state dict or a block of ``unshard_params`` may come before a forward."""
    for enter in ENTRIES.values():
        model = with_other_shape(is_changed=world.rank == 1)
        with collectives.record() as calls:
            found = outcome(partial(enter, model))
        assert {c.op for c in calls} == {"all_gather_digests", "all_gather_object"}
        assert SHAPE in str(found.error)
        # Nothing is remembered of a comparison that failed.
        assert outcome(partial(enter, model)) == found


@on_ranks(2)
def test_equal_models_are_compared_once(world: World) -> None:
    """One exchange of 64 bytes per tree, whatever gathers first, and none later."""
    for entry in ("forward", "state_dict", "unshard", "get_full_param"):
        model = shard(build())
        with collectives.record() as calls:
            ENTRIES[entry](model)
        assert [c.nbytes for c in calls if "digest" in c.op] == [64 * 2]
        assert not [c for c in calls if "object" in c.op]

        with collectives.record() as calls:
            step(model)
            model.state_dict()
        assert not [c for c in calls if "digest" in c.op or "object" in c.op]


@on_ranks(2)
def test_a_tree_that_grows_is_compared_again(world: World) -> None:
    """A state dict of a unit does not stand for the units above."""
    model = build()
    for layer in model:
        fully_shard(layer)
    model.state_dict()
    if world.rank == 1:
        model.register_parameter("bias", nn.Parameter(torch.ones(1)))
    fully_shard(model)

    found = outcome(lambda: step(model))

    assert found.error is not None
    assert "'bias' on rank 1" in found.error


@on_ranks(2)
def test_a_copy_is_compared_as_a_tree_of_its_own(world: World) -> None:
    """And its weights are those of the original, also where these differ by now."""
    model = shard(build(seed=world.rank))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    twin_of_zeros = copy.deepcopy(model)
    part_written = shard(build(seed=world.rank))
    with torch.no_grad():
        for name, parameter in part_written.named_parameters():
            if name.endswith("weight"):
                parameter.zero_()
    part_written = copy.deepcopy(part_written)

    assert len(outcome(lambda: step(part_written)).warnings) == 1
    assert len(outcome(lambda: step(twin)).warnings) == 1
    assert outcome(lambda: step(model)) == Outcome(None, ())
    assert outcome(lambda: step(twin_of_zeros)) == Outcome(None, ())


# Groups


@pytest.mark.req("X-09", "D-07")
@on_ranks(4)
def test_other_groups_are_told_on_every_rank(world: World) -> None:
    """Ranks with other groups compare over the default group, so nobody waits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows, columns = mesh.get_group(1), mesh.get_group(0)
    pair = (columns, rows) if world.rank == 3 else (rows, columns)
    model = shard(build(), process_group=pair)

    error, _ = outcome(lambda: step(model))

    assert "Ranks disagree on who shares parameters" in str(error)
    assert "ranks 2-3 on rank 2, ranks 1, 3 on rank 3" in str(error)


@pytest.mark.req("X-09", "D-07")
@on_ranks(4)
def test_a_replica_may_evaluate_and_save_alone(world: World) -> None:
    """It compares its own ranks; the first step compares all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = with_other_shape(is_changed=world.rank == 3, device_mesh=mesh)
    if world.rank < 2:
        with torch.no_grad():
            model(torch.ones(1, 4))
        model.state_dict()
    world.barrier()

    error, _ = outcome(lambda: step(model))

    assert "(8,) on ranks 0-2, (4, 2) on rank 3" in str(error)


def test_a_single_rank_and_a_fake_group_compare_nothing() -> None:
    """No collective, and no hash is computed."""
    for world in (single_rank_group(), fake_world(8)):
        with world, collectives.record() as calls:
            model = shard(build())
            model.state_dict()
            step(model)
        assert not [c for c in calls if "digest" in c.op or "object" in c.op]


# Weights


def check_weights(world: World, strategy: str, how: dict[str, Any]) -> Outcome:
    """Each rank builds from its own seed."""
    mesh = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = build(seed=world.rank)
    shard(model, strategy=ShardingStrategy[strategy], device_mesh=mesh, **how)
    return outcome(lambda: step(model))


@pytest.mark.req("X-13", "D-16")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_different_weights_are_warned_of_once(ranks: RankCount, strategy: str) -> None:
    """The first parameter, and which rank has its own values."""
    (text,) = agreed(ranks(2).run(check_weights, strategy, {})).warnings

    assert "'0.first.weight' has other values on rank 0 than on rank 1" in text
    assert "parameters of 2 more units" in text
    assert ("stay different for ever" in text) is (strategy != "FULL_SHARD")


@pytest.mark.req("X-13")
def test_check_weights_refuses_syncs_or_is_silent_as_told(ranks: RankCount) -> None:
    """An error on all ranks; nothing after a broadcast, or if told so."""

    def run(**how: Any) -> Outcome:
        return agreed(ranks(2).run(check_weights, "NO_SHARD", how))

    error, warned = run(check_weights="error")
    assert error is not None
    assert "parameter '0.first.weight' has other values" in error
    assert warned == ()
    assert run(check_weights="off") == Outcome(None, ())
    assert run(sync_module_states=True, check_weights="error") == Outcome(None, ())


def loaded(world: World) -> nn.Module:
    model = shard(build(seed=world.rank), strategy=NO_SHARD)
    model.load_state_dict(build(seed=5).state_dict())
    return model


def broadcast(world: World) -> nn.Module:
    # Through ``.data``, which no version counts.
    model = shard(build(seed=world.rank), strategy=NO_SHARD)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return model


def broadcast_flat(world: World) -> nn.Module:
    model = shard(build(seed=world.rank), strategy=NO_SHARD)
    for parameter in flat_parameters(model):
        dist.broadcast(parameter.data, src=0)
    return model


def from_meta(world: World) -> nn.Module:
    # The values of a rank on meta come later; the other's are not held against it.
    with torch.device("meta" if world.rank else "cpu"):
        model = build()
    shard(model).to_empty(device="cpu")
    model.load_state_dict(build().state_dict())
    return model


def written_by_one(world: World) -> nn.Module:
    model = shard(build(), strategy=NO_SHARD)
    if world.rank == 1:
        model.get_parameter("2.scale").data.zero_()
    return model


def replaced_in_a_block(world: World) -> nn.Module:
    # Whose gather is the first one.
    model = shard(build(seed=world.rank))
    with unshard_params(model), torch.no_grad():
        for each in model.parameters():
            each.fill_(0.5)
    return model


WEIGHTS: tuple[tuple[Callable[[World], nn.Module], str], ...] = (
    (loaded, ""),
    (broadcast, ""),
    (broadcast_flat, ""),
    (from_meta, ""),
    (replaced_in_a_block, ""),
    (written_by_one, "parameter '2.scale' has other values on rank 0 than on rank 1."),
)


@on_ranks(2)
def test_values_at_the_first_step_are_the_ones_that_count(world: World) -> None:
    """What has been loaded, sent or written since the model was sharded."""
    for make, told in WEIGHTS:
        found = outcome(lambda make=make: step(make(world)))  # type: ignore[misc]  # a default
        assert found.error is None
        assert len(found.warnings) == bool(told), make
        assert all(told in text for text in found.warnings)


@on_ranks(2)
def test_an_error_is_chosen_before_a_warning(world: World) -> None:
    """Units have their own ``check_weights``."""
    model = build(seed=world.rank)
    hows: list[Any] = ["warn", "off", "error"]
    for layer, how in zip(model, hows, strict=True):
        fully_shard(layer, check_weights=how)
    fully_shard(model, check_weights="off")

    error, warned = outcome(lambda: step(model))

    assert "parameter '2.first.weight'" in str(error)
    assert warned == ()


def test_check_weights_is_checked_and_compared() -> None:
    """A wrong value is refused, and ``if_sharded="skip"`` sees another value."""
    with fake_world(2):
        doors: list[Any] = [fully_shard, replicate, FullyShardedDataParallel]
        for apply in doors:
            with pytest.raises(PlanError, match="'warn', 'error' or 'off', got 'no'"):
                apply(build(), check_weights="no")
        model = fully_shard(build(), check_weights="off")
        assert fully_shard(model, check_weights="off", if_sharded="skip") is model
        with pytest.raises(ValueError, match="has check_weights=off"):
            fully_shard(model, if_sharded="skip")


# ---- ranks that hold other parts of a model ----


class Block(nn.Module):
    """A normalization, which no rank cuts, and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def tensor_parallel(mesh: DeviceMesh, seed: int, **options: Any) -> nn.Module:
    """Two blocks whose matrices are cut over ``tp``, sharded over ``dp``."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, device_mesh=mesh["dp"], **options)
    return fully_shard(model, device_mesh=mesh["dp"], **options)


def differ_over_tp(world: World, seeds: bool, options: dict[str, Any]) -> Outcome:
    """The ranks of the second tensor-parallel index have another seed or options."""
    forget_meshes()
    shape = (world.world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    odd = world.rank % 2
    model = tensor_parallel(mesh, odd * seeds, **(options if odd else {}))
    return outcome(lambda: model(torch.ones(2, 8)).sum().backward())


@pytest.mark.req("X-09", "X-13")
def test_tensor_parallel_ranks_compare_what_is_not_cut(ranks: RankCount) -> None:
    """Options, and the values of a normalization; each pair of ranks names itself."""
    zero2 = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
    options = ranks(4).run(differ_over_tp, False, zero2)
    values = ranks(4).run(differ_over_tp, True, {})
    equal = ranks(4).run(differ_over_tp, False, {})

    for rank in range(4):
        first, second = rank // 2 * 2, rank // 2 * 2 + 1
        assert (
            f"the option strategy of unit (root): FULL_SHARD on rank {first}, "
            f"SHARD_GRAD_OP on rank {second}"
        ) in str(options[rank].error)
        (text,) = [w for w in values[rank].warnings if "different weights" in w]
        assert "'0.norm.weight' has other values on rank" in text
        assert "The parameter is not cut over these ranks" in text
        assert values[rank].error is equal[rank].error is None
        assert not [w for w in equal[rank].warnings if "different weights" in w]
