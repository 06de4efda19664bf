"""Claims on optimizer state: saved and loaded in the plain model's names and shapes."""

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
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    PhaseError,
    ShardingStrategy,
    StateDictType,
    flat_parameters,
    fully_shard,
    get_full_optim_state,
    optim_state_dict,
    optim_state_dict_to_load,
    reshard,
    state_dict_type,
    unshard,
    unshard_params,
)
from composable_fsdp.comm.collectives import record
from composable_fsdp.optim.own_state_dict import local_state_dict
from tests.optim.models import by_name
from tests.support.models import TinyGPT, tiny_mlp
from tests.support.on_ranks import on_ranks
from tests.support.place import _same
from tests.support.reference import (
    PATHS,
    STRATEGIES,
    adamw,
    apply_units,
    averaged_gradients,
    backward,
    differences,
    gpt_input,
    loss_of,
    tolerance_at,
)
from tests.support.sharded import (
    UNITS,
    RankCount,
    both_paths,
    message_of,
    one_to_three_ranks,
    several_ranks,
    step,
)
from tests.support.short_waits import step_alone
from tests.support.world import World

FSDP = FullyShardedDataParallel
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw one by one": partial(torch.optim.AdamW, foreach=False, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def frozen_gpt(seed: int = 0) -> TinyGPT:
    """A tied GPT whose position embedding does not train."""
    model = TinyGPT(tied_head=True, seed=seed)
    model.positions.weight.requires_grad_(False)
    return model


def sharded(path: str, seed: int = 0, **options: Any) -> nn.Module:
    return apply_units(frozen_gpt(seed), UNITS, path=path, **options)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Two groups with options of their own, by the number of dimensions."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return OPTIMIZERS[name](
        [
            {"params": decayed, "lr": 0.05, "weight_decay": 0.1},
            {"params": rest, "lr": 0.02, "weight_decay": 0.0},
        ]
    )


def train_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: range
) -> None:
    for at in steps:
        averaged_gradients(model, [gpt_input(at, r) for r in range(world.world_size)])
        optimizer.step()


def train_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: range
) -> None:
    for at in steps:
        step(model, optimizer, world.rank, at)


def assert_same_state(
    ours: dict[str, Any], expected: dict[str, Any], tolerance: float
) -> None:
    assert ours.keys() == expected.keys() == {"state", "param_groups"}
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert ours["state"][name].keys() == values.keys(), name
        for key, value in values.items():
            found = ours["state"][name][key]
            if tolerance and isinstance(value, Tensor):
                assert torch.allclose(found, value, rtol=0, atol=tolerance), (name, key)
            else:
                assert _same(found, value), (name, key, found, value)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(ShardingStrategy.FULL_SHARD, name) for name in OPTIMIZERS]
    + [(strategy, "adamw foreach") for strategy in STRATEGIES[1:]],
)
@on_ranks(1, 2, 3)
@both_paths
def test_the_state_is_that_of_the_plain_models_optimizer(
    world: World, path: str, strategy: ShardingStrategy, name: str
) -> None:
    """Names, shapes, groups and, on up to two ranks, bits; none for frozen ones."""
    model, plain = sharded(path, strategy=strategy), frozen_gpt()
    ours, reference = optimizer_of(model, name), optimizer_of(plain, name)
    tolerance = tolerance_at(world.world_size)

    fresh = optim_state_dict(model, ours)
    train_sharded(model, ours, world, range(2))
    train_plain(plain, reference, world, range(2))
    state = optim_state_dict(model, ours)

    assert fresh["state"] == {}
    assert "positions.weight" not in state["state"]
    assert "positions.weight" in state["param_groups"][0]["params"]
    assert_same_state(state, by_name(plain, reference), tolerance)
    assert world.all_equal(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 3)
@both_paths
def test_resumed_training_equals_unbroken_training(
    world: World, path: str, name: str
) -> None:
    """Saved on one path, loaded on the other: every later bit is the same."""
    unbroken = sharded(path)
    first = optimizer_of(unbroken, name)
    train_sharded(unbroken, first, world, range(2))
    weights, state = unbroken.state_dict(), optim_state_dict(unbroken, first)
    train_sharded(unbroken, first, world, range(2, 4))

    # Other values, the other path: everything has to come from what was saved.
    resumed = sharded(PATHS[1 - PATHS.index(path)], seed=5)
    second = optimizer_of(resumed, name)
    train_sharded(resumed, second, world, range(7, 8))
    resumed.load_state_dict(weights)
    with record() as calls:
        part = optim_state_dict_to_load(resumed, second, state)
    second.load_state_dict(part)
    train_sharded(resumed, second, world, range(2, 4))

    assert calls == []
    assert differences(resumed.state_dict(), unbroken.state_dict()) == {}
    final = optim_state_dict(unbroken, first)
    assert_same_state(optim_state_dict(resumed, second), final, 0.0)


