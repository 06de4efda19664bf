"""Runs FSDP1's recursive policies in a single pass that wraps no module.

FSDP1 decides and wraps in a single recursion: the numel that a policy gets on the way
up depends on the units below. ``choose_units`` asks the same questions in the same
order and only keeps the numbers::

                       down: recurse=True           up: recurse=False
    root               asked with 30                (never asked: the caller's)
      a  (10)          asked with 10                asked with 10      -> unit, 10 taken
      b  (20)          asked with 20                asked with 20 - 12 -> 8 left in b
        c  (12)        asked with 12                asked with 12      -> unit, 12 taken
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from torch import nn

from composable_fsdp.planning import walk

AskedPolicy = Callable[..., object]
"""FSDP1's ``(module, recurse, nonwrapped_numel) -> bool``; called by keyword."""


@dataclass(slots=True)
class _Visit:
    """A module between the question on the way down and the question on the way up.

    ``taken`` are elements in units at or below the children visited so far.
    """

    module: nn.Module
    pending: Iterator[nn.Module]
    taken: int = 0


def choose_units(
    policy: AskedPolicy,
    root: nn.Module,
    *,
    left_out: Set[nn.Module] = frozenset(),
    ignored_params: Set[int] = frozenset(),
) -> list[nn.Module]:
    """Return the modules below ``root`` that ``policy`` makes units, deepest first.

    A module with several parents is asked once, for all of them. Containers without a
    forward are never units, whatever the answer.

    Returns: the units.
    Raises: TypeError, if the policy returns a dict of options instead of a bool.
    """
    # Parameters of skipped modules count zero, also where a visited module shares them.
    outside = {id(p) for module in left_out for p in walk.own_parameters(module)}
    numels = walk.subtree_numels(root, outside | ignored_params)
    units: list[nn.Module] = []
    # Per visited module, the elements in units at or below the module. The entry is 0
    # while the module is being visited.
    taken: dict[nn.Module, int] = {root: 0}
    # A walk of its own: the answer on the way down decides whether to enter a module,
    # and each visit sums ``taken`` for the question on the way up.
    stack: list[_Visit] = []

    def enter(module: nn.Module) -> None:
        if _ask(policy, module, recurse=True, numel=numels[module]):
            below = (c for c in walk.children(module) if c not in left_out)
            stack.append(_Visit(module, below))

    # Only the way down asks about the root: the caller made the root a unit.
    enter(root)
    while stack:
        visit = stack[-1]
        child = next(visit.pending, None)
        if child is None:
            stack.pop()
            taken[visit.module] = visit.taken
            if visit.module is not root:
                numel = numels[visit.module]
                # On the way up: the policy sees only the elements that no unit below
                # has taken.
                left = numel - visit.taken
                wanted = _ask(policy, visit.module, recurse=False, numel=left)
                if wanted and not walk.is_container(visit.module):
                    units.append(visit.module)
                    taken[visit.module] = numel
            if stack:
                stack[-1].taken += taken[visit.module]
        # A shared child was visited under another parent, and is not asked again.
        elif child in taken:
            visit.taken += taken[child]
        else:
            taken[child] = 0
            enter(child)
    return units


def _ask(policy: AskedPolicy, module: nn.Module, *, recurse: bool, numel: int) -> bool:
    """Return the answer of ``policy`` for ``module`` as a bool."""
    answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
    # A non-empty dict is true: without this check the options would be lost silently.
    if isinstance(answer, dict):
        raise TypeError(
            "A policy called with (module, recurse, nonwrapped_numel) expects to "
            f"return a bool, got a dict for {type(module).__name__}. To give options "
            "per module, pass CustomPolicy(function of the module)."
        )
    return bool(answer)
