"""Write the recorded steps anew: ``python -m tests.goldens --write``.

``--write-checkpoints`` writes checkpoints that do not exist yet.
"""

from __future__ import annotations

import argparse
import sys

from tests.goldens import checkpoints, checkpoints_cut, checkpoints_own, recorded
from tests.support.world import rank_pool, shutdown_pools


def main() -> int:
    """Write the files, or say which would change."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument(
        "--write", action="store_true", help="write tests/goldens/steps anew"
    )
    parser.add_argument(
        "--write-checkpoints",
        action="store_true",
        help="write the checkpoints that are missing in tests/goldens/checkpoints",
    )
    asked = parser.parse_args()
    if not asked.write and not asked.write_checkpoints:
        parser.print_help()
        return 2
    changed = []
    try:
        if asked.write_checkpoints:
            changed += checkpoints.write_missing(rank_pool)
            changed += checkpoints_own.write_missing(rank_pool)
            changed += checkpoints_cut.write_missing(rank_pool)
        if asked.write:
            changed += recorded.write(rank_pool)
    finally:
        shutdown_pools()
    sys.stdout.write("".join(f"changed: {name}\n" for name in changed))
    sys.stdout.write(f"{len(changed)} changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
