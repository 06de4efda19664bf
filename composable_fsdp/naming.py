"""Fully qualified names, by path component.

A wrapper adds one component to the path of the module that it wraps. Names leave that
component out: ``strip_wrapper`` removes it from a finished name, and a walk of the tree
passes over the components in ``TRANSPARENT``. Only whole components count: a module
that a user calls ``my_fsdp_wrapped_module`` keeps its name.
"""

from __future__ import annotations

import re

WRAPPED_MODULE = "_fsdp_wrapped_module"
"""Attribute under which ``FullyShardedDataParallel`` holds the module it wraps."""

CHECKPOINTED_MODULE = "_checkpoint_wrapped_module"
"""The same for ``checkpoint_wrapper``, ours and torch's."""

TRANSPARENT = (WRAPPED_MODULE, CHECKPOINTED_MODULE)
"""Components that no name shows."""

ROOT_NAME = "(root)"
"""What messages call the module whose name is the empty string."""


def join_name(prefix: str, name: str) -> str:
    """Join two dotted names; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def strip_wrapper(name: str) -> str:
    """Return ``name`` without the wrappers' components.

    >>> strip_wrapper("layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    >>> strip_wrapper("my_fsdp_wrapped_module.weight")
    'my_fsdp_wrapped_module.weight'
    """
    if not any(component in name for component in TRANSPARENT):
        return name
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT)


def strip_wrapper_in_text(text: str) -> str:
    """Return ``text`` with the wrappers' components taken out of the names in it.

    >>> strip_wrapper_in_text("size mismatch for a._fsdp_wrapped_module.b: ...")
    'size mismatch for a.b: ...'
    """
    return re.sub(rf"(?<!\w)(?:{'|'.join(TRANSPARENT)})\.", "", text)


def quoted(name: str) -> str:
    """Return ``name`` as messages print it: quoted, and the root by a word."""
    return repr(name) if name else ROOT_NAME
