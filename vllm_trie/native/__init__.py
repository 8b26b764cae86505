"""Loading the compiled cores."""

from vllm_trie.native.library import (
    FOLDER,
    INSTRUCTION_SETS,
    CoreError,
    NativeLibrary,
    cpu_flags,
    usable_sets,
)

__all__ = [
    "FOLDER",
    "INSTRUCTION_SETS",
    "CoreError",
    "NativeLibrary",
    "cpu_flags",
    "usable_sets",
]
