"""A saved dictionary of dictionaries, told apart into model, optimizer and the rest.

``torch.save`` files and DCP directories hold whatever dictionary their user passed.
These are understood::

    {name: tensor, ...}                                        a model's state dict
    {"model": {name: tensor}, "optim": {...}, "extra": ...}    a training run

In the model, ``<module>._extra_state`` is what a module keeps beside its tensors.
For ``"model"`` also ``"state_dict"`` and ``"model_state_dict"``; for ``"optim"`` also
``"optimizer"``, ``"optim_state_dict"`` and ``"optimizer_state_dict"``. All other keys
are the user's own: ``extra``. Optimizer state is keyed by parameter name, nested or
flattened (``state.<name>.<state>``); ids are taken if the groups say ``param_names``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.scalars import SCALARS
from composable_fsdp.storage.formats.named_optim import Optim, named_optim
from composable_fsdp.storage.formats.stored import Stored
from composable_fsdp.storage.source import OWN_STATE, Source, TensorInfo

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIM_KEYS = ("optim", "optimizer", "optim_state_dict", "optimizer_state_dict")
EXTRA_KEY = "extra"


class NestedSource(Source):
    """A source over a nested dictionary whose tensors are ``Stored``.

    ``where`` is the path, for messages. Optimizer and extra are looked into when they
    are asked for: weights can be had from a file whose optimizer cannot be read.
    """

    def __init__(
        self,
        where: str,
        tree: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.path = where
        model, self._optim_tree, self._extra_tree = _split(where, tree)
        self._own = {name: v for name, v in model.items() if _is_own_state(name)}
        tensors = {name: v for name, v in model.items() if name not in self._own}
        self._model, self.aliases = _tied(where, tensors, aliases or {})
        self.model = {name: stored.info for name, stored in self._model.items()}

    def read_model(self, name: str, start: int, stop: int) -> Tensor:
        """See ``Source``."""
        return self._model[name].read(start, stop)

    def read_optim(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """See ``Source``."""
        value: Tensor = self._optim.state[name][state].read(start, stop)
        return value

    @cached_property
    def _optim(self) -> Optim:
        canonical = {**{name: name for name in self.model}, **self.aliases}
        return named_optim(self.path, self._optim_tree, canonical)

    @cached_property
    def optim(self) -> Mapping[str, Mapping[str, TensorInfo]]:  # type: ignore[override]  # computed when asked for
        """See ``Source``. Raises: CheckpointError, for state that has no names."""
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
        """See ``Source``. Raises: CheckpointError, for state that has no names."""
        return {
            name: {
                key: read_all(value)
                for key, value in values.items()
                if not self._has_elements(name, key, value)
            }
            for name, values in self._optim.state.items()
        }

    def _has_elements(self, name: str, key: str, value: Any) -> bool:
        """Whether a state is a tensor that is read in slices, and not one number."""
        if not isinstance(value, Stored):
            return False
        is_number = self.model[name].shape != () or key in SCALARS
        return value.info.shape != () or not is_number

    @cached_property
    def param_groups(self) -> Sequence[Mapping[str, Any]] | None:  # type: ignore[override]  # computed when asked for
        """See ``Source``. Raises: CheckpointError, for state that has no names."""
        groups = self._optim.groups
        return None if groups is None else [read_all(group) for group in groups]

    @cached_property
    def own_states(self) -> Mapping[str, Any]:  # type: ignore[override]  # computed when asked for
        """See ``Source``; tensors read."""
        return {name: read_all(value) for name, value in self._own.items()}

    @cached_property
    def extra(self) -> Any:
        """What was saved beside model and optimizer, tensors read; see ``Source``."""
        return read_all(self._extra_tree)

    def close(self) -> None:
        """See ``Source``."""


def _split(
    where: str, tree: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, Any]:
    """The parts of the dictionary: model, optimizer (or None), the user's own."""
    model_key = _one_of(where, tree, MODEL_KEYS)
    if model_key is None:
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
    return str(name).rpartition(".")[2] == OWN_STATE


def _fits_model(name: object, value: Any) -> bool:
    return isinstance(value, Stored) or _is_own_state(name)


def _one_of(where: str, tree: Mapping[str, Any], keys: Sequence[str]) -> str | None:
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
    """Each storage once under its first name, and the other names."""
    kept: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    for name, stored in model.items():
        owner = told.get(name)
        if owner is not None and (
            owner in told or owner not in model or model[owner].info != stored.info
        ):
            raise CheckpointError(
                f"{where} says that {name!r} is tied to {owner!r}, which is no tensor "
                "of that shape and dtype in it. The checkpoint is damaged."
            )
        if owner is None and stored.storage is not None:
            owner = first.setdefault(stored.storage, name)
        if owner is None or owner == name:
            kept[name] = stored
        else:
            aliases[name] = owner
    return kept, aliases


def read_all(value: Any) -> Any:
    """``value`` with its tensors read: a learning rate, say, may be one."""
    if isinstance(value, Stored):
        return value.read(0, value.info.numel).reshape(value.info.shape).clone()
    if isinstance(value, Mapping):
        return {key: read_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [read_all(each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _short(keys: Sequence[str]) -> str:
    text = ", ".join(map(repr, keys[:8]))
    return f"{text}, ... ({len(keys)} in all)" if len(keys) > 8 else text or "(none)"
