"""What the package answers for a name that is none of its public names."""

from __future__ import annotations

import sys
from importlib import import_module
from opcode import opmap
from types import ModuleType

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


def submodule(name: str) -> ModuleType:
    """Return a submodule of the package; for the package's ``__getattr__`` alone.

    Raises: ImportError in ``from composable_fsdp import name`` for a name of FSDP2,
        else AttributeError.
    """
    full = f"composable_fsdp.{name}"
    # Without private names: ``__main__`` would run the command line.
    if not name.startswith("_"):
        try:
            return import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    text = f"module 'composable_fsdp' has no attribute {name!r}"
    if name in _DOOR:
        text += f". Import {name} from composable_fsdp.fsdp2, with its fully_shard"
        text += f"; here: {_OWN[name]}." if name in _OWN else "."
        # ``from ... import`` would replace an AttributeError by an error without the
        # way out, and ``hasattr`` lets an ImportError through.
        caller = sys._getframe(2)
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
            raise ImportError(text, name=name)
    raise AttributeError(text)
