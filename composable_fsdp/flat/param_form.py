"""The form of a parameter that compute sees as another class than ``Parameter``.

A plain parameter has no form. A DTensor of ``parallelize_module`` has one::

    sharded leaf   plain nn.Parameter, this rank's rows of this rank's rectangle
    full           plain memory of the rectangle, gathered over the data ranks
    full leaf      DTensor over the view of ``full``, with which the module computes
    gradient       DTensor, redistributed to the parameter's placements -> plain

So optimizers, reductions and the layout see plain tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_fsdp.planning.dtensors import is_dtensor, local_of


class ParamForm(Protocol):
    """The questions that the package asks the form of a parameter. Immutable."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the global parameter."""
        ...

    @property
    def cut_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold other parts of the parameter."""
        ...

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of all mesh dims, those of equal values included."""
        ...

    def full_leaf(self, part: Tensor, leaf: nn.Parameter, *, trainable: bool) -> Any:
        """Return the parameter that compute sees over the memory of ``part``.

        Returns: the full leaf.
        """
        ...

    def shown(self, local: Tensor) -> Tensor:
        """Return ``local`` in the class that compute sees, over the same memory."""
        ...

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the plain gradient of this rank's part.

        Collective: over the groups on which ``gradient`` is a partial sum.
        """
        ...

    def whole(self, local: Tensor) -> Tensor:
        """Return the global value, of which ``local`` is this rank's part.

        Collective: an all-gather over each group of ``cut_over``.
        """
        ...

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a global value, as a view."""
        ...


Forms = Mapping[int, ParamForm]
"""The forms of a unit's parameters by slot index; plain parameters have no entry."""
NO_FORMS: Forms = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DTensorForm:
    """The form of a DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    """Shape of the global parameter."""
    stride: tuple[int, ...]
    local_shape: torch.Size
    offset: tuple[int, ...]
    """Index of this rank's first element in the global parameter."""

    @property
    def mesh_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """See ``ParamForm``."""
        # Looked up each time: a form must not keep a destroyed group alive.
        return tuple(self.mesh.get_group(dim) for dim in range(self.mesh.ndim))

    @property
    def cut_over(self) -> tuple[dist.ProcessGroup, ...]:
        """See ``ParamForm``."""
        # The ranks of a replicated dim hold equal values, which a norm counts once.
        return tuple(
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if placement.is_shard()
        )

    def full_leaf(
        self, part: Tensor, leaf: nn.Parameter, *, trainable: bool
    ) -> nn.Parameter:
        """Return a DTensor over ``part`` that shares ``__dict__`` with ``leaf``.

        Returns: the full leaf.
        """
        # ``nn.Parameter`` of a DTensor is the DTensor itself, with a mark.
        made = nn.Parameter(self.shown(part), requires_grad=trainable)
        # The mark of parameters of other classes; on a plain one without effect.
        vars(leaf)["_is_param"] = True
        made.__dict__ = leaf.__dict__
        return made

    def shown(self, local: Tensor) -> Tensor:
        """See ``ParamForm``."""
        from torch.distributed.tensor import DTensor

        # A node of the graph would make the full leaf no leaf.
        with torch.no_grad():
            return DTensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                # Given, because the parts of ranks may differ in size.
                shape=self.shape,
                stride=self.stride,
            )

    @torch.no_grad()
    def gradient(self, gradient: Tensor) -> Tensor:
        """See ``ParamForm``."""
        # All ranks of the mesh run the same graph, so all of them redistribute here, in
        # the same order.
        given: Any = gradient
        if is_dtensor(gradient) and tuple(given.placements) != self.placements:
            # Each rank of a sequence-parallel norm has the sum over its own tokens.
            given = given.redistribute(self.mesh, self.placements)
        return local_of(given)

    @torch.no_grad()
    def whole(self, local: Tensor) -> Tensor:
        """See ``ParamForm``."""
        shown: Any = self.shown(local)
        # Of a replicated parameter nothing is sent.
        whole: Tensor = shown.full_tensor()
        return whole

    def part(self, whole: Tensor) -> Tensor:
        """See ``ParamForm``."""
        for dim, (start, size) in enumerate(
            zip(self.offset, self.local_shape, strict=True)
        ):
            # A rank without rows starts behind the end.
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
        return whole


def mesh_groups(forms: Iterable[ParamForm | None]) -> list[dist.ProcessGroup]:
    """Return the groups of all mesh dims of ``forms``, each once, in their order."""
    return list(
        dict.fromkeys(g for form in forms if form is not None for g in form.mesh_groups)
    )


def groups_of(forms: Forms) -> list[dist.ProcessGroup]:
    """Return the groups of a unit's forms, in an order equal on all their ranks."""
    # By index, because tensor-parallel ranks may have other regions.
    return mesh_groups(forms[index] for index in sorted(forms)) if forms else []


def form_of(parameter: nn.Parameter, offset: tuple[int, ...]) -> DTensorForm:
    """Return the form of a DTensor whose rectangle begins at ``offset``."""
    # The stride of the global parameter: torch asks for both, or computes both from
    # this rank's part, which is wrong for parts of other sizes.
    given: Any = parameter
    return DTensorForm(
        given.device_mesh,
        tuple(given.placements),
        given.shape,
        given.stride(),
        local_of(parameter).shape,
        offset,
    )
