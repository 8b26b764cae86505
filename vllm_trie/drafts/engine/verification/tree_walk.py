"""The walk down a step's trees on the device, in one kernel and without the host.

Every logits row has been sampled once. The walk starts at the row of a request's last committed
token and goes down to the child that carries the sampled token, as long as there is one. The
readable twin is :func:`vllm_trie.tree.accept_greedy`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton

NO_PARENT = -1
"""Parent of rows that no walk goes to: last committed tokens and fillers."""


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
