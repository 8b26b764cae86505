"""Find the compiled core of a wheel that suits the processor.

A wheel has each core once for each of some instruction sets, in `prebuilt/` and named
`core-set.so`; see CMakeLists.txt. A checkout has none.
"""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent / "prebuilt"

_V3 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = {
    "x86-64-v4-bf16": _V4 | {"avx512_bf16"},
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
}
"""Names of the sets, best first, and the flags that the kernel reports where they can be used."""


def find_prebuilt(name: str) -> Path | None:
    """Return the core called `name` for the best instruction set that this machine has.

    Returns:
        None if there is none: in a checkout, in a wheel without compiled cores, or on a processor
        without AVX2.
    """
    flags = cpu_flags()
    for instruction_set, needed in INSTRUCTION_SETS.items():
        library = FOLDER / f"{name}-{instruction_set}.so"
        if needed <= flags and library.is_file():
            return library
    return None


@functools.cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor, of x86 alone; empty where they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))
