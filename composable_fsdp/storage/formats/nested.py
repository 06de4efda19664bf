"""Reads and makes dictionaries of model, optimizer and other values, as users save.

docs/checkpoints/formats.md lists the accepted keys; all others are the user's
``extra``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import listed
from composable_fsdp.optim.flat_state import is_scalar_shape
from composable_fsdp.storage.source import OWN_STATE, LazyTensor, Source, TensorInfo

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIM_KEYS = ("optim", "optimizer", "optim_state_dict", "optimizer_state_dict")
States = dict[str, dict[str, Any]]
Group = dict[str, Any]


class NestedSource(Source):
    """A source over a nested dictionary whose tensors are ``LazyTensor``."""

    def __init__(
        self,
        where: str,
        tree: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path = where
        # Others on first use: weights can be read beside an unreadable optimizer.
        model, self._optim_tree, self._extra_tree = _split(where, tree)
        self._own = {k: v for k, v in model.items() if _is_own(k)}
        tensors = {name: v for name, v in model.items() if name not in self._own}
        self._model, self.aliases = _tied(where, tensors, aliases or {})
        self.model = {name: tensor.info for name, tensor in self._model.items()}

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        return self._model[name].read(start, stop)

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        value: Tensor = self._optim[0][name][state].read(start, stop)
        return value

    @cached_property
    def _optim(self) -> tuple[States, Sequence[Group] | None]:
        """The optimizer's state and groups by name."""
        canonical = {**{name: name for name in self.model}, **self.aliases}
        return _named_optim(self.path, self._optim_tree, canonical)

    @cached_property
    def optim(self) -> Mapping[str, Mapping[str, TensorInfo]]:  # type: ignore[override]  # computed when asked for
        return {
            name: {k: v.info for k, v in values.items() if self._is_cut(name, k, v)}
            for name, values in self._optim[0].items()
        }

    @cached_property
    def optim_values(self) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[override]  # computed when asked for
        return {
            name: {
                key: read_all(value)
                for key, value in values.items()
                if not self._is_cut(name, key, value)
            }
            for name, values in self._optim[0].items()
        }

    def _is_cut(self, name: str, key: str, value: Any) -> bool:
        """Return whether a state is a tensor that is read in slices, no scalar."""
        return isinstance(value, LazyTensor) and not is_scalar_shape(
            key, value.info.shape, self.model[name].shape
        )

    @cached_property
    def param_groups(self) -> Sequence[Mapping[str, Any]] | None:  # type: ignore[override]  # computed when asked for
        groups = self._optim[1]
        return None if groups is None else [read_all(group) for group in groups]

    @cached_property
    def own_states(self) -> Mapping[str, Any]:  # type: ignore[override]  # computed when asked for
        return {name: read_all(value) for name, value in self._own.items()}

    @cached_property
    def extra(self) -> Any:
        """The values that were saved beside model and optimizer, with tensors read."""
        return read_all(self._extra_tree)

    def close(self) -> None:
        """See ``Source``; there is nothing to close."""


def nested_tree(source: Source) -> dict[str, Any]:
    """Return a source as the dictionary that users save, without missing parts."""
    model = {
        name: LazyTensor(info, partial(source.read_model, name), ("model", name))
        for name, info in source.model.items()
    }
    # All names of tied parameters are in the model, so a strict load succeeds.
    for name, kept in source.aliases.items():
        model[name] = model[kept]
    tree: dict[str, Any] = {"model": {**model, **source.own_states}}
    # Without groups, the checkpoint has no optimizer.
    if source.param_groups is not None:
        state: dict[str, dict[str, Any]] = {}
        # A parameter may have values without any element-wise state.
        for name in (*source.optim, *source.optim_values):
            state[name] = {
                key: LazyTensor(
                    info, partial(source.read_optim, name, key), ("optim", name, key)
                )
                for key, info in source.optim.get(name, {}).items()
            }
            state[name].update(source.optim_values.get(name, {}))
        groups = [dict(group) for group in source.param_groups]
        tree["optim"] = {"state": state, "param_groups": groups}
    if source.extra is not None:
        tree["extra"] = source.extra
    for name in (*source.own_states, "extra"):
        _require_restricted(tree.get(name, source.own_states.get(name)), name)
    return tree


