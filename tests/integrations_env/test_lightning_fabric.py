"""Fabric of Lightning over fully sharded modules, beside one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from composable_fsdp import replicate
from composable_fsdp.errors import CheckpointError
from composable_fsdp.lightning import ComposableFSDPFabricStrategy
from tests.integrations_env.lightning_world import (
    QUIET,
    Net,
    as_torchrun,
    loader,
    require_equal,
    seeded,
    weights,
)
from tests.support.on_ranks import on_ranks
from tests.support.world import World

pytestmark = QUIET


def fabric(strategy: Any, devices: int, **options: Any) -> L.Fabric:
    """Return a launched Fabric on CPUs."""
    made = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, **options)
    made.launch()
    return made


def train(
    fabric: L.Fabric,
    model: Any,
    optimizer: Any,
    data: Any,
    *,
    clip: dict[str, float] | None = None,
    accumulate: int = 1,
) -> None:
    """Run one epoch."""
    for index, (x, y) in enumerate(data):
        last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = nn.functional.cross_entropy(model(x).float(), y) / accumulate
            fabric.backward(loss)
        if last:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()


def reference(
    make: Any = torch.optim.AdamW, precision: str = "32-true", **options: Any
) -> nn.Module:
    """Return the plain model after the same epoch on one device."""
    made = fabric("auto", 1, precision=precision)
    # Random numbers in bfloat16 are others than those in float32, rounded.
    with made.init_module():
        model = seeded(Net)
    model, optimizer = made.setup(model, make(model.parameters(), 0.01))
    train(made, model, optimizer, loader(), **options)
    plain: nn.Module = model.module
    return plain


@on_ranks(1, 2)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}, {"clip_val": 0.01}])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_training_equals_one_device(
    world: World, make: Any, together: bool, clip: Any, accumulate: int
) -> None:
    """Model and optimizer are set up together or apart; Adagrad has state by then."""
    options: dict[str, Any] = {"clip": clip, "accumulate": accumulate}
    with as_torchrun(world):
        made = fabric("composable_fsdp", world.world_size)
        model: Any = seeded(Net)
        if together:
            optimizer: Any = make(model.parameters(), 0.01)
            model, optimizer = made.setup(model, optimizer)
        else:
            optimizer = make(model.parameters(), 0.01)
            model = made.setup_module(model)
            if make is torch.optim.AdamW:
                optimizer = make(model.parameters(), 0.01)
            optimizer = made.setup_optimizers(optimizer)
        train(made, model, optimizer, loader(world.world_size, world.rank), **options)

    require_equal(weights(model), weights(reference(make, **options)), 2e-6)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_each_precision_trains(world: World, precision: str) -> None:
    """Weights come out close to those of one device, in the same dtype."""
    with as_torchrun(world):
        made = fabric("composable_fsdp", 2, precision=precision)
        with made.init_module(empty_init=False):
            model: Any = seeded(Net)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = made.setup(model, optimizer)
        train(made, model, optimizer, loader(2, world.rank), clip={"max_norm": 1.0})

    # Fabric takes 16-mixed on a CPU for bf16-mixed.
    kind = precision if precision == "bf16-true" else "bf16-mixed"
    expected = reference(torch.optim.SGD, kind, clip={"max_norm": 1.0})
    # Weights near 1 have steps of 2 ** -7 in bfloat16.
    require_equal(weights(model), weights(expected), 2**-7)


class Parts(L.LightningModule):
    """A LightningModule whose steps and methods call its parts, and not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no step calls forward")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor
        loss = nn.functional.cross_entropy(self.encoded(batch[0]), batch[1])
        return loss

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net.layers:
            x = torch.relu(layer(x))
        scores: torch.Tensor = self.net.head(self.net.norm(x))
        # A weight is read as a tensor, too.
        summed: torch.Tensor = scores + self.net.head.weight.sum()
        return summed


@pytest.mark.parametrize("how", ["step", "marked", "option"])
@on_ranks(2)
def test_steps_and_marked_methods_run_as_forwards(world: World, how: str) -> None:
    """By Lightning's names, by ``mark_forward_method``, by ``forward_methods``."""

    def run(made: L.Fabric, data: Any) -> Any:
        module = Parts()
        optimizer: Any = torch.optim.AdamW(module.parameters(), 0.01)
        model, optimizer = made.setup(module, optimizer)
        if how == "marked":
            model.mark_forward_method(module.encoded)
        for batch in data:
            if how == "step":
                loss = model.training_step(batch, 0)
            else:
                scores = model.encoded(batch[0])
                loss = nn.functional.cross_entropy(scores, batch[1])
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return module

    methods = ("encoded",) if how == "option" else ()
    with as_torchrun(world):
        strategy = ComposableFSDPFabricStrategy(forward_methods=methods)
        sharded = run(fabric(strategy, 2), loader(2, world.rank))

    require_equal(weights(sharded), weights(run(fabric("auto", 1), loader())), 2e-6)


