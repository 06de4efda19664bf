"""Models on meta: values before sharding, unit by unit, or in the shards after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fsdp2

from composable_fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    PlanError,
    ShardingStrategy,
    fully_shard,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.runtime.materialize import reset_parameters
from tests.runtime.metas import (
    Known,
    call_counts,
    counting,
    fill,
    fill_from_meta,
    filled,
    gpt,
    known_model,
    on_meta,
    tied_gpt,
)
from tests.support.models import TinyBlock, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    differences,
    loss_of,
    tolerance_at,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import RankPool, World, fake_world

RankCount = Callable[[int], RankPool]
Make = Callable[[], nn.Module]
UNITS = ("blocks.0", "blocks.1")
both_paths = pytest.mark.parametrize("path", PATHS)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def tokens(step: int, rank: int) -> Tensor:
    """Token ids ``(2, 5)`` below the vocabulary of ``metas.gpt``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 13, (2, 5), generator=generator)


def trains_as(world: World, model: nn.Module, plain: nn.Module) -> None:
    """Three steps of both are equal."""
    expected = train_reference(plain, world.world_size, tokens, adamw)
    losses = train(model, world.rank, tokens, adamw)
    mine = [step[world.rank] for step in expected]
    tolerance = tolerance_at(world.world_size)
    assert_same_training(model, plain, losses, mine, tolerance=tolerance)


# ---- values before sharding -------------------------------------------------


def init_and_train(
    world: World, path: str, strategy: ShardingStrategy, make: Make, offload: bool
) -> None:
    """``param_init_fn`` on both paths against the plain model with its numbers."""
    option = CPUOffload(offload_params=True) if offload else None
    model = apply_units(
        on_meta(make),
        UNITS,
        path=path,
        strategy=strategy,
        param_init_fn=fill_from_meta,
        cpu_offload=option,
    )
    plain = filled(make())

    assert not any(p.is_meta for p in model.parameters())
    assert differences(model.state_dict(), plain.state_dict()) == {}
    trains_as(world, model, plain)


@pytest.mark.req("B-08")
@both_paths
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@world_sizes
def test_param_init_fn_gives_a_meta_model_its_values(
    ranks: RankCount, world_size: int, strategy: ShardingStrategy, path: str
) -> None:
    """At once, at even and uneven sizes; the model then trains as the plain one."""
    ranks(world_size).run(init_and_train, path, strategy, gpt, False)


@pytest.mark.req("B-08")
@both_paths
@pytest.mark.parametrize("world_size", [1, 2])
def test_tied_weights_stay_tied_and_offload_works_from_meta(
    ranks: RankCount, world_size: int, path: str
) -> None:
    """One object at both places, with the values of the first."""
    strategy = ShardingStrategy.FULL_SHARD
    ranks(world_size).run(init_and_train, path, strategy, tied_gpt, True)


@pytest.mark.req("B-08")
@pytest.mark.filterwarnings("ignore")
@on_ranks(1, 2)
def test_the_wrapper_resets_parameters_and_buffers_as_fsdp1_does(world: World) -> None:
    """Same values, same buffers, each module once.

    The wrapper and torch's, each on a meta model with known values.
    """
    ours = FullyShardedDataParallel(on_meta(known_model))
    theirs = TorchFSDP1(
        on_meta(known_model), use_orig_params=True, device_id=torch.device("cpu")
    )
    mine, counts = ours.state_dict(), call_counts(ours.module)
    with TorchFSDP1.summon_full_params(theirs):
        reference = {n: p.clone() for n, p in theirs.module.named_parameters()}
    buffers = dict(theirs.module.named_buffers())

    for name, value in reference.items():
        # Torch's parts what was tied: there the second linear has values of its own.
        if name != "3.1.weight":
            assert torch.equal(mine[name], value), name
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert counts == call_counts(theirs.module)
    pair = [ours.module.get_parameter(f"3.{i}.weight") for i in (0, 1)]
    assert pair[0] is pair[1]


