"""Process groups: what each has sent, and those of a unit, to shard and to replicate.

The collectives themselves are in ``comm.operations``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from threading import Thread
from typing import Any

import torch.distributed as dist

from composable_fsdp.comm.placements import REPLICATE, SHARD, Choice, Ways, grid_of
from composable_fsdp.errors import PhaseError

SIMULATED = "simulated"
"""The backend of ``tools.fake_world``, which sends as NCCL does."""

MOST_OPERATIONS = 1024
"""Number of operations that are kept per process group."""

PATIENCE = timedelta(seconds=2)
"""Time that ``Operation.wait`` blocks before asking whether it never ends."""

NO_LIMIT = timedelta(0)  # as ``Work.wait`` takes it

PEERLESS = ("fake", SIMULATED)
"""Backends of groups without other ranks; ``fake`` is torch's."""


class Recorder:
    """What sees the operations of a group; this one asks and tells no other rank."""

    def issued(self, operation: Any) -> None:
        """Check ``operation`` before it is sent, if the log is ``guarded``."""

    def awaited(self, operation: Any) -> Exception | None:
        """Return the error that ends a long wait, if ``operation`` never ends."""
        return None

    def raises(self, text: str, *, owes: bool) -> None:
        """Tell the other ranks that this rank raises ``text``."""

    def last_words(self) -> str:
        """Return what the other ranks said last."""
        return ""

    def failed(self, operation: Any) -> Exception | None:
        """Return why the backend has raised in ``operation``, if another rank told."""
        return None


class OperationLog:
    """The collectives of a process group on this rank, in the order of issue."""

    __slots__ = (
        *("__weakref__", "coalesces", "guarded", "is_nccl", "marks", "name"),
        *("number", "operations", "patience", "recorder", "threads"),
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = group.group_name
        self.number = 0
        """Number of collectives issued so far."""
        self.operations: deque[Any] = deque(maxlen=MOST_OPERATIONS)
        """The last ``comm.operations.Operation`` objects."""
        # By device: ``"cpu:gloo,cuda:nccl"`` makes a group that is neither of the two.
        backends = dist.get_backend_config(group)
        self.is_nccl = "cuda:nccl" in backends
        """Whether the group sends CUDA tensors by NCCL."""
        self.coalesces = self.is_nccl or SIMULATED in backends
        """Whether an all-reduce of several tensors is sent as one."""
        # Only gloo's ``Work`` can be waited for in slices: with NCCL, a limit makes the
        # host wait for the GPU.
        self.patience = PATIENCE if "cpu:gloo" in backends else NO_LIMIT
        """Limit of a single wait of the host for a collective of CPU tensors."""
        self.recorder = Recorder()
        self.guarded = False  # whether the recorder checks each operation first
        # Not identities, which an idle thread may get from one that has ended.
        self.threads: set[Thread] = set()
        """The threads that have sent over the group."""
        # By event and not by operation: an event that is recorded again stands for the
        # later operation alone. Units write here in every step, without a call.
        self.marks: dict[Any, int] = {}
        """By CUDA event: the number of the operation behind which it was recorded."""


_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, OperationLog] = (
    weakref.WeakKeyDictionary()
)


def operation_log(group: dist.ProcessGroup) -> OperationLog:
    """Return the log of ``group``."""
    # Weak keys: a destroyed group takes its log along.
    found = _logs.get(group)
    if found is None:
        found = _logs[group] = OperationLog(group)
    return found


def operation_logs() -> list[OperationLog]:
    """Return the logs of all process groups that exist."""
    return list(_logs.values())


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


def _ref(group: dist.ProcessGroup | None) -> GroupRef | None:
    return None if group is None else GroupRef(group)