@on_ranks(2)
def test_a_loaded_full_state_restores_the_random_states(
    world: World, tmp_path: Path
) -> None:
    """Each rank draws what it would have drawn after the save."""
    with as_torchrun(world):
        made = fabric("composable_fsdp", 2)
        model: Any = seeded(Net)
        model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        torch.manual_seed(10 + world.rank)
        state = {"model": model, "optim": optimizer}
        made.save(tmp_path / "full", state)
        expected = torch.rand(3)
        left = made.load(tmp_path / "full", state)

    assert left == {}
    assert torch.equal(torch.rand(3), expected)


def save_and_load(world: World, form: str, path: str) -> dict[str, Any]:
    """Train, save, train on; load into a fresh model, train on, compare."""
    with as_torchrun(world):
        made = fabric(ComposableFSDPFabricStrategy(state_dict_type=form), 2)
        data = loader(2, world.rank)

        def fresh(seed: int) -> dict[str, Any]:
            torch.manual_seed(seed)
            model: Any = Net()
            optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
            model, optimizer = made.setup(model, optimizer)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
            return {"model": model, "optim": optimizer, "lr": schedule, "epoch": 0}

        state = fresh(0)
        train(made, state["model"], state["optim"], data)
        state["lr"].step()
        made.save(path, {**state, "epoch": 3, "note": {("a", 1): "b"}})
        train(made, state["model"], state["optim"], data)
        other = fresh(1)
        left = made.load(path, other)
        assert left == {"note": {("a", 1): "b"}}
        assert other["epoch"] == 3
        assert other["lr"].get_last_lr() == [0.005]
        train(made, other["model"], other["optim"], data)
        require_equal(weights(other["model"]), weights(state["model"]), 0)
        with pytest.raises(KeyError, match="'lost'"):
            made.load(path, {**other, "lost": 1})
        # ``barrier`` and ``save`` of the next test must find the ranks together.
        made.barrier()
        return weights(state["model"])


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_loaded_state_continues_as_the_saved_one(
    ranks: Any, tmp_path: Path, form: str
) -> None:
    """Model, optimizer, scheduler and values of the user, in either form."""
    path = tmp_path / "state"
    ranks(2).run(save_and_load, form, str(path))

    assert path.is_dir() == (form == "sharded")


def misuse(world: World, folder: str) -> list[str]:
    """Save and load with arguments that do not fit; return the messages."""
    told = []
    with as_torchrun(world):
        full = fabric("composable_fsdp", 2)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
        model, optimizer = full.setup(model, optimizer)
        sharded = fabric(ComposableFSDPFabricStrategy(state_dict_type="sharded"), 2)
        path = f"{folder}/a"
        calls: list[Any] = [
            lambda: full.save(path, {"optim": optimizer}),
            lambda: sharded.save(path, {"optim": optimizer}),
            lambda: sharded.save(
                path, {"model": model}, filter={"model": lambda k, v: True}
            ),
        ]
        for call in calls:
            with pytest.raises(CheckpointError) as error:
                call()
            told.append(str(error.value))
        full.save(path, {"model": model}, filter={"model": lambda k, v: "head" in k})
        full.barrier()
        assert set(torch.load(path)["model"]) == {"head.weight", "head.bias"}
        torch.save(weights(model), f"{folder}/raw{world.rank}")
        full.load_raw(f"{folder}/raw0", model)
    return told


def test_misuse_of_save_is_told(ranks: Any, tmp_path: Path) -> None:
    """A state without the model, and a filter over shards."""
    for told in ranks(2).run(misuse, str(tmp_path)):
        assert "Add the module: state={'model'" in told[0]
        assert "holds one model, and the state has 0: optim" in told[1]
        assert "Leave filter and storage_options away" in told[2]


@on_ranks(2)
def test_replicas_of_the_user_have_their_states_on_every_rank(world: World) -> None:
    """They are whole there, as under DDP."""
    with as_torchrun(world):
        made = fabric("composable_fsdp", 2)
        model = replicate(seeded(Net))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        wrapped, optimizer = made.setup(model, optimizer)
        train(made, wrapped, optimizer, loader(2, world.rank))
        found = made.strategy.get_module_state_dict(model)

    require_equal(found, weights(reference()), 2e-6)
