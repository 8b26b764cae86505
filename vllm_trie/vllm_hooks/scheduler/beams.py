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
        ahead: By KV cache group the fresh blocks of a step behind `level`, which the device has
            begun with the children that it has chosen; None if there is no such step.
        is_short: Whether the last step found too few blocks.
    """

    def __init__(self, group: BeamGroup, most_beams: int, on_device: bool) -> None:
        """Make the beams of a group.

        Args:
            group: The group.
            most_beams: As many as a step may compute.
            on_device: Whether the device may choose the children of plain searches.
        """
        self.group = group
        self._most_beams = most_beams
        self._on_device = on_device and group.is_plain
        self.proxy = self._new_proxy()
        self.num_passes = 1
        self.level: Level | None = None
        self.ahead: list[np.ndarray] | None = None
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
    def device_chooses(self) -> bool:
        """Whether the device chooses the children of the step in flight, or of the next one."""
        level, group = self.level, self.group
        return (
            self._on_device
            and self.num_passes == 1
            and level is not None
            and level.selects
            and len(level.parents) == group.beam_width <= self._most_beams
        )

    def num_to_schedule(self) -> int:
        """Return the number of beams that the next step can compute, 0 if none."""
        proxy = self.proxy
        if self.level is None or proxy.num_computed_tokens == (
            proxy.num_tokens + proxy.num_output_placeholders
        ):
            return 0
        return len(self.level.parents)

    def lacks_blocks_ahead(self, manager: KVCacheManager) -> bool:
        """Return whether the device cannot go on ahead of the search, as blocks are few."""
        return bool(
            self.proxy.num_in_flight_tokens
            and sum(self._num_fresh_ahead()) > manager.block_pool.get_num_free_blocks()
        )

    def _num_fresh_ahead(self) -> list[int]:
        """Return by KV cache group the blocks of a step that the device begins."""
        num_computed, width = self.proxy.num_computed_tokens, self.group.beam_width
        return [width * table.starts_block(num_computed) for table in self._tables]

    def settle(self) -> None:
        """Let vLLM schedule what comes next, after a step was scheduled or taken.

        The proxy has a placeholder for each token that is scheduled and that it does not have, and
        one more if the device can begin a step with the children that it chooses.
        """
        proxy = self.proxy
        in_flight = proxy.num_in_flight_tokens > 0
        placeholders = max(0, proxy.num_computed_tokens - proxy.num_tokens) if self.decodes else 0
        if in_flight and self.ahead is None and self.device_chooses:
            num_tokens = proxy.num_computed_tokens - self.group.prompt.size + 1  # that it selects
            placeholders += num_tokens < self.group.search.settings.max_new_tokens
        proxy.num_output_placeholders = placeholders

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
        if self.proxy.num_in_flight_tokens:
            self.is_short = self.lacks_blocks_ahead(manager)
            if self.is_short:
                return False
            pairs = zip(self._tables, self._num_fresh_ahead(), strict=True)
            self.ahead = [table.take_fresh(count) for table, count in pairs]
            return True
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
        token_ids: np.ndarray | None = None
        if self.ahead is None:
            token_ids = self.level.token_ids.astype(np.int32)
            suffix = tuple(table.suffix for table in self._tables)
        else:
            suffix = tuple(fresh.reshape(self.group.beam_width, -1) for fresh in self.ahead)
        return BeamStep(
            self.proxy.request_id,
            self.group.prompt.size,
            self.proxy.num_computed_tokens - 1,
            token_ids,
            tuple(table.shared for table in self._tables),
            suffix,
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
        if self.ahead is not None:  # as the device has, which has copied their tails
            num_computed = self.proxy.num_computed_tokens - 1
            for table, fresh in zip(self._tables, self.ahead, strict=True):
                table.apply(table.plan(children.parents, num_computed), num_computed, fresh)
            self.ahead = None
        if self.num_passes == 1 and len(children) <= self._most_beams:
            self._go_on(Level(children.parents, children.token_ids, True))
        else:
            self._pass = 0
            self._back_to_prompt()
            self._begin_pass()
        self.settle()

    def restart(self, halve: bool) -> None:
        """Take a new proxy, as the old one has lost its KV.

        Args:
            halve: Let the passes of a step be for half as many beams.
        """
        if halve:
            self.num_passes = min(2 * self.num_passes, max(1, self.group.search.num_rows))
        self.proxy = self._new_proxy()
        self.level, self.ahead, self._pass, self.is_short = None, None, 0, False
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
        for i, table in enumerate(self._tables):
            table.check_integrity(() if self.ahead is None else self.ahead[i].tolist())
        assert len({len(table.suffix) for table in self._tables}) <= 1
        assert self.decodes or self.level is None, "a level without the prompt's KV"
        if self.decodes:
            ahead = proxy.num_tokens - proxy.num_computed_tokens
            assert proxy.num_computed_tokens >= prompt_len
            waits = self.level is not None and not proxy.num_in_flight_tokens
            assert ahead == waits - (self.ahead is not None), (
                f"{proxy.request_id}: {ahead} tokens to compute"
            )
