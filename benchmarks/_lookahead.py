"""Prompt sets and drafters of the lookahead benchmark."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_trie.drafters import DraftRequest
from vllm_trie.drafters.lookahead import LookaheadDrafter
from vllm_trie.drafters.lookahead.candidates import CandidateTrie
from vllm_trie.drafters.lookahead.pool import Candidate
from vllm_trie.tree import ROOT, TokenTree

MIXED_ROUNDS = 14
_ENGINE_PROMPTS = Path(__file__).parents[1] / "tests" / "engine" / "prompts.py"


def prompt_sets(model: str) -> dict[str, list[list[int]]]:
    """Tokens of the prompts, by set.

    `demo`: the demo's; `tasks`: task documents from modules that the model never saw; `edit`,
    `question`, `write`, `continue`: written by hand; `library`: the engine tests'; `mixed`: in
    turns a copying, a chat and a free prompt of the others.
    """
    from transformers import AutoTokenizer

    from tools.tiny_model.evaluate import held_out_documents
    from tools.tiny_model.prompts import HAND_PROMPTS
    from vllm_trie.demo.prompts import demo_prompts

    tokenizer = AutoTokenizer.from_pretrained(model)
    sets: dict[str, list[list[int]]] = {
        "demo": [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.message}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for prompt in demo_prompts()
        ],
        "tasks": [tokenizer.encode(document.prompt) for document in held_out_documents(2)],
    }
    for prompt in HAND_PROMPTS:
        sets.setdefault(prompt.category, []).append(tokenizer.encode(prompt.render()))
    sets["library"] = [prompt["prompt_token_ids"] for prompt in _engine_prompts()]
    copying = sets["tasks"] + sets["edit"]
    chat = sets["demo"] + sets["question"]
    free = sets["write"] + sets["continue"]
    rounds = itertools.zip_longest(*(kind[:MIXED_ROUNDS] for kind in (copying, chat, free)))
    sets["mixed"] = [prompt for prompts in rounds for prompt in prompts if prompt is not None]
    return sets


def _engine_prompts() -> list[dict[str, list[int]]]:
    spec = importlib.util.spec_from_file_location("_engine_prompts", _ENGINE_PROMPTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prompts()


class CountedLookahead(LookaheadDrafter):
    """Lookahead that tells how many nodes of each request's last tree verify candidates."""

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.verification_nodes: dict[str, int] = {}

    def verification_branch(
        self, request: DraftRequest, trie: CandidateTrie, max_nodes: int
    ) -> TokenTree:
        branch = self.branch(trie, super().verification_branch(request, trie, max_nodes))
        self.verification_nodes[request.request_id] = branch.num_nodes
        return branch

    def branch(self, trie: CandidateTrie, merged: TokenTree) -> TokenTree:
        """Return the tree that is verified, given the product's."""
        return merged

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.verification_nodes.pop(request_id, None)


class IndependentLookahead(CountedLookahead):
    """Each candidate in a branch of its own, as LADE verifies them.

    What a candidate shares with those before it is computed again, in nodes that are never accepted
    because the first of the equal nodes is. So both drafters accept the same tokens.
    """

    def branch(self, trie: CandidateTrie, merged: TokenTree) -> TokenTree:
        return repeat_shared_prefixes(merged, trie.candidates, trie.max_depth)


def repeat_shared_prefixes(
    trie: TokenTree, candidates: Sequence[Candidate], max_depth: int
) -> TokenTree:
    """The trie, and behind it a branch for every prefix that a candidate shares with one before it.

    The result has as many nodes as the candidates have tokens, those beyond `max_depth` left out.
    """
    tokens, parents = trie.token_ids.tolist(), trie.parents.tolist()
    child_of = {(p, t): node for node, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    seen: set[int] = set()
    for candidate in candidates:
        node = above = ROOT
        for token in candidate.tokens[:max_depth]:
            node = child_of[node, token]
            if node in seen:
                parents.append(above)
                above = len(tokens)
                tokens.append(token)
            seen.add(node)
    built = TokenTree.from_lists(tokens, parents)
    probabilities = np.zeros(len(tokens), dtype=np.float32)
    if trie.probabilities is not None:
        probabilities[: trie.num_nodes] = trie.probabilities
    never_accept = np.arange(len(tokens)) >= trie.num_nodes
    return TokenTree(built.token_ids, built.parents, probabilities, never_accept)
