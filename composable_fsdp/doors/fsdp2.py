"""FSDP2's functions and policies over the units of this package.

This door alone changes classes: that of a sharded module becomes ``FSDP<name>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.access import manual
from composable_fsdp.access.settings import set_reshard_after_forward, state_of_unit
from composable_fsdp.config import (
    CPUOffload,
    MixedPrecision,
    Placement,
    ShardingStrategy,
)
from composable_fsdp.doors.fsdp2_module import FSDPModule, sharded_class
from composable_fsdp.doors.fsdp2_torch import change_torch
from composable_fsdp.entries import fully_shard as own
from composable_fsdp.errors import PlanError, warn
from composable_fsdp.flat.handle import LEAVES
from composable_fsdp.naming import quoted
from composable_fsdp.planning.options import by_fields
from composable_fsdp.state_dict.settings import LIVE
from composable_fsdp.tree.root import ensure_root, share_streams

P = ParamSpec("P")

_HOME = "composable_fsdp.fsdp2"
"""Where users import the names of FSDP2 from."""


# Frozen and not frozen as in FSDP2, so scripts can hash and change the same policies.
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for compute and reduction, with the names of FSDP2.

    Args:
        param_dtype: dtype of the all-gather and of compute. Default None: the dtype of
            the parameters.
        reduce_dtype: dtype in which gradients are accumulated and reduced. Default
            None: ``param_dtype``.
        output_dtype: dtype to which floating point outputs are cast. Default None: no
            cast.
        cast_forward_inputs: cast floating point inputs of each unit to ``param_dtype``.
            Default True.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """The base class of offload policies; an instance of this class offloads nothing.

    >>> OffloadPolicy()
    OffloadPolicy()
    """


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state live in host memory.

    Args:
        pin_memory: Pin the host memory, so that copies overlap with compute. False is
            refused for a GPU, because gradients are copied while a backward runs.
            Without a GPU nothing is pinned. Default True.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Names of the dims of a full mesh over which DTensor parameters are sharded.

    ``fully_shard`` refuses this class, because parameters are plain tensors here.

    Args:
        shard: The dim, or the dims, that shard. Default None.
        replicate: The dim, or the dims, that replicate. Default None.

    Raises: ValueError, if both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims expects shard or replicate, got neither. Name "
                "the dim of the mesh that shards."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return ``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return ``replicate`` as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    # A string would be a sequence of letters.
    return (given,) if isinstance(given, str) else tuple(given or ())


class FullyShard(Protocol[P]):
    """``fully_shard`` of this door, as type checkers see the function."""

    @overload
    def __call__(
        self, module: nn.Module, *args: P.args, **kwargs: P.kwargs
    ) -> FSDPModule: ...

    @overload
    def __call__(
        self, module: Sequence[nn.Module], *args: P.args, **kwargs: P.kwargs
    ) -> list[FSDPModule]: ...

    def state(self, module: nn.Module) -> Any | None:
        """Return the state of the unit ``module``; None if the module is no unit."""


def _with_state(api: Callable[Concatenate[Any, P], object]) -> FullyShard[P]:
    """Give the function ``state``, as FSDP2's has."""
    # Type checkers know no attributes of functions.
    made: Any = api
    made.state = own.fully_shard.state
    return cast("FullyShard[P]", made)