@pytest.mark.req("B-08")
@pytest.mark.parametrize("by", ["hand", "policy", "promotion"])
def test_reset_parameters_runs_exactly_once_per_module(
    one_rank: World, by: str
) -> None:
    """On each module that holds a meta tensor itself, however the units are made."""
    model = on_meta(tied_gpt)
    holders = [
        m
        for m in model.modules()
        if any(
            t.is_meta
            for t in (*m._parameters.values(), *m._buffers.values())
            if t is not None
        )
    ]
    with counting(nn.Linear, nn.LayerNorm, nn.Embedding) as counts:
        if by == "hand":
            apply_units(model, UNITS, param_init_fn=reset_parameters)
        elif by == "policy":
            policy = ModuleWrapPolicy({TinyBlock})
            FullyShardedDataParallel(model, auto_wrap_policy=policy)
        else:
            fully_shard(
                model,
                policy=ModuleWrapPolicy({TinyBlock, nn.Embedding, nn.Linear}),
                param_init_fn=reset_parameters,
                tied_params="promote",
            )

    assert counts == {id(m): 1 for m in holders}
    assert not any(p.is_meta for p in model.parameters())


def test_a_tied_weight_has_the_values_of_its_first_module(one_rank: World) -> None:
    """Wherever the units are cut; the second initialiser works on a stand-in."""
    for promote in (False, True):
        model = on_meta(known_model)
        policy = ModuleWrapPolicy({Known}) if promote else None
        fully_shard(
            model, policy=policy, param_init_fn=reset_parameters, tied_params="promote"
        )
        expected = Known(6, 6)
        vars(expected).pop("calls")
        expected.reset_parameters()

        weight = model.get_parameter("3.0.weight")
        assert torch.equal(weight.view(6, 6), expected.weight)
        assert model.get_parameter("3.1.weight") is weight
        assert call_counts(model) == {
            "0.0": 1, "0.2": 1, "2": 1, "3.0": 1, "3.1": 1
        }  # fmt: skip


def test_the_original_objects_keep_identity_and_attributes(one_rank: World) -> None:
    """An optimizer made on meta trains the model; a parameter keeps its attributes."""
    model = on_meta(tiny_mlp)
    before = dict(model.named_parameters())
    model.get_parameter("0.weight").tag = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    fully_shard(model, param_init_fn=fill_from_meta)
    weights = model.state_dict()
    backward(loss_of(model, torch.ones(2, 8)))
    optimizer.step()

    assert all(p is before[name] for name, p in model.named_parameters())
    assert vars(model.get_parameter("0.weight"))["tag"] == "kept"
    assert differences(model.state_dict(), weights)


