"""KV blocks of rows: fork, move, count.

A row's block table is ``[full block]* [tail block]?``. Rows of one group share full blocks by
reference count; a tail block belongs to one row. Forking a row of ``L`` computed tokens:

    parent  [ 0 ][ 1 ][ 2, half full ]      full blocks 0 and 1: reference count + 1
    child   [ 0 ][ 1 ][ 7 ]                 tail: a new block, and the copy 2 -> 7 is queued on
                                            vLLM's own copy-on-write channel

The worker runs the queued copies before the next step's forward pass. Until then both ends of a
copy hold an extra reference, which vLLM's ``schedule`` gives back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_trie.vllm_hooks.ledger.extension_points import offered


def fork_blocks(
    manager: KVCacheManager, parent_id: str, child_id: str, num_computed_tokens: int
) -> bool:
    """Give the child the parent's KV of the first `num_computed_tokens` tokens.

    Mutates the manager's tables and the block pool.

    Returns:
        False if the pool has no room for the tail; nothing has changed then.
    """
    if offered("fork_request"):
        return manager.fork_request(parent_id, child_id, num_computed_tokens)  # type: ignore
    pool = manager.block_pool
    parts = _parts(manager)
    needed = sum(1 for part in parts if num_computed_tokens % part.block_size)
    if pool.get_num_free_blocks() < needed:
        return False
    for part in parts:
        table = part.req_to_blocks[parent_id]
        num_full, in_tail = divmod(num_computed_tokens, part.block_size)
        blocks = table[:num_full]
        pool.touch(blocks)
        if in_tail:
            source = table[num_full]
            (target,) = pool.get_new_blocks(1)
            pool.touch((source, target))  # kept until the copy has run
            part._pending_cow_copies.append((source, target))
            if part.records_new_block_ids:
                part.new_block_ids.append(target.block_id)
            blocks.append(target)
        part.req_to_blocks[child_id] = blocks
        if parent_id in part.num_cached_block:
            part.num_cached_block[child_id] = min(part.num_cached_block[parent_id], num_full)
    return True


def move_blocks(manager: KVCacheManager, old_id: str, new_id: str) -> None:
    """Hand a row's whole block table to another row id."""
    if offered("fork_request"):
        manager.rename_request(old_id, new_id)  # type: ignore[attr-defined]
        return
    for part in _parts(manager):
        for table in (part.req_to_blocks, part.num_cached_block):
            if old_id in table:
                table[new_id] = table.pop(old_id)


def num_blocks(manager: KVCacheManager) -> int:
    """Return the number of blocks that requests can hold."""
    # One block of the pool is the null block, which nobody owns.
    return manager.block_pool.num_gpu_blocks - 1


def check_references(manager: KVCacheManager, on_hold: Iterable[KVCacheBlock]) -> None:
    """Assert that every block's reference count is the number of its holders.

    Holders are block tables, both ends of queued copies, and `on_hold`: blocks that vLLM frees when
    a step in flight is over.
    """
    holders = Counter(block.block_id for block in on_hold)
    for part in _parts(manager):
        tables = chain(part.req_to_blocks.values(), part._pending_cow_copies)
        holders.update(block.block_id for block in chain.from_iterable(tables))
    for block in manager.block_pool.blocks:
        found, expected = block.ref_cnt, holders[block.block_id]
        assert block.is_null or found == expected, (
            f"block {block.block_id} has {found} references and {expected} holders"
        )


def _parts(manager: KVCacheManager) -> tuple[Any, ...]:
    return manager.coordinator.single_type_managers
