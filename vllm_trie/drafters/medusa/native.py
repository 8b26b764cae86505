"""The compiled search for the heads' likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.native import SHARED_HEADERS, NativeLibrary
from vllm_trie.ngrams import native as ngrams
from vllm_trie.ngrams.job import Candidates

if TYPE_CHECKING:
    from vllm_trie.drafters.medusa.candidates import HeadLogits

_CORE = Path(__file__).parent / "core"
SOURCES = (*sorted(_CORE.glob("*.cpp")), ngrams.CORE / "index.cpp", ngrams.CORE / "draft.cpp")
HEADERS = (*sorted(_CORE.glob("*.hpp")), *ngrams.HEADERS, *SHARED_HEADERS)
LIBRARY = NativeLibrary("medusa", "Medusa core", SOURCES, HEADERS)
is_available = LIBRARY.is_available
require_library = LIBRARY.require
_PACK_LOGITS = LIBRARY.layout("HeadLogits").pack
_NONE = -1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that stand for the dtypes of which there is compiled code."""


def reads(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for logits and weights of this kind."""
    return device.type == "cpu" and dtype in DTYPES and is_available()


def top_candidates(logits: HeadLogits) -> Candidates:
    """Return what :func:`vllm_trie.drafters.medusa.candidates.top_candidates` does.

    The logits must be of a kind that :func:`reads` accepts. Uses at most as many threads as torch.
    """
    data, temperatures, token_map, num_candidates = logits
    num_heads, num_rows, num_outputs = data.shape
    num_candidates = min(num_candidates, num_outputs)
    packed = _PACK_LOGITS(
        *(data.data_ptr(), DTYPES[data.dtype], *data.stride()[:2]),
        *(num_heads, num_rows, num_outputs, temperatures.data_ptr()),
        *(0 if token_map is None else token_map.data_ptr(), num_candidates),
        torch.get_num_threads(),
    )
    find = require_library().medusa_top_candidates
    return write_candidates((num_rows, num_heads, num_candidates), lambda *at: find(packed, *at))


def write_candidates(shape: tuple[int, int, int], find: Callable[[int, int], int]) -> Candidates:
    """Return candidates [rows, K, m], which `find(address of tokens, address of probabilities)`
    writes.

    Raises:
        MemoryError: by its status it had no memory.
    """
    found = Candidates(np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32))
    if find(found.tokens.ctypes.data, found.probabilities.ctypes.data) == _NONE:
        raise MemoryError("no memory for the heads' candidates")
    return found
