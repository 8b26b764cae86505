"""The likeliest tokens of each head: the step from the heads' logits to the choice of a tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_trie.native import SHARED_HEADERS, NativeLibrary
from vllm_trie.ngrams import Blend, Source
from vllm_trie.ngrams import native as ngrams
from vllm_trie.ngrams.job import Candidates

_CORE = Path(__file__).parent / "core"
SOURCES = (*sorted(_CORE.glob("*.cpp")), ngrams.CORE / "index.cpp", ngrams.CORE / "draft.cpp")
HEADERS = (*sorted(_CORE.glob("*.hpp")), *ngrams.HEADERS, *SHARED_HEADERS)
LIBRARY = NativeLibrary("medusa", "Medusa core", SOURCES, HEADERS)
_PACK_LOGITS = LIBRARY.layout("HeadLogits").pack
_NONE = -1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that stand for the dtypes of which there is compiled code."""

_TEXT = Source(concentration=0.2, discount=0.7)
BLEND = Blend(own=_TEXT, shared=_TEXT, shared_long=_TEXT, min_left_for_heads=1e-6, min_order=1)
"""The blend of the text's n-grams with the heads, as fitted on the shipped model: what is frequent
in general, the heads know better, so the shortest context is one token."""


class HeadLogits(NamedTuple):
    """Logits of the heads, and how to read them."""

    data: Tensor
    """[K, rows, num_outputs] in any float dtype, the last dimension contiguous."""
    temperatures: Tensor
    """float32 [K], positive, on the same device: what calibrates each head's probabilities."""
    token_map: Tensor | None
    """int64 [num_outputs] on the same device, the token of each output, all different; None if they
    are the same."""
    num_candidates: int
    """m, tokens to take from each head, likeliest first; all if it has fewer."""


def reads(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for logits and weights of this kind."""
    return device.type == "cpu" and dtype in DTYPES and LIBRARY.is_available()


def top_candidates(logits: HeadLogits) -> Candidates:
    """Return the candidates of each head, [rows, K, num_candidates].

    Candidates have probability 0, so that no tree takes them, where a head's logits have no softmax
    (NaN or infinity among them). On a CPU this is one native call, on as many threads as torch's;
    torch's operations would cost more than the rest of the choice of a tree.
    """
    data, temperatures, token_map, num_candidates = logits
    if not reads(data.device, data.dtype):
        return top_candidates_torch(logits)
    num_heads, num_rows, num_outputs = data.shape
    num_candidates = min(num_candidates, num_outputs)
    packed = _PACK_LOGITS(
        *(data.data_ptr(), DTYPES[data.dtype], *data.stride()[:2]),
        *(num_heads, num_rows, num_outputs, temperatures.data_ptr()),
        *(0 if token_map is None else token_map.data_ptr(), num_candidates),
        torch.get_num_threads(),
    )
    find = LIBRARY.require().medusa_top_candidates
    return write_candidates((num_rows, num_heads, num_candidates), lambda *at: find(packed, *at))


def write_candidates(shape: tuple[int, int, int], find: Callable[[int, int], int]) -> Candidates:
    """Return candidates [rows, K, m], which `find(address of tokens, address of probabilities)`
    writes.

    Raises:
        MemoryError: By its status it had no memory.
    """
    candidates = Candidates(np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32))
    if find(candidates.tokens.ctypes.data, candidates.probabilities.ctypes.data) == _NONE:
        raise MemoryError("no memory for the heads' candidates")
    return candidates


def top_candidates_torch(logits: HeadLogits) -> Candidates:
    """Compute the same with torch, for any device and dtype: the twin of core/candidates.cpp."""
    data = logits.data.float().transpose(0, 1)
    values, outputs = data.topk(min(logits.num_candidates, data.shape[-1]), dim=-1)
    scale = 1.0 / logits.temperatures[None, :, None]
    total = torch.logsumexp(data * scale, dim=-1, keepdim=True)
    probabilities = torch.exp(values * scale - total).nan_to_num_(nan=0.0).clamp_(max=1.0)
    tokens = outputs if logits.token_map is None else logits.token_map[outputs]
    return Candidates(
        np.ascontiguousarray(tokens.to(torch.int32).cpu().numpy()),
        np.ascontiguousarray(probabilities.cpu().numpy()),
    )