@_with_state
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # without fields
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard ``module`` in place, with the arguments of FSDP2's ``fully_shard``.

    The class of the module becomes ``FSDP<name>``, a ``FSDPModule``. Parameters stay
    plain tensors with this rank's rows; state dicts hold sharded values.

    Args:
        module: The module, or a list of modules that becomes one unit.
        mesh: The ranks: a 1-D mesh shards, a 2-D mesh is (replicate, shard). Default
            None: all ranks; torch.distributed is initialized if need be.
        reshard_after_forward: True frees full parameters between forward and backward;
            False keeps them. Default None: True, but False for the root. With a number
            of ranks, each group of so many consecutive ranks keeps the full parameters
            between forward and backward, and backward gathers within the group; 1 means
            False.
        shard_placement_fn: Called with each parameter; may return None or a ``Shard``.
            Every parameter is cut between its rows, so other dims than 0 are warned of,
            and change no value. Default None.
        mp_policy: The dtypes of compute and reduction. Default: no cast.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory. Default: no
            offload.
        ignored_params: Parameters that are not sharded. Default None.
        dp_mesh_dims: Refused: parameters are no DTensors here. Default None.

    Returns: ``module``, the same object.
    Collective: none, but all ranks must make the same calls; without a process group
        ``torch.distributed.init_process_group``.
    Raises: CompositionError, PlanError, TypeError, ValueError; the module is then
        unchanged.

    >>> for block in model.blocks:
    ...     fully_shard(block)
    >>> fully_shard(model)
    """
    # As FSDP2, so a script under torchrun needs no further line.
    if mesh is None and not dist.is_initialized():
        dist.init_process_group()
    if dp_mesh_dims is not None:
        raise PlanError(
            f"fully_shard got dp_mesh_dims={dp_mesh_dims!r}, which names dims of a "
            "mesh of DTensor parameters; parameters are plain tensors here. Pass the "
            "dims as a mesh: mesh=mesh['shard'] or mesh=mesh['replicate', 'shard']."
        )
    device = None
    if mesh is None and torch.cuda.is_available():
        # FSDP2 makes a mesh of the accelerator, wherever the parameters are.
        device = torch.device("cuda", torch.cuda.current_device())
    # Needed before the unit finds its device, which changes nothing yet.
    device_type = device.type if device else mesh.device_type if mesh else "cpu"
    modules = _roots(module)
    chosen, reshards = _reshards(reshard_after_forward, mesh)
    # Every refusal comes before the first change.
    if shard_placement_fn is not None:
        _require_rows(modules, shard_placement_fn, ignored_params or set())
    own.fully_shard(
        module if isinstance(module, nn.Module) else modules,
        device_mesh=mesh,
        **chosen,
        mixed_precision=mixed_precision_of(mp_policy),
        cpu_offload=cpu_offload_of(offload_policy, device_type),
        ignored_states=ignored_params,
        device_id=device,
    )
    # The modules of a list share a state.
    state = own.fully_shard.state(modules[0])
    assert state is not None
    # FSDP2's state dicts send nothing and hold the shards of each rank.
    state.settings.state_dict = LIVE
    # Nor is ``.grad`` None on a rank without rows.
    state.handle.rule.keeps_empty = True
    for region in state.handle.layout.trainable:
        region.gradient.keeps_empty = True
    # An explicit choice holds for a root, too; lazy initialization would choose.
    if reshards is not None:
        set_reshard_after_forward(modules[0], reshards, recurse=False)
    # Last, so that a refused module keeps its class. An assignment keeps the object
    # with its attributes, hooks and references.
    for each in modules:
        each.__class__ = sharded_class(type(each))
    change_torch()
    return cast("FSDPModule | list[FSDPModule]", module)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.<method_name>(...)`` unshard and reshard, as a forward does.

    A module that is no ``FSDPModule`` is left alone. Collective: none. Raises:
    CompositionError, as ``composable_fsdp.register_forward_method``.
    """
    # A script that shards only on some machines calls this function on all.
    if isinstance(module, FSDPModule):
        manual.register_forward_method(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as pipeline stages, share streams of communication.

    Raises: ValueError, for a module that is no ``FSDPModule``.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx expects FSDPModules, got a {type(module).__name__}. "
                "Apply fully_shard first."
            )
    states = [state_of_unit(module, "share_comm_ctx") for module in modules]
    share_streams([ensure_root(state) for state in states])


