"""Models on meta: values before sharding, unit by unit, or in the shards after."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    fsdp2,
    fully_shard,
    init_weights,
    unshard_params,
)
from composable_fsdp.errors import PlanError
from tests.runtime.metas import (
    fill_from_meta,
    filled,
    on_meta,
    tied_gpt,
)
from tests.runtime.parity import trains_as
from tests.support.models import tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    backward,
    differences,
)
from tests.support.sharded import message_of
from tests.support.world import World, fake_world

UNITS = ("blocks.0", "blocks.1")
both_paths = pytest.mark.parametrize("path", PATHS)
both_doors = pytest.mark.parametrize("door", ["composable", "fsdp2"])


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 13, (2, 5), generator=generator)


# ---- values before sharding -------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.req("B-08")
@both_paths
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(1, 2, 3)
def test_param_init_fn_gives_a_meta_model_its_values(
    world: World, strategy: ShardingStrategy, offload: bool, path: str
) -> None:
    """At once, at even and uneven sizes; the model then trains as the plain one."""
    model = apply_units(
        on_meta(tied_gpt),
        UNITS,
        path=path,
        strategy=strategy,
        param_init_fn=fill_from_meta,
        cpu_offload=CPUOffload(offload_params=offload),
    )
    plain = filled(tied_gpt())

    assert not any(p.is_meta for p in model.parameters())
    assert differences(model.state_dict(), plain.state_dict()) == {}
    trains_as(world, model, plain, tokens, adamw)


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


# ---- values in the shards, after --------------------------------------------


@pytest.mark.req("B-08")
@pytest.mark.parametrize("how", ["load", "assign", "summon"])
@on_ranks(1, 3)
def test_a_model_sharded_on_meta_gets_its_values_later(world: World, how: str) -> None:
    """By a state dict after ``to_empty`` or without it, or by rank 0 alone."""
    model = apply_units(on_meta(tied_gpt), UNITS)
    plain = tied_gpt()
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
    trains_as(world, model, plain, tokens, adamw)


class Rotary(nn.Module):
    """Frequencies that no checkpoint has, as Llama's; ``table`` is in checkpoints."""

    inv_freq: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(4.0) + 1, persistent=False)
        self.register_buffer("table", torch.arange(3) + 1)
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.inv_freq + self.table.sum()
        return y


def turned() -> nn.Module:
    return nn.Sequential(Rotary(), nn.Linear(4, 3))


# ---- values from rank 0 -----------------------------------------------------


