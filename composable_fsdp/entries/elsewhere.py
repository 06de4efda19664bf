"""Where names of torch's FSDP2 are that the package itself does not have."""

from __future__ import annotations

import sys
from opcode import opmap
from typing import NoReturn

_DOOR = frozenset(
    {
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "share_comm_ctx",
    }
)
"""The names of ``composable_fsdp.fsdp2`` that ``composable_fsdp`` lacks."""

_OWN = {
    "CPUOffloadPolicy": "CPUOffload(offload_params=True), passed as cpu_offload",
    "FSDPModule": "is_sharded(module): fully_shard leaves the class of a module alone",
    "MixedPrecisionPolicy": "MixedPrecision(...), passed as mixed_precision",
    "OffloadPolicy": "no argument: cpu_offload=None is the default",
}
"""What stands for a name in a script that uses ``composable_fsdp.fully_shard``."""


def missing_name(name: str) -> NoReturn:
    """Raise the error for a name that ``composable_fsdp`` does not have.

    Raises: ImportError in ``from composable_fsdp import name``, else AttributeError.
    """
    text = f"module 'composable_fsdp' has no attribute {name!r}"
    if name in _DOOR:
        text += f". Import {name} from composable_fsdp.fsdp2, with its fully_shard"
        text += f"; here: {_OWN[name]}." if name in _OWN else "."
        # ``from ... import`` would replace an AttributeError by an error without the
        # way out, and ``hasattr`` lets an ImportError through.
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
            raise ImportError(text, name=name)
    raise AttributeError(text)


# Set here and not in the package: a type checker that reads of a ``__getattr__`` there
# would take every name for one of the package.
vars(sys.modules["composable_fsdp"])["__getattr__"] = missing_name
