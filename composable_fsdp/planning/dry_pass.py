"""FSDP1's recursive policies, asked in one pass that wraps nothing.

FSDP1 decides and wraps in one recursion: the numel that a policy sees on the way up
depends on what was wrapped below. Here the same questions are asked in the same order,
and only the numbers are kept::

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
"""FSDP1's ``(module, recurse, nonwrapped_numel) -> bool``, always called by keyword."""


@dataclass(slots=True)
class _Visit:
    """One module between its two questions; ``taken`` is the numel in units below."""

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
    """Return the modules below ``root`` that ``policy`` wants as units, deepest first.

    Modules in ``left_out`` (which must hold whole subtrees) are not asked about and
    not entered; their parameters, and those whose ``id`` is in ``ignored_params``,
    count zero. A module with several parents is asked once, for all of them.
    Containers without a forward are never units, whatever the answer.

    Raises: TypeError, if the policy answers with options instead of a bool.
    """
    outside = {id(p) for module in left_out for p in walk.own_parameters(module)}
    numels = walk.subtree_numels(root, outside | ignored_params)
    units: list[nn.Module] = []
    # The numel that units at or below a module have taken; known once it was visited.
    taken: dict[nn.Module, int] = {root: 0}
    stack: list[_Visit] = []

    def enter(module: nn.Module) -> None:
        if _ask(policy, module, recurse=True, numel=numels[module]):
            below = (c for c in walk.children(module) if c not in left_out)
            stack.append(_Visit(module, below))

    enter(root)
    while stack:
        visit = stack[-1]
        child = next(visit.pending, None)
        if child is None:
            stack.pop()
            taken[visit.module] = visit.taken
            if visit.module is not root:
                numel = numels[visit.module]
                left = numel - visit.taken
                wanted = _ask(policy, visit.module, recurse=False, numel=left)
                if wanted and not walk.is_container(visit.module):
                    units.append(visit.module)
                    taken[visit.module] = numel
            if stack:
                stack[-1].taken += taken[visit.module]
        elif child in taken:
            visit.taken += taken[child]
        else:
            taken[child] = 0
            enter(child)
    return units


def _ask(policy: AskedPolicy, module: nn.Module, *, recurse: bool, numel: int) -> bool:
    answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
    if isinstance(answer, dict):
        raise TypeError(
            "A policy called with (module, recurse, nonwrapped_numel) expects to "
            f"return a bool, got a dict for {type(module).__name__}. To give options "
            "per module, pass CustomPolicy(function of the module)."
        )
    return bool(answer)
