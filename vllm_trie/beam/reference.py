"""Beam search written to be read: the oracle of the property tests.

>>> import numpy as np
>>> def bigram(tokens):  # "a" or "b" may follow "a"; only the end may follow "b"
...     after = {0: [0.5, 0.4, 0.1], 1: [1e-9, 1e-9, 1.0]}
...     return np.log(np.array(after[tokens[-1] if tokens else 0], dtype=np.float32))
>>> settings = SearchSettings(beam_width=2, max_new_tokens=3, stop_token_ids=(2,))
>>> [hypothesis.token_ids for hypothesis in reference_search(bigram, settings)]
[[1, 2], [0, 1, 2]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.beam.candidates import CandidateRules
from vllm_trie.beam.settings import SearchSettings


class ReferenceHypothesis(NamedTuple):
    """Generated tokens and length-normalized score."""

    token_ids: list[int]
    score: float


class _Running(NamedTuple):
    token_ids: list[int]
    total: np.float32


def reference_search(
    next_logprobs: Callable[[list[int]], np.ndarray],
    settings: SearchSettings,
    prompt_token_ids: Sequence[int] = (),
    find_stop_string: Callable[[list[int]], str | None] = lambda token_ids: None,
) -> list[ReferenceHypothesis]:
    """The finished hypotheses, best first; no sampling.

    Args:
        next_logprobs: From generated tokens to float32[vocabulary], log-probabilities of the next.
        settings: The search; ``do_sample`` must be False.
        prompt_token_ids: For the repetition penalty.
        find_stop_string: Tells whether the last token completes a stop string.

    Raises:
        ValueError: ``do_sample`` is True: a random search has no reference result.
    """
    if settings.do_sample:
        raise ValueError("do_sample must be False for the reference search")
    rules = CandidateRules(settings, prompt_token_ids)
    width = settings.group_width
    running = [[_Running([], np.float32(0))] for _ in range(settings.num_beam_groups)]
    finished: list[list[ReferenceHypothesis]] = [[] for _ in range(settings.num_beam_groups)]

    for length in range(1, settings.max_new_tokens + 1):
        taken: list[int] = []  # by earlier groups in this step
        for group in range(settings.num_beam_groups):
            # 1. Every continuation of every running hypothesis.
            everything: list[_Running] = []
            for hypothesis in running[group]:
                logprobs = next_logprobs(hypothesis.token_ids)
                vocabulary = np.arange(len(logprobs))
                logprobs = rules.apply(vocabulary, logprobs, hypothesis.token_ids)
                for token in taken:
                    logprobs[token] -= np.float32(settings.diversity_penalty)
                for token in vocabulary.tolist():
                    total = np.float32(hypothesis.total + logprobs[token])
                    if total > -np.inf:
                        everything.append(_Running([*hypothesis.token_ids, token], total))
            everything.sort(key=lambda each: -each.total)

            # 2. The best of them go on or end; one that ends counts only among the best `width`.
            survivors = []
            for rank, each in enumerate(everything[: settings.num_candidates]):
                ends = (
                    each.token_ids[-1] in settings.stop_token_ids
                    or length == settings.max_new_tokens
                    or (length > settings.min_tokens and find_stop_string(each.token_ids))
                )
                if not ends:
                    survivors.append(each)
                elif rank < width:
                    score = each.total / np.float32(length**settings.length_penalty)
                    finished[group].append(ReferenceHypothesis(each.token_ids, float(score)))
            finished[group].sort(key=lambda each: -each.score)
            finished[group] = finished[group][:width]
            running[group] = survivors[:width]
            taken += [each.token_ids[-1] for each in running[group]]

            # 3. A group is over when its finished hypotheses cannot be beaten any more.
            if running[group] and len(finished[group]) == width:
                attainable_length = length
                if settings.early_stopping == "never" and settings.length_penalty > 0:
                    attainable_length = settings.max_new_tokens
                attainable = running[group][0].total / np.float32(
                    attainable_length**settings.length_penalty
                )
                if (
                    settings.early_stopping is True
                    or settings.beam_width == 1
                    or not attainable > finished[group][-1].score
                ):
                    taken = taken[: len(taken) - len(running[group])]
                    running[group] = []
        if not any(running):
            break

    merged = [hypothesis for group in finished for hypothesis in group]
    return sorted(merged, key=lambda each: -each.score)
