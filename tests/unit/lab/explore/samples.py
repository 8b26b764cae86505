"""Made-up generations and searches for pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from vllm_trie.extras.traces.trace_file import Header, Step, Trace
from vllm_trie.lab.explore.page import Beams
from vllm_trie.searches import BeamSearch, Candidates, SearchSettings
from vllm_trie.tree import TokenTree, accept_greedy

WORDS = [
    " the", "def", " self", ".items", "\n", "    ", "return", " amount", " =", " 0", ")", "(",
    " in", " for", " not", " stock", " raise", ":", " name", " +=", " 日本",
    "</script><script>window.pwned = 1</script>", "<img src=x onerror='window.pwned = 1'>",
    "&lt;b&gt;", "\u202e\u2028", "<!--", "constructor", "__proto__",
]  # fmt: skip


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def generation(method: str, num_tokens: int, mean_accepted: float, seed: int = 0) -> Trace:
    """A generation of the text that all methods share; no trees for the method "plain"."""
    chosen, shared = random.Random(seed), random.Random("text")
    text = [shared.randrange(len(WORDS)) for _ in range(num_tokens)]
    steps, done = [Step.of(TokenTree.empty(), (), text[:1], 0.05, no_draft="prefill")], 1
    while done < num_tokens:
        lucky = min(int(chosen.expovariate(1 / mean_accepted)) if mean_accepted else 0, 12)
        paths = [text[done : done + lucky]]
        for _ in range(6 if mean_accepted else 0):
            kept = paths[0][: chosen.randrange(4)]
            paths.append([*kept, *(chosen.randrange(len(WORDS)) for _ in range(3))])
        tree = TokenTree.from_paths(paths, 24)
        shares = (0.8 ** tree.depths() * 0.97 ** np.arange(tree.num_nodes)).astype(np.float32)
        tree = TokenTree(tree.token_ids, tree.parents, shares)
        target = [text[min(done + depth, num_tokens - 1)] for depth in (0, *tree.depths())]
        path = accept_greedy(tree.token_list, tree.parent_list, target)
        if mean_accepted and len(steps) % 9 == 5:
            tree, path = TokenTree.empty(), []
        tokens = text[done : done + len(path) + 1]
        seconds = 0.006 + 0.003 * chosen.random()
        steps.append(Step.of(tree, path, tokens, seconds, no_draft="budget"))
        done += len(tokens)
    header = Header.of("", method, "<b>sample", "t", [0, 1, 2], {"scoring": "x"})
    return Trace(header, steps, "complete")


def search(num_steps: int, beam_width: int = 4, num_prompt_tokens: int = 50) -> Beams:
    """A search over made-up probabilities."""
    chosen = np.random.default_rng(0)
    settings = SearchSettings(
        beam_width=beam_width, trace=True, max_new_tokens=num_steps, stop_token_ids=(3,)
    )
    made, width = BeamSearch(settings), 2 * beam_width
    while not made.done:
        rows = range(made.num_rows)
        token_ids = np.stack([chosen.choice(len(WORDS), width, replace=False) for _ in rows])
        shares = chosen.dirichlet(np.full(width, 0.5), made.num_rows) + 1e-6
        logprobs = -np.sort(-np.log(shares).astype(np.float32), axis=1)
        made.advance(Candidates.of_rows(token_ids, logprobs))
    made.hypotheses()
    assert made.trace is not None
    return Beams(made.trace, num_prompt_tokens, 16)
