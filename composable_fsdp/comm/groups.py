"""Which ranks share a unit's parameters, and which hold copies of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.config import ShardingStrategy
from composable_fsdp.errors import CompositionError, PhaseError, PlanError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class GroupRef:
    """A process group, held weakly: torch.distributed keeps it until it is destroyed.

    A model that outlived ``destroy_process_group`` would otherwise keep the group's
    threads into the interpreter's exit, where they abort the process now and then.
    """

    __slots__ = ("_ref",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ref = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """Return the group. Raises: PhaseError, if it was destroyed."""
        group = self._ref()
        if group is None:
            raise PhaseError(
                "The process group that this module was sharded over was destroyed "
                "(torch.distributed.destroy_process_group). Build and shard the model "
                "again after init_process_group, and load its state."
            )
        return group

    def __deepcopy__(self, memo: dict[int, object]) -> GroupRef:
        """Process groups are shared by copies: they name ranks, not data."""
        return self


class Groups:
    """The process groups of one unit; ``None`` where a group would have one rank.

    ``shard``: ranks that cut the parameters between them; ``rank`` is this rank's
    place.
    ``replicate``: ranks with equal shards, whose gradients are averaged.
    """

    __slots__ = ("_replicate", "_shard", "rank", "replicas", "shard_world_size")

    def __init__(
        self, shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None
    ) -> None:
        # A group of one rank has nobody to talk to: from here on it does not exist.
        self.shard_world_size = shard.size() if shard is not None else 1
        self.replicas = replicate.size() if replicate is not None else 1
        self.rank = shard.rank() if shard is not None else 0
        alone = shard is None or self.shard_world_size == 1
        self._shard = None if alone or shard is None else GroupRef(shard)
        alone = replicate is None or self.replicas == 1
        self._replicate = None if alone or replicate is None else GroupRef(replicate)

    @property
    def shard(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameters."""
        return None if self._shard is None else self._shard.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies of the shard."""
        return None if self._replicate is None else self._replicate.get()

    @property
    def world_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard_world_size * self.replicas


class RankLayout:
    """What the caller said about ranks: one group, or a (shard, replicate) pair."""

    __slots__ = ("_replicate", "_shard", "device_type")

    def __init__(
        self,
        shard: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        device_type: str | None,
    ) -> None:
        self._shard = GroupRef(shard)
        self._replicate = None if replicate is None else GroupRef(replicate)
        self.device_type = device_type

    @property
    def shard(self) -> dist.ProcessGroup:
        """The ranks that share parameters; all ranks, if there is one group only."""
        return self._shard.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies, if the caller gave two groups."""
        return None if self._replicate is None else self._replicate.get()

    @property
    def world_size(self) -> int:
        """Ranks in both groups together."""
        return self.shard.size() * (self.replicate.size() if self.replicate else 1)

    def for_strategy(self, strategy: ShardingStrategy) -> Groups:
        """The groups of a unit with this strategy."""
        if self.replicate is not None:
            shard, replicate = self.shard, self.replicate
            if strategy not in HYBRID:
                raise PlanError(
                    f"{strategy.name} takes one process group, got a shard group and a "
                    "replicate group. Use HYBRID_SHARD, or pass one group."
                )
            return Groups(shard, replicate)
        if strategy in HYBRID:
            raise PlanError(
                f"{strategy.name} expects a 2-D device_mesh (replicate, shard) or a "
                "tuple (shard group, replicate group); got one group. Pass one of the "
                "two."
            )
        if strategy is ShardingStrategy.NO_SHARD:
            return Groups(None, self.shard)
        return Groups(self.shard, None)


def resolve_ranks(
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
) -> RankLayout:
    """Turn what the caller passed into groups.

    A 1-D mesh shards; a 2-D mesh with named dims replicates over dim 0 and shards over
    dim 1, and is for the hybrid strategies. Makes no group and sends nothing.

    Raises: PlanError, for another mesh, both a mesh and a group, or a rank outside;
    CompositionError, if torch.distributed was not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise CompositionError(
            "fully_shard needs a process group and torch.distributed is not "
            "initialised. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first; "
            "composable_fsdp.plan(module, world_size=...) needs neither."
        )
    if process_group is not None and device_mesh is not None:
        raise PlanError(
            "Pass process_group or device_mesh, not both: each names the ranks."
        )
    if device_mesh is not None:
        return _from_mesh(device_mesh, strategy)
    if isinstance(process_group, (tuple, list)):
        if len(process_group) != 2:
            raise PlanError(
                "A tuple of process groups is (shard group, replicate group); got "
                f"{len(process_group)} groups."
            )
        return RankLayout(_member(process_group[0]), _member(process_group[1]), None)
    group = process_group if process_group is not None else dist.group.WORLD
    return RankLayout(_member(group), None, None)


def _member(group: object) -> dist.ProcessGroup:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise PlanError(
            f"Rank {dist.get_rank()} is not in the process group it was given. Call "
            "fully_shard only on the ranks of the group."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group expects a torch.distributed.ProcessGroup, got "
            f"{type(group).__name__}."
        )
    return group


def _from_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> RankLayout:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh expects a DeviceMesh, got {type(mesh).__name__}.")
    if mesh.ndim == 1:
        return RankLayout(_member(mesh.get_group()), None, mesh.device_type)
    if mesh.ndim == 2 and mesh.mesh_dim_names:
        if strategy not in HYBRID:
            raise PlanError(
                f"A 2-D device_mesh replicates over {mesh.mesh_dim_names[0]!r} and "
                f"shards over {mesh.mesh_dim_names[1]!r}, which {strategy.name} does "
                "not do. Use HYBRID_SHARD, or pass a 1-D mesh."
            )
        return RankLayout(
            _member(mesh.get_group(1)), _member(mesh.get_group(0)), mesh.device_type
        )
    raise PlanError(
        "device_mesh expects a 1-D mesh, or a 2-D mesh with mesh_dim_names (replicate, "
        f"shard); got {mesh.ndim}-D{'' if mesh.mesh_dim_names else ' without names'}: "
        f"{mesh}. Name the dims: init_device_mesh(..., mesh_dim_names=('replicate', "
        "'shard')), and of a larger mesh take those two by name."
    )


def resolve_device(
    device_id: int | torch.device | None,
    ranks: RankLayout,
    parameters: Sequence[torch.Tensor],
) -> torch.device:
    """Return the compute device, the first of these that is known.

    ``device_id``, the mesh's, cuda under NCCL, the device of the parameters. The CPU,
    for parameters on meta: they may still get values elsewhere.
    """
    if device_id is not None:
        if isinstance(device_id, int):
            return torch.device("cuda", device_id)
        return _indexed(torch.device(device_id))
    if ranks.device_type is not None:
        wanted = _indexed(torch.device(ranks.device_type))
    elif dist.get_backend(ranks.shard) == "nccl":
        wanted = _indexed(torch.device("cuda"))
    else:
        real = (p.device for p in parameters if not p.is_meta)
        return next(real, torch.device("cpu"))
    return wanted


def _indexed(device: torch.device) -> torch.device:
    # Without an index it prints as its bare type, and means the current device.
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
