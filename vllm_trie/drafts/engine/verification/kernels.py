"""What verification reads of logits on the device, without the host: the walk down a step's trees,
and the likeliest tokens of each row.

Every logits row has been sampled once. The walk starts at the row of a request's last committed
token and goes down to the child that carries the sampled token, as long as there is one.

The readable twins are :func:`vllm_trie.tree.accept_greedy` and
:meth:`vllm_trie.attention.native.NativeKernels.likeliest`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton

from vllm_trie.drafts.ngrams.native import ROW_TOKENS

NO_PARENT = -1
"""Parent of rows that no walk goes to: last committed tokens and fillers."""
_PART = 8192
"""Tokens of a row that a program reads."""


class WalkedRows(NamedTuple):
    """The rows of logits that a step's output comes from."""

    rows: torch.Tensor
    """int64 [logits rows]. The j-th of a request's rows holds the row that its output token j comes
    from; behind its output, the row's own number."""
    tokens: torch.Tensor
    """int64 [num_requests, width], output tokens of each request, padded with any value."""
    num_tokens: torch.Tensor
    """int32 [num_requests], accepted nodes and the bonus token."""


def walk_trees(
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    first_rows: torch.Tensor,
    width: int,
) -> WalkedRows:
    """Walk down the trees of all requests, without waiting for the device.

    Args:
        sampled: int64 [logits rows], the target's token after each row.
        draft_tokens: int32 [logits rows], the token of each node.
        parents: int32 [logits rows], the row of each node's parent, counted from the request's
            first row, which is that of its last committed token; :data:`NO_PARENT` for none.
        first_rows: int32 [num_requests + 1], the first row of each request; the last entry is
            their number.
        width: The largest number of rows of a request.
    """
    num_requests = len(first_rows) - 1
    rows = torch.empty_like(sampled)
    tokens = sampled.new_zeros(num_requests, width)
    num_tokens = torch.empty(num_requests, dtype=torch.int32, device=sampled.device)
    _walk[(num_requests,)](
        *(sampled, draft_tokens, parents, first_rows, rows, tokens, num_tokens, width),
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return WalkedRows(rows, tokens, num_tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    sampled_ptr,
    draft_tokens_ptr,
    parents_ptr,
    first_rows_ptr,
    rows_ptr,
    tokens_ptr,
    num_tokens_ptr,
    width,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(first_rows_ptr + request)
    num_rows = tl.load(first_rows_ptr + request + 1) - first
    row = tl.arange(0, BLOCK)
    in_use = row < num_rows
    draft = tl.load(draft_tokens_ptr + first + row, mask=in_use, other=-1)
    parent = tl.load(parents_ptr + first + row, mask=in_use, other=-1)
    path = row
    place = 0
    at = tl.min(row)
    while at >= 0:
        path = tl.where(row == place, at, path)
        token = tl.load(sampled_ptr + first + at)
        tl.store(tokens_ptr + request * width + place, token)
        place += 1
        # Siblings are distinct, so that at most one child matches.
        at = tl.max(tl.where((parent == at) & (draft == token), row, -1))
    tl.store(rows_ptr + first + row, (first + path).to(tl.int64), mask=in_use)
    tl.store(num_tokens_ptr + request, place)


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
