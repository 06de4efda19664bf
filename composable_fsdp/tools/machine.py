"""``Machine``: the speeds that give a step its times; presets with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PRODUCT, ATTENTION, MEMORY, FUSED = "product", "attention", "memory", "fused"
"""Kinds of ``Cost``; FUSED is what a compiler leaves of what is not a product."""


class Cost(NamedTuple):
    """What an operation computes and moves."""

    kind: str
    operations: float
    nbytes: int


@dataclass(frozen=True)
class Machine:
    """Speeds that give a step its times; the memory does not depend on them.

    Args:
        operations_per_second: of matrix products, in any dtype. Default 4e14, near the
            rate of a large model on an H100 in bfloat16.
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
    launch: float = 0.0

    def seconds(self, cost: Cost, *, float8: bool = False) -> float:
        """Return the time of an operation: arithmetic or memory, the slower."""
        rate = self.operations_per_second
        if cost.kind == ATTENTION:
            rate = self.attention_per_second or rate
        elif float8:
            rate *= self.float8_speedup
        return max(cost.operations / rate, cost.nbytes / self.memory_bytes_per_second)

    def collective(
        self, nbytes: int, ranks: int, *, rounds: int = 1, apart: bool = False
    ) -> float:
        """Return the seconds of a collective of whole buffers of ``nbytes``.

        A ring, ``rounds`` times; with ``apart`` each rank is in a node of its own. A
        single rank sends nothing.
        """
        if ranks == 1:
            return 0.0
        near = 1 if apart else min(self.node_size, ranks)
        nodes = -(-ranks // near)
        # A node receives what its ranks lack by all its links at once, while its own
        # links pass everything on.
        outside = (nodes - 1) / nodes / (near * self.link_bytes_per_second)
        inside = (near > 1) * (ranks - 1) / ranks / self.node_bytes_per_second
        passed = nodes if self.node_size > 1 else 1
        return self.latency * passed + rounds * nbytes * max(outside, inside)


def _node(
    products: float,
    memory: float,
    *,
    peak: float = 989,
    inside: float = 450,
    between: float = 50,
) -> Machine:
    """Return a node of eight GPUs, from tera-operations and gigabytes per second."""
    # Attention: 335 T, FlashAttention-2 on an H100 (arXiv:2307.08691, section 4.1), by
    # ``peak``, the tera-operations of data sheets. ``memory``, NVLink (or PCIe) and the
    # network are of data sheets, too. Assumed, not measured: the parts of these that a
    # step reaches, 15 us of latency, and 6 us in which a host issues an operation.
    return Machine(
        operations_per_second=1e12 * products,
        memory_bytes_per_second=0.9e9 * memory,
        link_bytes_per_second=0.9e9 * between,
        latency=1.5e-5,
        attention_per_second=335e12 * peak / 989,
        node_size=8,
        node_bytes_per_second=0.8e9 * inside,
        launch=6e-6,
    )


# 794.5 T on an H100 or H200, 1,745 T on a B200: the best shape of a matrix product in
# "Maximum Achievable Matmul FLOPS" of github.com/stas00/ml-engineering
# (compute/accelerator). Assumed: a step reaches 85 % of them, and 70 % of an L40S's
# data sheet. Two constants were chosen after the misses were seen, to fit the rows of
# docs/reference/planning.md: the rate at 500 W, in proportion to the power, and
# ``float8_speedup``, 1.45, to fit the float8 rows.
_H100 = 0.85 * 794.5

MACHINES = {
    "h100": _node(_H100, 3350),
    "h100-500w": _node(_H100 * 500 / 700, 2400),
    "h200": _node(_H100, 4800),
    "b200": _node(0.85 * 1745, 8000, peak=2250, inside=900),
    "pcie": _node(0.7 * 362, 864, peak=362, inside=25, between=3.125),
}
"""Nodes of eight GPUs: H100 (SXM, 700 W), the same with HBM2e at 500 W, H200, B200, and
L40S on PCIe with one link of 200 Gb/s."""
