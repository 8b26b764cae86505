"""Block tables of beams against the texts that they must hold, and levels that replay a search."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.vllm_hooks.scheduler.beams import replay_levels
from vllm_trie.vllm_hooks.scheduler.tables import BeamTables, ranged


class Pool:
    """vLLM's block pool, of as many blocks as anybody wants."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.num_used = 0
        self._next = 0

    def get_new_blocks(self, count: int) -> list[Any]:
        self.num_used += count
        self.free += range(self._next, self._next + count)
        self._next += count
        return [SimpleNamespace(block_id=self.free.pop()) for _ in range(count)]

    def free_blocks(self, blocks: list[Any]) -> None:
        self.num_used -= len(blocks)
        self.free += [block.block_id for block in blocks]
        assert len(self.free) == len(set(self.free)), "a block was freed twice"


class Cache:
    """A KV cache in which each slot holds the tokens up to its own."""

    def __init__(self, block_size: int, prompt: tuple[int, ...], reserved: int) -> None:
        self.block_size, self.pool = block_size, Pool()
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        num_blocks = -(-len(prompt) // block_size) + reserved
        manager = SimpleNamespace(
            block_pool=self.pool,
            block_size=block_size,
            req_to_blocks={"p": self.pool.get_new_blocks(num_blocks)},
            records_new_block_ids=False,
        )
        table = [block.block_id for block in manager.req_to_blocks["p"]]
        for position in range(len(prompt)):
            self.write(table, prompt[: position + 1])
        self.tables = BeamTables(manager, "p", len(prompt))

    def write(self, table: list[int], text: tuple[int, ...]) -> None:
        block, offset = divmod(len(text) - 1, self.block_size)
        self.slots[table[block], offset] = text

    def take_step(self, parents: np.ndarray, texts: list[tuple[int, ...]]) -> None:
        """Move to children of `parents`, whose texts end with the tokens of the step."""
        num_computed = len(texts[0]) - 1
        plan = self.tables.plan(parents, num_computed)
        most = self.pool.num_used + BeamTables.num_fresh(plan)
        copies = ranged([self.tables.apply(plan, num_computed)])
        assert self.pool.num_used <= most
        sources = {copy.src_block_id for copy in copies}
        assert sources.isdisjoint(copy.dst_block_id for copy in copies)
        for copy, slots in zip(copies, copies.ranges, strict=True):
            for offset in range(*slots):
                self.slots[copy.dst_block_id, offset] = self.slots[copy.src_block_id, offset]
        self.tables.check_integrity()
        for row, text in zip(self.tables.suffix.tolist(), texts, strict=True):
            table = [*self.tables.shared.tolist(), *row]
            for position in range(num_computed):
                block, offset = divmod(position, self.block_size)
                assert self.slots[table[block], offset] == text[: position + 1]
            self.write(table, text)


@given(st.integers(1, 5), st.integers(1, 11), st.integers(0, 2), st.data())
def test_each_beam_has_the_kv_of_its_text(
    block_size: int, prompt_len: int, reserved: int, data: st.DataObject
) -> None:
    texts: list[tuple[int, ...]] = [tuple(range(-prompt_len, 0))]
    cache = Cache(block_size, texts[0], reserved)
    for token in range(9):
        parents = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=5))
        texts = [(*texts[parent], 10 * token + i) for i, parent in enumerate(parents)]
        cache.take_step(np.array(parents), texts)
        if data.draw(st.integers(0, 5)) == 0:
            cache.tables.back_to_prompt()
            cache.tables.check_integrity()
            texts = [texts[0][:prompt_len]]
            assert cache.pool.num_used == -(-prompt_len // block_size)


@given(
    st.integers(1, 5).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=1, max_size=8
        )
    )
)
def test_levels_lead_to_the_hypotheses(generated: list[list[int]]) -> None:
    """Each distinct beginning is computed once, and each hypothesis ends as its own beam."""
    paths: list[list[int]] = [[]]
    levels = replay_levels(np.array(generated))
    for depth, level in enumerate(levels, 1):
        pairs = zip(level.parents.tolist(), level.token_ids.tolist(), strict=True)
        paths = [[*paths[parent], token] for parent, token in pairs]
        assert level.selects == (depth == len(levels))
        if not level.selects:
            expected = defaultdict(int, {tuple(each[:depth]): 1 for each in generated})
            assert sorted(map(tuple, paths)) == sorted(expected)
    assert paths == generated


def test_a_tail_that_two_beams_write_is_found() -> None:
    cache = Cache(4, (1, 2, 3, 4, 5), 0)
    cache.take_step(np.array([0, 0]), [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7)])
    cache.tables.suffix[1] = cache.tables.suffix[0]
    with pytest.raises(AssertionError):
        cache.tables.check_integrity()
