"""Copies of files in memory that nobody can change any more.

Whoever reads a mapped file that is truncated meanwhile gets SIGBUS, and whoever writes to it
changes what others have checked. So a file in use is copied first, and checked afterwards.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from typing import BinaryIO

import numpy as np

_CAN_SEAL = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Not in a Python that was built for an old C library. A file without a name serves there."""
_CHUNK = 1 << 20


class _Mapping(mmap.mmap):
    """A mapping that can be referred to weakly."""


def sealed_copy(file: BinaryIO) -> BinaryIO:
    """Return a file in memory with the content that a file has now; of a sealed one, itself.

    Raises:
        OSError: The file cannot be read, or there is no memory for it.
    """
    if is_sealed(file):
        return os.fdopen(os.dup(file.fileno()), "rb")
    copy: BinaryIO
    if _CAN_SEAL:
        copy = os.fdopen(os.memfd_create("vllm-trie", os.MFD_ALLOW_SEALING), "w+b")
    else:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
    file.seek(0)
    left = os.fstat(file.fileno()).st_size  # somebody may append to it for ever
    while left and (chunk := file.read(min(left, _CHUNK))):
        left -= copy.write(chunk)
    copy.flush()
    if _CAN_SEAL:
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _seals())
    return copy


def map_copy(file: BinaryIO) -> tuple[np.ndarray, str]:
    """Map a file that nobody changes, as uint8 [bytes].

    Returns:
        The array, and a path under which other processes of the host can open the file as long as
        this one uses the array.
    """
    mapping = _Mapping(file.fileno(), 0, prot=mmap.PROT_READ)
    descriptor = os.dup(file.fileno())
    weakref.finalize(mapping, os.close, descriptor)
    return np.frombuffer(mapping, dtype=np.uint8), f"/proc/{os.getpid()}/fd/{descriptor}"


def is_sealed(file: BinaryIO) -> bool:
    """Return whether nobody can change a file any more."""
    try:
        return _CAN_SEAL and fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
    except OSError:  # not in memory
        return False


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
