"""Block tables of beams against the texts that they must hold, and levels that replay a search."""

from __future__ import annotations

import itertools
from collections import ChainMap, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from tests.unit.hooks.beam_runner import NUM_BLOCKS, BeamRunner
from vllm_trie.searches import BeamSearch, Candidates, SearchSettings
from vllm_trie.searches.engine.scheduler.beams import prefix_level, replay_levels
from vllm_trie.searches.engine.scheduler.passes import Room, cheapest_passes
from vllm_trie.searches.engine.scheduler.tables import BeamTables
from vllm_trie.searches.engine.search_wire import BeamStep, TokenSelection
from vllm_trie.searches.top_k import select_best


class Cache:
    """A KV cache in which each slot holds the tokens up to its own."""

    def __init__(
        self, pool: BlockPool, block_size: int, prompt: tuple[int, ...], reserved: int = 0
    ) -> None:
        self.block_size, self.pool = block_size, pool
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        num_blocks = -(-len(prompt) // block_size) + reserved
        manager = SimpleNamespace(
            block_pool=pool,
            block_size=block_size,
            req_to_blocks={"p": pool.get_new_blocks(num_blocks)},
            records_new_block_ids=False,
            remove_skipped_blocks=lambda *_: None,
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
        num_free = self.pool.get_num_free_blocks() - BeamTables.num_needed(plan)
        self.tables.give_back(plan)
        copies = self.tables.apply(plan)
        assert self.pool.get_num_free_blocks() == num_free
        sources = {copy.src_block_id for copy in copies}
        assert sources.isdisjoint(copy.dst_block_id for copy in copies)
        for copy in copies:
            for offset in range(self.block_size):
                source, target = ((i, offset) for i in copy)
                self.slots[target] = self.slots.get(source, ())
        self.tables.check_integrity()
        for row, text in zip(self.tables.suffix.tolist(), texts, strict=True):
            table = [*self.tables.shared.tolist(), *row]
            for position in range(num_computed):
                block, offset = divmod(position, self.block_size)
                assert self.slots[table[block], offset] == text[: position + 1]
            self.write(table, text)


@given(st.integers(1, 5), st.integers(1, 11), st.integers(0, 2), st.data())
def test_each_beam_has_the_kv_of_its_text(block_size, prompt_len, reserved, data):
    texts: list[tuple[int, ...]] = [tuple(range(-prompt_len, 0))]
    cache = Cache(BlockPool(NUM_BLOCKS, False, block_size), block_size, texts[0], reserved)
    for token in range(9):
        parents = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=5))
        texts = [(*texts[parent], 10 * token + i) for i, parent in enumerate(parents)]
        cache.take_step(np.array(parents), texts)
        if data.draw(st.integers(0, 5)) == 0:
            cache.tables.back_to(np.array([0]), prompt_len)
            cache.tables.check_integrity()
            texts = [texts[0][:prompt_len]]
            assert cache.tables.num_held == -(-prompt_len // block_size)
        assert cache.pool.get_num_free_blocks() + cache.tables.num_held == NUM_BLOCKS - 1


class SearchAhead:
    """A plain search, and what a device that goes on ahead of it must hold.

    Args:
        name: Of its proxy.
        cache: Of its prompt.
        settings: Its own.
        next_logits: Return the logits of a number of beams.
    """

    def __init__(
        self,
        name: str,
        cache: Cache,
        prompt: tuple[int, ...],
        settings: SearchSettings,
        next_logits: Callable[[int], torch.Tensor],
    ) -> None:
        self.name, self.tables, self.prompt, self.next_logits = (
            name,
            cache.tables,
            prompt,
            next_logits,
        )
        self.search, self.count = BeamSearch(settings), settings.num_candidates
        self.width, self.num_computed = settings.beam_width, len(prompt)
        self.expected: Candidates | None = None  # of the last step
        first = select_best(next_logits(1), self.search.totals, self.count)
        self.children = self.search.advance(first)
        self.runs = len(self.children) == self.width
        if self.runs:
            texts = [self.text_of(rank) for rank in range(self.width)]
            cache.take_step(self.children.parents, texts)

    def text_of(self, rank: int) -> tuple[int, ...]:
        return (*self.prompt, *self.search.generated[rank].tolist())

    def step(self) -> tuple[BeamStep, TokenSelection]:
        """Return the next step: after the first one of children that the device has chosen."""
        stops = self.search.settings.stop_token_ids
        token_ids, suffix, totals = self.children.token_ids, self.tables.suffix, self.search.totals
        if self.expected is not None:
            self.num_computed += 1
            starts_block = self.tables.starts_block(self.num_computed)
            self.fresh = self.tables.take_fresh(self.width * starts_block)
            token_ids, suffix, totals = None, self.fresh.reshape(self.width, -1), None
        shared = (self.tables.shared,)
        return (
            BeamStep(self.name, 0, self.num_computed, token_ids, shared, (suffix,), None),
            TokenSelection(self.name, totals, self.count, stop_token_ids=stops),
        )

    def check(self, runner: BeamRunner, kv: torch.Tensor) -> torch.Tensor:
        """Hear of the last choice, and compare the device's beams; return logits by place."""
        places = list(range(self.width))
        if self.expected is not None:
            places = runner.beams.selector.parts.beams[self.name].places.tolist()
            assert sorted(places) == list(range(self.width))
            self.children = self.search.advance(self.expected)
            self.runs = len(self.children) == self.width and not self.search.done
            if not self.search.done:
                plan = self.tables.plan(self.children.parents, self.num_computed)
                fresh = self.fresh[: BeamTables.num_fresh(plan)]
                self.tables.give_back(plan, fresh.tolist())
                self.tables.apply(plan, fresh)
                self.tables.check_integrity()
        by_rank = self.next_logits(self.width)
        if self.search.done:
            return by_rank
        states = runner.req_states
        for rank, place in enumerate(places[: len(self.children)]):
            slot = states.req_id_to_index[f"{self.name}#{place}"]
            assert states.last_sampled_tokens[slot] == self.children.token_ids[rank]
            assert states.num_computed_tokens.gpu[slot] == self.num_computed
            table = [*self.tables.shared.tolist(), *self.tables.suffix[rank].tolist()]
            assert runner.block_tables.num_blocks.np[0, slot] == len(table)
            assert runner.block_tables.block_tables[0].gpu[slot, : len(table)].tolist() == table
            text, size = self.text_of(rank), self.tables.block_size
            kv[table[self.num_computed // size], self.num_computed % size] = hash(text)
            for position in range(self.num_computed):
                block, offset = divmod(position, size)
                assert kv[table[block], offset] == hash(text[: position + 1])
        totals = np.full(self.width, -np.inf, dtype=np.float32)
        totals[: len(self.children)] = self.search.totals
        self.expected = select_best(by_rank, totals, self.count)
        return torch.empty_like(by_rank).index_copy_(0, torch.tensor(places), by_rank)


@given(
    block_size=st.integers(1, 4),
    sizes=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=4
    ),
    vocab=st.sampled_from([3, 12, 1000]),
    spread=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    forbidden=st.sampled_from([0.0, 0.3, 0.9]),
    num_stops=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_the_device_makes_the_transitions_of_searches(
    block_size, sizes, vocab, spread, forbidden, num_stops, seed
):
    """Children, tables and copied tails, with ties; the searches hear of each choice later.

    They begin one after another, and have lengths of prompts and widths of their own.
    """
    random = np.random.default_rng(seed)
    stops = tuple(random.permutation(vocab)[:num_stops].tolist())
    slots: dict[tuple[int, int], tuple[int, ...]] = {}
    pool = BlockPool(NUM_BLOCKS, False, block_size)

    def next_logits(rows: int) -> torch.Tensor:
        logits = (random.normal(scale=8 * spread, size=(rows, vocab)).round() / 8).astype(
            np.float32
        )
        logits = logits[random.integers(rows, size=rows)]
        logits[random.random(logits.shape) < forbidden] = -np.inf
        return torch.from_numpy(logits)

    waiting = []
    for number, (prompt_len, width, delay) in enumerate(sizes):
        prompt = tuple(range(-10 * number - prompt_len, -10 * number))
        cache = Cache(pool, block_size, prompt)
        search_settings = SearchSettings(width, 8, stop_token_ids=stops, early_stopping="never")
        search = SearchAhead(str(number), cache, prompt, search_settings, next_logits)
        slots |= cache.slots
        waiting += [(delay, search)] if search.runs else []
    kv = torch.zeros((NUM_BLOCKS, block_size), dtype=torch.int64)
    for (block, offset), text in slots.items():
        kv[block, offset] = hash(text)
    runner = BeamRunner(torch.device("cpu"), [kv, kv])
    for number in itertools.count():
        running = [search for delay, search in waiting if delay <= number and search.runs]
        if running:
            names = runner.begin_step(*zip(*(search.step() for search in running), strict=True))
            runner.select(names, torch.cat([search.check(runner, kv) for search in running]))
            candidates = ChainMap(*(part.fetch() for part in runner.beams.selector.selected))
            for search in running:
                if not search.search.done:
                    assert all(map(np.array_equal, candidates[search.name], search.expected))
        elif number > 3:
            runner.begin_step([], [], [search.name for _, search in waiting])
            assert not runner.beams.selector.parts.beams
            assert not runner.beams._groups
            return


@given(
    st.integers(1, 5).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=1, max_size=8
        )
    )
)
def test_levels_lead_to_the_hypotheses(generated):
    """Each distinct beginning is computed once, and each hypothesis ends as its own beam."""
    paths: list[list[int]] = [[]]
    hypotheses = np.array(generated)
    levels = replay_levels(hypotheses, prefix_level(hypotheses, 0))
    for depth, level in enumerate(levels, 1):
        pairs = zip(level.parents.tolist(), level.token_ids.tolist(), strict=True)
        paths = [[*paths[parent], token] for parent, token in pairs]
        assert level.selects == (depth == len(levels))
        if not level.selects:
            expected = defaultdict(int, {tuple(tokens[:depth]): 1 for tokens in generated})
            assert sorted(map(tuple, paths)) == sorted(expected)
    assert paths == generated


def blocks_behind_prompt(generated: np.ndarray, room: Room) -> set[tuple[Any, ...]]:
    """Return the blocks of a trie that the prompt does not fill: size, first token after, text."""
    length = generated.shape[1]
    return {
        (size, end, tuple(tokens[: end - room.prompt_len]))
        for size in room.block_sizes
        for first in range(room.prompt_len // size * size, room.prompt_len + length, size)
        for end in [first + size]
        for tokens in generated.tolist()
    }


@given(
    num_rows=st.integers(1, 9),
    length=st.integers(1, 12),
    block_sizes=st.sampled_from([(1,), (2,), (4,), (3, 2)]),
    prompt_len=st.integers(1, 9),
    num_beams=st.integers(1, 10),
    spare=st.integers(0, 30),
    seed=st.integers(0, 10**6),
)
def test_passes_use_what_there_is(
    num_rows, length, block_sizes, prompt_len, num_beams, spare, seed
):
    random = np.random.default_rng(seed)
    generated = random.integers(2, size=(num_rows, length))
    num_computed = int(random.integers(length))
    of_one = sum(-(-(prompt_len + length) // size) for size in block_sizes)
    room = Room(prompt_len, block_sizes, of_one + spare, num_beams)
    depth, passes = cheapest_passes(generated, num_computed, room)
    generated[:, -1] = np.arange(num_rows)  # each computes its own, though some are equal
    assert np.concatenate(passes).tolist() == [*range(num_rows)]
    assert max(map(len, passes)) <= num_beams
    free = room.num_blocks - sum(prompt_len // size for size in block_sizes)
    if depth == length:
        assert len(passes) == 1
        assert len(blocks_behind_prompt(generated, room)) <= free
        return
    assert len(passes) > 1
    anchors = distinct_rows(generated[:, :depth])
    assert depth <= num_computed or len(anchors) <= num_beams
    free -= len(blocks_behind_prompt(anchors, room))
    tails = sum((prompt_len + depth) % size > 0 for size in block_sizes)
    for rows in passes:
        fresh = blocks_behind_prompt(generated[rows], room)
        fresh = {block for block in fresh if block[1] > prompt_len + depth}
        # The first hypothesis behind an anchor takes its tail.
        taken = tails * len(distinct_rows(generated[rows, :depth]))
        assert len(fresh) - taken <= free


def distinct_rows(generated: np.ndarray) -> np.ndarray:
    rows = sorted({tuple(tokens) for tokens in generated.tolist()})
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)
