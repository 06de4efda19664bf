"""Process groups: what each has sent, and those of a unit."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

from composable_fsdp.comm.placements import Choice, Grid, Ways
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

    def raises(self, text: str, *, owes: bool = False) -> None:
        """Tell that this rank raises ``text`` and, if it ``owes``, none can go on."""

    def last_words(self) -> str:
        """Return what the other ranks said last."""
        return ""

    def failed(self, operation: Any) -> Exception | None:
        """Return why the backend has raised in ``operation``, if another rank told."""
        return None


class GroupRef:
    """A weak reference to a process group, with its collectives in order of issue."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # If a model held the group strongly and outlived ``destroy_process_group``, the
        # threads of the group would run until interpreter exit, where they sometimes
        # abort the process.
        self.ref = weakref.ref(group)
        """Called by the collectives of every step, which saves two function calls."""
        self.name, self.size = group.group_name, group.size()
        self.number = 0  # of collectives issued so far
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
        self.layouts: dict[bool, RankLayout] = {}
        """Of units that name this group alone; by whether the caller gave no group."""

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


# Weak keys: a destroyed group takes its log along.
_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupRef] = (
    weakref.WeakKeyDictionary()
)


def operation_log(group: dist.ProcessGroup) -> GroupRef:
    """Return the log of ``group``."""
    found = _logs.get(group)
    if found is None:
        found = _logs[group] = GroupRef(group)
    return found


def operation_logs() -> list[GroupRef]:
    """Return the logs of all process groups that exist."""
    return list(_logs.values())


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

    def __init__(
        self,
        shard: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
        steps: Sequence[dist.ProcessGroup | None] | None = None,
    ) -> None:
        self.rank = shard.rank() if shard is not None else 0
        # A group of a single rank sends nothing, so the rest of the code sees no group.
        given = [shard, replicate, *(steps or (shard, replicate, None, None))]
        found = [None if group is None else operation_log(group) for group in given]
        refs = [ref if ref and ref.size > 1 else None for ref in found]
        self.shard_ref, self.replicate_ref, self.scatter_ref = refs[:3]
        self.sum_ref, self.kept_ref, self.spread_ref = refs[3:]
        self.shard_world_size, self.replicas, ranks = [
            1 if ref is None else ref.size for ref in refs[:3]
        ]
        self.reduced_shards = self.shard_world_size // ranks
        """Number of shards in what a rank gets of a reduction."""
        sending = [ref for ref in refs[:2] if ref is not None]
        self.can_average = all(ref.is_nccl for ref in sending)
        """Whether collectives of GPU tensors can average; gloo can only sum."""
        self.has_peers = any(
            dist.get_backend(ref.get()) not in PEERLESS for ref in sending
        )
        """Whether there are other ranks; a fake group has none."""
        self.names = tuple([each.name if each else "" for each in refs[:2]])
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


@dataclass(eq=False)
class RankLayout:
    """The ranks that the caller of ``fully_shard`` chose, and groups per strategy."""

    shard_ref: GroupRef
    replicate_ref: GroupRef | None
    grid: Grid
    members: Sequence[int]
    """The global ranks in the order of ``grid``."""
    device_type: str | None = None
    by_node: bool = False
    """Whether the caller gave neither a group nor a mesh."""
    ways: dict[Choice, Ways] = field(default_factory=dict)
    """Numbers of ranks by placement, which each unit asks for."""
    groups: dict[Choice, Groups] = field(default_factory=dict)
    """Groups by placement, so that units with the same one share an object."""

    def __post_init__(self) -> None:
        self.world_size = len(self.members)

    @property
    def shard(self) -> dist.ProcessGroup:
        """The shard group; the group of all ranks if the caller gave no pair."""
        return self.shard_ref.get()

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The replicate group, if the caller gave a pair of groups or a 2-D mesh."""
        return None if self.replicate_ref is None else self.replicate_ref.get()
