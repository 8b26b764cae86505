"""Two drafters' trees for the same steps of a request, drawn next to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from support.stage import Stage
from vllm_trie.drafters import DraftRequest
from vllm_trie.lab.drawings.tree import draw_text
from vllm_trie.tree import TokenTree


class Pair(NamedTuple):
    """The trees of one step."""

    num_tokens: int
    """Of the request's text, prompt included."""
    left: TokenTree
    right: TokenTree


class PairedDrafters:
    """Drafts with `right`, and asks `left` for its tree of the same step."""

    name = "pair"
    needs_node_argmax = False

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right
        self.pairs: list[Pair] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        [request] = requests
        [left], [right] = self.left.propose(requests), self.right.propose(requests)
        self.pairs.append(Pair(len(request.token_ids), left.copy(), right.copy()))
        return [right]

    def release(self, request_id: str) -> None:
        self.left.release(request_id)
        self.right.release(request_id)


def draw_widest_gap(
    stage: Stage, drafters: PairedDrafters, nodes: int, prompts: Sequence[list[int]], params: Any
) -> str:
    """Return both trees of the step in which the right one is ahead of the left by most tokens."""
    text = stage.llm.get_tokenizer().decode
    best = (-1, "")
    for prompt in prompts:
        drafters.pairs.clear()
        [output], _ = stage.run(drafters, nodes, [prompt], params, 1)
        for pair in drafters.pairs:
            following = output[pair.num_tokens - len(prompt) :]
            paths = [tree.path_of(following) for tree in (pair.left, pair.right)]
            gap = len(paths[1]) - len(paths[0])
            if gap > best[0]:
                best = gap, _columns(pair, paths, text)
    return best[1]


def _columns(pair: Pair, paths: list[list[int]], text: Callable[[list[int]], str]) -> str:
    left, right = (
        draw_text(tree, lambda token: text([token]), path).splitlines()
        for tree, path in zip((pair.left, pair.right), paths, strict=True)
    )
    width = max(map(len, left))
    lines = zip_longest(left, right, fillvalue="")
    return "\n".join(f"{a:{width}}    {b}".rstrip() for a, b in lines)
