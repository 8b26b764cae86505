"""Small random heads and requests for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.unit.drafters.support import make_context
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.registry import parse_options
from vllm_trie.extras.heads.drafter import MedusaDrafter
from vllm_trie.extras.heads.heads import HeadsShape, MedusaHeads

HIDDEN, VOCAB = 16, 60


def random_heads(
    num_heads: int = 3,
    num_layers: int = 1,
    has_bias: bool = False,
    shares_output: bool = False,
    num_outputs: int = VOCAB,
    seed: int = 0,
) -> MedusaHeads:
    """Heads whose weights survive a round trip through bfloat16 unchanged."""
    torch.manual_seed(seed)
    shape = HeadsShape(num_heads, num_layers, HIDDEN, VOCAB, num_outputs, has_bias, shares_output)
    heads = MedusaHeads(shape)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter).mul_(0.5).bfloat16().float())
    return heads.requires_grad_(False)


def make_medusa(
    heads: MedusaHeads | None = None, path: str = "heads", **options: Any
) -> MedusaDrafter:
    """A drafter on the given heads, or one that has yet to load those at `path`."""
    context = make_context(vocab_size=VOCAB, hidden_size=HIDDEN, draft_model=str(path))
    drafter = MedusaDrafter(parse_options("medusa_dynamic", options), context)
    if heads is not None:
        drafter.set_heads(heads, [1.0] * (options.get("num_heads") or heads.shape.num_heads))
    return drafter


def make_requests(count: int = 3, seed: int = 0, **changes: Any) -> list[DraftRequest]:
    """Requests with random texts and hidden states."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    values = {"max_nodes": 24, "max_depth": 50, **changes}
    return [
        DraftRequest(
            f"r{i}",
            rng.integers(0, 8, 40 + i).astype(np.int32),
            30,
            hidden_state=torch.randn(HIDDEN),
            **values,
        )
        for i in range(count)
    ]


def describe(trees: list[Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """Trees as lists, to be compared."""
    return [
        (tree.token_ids.tolist(), tree.parents.tolist(), tree.probabilities.tolist())
        for tree in trees
    ]
