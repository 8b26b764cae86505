"""The method `lookahead_trie`: lookahead decoding with the candidates merged into a trie.

Sources: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead
Decoding", algorithm 2; "Accelerating Lookahead Decoding via Trie-based KV-cache Sharing
Verification" for the trie.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafts.drafter import Drafter, DrafterContext, DraftRequest, VerifiedStep
from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.options import LookaheadOptions, Shape, fit
from vllm_trie.extras.lookahead.pool import CONTEXT_LEN, NgramPool
from vllm_trie.extras.lookahead.window import Window
from vllm_trie.tree import TokenTree


class _State:
    """One request.

    Attributes:
        window, pool: The request's own.
        seen: int32, a copy of the tokens of the last call.
        proposed: The last tree, if it contains the window.
    """

    def __init__(self, request: DraftRequest, shape: Shape, options: LookaheadOptions) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        # The same tokens on every rank, and for a request that starts again.
        rng = random.Random(zlib.crc32(np.ascontiguousarray(prompt).tobytes()))
        num_tokens = Window.start_size(shape.window_size, shape.ngram_size)
        self.window = Window(rng.choices(prompt.tolist(), k=num_tokens), shape.ngram_size)
        self.pool = NgramPool(options.num_candidates, options.pool_size)
        self.seen = request.token_ids[:0]
        self.proposed: TokenTree | None = None


class LookaheadDrafter(Drafter):
    """Collects n-grams from Jacobi iteration and verifies those that begin with the last token.

    A tree holds the candidates and then the window, whose nodes are never accepted. The next call
    brings the target's argmax after the window's highest level, which moves the window by one
    position, however many tokens the step accepted: the columns keep their order and follow the
    text. A window that was not verified whole (the scheduler cut the draft, or the request was
    preempted) stays and is verified again.

    State: window and n-gram pool of each request.
    """

    name: ClassVar[str] = "lookahead_trie"
    Options: ClassVar[type[BaseModel]] = LookaheadOptions
    needs_node_argmax = True

    def __init__(self, options: LookaheadOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.shape = fit(options, context.num_nodes)
        self._states: dict[str, _State] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self._states.pop(request.request_id, None)

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        state = self._updated_state(request)
        window = state.window
        with_window = (
            not request.chain_only
            and window.num_nodes <= request.max_nodes
            and window.depth <= request.max_depth
        )
        candidates = state.pool.after(request.token_ids[-CONTEXT_LEN - 1 :].tolist())
        trie = CandidateTrie(
            candidates[:1] if request.chain_only else candidates,
            min(self.shape.max_candidate_depth, request.max_depth),
        )
        room = request.max_nodes - (window.num_nodes if with_window else 0)
        max_nodes = min(self.shape.max_candidate_nodes, room)
        branch = self.verification_branch(request, trie, max_nodes)
        state.proposed = window.append_to(branch) if with_window else None
        return branch if state.proposed is None else state.proposed

    def verification_branch(
        self, request: DraftRequest, trie: CandidateTrie, max_nodes: int
    ) -> TokenTree:
        """Return the tree that verifies a request's candidates; subclasses may verify otherwise."""
        return trie.tree(max_nodes, self.options.min_probability)

    def _updated_state(self, request: DraftRequest) -> _State:
        """Return the request's state, updated with its new tokens and the window's results."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not np.array_equal(tokens[: len(state.seen)], state.seen):
            state = self._states[request.request_id] = _State(request, self.shape, self.options)
        if request.last_step is not None:
            self._advance_window(state, request.last_step)
        if self.options.pool_from_text:
            size = self.shape.ngram_size
            first_new = max(0, len(state.seen) - size + 1)
            # An n-gram is known once its last token is; its context lies before it.
            start = max(0, first_new - CONTEXT_LEN)
            state.pool.add_text(tokens[start:].tolist(), size, first_new - start)
        state.seen = tokens.copy()
        return state

    def _advance_window(self, state: _State, step: VerifiedStep) -> None:
        proposed, argmax, window = state.proposed, step.node_argmax, state.window
        if (
            proposed is None
            or argmax is None
            or not np.array_equal(step.tree.token_ids, proposed.token_ids)
            or not np.array_equal(step.tree.parents, proposed.parents)
        ):
            return
        first = proposed.num_nodes - window.num_nodes
        nodes = window.highest_level
        results = argmax[first + nodes.start + 1 : first + nodes.stop + 1].tolist()
        if min(results) < 0:  # not all of them were verified
            return
        for first_token, *rest in window.advance(int(state.seen[-1]), results):
            state.pool.add(first_token, tuple(rest))
