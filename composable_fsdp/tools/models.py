"""Builds the model that a command names, on meta, and finds modules that are good
units, with tied parameters together."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_fsdp.errors import FSDPError, PlanError
from composable_fsdp.naming import did_you_mean, join_name, listed, quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.assign import Chosen
from composable_fsdp.planning.checks import refuse_container
from composable_fsdp.tree.traversal import walk_states


class NoSplitPolicy:
    """Makes the layers that a model of transformers names units.

    They are of the classes in ``_no_split_modules`` of the model and of models inside,
    or else the entries of its lists of modules. A layer that shares a parameter with a
    module outside of it is no unit.

    Args:
        classes: names of classes, instead of those that the model names. Default None.

    Raises: TypeError, if an entry of ``classes`` is no name; PlanError, when the policy
    runs, if the model has no module of a class in ``classes``.

    >>> policy = NoSplitPolicy(["Linear"])
    >>> list(policy._run_policy(nn.Sequential(nn.Linear(2, 2)), set(), {}))
    [Linear(in_features=2, out_features=2, bias=True)]
    """

    def __init__(self, classes: Iterable[str] | None = None) -> None:
        # A string would be a sequence of letters.
        names = [classes] if isinstance(classes, str) else classes
        self._classes = None if names is None else tuple(names)
        for name in self._classes or ():
            given: object = name
            if not isinstance(given, str):
                raise TypeError(
                    f"NoSplitPolicy expects names of classes, got {given!r}. For "
                    "classes themselves, pass ModuleWrapPolicy({TheClass})."
                )

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: Set[nn.Module],
        root_kwargs: Mapping[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        there = sorted({type(module).__name__ for module in walk.modules(root_module)})
        for name in self._classes or ():
            if name not in there:
                raise PlanError(
                    f"{self!r} names the class {name}, and this "
                    f"{type(root_module).__name__} has no module of the class"
                    f"{did_you_mean(name, there)}. Its classes are {listed(there)}."
                )
        # Without names a missing class is no error: many models name several classes.
        chosen = dict(_units(root_module, self._classes)[0])
        return {
            m: dict(root_kwargs) for m in chosen.values() if m not in ignored_modules
        }

    def __repr__(self) -> str:
        names = "" if self._classes is None else repr(list(self._classes))
        return f"NoSplitPolicy({names})"


def guess_units(module: nn.Module) -> tuple[list[str], str]:
    """Return the names of modules that are good units, and a reason for a reader."""
    chosen, reason = _units(module, None)
    # The root is a unit anyway.
    if not any(name for name, _ in chosen):
        chosen = _untied(module, _repeated(list(walk.named(module))))
        reason = "classes that the model has several times"
    counts = Counter(type(each).__name__ for _, each in chosen)
    text = ", ".join(f"{times} {name}" for name, times in counts.items())
    names = [name for name, _ in chosen if name]
    return names, f"{text} ({reason})" if names else "the whole model is one unit"


def _units(
    module: nn.Module, classes: Iterable[str] | None
) -> tuple[list[tuple[str, nn.Module]], str]:
    """Return units of ``classes``, or as the model says, with names and a reason."""
    named = list(walk.named(module))
    if classes is None:
        # Of models inside, too. Some classes of transformers have None there.
        told = (getattr(each, "_no_split_modules", None) or () for _, each in named)
        classes = {name for each in told for name in each}
    # By name, because transformers names classes as texts.
    wanted = set(classes)
    chosen = [(name, m) for name, m in named if type(m).__name__ in wanted]
    reason = "_no_split_modules of the model"
    # Any other model, or a configuration whose classes this model does not have.
    if not chosen:
        chosen, reason = _entries_of_lists(named), "entries of its nn.ModuleList"
    return _untied(module, chosen), reason


def _untied(
    root: nn.Module, pairs: Iterable[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Return the modules that share no parameter with a module outside of them."""

    def places(module: nn.Module) -> Counter[nn.Parameter]:
        below = map(walk.own_parameters, walk.modules(module))
        return Counter(parameter for each in below for parameter in each)

    # A parameter that is tied across units would be refused; the root holds it then.
    # Most models tie one parameter or none, and no unit is searched then.
    everywhere = {p: times for p, times in places(root).items() if times > 1}
    return [
        (name, module)
        for name, module in pairs
        if not everywhere
        or all(times >= everywhere.get(p, 0) for p, times in places(module).items())
    ]


