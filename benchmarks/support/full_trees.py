"""A drafter for measurements: every tree has as many nodes as it may have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import TokenTree, depth_first_layout

_TRUE_SHARE = 0.6  # probability that the true path is one token longer


class FullTreesDrafter(Drafter):
    """Random trees that contain a part of the right answer, seldom on the leading path.

    The trees of real drafters are as large as what they find; these show the costs that depend on
    the size. `answers` maps a prompt to its known output.
    """

    name = "full_trees"
    Options = DrafterOptions
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        tokens = np.asarray(request.token_ids).tolist()
        rng = random.Random(len(tokens))
        prompt = tuple(tokens[: request.num_prompt_tokens])
        truth = self.answers.get(prompt, [])[len(tokens) - len(prompt) :][: request.max_depth]
        length = 0
        while length < min(len(truth), request.max_nodes) and rng.random() < _TRUE_SHARE:
            length += 1
        nodes, parents, probabilities = list(truth[:length]), list(range(-1, length - 1)), []
        edges = set(zip(parents, nodes, strict=True))
        depths = list(range(1, length + 1))
        while len(nodes) < request.max_nodes:
            # A wrong branch of random length from a random node of the true path.
            parent = rng.randint(-1, length - 1)
            for _ in range(rng.randint(1, 4)):
                depth = 1 if parent < 0 else depths[parent] + 1
                edge = (parent, rng.randrange(self.context.vocab_size))
                if len(nodes) == request.max_nodes or depth > request.max_depth or edge in edges:
                    break
                edges.add(edge)
                parents.append(parent)
                nodes.append(edge[1])
                depths.append(depth)
                parent = len(nodes) - 1
        for parent in parents:
            above = 1.0 if parent < 0 else probabilities[parent]
            probabilities.append(above * rng.uniform(0.1, 0.9))
        tree = depth_first_layout(TokenTree.from_lists(nodes, parents, probabilities))
        return tree.chain() if request.chain_only else tree
