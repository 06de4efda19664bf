"""Policies: functions of a module tree that return units as ``{module: options}``.

A policy only selects modules; no policy here wraps or changes the tree.
``evaluate_policy`` accepts three forms:

* an object with ``_run_policy(root_module, ignored_modules, root_kwargs)``: the classes
  of this file and the policy classes of torch's FSDP1;
* a function ``(root, ignored, root_kwargs)`` that returns the map;
* FSDP1's functions ``(module, recurse, nonwrapped_numel) -> bool`` (``callables.py``).
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
"""The units, and the options of each unit."""

_SHOWN = 8
"""Largest number of classes that a message lists."""


@runtime_checkable
class Policy(Protocol):
    """The protocol of a policy object, here and in torch's FSDP1."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> Targets:
        """Return the units below ``root_module`` and the options of each unit."""
        ...  # a protocol has no body


class ModuleWrapPolicy:
    """Makes every module of the given classes a unit with the root's options.

    A policy that matches no module in the tree warns: the root is the only unit then.

    Raises: TypeError, if an entry of ``module_classes`` is no module class.

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
        # Check before ignored modules are removed: a class that only ignored modules
        # have is spelled correctly.
        if not found:
            self._warn_of_none(root_module)
        return {m: dict(root_kwargs) for m in found if m not in ignored_modules}

    def _warn_of_none(self, root: nn.Module) -> None:
        """Warn that no module matches, and list the classes of the tree."""
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
        """Return the answer of FSDP1's function form; the numel has no influence."""
        return recurse or is_named(module, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__qualname__ for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy:
    """Asks ``lambda_fn(module)`` per module: True, False, or a dict of options.

    A non-empty dict makes the module a unit with these options; options that the dict
    does not name are the root's. ``{}`` and False mean that the module is not a unit.

    Raises: TypeError, if ``lambda_fn`` is not callable; PlanError, when the policy
    runs, if ``lambda_fn`` returns another type.

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
            # The user's function never sees an ignored module.
            if module in ignored_modules:
                continue
            # ``object``, because the user's function may return any type.
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
    """Makes units of the smallest subtrees that reach ``min_numel`` elements.

    A module becomes a unit if the parameters below the module that no deeper unit has
    taken reach ``min_numel`` elements. The decisions equal those of
    ``size_based_auto_wrap_policy``; the policy makes them in a single pass over the
    tree.

    Args:
        min_numel: smallest size of a unit, in elements.
        exclude: classes whose modules never become units. Default None:
            ``size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
        force_leaf: classes whose subtrees stay whole; as in FSDP1, a module of these
            classes is no unit. Default None:
            ``size_based_auto_wrap_policy.FORCE_LEAF_MODULES``.

    Raises: ValueError, if ``min_numel`` is negative; TypeError, if an entry is no
    module class.
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
        """Return the answer of FSDP1's function form."""
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
    """Return the units that ``policy`` selects below ``root``, in ``.modules()`` order.

    Each unit gets a new dict: the root's options, overridden by the policy's options.
    The tree and the dicts of the caller and of the policy stay unchanged.

    Returns: ``{module: options}``.
    Raises: PlanError, if a unit is not below ``root`` or has no forward; TypeError, if
    the policy or its answer has a wrong type.
    """
    left_out = walk.subtrees([*ignored_modules, *boundaries])
    answer = _answer(policy, root, left_out, ignored_params, root_kwargs)
    _check_targets(answer, root)
    # In the order of the tree and not of the policy's dict: a policy may build the dict
    # from a set, whose order differs between ranks, and ranks must agree on the order
    # of units.
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
    """Call ``policy`` in the form that it has, and return its answer as a map."""
    if isinstance(policy, type) or not (callable(policy) or isinstance(policy, Policy)):
        raise TypeError(
            f"A policy expects one of the forms {_FORMS}, got {_named(policy)}. "
            "For units by class, pass ModuleWrapPolicy({TheClass})."
        )
    # Pass copies, since a policy may change the arguments. A SizePolicy takes the
    # branch below: ``choose_units`` leaves the ignored parameters out of the numel.
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
            f"A policy expects one of the forms {_FORMS}, got {_named(policy)}, "
            f"which takes {inspect.signature(policy)}. For a function of one module, "
            "pass CustomPolicy(function); if it takes more arguments than a form, bind "
            "them with functools.partial(function, name=value)."
        )
    else:
        answer = policy(root, set(left_out), dict(root_kwargs))
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"A policy expects to return a dict {{module: options}}, got {answer!r} "
            f"from {_named(policy)}. A policy has one of the forms {_FORMS}."
        )
    return answer


def _named(policy: object) -> str:
    """Return the name of a function, which has no address in it; else the repr."""
    return getattr(policy, "__qualname__", None) or repr(policy)


_FORMS = (
    "(module, recurse, nonwrapped_numel) -> bool, "
    "(root, ignored, root_kwargs) -> {module: options}, or a policy object"
)


def _takes(policy: Callable[..., object], *given: object, **named: object) -> bool:
    """Return whether ``policy`` can be called with these arguments."""
    try:
        # bind() tests the call without running the policy.
        inspect.signature(policy).bind(*given, **named)
    except TypeError:
        return False
    except ValueError:  # a function written in C may have no signature
        return True
    return True


def _check_targets(
    answer: Mapping[nn.Module, Mapping[str, Any]], root: nn.Module
) -> None:
    """Refuse a target that cannot be a unit, before any module is changed."""
    tree = set(walk.modules(root))
    for module, options in answer.items():
        # A policy is user code, so the annotated types are not certain: check the
        # values as plain objects.
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
        # ``name_of`` walks the tree, so it runs only for a message.
        name = quoted(walk.name_of(root, module)) if walk.is_container(module) else ""
        if name and module is not root:
            raise PlanError(container_text(module, name))
        given: object = options
        if not isinstance(given, Mapping):
            raise TypeError(
                f"A policy expects a dict of options per module, got {given!r} for "
                f"{quoted(walk.name_of(root, module))}."
            )
