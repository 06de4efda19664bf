"""Builds the model that a command names, on meta: no parameter takes memory.

A function of a training script may take the mesh of the whole job, and does with the
dimension ``tp`` what it does in the job; other dimensions shard what a rank has left::

    8 ranks, tensor_parallel_size=2     mesh ("dp", "tp") of 4 x 2
    and shard_world_size=2              mesh ("replicate", "shard", "tp") of 2 x 2 x 2
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import did_you_mean, join_name
from composable_fsdp.planning import walk
from composable_fsdp.planning.dtensors import is_dtensor
from composable_fsdp.tree.traversal import walk_states

CONFIG = "config.json"
"""The name of a configuration in a directory of a Hugging Face model."""


class Model(NamedTuple):
    """A model on meta, and how a forward is called; None for what is not known."""

    module: nn.Module
    source: str
    """The text that named the model."""
    inputs: Sequence[Any] | Mapping[str, Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    config: Any = None
    """The configuration of transformers."""
    notes: tuple[str, ...] = ()
    """Sentences for the report."""


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module in the tree of ``module`` is a unit."""
    return any(True for _ in walk_states(module))


def load_model(
    target: str, mesh: DeviceMesh | None = None, *, is_config: bool = False
) -> Model:
    """Return the model that ``target`` names; its function may take the mesh."""
    is_config = is_config or target.endswith(".json") or Path(target).is_dir()
    found = None if is_config else object_of(target)
    # A class of modules is callable and no module.
    if not is_config and not isinstance(found, nn.Module):
        if callable(found):
            return _from_function(found, target, mesh)
        raise PlanError(
            f"{target} expects to be a module, or a function or class without "
            f"arguments that makes one; got {found!r:.80}."
        )
    if mesh is not None:
        raise PlanError(
            f"{target} is no function, and so does not say how its model is cut. Write "
            "a function of the mesh that makes the model and calls "
            'parallelize_module(model, mesh["tp"], {...}), and pass MODULE:FUNCTION.'
        )
    return Model(found, target) if isinstance(found, nn.Module) else _config(target)


def object_of(target: str) -> Any:
    """Return the function, class or module that ``target`` names."""
    # The last colon: a path of Windows has another.
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise PlanError(
            f"{target!r} names no model. Write MODULE:FUNCTION, such as "
            "train:build_model or train.py:build_model, or the path of a config.json, "
            "which `hf download MODEL config.json` gets."
        )
    found: Any = _import(path)
    # A method or a nested class has several components.
    for part in name.split("."):
        if not hasattr(found, part):
            given = [each for each in vars(found) if not each.startswith("_")]
            hint = did_you_mean(part, given, most=3)
            raise PlanError(f"{path} has no {part!r}{hint}.")
        found = getattr(found, part)
    return found


def _import(path: str) -> ModuleType:
    """Import a module by its dotted name, or a file that ends in .py."""
    # As ``python -m`` does, so that scripts in the current directory are found.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise PlanError(f"There is no file {path!r}.")
    try:
        if not is_file:
            return importlib.import_module(path)
        # The script may import its neighbours.
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec: Any = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickles look their module up.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    # The module is the user's code and may raise anything, also SystemExit.
    except (Exception, SystemExit) as error:
        # The module itself is missing, or a module that it imports.
        first = path.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name in (path, first):
            raise PlanError(
                f"There is no module {path!r} here or among the installed packages. "
                f"Run the command in the directory of {first}.py, or pass the path of "
                "the file."
            ) from error
        raise PlanError(
            f"Importing {path} fails: {type(error).__name__}: {error}. A script that "
            'trains when it is imported needs: if __name__ == "__main__".'
        ) from error


def _from_function(
    function: Callable[..., Any], source: str, mesh: DeviceMesh | None
) -> Model:
    """Return the model that ``function`` makes."""
    # The call would fail with the same, but from inside of the user's code.
    make = without_arguments(function, mesh, source)
    try:
        with torch.device("meta"):
            made = make()
    # The function is the user's code and may raise anything, also SystemExit.
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"{source}() fails on the meta device, where tensors have shapes and no "
            f"values: {type(error).__name__}: {error}. Build the model alone, and load "
            "or read no values."
        ) from error
    return returned(made, source, mesh)


