"""Train for thousands of steps with faults, and look for whatever grows.

::

    python -m property_tests.soak --steps 2000 --seed 1 --worlds 2
    python -m property_tests.soak --steps 2000 --seed 1 --worlds 2 --first 1200

Both paths take every step together and must stay equal bit by bit. Seed and step decide
what a step does, so ``--first`` repeats the steps from there on, with new models. Every
``--every`` steps each rank counts what is alive; the exit code is 1 if a count grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp import (
    clip_grad_norm_,
    load,
    no_sync,
    optim_state_dict,
    optim_state_dict_to_load,
    reshard,
    save,
    unshard,
    unshard_params,
)
from composable_fsdp.comm import agreement, call_order, order_records, sequence
from composable_fsdp.comm.meeting import Call
from composable_fsdp.comm.operations import operation_logs
from tests.support.models import TinyGPT
from tests.support.reference import (
    adamw,
    apply_units,
    backward,
    gpt_input,
    gpt_units,
    loss_of,
)
from tests.support.world import World, rank_pool, shutdown_pools

WEIGHTS: dict[str, int] = {
    "train": 8,
    "accumulate": 2,
    "skip": 2,
    "clip": 2,
    "evaluate": 2,
    "freeze": 2,
    "write": 1,
    "by_hand": 1,
    "state_dicts": 1,
    "save_and_load": 1,
    "raise_in_forward": 2,
    "raise_in_backward": 2,
    "raise_in_step": 1,
    "raise_in_writing": 1,
    "raise_on_one_rank": 2,
}
"""What a step may do, and how often."""
Counts = dict[str, int]
"""What is alive on a rank: bytes, objects by class, keys of the store, open files."""


class Broken(RuntimeError):
    """What a fault raises."""


def action_of(seed: int, step: int) -> str:
    """What step ``step`` does."""
    chooser = random.Random(f"{seed}/{step}")
    return chooser.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]


class Soak:
    """One model on both paths, on this rank."""

    def __init__(self, world: World, seed: int, folder: str) -> None:
        self.world, self.seed, self.folder = world, seed, Path(folder)
        self.models = [
            apply_units(model, gpt_units(model), path=path)
            for path in ("composable", "wrapper")
            for model in [TinyGPT(seed=seed)]
        ]
        self.saves = 0
        self.optimizers = [adamw(model.parameters()) for model in self.models]

    def take(self, step: int) -> None:
        """Take a step; afterwards both paths have equal parameters."""
        self.at, self.chooser = step, random.Random(f"{self.seed}/{step}/more")
        getattr(self, action_of(self.seed, step))()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        first, second = (list(model.parameters()) for model in self.models)
        assert all(map(torch.equal, first, second)), action_of(self.seed, step)

    def _each(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor]]:
        x = gpt_input(self.at, self.world.rank)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            yield model, optimizer, x

    # ---- what scripts do ----------------------------------------------------

    def train(self) -> None:
        for model, optimizer, x in self._each():
            backward(loss_of(model, x))
            optimizer.step()

    def accumulate(self) -> None:
        for model, optimizer, x in self._each():
            with no_sync(model):
                backward(loss_of(model, x))
            backward(loss_of(model, x.flip(0)))
            optimizer.step()

    def skip(self) -> None:
        for model, _, x in self._each():
            backward(loss_of(model, x))

    def clip(self) -> None:
        for model, optimizer, x in self._each():
            backward(loss_of(model, x))
            clip_grad_norm_(model, 0.5)
            optimizer.step()

    def evaluate(self) -> None:
        for model, _, x in self._each():
            with torch.inference_mode():
                model.eval()(x)
            model.train()

    def freeze(self) -> None:
        """Freeze one parameter for a step."""
        which = self.chooser.randrange(100)
        for model in self.models:
            found = list(model.parameters())
            found[which % len(found)].requires_grad_(False)
        self.train()
        for model in self.models:
            model.requires_grad_(True)

    def write(self) -> None:
        for model, _, _ in self._each():
            with unshard_params(model, writeback=True), torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)

    def by_hand(self) -> None:
        for model, _, x in self._each():
            unshard(model)
            with torch.no_grad():
                model(x)
            reshard(model)

    def state_dicts(self) -> None:
        for model, optimizer, _ in self._each():
            saved = model.state_dict()
            values = optim_state_dict(model, optimizer)
            model.load_state_dict(saved)
            if values["state"]:
                optimizer.load_state_dict(
                    optim_state_dict_to_load(model, optimizer, values)
                )

    def save_and_load(self) -> None:
        for i, (model, optimizer, _) in enumerate(self._each()):
            self.saves += 1
            path = self.folder / f"{i}" / f"save-{self.saves:06}"
            save(path, model, optimizer, {"step": self.at}, keep=2)
            assert load(path, model, optimizer) == {"step": self.at}

    # ---- what goes wrong ----------------------------------------------------

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except Broken:
            return
        raise AssertionError("the fault was not met")

    def _modules(self, model: nn.Module) -> nn.Module:
        """A unit of the model, the same one on both paths."""
        blocks = [m for m in model.modules() if type(m).__name__ == "Block"]
        return [model, *blocks][self.chooser.randrange(100) % (1 + len(blocks))]

    def raise_in_forward(self) -> None:
        for model, _, x in self._each():
            hook = self._modules(model).register_forward_pre_hook(_fail)
            with self._caught():
                model(x)
            hook.remove()

    def raise_in_backward(self) -> None:
        for model, _, x in self._each():
            hook = self._modules(model).register_full_backward_pre_hook(_fail)
            with self._caught():
                backward(loss_of(model, x))
            hook.remove()

    def raise_in_step(self) -> None:
        for model, optimizer, x in self._each():
            hook = optimizer.register_step_pre_hook(_fail)
            backward(loss_of(model, x))
            with self._caught():
                optimizer.step()
            hook.remove()

    def raise_in_writing(self) -> None:
        for model, _, _ in self._each():
            with self._caught(), unshard_params(model, writeback=False):
                raise Broken

    def raise_on_one_rank(self) -> None:
        """The loss fails on one rank; all agree to leave the step out."""
        fails = self.at % self.world.world_size == self.world.rank
        for model, _, x in self._each():
            loss = None if fails and model(x) is not None else loss_of(model, x)
            bad = torch.tensor(float(loss is None))
            dist.all_reduce(bad)
            assert bad.item() == 1


def _fail(*_: object) -> None:
    raise Broken


def _tables(each: object) -> list[dict[Any, Any]]:
    """The tables of ``each`` that steps fill, none beyond its bound."""
    tables: list[tuple[dict[Any, Any], int]] = []
    most = order_records.MOST_MODES
    kind = type(each)  # ``isinstance`` asks some objects of torch, which warn
    if kind is call_order.CallOrder:
        assert isinstance(each, call_order.CallOrder)
        tables = [(each.following, most)]
    elif kind is sequence.RoundOrder:
        assert isinstance(each, sequence.RoundOrder)
        tables = [(each._followers, sequence._MOST_CONTEXTS)]
    elif kind is sequence.OrderLog:
        assert isinstance(each, sequence.OrderLog)
        tables = [(each._records, most), (each._successors, most)]
    for table, most in tables:
        assert len(table) <= most, (type(each).__name__, len(table))
    return [table for table, _ in tables]


def _held_by_tables(objects: Sequence[object]) -> set[int]:
    """Ids of what is in a table of bounded size, which takes thousands of steps to
    fill: no growth, however many of the objects come with each step."""
    plain = (tuple, list, dict, Call, order_records.Record)
    rest: list[object] = [table for each in objects for table in _tables(each)]
    found: set[int] = set()
    while rest:
        inside = gc.get_referents(rest.pop())
        new = [o for o in inside if type(o) in plain and id(o) not in found]
        found.update(map(id, new))
        rest += new
    return found


def _keys(world: World) -> int:
    """The number of keys of the store, without the last operations that ranks told.

    A rank tells its last operation when it has waited for seconds, as on a busy
    machine: a key per rank, at whatever step that happens first.
    """
    store, name = agreement.key_value_store(), agreement.name_in_store(world.group)
    places = [f"composable_fsdp/watch/{name}/last/{r}" for r in range(world.world_size)]
    return int(store.num_keys()) - sum(bool(store.check([each])) for each in places)


def counts(world: World) -> Counts:
    """Count what is alive on this rank, once all ranks are here."""
    world.barrier()
    # Rings of the last operations, which are bounded and take a thousand to fill.
    for log in operation_logs():
        log.operations.clear()
    gc.collect()
    objects = gc.get_objects()
    held = _held_by_tables(objects)
    objects = [each for each in objects if id(each) not in held]
    storages = {}
    kinds: Counter[str] = Counter()
    for each in objects:
        kind = type(each)
        if issubclass(kind, Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        if str(kind.__module__).startswith("composable_fsdp"):
            kinds[f"objects of {kind.__name__}"] += 1
    found = {
        "bytes of tensors": sum(storages.values()),
        "objects": len(objects),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "keys of the store": _keys(world),
        **kinds,
    }
    world.barrier()
    return found


def soak(
    world: World,
    seed: int,
    first: int,
    steps: int,
    every: int,
    folder: str,
    cycle: int = 10**9,
) -> list[Counts]:
    """Take the steps on this rank; return the counts after every ``every`` steps.

    ``cycle`` steps are repeated: in the second cycle nothing is new to the ranks.
    """
    warnings.simplefilter("ignore")
    machine = Soak(world, seed, folder)
    found = []
    for step in range(first, first + steps):
        machine.take(step % cycle)
        if (step + 1 - first) % every == 0:
            # The same state at each count: a whole step is the last that was done.
            machine.train()
            for optimizer in machine.optimizers:
                optimizer.zero_grad()
            found.append(counts(world))
    return found


def grown(found: Sequence[Counts]) -> dict[str, list[int]]:
    """The counts that are larger in the last third than ever in the second one.

    The first third fills what is bounded: rings, caches, records of orders.
    """
    third = len(found) // 3
    names = sorted({name for each in found for name in each})
    series = {name: [each.get(name, 0) for each in found] for name in names}
    return {
        name: each
        for name, each in series.items()
        if min(each[-third:]) > max(each[third:-third])
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m property_tests.soak",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=2000, help="default: 2000")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--worlds", default="2", help="ranks, in turn; default: 2")
    parser.add_argument("--first", type=int, default=0, help="step; default: 0")
    parser.add_argument(
        "--every", type=int, help="steps; default: 50, and 15 counts at least"
    )
    asked = parser.parse_args(arguments)
    # Fewer counts cannot tell growth from noise.
    asked.every = asked.every or max(1, min(50, asked.steps // 15))
    failed = 0
    try:
        for size in map(int, asked.worlds.split(",")):
            failed |= _run(asked, size)
    finally:
        shutdown_pools()
    return failed


def _run(asked: Any, size: int, say: Callable[[str], object] = print) -> int:
    """Soak one number of ranks; return 1 if a count grew."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = soak, asked.seed, asked.first, asked.steps, asked.every, folder
        results = rank_pool(size).run(*run, timeout=60.0 + asked.steps)
    say(
        f"{size} ranks, seed {asked.seed}: {asked.steps} steps from {asked.first} in "
        f"{time.monotonic() - began:.0f} s"
    )
    failed = 0
    for rank, found in enumerate(results):
        third = len(found) // 3
        for name in found[-1]:
            if not name.startswith("objects of"):
                values = [each.get(name, 0) for each in found]
                say(f"  rank {rank} {name}: {values[third]} then {values[-1]}")
        for name, values in grown(found).items():
            failed = 1
            say(f"  rank {rank} GREW {name}: {values}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
