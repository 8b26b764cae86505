"""The likeliest tokens of rows of logits, on the device and in one pass over them.

The readable twin is :func:`vllm_trie.attention.likeliest`.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_trie.drafts.ngrams.native import ROW_TOKENS

_PART = 8192
"""Tokens of a row that a program reads."""


def likeliest_on_device(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ROW_TOKENS likeliest tokens of each row and their probabilities, int32 and float32
    [rows, ROW_TOKENS], without waiting for the device.

    Args:
        logits: float [rows, vocabulary], each row contiguous.
    """
    num_rows, size = logits.shape
    part = min(_PART, triton.next_power_of_2(size))
    num_parts = triton.cdiv(size, part)
    values = logits.new_empty(num_rows, num_parts * ROW_TOKENS, dtype=torch.float32)
    tokens = torch.empty_like(values, dtype=torch.int32)
    normalizers = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    _top_of_part[(num_rows, num_parts)](
        *(logits, values, tokens, normalizers, size, logits.stride(0)),
        COUNT=ROW_TOKENS,
        PART=part,
        num_warps=8,
    )
    top = values.topk(ROW_TOKENS)
    probabilities = (top.values - normalizers.logsumexp(-1, keepdim=True)).exp()
    return tokens.gather(1, top.indices), probabilities


@triton.jit  # type: ignore[untyped-decorator]
def _top_of_part(  # type: ignore[no-untyped-def]
    logits_ptr,
    values_ptr,
    tokens_ptr,
    normalizers_ptr,
    size,
    stride,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
):
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, PART)
    token = part * PART + column
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    value = tl.load(row_ptr + token, mask=token < size, other=float("-inf")).to(tl.float32)
    most = tl.max(value, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    index = row * num_parts + part
    tl.store(normalizers_ptr + index, most + tl.log(tl.sum(tl.exp(value - most), axis=0)))
    for rank in tl.static_range(COUNT):
        best, at = tl.max(value, axis=0, return_indices=True)
        tl.store(values_ptr + index * COUNT + rank, best)
        tl.store(tokens_ptr + index * COUNT + rank, part * PART + at)
        value = tl.where(column == at, float("-inf"), value)
