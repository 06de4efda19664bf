"""FSDP1's policies as plain functions: ``(module, recurse, nonwrapped_numel) -> bool``.

Each is asked twice per module: on the way down whether to look below it
(``recurse=True``, with all elements below), and on the way up whether it becomes a unit
(``recurse=False``, with the elements that no unit below has taken).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    """Whether ``nonwrapped_numel`` reaches ``min_num_params``; see ``SizePolicy``.

    Left at None, the two sets are the attributes ``FORCE_LEAF_MODULES`` and
    ``EXCLUDE_WRAP_MODULES`` of this function, read at each call.
    """
    given = force_leaf_modules if recurse else exclude_wrap_modules
    if given is None:
        default = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        given = getattr(size_based_auto_wrap_policy, default)
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(given))


# Users extend these sets in place, as they do FSDP1's. Set through vars(), since to a
# type checker a function has no attributes of its own.
vars(size_based_auto_wrap_policy).update(
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},
    FORCE_LEAF_MODULES={nn.MultiheadAttention},
)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Whether ``module`` is one of the layer classes; see ``ModuleWrapPolicy``.

    Raises: PlanError, if the classes name a container such as ``nn.ModuleList``.
    """
    return recurse or is_named(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """What ``lambda_fn`` says of ``module``; every module is looked below."""
    return recurse or lambda_fn(module)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make every module a unit."""
    return True


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Whether any of ``policies`` says yes."""
    ask = {"module": module, "recurse": recurse, "nonwrapped_numel": nonwrapped_numel}
    return any(policy(**ask) for policy in policies)


def is_named(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether ``module`` is one of ``classes``.

    Raises: PlanError, if it is, and is a container without a forward.
    """
    named = isinstance(module, classes)
    if named and walk.is_container(module):
        raise PlanError(container_text(module, ""))
    return named


def container_text(module: nn.Module, name: str) -> str:
    """The message for a policy that names a module without a forward."""
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

    Raises: TypeError, naming ``argument``, for anything but several module classes.
    """
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        raise TypeError(
            f"{argument} expects several module classes, such as {{nn.Linear}}, "
            f"got {classes!r}."
        )
    distinct = tuple(dict.fromkeys(classes))
    for cls in distinct:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{argument} expects module classes, got {cls!r}.")
    return distinct
