"""Try optimizers of unknown classes on sharded parameters before their first step.

``step_checks`` refuses classes that are known to need whole parameters. Classes of
``torch.optim`` that are not refused are known to be element-wise; all other classes are
tried with ``trial_step``.
"""

from __future__ import annotations

import warnings
import weakref

import torch

from composable_fsdp.errors import CompositionError
from composable_fsdp.flat.flat_parameter import find_flat
from composable_fsdp.flat.param_ref import param_ref
from composable_fsdp.optim.step_checks import cut_leaf, flat_name, leaf_name
from composable_fsdp.optim.trial_step import CannotTryError, Cut, difference

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def require_tried(optim: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of an unknown class whose step on parts differs.

    Warns once per class that cannot be tried. The user's optimizer and the random
    generators are left unchanged.

    Collective: none.
    Raises: CompositionError, on all ranks alike, before any parameter has changed.
    """
    kind = type(optim)
    # ``require_elementwise`` has refused the classes of ``torch.optim`` that need whole
    # parameters.
    if kind.__module__.startswith("torch.optim") or getattr(
        optim, "works_on_shards", False
    ):
        return
    # Options may differ between groups, and the result depends on options and cut.
    for group in optim.param_groups:
        for cut, name in _cuts(group["params"]).items():
            try:
                text = difference(optim, group, cut)
            except CannotTryError as why:
                # Continue with the other groups, which may still show a difference.
                _warn(kind, name, str(why))
                continue
            if text:
                raise CompositionError(
                    f"{kind.__name__} holds {name}, of which each rank holds a part "
                    "only, and its step on parts is not its step on the whole: "
                    f"{text}. Norms, means, whole matrices and state that is "
                    "quantised in blocks do so. Use an element-wise optimizer (SGD, "
                    "Adam, AdamW, ...) for it, or keep it whole: replicate(module), "
                    "strategy=ShardingStrategy.NO_SHARD, or ignored_states. A class "
                    "that was made for shards says works_on_shards = True."
                )


def _cuts(parameters: list[torch.nn.Parameter]) -> dict[Cut, str]:
    """Return the ways in which ``parameters`` are cut, each with an example name."""
    found: dict[Cut, str] = {}
    for parameter in parameters:
        flat = find_flat(parameter)
        if flat is not None:
            # The shard of a flat parameter may begin and end at any element.
            for slot in flat[1].layout.parameters:
                found.setdefault(Cut(len(slot.shape) > 1, rows=False), flat_name(*flat))
            continue
        leaf = cut_leaf(parameter)
        if leaf is not None:
            is_matrix = len(param_ref(*leaf).slot.shape) > 1
            # A vector is cut at any element; that is a cut between rows of length 1.
            cut = Cut(is_matrix, rows=leaf[0].layout.rows or not is_matrix)
            # The name only serves as an example in the message.
            if cut not in found:
                found[cut] = leaf_name(*leaf)
    return found


def _warn(kind: type, name: str, why: str) -> None:
    """Warn, once per class, that an optimizer could not be tried."""
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"{kind.__name__} holds {name}, of which each rank holds a part only. Whether "
        f"its step on parts is its step on the whole could not be tried: {why}. If it "
        "steps on each element by itself, say so, works_on_shards = True on the class; "
        "if it takes norms, means or whole matrices, the ranks train something else. "
        "Then use another one, or keep what it trains whole: replicate(module), "
        "strategy=ShardingStrategy.NO_SHARD, or ignored_states.",
        stacklevel=5,
    )
