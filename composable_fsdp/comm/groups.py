"""Process groups of a unit: the ranks that shard, and the ranks that replicate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.comm.mesh_names import divide_mesh, refuse_model_parallel
from composable_fsdp.comm.nodes import PEERLESS, node_groups, node_size
from composable_fsdp.comm.operations import operation_log
from composable_fsdp.config import HYBRID, ShardingStrategy
from composable_fsdp.errors import CompositionError, PhaseError, PlanError


class GroupRef:
    """A weak reference to a process group, which torch.distributed keeps alive."""

    __slots__ = ("operations", "ref")

    def __init__(self, group: dist.ProcessGroup) -> None:
        # If a model held the group strongly and outlived ``destroy_process_group``, the
        # threads of the group would run until interpreter exit, where they sometimes
        # abort the process.
        self.ref = weakref.ref(group)
        """Called by the collectives of every step, which saves two function calls."""
        self.operations = operation_log(group)
        """The collectives over the group."""

    def get(self) -> dist.ProcessGroup:
        """Return the group. Raises: PhaseError, if the group was destroyed."""
        group = self.ref()
        if group is None:
            raise PhaseError(
                "The process group that this module was sharded over was destroyed "
                "(torch.distributed.destroy_process_group). Build and shard the model "
                "again after init_process_group, and load its state."
            )
        return group

    def __deepcopy__(self, memo: dict[int, object]) -> GroupRef:
        """Copies share the group: a process group names ranks and holds no data."""
        return self


class Groups:
    """The process groups of a unit. A group of a single rank is ``None``.

    ``shard``: the ranks that divide the parameters; ``rank`` is this rank's index
    there, ``shard_world_size`` the number of ranks. ``replicate``: the ranks with equal
    shards, over which gradients are averaged; ``replicas`` is the number of ranks.
    ``experts``: the ranks with other experts, in ``expert_ranks`` number; the unit
    exchanges nothing with them in a step.
    """

    __slots__ = (
        "can_average",
        "expert_ranks",
        "experts_ref",
        "has_peers",
        "names",
        "rank",
        "replicas",
        "replicate_ref",
        "shard_ref",
        "shard_world_size",
    )

    def __init__(
        self,
        shard: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        # A group of a single rank sends nothing, so the rest of the code sees no group.
        self.shard_world_size = shard.size() if shard is not None else 1
        self.replicas = replicate.size() if replicate is not None else 1
        self.rank = shard.rank() if shard is not None else 0
        alone = shard is None or self.shard_world_size == 1
        self.shard_ref = None if alone or shard is None else GroupRef(shard)
        alone = replicate is None or self.replicas == 1
        self.replicate_ref = None if alone or replicate is None else GroupRef(replicate)
        self.expert_ranks = 1 if experts is None else experts.size()
        alone = experts is None or self.expert_ranks == 1
        self.experts_ref = None if alone or experts is None else GroupRef(experts)
        self.can_average = all(
            each.operations.is_nccl
            for each in (self.shard_ref, self.replicate_ref)
            if each
        )
        """Whether collectives of GPU tensors can average; gloo can only sum."""
        self.has_peers = any(
            dist.get_backend(each) not in PEERLESS for each in self.present
        )
        """Whether there are other ranks; a fake group has none."""
        refs = (self.shard_ref, self.replicate_ref, self.experts_ref)
        self.names = tuple([each.get().group_name if each else "" for each in refs])
        """Equal for units over the same ranks; ``Groups`` may be several objects."""

    @property
    def shard(self) -> dist.ProcessGroup | None:
        """The ranks that divide the parameters."""
        return None if self.shard_ref is None else self.shard_ref.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The ranks that hold copies of this rank's shard."""
        return None if self.replicate_ref is None else self.replicate_ref.get()

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The ranks that hold other experts under this rank's unit."""
        return None if self.experts_ref is None else self.experts_ref.get()

    @property
    def cut(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold other elements: shard, then experts."""
        shard, experts = self.shard_ref, self.experts_ref
        # Clipping asks for each unit in every step: the usual case makes one call.
        if experts is None:
            return () if shard is None else (shard.get(),)
        return (*(() if shard is None else (shard.get(),)), experts.get())

    @property
    def expert_names(self) -> tuple[str, ...] | None:
        """Names of the groups that hold the same experts; None without experts.

        Ranks outside of these groups know other parameters under the unit.
        """
        # A rank alone has no such group, and then no other rank knows its experts.
        if self.experts_ref is None:
            return None
        return tuple(filter(None, self.names[:2]))

    @property
    def present(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of several ranks: shard, then replicate."""
        return tuple(
            each.get() for each in (self.shard_ref, self.replicate_ref) if each
        )

    @property
    def ranks(self) -> set[int]:
        """The global ranks of both groups; of a grid this rank's row and column."""
        # A group of one rank is no group, and sends nothing.
        return {dist.get_rank()}.union(*map(dist.get_process_group_ranks, self.present))

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank is in the first shard group of the replicas."""
        group = self.replicate
        return group is None or group.rank() == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is "rank 0" in the sense of ``rank0_only``."""
        group = self.experts
        first = group is None or group.rank() == 0
        return first and self.rank == 0 and self.in_first_replica

    @property
    def world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.shard_world_size * self.replicas


def group_sizes(
    strategy: ShardingStrategy, *, world_size: int, shard_world_size: int | None = None
) -> tuple[int, int]:
    """Return the size of a unit's shard group and the number of replicas.

    Returns: ``(shard_world_size, replicas)``; the product is ``world_size``.
    Raises: PlanError, if a hybrid strategy gets no ``shard_world_size``.
    """
    if strategy is ShardingStrategy.NO_SHARD:
        return 1, world_size
    if shard_world_size is not None:
        return shard_world_size, world_size // shard_world_size
    if strategy in HYBRID:
        # The number of nodes is unknown here, so the plan cannot choose the groups that
        # a hybrid strategy chooses by itself.
        raise PlanError(
            f"A plan with {strategy.name} expects shard_world_size, the ranks that "
            "share the parameters. Pass the size of the mesh's shard dim, or of a node."
        )
    return world_size, 1


class RankLayout:
    """The ranks that the caller of ``fully_shard`` chose, and the groups per strategy.

    ::

        given             NO_SHARD         FULL_SHARD,         hybrid strategies
                                           SHARD_GRAD_OP
        nothing           replicate (all)  shard (all)         shard within a node,
                                                               replicate across nodes
        a group           replicate        shard               PlanError
        (shard,           replicate (all)  shard within the first, replicate over
         replicate)                        the second
    """

    __slots__ = (
        "_experts",
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
        experts: dist.ProcessGroup | None = None,
    ) -> None:
        self._shard = GroupRef(shard)
        self._experts = None if experts is None else GroupRef(experts)
        self._replicate = None if replicate is None else GroupRef(replicate)
        self.device_type = device_type
        """Device type of the mesh, or ``None`` without a mesh."""
        self.by_node = by_node
        """Whether the caller gave neither a group nor a mesh."""
        self.is_nccl = self._shard.operations.is_nccl
        self.shard_world_size = shard.size()
        self.replicas = replicate.size() if replicate is not None else 1
        self._groups: dict[ShardingStrategy, Groups] = {}
        """Groups by strategy, so that units with the same strategy share an object."""

    @property
    def shard(self) -> dist.ProcessGroup:
        """The shard group; the group of all ranks if the caller gave no pair."""
        return self._shard.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The replicate group, if the caller gave a pair of groups or a 2-D mesh."""
        return None if self._replicate is None else self._replicate.get()

    @property
    def experts(self) -> dist.ProcessGroup | None:
        """The ranks with other experts, if the caller gave an ``expert_mesh``."""
        return None if self._experts is None else self._experts.get()

    @property
    def world_size(self) -> int:
        """Number of ranks in both groups together."""
        return self.shard_world_size * self.replicas

    def sizes(self, strategy: ShardingStrategy) -> tuple[int, int]:
        """Return the sizes of the shard group and the replicate group for ``strategy``.

        Raises: PlanError, if the strategy is not possible on these ranks.
        """
        size = None
        if strategy is ShardingStrategy.NO_SHARD:
            self._require_everyone()
        elif self.replicate is not None:
            size = self.shard_world_size
        elif strategy in HYBRID:
            if not self.by_node:
                raise PlanError(
                    f"{strategy.name} expects a 2-D device_mesh (replicate, shard) or "
                    "a tuple (shard group, replicate group); got one group. Pass one "
                    "of the two, or neither to shard within a node."
                )
            size = node_size(self.world_size)
        return group_sizes(strategy, world_size=self.world_size, shard_world_size=size)

    def for_strategy(self, strategy: ShardingStrategy) -> Groups:
        """Return the groups of a unit with ``strategy``; units share equal groups.

        Collective: creates the groups of the nodes at the first call for a hybrid
        strategy without given groups; all ranks of the default group must call. Else
        none.
        Raises: PlanError, as ``sizes``.
        """
        if strategy not in self._groups:
            self.sizes(strategy)
            if self.replicate is None and strategy in HYBRID:
                # Not cached: the groups of the nodes may be destroyed before the
                # default group.
                return Groups(*node_groups(self.world_size))
            if strategy is ShardingStrategy.NO_SHARD:
                everyone = self._everyone()
                self._groups[strategy] = Groups(None, everyone, self.experts)
            else:
                made = Groups(self.shard, self.replicate, self.experts)
                self._groups[strategy] = made
        return self._groups[strategy]

    def _everyone(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks: shard, replicate, or the default group."""
        shard, replicate = self.shard, self.replicate
        if replicate is None or replicate.size() == 1:
            return shard
        return replicate if shard.size() == 1 else dist.group.WORLD

    def _require_everyone(self) -> None:
        """Raise PlanError if no single group holds all ranks, which NO_SHARD needs."""
        group = self._everyone()
        if group is not None and group.size() != self.world_size:
            raise PlanError(
                "NO_SHARD averages over all ranks in one group; the two that were "
                f"given hold {self.world_size} ranks together, the default group "
                f"{group.size()}. Pass one group, or a 1-D mesh, of the "
                f"{self.world_size} ranks."
            )


def require_process_group(api: str) -> None:
    """Raise CompositionError, naming ``api``, without an initialised process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise CompositionError(
            f"{api} needs a process group and torch.distributed is not initialised. "
            "Start the script with torchrun and call "
            "torch.distributed.init_process_group() first; "
            "composable_fsdp.plan(module, world_size=...) needs neither."
        )


def resolve_ranks(
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    device_mesh: DeviceMesh | None,
    api: str,
    expert_mesh: DeviceMesh | None = None,
) -> RankLayout:
    """Turn the caller's groups and meshes into a ``RankLayout``.

    A 1-D mesh shards. A 2-D mesh replicates over dim 0 and shards over dim 1; a mesh
    whose dims are named in the other order is refused.

    Returns: the layout.
    Collective: none; creates no group.
    Raises: PlanError, for any other mesh, for both a mesh and a group, or if this rank
    is not in the group; CompositionError, if torch.distributed is not initialised.
    """
    found = _data_ranks(process_group, device_mesh, api)
    if expert_mesh is None:
        return found
    experts = _expert_group(expert_mesh, found)
    return RankLayout(found.shard, found.replicate, found.device_type, experts=experts)


def _data_ranks(
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
    device_mesh: DeviceMesh | None,
    api: str,
) -> RankLayout:
    """Return the layout without experts; see ``resolve_ranks``."""
    require_process_group(api)
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
    # Only the default group may be divided by node: the caller's own group is used as
    # given.
    by_node = process_group is None
    # Units of the same group share a layout, so that they also share ``Groups``
    # objects.
    layouts = _layouts.setdefault(group, {})
    if by_node not in layouts:
        layouts[by_node] = RankLayout(group, None, None, by_node=by_node)
    return layouts[by_node]


# Layouts by group; the key is whether the caller gave no group. A layout references its
# group weakly (``GroupRef``), so that the entry is deleted together with the group.
_layouts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, RankLayout]] = (
    weakref.WeakKeyDictionary()
)


def _expert_group(mesh: object, ranks: RankLayout) -> dist.ProcessGroup:
    """Return the group of ranks with other experts.

    Raises: PlanError, if a rank of the mesh also shares the unit; TypeError.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"expert_mesh expects a 1-D DeviceMesh, got {type(mesh).__name__}. Pass "
            "the dimension whose ranks hold other experts, such as mesh['ep']."
        )
    if mesh.ndim != 1:
        raise PlanError(
            f"expert_mesh expects a 1-D mesh, got {mesh.ndim}-D: {mesh}. Pass the "
            "dimension whose ranks hold other experts, such as mesh['ep']."
        )
    group = _member(mesh.get_group())
    pairs = (ranks.shard, ranks.replicate)
    data = [dist.get_process_group_ranks(each) for each in pairs if each is not None]
    shared = set(chain(*data)) & set(dist.get_process_group_ranks(group))
    # Ranks that share the unit hold the same experts.
    if shared != {dist.get_rank()}:
        raise PlanError(
            "expert_mesh expects ranks that hold other experts; of its ranks "
            f"{sorted(shared)} also share or copy this unit. Make one mesh of all data "
            "ranks, (edp, ep), and pass device_mesh=mesh['edp'], "
            "expert_mesh=mesh['ep']."
        )
    return group


