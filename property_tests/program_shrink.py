"""Making a failing program smaller, without Hypothesis: each attempt costs a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from property_tests.program_recipes import Options, Part, Program
from property_tests.program_strategies import possible
from property_tests.programs import expanded


def shrink(
    program: Program,
    failure: str,
    run: Callable[[Program], str],
    is_same: Callable[[str], bool],
    attempts: int,
) -> tuple[Program, str]:
    """Return a smaller program that fails in the same way, and its failure.

    ``run`` returns the failure of a program. At most ``attempts`` programs are run.
    """
    tried = {repr(program)}
    found = True
    while found:
        found = False
        for smaller in smaller_programs(program):
            if repr(smaller) in tried or possible(smaller) != smaller:
                continue
            if len(tried) > attempts:
                return program, failure
            tried.add(repr(smaller))
            text = run(smaller)
            if is_same(text):
                program, failure, found = smaller, text, True
                break
    return program, failure


def smaller_programs(program: Program) -> Iterator[Program]:
    """Yield programs that differ in one step: fewer actions, parts, options."""
    yield replace(program, actions=tuple(expanded(program.actions)))
    actions = program.actions
    for count in (4, 2, 1):
        for at in range(0, len(actions), count):
            yield replace(program, actions=actions[:at] + actions[at + count :])
    for root in (*program.root.children, *smaller_parts(program.root)):
        yield replace(program, root=root)
    options = program.options
    for field in fields(Options):
        default: Any = field.default
        yield replace(program, options=replace(options, **{field.name: default}))
    yield replace(program, width=4)
    yield replace(program, seed=0)
    for at, (name, *arguments) in enumerate(actions):
        for place, argument in enumerate(arguments):
            if type(argument) is int and argument:
                zero = (name, *arguments[:place], 0, *arguments[place + 1 :])
                changed = (*actions[:at], zero, *actions[at + 1 :])
                yield replace(program, actions=changed)


def smaller_parts(part: Part) -> Iterator[Part]:
    """Yield parts with fewer children, and with defaults in place of other words."""
    children = part.children
    for at, child in enumerate(children):
        yield replace(part, children=children[:at] + children[at + 1 :])
        if child.children:
            lifted = (*children[:at], *child.children, *children[at + 1 :])
            yield replace(part, children=lifted)
    for field in fields(Part):
        if field.name != "children":
            default: Any = field.default
            yield replace(part, **{field.name: default})
    for at, child in enumerate(children):
        for smaller in smaller_parts(child):
            yield replace(part, children=(*children[:at], smaller, *children[at + 1 :]))
