"""Which ranks share a unit's parameters, and which hold copies of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.nodes import node_groups, node_size
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

    __slots__ = (
        "_replicate",
        "_shard",
        "can_average",
        "rank",
        "replicas",
        "shard_world_size",
    )

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
        self.can_average = all(
            _is_nccl(each.get()) for each in (self._shard, self._replicate) if each
        )
        """Whether collectives of tensors on a GPU can average: gloo's only sum."""

    @property
    def shard(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameters."""
        return None if self._shard is None else self._shard.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies of the shard."""
        return None if self._replicate is None else self._replicate.get()

    @property
    def in_first_replica(self) -> bool:
        """Whether no other shard group comes before this rank's."""
        group = self.replicate
        return group is None or group.rank() == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank comes first of all: what ``rank0_only`` means by 0."""
        return self.rank == 0 and self.in_first_replica

    @property
    def world_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard_world_size * self.replicas


def _is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL sends what is on a GPU.

    ``init_process_group()`` without a backend, and ``"cpu:gloo,cuda:nccl"``, make a
    group that has one for each device, and whose name is neither.
    """
    return "cuda:nccl" in dist.get_backend_config(group)


class RankLayout:
    """What the caller said about ranks: one group, a (shard, replicate) pair, nothing.

    The ranks say who shares parameters, the strategy what is kept and when. With a pair
    every strategy but NO_SHARD shards over the first and replicates over the second.
    With one group FULL_SHARD and SHARD_GRAD_OP shard over it, and NO_SHARD replicates.
    The hybrid strategies need a pair; if nothing was given they shard within a node.
    """

    __slots__ = (
        "_groups",
        "_replicate",
        "_shard",
        "by_node",
        "device_type",
        "is_nccl",
        "replicas",
        "shard_world_size",
    )

    def __init__(
        self,
        shard: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        device_type: str | None,
        *,
        by_node: bool = False,
    ) -> None:
        self._shard = GroupRef(shard)
        self._replicate = None if replicate is None else GroupRef(replicate)
        self.device_type = device_type
        self.by_node = by_node
        self.is_nccl = _is_nccl(shard)
        self.shard_world_size = shard.size()
        self.replicas = replicate.size() if replicate is not None else 1
        self._groups: dict[ShardingStrategy, Groups] = {}

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
        return self.shard_world_size * self.replicas

    def sizes(self, strategy: ShardingStrategy) -> tuple[int, int]:
        """Ranks that share a unit's parameters, and copies of them. Only reads.

        Raises: PlanError, if the strategy cannot be had on these ranks.
        """
        replicate = self.replicate
        if strategy is ShardingStrategy.NO_SHARD:
            self._require_everyone()
            return 1, self.world_size
        if replicate is not None:
            return self.shard_world_size, self.replicas
        if strategy not in HYBRID:
            return self.world_size, 1
        if not self.by_node:
            raise PlanError(
                f"{strategy.name} expects a 2-D device_mesh (replicate, shard) or a "
                "tuple (shard group, replicate group); got one group. Pass one of the "
                "two, or neither to shard within a node."
            )
        size = node_size(self.world_size)
        return size, self.world_size // size

    def for_strategy(self, strategy: ShardingStrategy) -> Groups:
        """The groups of a unit with this strategy; equal ones are one object.

        Collective: makes the groups of the nodes the first time they are asked for;
        else none.
        Raises: PlanError, as ``sizes``.
        """
        if strategy not in self._groups:
            self.sizes(strategy)
            if self.replicate is None and strategy in HYBRID:
                # Not kept: the nodes' groups may be destroyed before this one.
                return Groups(*node_groups(self.world_size))
            if strategy is ShardingStrategy.NO_SHARD:
                self._groups[strategy] = Groups(None, self._everyone())
            else:
                self._groups[strategy] = Groups(self.shard, self.replicate)
        return self._groups[strategy]

    def _everyone(self) -> dist.ProcessGroup | None:
        """One group of all ranks."""
        shard, replicate = self.shard, self.replicate
        if replicate is None or replicate.size() == 1:
            return shard
        return replicate if shard.size() == 1 else dist.group.WORLD

    def _require_everyone(self) -> None:
        group = self._everyone()
        if group is not None and group.size() != self.world_size:
            raise PlanError(
                "NO_SHARD averages over all ranks in one group; the two that were "
                f"given hold {self.world_size} ranks together, the default group "
                f"{group.size()}. Pass one group, or a 1-D mesh, of the "
                f"{self.world_size} ranks."
            )


def resolve_ranks(
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    device_mesh: DeviceMesh | None,
) -> RankLayout:
    """Turn what the caller passed into groups.

    A 1-D mesh shards; a 2-D mesh replicates over dim 0 and shards over dim 1, unless
    its dims are named the other way round. Makes no group and sends nothing.

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
        return _from_mesh(device_mesh)
    if isinstance(process_group, (tuple, list)):
        if len(process_group) != 2:
            raise PlanError(
                "A tuple of process groups is (shard group, replicate group); got "
                f"{len(process_group)} groups."
            )
        shard, replicate = _member(process_group[0]), _member(process_group[1])
        _refuse_overlap(shard, replicate)
        return RankLayout(shard, replicate, None)
    group = _member(process_group if process_group is not None else dist.group.WORLD)
    by_node = process_group is None
    layouts = _layouts.setdefault(group, {})
    if by_node not in layouts:
        layouts[by_node] = RankLayout(group, None, None, by_node=by_node)
    return layouts[by_node]


# What units of one group share: it holds its group weakly, so it goes with the group.
_layouts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, RankLayout]] = (
    weakref.WeakKeyDictionary()
)


def _refuse_overlap(shard: dist.ProcessGroup, replicate: dist.ProcessGroup) -> None:
    """Two groups form a grid only if this rank is all that they share."""
    first, second = map(dist.get_process_group_ranks, (shard, replicate))
    if len(set(first) & set(second)) > 1:
        raise PlanError(
            "A tuple of process groups expects (shard group, replicate group) that "
            f"have one rank in common; got ranks {sorted(first)} and {sorted(second)}. "
            "Make them the rows and columns of a grid, or pass a 2-D device_mesh."
        )


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


def _from_mesh(mesh: DeviceMesh) -> RankLayout:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh expects a DeviceMesh, got {type(mesh).__name__}. Make one "
            "with torch.distributed.device_mesh.init_device_mesh."
        )
    if mesh.ndim == 1:
        return RankLayout(_member(mesh.get_group()), None, mesh.device_type)
    if mesh.ndim == 2:
        first, second = mesh.mesh_dim_names or ("", "")
        if "shard" in first or "replicate" in second:
            raise PlanError(
                "A 2-D device_mesh expects dimension 0 to replicate and dimension 1 to "
                f"shard; got dimensions named {first!r} and {second!r}. Make it as "
                "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
            )
        return RankLayout(
            _member(mesh.get_group(1)), _member(mesh.get_group(0)), mesh.device_type
        )
    raise PlanError(
        "device_mesh expects a 1-D mesh, or a 2-D mesh (replicate, shard); got "
        f"{mesh.ndim}-D: {mesh}. Of a larger mesh take those dims by name: "
        "init_device_mesh(..., mesh_dim_names=(..., 'replicate', 'shard'))"
        "['replicate', 'shard']."
    )


def resolve_device(
    device_id: int | torch.device | None,
    ranks: RankLayout,
    parameters: Sequence[torch.Tensor],
    below: Sequence[torch.device] = (),
) -> torch.device:
    """Return the compute device, the first of these that is known.

    ``device_id``, the mesh's, cuda under NCCL, the device of the parameters, that of
    the units ``below``: a root may have no parameters of its own. The CPU, for
    parameters on meta: they may still get values elsewhere.

    Which cuda: the one where parameters are, or the group was bound to, or the current
    one; where no GPU was used yet that is the one of torchrun's local rank, from now
    on.
    """
    if device_id is not None:
        if isinstance(device_id, int):
            return torch.device("cuda", device_id)
        return _indexed(torch.device(device_id))
    known = chain((p.device for p in parameters if not p.is_meta), below)
    kind = "cuda" if ranks.is_nccl else None
    if ranks.device_type is not None:
        kind = ranks.device_type
    if kind is None:
        return next(known, torch.device("cpu"))
    bound = getattr(ranks.shard, "bound_device_id", None)
    near = chain(known, () if bound is None else (bound,))
    same = (device for device in near if device.type == kind)
    return next(same, None) or _indexed(torch.device(kind))


def _indexed(device: torch.device) -> torch.device:
    # Without an index it prints as its bare type, and means the current device.
    if str(device) == "cuda":
        local = os.environ.get("LOCAL_RANK", "")
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
        if not used and local.isdecimal() and int(local) < torch.cuda.device_count():
            # Else all ranks of a node meet on its first GPU.
            torch.cuda.set_device(int(local))
        return torch.device("cuda", torch.cuda.current_device())
    return device
