"""What the package answers for a name that is none of its public names."""

from __future__ import annotations

import sys
from importlib import import_module
from opcode import opmap
from types import ModuleType

_MODULES = (
    *("access", "api", "doors.checkpoint_wrapper", "errors", "features", "fsdp2"),
    *("fully_sharded_data_parallel", "optim", "state_dict", "storage", "tools", "wrap"),
)
"""The modules with the public names that ``composable_fsdp`` lacks."""

_OWN = {
    "CPUOffloadPolicy": "CPUOffload(offload_params=True), passed as cpu_offload",
    "FSDPModule": "is_sharded(module): fully_shard leaves the class of a module alone",
    "MixedPrecisionPolicy": "MixedPrecision(...), passed as mixed_precision",
    "OffloadPolicy": "no argument: cpu_offload=None is the default",
}
"""What stands for a name in a script that uses ``composable_fsdp.fully_shard``."""


def submodule(name: str) -> ModuleType:
    """Return a submodule of the package; for the package's ``__getattr__``."""
    full = f"composable_fsdp.{name}"
    # Without private names: ``__main__`` would run the command line.
    if not name.startswith("_"):
        try:
            return import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    text = f"module 'composable_fsdp' has no attribute {name!r}"
    names = {
        home: import_module(f"composable_fsdp.{home}").__all__ for home in _MODULES
    }
    homes = [home for home in _MODULES if name in names[home]]
    if homes:
        text += f". Import {name} from composable_fsdp.{homes[0]}"
        text += f", with its fully_shard; here: {_OWN[name]}." if name in _OWN else "."
        # ``from ... import`` would replace an AttributeError by an error without the
        # way out, and ``hasattr`` lets an ImportError through.
        caller = sys._getframe(2)
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
            raise ImportError(text, name=name)
    raise AttributeError(text)
