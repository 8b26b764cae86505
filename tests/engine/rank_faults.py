"""A drafter whose faults hit one tensor-parallel rank alone.

The number of a request's prompt tokens says which fault. The drafter is made a method in all of the
engine's processes by an entry point, as one of another package would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

from vllm_trie.drafts import DraftRequest
from vllm_trie.extras.union.drafter import TrieUnionDrafter
from vllm_trie.tree import TokenTree

METHOD = "rank_faults"
FAULTS = ("none", "rank 0 fails", "rank 1 fails", "ranks disagree")


def fault_of(num_prompt_tokens: int) -> str:
    return FAULTS[num_prompt_tokens % len(FAULTS)]


class RankFaultDrafter(TrieUnionDrafter):
    """The union of n-grams and heads, with faults after a request's first 20 output tokens."""

    name = METHOD

    def load_model(self, target_model: nn.Module) -> None:
        """Also agree with the other ranks, as the check at a GPU's start does."""
        from vllm_trie.drafts.engine.workers.drafting_worker import _first_reason

        super().load_model(target_model)
        for reasons in (["first", "second"], [None, "second"], [None, None]):
            assert _first_reason(reasons[self.context.rank]) == next(filter(None, reasons), None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        trees = super().propose(requests)
        for index, request in enumerate(requests):
            if len(request.token_ids) < request.num_prompt_tokens + 20:
                continue
            fault = fault_of(request.num_prompt_tokens)
            if fault == f"rank {self.context.rank} fails":
                raise RuntimeError(f"a fault of rank {self.context.rank}")
            if fault == "ranks disagree" and trees[index].num_nodes:
                turned = (trees[index].token_ids + 17 * self.context.rank) % self.context.vocab_size
                parents = trees[index].parents if self.context.rank == 0 else _flat(turned)
                trees[index] = TokenTree(turned.astype(np.int32), parents)
        return trees


def _flat(tokens: np.ndarray) -> np.ndarray:
    """Every node a child of the root, if the tokens are distinct; a chain otherwise."""
    if len(set(tokens.tolist())) == len(tokens):
        return np.full(len(tokens), -1, dtype=np.int32)
    return np.arange(-1, len(tokens) - 1, dtype=np.int32)


def write_entry_point(folder: Path) -> None:
    """Metadata of a package in `folder` that registers the drafter."""
    metadata = folder / "rank_faults-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-faults\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm_trie.drafters]\n{METHOD} = {__name__}:{RankFaultDrafter.__name__}\n"
    )
