"""Policies: functions of a module tree that return units as ``{module: options}``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

from torch import nn

from composable_fsdp.errors import PlanError, warn
from composable_fsdp.naming import quoted
from composable_fsdp.planning import walk

Targets = dict[nn.Module, dict[str, Any]]

_SHOWN = 8


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


AnyPolicy = Policy | Callable[..., bool] | Callable[..., Mapping[Any, Any]]
"""What ``policy`` takes: an object with ``_run_policy``, or a function (above)."""


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
        self._module_classes = _classes_of(module_classes, "ModuleWrapPolicy")

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: Set[nn.Module],
        root_kwargs: Mapping[str, Any],
    ) -> Targets:
        tree = walk.modules(root_module)
        found = [module for module in tree if isinstance(module, self._module_classes)]
        # A class that only ignored modules have is spelled correctly.
        if not found:
            classes = sorted({type(m).__name__ for m in tree})
            more = ", ..." if len(classes) > _SHOWN else ""
            warn(
                f"{self!r} matches no module of this {type(root_module).__name__}, so "
                f"all of it is one unit. Its modules are {', '.join(classes[:_SHOWN])}"
                f"{more}; name those that repeat.",
            )
        return {m: dict(root_kwargs) for m in found if m not in ignored_modules}

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

    Parameters that a deeper unit has taken do not count. The decisions equal those of
    ``size_based_auto_wrap_policy``.

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
        self._exclude, self._force_leaf = (
            None if given is None else set(_classes_of(given, name))
            for name, given in (("exclude", exclude), ("force_leaf", force_leaf))
        )

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Return the answer of FSDP1's function form."""
        return size_based_auto_wrap_policy(
            module,
            recurse,
            nonwrapped_numel,
            self._min_numel,
            self._force_leaf,
            self._exclude,
        )

    def __repr__(self) -> str:
        return f"SizePolicy({self._min_numel})"


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Return whether ``nonwrapped_numel`` reaches ``min_num_params``.

    ``SizePolicy`` makes the same decisions.

    Args:
        module: the module in question.
        recurse: True on the way down, False on the way up.
        nonwrapped_numel: elements of the subtree that no unit below has taken.
        min_num_params: smallest size of a unit, in elements. Default 1e8.
        force_leaf_modules: classes whose subtrees stay whole. Default None: the
            attribute ``FORCE_LEAF_MODULES`` of this function, read at each call.
        exclude_wrap_modules: classes whose modules never become units. Default None:
            the attribute ``EXCLUDE_WRAP_MODULES`` of this function, read at each call.

    Returns: on the way down, whether to visit the children; on the way up, whether
    ``module`` becomes a unit.
    """
    # As in FSDP1: the leaf classes stop the way down, the excluded classes matter on
    # the way up.
    given = force_leaf_modules if recurse else exclude_wrap_modules
    if given is None:
        default = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        given = getattr(size_based_auto_wrap_policy, default)
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(given))


# Users extend these sets in place, as they extend FSDP1's sets. vars() sets them
# because a type checker knows no attributes of a function.
vars(size_based_auto_wrap_policy).update(
    EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict},
    FORCE_LEAF_MODULES={nn.MultiheadAttention},
)


def is_named(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Return whether ``module`` is one of ``classes``; refuse it without a forward."""
    named = isinstance(module, classes)
    if named and walk.is_container(module):
        raise _container(module, "")
    return named


def _container(module: nn.Module, name: str) -> PlanError:
    """Return the error for a policy that selects a module without a forward."""
    where = f" {name}" if name else ""
    return PlanError(
        f"The policy names {type(module).__name__}{where}, which has no forward, so "
        "nothing would ever unshard it. Name the modules inside it, or the module "
        "that holds it."
    )


def _classes_of(
    classes: Iterable[type[nn.Module]], argument: str
) -> tuple[type[nn.Module], ...]:
    """Return the distinct classes in ``classes``; raise TypeError for anything else."""
    # A forgotten set is the usual mistake: ``ModuleWrapPolicy(nn.Linear)``.
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        raise TypeError(
            f"{argument} expects several module classes, such as {{nn.Linear}}, "
            f"got {classes!r}."
        )
    # dict.fromkeys() removes duplicates and keeps the order, unlike a set.
    distinct = tuple(dict.fromkeys(classes))
    for cls in distinct:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{argument} expects module classes, got {cls!r}.")
    return distinct


def evaluate_policy(
    policy: object,
    root: nn.Module,
    *,
    ignored_modules: Set[nn.Module] = frozenset(),
    ignored_params: Set[int] = frozenset(),
    root_kwargs: Mapping[str, Any],
) -> Targets:
    """Return the units that ``policy`` selects below ``root``, in walking order."""
    left_out = walk.subtrees(ignored_modules)
    answer = _answer(policy, root, left_out, ignored_params, root_kwargs)
    _check_targets(answer, root)
    # In the order of the tree: a policy may build the dict from a set, whose order
    # differs between ranks, and ranks must agree on the order of units.
    return {
        module: {**root_kwargs, **answer[module]}
        for module in walk.modules(root)
        if module in answer and module is not root and module not in left_out
    }


