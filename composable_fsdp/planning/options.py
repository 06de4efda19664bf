"""The options of a unit, checked by the constructor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from composable_fsdp.comm.placements import Choice, placement_of
from composable_fsdp.comm.wire_format import WireFormat
from composable_fsdp.config import (
    FULL_SHARD,
    Arena,
    BackwardPrefetch,
    Block,
    CPUOffload,
    MixedPrecision,
    Placement,
    Report,
    RowBlock,
    ShardingStrategy,
    require_bool,
)
from composable_fsdp.errors import PlanError
from composable_fsdp.naming import listed, quoted
from composable_fsdp.planning.layout import ParameterSpec, Whole, row_block

D = TypeVar("D")
E = TypeVar("E", bound=Enum)

RETIRING_LIMIT = 1
"""With ``limit_all_gathers``: resharded units whose memory may wait for the GPU."""

RETIRING_UNLIMITED = 4
"""Without ``limit_all_gathers``: more overlap on small units, more memory."""


class Dtypes(NamedTuple):
    """The three dtypes of a region."""

    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype


CHECKS = get_args(Report)
"""Values of ``check_weights``: what happens if ranks shard different weights."""


_KINDS = (
    ("placement", Placement, "a Placement"),
    (
        "wire",
        WireFormat,
        "a WireFormat such as Int8Wire() or Float8Wire() of composable_fsdp.features",
    ),
    ("arena", Arena, "an Arena such as Arena()"),
)


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """The options of a unit: how the unit is sharded and when the unit communicates."""

    strategy: ShardingStrategy = FULL_SHARD
    placement: Placement | None = None
    block: Block | RowBlock = Block.ROW
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    mixed_precision: MixedPrecision | None = None
    cpu_offload: CPUOffload | None = None
    check_weights: Report = "warn"
    wire: WireFormat | None = None
    arena: Arena | None = None

    def __post_init__(self) -> None:
        # Most values are of our own types: no call for these, in each ``fully_shard``.
        for name, chosen, kind, also in (
            ("strategy", self.strategy, ShardingStrategy, None),
            ("block", self.block, Block, RowBlock),
            ("backward_prefetch", self.backward_prefetch, BackwardPrefetch, NoneType),
        ):
            if type(chosen) is not kind and type(chosen) is not also:
                # The dataclass is frozen.
                object.__setattr__(self, name, by_name(kind, chosen, argument=name))
        for name, form, given in (
            ("mixed_precision", MixedPrecision, self.mixed_precision),
            ("cpu_offload", CPUOffload, self.cpu_offload),
        ):
            if given is not None:
                own = by_fields(form, given, argument=name)
                object.__setattr__(self, name, own)
        for flag in ("forward_prefetch", "limit_all_gathers", "use_orig_params"):
            require_bool(getattr(self, flag), flag)
        for name, expected, example in _KINDS:
            given = getattr(self, name)
            if given is not None and not isinstance(given, expected):
                raise TypeError(f"{name} expects None or {example}, got {given!r}.")
        if self.placement is not None and self.strategy is not FULL_SHARD:
            raise PlanError(
                f"Pass strategy={self.strategy.name} or {self.placement}, not both: a "
                "strategy is a placement with a name."
            )
        if self.wire is not None and self.wire.needs_rows and not self.keeps_rows:
            raise PlanError(
                f"wire={self.wire} scales whole rows, and block={self.block} cuts "
                "rows. Use block=Block.ROW, or wire=Int8Wire()."
            )
        if self.check_weights not in CHECKS:
            raise PlanError(
                f"check_weights expects {', '.join(map(repr, CHECKS[:-1]))} or "
                f"{CHECKS[-1]!r}, got {self.check_weights!r}."
            )

    @property
    def keeps_rows(self) -> bool:
        """Whether sharded parameters have whole rows, ``(k, *trailing)``."""
        return self.block is not Block.ELEMENT

    def spec(
        self,
        fqns: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        trainable: bool,
        whole: Whole | None,
    ) -> ParameterSpec:
        """Return the facts about a parameter from which its layout follows."""
        block = 1 if not self.keeps_rows else row_block(shape)
        if isinstance(self.block, RowBlock):
            # A vector has rows of one element, and a parameter without dims is a row.
            block *= self.block.n if shape else 1
        wire = self.wire
        return ParameterSpec(
            fqns,
            tuple(shape),
            dtype,
            trainable,
            block,
            whole,
            # Vectors are few elements, and rounding them costs most accuracy.
            wire if wire and wire.takes(shape, dtype) else None,
            self.block is Block.TENSOR,
        )

    @property
    def chosen(self) -> Choice:
        """The strategy, or the caller's own placement."""
        return self.placement or self.strategy

    @property
    def reshard_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        return bool(placement_of(self.chosen).between)

    def dtypes(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes of a region whose parameters have ``dtype``."""
        mixed = self.mixed_precision
        # Integer and complex parameters keep the dtype.
        if mixed is None or not dtype.is_floating_point:
            return Dtypes(dtype, dtype, dtype)
        # Each dtype defaults to the previous dtype.
        compute = mixed.param_dtype or dtype
        reduce = mixed.reduce_dtype or compute
        kept = mixed.keep_low_precision_grads
        return Dtypes(compute, reduce, reduce if kept else dtype)


PER_MODULE = tuple(field.name for field in fields(UnitOptions))
"""The keyword arguments that a policy may return per module."""

# Fields that must be equal in the whole tree: a policy may repeat the root's value, but
# not change the value.
_TREE_WIDE = ("limit_all_gathers", "use_orig_params")
# FSDP1's name of an option, as its policies return.
_ALIASES = {"sharding_strategy": "strategy"}


# Calls that an error message suggests, by class.
_EXAMPLES: dict[type, str] = {
    MixedPrecision: "MixedPrecision(param_dtype=torch.bfloat16)",
    CPUOffload: "CPUOffload(offload_params=True)",
}


def by_name(kind: type[E], value: object, *, argument: str) -> E:
    """Return ``value`` as a member of ``kind``; torch's members are matched by name."""
    if isinstance(value, kind):
        return value
    # Code written for FSDP1 passes torch's enums.
    if isinstance(value, Enum) and value.name in kind.__members__:
        return kind[value.name]
    raise TypeError(
        f"{argument} expects one of "
        f"{', '.join(f'{kind.__name__}.{m}' for m in kind.__members__)}; got {value!r}."
    )


def by_fields(
    kind: type[D], value: object, *, argument: str, home: str = "composable_fsdp"
) -> D:
    """Return ``value`` as a ``kind``; torch's dataclass of the same name is copied."""
    if isinstance(value, kind):
        return value
    # For the type checker: every caller passes a dataclass.
    assert is_dataclass(kind)
    names = [field.name for field in fields(kind)]
    # Search the MRO: a subclass of torch's dataclass is accepted, too.
    bases = [base.__name__ for base in type(value).__mro__]
    if is_dataclass(value) and kind.__name__ in bases:
        # Torch's class may lack fields that this package adds; these keep their
        # defaults.
        return kind(**{n: getattr(value, n) for n in names if hasattr(value, n)})
    raise TypeError(
        f"{argument} expects a {kind.__name__}({', '.join(names)}), got {value!r}. "
        f"Import {kind.__name__} from {home} and name what differs: "
        f"{_EXAMPLES.get(kind, kind.__name__ + '()')}."
    )


def override(
    root: UnitOptions, overrides: Mapping[str, Any], *, fqn: str
) -> UnitOptions:
    """Return ``root`` with the options that a policy returned for a module."""
    named = {_ALIASES.get(key, key): value for key, value in overrides.items()}
    unknown = [key for key in named if key not in PER_MODULE]
    if unknown:
        raise PlanError(
            f"The policy gave {listed(map(repr, unknown))} for module "
            f"{quoted(fqn)}, "
            f"which cannot be set per module. Per module: {', '.join(PER_MODULE)}; "
            "pass the rest to fully_shard itself."
        )
    for key in _TREE_WIDE:
        if key in named and named[key] != getattr(root, key):
            raise PlanError(
                f"{key} must be equal in one tree: the root has {getattr(root, key)}, "
                f"the policy gave {named[key]} for module {quoted(fqn)}. Set it on the "
                "root only."
            )
    # ``replace`` calls the constructor, which checks the new values.
    return replace(root, **named)
