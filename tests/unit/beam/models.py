"""Random language models, and a loop that drives a search on them."""

from __future__ import annotations

import numpy as np

from vllm_trie.searches import BeamSearch, Candidates

VOCAB = 12
PROMPT = (1, 2, 2, 5)


def random_model(seed, peaked=1.5, vocab=VOCAB):
    """A model: from generated tokens to log-probabilities, the same for the same tokens."""

    def next_logprobs(token_ids):
        random = np.random.default_rng([seed, len(token_ids), *token_ids])
        logits = random.normal(scale=peaked, size=vocab)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    return next_logprobs


def run_search(next_logprobs, search_settings, prompt=PROMPT, find_stop_string=None, vocab=VOCAB):
    """Drive a BeamSearch as a scheduler does: best raw candidates of every row, step by step."""
    search = BeamSearch(search_settings, prompt, find_stop_string)
    bias = np.zeros(vocab, dtype=np.float32)
    for token, value in search_settings.logit_bias:
        bias[token] = value
    rows = [[]]
    while not search.done:
        assert search.num_rows == len(rows)
        count = search.num_raw_candidates(vocab)
        logprobs = np.stack([next_logprobs(row) for row in rows])
        token_ids = np.argsort(-(logprobs + bias), axis=1, kind="stable")[:, :count]
        logprobs = np.take_along_axis(logprobs, token_ids, 1)
        rows = extended(rows, search.advance(Candidates.of_rows(token_ids, logprobs)))
        assert rows == search.generated.tolist()
    return search


def extended(rows, children):
    """The tokens of the rows of the next step."""
    pairs = zip(children.parents.tolist(), children.token_ids.tolist(), strict=True)
    return [[*rows[parent], token_id] for parent, token_id in pairs]


def tokens_of(hypotheses):
    return [hypothesis.token_ids for hypothesis in hypotheses]


def scores_of(hypotheses):
    return [hypothesis.score for hypothesis in hypotheses]
