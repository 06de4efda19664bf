"""``Machine``: the speeds that give a step its times; presets with their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from composable_fsdp.errors import PlanError

PRODUCT, ATTENTION, MEMORY, FUSED = "product", "attention", "memory", "fused"
"""Kinds of ``Cost``: matrix products; attention in one kernel; what else an eager step
runs; and what a compiler leaves of that."""


class Cost(NamedTuple):
    """What an operation computes and moves."""

    kind: str
    operations: float
    nbytes: int


@dataclass(frozen=True)
class Machine:
    """Speeds that give a step its times; the memory does not depend on them.

    Args:
        operations_per_second: of matrix products. Default 4e14, near the rate of a
            large model on an H100 in bfloat16.
        memory_bytes_per_second: of other operations. Default 2e12.
        link_bytes_per_second: of a rank's link to other nodes, in each direction.
            Default 5e10.
        latency: seconds before a collective moves its first byte; with ``node_size``,
            per node that it passes. Default 2e-5.
        attention_per_second: operations of attention in one kernel; a causal one counts
            half. Default None: as of matrix products.
        float8_speedup: of matrix products in float8, casts included. Default 1.45.
        node_size: ranks in a node. Default 1.
        node_bytes_per_second: of a rank's link inside of a node. Default 5e10.
        node_latency: seconds of a collective inside of a node. Default 2e-5.
        launch: seconds in which the host issues an operation. Default 0.
    """

    operations_per_second: float = 4e14
    memory_bytes_per_second: float = 2e12
    link_bytes_per_second: float = 5e10
    latency: float = 2e-5
    attention_per_second: float | None = None
    float8_speedup: float = 1.45
    node_size: int = 1
    node_bytes_per_second: float = 5e10
    node_latency: float = 2e-5
    launch: float = 0.0

    def seconds(self, cost: Cost, *, float8: bool = False) -> float:
        """Return the time of an operation: arithmetic or memory, the slower."""
        rate = self.operations_per_second
        if cost.kind == ATTENTION:
            rate = self.attention_per_second or rate
        elif float8:
            rate *= self.float8_speedup
        arithmetic = cost.operations / rate
        return max(arithmetic, cost.nbytes / self.memory_bytes_per_second)

    def collective(
        self, nbytes: int, ranks: int, *, rounds: int = 1, apart: bool = False
    ) -> float:
        """Return the seconds of a collective of whole buffers of ``nbytes``.

        A ring, ``rounds`` times; with ``apart`` each rank is in a node of its own.
        """
        near = 1 if apart else min(self.node_size, ranks)
        nodes = -(-ranks // near)
        moved = rounds * nbytes
        # A node receives what its ranks lack by all its links at once, while its own
        # links pass everything on.
        outside = moved * (nodes - 1) / nodes / (near * self.link_bytes_per_second)
        inside = moved * (ranks - 1) / ranks / self.node_bytes_per_second
        if self.node_size == 1:
            return self.latency + outside
        waiting = self.node_latency + self.latency * (nodes - 1)
        return waiting + max(outside, inside * (near > 1))


# Products: 85 % of the best shape of a matrix product in the table "Maximum Achievable
# Matmul FLOPS" of github.com/stas00/ml-engineering (compute/accelerator): 794.5 T on an
# H100 or H200, 1,745 T on a B200; of an L40S, 70 % of its data sheet. In float8 1.45
# times as many, casts included. Attention: 335 T, FlashAttention-2 on an H100
# (arXiv:2307.08691, section 4.1), scaled by the peak for others. Memory: 90 % of data
# sheets. Inside a node: 80 % of NVLink's 450 and 900 GB/s; between nodes 90 % of the
# 400 Gb/s of a GPU. A host issues an eager operation in about 6 us.
_H100 = Machine(
    operations_per_second=0.85 * 794.5e12,
    memory_bytes_per_second=0.9 * 3.35e12,
    link_bytes_per_second=0.9 * 5e10,
    latency=1.5e-5,
    attention_per_second=335e12,
    node_size=8,
    node_bytes_per_second=0.8 * 4.5e11,
    launch=6e-6,
)

MACHINES = {
    "h100": _H100,
    # What limits a matrix product is power.
    "h100-500w": replace(
        _H100,
        operations_per_second=0.85 * 794.5e12 * 500 / 700,
        memory_bytes_per_second=0.9 * 2.4e12,
    ),
    "h200": replace(_H100, memory_bytes_per_second=0.9 * 4.8e12),
    "b200": replace(
        _H100,
        operations_per_second=0.85 * 1745e12,
        memory_bytes_per_second=0.9 * 8e12,
        attention_per_second=335e12 * 2250 / 989,
        node_bytes_per_second=0.8 * 9e11,
    ),
    "pcie": replace(
        _H100,
        operations_per_second=0.7 * 362e12,
        memory_bytes_per_second=0.9 * 8.64e11,
        link_bytes_per_second=0.9 * 3.125e9,
        attention_per_second=335e12 * 362 / 989,
        node_bytes_per_second=2e10,
    ),
}
"""Nodes of eight GPUs: H100 (SXM, 700 W), the same with HBM2e at 500 W, H200, B200, and
L40S on PCIe with one link of 200 Gb/s."""


def machine_of(given: str | Machine) -> Machine:
    """Return a machine by the name of its preset. Raises: PlanError."""
    if isinstance(given, Machine):
        return given
    if given not in MACHINES:
        raise PlanError(
            f"machine expects a Machine, or one of {', '.join(MACHINES)}; got "
            f"{given!r}."
        )
    return MACHINES[given]
