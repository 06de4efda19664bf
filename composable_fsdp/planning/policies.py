"""Policies: functions of the module tree that return ``{module: kwargs}``.

A policy reads and answers; it wraps nothing and changes nothing, so it may look at the
tree as often as it likes. Three forms exist, and ``evaluate_policy`` takes each:

* an object with ``_run_policy(root_module, ignored_modules, root_kwargs)`` (the classes
  here, and those of torch's FSDP1);
* a plain function ``(root, ignored, root_kwargs)`` that returns the map;
* FSDP1's callables ``(module, recurse, nonwrapped_numel) -> bool`` (``callables.py``).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

from torch import nn

from composable_fsdp.errors import PlanError
from composable_fsdp.naming import quoted
from composable_fsdp.planning import walk
from composable_fsdp.planning.callables import (
    classes_of,
    container_text,
    is_named,
    size_based_auto_wrap_policy,
)
from composable_fsdp.planning.dry_pass import choose_units

Targets = dict[nn.Module, dict[str, Any]]
"""Units and the options of each."""

_SHOWN = 8
"""Classes that a message lists."""


@runtime_checkable
class Policy(Protocol):
    """What this package and torch's FSDP1 call a policy object."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> Targets:
        """Return the units below ``root_module`` and the options of each."""
        ...  # a protocol has no body


class ModuleWrapPolicy:
    """Every module of the given classes becomes a unit with the root's options.

    Warns, where the tree has none: the root is the only unit then.

    Raises: TypeError, if something in ``module_classes`` is not a module class.

    >>> policy = ModuleWrapPolicy({nn.Linear})
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> list(policy._run_policy(model, set(), {}))
    [Linear(in_features=2, out_features=2, bias=True)]
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = classes_of(module_classes, "ModuleWrapPolicy")

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: Set[nn.Module],
        root_kwargs: Mapping[str, Any],
    ) -> Targets:
        found = [
            module
            for module in walk.modules(root_module)
            if isinstance(module, self._module_classes)
        ]
        if not found:
            self._warn_of_none(root_module)
        return {m: dict(root_kwargs) for m in found if m not in ignored_modules}

    def _warn_of_none(self, root: nn.Module) -> None:
        classes = sorted({type(m).__name__ for m in walk.modules(root)})
        more = ", ..." if len(classes) > _SHOWN else ""
        warnings.warn(
            f"{self!r} matches no module of this {type(root).__name__}, so all of it "
            f"is one unit. Its modules are {', '.join(classes[:_SHOWN])}{more}; name "
            "those that repeat.",
            stacklevel=2,
        )

    def __call__(
        self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any
    ) -> bool:
        """Answer as FSDP1's callables do; the numel is not looked at."""
        return recurse or is_named(module, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__qualname__ for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy:
    """A function of one module decides: ``True``, ``False``, or options of its own.

    A non-empty dict makes the module a unit; what it leaves out is the root's. ``{}``
    and ``False`` mean that the module is not a unit.

    >>> policy = CustomPolicy(lambda module: isinstance(module, nn.Linear))
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise TypeError(
                "CustomPolicy expects a function of a module, got a "
                f"{type(lambda_fn).__name__}. For units by class, pass "
                "ModuleWrapPolicy({TheClass})."
            )
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: Set[nn.Module],
        root_kwargs: Mapping[str, Any],
    ) -> Targets:
        targets: Targets = {}
        for module in walk.modules(root_module):
            if module in ignored_modules:
                continue
            answer: object = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                name = quoted(walk.name_of(root_module, module))
                raise PlanError(
                    "CustomPolicy expects its function to return True, False or a dict "
                    f"of options, got {answer!r} for module {name}."
                )
            if answer:
                own = answer if isinstance(answer, dict) else {}
                targets[module] = {**root_kwargs, **own}
        return targets


class SizePolicy:
    """Units of at least ``min_numel`` elements, the smallest subtrees that reach it.

    A module becomes a unit when the parameters below it that no deeper unit has taken
    reach ``min_numel``. The decisions equal those of ``size_based_auto_wrap_policy``,
    from one pass over the tree. ``exclude``: classes that never become units.
    ``force_leaf``: classes whose subtrees are left whole (as in FSDP1, such a module is
    no unit itself). Both default to the attributes of ``size_based_auto_wrap_policy``.

    Raises: ValueError, for a negative ``min_numel``; TypeError, for a non-class.
    """

    def __init__(
        self,
        min_numel: int,
        *,
        exclude: Iterable[type[nn.Module]] | None = None,
        force_leaf: Iterable[type[nn.Module]] | None = None,
    ) -> None:
        if not isinstance(min_numel, (int, float)) or min_numel < 0:
            raise ValueError(f"SizePolicy expects min_numel >= 0, got {min_numel!r}.")
        self._min_numel = min_numel
        self._exclude = None if exclude is None else classes_of(exclude, "exclude")
        self._force_leaf = (
            None if force_leaf is None else classes_of(force_leaf, "force_leaf")
        )

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: Set[nn.Module],
        root_kwargs: Mapping[str, Any],
    ) -> Targets:
        units = choose_units(self, root_module, left_out=ignored_modules)
        return {module: dict(root_kwargs) for module in units}

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Answer as FSDP1's callables do."""
        return size_based_auto_wrap_policy(
            module,
            recurse,
            nonwrapped_numel,
            self._min_numel,
            None if self._force_leaf is None else set(self._force_leaf),
            None if self._exclude is None else set(self._exclude),
        )

    def __repr__(self) -> str:
        return f"SizePolicy({self._min_numel})"


def evaluate_policy(
    policy: object,
    root: nn.Module,
    *,
    ignored_modules: Set[nn.Module] = frozenset(),
    ignored_params: Set[int] = frozenset(),
    boundaries: Set[nn.Module] = frozenset(),
    root_kwargs: Mapping[str, Any],
) -> Targets:
    """Return the units that ``policy`` wants below ``root``, in ``.modules()`` order.

    Each unit has a dict of its own: the root's options, overridden by the policy's.
    Never units: ``root`` itself (its options are the caller's, as in FSDP1, so what a
    policy says of it is dropped); modules in or below ``ignored_modules``; and modules
    in or below ``boundaries``, which are units already. Parameters of the last two, and
    those whose ``id`` is in ``ignored_params``, are not part of any numel. ``None`` has
    no units. Changes nothing: neither the tree nor a dict of the caller or the policy.

    Raises: PlanError, for a unit that is not below ``root``, or has no forward;
    TypeError, for a policy or an answer of the wrong kind.
    """
    left_out = walk.subtrees([*ignored_modules, *boundaries])
    answer = _answer(policy, root, left_out, ignored_params, root_kwargs)
    _check_targets(answer, root)
    return {
        module: {**root_kwargs, **answer[module]}
        for module in walk.modules(root)
        if module in answer and module is not root and module not in left_out
    }


def _answer(
    policy: object,
    root: nn.Module,
    left_out: frozenset[nn.Module],
    ignored_params: Set[int],
    root_kwargs: Mapping[str, Any],
) -> Mapping[nn.Module, Mapping[str, Any]]:
    """Ask ``policy`` in the form it has."""
    if policy is None:
        return {}
    if isinstance(policy, type) or not (callable(policy) or isinstance(policy, Policy)):
        raise TypeError(
            f"A policy expects one of the forms {_FORMS}, got {policy!r}. For units by "
            "class, pass ModuleWrapPolicy({TheClass})."
        )
    # Copies, since a policy may write to what it is given. A SizePolicy is asked below,
    # where its numel leaves out the ignored parameters.
    if isinstance(policy, Policy) and not isinstance(policy, SizePolicy):
        answer: object = policy._run_policy(root, set(left_out), dict(root_kwargs))
    elif isinstance(policy, SizePolicy) or _takes(
        policy, module=root, recurse=True, nonwrapped_numel=0
    ):
        units = choose_units(
            policy, root, left_out=left_out, ignored_params=ignored_params
        )
        return {module: {} for module in units}
    elif not _takes(policy, root, left_out, root_kwargs):
        raise TypeError(
            f"A policy expects one of the forms {_FORMS}, got {policy!r} with the "
            f"arguments {inspect.signature(policy)}. Bind the others with "
            "functools.partial; a function of one module goes into CustomPolicy."
        )
    else:
        answer = policy(root, set(left_out), dict(root_kwargs))
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"A policy expects to return a dict {{module: options}}, got {answer!r} "
            f"from {policy!r}. A policy has one of the forms {_FORMS}."
        )
    return answer


