"""KV blocks of rows: fork, move, count.

A row's block table is ``[full block]* [tail block]?``. Rows of one group share full blocks by
reference count; a tail block belongs to one row. Forking a row of ``L`` computed tokens:

    parent  [ 0 ][ 1 ][ 2, half full ]      full blocks 0 and 1: reference count + 1
    child   [ 0 ][ 1 ][ 7 ]                 tail: a new block, and the copy 2 -> 7 is queued on
                                            vLLM's own copy-on-write channel

The worker runs the queued copies before the next step's forward pass. Until then both ends of a
copy hold an extra reference, which vLLM's ``schedule`` gives back.

Where the prompt ends inside the tail block, a row without children becomes a child of another row:
its blocks hold the prompt already, and only the generated slots of the tail are copied::

    dropped [ 0 ][ 1 ][ 5: prompt, x ]
    parent  [ 0 ][ 1 ][ 2: prompt, y ]
    child   [ 0 ][ 1 ][ 5: prompt, y ]      y is copied
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_trie.vllm_hooks.ledger.extension_points import offered


class RangedCopies(list[Any]):
    """vLLM's list of a step's block copies, with the slots that each of them needs.

    Whoever does not know of the ranges copies whole blocks, which is right as well.

    Attributes:
        ranges: First slot and end of each copy; None for the whole block.
    """

    def __init__(self, copies: Iterable[Any], ranges: list[tuple[int, int] | None]) -> None:
        super().__init__(copies)
        self.ranges = ranges


class Tail(NamedTuple):
    """A row's tail block, and how many of its slots are filled."""

    block: KVCacheBlock
    num_filled: int


def tail_of(manager: KVCacheManager, row_id: str, num_computed_tokens: int) -> Tail | None:
    """Return a row's tail; None if it has none, or the model several KV cache groups."""
    parts = _parts(manager)
    if len(parts) > 1:
        return None
    num_full, in_tail = divmod(num_computed_tokens, parts[0].block_size)
    return Tail(parts[0].req_to_blocks[row_id][num_full], in_tail) if in_tail else None


def fork_blocks(
    manager: KVCacheManager,
    parent_id: str,
    child_id: str,
    num_computed_tokens: int,
) -> bool:
    """Give the child the parent's KV of the first `num_computed_tokens` tokens.

    Mutates the manager's tables and the block pool.

    Args:
        manager: vLLM's.
        parent_id, child_id: Ids of the rows.
        num_computed_tokens: At most those of the parent.

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
            if part.records_new_block_ids:
                part.new_block_ids.append(target.block_id)
            blocks.append(target)
            _queue_copy(manager, part, source, target)
        part.req_to_blocks[child_id] = blocks
        if parent_id in part.num_cached_block:
            part.num_cached_block[child_id] = min(part.num_cached_block[parent_id], num_full)
    return True


def copy_tails(
    manager: KVCacheManager, pairs: Sequence[tuple[str, str]], num_computed_tokens: int
) -> tuple[list[KVCacheBlock], int]:
    """Queue copies of rows' tail blocks to those of others.

    All rows have a tail, and the model one KV cache group.

    Args:
        manager: vLLM's.
        pairs: Ids of the row that is copied and of that which gets the copy.
        num_computed_tokens: Of all of these rows.

    Returns:
        The targets, and how many of the slots of each are filled.
    """
    (part,) = _parts(manager)
    num_full, in_tail = divmod(num_computed_tokens, part.block_size)
    tables = part.req_to_blocks
    copies = [(tables[parent][num_full], tables[child][num_full]) for parent, child in pairs]
    manager.block_pool.touch(list(chain.from_iterable(copies)))  # kept until the copies have run
    part._pending_cow_copies += copies
    return [target for _, target in copies], in_tail


def _queue_copy(
    manager: KVCacheManager, part: Any, source: KVCacheBlock, target: KVCacheBlock
) -> None:
    manager.block_pool.touch((source, target))  # kept until the copy has run
    part._pending_cow_copies.append((source, target))


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
