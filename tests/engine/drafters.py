"""Drafters for tests: they know the answer, or they misbehave."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import TokenTree


class NoOptions(DrafterOptions):
    """A drafter without options."""


class TokenSeededDrafter(Drafter):
    """Draws from a generator seeded by the tokens, so that every process drafts the same."""

    Options = NoOptions

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self.propose_one(r, np.asarray(r.token_ids).tolist()) for r in requests]

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        raise NotImplementedError


class OracleDrafter(TokenSeededDrafter):
    """Random trees that hold a random part of the true continuation among wrong branches.

    `answers` maps a prompt to its output. The true path lies at random places in the tree, so that
    accepted nodes' KV has to move; one draft in ten is empty.
    """

    name = "test_oracle"
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        rng = random.Random(hash(tuple(tokens)))
        if rng.random() < 0.1:
            return TokenTree.empty()
        prompt = tuple(tokens[: request.num_prompt_tokens])
        truth = self.answers.get(prompt, [])[len(tokens) - len(prompt) :]
        num_nodes = rng.randint(1, request.max_nodes)
        true_path = truth[: rng.randint(0, min(num_nodes, request.max_depth, 10))]
        nodes: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        edges = set()
        on_path, tip = 0, -1
        for _ in range(20 * num_nodes):
            if len(nodes) == num_nodes:
                break
            if on_path < len(true_path) and rng.random() < 0.3:
                parent, token, is_true = tip, true_path[on_path], True
            else:
                parent, is_true = rng.randint(-1, len(nodes) - 1), False
                token = rng.randrange(self.context.vocab_size)
            depth = 1 if parent < 0 else depths[parent] + 1
            true_token = true_path[on_path] if on_path < len(true_path) else None
            clashes = not is_true and parent == tip and token == true_token
            if (parent, token) in edges or depth > request.max_depth or clashes:
                continue
            edges.add((parent, token))
            nodes.append(token)
            parents.append(parent)
            depths.append(depth)
            if is_true:
                tip, on_path = len(nodes) - 1, on_path + 1
        tree = TokenTree.from_lists(nodes, parents)
        return tree.chain() if request.chain_only else tree


class AnswerSetDrafter(TokenSeededDrafter):
    """A trie of fixed outputs for one prompt, for tests of the sampled distribution."""

    name = "test_answer_set"
    outputs: ClassVar[list[list[int]]] = []

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        done = tokens[request.num_prompt_tokens :]
        rest = [o[len(done) :] for o in self.outputs if o[: len(done)] == done]
        tree = TokenTree.from_paths([r[: request.max_depth] for r in rest], request.max_nodes)
        return tree.chain() if request.chain_only else tree


class FaultyDrafter(OracleDrafter):
    """Fails at random: raises, returns something malformed, or draws a good tree."""

    name = "test_faulty"

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> Any:
        rng = random.Random(len(tokens) * 31 + sum(tokens[-3:]))
        tree = super().propose_one(request, tokens)
        match rng.randrange(40):
            case 0:
                raise RuntimeError("a drafter's bug")
            case 1:
                return TokenTree.from_lists([1, 2], [1, -1])  # a child before its parent
            case 2:
                return TokenTree.from_lists([self.context.vocab_size], [-1])
            case 3:
                return TokenTree.from_lists([3, 3], [-1, -1])
            case 4:
                return TokenTree.from_lists(
                    range(request.max_nodes + 1), [-1] * (request.max_nodes + 1)
                )
            case 5:
                return None
            case 6:
                return TokenTree(np.array([1.5]), np.array([-1]))
        return tree

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        number = request.request_id.partition("-")[0]  # vLLM appends something random
        if number.endswith(("0", "3", "6")):
            raise KeyError(request.request_id)


class SlowDrafter(TokenSeededDrafter):
    """Takes 0.3 s for a batch with a request of ten output tokens or more."""

    name = "test_slow"

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if any(len(r.token_ids) - r.num_prompt_tokens >= 10 for r in requests):
            time.sleep(0.3)
        return super().propose(requests)

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        return TokenTree.from_lists(tokens[-1:], [-1])


class HiddenStateDrafter(OracleDrafter):
    """Keeps the hidden states it is given, to be compared with those of plain decoding."""

    name = "test_hidden_states"
    needs_hidden_states = True
    needs_node_argmax = True
    seen: ClassVar[list[tuple[tuple[int, ...], Any]]] = []
    steps: ClassVar[list[Any]] = []
    salts: ClassVar[dict[str, str | None]] = {}

    def propose_one(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        assert not request.token_ids.flags.writeable, "it is the engine's"
        self.seen.append((tuple(tokens), request.hidden_state.clone()))
        self.salts[request.request_id] = request.cache_salt
        self.steps.append((tuple(tokens), request.last_step))
        return super().propose_one(request, tokens)


DRAFTERS = (OracleDrafter, AnswerSetDrafter, FaultyDrafter, SlowDrafter, HiddenStateDrafter)
