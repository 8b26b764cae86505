"""The interface of a compiled core, read from its own C++ sources.

ctypes checks neither the arguments of a function nor the layout of a structure. Both are therefore
written once, in C++, and Python reads them there:

    extern "C" int32_t ngram_add(Index* index, const int32_t* tokens, int64_t num_tokens) {

A function is exported by a definition that begins with `extern "C"` on its own, not in a block.
Python calls it by its name, with the argument types that this line states. A pointer takes an
address (int), `bytes` to read from, a ctypes array or None.

    struct Limits {
        double min_probability;
        int32_t max_nodes, max_depth, chain_only;
    };

`NativeLibrary.layout("Limits").pack(...)` makes such a structure of its members, in their order
and in one C call; a ctypes.Structure takes ten times as long to fill. Members are numbers,
addresses and other structures, whose members follow in place. `unpack` and `iter_unpack` read
results back. To pass a structure, pass the bytes; to pass several, join them.

What this reads is a small part of C++: the types in `_TYPES` and pointers, one declaration up to a
semicolon, no arrays, initializers or methods. Anything else raises ValueError.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct, calcsize
from typing import Any

Signature = tuple[Any, list[Any]]
"""ctypes' types of a function's result and of its arguments."""

# C++'s name: ctypes' type, and the code of the module struct.
_TYPES: dict[str, tuple[Any, str]] = {
    "int": (ctypes.c_int, "i"),
    "int32_t": (ctypes.c_int32, "i"),
    "int64_t": (ctypes.c_int64, "q"),
    "float": (ctypes.c_float, "f"),
    "double": (ctypes.c_double, "d"),
}
_COMMENT = re.compile(r"//.*")
_FUNCTION = re.compile(r'extern "C" ([\w\s:*]+?)(\w+)\(([^()]*)\)\s*\{')
_DECLARATION = re.compile(r"\s*(.*?[\s*])(\w+(?:,\s*\w+)*)\s*", re.DOTALL)


class Interface:
    """The exported functions and the structures of some C++ files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._text = "\n".join(_COMMENT.sub("", file.read_text()) for file in files)

    def functions(self) -> dict[str, Signature]:
        """Return the signature of each exported function."""
        return {
            name: (
                None if result.strip() == "void" else _ctypes_type(result),
                [_ctypes_type(kind) for kind, _ in _declarations(arguments.replace(",", ";"))],
            )
            for result, name, arguments in _FUNCTION.findall(self._text)
        }

    def layout(self, name: str) -> Struct:
        """Return what packs and unpacks the structure called `name`."""
        return Struct(self._codes(name))

    def _codes(self, name: str) -> str:
        bodies = re.findall(rf"\bstruct {name} \{{(.*?)\n\}};", self._text, re.DOTALL)
        if len(bodies) != 1:
            raise ValueError(f"the C++ sources define {len(bodies)} structures named {name}, not 1")
        codes = ""
        for kind, names in _declarations(bodies[0]):
            base = kind.split()[-1].rpartition("::")[2]
            if "*" in kind:
                code = "P"
            elif base in _TYPES:
                code = _TYPES[base][1]
            else:
                code = self._codes(base)
            codes += code * len(names)
        # Like C++, align the whole, and pad it, to its widest member: a count of zero only aligns.
        widest = max(filter(str.isalpha, codes), key=calcsize)
        return f"0{widest}{codes}0{widest}"


def _declarations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield type and names of each declaration."""
    for declaration in filter(str.strip, text.split(";")):
        match = _DECLARATION.fullmatch(declaration)
        if match is None or ("*" in match[1] and "," in declaration):
            raise ValueError(f"{' '.join(declaration.split())!r} is not a plain declaration")
        yield match[1], match[2].split(",")


def _ctypes_type(kind: str) -> Any:
    if "*" in kind:
        return ctypes.c_void_p
    name = kind.split()[-1]
    if name not in _TYPES:
        raise ValueError(f"{name!r} is not a type that Python can pass; use {', '.join(_TYPES)}")
    return _TYPES[name][0]