def _refuse_overlap(shard: dist.ProcessGroup, replicate: dist.ProcessGroup) -> None:
    """Raise PlanError unless this rank is the only rank in both groups."""
    first, second = map(dist.get_process_group_ranks, (shard, replicate))
    # The two groups must be a row and a column of a grid of ranks.
    if len(set(first) & set(second)) > 1:
        raise PlanError(
            "A tuple of process groups expects (shard group, replicate group) that "
            f"have one rank in common; got ranks {sorted(first)} and {sorted(second)}. "
            "Make them the rows and columns of a grid, or pass a 2-D device_mesh."
        )


def _member(group: object) -> dist.ProcessGroup:
    """Return ``group``; raise if ``group`` is no process group of this rank."""
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
    """Return the layout of a 1-D mesh, a 2-D mesh (replicate, shard), or by names."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh expects a DeviceMesh, got {type(mesh).__name__}. Make one "
            "with torch.distributed.device_mesh.init_device_mesh."
        )
    if mesh.ndim == 1:
        if mesh._get_root_mesh().ndim > 1:
            refuse_model_parallel(mesh, *(mesh.mesh_dim_names or ()))
        return RankLayout(_member(mesh.get_group()), None, mesh.device_type)
    if mesh.ndim == 2:
        first, second = mesh.mesh_dim_names or ("", "")
        # A mesh with the dims in the other order would silently shard over the
        # replicas.
        if "shard" in first or "replicate" in second:
            raise PlanError(
                "A 2-D device_mesh expects dimension 0 to replicate and dimension 1 to "
                f"shard; got dimensions named {first!r} and {second!r}. Make it as "
                "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
            )
        refuse_model_parallel(mesh, first, second)
        return RankLayout(
            _member(mesh.get_group(1)), _member(mesh.get_group(0)), mesh.device_type
        )
    shard, replicate = divide_mesh(mesh)
    return RankLayout(
        _member(shard.get_group()),
        None if replicate is None else _member(replicate.get_group()),
        mesh.device_type,
    )
