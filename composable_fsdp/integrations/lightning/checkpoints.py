"""Full and sharded checkpoints of Lightning, for the Trainer and for Fabric."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_fsdp.comm.meeting import require_success_on_all_ranks
from composable_fsdp.config import OptimStateKeyType, StateDictType
from composable_fsdp.errors import CheckpointError
from composable_fsdp.integrations.given_optimizers import full_state_dict
from composable_fsdp.integrations.lightning.strategy import has_units
from composable_fsdp.optim.load import full_optim_state_dict, optim_state_dict_to_load
from composable_fsdp.optim.names import rekey_optim_state_dict
from composable_fsdp.state_dict.settings import state_dict_type
from composable_fsdp.storage.commit import Folder, newest_in
from composable_fsdp.storage.directory import MANIFEST
from composable_fsdp.storage.formats.nested import nested_tree, read_all
from composable_fsdp.storage.load import LoadOptions, load
from composable_fsdp.storage.opening import open_source
from composable_fsdp.storage.save import SaveOptions, save

REST = "lightning"
"""The key in ``extra`` of the bytes of everything but model and optimizers."""
NAMES = "composable_fsdp_optimizers"
"""The key in the rest of the parameter names of each optimizer, group by group."""


@contextmanager
def alike_on_all_ranks() -> Iterator[None]:
    """Raise the error of the block, on whichever rank, on all ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    # Alone, a rank has nobody to tell.
    groups = [world] if world is not None and world.size() > 1 else []
    with require_success_on_all_ranks(groups):
        yield


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory with a checkpoint of this library lies at ``path``."""
    path = os.fspath(path)
    return Folder(path).is_committed or newest_in(path) is not None


def full_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of the plain model, on the CPU of rank 0; else ``{}``."""
    # A module without parameters has no unit.
    if not has_units(module):
        return module.state_dict()
    return full_state_dict(module)


def full_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of the plain optimizer on the CPU of rank 0; else ``{}``."""
    if not has_units(module):
        return optimizer.state_dict()
    state = full_optim_state_dict(module, optimizer)
    # By number, as a plain optimizer: any strategy can load the file.
    by_number = OptimStateKeyType.PARAM_ID
    return state and rekey_optim_state_dict(state, by_number, module, optim=optimizer)


def load_full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Give ``optimizer`` this rank's part of a whole state of the plain optimizer."""
    if not has_units(module):
        optimizer.load_state_dict(state)
        return
    with state_dict_type(module, StateDictType.FULL_STATE_DICT):
        optim_state_dict_to_load(module, optimizer, state, load_directly=True)


def require_form(path: str | os.PathLike[str], *, sharded: bool) -> None:
    """Raise CheckpointError if a checkpoint of the other form may be at ``path``."""
    if (os.path.isfile if sharded else os.path.isdir)(path):
        has, is_a = "is a directory (a sharded checkpoint?)", "a full one is a file"
        if sharded:
            has, is_a = "is a file (a full checkpoint?)", "a sharded one is a directory"
        raise CheckpointError(
            f"{os.fspath(path)} {has}, and {is_a}. Remove it, or save under another "
            "name (another dirpath or filename of ModelCheckpoint)."
        )


def read_full(
    file: str | os.PathLike[str] | io.BytesIO,
    weights_only: bool | None,
    *,
    name: str | os.PathLike[str] = "",
) -> Any:
    """Return the content of a file of ``torch.save``, with tensors on the CPU."""
    # Files of torch before 1.6 are no archives and cannot be mapped.
    mapped = not isinstance(file, io.BytesIO) and zipfile.is_zipfile(file)
    try:
        return torch.load(file, "cpu", weights_only=weights_only, mmap=mapped)
    except Exception as error:
        # Damaged and missing files keep their own errors.
        text = str(error)
        if "weights_only" not in text.lower():
            raise
        # torch names the class that its restricted reader refused.
        found = re.search(r"GLOBAL ([\w.]+)", text)
        raise CheckpointError(
            f"{name or file} holds {found[1] if found else 'an object'}, which "
            "torch.load refuses by default (weights_only=True): hyperparameters or "
            "states of callbacks that are objects. If you trust the file, pass "
            "weights_only=False to the strategy, or to load_from_checkpoint; or name "
            "the class by torch.serialization.add_safe_globals."
        ) from error


def read_file(path: str, weights_only: bool | None, checkpoint_io: Any) -> Any:
    """Return the content of a full checkpoint; ``checkpoint_io`` knows URLs."""
    if os.path.isdir(path):
        raise CheckpointError(
            f"{path} is a directory without {MANIFEST}; expected a file or a directory "
            "that state_dict_type='sharded' wrote. If Lightning's FSDPStrategy or "
            "ModelParallelStrategy wrote it, run python -m lightning.pytorch.utilities."
            f"consolidate_checkpoint {path}, and pass the file that it writes."
        )
    if os.path.isfile(path):
        return read_full(path, weights_only)
    return checkpoint_io.load_checkpoint(path, weights_only=weights_only)


