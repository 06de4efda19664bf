"""The form of a parameter: as what compute sees it, and how its parts make a whole.

Optimizers, reductions and the layout see plain tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ParamForm:
    """The form of a plain parameter, and what other forms override. Immutable."""

    __slots__ = ()

    @property
    def cut_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold other parts of the parameter."""
        return ()

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of all mesh dims, those of equal values included."""
        return ()

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the global parameter, of which ``part`` is that here."""
        return part

    def full_leaf(
        self, part: Tensor, leaf: nn.Parameter, *, trainable: bool
    ) -> nn.Parameter:
        """Return the parameter that compute sees over the memory of ``part``."""
        return plain_leaves([part], [leaf], trainable=trainable)[0]

    def shown(self, local: Tensor) -> Tensor:
        """Return ``local`` in the class that compute sees, over the same memory."""
        return local

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the plain gradient of this rank's part, summed where it is partial."""
        return gradient

    def whole(self, local: Tensor) -> Tensor:
        """Return the global value of ``local``; an all-gather per ``cut_over``."""
        return local

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a global value, as a view."""
        return whole


PLAIN = ParamForm()


def plain_leaves(
    parts: Sequence[Tensor], leaves: Sequence[nn.Parameter], *, trainable: bool
) -> list[nn.Parameter]:
    """Make ``parts`` parameters, of the classes and attributes of ``leaves``."""
    made: list[Any] = [*parts]
    for index, leaf in enumerate(leaves):
        each = made[index]
        if type(leaf) is nn.Parameter:
            # Torch's lazy parameters change their class in the same way.
            # ``nn.Parameter(part)`` would create one more tensor.
            each.__class__ = nn.Parameter
            each.requires_grad = trainable
        else:
            each = torch.Tensor._make_subclass(type(leaf), each, trainable)
            made[index] = each
        # Shared, so that an attribute that a user sets on either is visible on both.
        each.__dict__ = leaf.__dict__
    return made


class Forms(dict[int, ParamForm]):
    """The forms of a unit's parameters by slot index; ``PLAIN`` without an entry."""

    def __missing__(self, index: int) -> ParamForm:
        return PLAIN


NO_FORMS = Forms()


def mesh_groups(forms: Iterable[ParamForm]) -> list[dist.ProcessGroup]:
    """Return the groups of all mesh dims of ``forms``, each once, in their order."""
    return list(dict.fromkeys(group for form in forms for group in form.mesh_groups))


def groups_of(forms: Forms) -> list[dist.ProcessGroup]:
    """Return the groups of a unit's forms, in an order equal on all their ranks."""
    # By index, because tensor-parallel ranks may have other regions.
    return mesh_groups(forms[index] for index in sorted(forms)) if forms else []