@pytest.mark.parametrize("name", ["adamw foreach", "sgd with momentum"])
@on_ranks(1, 2, 3)
@both_paths
def test_a_plain_models_state_is_loaded_under_its_names(
    world: World, path: str, name: str
) -> None:
    """Training that began on one device goes on sharded, as if nothing had happened."""
    plain = frozen_gpt()
    reference = optimizer_of(plain, name)
    train_plain(plain, reference, world, range(2))
    model = sharded(path, seed=5)
    optimizer = optimizer_of(model, name)

    model.load_state_dict(plain.state_dict())
    result = optim_state_dict_to_load(
        model, optimizer, by_name(plain, reference), load_directly=True
    )
    assert result.keys() == {"state", "param_groups"}
    train_plain(plain, reference, world, range(2, 4))
    train_sharded(model, optimizer, world, range(2, 4))

    apart = differences(model.state_dict(), plain.state_dict())
    # The bias of the keys has a gradient of nothing but rounding, which AdamW enlarges.
    limit = 20 * tolerance_at(world.world_size)
    assert all(value <= limit for value in apart.values()), apart


@pytest.mark.few(2)
@pytest.mark.req("S1-15", "S1-34")
@on_ranks(1, 2, 3)
def test_both_paths_give_and_take_the_same(world: World) -> None:
    """States, this rank's parts and the collectives are identical on both paths."""
    for name in OPTIMIZERS:
        histories = []
        for path in PATHS:
            model = sharded(path)
            optimizer = optimizer_of(model, name)
            train_sharded(model, optimizer, world, range(2))
            with record() as calls:
                state = optim_state_dict(model, optimizer)
            local = optim_state_dict_to_load(model, optimizer, state)
            sent = [str(call) for call in calls]
            histories.append((list(state["state"]), state, sent, local))
        assert _same(histories[0], histories[1]), name
        assert world.all_equal(histories[0][:3])


def save(
    world: World, path: str, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = sharded(path)
    optimizer = optimizer_of(model, name)
    train_sharded(model, optimizer, world, range(2))
    return dict(model.state_dict()), optim_state_dict(model, optimizer)


def load(
    world: World,
    path: str,
    name: str,
    weights: dict[str, Tensor],
    state: dict[str, Any],
) -> dict[str, Any]:
    model = sharded(path, seed=5)
    optimizer = optimizer_of(model, name)
    model.load_state_dict(weights)
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))
    again = optim_state_dict(model, optimizer)
    train_sharded(model, optimizer, world, range(2, 3))
    return again


