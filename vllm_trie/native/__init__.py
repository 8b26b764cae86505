"""Compiling and loading the native kernels."""

from vllm_trie.native.build import (
    SHARED_HEADERS,
    NativeBuildError,
    build_library,
    cache_folder,
    damaged_libraries,
    find_compiler,
    load_library,
)
from vllm_trie.native.library import NativeLibrary
from vllm_trie.native.prebuilt import cpu_flags, find_prebuilt

__all__ = [
    "SHARED_HEADERS",
    "NativeBuildError",
    "NativeLibrary",
    "build_library",
    "cache_folder",
    "cpu_flags",
    "damaged_libraries",
    "find_compiler",
    "find_prebuilt",
    "load_library",
]
