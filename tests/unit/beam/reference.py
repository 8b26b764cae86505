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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.searches.settings import SearchSettings


class ReferenceHypothesis(NamedTuple):
    """Generated tokens and length-normalized score."""

    token_ids: list[int]
    score: float


class _Running(NamedTuple):
    token_ids: list[int]
    total: np.float32
    complete: bool = False


def reference_search(
    next_logprobs: Callable[[list[int]], np.ndarray],
    settings: SearchSettings,
    prompt_token_ids: Sequence[int] = (),
    find_stop_string: Callable[[list[int]], str | None] = lambda token_ids: None,
    outcome: Callable[[list[int]], tuple[bool, bool]] | None = None,
    added: Callable[[list[int]], float] = lambda token_ids: 0.0,
) -> list[ReferenceHypothesis]:
    """Return the finished hypotheses, best first; no sampling.

    Args:
        next_logprobs: From generated tokens to float32[vocabulary], log-probabilities of the next.
        settings: The search; ``do_sample`` must be False.
        prompt_token_ids: Tokens for the repetition penalty.
        find_stop_string: Returns the stop string that the last token completes, if any.
        outcome: Returns whether generated tokens are complete, and whether they can go on. None:
            stop tokens and the length decide.
        added: With `outcome`, returns what completing a hypothesis adds to its sum; at most
            ``settings.most_added``.

    Raises:
        ValueError: ``do_sample`` is True: a random search has no reference result.
    """
    if settings.do_sample:
        raise ValueError("do_sample must be False for the reference search")
    width = settings.group_width
    running = [[_Running([], np.float32(0))] for _ in range(settings.num_beam_groups)]
    finished: list[list[ReferenceHypothesis]] = [[] for _ in range(settings.num_beam_groups)]

    for length in range(1, settings.max_new_tokens + 1):
        taken: list[int] = []  # by earlier groups in this step
        for group in range(settings.num_beam_groups):
            # 1. Every continuation of every running hypothesis, best first.
            everything: list[_Running] = []
            for beam in running[group]:
                logprobs = next_logprobs(beam.token_ids).copy()
                for token in range(len(logprobs)):
                    logprobs[token] = after_rules(
                        token, logprobs[token], settings, list(prompt_token_ids), beam.token_ids
                    )
                for token in taken:
                    logprobs[token] -= np.float32(settings.diversity_penalty)
                everything += _continuations(beam, logprobs)
            if outcome is not None:
                everything = list(_split(everything, outcome, added))
            everything.sort(key=lambda beam: -beam.total)

            # 2. The best of them go on or end; one that ends counts only among the best `width`.
            last = length == settings.max_new_tokens
            looked_at = everything[: settings.num_candidates if outcome is None else None]
            survivors = []
            for rank, beam in enumerate(looked_at):
                if outcome is None:
                    stop_string = length > settings.min_tokens and find_stop_string(beam.token_ids)
                    stops = beam.token_ids[-1] in settings.stop_token_ids or stop_string
                    ends = bool(stops) or last
                else:
                    ends = beam.complete
                if not ends and not last:
                    survivors.append(beam)
                if ends and rank < width:
                    score = _score(settings, beam.total, length)
                    finished[group].append(ReferenceHypothesis(beam.token_ids, float(score)))
            finished[group].sort(key=lambda beam: -beam.score)
            del finished[group][width:]

            # 3. A group is over when no running hypothesis can beat its finished ones.
            running[group] = survivors[:width]
            full = len(finished[group]) == width
            if full and survivors and _closed(settings, survivors[0], finished[group][-1]):
                running[group] = []
            taken += [beam.token_ids[-1] for beam in running[group]]
        if not any(running):
            break

    return sorted((beam for group in finished for beam in group), key=lambda beam: -beam.score)


def after_rules(
    token: int,
    logprob: np.float32,
    settings: SearchSettings,
    prompt: list[int],
    generated: list[int],
) -> np.float32:
    """Return a token's log-probability after bias, penalties and prohibitions, as vLLM has them."""
    logprob += np.float32(dict(settings.logit_bias).get(token, 0.0))
    if token in prompt + generated:
        factor = np.float32(settings.repetition_penalty)
        logprob *= factor if logprob < 0 else 1 / factor
    logprob -= np.float32(settings.frequency_penalty) * np.float32(generated.count(token))
    if token in generated:
        logprob -= np.float32(settings.presence_penalty)

    text, size = [*prompt, *generated, token], settings.no_repeat_ngram_size
    earlier = [text[start : start + size] for start in range(len(text) - size)]
    if (
        (token in settings.stop_token_ids and len(generated) < settings.min_tokens)
        or any([*generated, token][-len(word) :] == list(word) for word in settings.bad_words)
        or (size and text[-size:] in earlier)
    ):
        return np.float32(-np.inf)
    return logprob


def _continuations(hypothesis: _Running, logprobs: np.ndarray) -> Iterator[_Running]:
    for token, logprob in enumerate(logprobs):
        if logprob > -np.inf:
            yield _Running([*hypothesis.token_ids, token], np.float32(hypothesis.total + logprob))


def _split(
    everything: list[_Running],
    outcome: Callable[[list[int]], tuple[bool, bool]],
    added: Callable[[list[int]], float],
) -> Iterator[_Running]:
    """Yield a candidate that ends and a candidate that goes on for each that does both."""
    for beam in everything:
        ends, continues = outcome(beam.token_ids)
        if ends:
            total = np.float32(beam.total + np.float32(added(beam.token_ids)))
            yield _Running(beam.token_ids, total, complete=True)
        if continues:
            yield beam


def _score(settings: SearchSettings, total: np.float32, length: int) -> np.float32:
    return np.float32(total / np.float32(length**settings.length_penalty))


def _closed(settings: SearchSettings, best: _Running, worst: ReferenceHypothesis) -> bool:
    """Return whether `best`, which runs, cannot take the place of `worst`, which has finished."""
    if settings.early_stopping is True or settings.beam_width == 1:
        return True
    longest = settings.early_stopping == "never" and settings.length_penalty > 0
    length = settings.max_new_tokens if longest else len(best.token_ids)
    return not _score(settings, best.total + np.float32(settings.most_added), length) > worst.score
