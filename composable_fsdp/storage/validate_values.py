"""Checks the JSON values of a manifest, and the loose tensors that they refer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from composable_fsdp.errors import CheckpointError
from composable_fsdp.naming import quoted
from composable_fsdp.storage.manifest import Json, Local, Manifest, Stored
from composable_fsdp.storage.values import decode

RNG_KEYS = ("torch", "cuda", "others")
"""The keys of a rank's random state; see ``rng_state``."""


def refuse(file: str, problem: str) -> CheckpointError:
    """Return the error for an inconsistent manifest."""
    return CheckpointError(
        f"{file}: {problem}. The manifest is damaged or was edited; use another "
        "checkpoint."
    )


def names_of(manifest: Manifest) -> Iterator[str]:
    """Yield all names of the tensors of the model."""
    # Not of ``local``: ranks may have the same names there.
    for region in manifest.regions:
        for slot in region.slots:
            yield from slot.fqns
    for single in manifest.singles:
        yield from single.fqns
    for cut in manifest.cuts:
        yield from cut.fqns


def check_values(manifest: Manifest, file: str) -> None:
    """Check that every JSON value can be decoded and uses loose tensors correctly.

    Each loose tensor must belong to exactly a single value.

    Raises: CheckpointError, naming ``file``.
    """
    _Checker(manifest, file).check_all()


class _Checker:
    """Decodes all values of a manifest without the payload."""

    def __init__(self, manifest: Manifest, file: str) -> None:
        self.manifest, self.file = manifest, file
        self.used: Counter[int] = Counter()
        self.names = set(names_of(manifest))

    def check_all(self) -> None:
        """Check every value; see ``check_values``."""
        manifest = self.manifest
        self._check(manifest.extra, "extra")
        for name, value in manifest.own_states.items():
            self._check(value, f"own_states[{name!r}]")
        self._check_groups(manifest.param_groups or [], self.names, "param_groups")
        held = list(self._held())
        for name, values in held:
            for key, value in values.items():
                self._check(value, f"state {key!r} of {quoted(name)}")
        self._require_ranks("local", len(manifest.local))
        for r, own in enumerate(manifest.local):
            self._check_local(own, dict(held), f"local[{r}]")
        # A converted checkpoint has no random states.
        self._require_ranks("rng", len(manifest.rng))
        for r, state in enumerate(manifest.rng):
            if not isinstance(state, dict) or not state.keys() <= set(RNG_KEYS):
                raise refuse(
                    self.file, f"rng[{r}] holds something else than {RNG_KEYS}"
                )
            self._check(state, f"rng[{r}]")
        self._require_ranks("per_rank", len(manifest.per_rank))
        for r, value in enumerate(manifest.per_rank):
            self._check(value, f"per_rank[{r}]")
        used = self.used
        if len(used) != len(manifest.loose) or any(n > 1 for n in used.values()):
            raise refuse(self.file, "loose tensors are not referred to once each")

    def _note(self, index: int) -> Stored:
        """Count a use of a loose tensor; return the place, with dtype and shape."""
        # Stands in for the reader of loose tensors; bytes and arrays are checked by
        # the dtype and the shape.
        if not 0 <= index < len(self.manifest.loose):
            raise refuse(
                self.file, f"loose tensor {index} is asked for and there is none such"
            )
        self.used[index] += 1
        return self.manifest.loose[index]

    def _check(self, value: Json, where: str) -> None:
        """Decode a value."""
        decode(value, f"{self.file}: {where}", self._note)

    def _require_ranks(self, what: str, count: int) -> None:
        """Raise CheckpointError, unless there is a value per rank, or none."""
        if count not in (0, self.manifest.world_size):
            raise refuse(
                self.file,
                f"{what} has {count} values for {self.manifest.world_size} ranks",
            )

    def _held(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the name and the state that is not element-wise of each parameter."""
        for region in self.manifest.regions:
            for slot in region.slots:
                yield slot.fqns[0], slot.values
        for single in self.manifest.singles:
            yield single.fqns[0], single.values
        for cut in self.manifest.cuts:
            yield cut.fqns[0], cut.values

    def _check_groups(self, groups: list[Json], known: set[str], where: str) -> None:
        """Check the options of groups, whose parameters must be ``known``."""
        for g, group in enumerate(groups):
            members = group.get("params") if isinstance(group, dict) else None
            # By name: ids mean nothing to another optimizer object.
            if not isinstance(members, list) or not all(
                isinstance(m, str) and m in known for m in members
            ):
                raise refuse(
                    self.file, f"{where}[{g}] does not list parameters by name"
                )
            self._check(group, f"{where}[{g}]")

    def _check_local(
        self, own: Local, held: dict[str, Mapping[str, Any]], where: str
    ) -> None:
        """Check the values that a rank has saved for itself."""
        mine = {name for single in own.singles for name in single.fqns}
        groups = own.param_groups or []
        self._check_groups(groups, self.names | mine, f"{where}.param_groups")
        for name, found in own.values.items():
            # A reader would take either of the two.
            double = sorted(found.keys() & held.get(name, {}).keys())
            if name not in self.names or double:
                problem = f"{double[0]!r} twice" if double else "of no unit"
                what = f"{where} has state of {quoted(name)} {problem}"
                raise refuse(self.file, what)
        told = [(single.fqns[0], single.values) for single in own.singles]
        for name, values in (*told, *own.values.items()):
            for key, value in values.items():
                self._check(value, f"{where}, state {key!r} of {quoted(name)}")
        for name, value in own.own_states.items():
            self._check(value, f"{where}.own_states[{name!r}]")
