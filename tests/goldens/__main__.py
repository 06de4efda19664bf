"""Write the recorded steps anew: ``python -m tests.goldens --write``."""

from __future__ import annotations

import argparse
import sys

from tests.goldens import recorded
from tests.support.world import rank_pool, shutdown_pools


def main() -> int:
    """Write the files, or say which would change."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument(
        "--write", action="store_true", help="write tests/goldens/steps anew"
    )
    if not parser.parse_args().write:
        parser.print_help()
        return 2
    try:
        changed = recorded.write(rank_pool)
    finally:
        shutdown_pools()
    sys.stdout.write("".join(f"changed: {name}\n" for name in changed))
    sys.stdout.write(f"{len(changed)} files changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
