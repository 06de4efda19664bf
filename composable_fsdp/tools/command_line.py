"""``python -m composable_fsdp``: plan a model; verify and convert checkpoints.

Commands on checkpoints need no process group and no device, and execute no code from a
checkpoint. Results go to standard output, as text or as a JSON object; errors go to
standard error. Torch, whose import takes seconds, is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from composable_fsdp.lazy import resolver
from composable_fsdp.naming import did_you_mean
from composable_fsdp.tools.arguments import COMMANDS, add_arguments
from composable_fsdp.tools.texts import printable, version

if TYPE_CHECKING:
    from composable_fsdp.tools.command import Command

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, the shells' convention."""

_command, _ = resolver(
    {
        "tools.checkpoint_commands": "CONVERT EXPORT INSPECT VERIFY",
        "tools.checkpoint_diff": "DIFF",
        "tools.command": "ENV",
        "tools.model_commands": "PLAN SIMULATE",
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status.

    Raises: SystemExit, for ``--help`` (status 0) and wrong usage (status 2).
    """
    # argparse ends the program by itself after ``--help`` and for wrong usage.
    given, unknown = _parser().parse_known_args(arguments)
    # By the parser of the command, which knows its options.
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # What ``import composable_fsdp`` leaves to this function.
    import_module("composable_fsdp.features.defaults")
    command = cast("Command", _command(given.command.upper()))
    try:
        found = command.run(given)
    except command.errors as error:
        text = _text_of(error)
        # Standard output is always a JSON object with ``--json``, so a script can
        # parse failures, too.
        if given.json:
            print(json.dumps({"ok": False, "error": text}))
        # A message may have several lines, and hold names from a file.
        lines = "\n".join(map(printable, text.split("\n")))
        print(f"error: {lines}", file=sys.stderr)
        return command.bad
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    try:
        if given.json:
            print(json.dumps({"ok": True, **found}))
        else:
            command.show(found)
    # ``| head`` has read enough. Python would fail once more when it flushes.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return command.status(found)


def _text_of(error: Exception) -> str:
    """Return the text of an error for people.

    >>> _text_of(FileNotFoundError(2, "No such file or directory", "a/plan.png"))
    'a/plan.png: No such file or directory.'
    """
    # The rank is that of a job which the command made up.
    if hasattr(error, "rank"):
        error.rank = None
    # "[Errno 2]" says nothing to most readers.
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


class _Parser(argparse.ArgumentParser):
    """A parser that says which command, option or value was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"(?:choice: '|arguments: )([\w-]+)", message)
        _, _, choices = message.partition("(choose from ")
        known = re.findall(r"[\w-]+", choices) or re.findall(
            r"--[\w-]+", self.format_help()
        )
        super().error(message + (did_you_mean(wrong[1], known) if wrong else ""))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # ``sys.argv`` is that of the test runner in a test, and of ``__main__`` with -m.
    name = Path(sys.argv[0]).name
    raw = argparse.RawDescriptionHelpFormatter
    shown = [each.end.splitlines()[1] for each in COMMANDS.values()]
    formats = COMMANDS["verify"].end.partition("\n\n")[2]
    parser = _Parser(
        prog=name if name == "composable-fsdp" else "python -m composable_fsdp",
        description="Plan the sharding of a model; check, compare, convert and export\n"
        "checkpoints. COMMAND --help shows how.",
        epilog="\n".join(["examples:", *shown, "", formats]),
        formatter_class=raw,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"composable_fsdp {version()}",
        help="print the version",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, end, arguments) in COMMANDS.items():
        each = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=end,
            formatter_class=raw,
        )
        add_arguments(each, arguments)
        each.set_defaults(command=name, parser=each)
    return parser
