"""The selection out of all rows and tokens, against the best of every row and the reference."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.beam.models import PROMPT, extended, random_model, run_search
from tests.unit.beam.reference import reference_search
from vllm_trie.searches import BeamSearch, SearchSettings, blocks
from vllm_trie.searches.blocks import BLOCK, TokenRules
from vllm_trie.searches.device_step import launch_best
from vllm_trie.searches.top_k import best_of_rows, select_best

STEP = 1 / 8
"""Of logits with ties."""


def ranked(logprobs: np.ndarray, totals: np.ndarray, count: int) -> list[tuple[int, int]]:
    """(row, token) of the best continuations: all of them sorted, by their scores and in order."""
    continuations = [
        (-float(np.float32(value + total)), row, -float(value), token)
        for row, total in enumerate(totals)
        for token, value in enumerate(logprobs[row])
        if value > -np.inf
    ]
    best = sorted(continuations)[:count]
    return sorted((row, token) for _, row, _, token in best)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).log_softmax(-1, dtype=torch.float32).numpy()


def tied_logits(random, rows: int, vocab: int, levels: int) -> np.ndarray:
    """Logits with ties, within rows and, as some rows are copies of others, between rows."""
    logits = -STEP * random.integers(levels, size=(rows, vocab)).astype(np.float32)
    return logits[random.integers(rows, size=rows)]


@given(
    rows=st.integers(1, 9),
    chunk=st.sampled_from([1, 300, 1 << 18]),
    vocab=st.sampled_from([3, BLOCK - 1, BLOCK, 2 * BLOCK, 5 * BLOCK + 7]),
    count=st.integers(1, 60),
    levels=st.sampled_from([1, 3, 40, 4000]),
    forbidden=st.sampled_from([0.0, 0.3, 0.99]),
    scale=st.sampled_from([1, 2**14]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_equals_sorting_everything(
    rows, chunk, vocab, count, levels, forbidden, scale, dtype, seed
):
    random = np.random.default_rng(seed)
    values = tied_logits(random, rows, vocab, levels)
    values[random.random(values.shape) < forbidden] = -np.inf
    # Next to great totals, different log-probabilities of a row have equal sums.
    totals = -scale * STEP * random.integers(min(levels, 30), size=rows).astype(np.float32)
    logits = torch.from_numpy(values).to(dtype)
    logprobs = log_softmax(logits.float().numpy())
    with patch.object(blocks, "_CHUNK", chunk):
        candidates = select_best(logits, totals, count)
    pairs = list(zip(candidates.rows.tolist(), candidates.token_ids.tolist(), strict=True))
    assert sorted(pairs) == ranked(logprobs, totals, count)
    assert np.array_equal(candidates.logprobs, logprobs[candidates.rows, candidates.token_ids])
    # One search next to another, whose rows are the same in another order.
    others = random.permutation(rows)
    both = torch.cat([logits[others], logits])
    other, launched = launch_best(both, [totals[others], totals], count).fetch()
    assert all(map(np.array_equal, launched, candidates))
    expected = select_best(logits[others], totals[others], count)
    assert all(map(np.array_equal, other, expected))
    # By row, best first within a row; the smaller token of two equal ones.
    keys = [(row, -logprobs[row, token], token) for row, token in pairs]
    assert keys == sorted(keys)


@given(
    rows=st.integers(1, 5),
    vocab=st.sampled_from([3, BLOCK + 1, 3 * BLOCK]),
    count=st.integers(1, 40),
    masks=st.sampled_from(["none", "one for all", "each", "too few words"]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_rules_come_before_the_choice(rows, vocab, count, masks, seed):
    random = np.random.default_rng(seed)
    logits = tied_logits(random, rows, vocab, 400)
    logprobs = log_softmax(logits)
    biased = random.permutation(vocab)[: random.integers(vocab + 1)]
    bias = STEP * random.integers(-300, 300, size=biased.size).astype(np.float32)
    bits = np.zeros((1 if masks == "one for all" else rows, -(-vocab // 32) * 32), dtype=np.uint8)
    bits[:, :vocab] = random.random((len(bits), vocab)) < 0.3
    if masks == "too few words":
        bits = bits[:, : max(32, bits.shape[1] - 32)]
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    rules = TokenRules(biased, bias, None if masks == "none" else words)
    ruled = logprobs.copy()
    ruled[:, biased] += bias
    if masks != "none":
        allowed = np.zeros(logprobs.shape, dtype=bool)
        allowed[:, : bits.shape[1]] = bits[:, :vocab]
        ruled[~allowed] = -np.inf
    totals = -STEP * random.integers(30, size=rows).astype(np.float32)

    candidates = select_best(torch.from_numpy(logits), totals, count, rules)
    pairs = list(zip(candidates.rows.tolist(), candidates.token_ids.tolist(), strict=True))
    assert sorted(pairs) == ranked(ruled, totals, count)
    assert np.array_equal(candidates.logprobs, logprobs[candidates.rows, candidates.token_ids])
    keys = [(row, -ruled[row, token], token) for row, token in pairs]
    assert keys == sorted(keys)
    (launched,) = launch_best(torch.from_numpy(logits), [totals], count, rules).fetch()
    assert all(map(np.array_equal, launched, candidates))

    candidates = best_of_rows(torch.from_numpy(logits), min(count, vocab), rules).fetch()
    token_ids, values = (
        candidates.token_ids.reshape(rows, -1),
        candidates.logprobs.reshape(rows, -1),
    )
    best = -np.sort(-ruled, axis=1)[:, : min(count, vocab)]
    assert np.array_equal(np.take_along_axis(ruled, token_ids, 1), best)
    raw = np.take_along_axis(logprobs, token_ids, 1)
    assert np.array_equal(values, np.where(best == -np.inf, -np.inf, raw))


def test_rows_with_nan_have_no_continuations():
    logits = torch.randn(3, 100)
    logits[1, 7] = torch.nan
    candidates = select_best(logits, np.zeros(3, np.float32), 250)
    assert np.bincount(candidates.rows, minlength=3).tolist() == [100, 0, 100]
    assert len(select_best(logits[1:2], np.zeros(1, np.float32), 5).rows) == 0


@given(
    search_settings=st.builds(
        SearchSettings,
        beam_width=st.integers(1, 9),
        max_new_tokens=st.integers(1, 6),
        stop_token_ids=st.sampled_from([(), (0,), (0, 3)]),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
    ),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_search_equals_the_best_of_every_row_and_the_reference(search_settings, seed, tied):
    model = random_model(seed)

    def next_logits(token_ids):
        logits = model(token_ids)
        return np.round(logits / STEP).astype(np.float32) * np.float32(STEP) if tied else logits

    def next_logprobs(token_ids):
        return log_softmax(next_logits(token_ids))

    search = BeamSearch(search_settings, PROMPT)
    assert search.takes_best_of_all
    rows: list[list[int]] = [[]]
    while not search.done:
        logits = torch.from_numpy(np.stack([next_logits(row) for row in rows]))
        candidates = select_best(logits, search.totals, search_settings.num_candidates)
        rows = extended(rows, search.advance(candidates))
    hypotheses = search.hypotheses()
    assert [(hypothesis.token_ids, hypothesis.places.tolist()) for hypothesis in hypotheses] == [
        (hypothesis.token_ids, hypothesis.places.tolist())
        for hypothesis in run_search(next_logprobs, search_settings).hypotheses()
    ]
    expected = reference_search(next_logprobs, search_settings, PROMPT)
    assert [(hypothesis.token_ids, hypothesis.score) for hypothesis in hypotheses] == [
        tuple(hypothesis) for hypothesis in expected
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 2, "stop_token_ids": (0,)},
        {"repetition_penalty": 1.2},
        {"bad_words": ((3,),)},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True},
        {"num_beam_groups": 2},
    ],
)
def test_rules_need_the_best_of_every_row(options):
    assert not BeamSearch(SearchSettings(4, 5, **options)).takes_best_of_all
