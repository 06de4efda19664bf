"""Write the recorded steps anew: ``python -m tests.goldens --write``.

``--write-checkpoints`` writes checkpoints that do not exist yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tests.goldens import checkpoints, checkpoints_cut, checkpoints_own, recorded
from tests.support.world import World, rank_pool, shutdown_pools

CHECKPOINTS: dict[str, tuple[int, Callable[[World, Path], None]]] = {
    **{
        checkpoints.name_of(count): (count, checkpoints.save_one)
        for count in checkpoints.WORLD_SIZES
    },
    checkpoints_own.NAME: (2, checkpoints_own.save_one),
    checkpoints_cut.NAME: (4, checkpoints_cut.save_one),
}


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
        for name, (count, save_one) in CHECKPOINTS.items():
            folder = checkpoints.FOLDER / name
            if asked.write_checkpoints and not folder.exists():
                rank_pool(count).run(save_one, folder)
                changed.append(name)
        if asked.write:
            changed += recorded.write(rank_pool)
    finally:
        shutdown_pools()
    sys.stdout.write("".join(f"changed: {name}\n" for name in changed))
    sys.stdout.write(f"{len(changed)} changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
