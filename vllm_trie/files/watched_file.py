"""A file that may be replaced while an engine reads from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_Content = TypeVar("_Content")

logger = logging.getLogger(f"vllm.{__name__}")

INTERVAL = 1.0
"""Seconds between two looks at a file, which may be on a network, while an engine waits."""
_SETTLED_NS = 1_000_000_000
"""Age from which a change of a file is told by its time."""
_RETRY_S = 10.0
"""Until a version is tried again that could not be read, as where a network failed for a moment."""


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when another file takes the place of a file.

    Raises:
        OSError: There is none.
    """
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class WatchedFile(Generic[_Content]):
    """The newest version of a file that could be opened.

    A file that was replaced, or written to, is opened in a thread. Until then, and where the new
    version cannot be used or the file is gone, the version before serves on.

    Args:
        path: Of the file.
        open_file: Opens and checks it; raises what it likes. What it returns must not depend on the
            file any more.
        name: Of the file in messages.
    """

    def __init__(self, path: Path, open_file: Callable[[Path], _Content], name: str) -> None:
        self._path, self._open, self._name = path, open_file, name
        self._next_look = 0.0
        self._stamp: tuple[int, ...] = ()
        self._in_place = False  # whether it was written to, and not replaced since
        self._refused: object = None  # what was refused last, and why
        self._thread: threading.Thread | None = None
        if path.exists():
            self._stamp = file_stamp(path)
        self._content = open_file(path)

    def latest(self) -> _Content:
        """Return the newest version; looks for another one if it is time to."""
        if (now := time.monotonic()) < self._next_look:
            return self._content
        self._next_look = now + INTERVAL
        if self._thread is None or not self._thread.is_alive():
            try:
                stamp = file_stamp(self._path)
            except OSError:
                return self._content
            if stamp != self._stamp:
                self._take_note(stamp)
                self._thread = threading.Thread(target=self._renew, daemon=True)
                self._thread.start()
        return self._content

    def _take_note(self, stamp: tuple[int, ...]) -> None:
        """Remember what is opened, so that it is not opened twice, even if it is refused."""
        was_in_place, self._in_place = self._in_place, stamp[:2] == self._stamp[:2]
        self._stamp = stamp
        if self._in_place and not was_in_place:
            logger.warning(
                "%s was written to in place; the version before serves until the file is complete. "
                "Write a new file and rename it to %s.",
                self._name,
                self._path,
            )

    def _renew(self) -> None:
        try:
            self._content = self._open(self._path)
        except Exception as error:
            refused = self._in_place, self._stamp, str(error)
            level = logging.DEBUG if self._in_place or refused == self._refused else logging.ERROR
            self._refused = refused
            logger.log(level, "The new version of %s is refused: %s", self._name, error)
            if isinstance(error.__cause__ or error, OSError | MemoryError):
                self._stamp, self._next_look = (), time.monotonic() + _RETRY_S
            elif self._in_place and time.time_ns() - self._stamp[-1] < _SETTLED_NS:
                self._stamp = (*self._stamp[:2], 0, 0)  # whoever writes may not be done
        else:
            logger.info("%s was replaced: %s serves from now on", self._name, self._path)
