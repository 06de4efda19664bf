"""FSDP1's policies as functions: ``(module, recurse, nonwrapped_numel) -> bool``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from composable_fsdp.planning.policies import is_named


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Return whether ``module`` is of a layer class; always True on the way down.

    ``ModuleWrapPolicy`` decides the same; ``nonwrapped_numel`` has no influence.

    Raises: PlanError, if the module is a container such as ``nn.ModuleList``.
    """
    return recurse or is_named(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Return ``lambda_fn(module)``; True on the way down; see ``CustomPolicy``."""
    return recurse or lambda_fn(module)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: every module becomes a unit."""
    return True


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Return whether any of ``policies`` returns True."""
    # By keyword, as FSDP1 does: a policy may order its parameters differently.
    ask = {"module": module, "recurse": recurse, "nonwrapped_numel": nonwrapped_numel}
    return any(policy(**ask) for policy in policies)
