"""The command line: ``python -m composable_fsdp``."""

from composable_fsdp.inspection.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