@pytest.mark.req("B-08")
@both_paths
@pytest.mark.parametrize("with_init", [True, False])
@on_ranks(3)
def test_rank_0_loads_and_the_others_receive(
    world: World, path: str, with_init: bool
) -> None:
    """Ranks on meta need no initialiser: ``sync_module_states`` brings the values."""
    plain = turned()
    model = copy.deepcopy(plain) if world.rank == 0 else on_meta(turned)
    init = (lambda m: m.to_empty(device="cpu", recurse=False)) if with_init else None
    # No initialiser runs where the values come from elsewhere.
    with mock.patch.object(nn.Linear, "reset_parameters", side_effect=KeyError):
        model = apply_units(
            model, ["0"], path=path, sync_module_states=True, param_init_fn=init
        )

    assert differences(model.state_dict(), plain.state_dict()) == {}
    for (name, ours), theirs in zip(
        model.named_buffers(), plain.buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name


class Bare(nn.Module):
    """Holds a parameter and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


def no_initialiser() -> None:
    FullyShardedDataParallel(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Bare())))


def leaves_meta() -> None:
    fully_shard(on_meta(lambda: nn.Linear(3, 3)), param_init_fn=lambda m: None)


def leaves_a_buffer() -> None:
    """A state dict has no non-persistent buffers: loading leaves them on meta."""
    model = fully_shard(on_meta(turned))
    model.load_state_dict(turned().state_dict(), assign=True)
    model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (no_initialiser, r"Bare '1' holds 'gain' on meta.*param_init_fn"),
        (leaves_meta, r"Linear .* left 'weight' as .*to_empty"),
        (leaves_a_buffer, r"buffers '0.inv_freq' are still on meta"),
    ],
)
def test_what_would_stay_on_meta_is_refused(
    one_rank: World, call: Callable[[], None], match: str
) -> None:
    """Class, module and tensor are named, and the way out."""
    with pytest.raises((PlanError, RuntimeError), match=match):
        call()


# ---- what was on meta and got memory alone ----


def rotary() -> Any:
    """A model on meta, with one unit below the root, whose parameters got values."""
    model = on_meta(turned)
    apply_units(model, ["0"]).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


@pytest.mark.req("P-19")
@on_ranks(2)
def test_buffers_that_nobody_filled_are_named_by_the_first_forward(
    world: World,
) -> None:
    """Filled in place, by ``.data``, or assigned, they are buffers like others."""
    ways: list[Callable[[Any], object]] = [
        lambda each: (each.inv_freq.fill_(1.0), each.table.fill_(2)),
        lambda each: (each.inv_freq.data.fill_(1.0), each.table.data.fill_(2)),
        lambda each: (
            each.register_buffer("inv_freq", torch.ones(4), persistent=False),
            each.register_buffer("table", torch.ones(3, dtype=torch.int64)),
        ),
    ]
    for way in ways:
        model = rotary()
        for _ in range(2):
            with pytest.raises(
                PlanError, match=r"Buffers '0.inv_freq', '0.table' were on meta and no"
            ):
                model(torch.ones(2, 4))
        way(model[0])
        assert type(model[0].inv_freq) is Tensor
        model(torch.ones(2, 4)).sum().backward()


def reset(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of parameters without elements
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


def deep() -> nn.Sequential:
    return nn.Sequential(*(tiny_mlp(12, hidden=20, seed=i) for i in range(3)))


def on_shards(
    seed: int,
    init: Callable[[nn.Module], object] = reset,
    door: str = "composable",
) -> nn.Module:
    """Sharded on meta, and initialised in place under ``seed``."""
    if door == "fsdp2":
        model = on_meta(deep)
        fsdp2.fully_shard(model.get_submodule("0"))
        fsdp2.fully_shard(model)
    else:
        model = apply_units(on_meta(deep), ["0", "1"])
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        init(model)
    return model


def told(model: nn.Module) -> list[str]:
    """The error or the log lines of two forwards."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # of this handler alone
    logger = logging.getLogger("composable_fsdp")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            backward(model(torch.ones(2, 12)).sum())
    except PlanError as error:
        return [str(error)]
    finally:
        logger.removeHandler(handler)
    return lines


@pytest.mark.req("P-19", "R-03")
@both_doors
@on_ranks(2, 3)
def test_torchtitans_order_is_refused_on_every_rank(world: World, door: str) -> None:
    """Meta, shard, ``to_empty``, initialise under one seed: the rows would repeat."""
    for init in (
        reset,
        lambda model: [p.data.normal_() for p in model.parameters()],
        lambda model: [nn.init.trunc_normal_(p, std=0.02) for p in model.parameters()],
    ):
        (text,) = told(on_shards(0, init, door))
        for part in ("weight' begins on rank 1 as", "init_weights(model)"):
            assert part in text


@pytest.mark.req("P-19")
@on_ranks(2)
def test_values_that_are_right_are_not_refused(world: World) -> None:
    """Other seeds, a load, constants, whole initialisation, a copy that repeats."""
    assert told(on_shards(world.rank)) == []
    loaded = on_shards(0)
    loaded.load_state_dict(deep().state_dict())
    assert told(loaded) == []
    assert told(apply_units(deep(), ["0"])) == []
    same = on_shards(0)
    for index, parameter in enumerate(same.parameters()):
        nn.init.constant_(parameter, index)
    assert told(same) == []
    whole = on_shards(0)
    torch.manual_seed(0)
    with unshard_params(whole):
        reset(whole)
    plain = deep()
    torch.manual_seed(0)
    reset(plain)
    assert differences(whole.state_dict(), plain.state_dict()) == {}
    assert told(whole) == []
    # The same rows on both ranks, by will: a line in the log and no error.
    for repeated in (on_shards(0), apply_units(on_meta(deep), ["0"])):
        repeated.to_empty(device="cpu")
        for parameter in repeated.parameters():
            rows = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
            parameter.data.copy_(rows)
        assert all("Shards were written to" in line for line in told(repeated))


@pytest.mark.req("P-19")
@both_doors
@on_ranks(1, 2, 3)
def test_parameters_that_a_checkpoint_lacks_are_refused(
    world: World, door: str
) -> None:
    """On every rank, also on one without rows; a new head gets its own values."""
    model = on_shards(0, lambda model: None, door)
    values = {k: v for k, v in deep().state_dict().items() if k[0] != "2"}
    model.load_state_dict(values, strict=False)

    with pytest.raises(
        PlanError, match=r"Parameters .*'2.0.weight'.* were on meta and nothing"
    ):
        model(torch.ones(2, 12))

    torch.manual_seed(3)
    init_weights(model.get_submodule("2"))
    plain = deep()
    torch.manual_seed(3)
    reset(plain[2])
    plain.load_state_dict(values, strict=False)
    x = torch.ones(2, 12)
    assert torch.equal(model(x), plain(x))


# ---- values from rank 0 for models that differ ----


def unlike(rank: int, what: str) -> nn.Sequential:
    """A model of which ``what`` differs between ranks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    half = [torch.float16, torch.bfloat16][rank]
    if what == "dtype of equal size":
        model[1].to(half)
    elif what == "dtype of another size":
        model[1].to([torch.float32, half][rank])
    elif what == "dtype of a buffer":
        model[1].register_buffer("table", torch.ones(8, dtype=half))
    elif what == "shape":
        model[1].weight = nn.Parameter(torch.zeros(4 + rank, 4))
    elif rank:
        model[1].register_buffer("table", torch.ones(8))
    return model


@pytest.mark.req("R-05")
@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_a_broadcast_of_unlike_tensors_is_refused_before_it_begins(
    world: World, path: str
) -> None:
    """By name on all ranks: equal bytes would be read as another dtype."""
    for what, name in (
        ("dtype of equal size", "bias"),
        ("dtype of another size", "bias"),
        ("dtype of a buffer", "table"),
        ("shape", "weight"),
        ("one more buffer", "table"),
    ):
        model = unlike(world.rank, what)
        text = message_of(
            partial(apply_units, model, (), path=path, sync_module_states=True)
        )

        start = f"DesyncError: sync_module_states=True: '1.{name}': "
        assert text.startswith(start), what
        assert world.all_equal(text)
        assert model[0].weight.shape == (4, 4)


@pytest.mark.req("B-08")
def test_a_module_on_two_paths_is_initialized_once(one_rank: World) -> None:
    """As ``model.apply`` visits it, and so under one seed with the same values."""
    met: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        met.append(module)
        module.to_empty(device=one_rank.device, recurse=False)
        nn.init.ones_(module.get_parameter("weight"))

    with torch.device("meta"):
        layer = nn.Linear(4, 4, bias=False)
        model = nn.Sequential(layer, nn.ReLU(), layer)
    fully_shard(model, param_init_fn=init)

    assert met == [layer]
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 16.0))
