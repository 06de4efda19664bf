"""Divides a saved dictionary of dictionaries into model, optimizer and other values.

``torch.save`` files and DCP directories hold any dictionary that the user passed. These
forms are accepted:

::

    {name: tensor, ...}                                        a model's state dict
    {"model": {name: tensor}, "optim": {...}, "extra": ...}    a training run

    key             also accepted                    content
    "model"         "state_dict",                    tensors by name, and modules' extra
                    "model_state_dict"               states (<module>._extra_state)
    "optim"         "optimizer",                     state by parameter name, nested or
                    "optim_state_dict",              flattened (see named_optim.py)
                    "optimizer_state_dict"
    all others                                       the user's values: extra
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.scalars import is_scalar_shape
from composable_fsdp.storage.formats.named_optim import Optim, named_optim
from composable_fsdp.storage.formats.stored import Stored
from composable_fsdp.storage.source import OWN_STATE, Source, TensorInfo

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIM_KEYS = ("optim", "optimizer", "optim_state_dict", "optimizer_state_dict")
EXTRA_KEY = "extra"


class NestedSource(Source):
    """A source over a nested dictionary whose tensors are ``Stored``.

    Args:
        where: the path of the checkpoint, also for messages.
        tree: the dictionary.
        aliases: other names of tied parameters -> the name that each is tied to.
            Default None: no names. Equal storages are found as ties in any case.

    Raises: CheckpointError, if ``tree`` has none of the accepted forms.
    """

    def __init__(
        self,
        where: str,
        tree: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path = where
        # Optimizer and extra are examined on first use, so the weights can be read from
        # a file whose optimizer state cannot be read.
        model, self._optim_tree, self._extra_tree = _split(where, tree)
        self._own = {name: v for name, v in model.items() if _is_own_state(name)}
        tensors = {name: v for name, v in model.items() if name not in self._own}
        self._model, self.aliases = _tied(where, tensors, aliases or {})
        self.model = {name: stored.info for name, stored in self._model.items()}

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a tensor; see ``Source``.

        Args:
            name: a key of ``model``.
            start: the first element.
            stop: the element after the last.
        """
        return self._model[name].read(start, stop)

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a state; see ``Source``.

        Args:
            name: the name of the parameter.
            state: the name of the state.
            start: the first element.
            stop: the element after the last.
        """
        value: Tensor = self._optim.state[name][state].read(start, stop)
        return value

    @cached_property
    def _optim(self) -> Optim:
        """The optimizer's state and groups by name."""
        canonical = {**{name: name for name in self.model}, **self.aliases}
        return named_optim(self.path, self._optim_tree, canonical)

    @cached_property
    def optim(self) -> Mapping[str, Mapping[str, TensorInfo]]:  # type: ignore[override]  # computed when asked for
        """See ``Source``. Raises: CheckpointError, for state without names."""
        return {
            name: {
                key: value.info
                for key, value in values.items()
                if self._has_elements(name, key, value)
            }
            for name, values in self._optim.state.items()
        }

    @cached_property
    def optim_values(self) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[override]  # computed when asked for
        """See ``Source``. Raises: CheckpointError, for state without names."""
        return {
            name: {
                key: read_all(value)
                for key, value in values.items()
                if not self._has_elements(name, key, value)
            }
            for name, values in self._optim.state.items()
        }

    def _has_elements(self, name: str, key: str, value: Any) -> bool:
        """Return whether a state is a tensor that is read in slices, and not a scalar.

        Args:
            name: the name of the parameter.
            key: the name of the state.
            value: the state.
        """
        return isinstance(value, Stored) and not is_scalar_shape(
            key, value.info.shape, self.model[name].shape
        )

    @cached_property
    def param_groups(self) -> Sequence[Mapping[str, Any]] | None:  # type: ignore[override]  # computed when asked for
        """See ``Source``. Raises: CheckpointError, for state without names."""
        groups = self._optim.groups
        return None if groups is None else [read_all(group) for group in groups]

    @cached_property
    def own_states(self) -> Mapping[str, Any]:  # type: ignore[override]  # computed when asked for
        """See ``Source``; all tensors are read."""
        return {name: read_all(value) for name, value in self._own.items()}

    @cached_property
    def extra(self) -> Any:
        """The values that were saved beside model and optimizer, with tensors read."""
        return read_all(self._extra_tree)

    def close(self) -> None:
        """See ``Source``; there is nothing to close."""


def _split(
    where: str, tree: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, Any]:
    """Return the parts of the dictionary: model, optimizer (or None), other values."""
    model_key = _one_of(where, tree, MODEL_KEYS)
    if model_key is None:
        # Without a key for the model, the dictionary itself must be a model's state
        # dict.
        if tree and all(_fits_model(*item) for item in tree.items()):
            return tree, None, None
        keys = sorted(map(str, tree))
        raise CheckpointError(
            f"{where} holds no model: expected a state dict, or a dictionary with one "
            f"under {' or '.join(map(repr, MODEL_KEYS))}; got the keys {_short(keys)}. "
            'Save {"model": model.state_dict(), ...}.'
        )
    optim_key = _one_of(where, tree, OPTIM_KEYS)
    rest = {key: tree[key] for key in tree if key not in (model_key, optim_key)}
    # If "extra" is the only other key, the value is the extra state. Otherwise all
    # other keys are the user's own, and the extra state is a dictionary of them.
    extra = rest[EXTRA_KEY] if list(rest) == [EXTRA_KEY] else rest or None
    model = tree[model_key]
    for name, value in model.items():
        if not _fits_model(name, value):
            raise CheckpointError(
                f"{where}: {name!r} of the model is a {type(value).__name__}, expected "
                "a tensor. Save the tensors under the model, other values beside it."
            )
    return model, None if optim_key is None else tree[optim_key], extra


def _is_own_state(name: object) -> bool:
    """Return whether ``name`` is the key of a module's extra state."""
    return str(name).rpartition(".")[2] == OWN_STATE


def _fits_model(name: object, value: Any) -> bool:
    """Return whether a model's state dict may hold the item."""
    return isinstance(value, Stored) or _is_own_state(name)


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
    where: str, model: Mapping[str, Stored], told: Mapping[str, str]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return each storage once under the first name, and the other names."""
    kept: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    for name, stored in model.items():
        owner = told.get(name)
        # ``told`` comes from the file, and must not name a missing or another tensor.
        if owner is not None and (
            owner in told or owner not in model or model[owner].info != stored.info
        ):
            raise CheckpointError(
                f"{where} says that {name!r} is tied to {owner!r}, which is no tensor "
                "of that shape and dtype in it. The checkpoint is damaged."
            )
        # The first name of a storage keeps the tensor; the other names become aliases.
        if owner is None and stored.storage is not None:
            owner = first.setdefault(stored.storage, name)
        if owner is None or owner == name:
            kept[name] = stored
        else:
            aliases[name] = owner
    return kept, aliases


def read_all(value: Any) -> Any:
    """Return ``value`` with all tensors read."""
    if isinstance(value, Stored):
        # A clone, because ``read`` may return a view of a mapped file. Options of an
        # optimizer can be tensors, too, such as the learning rate.
        return value.read(0, value.info.numel).reshape(value.info.shape).clone()
    if isinstance(value, Mapping):
        return {key: read_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [read_all(each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _short(keys: Sequence[str]) -> str:
    """Return the first keys, for messages."""
    text = ", ".join(map(repr, keys[:8]))
    return f"{text}, ... ({len(keys)} in all)" if len(keys) > 8 else text or "(none)"