_FORMS = (
    "(module, recurse, nonwrapped_numel) -> bool, "
    "(root, ignored, root_kwargs) -> {module: options}, or a policy object"
)


def _answer(
    policy: object,
    root: nn.Module,
    left_out: frozenset[nn.Module],
    ignored_params: Set[int],
    root_kwargs: Mapping[str, Any],
) -> Mapping[nn.Module, Mapping[str, Any]]:
    """Call ``policy`` in the form that it has, and return its answer as a map."""
    # The name of a function, which has no address in it; else the repr.
    named = getattr(policy, "__qualname__", None) or repr(policy)
    if isinstance(policy, type) or not (callable(policy) or isinstance(policy, Policy)):
        raise TypeError(
            f"A policy expects one of the forms {_FORMS}, got {named}. "
            "For units by class, pass ModuleWrapPolicy({TheClass})."
        )
    # Copies, since a policy may change them.
    if isinstance(policy, Policy):
        answer: object = policy._run_policy(root, set(left_out), dict(root_kwargs))
    elif _takes(policy, module=root, recurse=True, nonwrapped_numel=0):
        units = choose_units(
            policy, root, left_out=left_out, ignored_params=ignored_params
        )
        return {module: {} for module in units}
    elif not _takes(policy, root, left_out, root_kwargs):
        raise TypeError(
            f"A policy expects one of the forms {_FORMS}, got {named}, "
            f"which takes {inspect.signature(policy)}. For a function of one module, "
            "pass CustomPolicy(function); if it takes more arguments than a form, bind "
            "them with functools.partial(function, name=value)."
        )
    else:
        answer = policy(root, set(left_out), dict(root_kwargs))
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"A policy expects to return a dict {{module: options}}, got {answer!r} "
            f"from {named}. A policy has one of the forms {_FORMS}."
        )
    return answer


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
        # A policy is user code: check the values as plain objects.
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
        if walk.is_container(module) and module is not root:
            raise _container(module, quoted(walk.name_of(root, module)))
        given: object = options
        if not isinstance(given, Mapping):
            raise TypeError(
                f"A policy expects a dict of options per module, got {given!r} for "
                f"{quoted(walk.name_of(root, module))}."
            )


def choose_units(
    policy: Callable[..., object],
    root: nn.Module,
    *,
    left_out: Set[nn.Module] = frozenset(),
    ignored_params: Set[int] = frozenset(),
) -> list[nn.Module]:
    """Return the modules below ``root`` that FSDP1's function form makes units."""
    # Questions and order are those of FSDP1: each module is asked on the way down, with
    # its elements, and on the way up, with those that no unit below has taken.
    # Parameters of skipped modules count zero, also where a visited module shares them.
    outside = {id(p) for module in left_out for p in walk.own_parameters(module)}
    numels = _subtree_numels(root, outside | ignored_params)
    units: list[nn.Module] = []
    # Per visited module, the elements in units at or below it: a module with several
    # parents is asked once.
    taken: dict[nn.Module, int] = {root: 0}

    def ask(module: nn.Module, *, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        # A non-empty dict is true: without this check the options would be lost.
        if isinstance(answer, dict):
            raise TypeError(
                "A policy called with (module, recurse, nonwrapped_numel) expects to "
                f"return a bool, got a dict for {type(module).__name__}. To give "
                "options per module, pass CustomPolicy(function of the module)."
            )
        return bool(answer)

    # Each entry: a module that was entered, and its children that are still to come.
    stack = [(root, iter(walk.children(root)))]
    if not ask(root, recurse=True, numel=numels[root]):
        return units
    while stack:
        module, pending = stack[-1]
        child = next(pending, None)
        if child is None:
            stack.pop()
            if module is root:
                break
            left = numels[module] - taken[module]
            wanted = ask(module, recurse=False, numel=left)
            if wanted and not walk.is_container(module):
                units.append(module)
                taken[module] = numels[module]
            taken[stack[-1][0]] += taken[module]
        elif child in left_out:
            continue
        # A shared child was visited under another parent, and is not asked again.
        elif child in taken:
            taken[module] += taken[child]
        else:
            taken[child] = 0
            if ask(child, recurse=True, numel=numels[child]):
                stack.append((child, iter(walk.children(child))))
    return units


def _subtree_numels(root: nn.Module, left_out: Set[int]) -> dict[nn.Module, int]:
    """Return the elements of the distinct parameters in each module's subtree."""
    held: dict[nn.Module, frozenset[nn.Parameter]] = {}
    for module in walk.post_order(root):
        own = [p for p in walk.own_parameters(module) if id(p) not in left_out]
        # A set, because a parameter may lie in a subtree along several paths. Modules
        # one inside the other share it, so that deep trees stay cheap.
        carried = [held[child] for child in walk.children(module)]
        alone = len(carried) == 1 and not own
        held[module] = carried[0] if alone else frozenset(own).union(*carried)
    return {module: sum(p.numel() for p in held[module]) for module in held}
