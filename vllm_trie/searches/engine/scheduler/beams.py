"""The beams of one group: their tables, their tokens, and what they compute next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request

from vllm_trie.hooks.wire import InternalRequest
from vllm_trie.searches import BeamSearch, Children
from vllm_trie.searches.engine.scheduler.passes import Room, cheapest_passes
from vllm_trie.searches.engine.scheduler.tables import BeamTables
from vllm_trie.searches.engine.search_wire import BeamStep

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class EngineParts(NamedTuple):
    """The engine's objects that searches use.

    Attributes:
        max_model_len, vocab_size: Of the model.
        managers: vLLM's, of the KV cache groups.
        num_blocks: As many blocks as requests may hold.
        tokens_per_step: As many beams as a step may compute.
        on_device: Whether the device may choose the children of plain searches.
    """

    max_model_len: int
    vocab_size: int
    managers: Sequence[SingleTypeKVCacheManager]
    num_blocks: int
    tokens_per_step: int
    on_device: bool


class Level(NamedTuple):
    """One token of each beam, to be computed in one step.

    Attributes:
        parents: int64 [beams], the beam of the level before that each of them extends.
        hypotheses: int64 [hypotheses, tokens], what the beams are on their way to.
        first: int64 [beams], the first hypothesis that begins as the beam does.
        depth: Tokens of a beam behind the prompt.
        selects: Whether the step's candidates are wanted.
    """

    parents: np.ndarray
    hypotheses: np.ndarray
    first: np.ndarray
    depth: int
    selects: bool

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens to be computed, int64 [beams]."""
        result: np.ndarray = self.hypotheses[self.first, self.depth - 1]
        return result

    @property
    def generated(self) -> np.ndarray:
        """The tokens of each beam behind the prompt, int64 [beams, depth]."""
        result: np.ndarray = self.hypotheses[self.first, : self.depth]
        return result


def prefix_level(hypotheses: np.ndarray, depth: int) -> Level:
    """Return a level whose beams are the distinct prefixes of hypotheses.

    Args:
        hypotheses: int64 [hypotheses, tokens].
        depth: Tokens of a prefix.
    """
    firsts = {tokens.tobytes(): i for i, tokens in _reversed(hypotheses[:, :depth])}
    first = np.array(sorted(firsts.values()))
    return Level(first, hypotheses, first, depth, False)


def replay_levels(hypotheses: np.ndarray, computed: Level, selects: bool = True) -> list[Level]:
    """Return the levels that lead from beams with KV to hypotheses behind them.

    A common prefix is computed once. On the last level every hypothesis has a beam of its own,
    in order.

    Args:
        hypotheses: int64 [hypotheses, tokens], at least one of each.
        computed: The beams that have KV.
        selects: Whether the candidates of the last level are wanted.

    >>> hypotheses = np.array([[5, 6], [5, 7], [8, 6]])
    >>> for level in replay_levels(hypotheses, prefix_level(hypotheses, 0)):
    ...     print(level.parents, level.token_ids, level.selects)
    [0 0] [5 8] False
    [0 0 1] [6 7 6] True
    """
    levels: list[Level] = []
    beams = prefix_indices(hypotheses[:, : computed.depth], computed.generated)
    for depth in range(computed.depth + 1, hypotheses.shape[1]):
        keys = np.stack([beams, hypotheses[:, depth - 1]])
        _, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        levels.append(Level(beams[first], hypotheses, first, depth, False))
        beams = inverse.reshape(-1)
    every = np.arange(len(hypotheses))
    levels.append(Level(beams, hypotheses, every, hypotheses.shape[1], selects))
    return levels


