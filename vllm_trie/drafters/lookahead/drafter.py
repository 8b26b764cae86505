"""The method `lookahead_trie`: lookahead decoding with the candidates merged into a trie.

Sources: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead
Decoding", algorithm 2; "Accelerating Lookahead Decoding via Trie-based KV-cache Sharing
Verification" for the trie.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest, VerifiedStep
from vllm_trie.drafters.lookahead.candidates import CandidateTrie
from vllm_trie.drafters.lookahead.options import LookaheadOptions, Shape, fit
from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN, NgramPool
from vllm_trie.drafters.lookahead.rates import Rates
from vllm_trie.drafters.lookahead.window import Window
from vllm_trie.tree import TokenTree


class _State:
    """One request."""

    def __init__(self, request: DraftRequest, shape: Shape, options: LookaheadOptions) -> None:
        prompt = request.token_ids[: max(request.num_prompt_tokens, 1)]
        # Every rank must begin with the same tokens, and so must a request that begins anew.
        rng = random.Random(zlib.crc32(np.ascontiguousarray(prompt).tobytes()))
        num_tokens = Window.start_size(shape.window_size, shape.ngram_size)
        self.window = Window(rng.choices(prompt.tolist(), k=num_tokens), shape.ngram_size)
        self.pool = NgramPool(options.num_candidates, options.pool_size)
        self.seen = request.token_ids[:0]
        """int32, the tokens taken in, a copy."""
        self.proposed: TokenTree | None = None
        """The tree proposed last, if the window was part of it."""
        self.proposed_after = -1
        """The last token it was proposed after."""
        self._waiting: deque[tuple[int, CandidateTrie]] = deque()
        """Candidates whose text is not known yet, at most one for each token of their depth, with
        the length of the text that they were drafted after."""

    def wait_for_text(self, num_tokens: int, trie: CandidateTrie) -> None:
        """Keep candidates that were drafted after `num_tokens` tokens until they can be judged."""
        if self._waiting and self._waiting[-1][0] == num_tokens:  # nothing was decoded since
            self._waiting.pop()
        self._waiting.append((num_tokens, trie))

    def judge(self, token_ids: np.ndarray) -> None:
        """Count how far candidates were right whose text has become known."""
        while self._waiting:
            num_tokens, trie = self._waiting[0]
            if num_tokens + trie.max_depth > len(token_ids):
                return
            trie.learn(token_ids[num_tokens : num_tokens + trie.max_depth].tolist())
            self._waiting.popleft()


class LookaheadDrafter(Drafter):
    """Collects n-grams from Jacobi iteration and verifies those that begin with the last token.

    A tree holds the candidates first and then the window, whose nodes are never accepted. What the
    target's argmax after the window's highest level was comes back with the next call, and moves
    the window on by one position, however many tokens the step accepted: its columns keep their
    order and follow the text. A window that was not verified whole (the scheduler cut the draft, or
    the request was preempted) stays as it was and is verified again.

    Candidates have probabilities, which are learned: once the text has gone on it is known of each
    candidate how far it was right, whether it was verified or not (see `rates`).

    State: window, n-gram pool and last candidates of each request, and the rates of all.
    """

    name: ClassVar[str] = "lookahead_trie"
    Options: ClassVar[type[BaseModel]] = LookaheadOptions
    needs_node_argmax: ClassVar[bool] = True

    def __init__(self, options: LookaheadOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.shape = fit(options, context.num_nodes)
        self.rates = Rates()
        self._states: dict[str, _State] = {}

    @property
    def num_ngrams(self) -> int:
        """N-grams in all pools."""
        return sum(state.pool.num_ngrams for state in self._states.values())

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)

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
            self.rates,
            window.token_ids if with_window else (),
        )
        state.wait_for_text(len(request.token_ids), trie)
        branch = self.verification_branch(
            trie,
            min(
                self.shape.max_candidate_nodes,
                request.max_nodes - (window.num_nodes if with_window else 0),
            ),
        )
        if not with_window:
            state.proposed = None
            return branch
        state.proposed = _with_window(branch, window)
        state.proposed_after = int(request.token_ids[-1])
        return state.proposed

    def verification_branch(self, trie: CandidateTrie, max_nodes: int) -> TokenTree:
        """The tree that verifies candidates."""
        return trie.tree(max_nodes, self.options.min_probability)

    def _updated_state(self, request: DraftRequest) -> _State:
        """The request's state with its new tokens and the window's results taken in."""
        tokens = request.token_ids
        state = self._states.get(request.request_id)
        if state is None or not np.array_equal(tokens[: len(state.seen)], state.seen):
            state = self._states[request.request_id] = _State(request, self.shape, self.options)
        state.judge(tokens)
        if len(tokens) > len(state.seen):
            state.pool.begin_step()
        if request.last_step is not None:
            self._take_in_window(state, request.last_step)
        if self.options.pool_from_text:
            size = self.shape.ngram_size
            first_new = max(0, len(state.seen) - size + 1)
            # An n-gram is known once its last token is; before it lies its context.
            start = max(0, first_new - CONTEXT_LEN)
            state.pool.add_text(tokens[start:].tolist(), size, first_new - start)
        state.seen = tokens.copy()
        return state

    def _take_in_window(self, state: _State, step: VerifiedStep) -> None:
        proposed, argmax = state.proposed, step.node_argmax
        if proposed is None or argmax is None or not _is_same(proposed, step.tree):
            return
        window = state.window
        first = proposed.num_nodes - window.num_nodes
        nodes = window.highest_level
        results = argmax[first + nodes.start + 1 : first + nodes.stop + 1].tolist()
        if min(results) < 0:  # not all of them were verified
            return
        for first_token, *rest in window.advance(state.proposed_after, results):
            state.pool.add(first_token, tuple(rest))
        state.proposed = None


def _with_window(trie: TokenTree, window: Window) -> TokenTree:
    """Candidates, then the window, whose nodes are children of the root and of each other."""
    num_candidates = trie.num_nodes
    token_ids, comb_parents = window.comb()
    num_nodes = num_candidates + len(token_ids)
    parents = np.empty(num_nodes, dtype=np.int32)
    parents[:num_candidates] = trie.parents
    parents[num_candidates:] = np.where(comb_parents < 0, -1, comb_parents + num_candidates)
    probabilities = np.zeros(num_nodes, dtype=np.float32)
    if trie.probabilities is not None:
        probabilities[:num_candidates] = trie.probabilities
    never_accept = np.zeros(num_nodes, dtype=bool)
    if trie.never_accept is not None:
        never_accept[:num_candidates] = trie.never_accept
    never_accept[num_candidates:] = True
    tokens = np.concatenate([trie.token_ids, np.array(token_ids, dtype=np.int32)])
    return TokenTree(tokens, parents, probabilities, never_accept)


def _is_same(proposed: TokenTree, scheduled: TokenTree) -> bool:
    """Whether the tree was verified as it was proposed."""
    return scheduled is proposed or (
        np.array_equal(scheduled.token_ids, proposed.token_ids)
        and np.array_equal(scheduled.parents, proposed.parents)
    )
