"""Parses JSON into a manifest: every field present, of its type and range, no others.

No value of the document is trusted, and no memory is allocated by a size that the
document claims: the work is bounded by the length of the text. ``validate`` checks how
the fields fit together.
"""

from __future__ import annotations

import reprlib
from functools import cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from composable_fsdp.errors import CheckpointError
from composable_fsdp.storage.manifest import (
    DTYPES,
    FORMAT,
    SINCE,
    VERSION,
    EntryPlace,
    Json,
    Manifest,
    Size,
)

_EXPECTED = {str: "a string", list: "a list", dict: "an object"}
_fields = cache(lambda kind: get_type_hints(kind, include_extras=True))


_MOST = 80
"""Most characters of a value in a message."""
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _MOST
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MOST + 20


def excerpt(value: object) -> str:
    """Return the begin of ``repr(value)``, for a value of any length and nesting."""
    # ``repr`` recurses, so for a damaged value the stack might end first.
    text = _REPR.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


class _UnexpectedError(Exception):
    """A value is not as expected: (path, words for the expected values, value)."""


def parse_fields(document: Json, file: str) -> Manifest:
    """Return the manifest in ``document``; ``file`` is the document's name in messages.

    Raises: CheckpointError, naming the file and the field.
    Collective: none.
    """
    try:
        _require_version(document, file)
        manifest: Manifest = _parse(Manifest, _completed(document), "")
    except _UnexpectedError as error:
        where, expected, got = error.args
        raise CheckpointError(
            f"{file}: {where or 'the manifest'} is {excerpt(got)}, expected "
            f"{expected}. The "
            "manifest is damaged or was edited; use another checkpoint."
        ) from None
    return manifest


def _require_version(document: Json, file: str) -> None:
    """Check format and version of the document."""
    # Before all other fields, because another version may have other fields.
    found = document.get("format") if isinstance(document, dict) else document
    # Any JSON file can lie at this path, for example an index of another program.
    if found != FORMAT:
        raise _UnexpectedError("format", repr(FORMAT), found)
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{file} is of format version {excerpt(version)}; this version of "
            f"composable_fsdp reads versions 1 to {VERSION}. Read it with the release "
            "that wrote it, or a newer one."
        )


def _completed(document: dict[str, Json]) -> dict[str, Json]:
    """Return the document with the fields that its version does not have yet.

    Raises: _UnexpectedError, for a field of a newer version.
    """
    completed = dict(document)
    for version, added in SINCE.items():
        # The document's own version has the field: a missing one is damage.
        if version <= document["version"]:
            continue
        # A reader of the old version would refuse the field, so it is damage.
        if newer := sorted(added.keys() & document.keys()):
            raise _UnexpectedError("", f"fields of version {version - 1}", newer)
        completed.update(added)
    return completed


def _parse(kind: Any, value: Json, where: str) -> Any:
    """Return ``value`` as an object of an annotation.

    Args:
        kind: the annotation: of a field of ``Manifest``, or of a part of such a field.
        value: the JSON value.
        where: the path of the value, for messages.

    Raises: _UnexpectedError, for a value that does not fit the annotation.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        whole, rule = inner
        found = value if whole is int else _parse(whole, value, where)
        if not rule.holds(found):
            raise _UnexpectedError(where, rule.expected, value)
        return found
    # ``list[Json] | None``: without an optimizer there are no options.
    if origin is UnionType:
        return None if value is None else _parse(inner[0], value, where)
    if kind is torch.dtype:
        # Only names of the table: never ``getattr`` of torch with a text from a file.
        if not isinstance(value, str) or value not in DTYPES:
            raise _UnexpectedError(where, "the name of a dtype", value)
        return DTYPES[value]
    if kind is EntryPlace:
        # ``validate`` checks that the file exists and the bytes lie in the file.
        found = _parse(tuple[Size, ...], value, where)
        if len(found) != 2:
            raise _UnexpectedError(where, "[file, begin]", value)
        return EntryPlace(*found)
    # Values of any form: ``validate`` decodes them.
    if kind is Any:
        return value
    json_kind: Any = list if origin is tuple else origin or kind
    if json_kind not in _EXPECTED:
        return _parse_object(kind, value, where)
    if not isinstance(value, json_kind):
        raise _UnexpectedError(where, _EXPECTED[json_kind], value)
    if origin is dict:
        return {k: _parse(inner[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if origin is not tuple:
        return value
    return tuple([_parse(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value)])


def _parse_object(kind: Any, value: Json, where: str) -> Any:
    """Return ``value`` as an object of the dataclass ``kind``; see ``_parse``."""
    hints = _fields(kind)
    # Unknown fields are refused, too: a reader that ignored a field could misunderstand
    # the other fields.
    if not isinstance(value, dict) or value.keys() != hints.keys():
        got = sorted(value) if isinstance(value, dict) else value
        raise _UnexpectedError(where, f"an object of {', '.join(hints)}", got)
    found = {}
    for name, hint in hints.items():
        path = f"{where}.{name}" if where else name
        found[name] = _parse(hint, value[name], path)
        # Messages about the other fields name the parameter or the unit, not only the
        # index.
        if name == "fqns":
            where = f"{where} ({found[name][0]!r})"
        elif name == "unit":
            where = f"{where} (unit {found[name]!r})"
    return kind(**found)
