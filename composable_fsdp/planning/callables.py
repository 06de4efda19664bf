"""FSDP1's policies as functions: ``(module, recurse, nonwrapped_numel) -> bool``.

``choose_units`` calls a policy twice per module. On the way down (``recurse=True``,
with the elements of the whole subtree) the answer tells whether to visit the children.
On the way up (``recurse=False``, with the elements that no unit below has taken) the
answer tells whether the module becomes a unit.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.planning import walk


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Return whether ``nonwrapped_numel`` reaches ``min_num_params``.

    ``SizePolicy`` makes the same decisions.

    Args:
        module: the module in question.
        recurse: True on the way down, False on the way up.
        nonwrapped_numel: elements of the subtree that no unit below has taken.
        min_num_params: smallest size of a unit, in elements. Default 1e8.
        force_leaf_modules: classes whose subtrees stay whole. Default None: the
            attribute ``FORCE_LEAF_MODULES`` of this function, read at each call.
        exclude_wrap_modules: classes whose modules never become units. Default None:
            the attribute ``EXCLUDE_WRAP_MODULES`` of this function, read at each call.

    Returns: on the way down, whether to visit the children; on the way up, whether
    ``module`` becomes a unit.
    """
    # As in FSDP1: the leaf classes stop the way down, the excluded classes matter on
    # the way up.
    given = force_leaf_modules if recurse else exclude_wrap_modules
    if given is None:
        default = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        given = getattr(size_based_auto_wrap_policy, default)
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(given))


# Users extend these sets in place, as they extend FSDP1's sets. vars() sets them
# because a type checker knows no attributes of a function.
vars(size_based_auto_wrap_policy).update(
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},
    FORCE_LEAF_MODULES={nn.MultiheadAttention},
)


def is_named(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Return whether ``module`` is an instance of ``classes``.

    Raises: PlanError, if ``module`` is an instance and a container without a forward.
    """
    named = isinstance(module, classes)
    if named and walk.is_container(module):
        raise PlanError(container_text(module, ""))
    return named


def container_text(module: nn.Module, name: str) -> str:
    """Return the message for a policy that selects a module without a forward."""
    where = f" {name}" if name else ""
    return (
        f"The policy names {type(module).__name__}{where}, which has no forward, so "
        "nothing would ever unshard it. Name the modules inside it, or the module "
        "that holds it."
    )


def classes_of(
    classes: Iterable[type[nn.Module]], argument: str
) -> tuple[type[nn.Module], ...]:
    """Return the distinct classes in ``classes``.

    Raises: TypeError, naming ``argument``, if ``classes`` is not an iterable of module
    classes.
    """
    # A forgotten set is the usual mistake: ``ModuleWrapPolicy(nn.Linear)``.
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        raise TypeError(
            f"{argument} expects several module classes, such as {{nn.Linear}}, "
            f"got {classes!r}."
        )
    # dict.fromkeys() removes duplicates and keeps the order, unlike a set.
    distinct = tuple(dict.fromkeys(classes))
    for cls in distinct:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{argument} expects module classes, got {cls!r}.")
    return distinct
