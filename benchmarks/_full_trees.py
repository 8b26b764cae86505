"""A drafter for measurements: every tree has exactly as many nodes as it may have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest, registry
from vllm_trie.tree import TokenTree, depth_first_layout

METHOD = "full_trees"
_TRUE_SHARE = 0.6  # probability that the true path is one token longer


class _NoOptions(DrafterOptions):
    """It has no options."""


class FullTreesDrafter(Drafter):
    """Random trees in which a part of the right answer hides, seldom on the leading path.

    `answers` maps a prompt to the output that is known to follow. What real drafters find would
    decide how large their trees are; here the costs that depend on the size can be measured.
    """

    name = METHOD
    Options = _NoOptions
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        tokens = np.asarray(request.token_ids).tolist()
        rng = random.Random(len(tokens))
        prompt = tuple(tokens[: request.num_prompt_tokens])
        truth = self.answers.get(prompt, [])[len(tokens) - len(prompt) :][: request.max_depth]
        length = 0
        while length < len(truth) and rng.random() < _TRUE_SHARE:
            length += 1
        paths = [truth[:length]]
        num_nodes = length
        while num_nodes < request.max_nodes:
            # A wrong branch of random length from a random place of the true path.
            start = rng.randint(0, length)
            room = min(rng.randint(1, 4), request.max_nodes - num_nodes, request.max_depth - start)
            if room <= 0:
                continue
            wrong = [rng.randrange(self.context.vocab_size) for _ in range(room)]
            paths.append([*truth[:start], *wrong])
            num_nodes = TokenTree.from_paths(paths, request.max_nodes).num_nodes
        tree = TokenTree.from_paths(paths, request.max_nodes)
        probabilities = [0.0] * tree.num_nodes
        for node, parent in enumerate(tree.parents.tolist()):
            above = 1.0 if parent < 0 else probabilities[parent]
            probabilities[node] = above * rng.uniform(0.1, 0.9)
        tree = depth_first_layout(TokenTree.from_lists(tree.token_ids, tree.parents, probabilities))
        return tree.chain() if request.chain_only else tree


def register() -> None:
    """Make it a method of this process, as another package's entry point would."""
    registry._BUILT_IN[METHOD] = f"{__name__}:{FullTreesDrafter.__name__}"
