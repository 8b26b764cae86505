"""The gain of a corpus on answers that it does not hold."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.drafts.ngrams.native import MAX_ORDER, NativeArchive
from vllm_trie.extras.corpus.corpus_file import open_corpus, write_corpus
from vllm_trie.lab.corpus.answers_file import Answer
from vllm_trie.lab.corpus.prompt_format import PromptFormat

HELD_OUT_EVERY = 10
NODES = 32


class Gain(NamedTuple):
    """Tokens per step on held-out answers."""

    num_answers: int
    without: float
    with_corpus: float


def measure(answers: Sequence[Answer], prompts: PromptFormat, vocab_size: int) -> Gain | None:
    """Replay every tenth answer with a corpus of the others and without one; None if there are not
    enough answers."""
    held_out = answers[::HELD_OUT_EVERY]
    others = [answer for i, answer in enumerate(answers) if i % HELD_OUT_EVERY]
    if not others:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "others"
        write_corpus(path, [answer.tokens for answer in others], vocab_size, "")
        corpus = open_corpus(path)
        texts = [
            (np.array(prompts.answer_prompt(answer.question), dtype=np.int32), answer.tokens)
            for answer in held_out
        ]
        without = tokens_per_step(texts, None)
        with_corpus = tokens_per_step(texts, corpus)
    return Gain(len(held_out), without, with_corpus)


def tokens_per_step(
    texts: Sequence[tuple[np.ndarray, np.ndarray]], corpus: NativeArchive | None
) -> float:
    """Return the tokens after each answer's first that a verified tree of 32 nodes yields.

    Args:
        texts: int32 tokens of prompt and answer.
        corpus: Drafted from next to the request's own text.
    """
    backend = NativeBackend(BLEND)
    num_tokens = num_steps = 0
    for prompt, answer in texts:
        index = backend.new_index(MAX_ORDER)
        text = np.concatenate((prompt, answer))
        position = len(prompt) + 1
        num_tokens += len(answer) - 1
        while position < len(text):
            job = Job(index, None, corpus, text[:position], position, NODES, NODES, False)
            [draft] = backend.draft_batch([job])
            position += 1 + len(draft.tree.path_of(text[position:].tolist()))
            num_steps += 1
    return num_tokens / max(1, num_steps)