def _roots(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a call; FSDP2 leaves out those inside another of a list."""
    if isinstance(module, nn.Module) or not isinstance(module, (list, tuple)):
        return [cast("nn.Module", module)]
    if not all(isinstance(each, nn.Module) for each in module):
        return list(module)  # ``fully_shard`` of this package refuses these by name
    # By id, because a module class may define ``__eq__``.
    inside = {id(m) for each in module for m in each.modules() if m is not each}
    return [each for each in module if id(each) not in inside]


def _reshards(
    given: object, mesh: DeviceMesh | None
) -> tuple[dict[str, Any], bool | None]:
    """Return the placement, and whether the unit reshards; None: by its place."""
    if given is None:
        return {}, None
    if not isinstance(given, int):
        raise ValueError(
            "reshard_after_forward expects True, False, None or a number of ranks, "
            f"got {given!r}."
        )
    # True is an int in Python.
    if not isinstance(given, bool):
        # The last dim shards, in a mesh of one dim or of two.
        ranks = dist.get_world_size() if mesh is None else mesh.size(-1)
        if given < 1 or ranks % given:
            raise ValueError(
                f"reshard_after_forward expects a divisor of the {ranks} ranks that "
                f"shard, got {given}. Pass True or False."
            )
        if 1 < given < ranks:
            over = ("shard",)
            return {"placement": Placement(over, (f"shard:{given}",), over, over)}, True
        if given == 1:
            warn(
                "reshard_after_forward=1 keeps full parameters, as False. Pass True to "
                "free them.",
            )
        # With a single rank both answers are right, and False sends less.
        given = given > 1
    if given:
        return {}, True
    return {"strategy": ShardingStrategy.SHARD_GRAD_OP}, False


def _require_rows(
    modules: Sequence[nn.Module],
    placement_of: Callable[[nn.Parameter], object],
    ignored: set[nn.Parameter],
) -> None:
    """Raise PlanError unless ``placement_of`` returns placements; warn of columns."""
    columns: list[str] = []
    # FSDP2, too, asks only for the parameters that this call shards.
    named = chain(*(module.named_parameters() for module in modules))
    new = [(n, p) for n, p in named if id(p) not in LEAVES and p not in ignored]
    for name, parameter in new:
        placement = placement_of(parameter)
        # Duck typing spares the import of DTensor.
        dim = 0 if placement is None else getattr(placement, "dim", None)
        if not isinstance(dim, int):
            raise PlanError(
                f"shard_placement_fn returned {placement!r} for {quoted(name)}; "
                "expected None or Shard(0). For a mesh of their own, put the "
                "parameters in a module, and apply fully_shard(module, mesh=...) to it "
                "first."
            )
        # The modulus turns a negative dim into the dim that is meant.
        if dim % max(parameter.ndim, 1):
            columns.append(f"{quoted(name)} ({placement!r})")
    # One warning for a call, because a function answers alike for a whole model.
    if columns:
        more = f" and {len(columns) - 1} more" if columns[1:] else ""
        warn(
            f"shard_placement_fn asks for another dim than 0 for {columns[0]}{more}. "
            "Flat buffers are cut between rows, and the numbers of rows need not be "
            "divisible, so the dim changes no value. Leave shard_placement_fn out.",
        )


def mixed_precision_of(policy: object) -> MixedPrecision | None:
    """Return the ``MixedPrecision`` that equals FSDP2's ``policy``."""
    own = by_fields(MixedPrecisionPolicy, policy, argument="mp_policy", home=_HOME)
    # Without a dtype nothing is cast, whatever ``cast_forward_inputs`` says.
    if own.param_dtype is own.reduce_dtype is own.output_dtype is None:
        return None
    return MixedPrecision(
        param_dtype=own.param_dtype,
        reduce_dtype=own.reduce_dtype,
        output_dtype=own.output_dtype,
        # FSDP2 knows no root in this point: each unit casts its inputs, or none does.
        cast_forward_inputs=own.cast_forward_inputs,
        cast_root_forward_inputs=own.cast_forward_inputs,
    )


def cpu_offload_of(policy: object, device_type: str) -> CPUOffload | None:
    """Return the ``CPUOffload`` that equals FSDP2's ``policy``."""
    by_fields(OffloadPolicy, policy, argument="offload_policy", home=_HOME)
    # By name, because a script may still import the class from torch.
    if "CPUOffloadPolicy" not in [base.__name__ for base in type(policy).__mro__]:
        return None
    # Memory is pinned only beside a GPU, so on a CPU both values mean the same.
    if not getattr(policy, "pin_memory", True) and device_type != "cpu":
        raise PlanError(
            "offload_policy expects CPUOffloadPolicy(pin_memory=True) for a "
            f"{device_type} device, got pin_memory=False. Shards and gradients are "
            "copied beside compute here, which pageable memory does not allow. Leave "
            "pin_memory out, or train without offload."
        )
    return CPUOffload(offload_params=True)
