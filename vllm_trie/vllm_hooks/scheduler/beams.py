"""The beams of one group: their tables, their tokens, and what they compute next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.v1.request import Request

from vllm_trie.beam import Children
from vllm_trie.vllm_hooks.beam_wire import BeamStep
from vllm_trie.vllm_hooks.scheduler.tables import BeamTables, TailCopies

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_trie.vllm_hooks.scheduler.group import BeamGroup


class Level(NamedTuple):
    """One token of each beam, to be computed in one step.

    Attributes:
        parents: int64 [beams], the beam of the level before that each of them extends.
        token_ids: int64 [beams].
        selects: Whether the step's candidates are wanted.
    """

    parents: np.ndarray
    token_ids: np.ndarray
    selects: bool


def replay_levels(generated: np.ndarray) -> list[Level]:
    """Return the levels that lead from the prompt to hypotheses.

    A common beginning is computed once. On the last level, whose candidates are wanted, every
    hypothesis has a beam of its own, in order.

    Args:
        generated: int64 [hypotheses, tokens], at least one of each.

    >>> for level in replay_levels(np.array([[5, 6], [5, 7], [8, 6]])):
    ...     print(level.parents, level.token_ids, level.selects)
    [0 0] [5 8] False
    [0 0 1] [6 7 6] True
    """
    levels: list[Level] = []
    prefixes = np.zeros(len(generated), dtype=np.int64)
    for token_ids in generated.T[:-1]:
        keys = np.stack([prefixes, token_ids])
        distinct, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        levels.append(Level(prefixes[first], distinct[1], False))
        prefixes = inverse.reshape(-1)
    levels.append(Level(prefixes, generated[:, -1], True))
    return levels


class BeamProxy(Request):
    """The request that stands for a group in vLLM's scheduler.

    Its prompt is computed as any other request's. From then on it has one token more than are
    computed where the group's beams have a token each to compute.
    """

    beams: GroupBeams

    def grow(self) -> None:
        """Add a token, whose value nobody reads."""
        self._output_token_ids.append(0)
        self._all_token_ids.append(0)

    def back_to_prompt(self) -> None:
        """Drop all tokens behind the prompt."""
        self._output_token_ids.clear()
        del self._all_token_ids[self.num_prompt_tokens :]
        self.num_computed_tokens = self.num_prompt_tokens


class GroupBeams:
    """State of a group whose beams are arrays.

    The search is the truth: KV that is lost is computed again from its hypotheses, level by level.
    Where a step has too few tokens for all beams, or the engine too few blocks, a step of the
    search takes several passes, each over some of the beams and from the prompt on.

    Attributes:
        group: The group.
        proxy: Its request in vLLM's scheduler.
        num_passes: Passes of a step.
        level: What the beams compute next, None while they wait for the search or the prompt.
        is_short: Whether the last step found too few blocks.
    """

    def __init__(self, group: BeamGroup, most_beams: int) -> None:
        """Make the beams of a group of which a step may compute `most_beams`."""
        self.group = group
        self._most_beams = most_beams
        self.proxy = self._new_proxy()
        self.num_passes = 1
        self.level: Level | None = None
        self.is_short = False
        self._pass = 0
        self._replay: list[Level] = []  # behind `level`
        self._tables: list[BeamTables] = []
        self._copies: list[TailCopies] = []  # that no step has taken along

    @property
    def decodes(self) -> bool:
        """Whether the KV of the prompt is computed."""
        return bool(self._tables)

    @property
    def num_beams(self) -> int:
        """The number of beams that have KV."""
        return len(self._tables[0].suffix) if self._tables else 0

    @property
    def rows(self) -> np.ndarray:
        """The rows of the search, int64 [beams], that the present pass is for."""
        rows = np.arange(self.group.search.num_rows)
        result: np.ndarray = np.array_split(rows, self.num_passes)[self._pass]
        return result

    def _new_proxy(self) -> BeamProxy:
        request = self.group.request
        proxy = BeamProxy(
            self.group.new_proxy_id(),
            request.prompt_token_ids,
            self.group.proxy_params,
            None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
        )
        proxy.block_hashes = request.block_hashes
        proxy.beams = self
        return proxy

    def begin(self, manager: KVCacheManager) -> None:
        """Take over the prompt's KV, which is computed; go on to where the search is."""
        parts = manager.coordinator.single_type_managers
        prompt_len = self.group.prompt.size
        self._tables = [BeamTables(part, self.proxy.request_id, prompt_len) for part in parts]
        if self.group.search.steps:
            self._begin_pass()

    def take_blocks(self, manager: KVCacheManager) -> bool:
        """Take the blocks of the next level from the pool; return whether it has enough."""
        assert self.level is not None
        num_computed = self.proxy.num_computed_tokens
        plans = [table.plan(self.level.parents, num_computed) for table in self._tables]
        needed = sum(map(BeamTables.num_fresh, plans))
        self.is_short = manager.block_pool.get_num_free_blocks() < needed
        if self.is_short:
            return False
        self._copies += [
            table.apply(plan, num_computed) for table, plan in zip(self._tables, plans, strict=True)
        ]
        return True

    def take_copies(self) -> list[TailCopies]:
        """Return the copies that must run before the level's step, once."""
        copies, self._copies = self._copies, []
        return copies

    def step(self) -> BeamStep:
        """Return the level that vLLM has scheduled, for the worker."""
        assert self.level is not None
        return BeamStep(
            self.proxy.request_id,
            self.group.prompt.size,
            self.proxy.num_computed_tokens - 1,
            self.level.token_ids.astype(np.int32),
            tuple(table.shared for table in self._tables),
            tuple(table.suffix for table in self._tables),
            self.proxy.lora_request,
        )

    def end_level(self) -> bool:
        """Go on behind a level that is computed; return whether the search has all candidates."""
        assert self.level is not None
        selected, self.level = self.level.selects, None
        if not selected:
            self._go_on(self._replay.pop(0))
        elif self._pass + 1 < self.num_passes:
            self._pass += 1
            self._back_to_prompt()
            self._begin_pass()
        else:
            return True
        return False

    def follow(self, children: Children) -> None:
        """Go on with the children that the search has chosen."""
        if self.num_passes == 1 and len(children) <= self._most_beams:
            self._go_on(Level(children.parents, children.token_ids, True))
        else:
            self._pass = 0
            self._back_to_prompt()
            self._begin_pass()

    def restart(self, halve: bool) -> None:
        """Take a new proxy, as the old one has lost its KV.

        Args:
            halve: Let the passes of a step be for half as many beams.
        """
        if halve:
            self.num_passes = min(2 * self.num_passes, max(1, self.group.search.num_rows))
        self.proxy = self._new_proxy()
        self.level, self._pass, self.is_short = None, 0, False
        self._tables, self._copies, self._replay = [], [], []

    def _begin_pass(self) -> None:
        num_rows = self.group.search.num_rows
        needed = -(-num_rows // self._most_beams)
        self.num_passes = min(max(self.num_passes, needed), num_rows)
        first, *self._replay = replay_levels(self.group.search.generated[self.rows])
        self._go_on(first)

    def _go_on(self, level: Level) -> None:
        self.level = level
        self.proxy.grow()

    def _back_to_prompt(self) -> None:
        self.proxy.back_to_prompt()
        for table in self._tables:
            table.back_to_prompt()

    def check_integrity(self) -> None:
        """Assert what holds between two calls of the scheduler."""
        proxy, prompt_len = self.proxy, self.group.prompt.size
        for table in self._tables:
            table.check_integrity()
        assert len({len(table.suffix) for table in self._tables}) <= 1
        assert self.decodes or self.level is None, "a level without the prompt's KV"
        if self.decodes:
            ahead = proxy.num_tokens - proxy.num_computed_tokens
            assert proxy.num_computed_tokens >= prompt_len
            assert ahead == (self.level is not None and not proxy.num_in_flight_tokens), (
                f"{proxy.request_id}: {ahead} tokens to compute"
            )