_RESTRICTED = (type(None), bool, int, float, complex, str, bytes, bytearray)
"""The types of values that the restricted reader of torch accepts in a file."""


def _require_restricted(value: Any, where: str) -> None:
    """Raise CheckpointError for a value that torch's restricted reader refuses."""
    # The file could be written, and neither this library nor careful users read it.
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _require_restricted(key, f"a key of {where}")
            _require_restricted(each, f"{where}[{key!r}]")
    elif not isinstance(value, set | Tensor | LazyTensor) and (
        type(value) not in _RESTRICTED or value == b""
    ):
        kind = type(value)
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which "
            "torch.load(weights_only=True) refuses to read from a pickle. Convert with "
            "--weights-only, or to native."
        )


def _split(
    where: str, tree: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, Any]:
    """Return the parts of the dictionary: model, optimizer (or None), other values."""
    model_key = _one_of(where, tree, MODEL_KEYS)
    if model_key is None:
        # Without a key for the model, the dictionary itself must be a state dict.
        if tree and all(_fits_model(*item) for item in tree.items()):
            return tree, None, None
        keys = listed(map(repr, sorted(map(str, tree)))) or "(none)"
        raise CheckpointError(
            f"{where} holds no model: expected a state dict, or a dictionary with one "
            f"under {' or '.join(map(repr, MODEL_KEYS))}; got the keys {keys}. "
            'Save {"model": model.state_dict(), ...}.'
        )
    optim_key = _one_of(where, tree, OPTIM_KEYS)
    rest = {key: tree[key] for key in tree if key not in (model_key, optim_key)}
    model = tree[model_key]
    for name, value in model.items():
        if not _fits_model(name, value):
            raise CheckpointError(
                f"{where}: {name!r} of the model is a {type(value).__name__}, expected "
                "a tensor with a name. Save the tensors under the model, other values "
                "beside it."
            )
    # All other keys are the user's own, unless ``extra`` is the only one.
    extra = rest["extra"] if list(rest) == ["extra"] else rest or None
    return model, tree.get(optim_key) if optim_key else None, extra


def _has_names(value: Any) -> bool:
    """Return whether ``value`` is a dictionary whose keys are strings."""
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _fits_model(name: object, value: Any) -> bool:
    """Return whether a model's state dict may hold the item."""
    is_value = isinstance(value, LazyTensor) or _is_own(name)
    return isinstance(name, str) and is_value


def _is_own(name: object) -> bool:
    """Return whether ``name`` is the key of a module's extra state."""
    return str(name).rpartition(".")[2] == OWN_STATE


