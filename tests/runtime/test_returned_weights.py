"""Units that give out their own weights, and layers that keep a list of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_fsdp import MixedPrecision, PhaseError, fully_shard, unshard_params
from tests.runtime.corners import OPEN, WRAPS
from tests.support.reference import (
    PATHS,
    adamw,
    apply_units,
    assert_same_training,
    backward,
    train,
    train_reference,
    wide_input,
)
from tests.support.world import RankPool, World

RankCount = Callable[[int], RankPool]

SHOWN: dict[str, Callable[[nn.Linear], Tensor]] = {
    "parameter": lambda layer: layer.weight,
    "view": lambda layer: layer.weight.view(-1),
    "row": lambda layer: layer.weight[1],
    "transposed": lambda layer: layer.weight.t(),
    "detached": lambda layer: layer.weight.detach(),
    "data": lambda layer: layer.weight.data,
}


class Gives(nn.Module):
    """Computes, and returns its weight as well."""

    def __init__(self, show: str, container: str = "tuple") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.show, self.container = show, container

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map ``(batch, 4)`` to itself; beside it the weight."""
        return self.layer(x), WRAPS[self.container](SHOWN[self.show](self.layer))


class Penalised(nn.Module):
    """Adds the squares of what its unit gives out."""

    def __init__(self, show: str, container: str = "tuple") -> None:
        super().__init__()
        self.inner = Gives(show, container)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 4)`` to ``(batch, 4)``."""
        y, given = self.inner(x)
        weight = OPEN[self.inner.container](given)
        return torch.as_tensor(self.head(y) + weight.float().square().sum())


def train_giving(world: World, path: str, show: str, container: str) -> None:
    """Train on this rank's input and compare; evaluate without gradients as well."""
    torch.manual_seed(0)
    reference = Penalised(show, container)
    model = apply_units(copy.deepcopy(reference), ["inner"], path=path)
    expected = train_reference(reference, 2, wide_input(4), adamw)

    losses = train(model, world.rank, wide_input(4), adamw)
    with torch.no_grad():
        y = model(torch.ones(1, 4))

    mine = [step[world.rank] for step in expected]
    assert_same_training(model, reference, losses, mine, tolerance=1e-6)
    assert torch.allclose(y, reference(torch.ones(1, 4)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("show", SHOWN)
def test_a_weight_that_a_unit_returns_is_one_to_compute_with(
    ranks: RankCount, path: str, show: str
) -> None:
    """Its memory outlives the unit's, and gradients flow through it."""
    ranks(2).run(train_giving, path, show, "tuple")


@pytest.mark.parametrize("container", ["list", "dict", "dataclass", "inherited list"])
def test_a_weight_is_found_in_a_container(ranks: RankCount, container: str) -> None:
    """In whatever a forward may return."""
    ranks(2).run(train_giving, "composable", "parameter", container)


def give_in_object(world: World) -> str:
    """Return a weight where no copy can be put; the message, without the rank."""
    torch.manual_seed(0)
    model = Penalised("parameter", "object")
    fully_shard(model.inner)
    fully_shard(model)
    with pytest.raises(PhaseError) as caught:
        model(torch.ones(1, 4))
    model.inner.container = "tuple"
    backward(model(torch.ones(1, 4)).sum())
    return str(caught.value)


def test_a_weight_in_an_object_that_cannot_be_made_anew_is_refused(
    ranks: RankCount,
) -> None:
    """The unit and the ways out are named, and the model trains on."""
    text = ranks(2).run(give_in_object)[0]

    assert "'inner' returned its own weight" in text
    assert "weight.clone()" in text


def give_at_the_root(world: World) -> tuple[Tensor, Tensor]:
    """What a root gave out, read after its backward, and the weight of that time."""
    torch.manual_seed(0)
    model = fully_shard(Gives("parameter"))
    with unshard_params(model):
        before = model.layer.weight.detach().clone()
    y, given = model(torch.ones(1, 4))
    backward(y.sum())
    return given[1].detach(), before


def test_a_weight_that_a_root_returns_outlives_its_backward(ranks: RankCount) -> None:
    """The root keeps its memory between forward and backward, and no longer."""
    for given, before in ranks(2).run(give_at_the_root):
        assert torch.equal(given, before)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 6, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(6, 6),
    "rnn": lambda: nn.RNN(6, 6),
    "cell": lambda: nn.LSTMCell(6, 6),
}


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its weights, before a linear one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = RECURRENT[kind]()
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 6)`` to ``(batch, 2)``."""
        y: Tensor = self.head(self.rnn(x)[0])
        return y


def train_recurrent(
    world: World, path: str, kind: str, mixed: MixedPrecision | None
) -> None:
    """Train on this rank's input, full and copied, and compare."""
    torch.manual_seed(0)
    plain = Recurrent(kind)
    plain(torch.ones(2, 6))
    model = apply_units(copy.deepcopy(plain), ["rnn"], path=path, mixed_precision=mixed)
    expected = train_reference(plain, 2, wide_input(6), adamw)

    losses = train(model, world.rank, wide_input(6), adamw)

    mine = [step[world.rank] for step in expected]
    tolerance = 1e-6 if mixed is None else 0.1
    assert_same_training(model, plain, losses, mine, tolerance=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_train_as_the_plain_ones(
    ranks: RankCount, path: str, kind: str
) -> None:
    """They keep references to their weights, which have to follow every swap."""
    ranks(2).run(train_recurrent, path, kind, None)


def test_a_recurrent_layer_computes_in_low_precision(ranks: RankCount) -> None:
    """It compares the dtypes of its input and of the weights that it keeps."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    ranks(2).run(train_recurrent, "composable", "lstm", mixed)
