"""Where parameters are in a tree, and the names of the APIs that manage modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

API = "fully_shard"
"""The name of this package's states in the registry."""

REPLICATE = "replicate"
"""The name of ``replicate``'s states in the registry."""


class Place(NamedTuple):
    """A place of a parameter, as names only: equal units share ``Place`` objects.

    Args:
        fqn: the parameter's name at this place, from the unit's module.
        name: the parameter's key in ``module._parameters``.
        primary: the parameter's first name from the unit's module.
        slot_index: index of the parameter in the unit. In a unit of several modules,
            two parameters may have the same name.
    """

    fqn: str
    name: str
    primary: str
    slot_index: int


class ParamInfo(NamedTuple):
    """A place of a parameter, with the module.

    ``module._parameters[name]`` is the parameter. The other fields are those of
    ``Place``.
    """

    fqn: str
    module: nn.Module
    name: str
    primary: str
    slot_index: int
