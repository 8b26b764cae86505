"""One tree per request on all tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def same_on_all_ranks(trees: list[TokenTree], group: GroupCoordinator) -> list[TokenTree]:
    """Return rank 0's trees, without their probabilities, on every tensor-parallel rank.

    Drafters are deterministic, so ranks agree by themselves; but a time-out or a fault can hit one
    rank alone, and ranks that verify different trees would write wrong KV without noticing. The
    ranks call it together with the same number of trees.
    """
    if group.world_size == 1 or not trees:
        return trees
    if group.rank_in_group == 0:
        group.broadcast_object([(t.token_ids, t.parents, None, t.never_accept) for t in trees])
        return trees
    return [TokenTree(*arrays) for arrays in group.broadcast_object()]
