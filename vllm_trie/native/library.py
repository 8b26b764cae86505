"""The compiled cores: C++ that CMake compiles at installation, and ctypes loads when it is used.

`CMakeLists.txt` compiles each core as `cores/core-baseline.so`, and the one that gains by them for
further instruction sets. They are plain C interfaces, so that one wheel serves every Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from vllm_trie.native.interface import Interface

FOLDER = Path(__file__).parent / "cores"

_V3 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = {
    "x86-64-v4-bf16": _V4 | {"avx512_bf16"},
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
    "baseline": set(),
}
"""Names of the sets, best first, and the flags that Linux reports where they can be used."""


class CoreError(RuntimeError):
    """A compiled core is missing or cannot be loaded; the message says what to do."""


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """One of the package's own libraries.

    Its functions and structures are those that its sources define; see
    :mod:`vllm_trie.native.interface` for how to write them.

    Attributes:
        name: Of the library, as in `CMakeLists.txt`.
        sources: C++ files that export C functions.
        headers: Files that define structures which Python packs.
    """

    name: str
    sources: Sequence[Path]
    headers: Sequence[Path] = ()

    def load(self, instructions: str | None = None) -> ctypes.CDLL:
        """Return the library that :meth:`path` names.

        Raises:
            CoreError: It is missing, damaged, lacks a function that the sources define, or is older
                than they are in a checkout: functions and structures are read from the sources.
        """
        path = self.path(instructions)
        try:
            if (FOLDER.parents[2] / ".git").exists():
                built = path.stat().st_mtime
                for source in (*self.sources, *self.headers):
                    if source.stat().st_mtime > built:
                        raise OSError(f"its source {source.name} is newer")
            library = ctypes.CDLL(str(path))
            for name, (result, arguments) in self._interface.functions().items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise CoreError(
                f"the compiled core {path.name} of vllm-trie cannot be used: {error}. Install the "
                "wheel, or install from source where a C++ compiler is (in a checkout: make venv)"
            ) from error
        return library

    def path(self, instructions: str | None = None) -> Path:
        """Return the file for the best instruction set there is, or for the one given."""
        sets = [instructions] if instructions else usable_sets()
        paths = [FOLDER / f"{self.name}-{name}.so" for name in sets]
        return next(filter(Path.is_file, paths), paths[-1])

    @functools.cached_property
    def functions(self) -> ctypes.CDLL:
        """The library for this processor, loaded at the first use; see :meth:`load`."""
        return self.load()

    def layout(self, name: str) -> Struct:
        """Return what packs and unpacks a structure that the sources or headers define."""
        return self._interface.layout(name)

    @functools.cached_property
    def _interface(self) -> Interface:
        return Interface([*self.sources, *self.headers])


def usable_sets() -> list[str]:
    """Return the instruction sets that this processor has, best first."""
    flags = cpu_flags()
    return [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]


@functools.cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor, of x86 alone; empty where they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))
