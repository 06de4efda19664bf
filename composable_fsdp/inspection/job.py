"""The job of a command with ``--tensor-parallel-size``: process groups and a mesh.

A function that cuts its model needs the ranks of the job, as DTensors belong to process
groups. They are those of a simulated world, which sends nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.tools.simulated_meshes import simulated_meshes
from composable_fsdp.tools.simulated_world import Machine, simulated_world
from composable_fsdp.tools.tensor_parallel import check_sizes, job_mesh
from composable_fsdp.tools.timetable import Timetable


@contextmanager
def job(given: argparse.Namespace) -> Iterator[DeviceMesh | None]:
    """Be a rank of the job that the arguments describe, in this block.

    Yields the mesh of the job; None without ``--tensor-parallel-size``, where nothing
    needs process groups.

    Raises: PlanError, if the sizes do not multiply to ``--world-size``.
    Collective: none; no rank of the job exists.
    """
    if given.tensor_parallel_size is None:
        yield None
        return
    sizes = (given.world_size, given.shard_world_size, given.tensor_parallel_size)
    check_sizes(*sizes)
    # No step runs, so nobody reads the times.
    world = simulated_world(given.world_size, Timetable(), Machine(), streams=False)
    with world, simulated_meshes():
        yield job_mesh(*sizes)


def data_ranks(given: argparse.Namespace) -> int:
    """Return how many ranks share the parameters of a tensor-parallel part."""
    ranks: int = given.world_size // (given.tensor_parallel_size or 1)
    return ranks
