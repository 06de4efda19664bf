"""Programs of users who import one name of the package, or the package and no name.

Run as a script in a fresh interpreter, which makes a copy of itself for each program
and rank, and prints what each program met as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the optimizers of each program would import it
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import composable_fsdp

RANKS = 2
KEPT: list[nn.Module] = []
PACKAGE: Any = composable_fsdp
OPTIM: Any = torch.optim
Program = Callable[[Path], Any]


def run(program: Program, folder: Path, *, ranks: int) -> Any:
    """Run ``program`` in a copy of this process per rank; return what rank 0 met."""
    answer = folder / program.__name__
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            met = _met(program, folder, rank, ranks)
            if not rank:
                answer.write_text(json.dumps(met))
            # Without the exit of the interpreter that was copied.
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return json.loads(answer.read_text()) if answer.exists() else "died"


def _met(program: Program, folder: Path, rank: int, ranks: int) -> Any:
    """Return the result of ``program``, or its error, and its warnings."""
    path = str(folder / f"{program.__name__} store")
    store = torch._C._distributed_c10d.FileStore(path, ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = program(folder)
        except Exception as error:  # told in the answer
            result = f"{type(error).__name__}: {error}"
    return [result, *(str(each.message) for each in told)]


def sharded() -> nn.Module:
    """Return a sharded model with gradients, which lives as long as the process."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    torch.autograd.backward(model(torch.ones(2, 8)).sum())
    KEPT.append(model)
    return model


class Normed(torch.optim.Optimizer):
    """Divides each gradient by its norm, which is that of a shard."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        for param in self.param_groups[0]["params"]:
            param -= param.grad / param.grad.norm()


def lbfgs(folder: Path) -> None:
    model = sharded()
    OPTIM.LBFGS(model.parameters()).step(lambda: 0.0)


def unknown_optimizer(folder: Path) -> None:
    Normed(sharded().parameters()).step()


def model_state(folder: Path) -> list[Any]:
    model = sharded()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    same = all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    return [[list(value.shape) for value in state.values()], same]


def optimizer_file(folder: Path) -> None:
    optim = torch.optim.AdamW(sharded().parameters())
    optim.step()
    torch.save(optim.state_dict(), folder / "optimizer.pt")


def dcp_state(folder: Path) -> list[str]:
    model = sharded()
    optim = torch.optim.AdamW(model.parameters())
    optim.step()
    state: Any = dcp.get_state_dict(model, optim)[1]
    return sorted(state["state"])


def ddp_around(folder: Path) -> None:
    nn.parallel.DistributedDataParallel(sharded())


def late_module(folder: Path) -> None:
    model = sharded()
    model.append(nn.Linear(8, 8))  # type: ignore[operator]  # a Sequential
    model(torch.ones(2, 8))


def stand_in(place: str, name: str, method: str) -> Any:
    """Return an object of a class of a library, which has a method without effect."""
    kind = type(name, (), {method: lambda self, *given: None})
    sys.modules[place] = types.SimpleNamespace(**{name: kind})  # type: ignore[assignment]  # a stand-in
    return kind()


def strategy_of_lightning(folder: Path) -> None:
    strategy = stand_in("lightning.pytorch.strategies", "FSDPStrategy", "setup")
    strategy.lightning_module = strategy.model = sharded()
    strategy.setup(None)


def local_sgd(folder: Path) -> None:
    """Nothing is wrong as long as it is not enabled, when it has no model."""
    block = stand_in("accelerate.local_sgd", "LocalSGD", "__enter__")
    model = sharded()
    block.__enter__()
    block.model = model
    block.__enter__()


def file_of_shards(folder: Path) -> list[Any]:
    """The file holds a ``ShardedValue``, of which this process knows nothing."""
    value = torch.load(folder / "shards.pt", weights_only=True)
    return [type(value).__name__, list(value.shape), value.local.tolist()]


def pickle_of_settings(folder: Path) -> str:
    return repr(pickle.loads((folder / "settings.pickle").read_bytes()))


def submodules(folder: Path) -> list[str]:
    return [PACKAGE.errors.__name__, PACKAGE.wrap.__name__]


def star(folder: Path) -> bool:
    names: dict[str, Any] = {}
    exec("from composable_fsdp import *", names)
    assert set(composable_fsdp.__all__) <= set(dir(composable_fsdp))
    return set(composable_fsdp.__all__) == names.keys() - {"__builtins__"}


BARE = [
    file_of_shards,
    pickle_of_settings,
    submodules,
    star,
]
"""Programs that import the package and no name of it."""
SHARDING = [
    lbfgs,
    unknown_optimizer,
    model_state,
    optimizer_file,
    dcp_state,
    ddp_around,
    late_module,
    strategy_of_lightning,
    local_sgd,
]
"""Programs that import ``fully_shard`` alone."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    met = {each.__name__: run(each, folder, ranks=1) for each in BARE}

    from composable_fsdp import fully_shard

    met.update((each.__name__, run(each, folder, ranks=RANKS)) for each in SHARDING)
    sys.stdout.write(json.dumps(met))
