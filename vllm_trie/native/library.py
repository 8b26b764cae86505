"""A compiled library whose functions have types, loaded when it is first used."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_trie.native.build import DEFAULT_FLAGS, load_library

Signature = tuple[Any, Sequence[Any]]
"""ctypes' types of a function's result and of its arguments."""


class NativeLibrary:
    """One of the package's own libraries.

    Args:
        name: of the library, for the file and the log.
        subject: what it holds, for messages.
        signatures: of its functions, by name.
        sources, headers, flags: as for :func:`load_library`.
    """

    def __init__(
        self,
        name: str,
        subject: str,
        signatures: Mapping[str, Signature],
        sources: Sequence[Path],
        headers: Sequence[Path] = (),
        flags: Sequence[str] = DEFAULT_FLAGS,
    ) -> None:
        self._name = name
        self._subject = subject
        self._signatures = signatures
        self._sources = sources
        self._headers = headers
        self._flags = flags

    def is_available(self) -> bool:
        """Whether the library can be used; compiles it at the first call."""
        return self._loaded is not None

    def require(self) -> ctypes.CDLL:
        """The library.

        Raises:
            RuntimeError: there is none on this machine.
        """
        library = self._loaded
        if library is None:
            raise RuntimeError(
                f"the compiled {self._subject} is not available; see the log for the reason"
            )
        return library

    @functools.cached_property
    def _loaded(self) -> ctypes.CDLL | None:
        library = load_library(self._name, self._sources, flags=self._flags, headers=self._headers)
        if library is None:
            return None
        for name, (result, arguments) in self._signatures.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = list(arguments)
        return library
