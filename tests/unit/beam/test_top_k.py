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
from vllm_trie.searches.blocks import BLOCK, TokenRules, bits_of
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


def random_rules(random, masks: str, rows: int, logprobs: np.ndarray) -> TokenRules:
    """Rules of random tokens, which are applied to `logprobs`."""
    vocab = logprobs.shape[1]
    biased = random.permutation(vocab)[: random.integers(vocab + 1)]
    bias = STEP * random.integers(-300, 300, size=biased.size).astype(np.float32)
    logprobs[:, biased] += bias
    if masks == "none":
        return TokenRules(biased, bias, None)
    bits = np.zeros((1 if masks == "one for all" else rows, -(-vocab // 32) * 32), dtype=np.uint8)
    bits[:, :vocab] = random.random((len(bits), vocab)) < 0.3
    if masks == "too few words":
        bits = bits[:, : max(32, bits.shape[1] - 32)]
    allowed = np.zeros(logprobs.shape, dtype=bool)
    allowed[:, : bits.shape[1]] = bits[:, :vocab]
    logprobs[~allowed] = -np.inf
    return TokenRules(biased, bias, np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@given(
    rows=st.integers(1, 9),
    chunk=st.sampled_from([1, 300, 1 << 18]),
    vocab=st.sampled_from([3, BLOCK - 1, BLOCK, 2 * BLOCK, 5 * BLOCK + 7]),
    count=st.integers(1, 60),
    levels=st.sampled_from([1, 3, 40, 4000]),
    forbidden=st.sampled_from([0.0, 0.3, 0.99]),
    scale=st.sampled_from([1, 2**14]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    masks=st.sampled_from(["no rules"] * 4 + ["none", "one for all", "each", "too few words"]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_equals_sorting_everything(
    rows, chunk, vocab, count, levels, forbidden, scale, dtype, masks, seed
):
    random = np.random.default_rng(seed)
    values = tied_logits(random, rows, vocab, levels)
    values[random.random(values.shape) < forbidden] = -np.inf
    # Next to great totals, different log-probabilities of a row have equal sums.
    totals = -scale * STEP * random.integers(min(levels, 30), size=rows).astype(np.float32)
    logits = torch.from_numpy(values).to(dtype)
    logprobs = log_softmax(logits.float().numpy())
    ruled = logprobs.copy()
    rules = None if masks == "no rules" else random_rules(random, masks, rows, ruled)
    with patch.object(blocks, "_CHUNK", chunk):
        candidates = select_best(logits, totals, count, rules)
    pairs = list(zip(candidates.rows.tolist(), candidates.token_ids.tolist(), strict=True))
    assert sorted(pairs) == ranked(ruled, totals, count)
    assert np.array_equal(candidates.logprobs, logprobs[candidates.rows, candidates.token_ids])
    # By row, best first within a row; the smaller token of two equal ones.
    keys = [(row, -ruled[row, token], token) for row, token in pairs]
    assert keys == sorted(keys)
    if rules is None:
        # One search next to another, whose rows are the same in another order.
        others = random.permutation(rows)
        both = torch.cat([logits[others], logits])
        other, launched = launch_best(both, [totals[others], totals], count).fetch()
        expected = select_best(logits[others], totals[others], count)
        assert all(map(np.array_equal, other, expected))
    else:
        (launched,) = launch_best(logits, [totals], count, rules).fetch()
    assert all(map(np.array_equal, launched, candidates))

    of_rows = best_of_rows(logits, min(count, vocab), rules).fetch()
    sound = ~np.isnan(logprobs).any(axis=1)  # a row may have no token
    token_ids = of_rows.token_ids.reshape(rows, -1)[sound]
    best = -np.sort(-ruled[sound], axis=1)[:, :count]
    assert np.array_equal(np.take_along_axis(ruled[sound], token_ids, 1), best)
    raw = np.take_along_axis(logprobs[sound], token_ids, 1)
    raw[best == -np.inf] = -np.inf
    assert np.array_equal(of_rows.logprobs.reshape(rows, -1)[sound], raw)


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
    ("options", "of_all", "draws"),
    [
        ({}, True, False),
        ({"stop_token_ids": (0,), "min_tokens": 2}, False, False),
        ({"repetition_penalty": 1.2}, False, False),
        ({"bad_words": ((3,),)}, False, False),
        ({"no_repeat_ngram_size": 2}, False, False),
        ({"num_beam_groups": 2}, False, False),
        ({"do_sample": True}, False, True),
        ({"do_sample": True, "top_k": 5}, False, False),
        ({"do_sample": True, "top_p": 0.9}, False, False),
        ({"do_sample": True, "min_tokens": 1}, False, False),
        ({"do_sample": True, "bad_words": ((3,),)}, False, False),
    ],
)
def test_who_chooses_out_of_all_rows_together(options, of_all, draws):
    search = BeamSearch(SearchSettings(4, 5, **options))
    assert search.takes_best_of_all == of_all
    assert (search.draws(0) is not None) == draws


@pytest.mark.parametrize("masks", ["one for all", "each", "too few words"])
@pytest.mark.parametrize("vocab", [3, 160, 250])
def test_rules_on_a_device(monkeypatch, masks, vocab):
    random = np.random.default_rng(0)
    logprobs = torch.from_numpy(random.random((4, vocab), dtype=np.float32))
    rules = random_rules(random, masks, 4, logprobs.numpy().copy())
    expected = rules.apply(logprobs)
    monkeypatch.setattr(blocks, "_unpacked", lambda o, device: bits_of(torch.from_numpy(o)))
    assert torch.equal(rules.apply(logprobs), expected)
