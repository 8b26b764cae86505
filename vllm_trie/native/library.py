"""A compiled library whose functions have types, loaded when it is first used."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from vllm_trie.native.build import DEFAULT_FLAGS, load_library
from vllm_trie.native.interface import Interface


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """One of the package's own libraries.

    Its functions and structures are those that its sources define; see
    :mod:`vllm_trie.native.interface` for how to write them.

    Attributes:
        name: Of the library, for the file and the log.
        subject: What it holds, for messages.
        sources, headers, flags: As for :func:`load_library`.
    """

    name: str
    subject: str
    sources: Sequence[Path]
    headers: Sequence[Path] = ()
    flags: Sequence[str] = DEFAULT_FLAGS

    def is_available(self) -> bool:
        """Return whether the library can be used; compiles it at the first call."""
        return self._loaded is not None

    def require(self) -> ctypes.CDLL:
        """Return the library.

        Raises:
            RuntimeError: It is not available on this machine.
        """
        library = self._loaded
        if library is None:
            raise RuntimeError(
                f"the compiled {self.subject} is not available; see the log for the reason"
            )
        return library

    def layout(self, name: str) -> Struct:
        """Return what packs and unpacks a structure that the sources or headers define."""
        return self._interface.layout(name)

    @functools.cached_property
    def _interface(self) -> Interface:
        return Interface([*self.sources, *self.headers])

    @functools.cached_property
    def _loaded(self) -> ctypes.CDLL | None:
        functions = self._interface.functions()
        library = load_library(self.name, self.sources, self.flags, self.headers, functions)
        if library is None:
            return None
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        return library