def returned(made: Any, source: str, mesh: DeviceMesh | None) -> Model:
    """Return the model that a function has returned, cut over ``mesh["tp"]``."""
    inputs = loss = None
    # A function may return the model with arguments for its forward, and a loss.
    if isinstance(made, tuple) and len(made) in (2, 3):
        made, inputs, loss = (*made, None)[:3]
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"{source}() expects to return a module, or a pair of a module and the "
            f"arguments of its forward; got {made!r:.80}."
        )
    # On a single rank there is nothing to cut.
    cut = mesh["tp"].size() if mesh is not None and not is_sharded(made) else 1
    if cut > 1 and first_dtensor(made) is None:
        raise PlanError(
            f"{source} returned a {type(made).__name__} none of whose parameters is a "
            f"DTensor, so tensor_parallel_size={cut} would leave ranks with the same "
            "work. Let the function take the mesh and call parallelize_module(model, "
            'mesh["tp"], {...}) on its model, or leave tensor_parallel_size out.'
        )
    return Model(made, source, inputs, loss)


def _config(path: str) -> Model:
    """Return the model of a configuration of transformers, on meta."""
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PlanError(
            f"There is no file {str(file)!r}. Nothing is downloaded: get the file "
            f"with `hf download MODEL {CONFIG}`, or from the model's page."
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"{path} is a configuration of transformers, which is not installed. Run "
            "pip install transformers, or pass MODULE:FUNCTION."
        ) from error
    # Advice of transformers on weights and kernels is for a model that runs.
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file))
        # The class that the configuration names has the head; AutoModel has none.
        name = next(iter(config.architectures or []), "")
        kind = getattr(transformers, name, None) if name else None
        make = transformers.AutoModel.from_config if kind is None else kind
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = make(config)
    # transformers raises many kinds of errors for a configuration.
    except Exception as error:
        raise PlanError(
            f"transformers {transformers.__version__} makes no model of {path}: "
            f"{' '.join(str(error).split())}"
        ) from error
    note = (
        "the configuration names no class of transformers under architectures, so the "
        f"model is a {type(module).__name__} without a head"
    )
    return Model(module, path, config=config, notes=(note,) * (kind is None))


def inputs_for(model: Model, shape: Sequence[int]) -> Any:
    """Return arguments of a forward for a batch of ``shape``.

    Models of transformers that read token ids get ids, and labels if they predict ids.
    Other models get one tensor: ids if they begin with an embedding, else floats.

    Raises: PlanError, if the model takes something else.
    """
    first = next((m for m in walk.modules(model.module) if m._parameters), None)
    reads_ids = model.config is not None or isinstance(first, nn.Embedding)
    dtype = torch.long if reads_ids else torch.float32
    made = torch.zeros(*shape, dtype=dtype, device="cpu")
    if model.config is None:
        return [made]
    kind = type(model.module)
    takes = inspect.signature(kind.forward).parameters
    main = getattr(model.module, "main_input_name", "input_ids")
    # Better refused by name than a forward that fails without its input.
    missing = [n for n in (main, "pixel_values") if n in takes and n != "input_ids"]
    if missing:
        raise PlanError(
            f"--batch makes token ids and no {missing[0]}, which {kind.__name__} "
            "takes. Write a function that returns (model, {...arguments of forward...})"
            " and pass MODULE:FUNCTION."
        )
    # A cache of keys and values is for generation.
    extra: dict[str, Any] = {"use_cache": False}
    # The end of the name tells the head; other heads have no loss without labels, and
    # the sum of their output stands for it.
    if kind.__name__.endswith(("LM", "LMHeadModel", "ConditionalGeneration")):
        extra["labels"] = made
    # An encoder and a decoder read two texts, which are equally long here.
    if getattr(model.config, "is_encoder_decoder", False):
        extra["decoder_input_ids"] = made
    return {"input_ids": made, **{n: each for n, each in extra.items() if n in takes}}


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


def without_arguments(
    function: Callable[..., Any], mesh: DeviceMesh | None, name: str
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
        way = (
            "; or pass --tensor-parallel-size to plan, and the argument is the mesh "
            '("dp", "tp")'
        )
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


def first_dtensor(module: nn.Module) -> str | None:
    """Return the name of the first parameter that is a DTensor; None if none is."""
    named = (
        join_name(prefix, name)
        for prefix, each in walk.named(module)
        for name, parameter in each._parameters.items()
        if is_dtensor(parameter)
    )
    return next(named, None)
