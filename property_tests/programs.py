"""Carrying out a program on one rank, beside one plain script per rank in this process.

The gradients of these are averaged after each backward that reduces. An action ends
alike on both sides, with equal numbers or with an error, which ends the program; ours
may refuse by name what ``REFUSALS`` lists.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_fsdp import get_full_grad
from composable_fsdp.comm.collectives import record
from composable_fsdp.errors import FSDPError
from composable_fsdp.naming import strip_wrapper
from composable_fsdp.phases import Residency
from composable_fsdp.tree.state import _FSDPState
from composable_fsdp.tree.traversal import _get_fsdp_states
from property_tests import program_actions, program_states
from property_tests.program_model import named
from property_tests.program_recipes import Action, Program
from property_tests.program_refusals import REFUSALS
from property_tests.program_side import Side, equal_parts, forget_meshes
from tests.support.sharded import own_parts
from tests.support.world import World

REDUCING = (
    "backward",
    "input_gradient",
    "raise_in_backward",
    "raise_in_leaf_hooks",
    "alone",
)
WITHIN = ("forward", "raise_in_forward", "copy_aside")
"""Actions in which a module may run a backward of its own."""
ON_SHARDS = (
    "write",
    "freeze",
    "freeze_piece",
    "leaf_hook",
    "cast",
    "keep",
    "change_gradients",
    "swap",
    "zero",
    "freeze_all",
    "step_half",
    "scaled",
    "raw_round_trip",
    "nap",
    "memory",
)
"""Actions on ``model.parameters()``, which are others while a unit is full by hand."""
GIVING = {("memory", how) for how in ("keep", "new", "restore", "swap")}
"""Actions that give parameters other memory, and change none."""
WHILE_LOCAL = (
    *("forward", "backward", "collect", "setting", "sync", "unshard_unit", "write"),
)
"""Actions that a script may take while gradients are not reduced yet."""
LOSSES = ("plain", "retain", "all", "twice", "half", "no_sync", "replica", "scaled")
"""Backwards that reach every unit that one of the others reached."""


class Verdict(NamedTuple):
    """How each action ended, what is wrong, and the collectives of this rank."""

    outcomes: list[str]
    failure: str = ""
    sent: tuple[str, ...] = ()


def run_programs(
    world: World, programs: Sequence[Program], folder: str
) -> list[Verdict]:
    """Carry them out one after the other, up to the first failure."""
    forget_meshes()
    verdicts: list[Verdict] = []
    for index, program in enumerate(programs):
        own = os.path.join(folder, str(index))
        os.makedirs(own, exist_ok=True)
        verdicts.append(run_program(world, program, own))
        if verdicts[-1].failure:
            break
    return verdicts


def run_program(world: World, program: Program, folder: str) -> Verdict:
    """Carry it out, with every check after every action; checkpoints in ``folder``."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    run, failure = Run(world, program, folder), ""
    with record() as calls:
        for index, action in enumerate(expanded(program.actions)):
            try:
                if not run.act(action):
                    break
            except Exception as error:  # a check failed: told with its place
                failure = f"action {index} {action}: {type(error).__name__}: {error}"
                break
    return Verdict(run.outcomes, failure, tuple(map(str, calls)))


def expanded(actions: Sequence[Action]) -> list[Action]:
    """A program in single actions; ``train`` is a step as most scripts have it."""
    found: list[Action] = []
    for name, *arguments in actions:
        if name != "train":
            found.append((name, *arguments))
            continue
        batch, *options = arguments
        if "accumulate" in options:
            for micro in (batch + 2, batch + 1):
                found += [("forward", micro), ("backward", -1, "no_sync")]
        if {"scale", "unscale", "infinite"} & set(options):
            found += [("forward", batch), ("backward", -1, "scaled")]
            found += [("scaled", *options)]
        else:
            found += [("forward", batch), ("backward",)]
            found += [("clip", 0.3)] if "clip" in options else []
            found += [("step",)]
        found += [] if "keep" in options else [("zero",)]
    return found


