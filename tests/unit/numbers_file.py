"""The smallest kind of data file, for the tests of what all kinds have in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_trie.files.checked_file import CheckedFormat, SizedHeader
from vllm_trie.refusal import RefusedError


class Header(SizedHeader):
    count: int

    @property
    def body_size(self) -> int:
        return 8 * self.count


FORMAT = CheckedFormat(
    kind="list",
    magic=b"VTRIENUM",
    version=3,
    header=Header,
    error=RefusedError,
    remedy="write it again",
)


def write(path: Path, count: int) -> Path:
    """Write the numbers below `count`."""
    FORMAT.write(path, Header(count=count), [np.arange(count, dtype="<i8")])
    return path


def read(path: Path) -> list[int]:
    numbers: list[int] = FORMAT.read(path).body.view("<i8").tolist()
    return numbers