def prefix_indices(prefixes: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Return the index of the first of others that equals each prefix, int64 [rows].

    Args:
        prefixes: int64 [rows, tokens], each of them one of the others.
        generated: int64 [others, tokens].
    """
    indices = {tokens.tobytes(): i for i, tokens in _reversed(generated)}
    return np.array([indices[tokens.tobytes()] for tokens in prefixes])


def _reversed(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    return zip(range(len(rows) - 1, -1, -1), rows[::-1], strict=True)


class BeamProxy(InternalRequest):
    """The request that stands for a group in vLLM's scheduler.

    Its prompt is computed as any other request's. From then on it has one token more than are
    computed where the group's beams have a token each to compute.

    Attributes:
        search_id: Id of the search's own request.
        beams: Those of the group.
    """

    search_id: str
    beams: GroupBeams

    def grow(self) -> None:
        """Add a token, whose value nobody reads."""
        self._output_token_ids.append(0)
        self._all_token_ids.append(0)

    def cut(self, num_generated: int) -> None:
        """Drop tokens: those that are left are computed, as many as given behind the prompt."""
        del self._output_token_ids[num_generated:]
        self.num_computed_tokens = self.num_prompt_tokens + num_generated
        del self._all_token_ids[self.num_computed_tokens :]


class GroupBeams:
    """State of a group whose beams are arrays.

    The search is the truth: KV that is lost is computed again from its hypotheses, level by level.
    Where a step has too few tokens for all beams, or the engine too few blocks, a step of the
    search takes several passes (see :mod:`passes <vllm_trie.searches.engine.scheduler.passes>`).

    ========= ======= ========== ===================================================================
    state     `level` in flight  ends with
    ========= ======= ========== ===================================================================
    prompt    None    the prompt `take_prompt`: choosing; waiting if the search has begun before
    choosing  None    0          `take_children`: waiting
    waiting   set     0          `take_blocks`, `step`: computing
    computing set     1 step     `end_level`: waiting with what is left of `_levels` and `_passes`,
                                 else choosing. `take_blocks`, if the device chooses: ahead
    ahead     set     2 steps    `end_level`, `take_children`: computing
    ========= ======= ========== ===================================================================

    `restart` goes back to the prompt, from any state.

    Attributes:
        proxy: The group's request in vLLM's scheduler.
        rows: int64 [beams], the rows of the search that the present pass is for.
        level: What the beams compute next, None while they wait for the search or the prompt.
        ahead: By KV cache group the fresh blocks of a step behind `level`, which the device has
            begun with the children that it has chosen; None if there is no such step.
        num_lost: The most blocks that the group held when it lost them.
    """

    def __init__(
        self, request: Request, params: SamplingParams, search: BeamSearch, engine: EngineParts
    ) -> None:
        """Make the beams of a group.

        Args:
            request: The search's.
            params: Of the proxy.
            search: The search.
            engine: ``on_device`` only for plain searches.
        """
        assert request.prompt_token_ids is not None
        self._request, self._params, self._search = request, params, search
        self._prompt_len = len(request.prompt_token_ids)
        self._most_beams = engine.tokens_per_step
        self._most_blocks = engine.num_blocks
        self._on_device = engine.on_device
        self._num_proxies = self.num_lost = 0
        self._tables: list[BeamTables] = []
        self.restart()

    def restart(self) -> None:
        """Take a new proxy, which has no KV yet."""
        self.num_lost = max(self.num_lost, self.num_held)
        self.proxy = self._new_proxy()
        self.level: Level | None = None
        self.ahead: list[np.ndarray] | None = None
        self.rows = np.zeros(1, dtype=np.int64)
        self._levels: list[Level] = []  # behind `level`
        self._passes: list[np.ndarray] = []  # behind the present one
        self._computed = prefix_level(np.zeros((1, 0), dtype=np.int64), 0)  # beams with KV
        self._anchors: Level | None = None  # whose KV is kept during a step of the search
        self._tables = []
        self._copies: list[KVCacheBlockCopy] = []  # that no step has taken along

    @property
    def decodes(self) -> bool:
        """Whether the KV of the prompt is computed."""
        return bool(self._tables)

    @property
    def num_held(self) -> int:
        """The blocks that the group holds, 0 until its prompt is computed."""
        return sum(table.num_held for table in self._tables)

    @property
    def num_beams(self) -> int:
        """The number of beams that have KV."""
        return len(self._tables[0].suffix) if self._tables else 0

    @property
    def device_chooses(self) -> bool:
        """Whether the device chooses the children of the step in flight, or of the next one."""
        level = self.level
        return (
            self._on_device
            and level is not None
            and level.selects
            and len(level.parents) == self._search.settings.beam_width <= self._most_beams
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
        num_computed, width = self.proxy.num_computed_tokens, self._search.settings.beam_width
        return [width * table.starts_block(num_computed) for table in self._tables]

    def set_placeholders(self) -> None:
        """Let vLLM schedule what comes next, after a step was scheduled or taken: nothing without
        a placeholder, and no drafts.

        The proxy has a placeholder for each token that is scheduled and that it does not have, and
        one more if the device can begin a step with the children that it chooses.
        """
        proxy = self.proxy
        in_flight = proxy.num_in_flight_tokens > 0
        placeholders = max(0, proxy.num_computed_tokens - proxy.num_tokens) if self.decodes else 0
        if in_flight and self.ahead is None and self.device_chooses:
            num_tokens = proxy.num_computed_tokens - self._prompt_len + 1  # that it selects
            placeholders += num_tokens < self._search.settings.max_new_tokens
        proxy.num_output_placeholders = placeholders
        proxy.spec_token_ids = []

    def _new_proxy(self) -> BeamProxy:
        request = self._request
        self._num_proxies += 1
        proxy = BeamProxy(
            f"{request.request_id}~{self._num_proxies}",
            request.prompt_token_ids,
            self._params,
            None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            mm_features=request.mm_features,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        proxy.block_hashes = request.block_hashes
        proxy.search_id, proxy.beams = request.request_id, self
        return proxy

    def take_prompt(self, manager: KVCacheManager) -> None:
        """Take over the prompt's KV, which is computed; go on to where the search is."""
        parts = manager.coordinator.single_type_managers
        prompt_len = self._prompt_len
        self._tables = [BeamTables(part, self.proxy.request_id, prompt_len) for part in parts]
        if self._search.steps:
            self._begin_step()

    def take_blocks(self, manager: KVCacheManager) -> bool:
        """Take the blocks of the next level from the pool; return whether it has enough."""
        assert self.level is not None
        num_computed = self.proxy.num_computed_tokens
        if self.proxy.num_in_flight_tokens:
            if self.lacks_blocks_ahead(manager):
                return False
            pairs = zip(self._tables, self._num_fresh_ahead(), strict=True)
            self.ahead = [table.take_fresh(count) for table, count in pairs]
            return True
        plans = [table.plan(self.level.parents, num_computed) for table in self._tables]
        if manager.block_pool.get_num_free_blocks() < sum(map(BeamTables.num_needed, plans)):
            return False
        for table, plan in zip(self._tables, plans, strict=True):
            table.give_back(plan)
        for table, plan in zip(self._tables, plans, strict=True):
            self._copies += table.apply(plan)
        return True

    def take_copies(self) -> list[KVCacheBlockCopy]:
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
            suffix = tuple(fresh.reshape(len(self.level.parents), -1) for fresh in self.ahead)
        return BeamStep(
            self.proxy.request_id,
            self._prompt_len,
            self.proxy.num_computed_tokens - 1,
            token_ids,
            tuple(table.shared for table in self._tables),
            suffix,
            self.proxy.lora_request,
        )

    def end_level(self) -> bool:
        """Go on behind a level that is computed; return whether the search has all candidates."""
        assert self.level is not None
        level, self.level = self.level, None
        self._computed = level
        if self._levels:
            self._go_on(self._levels.pop(0))
        elif not level.selects:
            self._keep_anchors()
        elif self._passes:
            self._begin_pass()
        else:
            return True
        return False

    def take_children(self, children: Children) -> None:
        """Go on with the children that the search has chosen."""
        if self.ahead is not None:  # as the device has, which has copied their tails
            num_computed = self.proxy.num_computed_tokens - 1
            for table, fresh in zip(self._tables, self.ahead, strict=True):
                plan = table.plan(children.parents, num_computed)
                fresh = fresh[: table.num_fresh(plan)]
                table.give_back(plan, fresh.tolist())
                table.apply(plan, fresh)
            self.ahead = None
        self._begin_step(children.parents)
        self.set_placeholders()

    # -- a step of the search ----------------------------------------------------------------------

    def _begin_step(self, parents: np.ndarray | None = None) -> None:
        """Compute what the search wants next: all hypotheses in one pass, if that is possible.

        Args:
            parents: int64 [hypotheses], beams with KV that lack one token each; None if they are
                not those of the step before.
        """
        generated = self._search.generated
        self.rows = np.arange(len(generated))
        if self._anchors is not None or len(generated) > self._most_beams:
            self._divide()
        elif parents is not None:
            self._go_on(Level(parents, generated, self.rows, generated.shape[1], True))
        else:
            self._replay(generated)

    def divide_if_needed(self, manager: KVCacheManager) -> None:
        """Divide the step if the next level has too few blocks though nobody else holds any.

        Raises:
            ValueError: One hypothesis alone has too few.
        """
        level, pool = self.level, manager.block_pool
        num_free = pool.get_num_free_blocks()
        if level is None or num_free >= len(level.parents) * len(self._tables):
            return
        if not self.num_to_schedule() or self.proxy.num_in_flight_tokens:
            return
        if num_free + self.num_held < self._most_blocks:
            return
        num_computed = self.proxy.num_computed_tokens
        plans = [table.plan(level.parents, num_computed) for table in self._tables]
        if num_free < sum(map(BeamTables.num_needed, plans)):
            self._divide()

    def _divide(self) -> None:
        """Begin the present step of the search anew, in the passes for which there is room."""
        generated = self._search.generated
        self._give_up_pass()
        prompt_len = self._prompt_len
        block_sizes = [table.block_size for table in self._tables]
        num_blocks = self._most_blocks + sum(table.num_null for table in self._tables)
        room = Room(prompt_len, block_sizes, num_blocks, self._most_beams)
        depth, self._passes = cheapest_passes(generated, self._computed.depth, room)
        kept = min(depth, self._computed.depth)
        ancestors = prefix_level(generated, kept)
        beams = prefix_indices(ancestors.generated, self._computed.generated[:, :kept])
        for table in self._tables:
            table.back_to(beams, prompt_len + kept)
        self._anchors, self._computed = None, ancestors
        self.proxy.cut(kept)
        if depth == generated.shape[1]:
            self.rows = self._passes.pop()
            self._replay(generated)
        elif depth > kept:
            self._replay(prefix_level(generated, depth).generated, selects=False)
        else:
            self._keep_anchors()

    def _keep_anchors(self) -> None:
        """Keep the present beams, which all hypotheses come from; begin the first pass."""
        self._anchors = self._computed
        for table in self._tables:
            table.keep()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._give_up_pass()
        self.rows = self._passes.pop(0)
        self._replay(self._search.generated[self.rows])

    def _give_up_pass(self) -> None:
        """Go back to the anchors, if there are any."""
        self.level, self._levels = None, []
        if self._anchors is not None:
            self._computed = self._anchors
            for table in self._tables:
                table.back_to_kept()
        self.proxy.cut(self._computed.depth)

    def _replay(self, hypotheses: np.ndarray, selects: bool = True) -> None:
        first, *self._levels = replay_levels(hypotheses, self._computed, selects)
        self._go_on(first)

    def _go_on(self, level: Level) -> None:
        self.level = level
        self.proxy.grow()

    def check_integrity(self) -> None:
        """Assert what holds between two calls of the scheduler."""
        proxy, prompt_len = self.proxy, self._prompt_len
        assert not self._copies, "copies that no step has taken along"
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
