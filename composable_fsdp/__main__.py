"""The command line: ``python -m composable_fsdp``."""

from composable_fsdp.tools.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