class Run:
    """Both sides on this rank, and how far they are."""

    def __init__(self, world: World, program: Program, folder: str) -> None:
        self.world, self.program, self.folder = world, program, folder
        self.outcomes: list[str] = []
        self.plain = [Side(program, rank) for rank in range(world.world_size)]
        self.ours: Side | None = None
        self.local = False
        words = program.words()
        self.tolerance = 1e-7
        if {"dtype:float32", "argument:float32", "option:low"} & words:
            self.tolerance = 1e-3
        if {"dtype:bfloat16", "argument:bfloat16"} & words:
            self.tolerance = 5e-2

    def act(self, action: Action) -> bool:
        """Take one action on both sides and compare; whether the program goes on."""
        if self.ours is None:
            self.ours, error = attempt(
                Side, self.program, self.world.rank, self.world, self.folder
            )
            if error is not None:
                return self.ended("shard", error, None)
        if not self.allows(action):
            return True
        if action not in GIVING | {("load", True)}:
            self.forget_shown()
        name, *arguments = action
        function = vars(program_actions).get(name) or vars(program_states)[name]
        plain_error = None
        seen = []
        for side in self.plain:
            shown, error = attempt(function, side, *arguments)
            plain_error = plain_error or error
            seen.append(shown)
        within = name in WITHIN and self.plain[0].synced and not self.local
        if plain_error is None and (name in REDUCING or within):
            self.average(action)
        grads = [p.grad for p in self.plain[0].model.parameters()]
        if not finite((seen, grads)):  # on any rank
            return self.ended("blown up", None, None)
        found, error = attempt(function, self.ours, *arguments)
        if error is not None or plain_error is not None:
            return self.ended(name, error, plain_error)
        equal(found, seen[self.world.rank], self.tolerance, "seen")
        self.outcomes.append(name)
        if name in ("backward", "alone") and self.plain[0].filled and not self.local:
            self.fill()
        self.check()
        return True

    def forget_shown(self) -> None:
        """Drop what was kept of memory that parameters have, and go on to change."""
        assert self.ours is not None
        plain = self.plain[self.world.rank]
        shown = {name: p.data_ptr() for name, p in named(plain.model).items()}
        apart = [tensor.data_ptr() != shown[name] for name, tensor in plain.memory]
        for side in (self.ours, *self.plain):
            pairs = zip(side.memory, apart, strict=True)
            side.memory = [each for each, is_apart in pairs if is_apart]

    def allows(self, action: Action) -> bool:
        """Whether a script may do it now: gradients that wait are not to be seen."""
        name, *arguments = action
        assert self.ours is not None
        states = _get_fsdp_states(self.ours.model)
        if name in ON_SHARDS and any(state.handle.is_full for state in states):
            return False
        if name in REDUCING[:2] and not self.plain[0].slots:
            return False
        if name == "alone" and (states[0].context is None):
            return False  # a unit that runs before the root is one itself
        if name in ("backward", "forward", "sync") and self.local:
            how = arguments[1] if len(arguments) > 1 else "plain"
            return name != "backward" or how in LOSSES
        return not self.local or name in WHILE_LOCAL

    def average(self, action: Action) -> None:
        """Average gradients over the plain sides, if this backward reduces."""
        several = self.program.options.replicas_of(self.world.world_size) > 1
        waits = "no_sync" in action or (several and "replica" in action)
        self.local = waits or not self.plain[0].synced
        if self.local:
            return
        tables = [named(side.model) for side in self.plain]
        for name in tables[0]:
            grads = [table[name].grad for table in tables]
            if any(grad is None for grad in grads):
                continue
            for table in tables:
                grad = table[name].grad
                assert grad is not None
                if grad.requires_grad:  # after create_graph
                    table[name].grad = grad.detach().clone()
            own = [table[name].grad for table in tables]
            mean = torch.stack([g.detach() for g in own if g is not None]).sum(0)
            mean /= self.program.options.factor or len(own)
            for grad in own:
                if grad is not None:
                    grad.copy_(mean)

    def fill(self) -> None:
        """Zeros in the place of no gradient, where ours took part with them.

        Which units do is theirs to say: those that ran, and what is trainable there.
        """
        assert self.ours is not None
        # Of all ranks, because one that holds nothing of a parameter has none.
        held = {n: get_full_grad(self.ours.model, n) for n in named(self.ours.model)}
        for side in self.plain:
            for name, p in named(side.model).items():
                if p.grad is None and p.requires_grad and held[name] is not None:
                    p.grad = torch.zeros_like(p)

    def ended(
        self, name: str, error: Exception | None, plain_error: Exception | None
    ) -> bool:
        """The program is at its end: note how, and fail if ours was not to raise."""
        # Units that cast their inputs take those that a plain model refuses.
        low = self.program.options.low and re.search(
            "by an inplace|have the same dtype|should be the same", tell(plain_error)
        )
        if error is None and plain_error is not None and not low:
            raise AssertionError(
                f"nothing was raised, the plain model: {tell(plain_error)}"
            )
        # Texts may tell a rank's own shapes.
        self.outcomes.append(f"{name}: {type(error).__name__}")
        if error is None or plain_error is not None:
            # torch itself asserts, too, and then on the plain model as well.
            if isinstance(error, (SystemError, AssertionError)) and not isinstance(
                plain_error, type(error)
            ):
                raise error
            return False
        text, words = tell(error), self.program.words()
        # ``load_state_dict`` of torch collects the texts of this package.
        named_by_us = isinstance(error, FSDPError) or "loading state_dict" in text
        if named_by_us and any(
            causes & words and re.search(pattern, text) for causes, pattern in REFUSALS
        ):
            return False
        raise error

    def check(self) -> None:
        """Parameters, gradients, buffers and what was kept equal the plain ones."""
        assert self.ours is not None
        ours, plain = self.ours.model, self.plain[self.world.rank]
        states = _get_fsdp_states(ours)
        if states[0]._is_root is None or states[0].context is None:
            return
        expected = named(plain.model)
        full = any(state.handle.is_full for state in states)
        shown = set(map(id, ours.parameters()))
        parts = own_parts(ours, {name: p.data for name, p in expected.items()})
        assert parts.keys() == expected.keys(), "names"
        for name, (leaf, part) in parts.items():
            like = expected[name]
            equal(leaf.detach(), part, self.tolerance, f"parameter {name}")
            assert full or id(leaf) in shown, f"{name} is not the sharded parameter"
            assert leaf.requires_grad is like.requires_grad or full, name
        for (name, kept), (_, own) in zip(plain.memory, self.ours.memory, strict=True):
            held = {other: p.data for other, p in expected.items()} | {name: kept}
            part = own_parts(ours, held)[name][1]
            equal(own, part, self.tolerance, f"what was kept of {name}")
        if not self.local and not self.ours.flat:
            self.check_gradients()
        if self.outcomes[-1] == "step" and not plain.slots and not self.local:
            for state in states:
                self.check_idle(state)
        found = plain.model.named_buffers()
        buffers = {strip_wrapper(name): buffer for name, buffer in found}
        for name, buffer in ours.named_buffers():
            kept = buffers[strip_wrapper(name)]
            equal(buffer, kept, self.tolerance, f"buffer {name}")

    def check_idle(self, state: _FSDPState) -> None:
        """After a step nothing of it is summoned, counted, or in memory."""
        handle, context = state.handle, state.context
        assert context is not None
        left = context.entered, context.reducing, context.tasks, context.filling
        counted = [unit.remaining for unit in context.lists]
        assert not any((*left, *context.prefetched, *counted)), (state.name, left)
        assert not handle.reduction.due, state.name
        assert handle.reduction.held is None, state.name
        is_free = not self.program.options.arena
        for region in handle.layout.trainable:
            held = region.reduce.temporary, region.reduce.partial
            assert held == (None, None), (state.name, held)
            if is_free:
                nbytes = region.reduce.buffer.untyped_storage().nbytes()
                assert nbytes == 0, f"{state.name} keeps its reduce buffer"
        if handle.residency is not Residency.SHARDED:  # by hand, or by an option
            return
        for each in handle.layout.regions:
            if each.full.is_own and is_free:
                nbytes = each.full.buffer.untyped_storage().nbytes()
                assert nbytes == 0, f"{state.name} keeps its full parameters"
        for table, key, leaf, _ in handle.swaps:
            assert table[key] is leaf, (state.name, key)

    def check_gradients(self) -> None:
        """Those of the parameters, and those that somebody kept."""
        assert self.ours is not None
        plain, sides = self.plain[self.world.rank], (self.ours, *self.plain)
        names = named(plain.model)
        tables: dict[str, dict[str, Tensor | None]] = {
            "grad": {n: p.grad for n, p in names.items()},
            "kept": {n: plain.kept.get(n) for n in names},
        }
        held: dict[str, Any] = {"kept": self.ours.kept}
        for what, table in tables.items():
            whole = {
                n: torch.zeros_like(names[n]) if g is None else g
                for n, g in table.items()
            }
            for name, (leaf, part) in own_parts(self.ours.model, whole).items():
                found = held[what].get(name) if what in held else leaf.grad
                if leaf.numel() == 0:
                    continue
                assert (found is None) is (table[name] is None), (
                    f"{what} of {name}: {found} and {table[name]}"
                )
                if found is not None:
                    equal(found, part, self.tolerance, f"{what} of {name}")
        pairs = equal_parts(self.ours.model)
        for side in sides:
            side.swappable = pairs


