"""Where the tokens of drafts occur in the text before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_trie.extras.traces.trace_file import Trace

PROMPT, OUTPUT, ELSEWHERE = "p", "o", "e"
_LENGTHS = (4, 3, 2)  # of the n-grams that are looked for, longest first


def origins(trace: Trace) -> Iterator[str]:
    """Yield a letter for each node of each step: where its n-gram occurs before the step.

    The n-gram is the node with up to three tokens before it. The longest one that occurs decides,
    in the prompt before the output. `ELSEWHERE` stands for nodes whose last two tokens occur in
    neither: they come from other requests, a corpus or a model. Costs a traced request nothing, as
    only the page looks.
    """
    text = list(trace.header.prompt)
    in_prompt = {
        ngram for end in range(1, len(text) + 1) for ngram in _ngrams(text[max(0, end - 4) : end])
    }
    in_output: set[tuple[int, ...]] = set()
    for step in trace.steps:
        # The last tokens before and at each node.
        paths: list[list[int]] = []
        letters = ""
        for token, parent in zip(step.nodes, step.parents, strict=True):
            paths.append([*(text if parent < 0 else paths[parent])[-3:], token])
            letters += _origin(paths[-1], in_prompt, in_output)
        yield letters
        for token in step.tokens:
            text.append(token)
            in_output.update(_ngrams(text[-4:]))


def _ngrams(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the n-grams that end with the last of some tokens, longest first."""
    for length in _LENGTHS:
        if length <= len(tokens):
            yield tuple(tokens[-length:])


def _origin(
    tokens: Sequence[int], in_prompt: set[tuple[int, ...]], in_output: set[tuple[int, ...]]
) -> str:
    for ngram in _ngrams(tokens):
        if ngram in in_prompt:
            return PROMPT
        if ngram in in_output:
            return OUTPUT
    return ELSEWHERE