class Groups:
    """The process groups of a unit. A group of a single rank is ``None``.

    ::

        shard       divide the parameters; ``rank`` of ``shard_world_size``
        replicate   hold equal shards and average gradients; ``replicas`` in number
        scatter     divide the reduced gradients; ``shard`` of most placements
        sum         add up what they hold; ``replicate`` of most placements
        kept        divide the pieces that stay when the full parameters are freed
        spread      divide such a piece; hold its shards
    """

    __slots__ = (
        *("can_average", "has_peers", "kept_ref"),
        *("names", "rank", "reduced_shards", "replicas", "replicate_ref"),
        *("scatter_ref", "shard_ref", "shard_world_size", "spread_ref", "sum_ref"),
    )

    def __init__(
        self,
        shard: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
        steps: Sequence[dist.ProcessGroup | None] | None = None,
    ) -> None:
        self.rank = shard.rank() if shard is not None else 0
        given = (shard, replicate)
        sizes = [1 if group is None else group.size() for group in given]
        self.shard_world_size, self.replicas = sizes
        # A group of a single rank sends nothing, so the rest of the code sees no group.
        refs = [
            None if size == 1 else _ref(group)
            for group, size in zip(given, sizes, strict=True)
        ]
        self.shard_ref, self.replicate_ref = refs
        # Equal groups share a reference: the log of operations is one per group.
        given_refs = dict(zip(given, refs, strict=True))
        self.scatter_ref, self.sum_ref, self.kept_ref, self.spread_ref = [
            given_refs[group] if group in given_refs else _ref(group)
            for group in steps or (shard, replicate, None, None)
        ]
        ref = self.scatter_ref
        ranks = 1 if ref is None else ref.get().size()
        self.reduced_shards = self.shard_world_size // ranks
        """Number of shards in what a rank gets of a reduction."""
        sending = [ref for ref in refs if ref is not None]
        self.can_average = all(ref.operations.is_nccl for ref in sending)
        """Whether collectives of GPU tensors can average; gloo can only sum."""
        self.has_peers = any(
            dist.get_backend(ref.get()) not in PEERLESS for ref in sending
        )
        """Whether there are other ranks; a fake group has none."""
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
    def present(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of several ranks: shard, then replicate."""
        return tuple(
            each.get() for each in (self.shard_ref, self.replicate_ref) if each
        )

    @property
    def gathering(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which the ranks of ``shard`` gather parameters, each once."""
        refs = (self.shard_ref, self.kept_ref, self.spread_ref)
        return tuple(dict.fromkeys(each.get() for each in refs if each))

    @property
    def sending(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which a step may send, each once."""
        reduces = [ref.get() for ref in (self.scatter_ref, self.sum_ref) if ref]
        return tuple(dict.fromkeys((*self.gathering, *self.present, *reduces)))

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
        return self.rank == 0 and self.in_first_replica

    @property
    def world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.shard_world_size * self.replicas


class RankLayout:
    """The ranks that the caller of ``fully_shard`` chose, and the groups per strategy.

    ``comm.nodes.groups_for`` makes the groups.
    """

    __slots__ = (
        *("_replicate", "_shard", "by_node", "device_type", "grid"),
        *("groups", "is_nccl", "members", "ways", "world_size"),
    )

    def __init__(
        self,
        shard: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        device_type: str | None,
        *,
        mesh: tuple[Sequence[str], Sequence[int], Sequence[int]] | None = None,
        by_node: bool = False,
    ) -> None:
        self._shard = GroupRef(shard)
        self._replicate = _ref(replicate)
        self.device_type = device_type
        """Device type of the mesh, or ``None`` without a mesh."""
        self.members: Sequence[int] | None = None
        """The global ranks in the order of ``grid``; None for a pair of groups."""
        names: Sequence[str] = ()
        shape: Sequence[int] = [each.size() for each in (replicate, shard) if each]
        if mesh is not None:
            names, shape, self.members = mesh
        elif replicate is None:
            self.members = dist.get_process_group_ranks(shard)
        names = names or (REPLICATE, SHARD)[-len(shape) :]
        self.grid = grid_of(dict(zip(names, shape, strict=True)))
        self.world_size = prod(shape)
        """Number of ranks in both groups together."""
        self.by_node = by_node
        """Whether the caller gave neither a group nor a mesh."""
        self.is_nccl = self._shard.operations.is_nccl
        self.ways: dict[Choice, Ways] = {}
        """Numbers of ranks by placement, which each unit asks for."""
        self.groups: dict[Choice, Groups] = {}
        """Groups by placement, so that units with the same one share an object."""

    @property
    def shard(self) -> dist.ProcessGroup:
        """The shard group; the group of all ranks if the caller gave no pair."""
        return self._shard.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The replicate group, if the caller gave a pair of groups or a 2-D mesh."""
        return None if self._replicate is None else self._replicate.get()
