"""Block tables of a group's beams, as arrays.

All beams of a group have as many tokens, so that their tables have one shape. The full blocks of
the prompt are the same for all and kept once. Behind them, a beam shares full blocks with others,
and its tail block is its own::

    shared   [ 0 ][ 1 ]
    suffix                [ 2 ][ 7: tail ]       beam 0
                          [ 2 ][ 9: tail ]       beam 1, which left beam 0 behind block 2
                          [ 4 ][ 5: tail ]       beam 2

A transition turns beams into their children, who gather the full blocks of their parents. The first
child of a beam takes its tail. Others take the tails of beams without children, or fresh blocks,
and get a copy of their parent's: no target of a copy is the source of another. Where all blocks are
full, every child gets a fresh tail, and nothing is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy


class _Plan(NamedTuple):
    """A transition before it gets its blocks: -1 stands for a fresh one.

    Attributes:
        suffix: int32 [children, blocks].
        copied: int64 [copies], the children that get a copy.
        sources: int64 [copies], the block that each of them copies.
        gone: The blocks that nobody needs any more.
    """

    suffix: np.ndarray
    copied: np.ndarray
    sources: np.ndarray
    gone: list[KVCacheBlock]


class BeamTables:
    """Owner of the blocks of a group in one KV cache group, which hold one reference each.

    Attributes:
        block_size: Tokens of a block.
        shared: int32 [blocks], the full blocks of the prompt; vLLM's null block before a window.
        num_null: How many blocks those are.
        suffix: int32 [beams, blocks], what comes behind them.
    """

    def __init__(self, manager: Any, proxy_id: str, prompt_len: int) -> None:
        """Take over the blocks of a prompt whose KV is computed.

        Args:
            manager: vLLM's of this KV cache group. Its list of the request's blocks is kept up to
                date, so that vLLM frees whatever the group holds.
            proxy_id: The request.
            prompt_len: Tokens of the prompt.
        """
        self._manager, self._pool = manager, manager.block_pool
        manager.remove_skipped_blocks(proxy_id, prompt_len)  # before a window; none from now on
        self._blocks = blocks = manager.req_to_blocks[proxy_id]
        self.block_size = manager.block_size
        full, tail = divmod(prompt_len, self.block_size)
        self._pool.free_blocks(blocks[full + bool(tail) :])  # reserved for drafts
        del blocks[full + bool(tail) :]
        self._num_shared = full
        self.num_null = len([block for block in blocks if block.is_null])
        block_ids = np.array([block.block_id for block in blocks], dtype=np.int32)
        self.shared, self.suffix = block_ids[:full], block_ids[None, full:]
        self._kept: np.ndarray | None = None  # the suffix of beams to go back to

    def plan(self, parents: np.ndarray, num_computed: int) -> _Plan:
        """Return the transition to children of `parents`, int [children].

        Args:
            parents: The beam that each child extends.
            num_computed: Tokens of each beam whose KV is computed.
        """
        none = np.zeros(0, dtype=np.int64)
        suffix = self.suffix[parents]
        if self.starts_block(num_computed):
            fresh = np.full((len(parents), 1), -1, dtype=np.int32)
            suffix = np.concatenate([suffix, fresh], axis=1)
            return _Plan(suffix, none, none, self._without(suffix))
        kept, first = np.unique(parents, return_index=True)
        copied = np.ones(len(parents), dtype=bool)
        copied[first] = False
        copies = np.flatnonzero(copied)
        tails = self.suffix[:, -1]
        spare = np.delete(tails, kept)[: len(copies)] if self._kept is None else tails[:0]
        suffix[copies, -1] = -1
        suffix[copies[: len(spare)], -1] = spare
        return _Plan(suffix, copies, tails[parents[copies]], self._without(suffix))

    def _without(self, suffix: np.ndarray) -> list[KVCacheBlock]:
        """Return the blocks that are neither in `suffix` nor kept nor the prompt's full ones."""
        used = set(suffix.ravel().tolist())
        if self._kept is not None:
            used.update(self._kept.ravel().tolist())
        return [b for b in self._blocks[self._num_shared :] if b.block_id not in used]

    @staticmethod
    def num_fresh(plan: _Plan) -> int:
        """Return the number of blocks that a transition takes from the pool."""
        return int((plan.suffix[:, -1:] < 0).sum())

    @staticmethod
    def num_needed(plan: _Plan) -> int:
        """Return how many more blocks a group holds after a transition; may be negative."""
        return BeamTables.num_fresh(plan) - len(plan.gone)

    @property
    def num_held(self) -> int:
        """The number of blocks that the group holds."""
        return len(self._blocks) - self.num_null

    def starts_block(self, num_computed: int) -> bool:
        """Return whether beams of `num_computed` tokens need a fresh tail block each."""
        return bool(num_computed % self.block_size == 0)

    def take_fresh(self, count: int) -> np.ndarray:
        """Take blocks from the pool, which has them; return int32 [count], their ids."""
        fresh = self._pool.get_new_blocks(count)
        self._blocks += fresh
        block_ids = [block.block_id for block in fresh]
        if self._manager.records_new_block_ids:
            self._manager.new_block_ids += block_ids
        return np.array(block_ids, dtype=np.int32)

    def give_back(self, plan: _Plan, fresh: Sequence[int] = ()) -> None:
        """Give back the blocks that nobody needs after a transition.

        Args:
            plan: The transition.
            fresh: Ids of blocks that were taken for it before it was planned.
        """
        needed = set(fresh)
        self._free([block for block in plan.gone if block.block_id not in needed])

    def apply(self, plan: _Plan, fresh: np.ndarray | None = None) -> list[KVCacheBlockCopy]:
        """Take the blocks of a transition, after :meth:`give_back`.

        Args:
            plan: The transition.
            fresh: Ids of the blocks that were taken for it, :meth:`num_fresh`; None to take them
                from the pool, which has them.

        Returns:
            The copies that must run before the beams' next step.
        """
        suffix = plan.suffix
        if count := self.num_fresh(plan):
            suffix[suffix[:, -1] < 0, -1] = self.take_fresh(count) if fresh is None else fresh
        self.suffix = suffix
        targets = suffix[plan.copied, -1]
        return list(map(KVCacheBlockCopy, plan.sources.tolist(), targets.tolist()))

    def back_to(self, beams: np.ndarray, length: int) -> None:
        """Cut beams back to ancestors of theirs; give everything else back, what is kept too.

        Whatever was written behind an ancestor into its last block, its own slots are still there.

        Args:
            beams: int64 [ancestors], a beam for each of them.
            length: Tokens of an ancestor, those of the prompt or more.
        """
        self._kept = None
        self.suffix = self.suffix[beams, : -(-length // self.block_size) - self._num_shared]
        self._free(self._without(self.suffix))

    def keep(self) -> None:
        """Hold the blocks of the present beams until :meth:`back_to`.

        Until then every beam with KV has children in every transition, apart from the kept ones:
        so nobody writes over what they hold.
        """
        self._kept = self.suffix

    def back_to_kept(self) -> None:
        """Give back what comes behind the kept beams."""
        assert self._kept is not None
        self.suffix = self._kept
        self._free(self._without(self.suffix))

    def _free(self, blocks: list[KVCacheBlock]) -> None:
        if blocks:
            gone = {block.block_id for block in blocks}
            held = self._blocks[self._num_shared :]
            self._blocks[self._num_shared :] = [b for b in held if b.block_id not in gone]
            self._pool.free_blocks(blocks)

    def check_integrity(self, fresh: Sequence[int] = ()) -> None:
        """Assert that the tables hold exactly the group's blocks, each beam with its own tail.

        Args:
            fresh: Ids of blocks that were taken for a step whose beams the device chooses.
        """
        held = [block.block_id for block in self._blocks if not block.is_null]
        assert len(held) == len(set(held)) == self.num_held, "a group holds a block twice"
        in_tables = {*self.shared[self.num_null :].tolist(), *self.suffix.ravel().tolist(), *fresh}
        if self._kept is not None:
            in_tables.update(self._kept.ravel().tolist())
        assert set(held) == in_tables, f"held {sorted(held)}, in tables {sorted(in_tables)}"
        tails = self.suffix[:, -1:].ravel().tolist()
        assert len(tails) == len(set(tails)), "two beams have one tail"


def num_blocks(manager: KVCacheManager) -> int:
    """Return the number of blocks that requests can hold."""
    # One block of the pool is the null block, which nobody owns.
    return manager.block_pool.num_gpu_blocks - 1


def check_references(manager: KVCacheManager, on_hold: Iterable[KVCacheBlock]) -> None:
    """Assert that every block's reference count is the number of its holders.

    Holders are block tables, both ends of vLLM's own queued copies, and `on_hold`: blocks that vLLM
    frees when a step in flight is over.
    """
    holders = Counter(block.block_id for block in on_hold)
    for part in manager.coordinator.single_type_managers:
        tables = chain(part.req_to_blocks.values(), part._pending_cow_copies)
        holders.update(block.block_id for block in chain.from_iterable(tables))
    for block in manager.block_pool.blocks:
        references, expected = block.ref_cnt, holders[block.block_id]
        assert block.is_null or references == expected, (
            f"block {block.block_id} has {references} references and {expected} holders"
        )