def write_sharded(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    rest: dict[str, Any],
) -> None:
    """Write a sharded checkpoint at rank 0's ``path``, in the place of an older one."""
    extra: dict[str, Any] | None = None
    with alike_on_all_ranks():
        # ``save`` takes the path of rank 0, so only rank 0 looks at the directory.
        if not dist.is_initialized() or dist.get_rank() == 0:
            path = os.path.abspath(path)
            require_form(path, sharded=True)
            names = {id(each): name for name, each in module.named_parameters()}
            of_groups = [
                [[names.get(id(p), "") for p in g["params"]] for g in each.param_groups]
                for each in optimizers or ()
            ]
            # Keys that are numbers, tuples and objects of callbacks have no JSON form.
            out = io.BytesIO()
            torch.save({**rest, NAMES: of_groups}, out)
            written = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
            extra = {REST: written}
    optims = list(optimizers or ()) or None
    save(path, module, optims, extra, options=SaveOptions(overwrite=True))


def read_sharded(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load model and optimizers from a sharded checkpoint; return the rest."""
    # Another ``precision=`` than at the save is no error, as in a full checkpoint.
    options = LoadOptions(strict=strict, cast=True, rng=optimizers is not None)
    extra = load(path, module, list(optimizers or ()) or None, options=options)
    with alike_on_all_ranks():
        return _rest_of(extra, path, weights_only)


def holds_optimizers(path: str | os.PathLike[str]) -> bool:
    """Return whether a sharded checkpoint holds states of optimizers."""
    with open_source(path) as source:
        return source.param_groups is not None


def read_whole(
    path: str | os.PathLike[str], weights_only: bool | None = None
) -> dict[str, Any]:
    """Return a sharded checkpoint as a full one, on the CPU; for one process."""
    with open_source(path) as source:
        rest = _rest_of(source.extra, path, weights_only)
        # ``save`` joined the states of all optimizers; the names divide them again.
        groups = rest.pop(NAMES, [])
        tree = read_all(nested_tree(source), {})
        found = {**rest, "state_dict": tree["model"]}
        if groups:
            found["optimizer_states"] = [
                _plain_state(tree["optim"], source.aliases, each) for each in groups
            ]
    return found


def consolidate(
    directory: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    weights_only: bool | None = None,
) -> None:
    """Write a sharded checkpoint as a file that every strategy of Lightning loads.

    Needs host memory for the whole checkpoint, and no process group.

    Args:
        directory: a checkpoint of ``state_dict_type="sharded"``.
        file: the file to make, which must not exist yet.
        weights_only: see ``torch.load``; False also takes hyperparameters that are
            objects. Default None: torch's default, True.

    Raises: CheckpointError, for a file that exists or a damaged checkpoint.
    """
    # Reading takes minutes: refuse before.
    if os.path.lexists(file):
        raise CheckpointError(
            f"{os.fspath(file)} exists already, and nothing is overwritten. Choose "
            "another name, or remove it first."
        )
    # Under another name first: a crash leaves no half of a checkpoint at ``file``.
    made = f"{os.fspath(file)}.tmp"
    torch.save(read_whole(directory, weights_only), made)
    os.replace(made, file)


def _plain_state(
    optim: dict[str, Any], aliases: Mapping[str, str], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the ``state_dict()`` of an optimizer whose groups have these names."""
    options = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in optim["param_groups"]
        for name in group["params"]
    }
    # torch numbers parameters through all groups.
    order = [aliases.get(name, name) for group in groups for name in group]
    states = [optim["state"].get(name) for name in order]
    numbers = iter(range(len(order)))
    return {
        "state": {at: state for at, state in enumerate(states) if state},
        "param_groups": [
            {
                **options.get(aliases.get(group[0], group[0]), {}),
                "params": [next(numbers) for _ in group],
            }
            for group in groups
            if group
        ],
    }


def _rest_of(
    extra: Any, path: str | os.PathLike[str], weights_only: bool | None
) -> dict[str, Any]:
    """Return the rest of Lightning's dictionary from ``extra``; empty if not there."""
    written = extra.get(REST) if isinstance(extra, Mapping) else None
    if not isinstance(written, Tensor):
        return {}
    file = io.BytesIO(written.numpy().tobytes())
    rest: dict[str, Any] = read_full(file, weights_only, name=path)
    return rest
