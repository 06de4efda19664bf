"""Models that a function cuts over a tensor-parallel mesh, for ``plan`` and a step.

A function of a training script gets the mesh of the whole job, and does with the
dimension ``tp`` what it does in the job; other dimensions shard what a rank has left::

    8 ranks, tensor_parallel_size=2     mesh ("dp", "tp") of 4 x 2
    and shard_world_size=2              mesh ("replicate", "shard", "tp") of 2 x 2 x 2
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor


def check_sizes(
    world_size: Any, shard_world_size: object, tensor_parallel_size: object = None
) -> None:
    """Raise PlanError, naming the argument, if a size does not divide the ranks."""
    data, what = 0, "positive number of ranks"
    for name, given in (
        ("world_size", world_size),
        ("tensor_parallel_size", tensor_parallel_size),
        ("shard_world_size", shard_world_size),
    ):
        if given is None and data:
            continue
        # True is an int in Python.
        if type(given) is not int or given < 1 or data % given:
            raise PlanError(f"{name} expects a {what}, got {given!r}.")
        # Ranks that cut matrices shard nothing.
        data = data // given if data else given
        ranks = f"world_size={world_size}"
        if name == "tensor_parallel_size":
            ranks = f"the {data} data ranks of {ranks} and {name}={given}"
        what = f"number of ranks that divides {ranks}"


def job_mesh(
    world_size: int, shard_world_size: int | None, tensor_parallel_size: int | None
) -> DeviceMesh:
    """Return the mesh of all ranks, with "tp" last, after ``check_sizes``.

    Collective: the creation of the process groups of the mesh.
    """
    sizes, names = [world_size // (tensor_parallel_size or 1)], ["dp"]
    if shard_world_size is not None:
        sizes = [sizes[0] // shard_world_size, shard_world_size]
        names = ["replicate", "shard"]
    if tensor_parallel_size is not None:
        sizes, names = [*sizes, tensor_parallel_size], [*names, "tp"]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a ``job_mesh`` over which ``fully_shard`` shards."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    # A mesh with all its dims cannot be cut out of itself.
    return mesh if len(names) == mesh.ndim else mesh[tuple(names)]


def without_arguments(
    function: Callable[..., Any],
    mesh: DeviceMesh | None,
    name: str,
    *,
    option: str = "tensor_parallel_size",
) -> Callable[[], Any]:
    """Return ``function`` without arguments, with the mesh if it takes a mesh.

    Raises: PlanError, for a function with other arguments, or of a mesh without a mesh.
    """
    parameters: list[inspect.Parameter] = []
    # Some classes of C have no signature; the call tells.
    with suppress(TypeError, ValueError):
        parameters = list(inspect.signature(function).parameters.values())
    # ``*args`` and ``**kwargs`` may be empty.
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {p.name: p.default for p in parameters if p.kind not in optional}
    needed = [each for each in given if given[each] is inspect.Parameter.empty]
    if len(needed) > 1 or (needed and mesh is None):
        way = f'; or pass {option}, and the argument is the mesh ("dp", "tp")'
        raise PlanError(
            f"{name} needs arguments: {', '.join(needed)}. Write a function without "
            "arguments that calls it, and pass that function"
            f"{way if len(needed) == 1 else ''}."
        )
    # A single argument without default is the mesh, whatever its name.
    names = needed or [each for each in given if each in ("mesh", "device_mesh")]
    takes = mesh is not None and names
    return partial(function, **{names[0]: mesh}) if takes else function


def name_of(model: object) -> str:
    """Return the name of a function or the class of a module, for messages."""
    return str(getattr(model, "__name__", type(model).__name__))


def check_cut(module: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Raise PlanError, if ``mesh["tp"]`` cuts nothing of ``module``."""
    # On a single rank there is nothing to cut.
    if mesh["tp"].size() > 1 and first_dtensor(module) is None:
        raise PlanError(
            f"{name} returned a {type(module).__name__} none of whose parameters is a "
            f"DTensor, so tensor_parallel_size={mesh['tp'].size()} would leave ranks "
            f"with the same work. Let the function take the mesh and call "
            'parallelize_module(model, mesh["tp"], {...}) on its model, or leave '
            "tensor_parallel_size out."
        )


def first_dtensor(module: nn.Module) -> str | None:
    """Return the name of the first parameter that is a DTensor; None if none is."""
    named = (
        join_name(prefix, name)
        for prefix, each in walk.named(module)
        for name, parameter in each._parameters.items()
        if is_dtensor(parameter)
    )
    return next(named, None)