def _repeated(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules of classes that a model has several times."""
    able = [
        pair
        for pair in named[1:]
        if _can_be_unit(pair[1]) and not isinstance(pair[1], nn.Sequential)
    ]
    # Blocks go before the layers of which blocks are made.
    for rest in ([pair for pair in able if list(pair[1].children())], able):
        counts = Counter(type(each) for _, each in rest)
        found = _outermost((n, each) for n, each in rest if counts[type(each)] > 1)
        if found:
            break
    return found


def _entries_of_lists(
    named: Sequence[tuple[str, nn.Module]],
) -> list[tuple[str, nn.Module]]:
    """Return the entries of outermost lists of two and more modules, with names."""
    # A list inside of a unit, as of experts, stays whole.
    return _outermost(
        (join_name(name, key), child)
        for name, each in named
        if isinstance(each, nn.ModuleList) and len(each) > 1
        for key, child in each.named_children()
        if _can_be_unit(child)
    )


def _can_be_unit(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward."""
    return not walk.is_container(module) and any(True for _ in module.parameters())


def _outermost(pairs: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are below none of those before them."""
    found: list[tuple[str, nn.Module]] = []
    for name, each in pairs:
        if not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, each))
    return found


def chosen_units(root: nn.Module, units: Iterable[object]) -> Chosen:
    """Return the units that a user listed: modules, names, patterns, or lists of these.

    Raises: PlanError, TypeError.
    """
    # An nn.ModuleList is a list of modules; any other module is a single one.
    is_module = isinstance(units, nn.Module) and not isinstance(units, nn.ModuleList)
    if is_module or isinstance(units, str):
        raise TypeError(
            f"units expects a list of modules or names, got {units!r:.80}. Pass [it]."
        )
    # A module under two names has the first name.
    names = dict(walk.named(root))
    order = {module: position for position, module in enumerate(names.values())}
    found: dict[nn.Module, tuple[nn.Module, ...]] = {}
    taken: set[nn.Module] = set()
    for entry in units:
        is_list = isinstance(entry, (list, tuple, nn.ModuleList))
        parts: Any = entry if is_list else [entry]
        group = [module for each in parts for module in _of(each, names, order)]
        for unit in [group] if is_list else [[module] for module in group]:
            # The first module in walking order gives the unit its name.
            modules = tuple(sorted(dict.fromkeys(unit), key=order.__getitem__))
            for module in modules:
                refuse_container(module)
                if module in taken:
                    raise PlanError(
                        f"units names the {type(module).__name__} "
                        f"{quoted(walk.name_of(root, module))} twice. Name each "
                        "module once."
                    )
                taken.add(module)
            # A script applies ``fully_shard`` to the root last, so lists may end in it.
            if modules and modules != (root,):
                found[modules[0]] = modules
    return found


def _of(
    entry: object, names: Mapping[str, nn.Module], order: Mapping[nn.Module, int]
) -> list[nn.Module]:
    """Return the modules that an entry of ``units`` names."""
    if isinstance(entry, nn.Module):
        if entry not in order:
            raise PlanError(
                f"units expects modules below the planned module; a "
                f"{type(entry).__name__} in the list is not below it. Pass modules of "
                "the same model."
            )
        return [entry]
    if not isinstance(entry, str):
        raise TypeError(
            f"units expects modules, names, or lists of them, got {entry!r:.80}."
        )
    # Component by component: a star that matched dots would take the modules inside of
    # a block, too. A name without wildcards matches itself.
    patterns = entry.split(".")
    matching = [
        module
        for name, module in names.items()
        if len(parts := name.split(".")) == len(patterns)
        and all(map(fnmatchcase, parts, patterns))
    ]
    # A typing error must not plan a model without units.
    if not matching:
        raise PlanError(
            f"units names {entry!r}, which matches no module"
            f"{did_you_mean(entry, map(repr, names), most=3)}. Names are those of "
            "named_modules(); 'blocks.*' matches every block."
        )
    return matching


CONFIG = "config.json"


class Model(NamedTuple):
    """A model on meta, and how a forward is called; None for what is not known."""

    module: nn.Module
    source: str
    inputs: Sequence[Any] | Mapping[str, Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    config: Any = None


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
    """Return arguments of a forward for a batch of ``shape``: ids, labels or floats."""
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
