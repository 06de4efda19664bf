"""The command line as a function."""

from __future__ import annotations

import pytest

from composable_fsdp.inspection.command_line import main
from tests.support.scripts import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line: status, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        # argparse ends the program for ``--help`` and wrong usage.
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call