@pytest.mark.req("B-08")
def test_memory_holds_one_unit_above_the_shards() -> None:
    """While a unit gets its values, the others are shards already or still on meta."""
    model = nn.Sequential(*(on_meta(lambda: nn.Linear(64, 64)) for _ in range(8)))
    unit = sum(p.numel() for p in model.get_submodule("0").parameters())
    seen: list[int] = []

    def watch(module: nn.Module) -> None:
        fill_from_meta(module)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4
            for t in (*model.parameters(), *module._parameters.values())
            if t is not None and not t.is_meta
        }
        seen.append(sum(storages.values()) - len(seen) * unit // 4)

    with fake_world(4):
        fully_shard(model, policy=ModuleWrapPolicy({nn.Linear}), param_init_fn=watch)

    # A shard is a quarter and its padding.
    assert len(seen) == 8
    assert all(unit <= above < unit + 8 * 64 for above in seen), seen


def test_ignored_parameters_stay_on_meta(one_rank: World) -> None:
    """They are the user's, and ``reset_parameters`` finds them as they were."""
    model = on_meta(tiny_mlp)
    ignored = model.get_parameter("2.bias")

    fully_shard(model, param_init_fn=reset_parameters, ignored_states=[ignored])

    assert ignored.is_meta
    assert not model.get_parameter("2.weight").is_meta


# ---- refusals ---------------------------------------------------------------


class Bare(nn.Module):
    """Holds a parameter and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


def test_a_module_without_reset_parameters_is_refused_before_any_change(
    one_rank: World,
) -> None:
    """The wrapper names class, module and tensor; nothing has been given memory."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Bare()))

    with pytest.raises(
        PlanError, match=r"Bare '1' holds 'gain' on meta.*param_init_fn"
    ):
        FullyShardedDataParallel(model)

    assert all(p.is_meta for p in model.parameters())
    assert fully_shard.state(model) is None


def test_an_initialiser_that_leaves_meta_is_told_what_it_left(one_rank: World) -> None:
    """Or one that changes shape or dtype."""
    for init in (lambda m: None, lambda m: m.to_empty(device="cpu").double()):
        with pytest.raises(PlanError, match=r"Linear .* left 'weight' as .*to_empty"):
            fully_shard(on_meta(lambda: nn.Linear(3, 3)), param_init_fn=init)


def test_an_initialiser_must_be_a_function(one_rank: World) -> None:
    """A bad argument is refused whatever the model."""
    with pytest.raises(TypeError, match="param_init_fn expects a function"):
        fully_shard(tiny_mlp(), param_init_fn=3)  # type: ignore[arg-type]  # on purpose


@pytest.mark.req("B-08")
def test_a_forward_with_one_parameter_left_on_meta_names_it(one_rank: World) -> None:
    """The others have values; the message says which has none."""
    model = fully_shard(on_meta(tiny_mlp))
    for name in ("0.weight", "0.bias", "2.weight"):
        owner = model.get_submodule(name[0])
        value = torch.zeros(model.get_parameter(name).shape)
        setattr(owner, name[2:], nn.Parameter(value))

    with pytest.raises(PlanError, match=r"Parameters '2.bias' are still on the meta"):
        model(torch.ones(1, 8))


def test_a_buffer_left_on_meta_is_named(one_rank: World) -> None:
    """A state dict has no non-persistent buffers: loading leaves them on meta."""
    model = fully_shard(on_meta(known_model))
    model.load_state_dict(filled(known_model()).state_dict(), assign=True)

    with pytest.raises(PlanError, match=r"buffers '2.scale' are still on meta"):
        model(torch.ones(2, 6))


# ---- values in the shards, after --------------------------------------------


@pytest.mark.req("B-08")
@pytest.mark.parametrize("how", ["load", "assign", "summon"])
@pytest.mark.parametrize("make", [gpt, tied_gpt])
@on_ranks(1, 2, 3)
def test_a_model_sharded_on_meta_gets_its_values_later(
    world: World, make: Make, how: str
) -> None:
    """By a state dict after ``to_empty`` or without it, or by rank 0 alone.

    Shard on meta; give the shards values; train as the plain model.
    """
    model = apply_units(on_meta(make), UNITS)
    plain = make()
    values = plain.state_dict()
    assert all(p.is_meta for p in model.parameters())
    assert all(v.is_meta for v in model.state_dict().values())
    if how == "assign":
        model.load_state_dict(values, assign=True)
    else:
        model.to_empty(device="cpu")
        if how == "load":
            model.load_state_dict(values)
        elif how == "summon":
            with unshard_params(model, rank0_only=True):
                if world.rank == 0:
                    for name, parameter in model.named_parameters():
                        parameter.data.copy_(values[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(values[name])

    assert differences(model.state_dict(), values) == {}
    trains_as(world, model, plain)


@pytest.mark.req("B-08")
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_shards_are_initialised_as_those_of_fsdp2(world: World) -> None:
    """The same script trains to the same losses.

    Shard on meta, ``to_empty``, initialise the shards, train: ours and torch's.
    """
    found = []
    for shard in (fully_shard, torch_fsdp2):
        model = on_meta(lambda: tiny_mlp(6, hidden=7))
        shard(model.get_submodule("0"))
        shard(model)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01 * len(parameter.shape))
        losses = train(model, world.rank, wide_input(6), adamw, steps=4)
        found.append((losses, [p.shape[1:] for p in model.parameters()]))

    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == found[1][1]


def test_reset_parameters_of_the_user_runs_on_shards(one_rank: World) -> None:
    """After ``to_empty`` modules show this rank's rows, which torch's layers fill."""
    model = fully_shard(on_meta(tiny_mlp)).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    model(torch.ones(1, 8)).sum().backward()

    assert all(p.grad is not None for p in model.parameters())


def test_tied_weights_are_tied_again_after_to_empty(one_rank: World) -> None:
    """``to_empty`` gives each place a parameter of its own; the first one stays."""
    model = fully_shard(on_meta(known_model)).to_empty(device="cpu")
    for module in model.modules():
        fill(module)
    first = model.get_parameter("3.0.weight")

    model.state_dict()
    assert model.get_parameter("3.1.weight") is first
    model(torch.ones(2, 6)).sum().backward()

    assert model.get_parameter("3.0.weight") is first
    assert model.get_parameter("3.1.weight") is first
    assert first.grad is not None


def test_a_state_dict_of_a_meta_model_is_on_meta_and_sends_nothing(
    one_rank: World,
) -> None:
    """Names and full shapes, as of the plain model."""
    model = fully_shard(on_meta(gpt))
    with record() as calls:
        found = model.state_dict()

    assert calls == []
    expected = on_meta(gpt).state_dict()
    assert {n: (v.shape, v.device) for n, v in found.items()} == {
        n: (v.shape, v.device) for n, v in expected.items()
    }


def test_copying_into_meta_is_refused_with_the_way_out(one_rank: World) -> None:
    """Torch only warns, and the values would be lost."""
    model = fully_shard(on_meta(tiny_mlp))

    with pytest.raises(
        RuntimeError, match=r"'0.weight'.* on meta.*to_empty.*assign=True"
    ):
        model.load_state_dict(tiny_mlp().state_dict())


# ---- values from rank 0 -----------------------------------------------------


@pytest.mark.req("B-08")
@both_paths
@pytest.mark.parametrize("with_init", [True, False])
@pytest.mark.parametrize("make", [tied_gpt, known_model])
@on_ranks(3)
def test_rank_0_loads_and_the_others_receive(
    world: World, path: str, with_init: bool, make: Make
) -> None:
    """Ranks on meta need no initialiser: ``sync_module_states`` brings the values.

    Only rank 0 has the values; the others are on meta.
    """
    plain = make()
    units = UNITS if make is tied_gpt else ("0", "3")
    model = copy.deepcopy(plain) if world.rank == 0 else on_meta(make)
    init = (lambda m: m.to_empty(device="cpu", recurse=False)) if with_init else None
    model = apply_units(
        model, units, path=path, sync_module_states=True, param_init_fn=init
    )

    assert differences(model.state_dict(), plain.state_dict()) == {}
    for (name, ours), theirs in zip(
        model.named_buffers(), plain.buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    # No initialiser runs where the values come from elsewhere.
    assert not call_counts(model)


@pytest.mark.req("B-08")
@both_paths
@on_ranks(2)
def test_values_of_rank_0_are_sent_after_the_initialisation(
    world: World, path: str
) -> None:
    """Seeds may differ: NO_SHARD replicas and buffers would too.

    All ranks on meta, with different seeds.
    """
    torch.manual_seed(world.rank)
    model = apply_units(on_meta(gpt), UNITS, path=path, sync_module_states=True)
    assert world.all_equal(model.state_dict())
    scales = model.get_parameter("blocks.0.norm_1.weight")
    assert torch.equal(scales, torch.ones_like(scales))