def _one_of(where: str, tree: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the key of ``keys`` that holds a dictionary; raise if several do."""
    # Only dictionaries: ``"model"`` may be a text among the user's values.
    found = [key for key in keys if isinstance(tree.get(key), Mapping)]
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds {' and '.join(map(repr, found))}; expected one of them. "
            "Save the two in checkpoints of their own."
        )
    return found[0] if found else None


def _tied(
    where: str, model: Mapping[str, LazyTensor], told: Mapping[str, str]
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return each storage once under the first name, and the other names."""
    kept: dict[str, LazyTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    for name, tensor in model.items():
        owner = told.get(name)
        # ``told`` comes from the file, and must not name a missing or another tensor.
        if owner is not None and (
            owner in told or owner not in model or model[owner].info != tensor.info
        ):
            raise CheckpointError(
                f"{where} says that {name!r} is tied to {owner!r}, which is no tensor "
                "of that shape and dtype in it. The checkpoint is damaged."
            )
        if owner is None and tensor.storage is not None:
            owner = first.setdefault(tensor.storage, name)
        if owner is None or owner == name:
            kept[name] = tensor
        else:
            aliases[name] = owner
    return kept, aliases


def read_all(value: Any, read: dict[Hashable, Tensor] | None = None) -> Any:
    """Return ``value`` with all tensors read; with ``read``, tied names share one."""
    if isinstance(value, LazyTensor):
        if read is None:
            # A clone, because ``read`` may return a view of a mapped file.
            return value.whole().clone()
        if value.storage not in read:
            read[value.storage] = value.whole()
        return read[value.storage]
    if isinstance(value, Mapping):
        return {key: read_all(each, read) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [read_all(each, read) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _named_optim(
    where: str, tree: Mapping[str, Any] | None, names: Mapping[str, str]
) -> tuple[States, Sequence[Group] | None]:
    """Return the saved optimizer ``tree`` with all parameters by name."""
    if tree is None:
        return {}, None
    if tree.keys() <= {"state", "param_groups"} and "param_groups" in tree:
        state, groups = tree.get("state", {}), tree["param_groups"]
    elif all(str(key).startswith(("state.", "param_groups.")) for key in tree):
        state, groups = _unflatten(where, tree, names)
    else:
        raise CheckpointError(
            f"{where}: the optimizer holds {sorted(map(str, tree))[:8]}; expected "
            "'state' and 'param_groups'. Save composable_fsdp.optim_state_dict(model, "
            f"optim) with FULL_STATE_DICT set, or {_WAY_OUT}"
        )
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(
            f"{where}: the optimizer's 'state' is a {type(state).__name__} and its "
            f"'param_groups' a {type(groups).__name__}; expected a dict and a list."
        )
    by_id = _names_of_ids(where, groups)
    found: States = {}
    for key, values in state.items():
        # As text: some formats keep the keys of dictionaries only as text.
        name: Any = by_id.get(str(key), key)
        # State of an unknown parameter must not be lost without an error.
        if name not in names or not _has_names(values):
            raise _unknown(where, f"state of {name!r}")
        # A parameter without values counts as a parameter without state.
        if values:
            found[names[name]] = dict(values)
    first = {**names, **by_id}
    # The names are in ``params`` already.
    return found, [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [first.get(str(p), p) for p in group.get("params", [])],
        }
        for group in groups
    ]


_WAY_OUT = "convert with --weights-only."


def _unknown(where: str, what: str) -> CheckpointError:
    """Return the error for values of the optimizer that belong to no parameter."""
    return CheckpointError(
        f"{where}: the optimizer has {what}, which is no parameter of the model in it, "
        f"or has no names. Save the two again, or {_WAY_OUT}"
    )


def _names_of_ids(where: str, groups: Sequence[Any]) -> dict[str, str]:
    """Return id -> name for groups whose ``params`` are ids; empty without ids."""
    found: dict[str, str] = {}
    for group in groups:
        params = group.get("params", []) if _has_names(group) else None
        if not isinstance(params, list | tuple):
            raise CheckpointError(
                f"{where}: a group of the optimizer is {repr(group)[:200]}; expected a "
                "dict with a list of parameters under 'params'."
            )
        if all(isinstance(param, str) for param in params):
            continue
        # torch saves ``param_names`` if the optimizer was built from named parameters.
        known = group.get("param_names", ())
        is_list = isinstance(known, list | tuple) and len(known) == len(params)
        if not is_list or not all(isinstance(name, str) for name in known):
            raise CheckpointError(
                f"{where}: the optimizer's parameters are numbers, which say nothing "
                "without the model's code. Save composable_fsdp.optim_state_dict("
                "model, optim), which keys them by name, or build the optimizer from "
                f"model.named_parameters(); or {_WAY_OUT}"
            )
        found.update(zip(map(str, params), known, strict=True))
    return found


def _unflatten(
    where: str, tree: Mapping[str, Any], names: Collection[str]
) -> tuple[States, list[Group]]:
    """Return the nested state, and groups of parameters whose options are all equal."""
    state: States = {}
    options: dict[str, Group] = {}
    for key, value in tree.items():
        # A parameter's name has dots; the state's name comes after the last.
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if name not in names:
            raise _unknown(where, f"{key!r} of {name!r}")
        into = (state if kind == "state" else options).setdefault(name, {})
        if kind == "state" or last != "params":
            into[last] = value
    # The flattened form has options per parameter: the original groups are not known.
    groups: list[tuple[Group, list[str]]] = []
    for name, own in options.items():
        members = next((members for known, members in groups if known == own), None)
        if members is None:
            groups.append((own, members := []))
        members.append(name)
    return state, [{**own, "params": members} for own, members in groups]
