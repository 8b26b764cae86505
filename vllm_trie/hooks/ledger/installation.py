"""Patches that are in place in this process: put in, taken out, never doubled."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_trie.hooks.ledger.entry import Entry, Feature, Scope, resolve
from vllm_trie.hooks.ledger.table import check_entry, entries_here

_ABSENT = object()
"""Stands for an attribute that `vars` of its owner did not have, because it was inherited."""


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A patch in place, with what it replaced."""

    patch: Entry
    owner: Any
    name: str
    original: Any
    replacement: Any

    def undo(self) -> None:
        if vars(self.owner).get(self.name) is not self.replacement:
            raise RuntimeError(
                f"{self.patch.target} was replaced once more after vllm-trie had patched it; undo "
                "that first"
            )
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class Installation:
    """The patches in place, in the order in which they were put there."""

    def __init__(self) -> None:
        self._replacements: list[_Replacement] = []

    @property
    def patches(self) -> tuple[Entry, ...]:
        """The patches in place."""
        return tuple(replacement.patch for replacement in self._replacements)

    def install(
        self, feature: Feature, native_search: bool = True, steps_aside: bool = False
    ) -> None:
        """Put a feature's patches in place.

        Leaves alone what an earlier call did. If a patch fails, none of this call's stays.

        Args:
            feature: The feature.
            native_search: Whether the environment leaves native beam search on.
            steps_aside: Whether the feature does: those of its patches go in that say so to its
                users, as far as they fit.
        """
        present = self.patches
        before = len(present)
        scopes: set[Scope] = {"process", "native_search"} if native_search else {"process"}
        patches = _replacing(entries_here(feature), {"aside"} if steps_aside else scopes)
        try:
            for patch in patches:
                if patch not in present and (not steps_aside or check_entry(patch).fits):
                    self.apply(patch)
        except BaseException:
            self.undo(keep=before)
            raise

    @contextmanager
    def installed(self, *scopes: Scope) -> Iterator[None]:
        """Put the patches of some scopes in place for the duration of a ``with`` block."""
        before = len(self._replacements)
        try:
            for patch in _replacing(entries_here(), scopes):
                self.apply(patch)
            yield
        finally:
            self.undo(keep=before)

    def apply(self, patch: Entry) -> None:
        """Put one patch in place.

        Raises:
            RuntimeError: It is in place already.
        """
        if patch in self.patches:
            raise RuntimeError(f"{patch.target} is patched already ({patch.reason})")
        module_name, _, path = patch.target.partition(":")
        parents, _, name = path.rpartition(".")
        owner = resolve(f"{module_name}:{parents}")
        assert patch.wrapper is not None
        original = vars(owner).get(name, _ABSENT)
        subclass = patch.kind == "subclassed"
        replacement = patch.wrapper if subclass else patch.wrapper(getattr(owner, name))
        if isinstance(original, (staticmethod, classmethod)):  # a bound one was wrapped
            replacement = staticmethod(replacement)
        setattr(owner, name, replacement)
        self._replacements.append(_Replacement(patch, owner, name, original, replacement))

    def undo(self, keep: int = 0) -> None:
        """Take patches out, the last first, until only the first `keep` are in place.

        Raises:
            RuntimeError: Somebody else has replaced a patched symbol since.
        """
        while len(self._replacements) > keep:
            self._replacements[-1].undo()
            self._replacements.pop()


def _replacing(entries: Iterable[Entry], scopes: Container[Scope]) -> list[Entry]:
    return [entry for entry in entries if entry.wrapper is not None and entry.scope in scopes]


_process = Installation()
install, installed, undo = _process.install, _process.installed, _process.undo


def patches_in_place() -> tuple[Entry, ...]:
    """Return the patches that are in place in this process."""
    return _process.patches