@pytest.mark.parametrize("name", ["adamw one by one", "sgd with momentum"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
@both_paths
def test_another_number_of_ranks_loads_the_same_state(
    ranks: RankCount, path: str, before: int, after: int, name: str
) -> None:
    """Saved again after loading, not a bit has changed, and the next step works."""
    weights, state = ranks(before).run(save, path, name)[0]
    other = PATHS[1 - PATHS.index(path)]

    for again in ranks(after).run(load, other, name, weights, state):
        assert_same_state(again, state, 0.0)


@on_ranks(2, 3)
def test_fsdp1s_names_and_options_are_taken(world: World) -> None:
    """The static methods, a state given by the caller, and names as keys."""
    model = sharded("wrapper")
    optimizer = optimizer_of(model, "adamw foreach")
    train_sharded(model, optimizer, world, range(1))
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    raw = optimizer.state_dict()
    train_sharded(model, optimizer, world, range(1, 2))

    earlier = optim_state_dict(model, optimizer, raw)
    named = FullyShardedDataParallel.optim_state_dict_to_load(
        model, optimizer, state, is_named_optimizer=True
    )

    # Tensors of a raw state are the optimizer's own; only what it lists is as it was.
    assert earlier["param_groups"] == state["param_groups"]
    assert named["param_groups"] == state["param_groups"]
    held = {name for name, p in model.named_parameters() if p.numel()}
    assert named["state"].keys() == state["state"].keys() & held


@on_ranks(1, 2, 3)
@both_paths
def test_ignored_parameters_keep_their_whole_state(world: World, path: str) -> None:
    """One optimizer may hold sharded and plain parameters."""

    def model_of() -> nn.Sequential:
        return nn.Sequential(tiny_mlp(), tiny_mlp(seed=1))

    model, plain = model_of(), model_of()
    ignored = list(model[1].parameters())
    model = apply_units(model, [], path=path, ignored_modules=[model[1]])  # type: ignore[assignment]
    states = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if each is plain:
            states.append(by_name(plain, optimizer))
        else:
            states.append(optim_state_dict(model, optimizer))
            part = optim_state_dict_to_load(model, optimizer, states[0])
            optimizer.load_state_dict(part)
            assert [optimizer.state[p]["exp_avg"].shape for p in ignored] == [
                p.shape for p in ignored
            ]

    assert_same_state(states[0], states[1], 1e-6)


def check_refusals(world: World, path: str) -> dict[str, str]:
    model = sharded(path)
    optimizer = optimizer_of(model, "adamw foreach")
    train_sharded(model, optimizer, world, range(1))
    good = optim_state_dict(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=1)
    names, shape, groups = (copy.deepcopy(good) for _ in range(3))
    del names["state"]["norm.weight"]
    names["param_groups"][1]["params"].remove("norm.weight")
    names["state"]["other.weight"] = {}
    shape["state"]["norm.weight"]["exp_avg"] = torch.ones(3)
    groups["param_groups"][0]["params"].append("norm.weight")
    groups["param_groups"][1]["params"].remove("norm.weight")
    wrong: dict[str, Any] = {
        "names": names,
        "shape": shape,
        "groups": groups,
        "mixed": {
            "state": {"norm.weight": {}, 0: {}, 1: {}},
            "param_groups": good["param_groups"],
        },
        "numbers": {"state": {}, "param_groups": [{"params": [0, 1]}]},
        "empty": {},
    }
    texts = {"foreign": message_of(lambda: optim_state_dict(model, foreign))}
    for key, state in wrong.items():
        load = partial(optim_state_dict_to_load, model, optimizer, state)
        texts[key] = message_of(partial(load, load_directly=True))

    assert _same(optimizer.state_dict(), before)
    return texts


@one_to_three_ranks
@both_paths
def test_a_state_that_does_not_fit_is_refused_by_name(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """Each has what was found, what was expected and the way out; nothing is loaded."""
    for texts in ranks(world_size).run(check_refusals, path):
        assert all(text.startswith("CheckpointError: ") for text in texts.values())
        assert (
            "of the optimizer's group 0, of shape (3,), is not a par"
            in texts["foreign"]
        )
        assert "Pass the model that the optimizer trains." in texts["foreign"]
        assert texts["names"] == (
            "CheckpointError: The optimizer state is of another model: missing "
            "['norm.weight'], left over ['other.weight']. Load it into an optimizer "
            "over the same parameters."
        )
        assert texts["shape"] == (
            "CheckpointError: Optimizer state 'exp_avg' of 'norm.weight' has shape "
            "(3,); expected a scalar or the parameter's full shape (8,). Pass what "
            "optim_state_dict(model, optim) returned; optim.state_dict() of a sharded "
            "model is one rank's."
        )
        assert (
            "group 1 holds parameters of several saved groups ([0, 1])"
            in texts["groups"]
        )
        assert "by names or by numbers; got both: ['norm.w" in texts["mixed"]
        assert "groups of [2]; the optimizer's groups have [" in texts["numbers"]
        assert (
            "expects a dict with the keys 'state' and 'param_groups'" in texts["empty"]
        )


def check_full_before(world: World, path: str, whole: bool) -> str:
    model: nn.Module = nn.Linear(1, 1, bias=False) if whole else tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 if whole else 8)).sum().backward()
    optimizer.step()
    model = apply_units(model, [], path=path)

    return message_of(lambda: optim_state_dict(model, optimizer))


@several_ranks
@both_paths
def test_state_made_before_sharding_is_refused(
    ranks: RankCount, path: str, world_size: int
) -> None:
    """The message shows both shapes and says when the optimizer may step first."""
    for text in ranks(world_size).run(check_full_before, path, False):
        assert "Optimizer state 'exp_avg' of '0.weight' has shape (12, 8)" in text
        assert "expected a scalar or the shape of this rank's shard" in text
        assert "make it hold state only after fully_shard" in text


def test_state_made_before_sharding_is_refused_where_one_rank_holds_it_all(
    ranks: RankCount,
) -> None:
    """All ranks raise, the one that holds all of it too: nobody is left waiting."""
    for text in ranks(2).run(check_full_before, "composable", True):
        assert text.startswith("CheckpointError: ")


def check_unlike_ranks(world: World) -> str:
    model = fully_shard(tiny_mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    if world.rank == 1:
        return message_of(lambda: optim_state_dict(model, optimizer))
    # The step need not wait for a rank that does not step.
    with step_alone():
        optimizer.step()
    return message_of(lambda: optim_state_dict(model, optimizer))


def test_ranks_with_other_state_are_told_so(ranks: RankCount) -> None:
    """A DesyncError on every rank, naming the parameter, instead of a hang."""
    for text in ranks(2).run(check_unlike_ranks):
        assert text.startswith(
            "DesyncError: Optimizer state differs over ranks: here '"
        )
        assert "Build the optimizer with the same parameters on every rank" in text


class Scalars(nn.Module):
    """A parameter without dimensions among others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def check_one_bad_rank(world: World, how: str) -> str:
    model = apply_units(tiny_mlp(), ["0"])
    params = list(model.parameters())
    if how == "foreign" and world.rank:
        params = [nn.Parameter(torch.ones(2))]
    given = {"nothing": 1} if how == "given" and world.rank else None
    return message_of(lambda: optim_state_dict(model, torch.optim.Adam(params), given))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("foreign", "Parameter 0 of the optimizer's group 0, of shape (2,), is not"),
        ("given", "expects a dict with the keys 'state' and 'param_groups', got"),
    ],
)
def test_what_one_rank_refuses_is_refused_on_all(
    ranks: RankCount, how: str, expected: str
) -> None:
    """Nobody waits for a rank that has raised before anything was exchanged."""
    first, second = ranks(2).run(check_one_bad_rank, how)

    assert first.startswith("CheckpointError: On rank 1: ")
    assert expected in first
    assert expected in second


def check_wrong_arguments(world: World, how: str) -> list[str]:
    model = apply_units(tiny_mlp(), ["0"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    whole = optim_state_dict(model, optimizer)
    pair: Any = [model, optimizer]
    if world.rank:
        pair[how == "optimizer"] = "wrong"
    on_first = FullOptimStateDictConfig(rank0_only=True)

    def load_from_first() -> None:
        with state_dict_type(model, StateDictType.FULL_STATE_DICT, None, on_first):
            optim_state_dict_to_load(pair[0], pair[1], whole)

    calls: list[Callable[[], object]] = [
        lambda: optim_state_dict(*pair),
        lambda: FSDP.full_optim_state_dict(*pair),
        lambda: FSDP.sharded_optim_state_dict(*pair),
        lambda: FSDP.scatter_full_optim_state_dict(whole, pair[0], None, pair[1]),
        load_from_first,
    ]
    if how == "optimizer":
        calls.append(lambda: get_full_optim_state(pair[0], pair[1], "0.weight"))
    texts = [message_of(call) for call in calls]
    with state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        alone = message_of(lambda: optim_state_dict(*pair))
    assert (alone == "nothing was raised") == (world.rank == 0)
    assert _same(optim_state_dict(model, optimizer), whole)
    return texts


@pytest.mark.parametrize("how", ["model", "optimizer"])
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(
    ranks: RankCount, how: str
) -> None:
    """That rank has its own error, and the others one with its text: nobody waits."""
    first, second = ranks(2).run(check_wrong_arguments, how, timeout=20)

    for here, there in zip(first, second, strict=True):
        assert there.startswith("TypeError: ")
        assert " expects a model" in there
        assert here == there.replace("TypeError: ", "TypeError: On rank 1: ")


def check_replicas(world: World) -> tuple[str, str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = fully_shard(tiny_mlp(), strategy=strategy, device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    whole = optim_state_dict(model, optimizer)
    wrong: Any = 3 if world.rank == 3 else optimizer
    unsendable = {**whole, "state": {"0.weight": {"exp_avg": lambda: 1}}}
    scatter = partial(FSDP.scatter_full_optim_state_dict, model=model)
    return (
        message_of(lambda: scatter(whole, optim=wrong)),
        message_of(lambda: scatter(unsendable, optim=optimizer)),
        message_of(lambda: optim_state_dict(model, wrong)),
    )


def test_replicas_learn_of_each_others_wrong_arguments(ranks: RankCount) -> None:
    """Also the ranks that share no group with the one that was called wrongly."""
    *others, last = ranks(4).run(check_replicas, timeout=20)

    told = last[0].replace("TypeError: ", "TypeError: On rank 3: ")
    assert [wrong for wrong, *_ in others] == [told] * 3
    assert {text for _, text, _ in (*others, last)} == {last[1]}
    assert "['exp_avg'] is a function" in last[1]
    # The second rank of its shard group is rank 3 for rank 2, too.
    told = last[2].replace("TypeError: ", "TypeError: On rank 3: ")
    assert [asked for *_, asked in others] == [*["nothing was raised"] * 2, told]


def check_unsendable(world: World, group: bool) -> list[str]:
    model = apply_units(tiny_mlp(), ["0"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    whole = optim_state_dict(model, optimizer)
    scatter = partial(
        FSDP.scatter_full_optim_state_dict,
        model=model,
        optim=optimizer,
        group=world.group if group else None,
    )
    broken = copy.deepcopy(whole)
    broken["state"]["0.weight"]["exp_avg"] = lambda: 1
    text = message_of(lambda: scatter(broken))
    assert _same(
        scatter(whole if world.rank == 0 else None), local_state_dict(optimizer)
    )
    return [text]


@pytest.mark.parametrize("group", [True, False])
def test_a_state_that_cannot_be_sent_is_refused_on_all(
    ranks: RankCount, group: bool
) -> None:
    """By the name of the entry, on the rank that has it and on those that wait."""
    first, second = ranks(2).run(check_unsendable, group, timeout=20)

    assert first == second
    assert first[0].startswith(
        "CheckpointError: The optimizer state of the first rank cannot be sent to the "
        "others: ['state']['0.weight']['exp_avg'] is a function ("
    )


@pytest.mark.req("X-28")
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Rprop,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.ASGD,
    ],
)
@on_ranks(2)
def test_state_of_a_parameter_without_dimensions_round_trips(
    world: World, kind: type[torch.optim.Optimizer]
) -> None:
    """State with one element per parameter and counters are told apart."""
    model = fully_shard(Scalars())
    optimizer = kind(model.parameters())  # type: ignore[call-arg]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

    state = optim_state_dict(model, optimizer)
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))

    assert _same(optim_state_dict(model, optimizer), state)
    optimizer.step()


@on_ranks(2)
def test_a_group_without_parameters_keeps_its_options(world: World) -> None:
    """A group that will be filled later survives saving and loading."""
    model = fully_shard(tiny_mlp())
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())},
        {"params": [], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state = optim_state_dict(model, optimizer)

    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state))
    optimizer.step()

    assert optimizer.param_groups[1]["lr"] == 0.5


def check_state(model: nn.Module, optim: Any, expected: Any) -> None:
    assert _same(optim_state_dict(model, optim), expected)
    optim.load_state_dict(optim_state_dict_to_load(model, optim, expected))
    assert _same(optim_state_dict(model, optim), expected)


@pytest.mark.parametrize("path", PATHS)
@on_ranks(2)
def test_the_state_is_the_same_while_parameters_are_full(
    world: World, path: str
) -> None:
    """Optimizers hold the sharded leaves, in whose places full ones are shown."""
    kept = ShardingStrategy.SHARD_GRAD_OP
    overs: list[Callable[[nn.Module], Any]] = [nn.Module.parameters, flat_parameters]
    for over in overs:
        model = apply_units(TinyGPT(), UNITS, path=path, strategy=kept)
        optim = adamw(over(model))
        step(model, optim, world.rank, 0)
        core: nn.Module = getattr(model, "module", model)
        unit = core.get_submodule(UNITS[-1])
        expected = optim_state_dict(model, optim)

        holds = partial(check_state, model, optim, expected)
        for each in (model, unit):
            unshard(each)
            holds()
            reshard(model)
        loss = loss_of(model, gpt_input(0, world.rank))
        holds()
        backward(loss)
        with (
            unshard_params(model),
            pytest.raises(PhaseError, match="inside unshard_params of"),
        ):
            holds()