_FORMS = (
    "(module, recurse, nonwrapped_numel) -> bool, "
    "(root, ignored, root_kwargs) -> {module: options}, or a policy object"
)


def _takes(policy: Callable[..., object], *given: object, **named: object) -> bool:
    try:
        inspect.signature(policy).bind(*given, **named)
    except TypeError:
        return False
    except ValueError:  # written in C: no signature to ask
        return True
    return True


def _check_targets(
    answer: Mapping[nn.Module, Mapping[str, Any]], root: nn.Module
) -> None:
    """Refuse what cannot be a unit, before anything is applied."""
    tree = set(walk.modules(root))
    for module, options in answer.items():
        found: object = module
        if not isinstance(found, nn.Module):
            raise TypeError(
                f"A policy expects modules as units, got {found!r}. A unit is a whole "
                "module: to shard a part of one, make the part a module of its own."
            )
        if module not in tree:
            raise PlanError(
                f"The policy named a foreign module: a {type(module).__name__} that is "
                f"not below the {type(root).__name__} it was asked about. Name modules "
                "of that tree, such as those from root.modules()."
            )
        name = quoted(walk.name_of(root, module)) if walk.is_container(module) else ""
        if name and module is not root:
            raise PlanError(container_text(module, name))
        given: object = options
        if not isinstance(given, Mapping):
            raise TypeError(
                f"A policy expects a dict of options per module, got {given!r} for "
                f"{quoted(walk.name_of(root, module))}."
            )