def attempt(function: Any, *arguments: Any) -> tuple[Any, Exception | None]:
    """What it returns, and what it raises."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def tell(error: Exception | None) -> str:
    text = f"{type(error).__name__}: {error}" if error is not None else "nothing"
    return re.sub(r" \[rank \d+\]$", "", text)


def finite(seen: Any) -> bool:
    """Whether no number is too large to compare the next ones."""
    if isinstance(seen, Tensor):
        return bool((seen.detach().abs() < 1e4).all())
    if isinstance(seen, dict):
        return all(map(finite, seen.values()))
    if isinstance(seen, (list, tuple)):
        return all(map(finite, seen))
    return True


def equal(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Compare what a script sees."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), (what, found)
        assert found.dtype is expected.dtype, (what, found.dtype, expected.dtype)
        found, expected = found.detach(), expected.detach()
        # Of bfloat16 the sum of large numbers may be a small one with their errors.
        size = expected.abs().max().item() if expected.numel() else 0.0
        scale = max(1.0, size) if tolerance > 1e-2 else 1.0
        near = found.shape == expected.shape and torch.allclose(
            found, expected, rtol=tolerance, atol=tolerance * scale
        )
        assert near, f"{what}: {found.tolist()} and not {expected.tolist()}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), (what, list(found), list(expected))
        for key, value in expected.items():
            equal(found[key], value, tolerance, f"{what} {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (what, found, expected)
        for index, value in enumerate(expected):
            equal(found[index], value, tolerance, f"{what} {index}")
    else:
        assert found == expected, f"{what}: {found} and not {expected}"
