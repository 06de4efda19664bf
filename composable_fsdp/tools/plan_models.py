"""Builds the model that a command names, on meta: no parameter takes memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.naming import did_you_mean
from composable_fsdp.planning import walk
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


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module in the tree of ``module`` is a unit."""
    return any(True for _ in walk_states(module))


def load_model(target: str, *, is_config: bool = False) -> Model:
    """Return the model that ``target`` names, on meta."""
    if is_config or target.endswith(".json") or Path(target).is_dir():
        return _of_config(target)
    # Not on meta: the user's module may import others, which make tensors.
    found = _object_of(target)
    # A class of modules is callable and no module.
    if isinstance(found, nn.Module):
        return Model(found, target)
    if not callable(found):
        raise PlanError(
            f"{target} expects to be a module, or a function or class without "
            f"arguments that makes one; got {found!r:.80}."
        )
    with torch.device("meta"):
        return made_by(found, target)


def _object_of(target: str) -> Any:
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


def made_by(function: Callable[..., Any], source: str) -> Model:
    """Return the model that ``function`` makes, with inputs and loss if it has any."""
    # The call would fail with the same, but from inside of the user's code.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise PlanError(
            f"{source} needs arguments: {error}. Write a function without arguments "
            "that calls it, and pass that function."
        ) from None
    # Some classes of C have no signature; the call tells.
    except ValueError:
        pass
    try:
        made = function()
    except FSDPError:
        raise
    # The function is the user's code and may raise anything, also SystemExit.
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"{source}() fails on the meta device, or on fake tensors, which have "
            f"shapes and no values: {type(error).__name__}: {error}. Build the model "
            "alone, and load or read no values."
        ) from error
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
    return Model(made, source, inputs, loss)


def _of_config(path: str) -> Model:
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
        # The class that the configuration names has the head.
        name = next(iter(config.architectures or []), "")
        if not hasattr(transformers, name):
            raise ValueError(
                f"{name!r} under architectures is no class of it, such as "
                '["LlamaForCausalLM"]'
            )
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return Model(getattr(transformers, name)(config), path, config=config)
    # transformers raises many kinds of errors for a configuration.
    except Exception as error:
        raise PlanError(
            f"transformers {transformers.__version__} makes no model of {path}: "
            f"{' '.join(str(error).split())}"
        ) from error


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


def check_sizes(world_size: Any, shard_world_size: object) -> None:
    """Raise PlanError, naming the argument, if a size does not divide the ranks."""
    # True is an int in Python.
    if type(world_size) is not int or world_size < 1:
        raise PlanError(
            f"world_size expects a positive number of ranks, got {world_size!r}."
        )
    size = world_size if shard_world_size is None else shard_world_size
    if type(size) is not int or size < 1 or world_size % size:
        raise PlanError(
            "shard_world_size expects a number of ranks that divides "
            f"world_size={world_size}, got {size!r}."
        )
