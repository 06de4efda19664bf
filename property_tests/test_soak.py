"""Train for many steps with faults, and count whatever could grow.

Both paths take every step together and must stay equal bit by bit. Seed and step decide
what a step does.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composable_fsdp import unshard_params
from composable_fsdp.comm import agreement
from composable_fsdp.comm.groups import operation_logs
from composable_fsdp.comm.meeting import Call
from property_tests import program_actions, program_states
from property_tests.program_examples import actions
from property_tests.program_recipes import Options, Part, Program
from property_tests.program_side import Broken, Side
from property_tests.programs import expanded
from tests.support.sharded import RankCount
from tests.support.world import World

PROGRAM = Program(
    Part(children=(Part(core="modules"), Part(children=(Part(core="mul"),)), Part())),
    options=Options(optimizer="adamw"),
)


def raise_in_step(side: Side, batch: int) -> None:
    hook = side.optimizer.register_step_pre_hook(_fail)
    program_actions.forward(side, batch)
    program_actions.backward(side)
    with pytest.raises(Broken):
        side.optimizer.step()
    hook.remove()


def raise_in_writing(side: Side, batch: int) -> None:
    with pytest.raises(Broken), unshard_params(side.model, writeback=False):
        raise Broken


def raise_on_one_rank(side: Side, batch: int) -> None:
    """The loss fails on one rank; all agree to leave the step out."""
    program_actions.forward(side, batch)
    bad = torch.tensor(float(batch % dist.get_world_size() == side.rank))
    dist.all_reduce(bad)
    assert bad.item() == 1


def _fail(*_: object) -> None:
    raise Broken


STEPS: dict[str, tuple[int, str | Callable[[Side, int], None]]] = {
    "train": (8, "train {batch}"),
    "accumulate": (2, "train {batch} accumulate"),
    "skip": (2, "forward {batch}; backward"),
    "clip": (2, "train {batch} clip"),
    "evaluate": (2, "forward {batch} inference"),
    "freeze": (2, "freeze {which}; train {batch}; freeze_all True"),
    "write": (1, "summon 0 True"),
    "by_hand": (1, "unshard_unit {which} False; forward 0 no_grad; reshard_unit 0"),
    "state_dicts": (1, "save; load; optimizer_round_trip"),
    "save_and_load": (1, "save_directory True True; load_directory"),
    "raise_in_forward": (2, "raise_in_forward {which} {batch} False"),
    "raise_in_backward": (2, "raise_in_backward {which} {batch} model"),
    "raise_in_step": (1, raise_in_step),
    "raise_in_writing": (1, raise_in_writing),
    "raise_on_one_rank": (2, raise_on_one_rank),
}
"""How often a step does what: actions of programs, or a function."""
Counts = dict[str, int]
"""What is alive on a rank: bytes, objects by class, keys of the store, open files."""


def action_of(seed: int, step: int) -> str:
    chooser = random.Random(f"{seed}/{step}")
    return chooser.choices(list(STEPS), [often for often, _ in STEPS.values()])[0]


class Soak:
    """One model on both paths, on this rank."""

    def __init__(self, world: World, seed: int, folder: str) -> None:
        self.world, self.seed = world, seed
        self.sides = []
        for door in ("composable", "wrapper"):
            options = replace(PROGRAM.options, door=door)
            program = replace(PROGRAM, seed=seed, options=options)
            own = os.path.join(folder, door)
            os.makedirs(own, exist_ok=True)
            self.sides.append(Side(program, world.rank, world, own))

    def take(self, step: int, name: str = "") -> None:
        """Take a step; afterwards both paths have equal parameters."""
        name = name or action_of(self.seed, step)
        which = random.Random(f"{self.seed}/{step}/more").randrange(100)
        what = STEPS[name][1]
        for side in self.sides:
            if callable(what):
                what(side, step)
            else:
                for action, *arguments in expanded(
                    actions(what.format(batch=step, which=which))
                ):
                    found = vars(program_actions).get(action)
                    (found or vars(program_states)[action])(side, *arguments)
            side.optimizer.zero_grad()
            side.slots.clear()
        first, second = (list(side.model.parameters()) for side in self.sides)
        assert all(map(torch.equal, first, second)), name


BOUNDED = (tuple, list, dict, Call)
"""Of these are the tables of the order of calls, which take thousands of steps to fill:
``tests/comm/test_sequence.py`` holds their bound."""


def _keys(world: World) -> int:
    """The number of keys of the store, without the last operations that ranks told.

    A rank tells its last operation when it has waited for seconds, as on a busy
    machine: a key per rank, at whatever step that happens first.
    """
    store, name = agreement.key_value_store(), agreement.agreed_name(world.group).name
    places = [f"composable_fsdp/watch/{name}/last/{r}" for r in range(world.world_size)]
    return int(store.num_keys()) - sum(bool(store.check([each])) for each in places)


def counts(world: World) -> Counts:
    """Count what is alive on this rank, once all ranks are here."""
    world.barrier()
    # Rings of the last operations, which are bounded and take a thousand to fill.
    for log in operation_logs():
        log.operations.clear()
    gc.collect()
    objects = [each for each in gc.get_objects() if type(each) not in BOUNDED]
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
    world: World, seed: int, steps: int, every: int, folder: str, cycle: int
) -> list[Counts]:
    """Take the steps on this rank; return the counts after every ``every`` steps."""
    warnings.simplefilter("ignore")
    machine = Soak(world, seed, folder)
    found = []
    for step in range(steps):
        machine.take(step % cycle)
        if (step + 1) % every == 0:
            # The same state at each count: a whole step is the last that was done.
            machine.take(0, "train")
            found.append(counts(world))
    return found


def grown(found: Sequence[Counts]) -> dict[str, list[int]]:
    """The counts that are larger in the last third than ever in the second one."""
    third = len(found) // 3
    names = sorted({name for each in found for name in each})
    series = {name: [each.get(name, 0) for each in found] for name in names}
    return {
        name: each
        for name, each in series.items()
        # One object more may be a cache of Python's; a leak is one in most steps.
        if min(each[-third:]) > max(each[third:-third]) + 10 * (name == "objects")
    }


CYCLE = 20
SEED = 3568
LONG = int(os.environ.get("COMPOSABLE_FSDP_SOAK", "0"))
"""Steps of the soak of ``make long``, all of them different."""


@pytest.mark.slow
@pytest.mark.req("X-06", "X-35")
@pytest.mark.parametrize("world_size", [2, 3] if LONG else [2])
def test_nothing_grows_over_steps_with_faults(
    ranks: RankCount, world_size: int, tmp_path: Path
) -> None:
    """Memory, objects, keys of the store, threads and open files, on both paths."""
    assert {action_of(SEED, step) for step in range(CYCLE)} == set(STEPS)
    # Fewer than 15 counts cannot tell growth from noise.
    every = max(1, min(50, LONG // 15)) if LONG else CYCLE
    steps, cycle = (LONG, LONG) if LONG else (3 * CYCLE, CYCLE)

    run = soak, SEED, steps, every, str(tmp_path), cycle
    found = ranks(world_size).run(*run, timeout=100.0 + LONG)

    for each in found:
        assert grown(each) == {}
