"""Predictions in engines: samples keep their distribution, and searches ignore them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from vllm import SamplingParams

from tests.engine.beam.cases import prompt
from tests.engine.compare import accepted_tokens, chi_square_p_value, generate, speculation
from tests.engine.prompts import tokenizer


def test_unseeded_distribution(engine):
    """Two tokens sampled through a likely output that each request predicts: chi-square against
    plain sampling."""
    source = tokenizer().encode("def main(argv):\n    ")
    llm = engine(**speculation("ngram_trie", 32), max_num_seqs=256)
    plain = engine(max_num_seqs=256)
    batch = [{"prompt_token_ids": source}] * 256
    params = SamplingParams(temperature=1.8, top_k=6, max_tokens=3, ignore_eos=True)

    def sample(where, predictions):
        some = [params.clone() for _ in batch]
        for one, prediction in zip(some, predictions, strict=False):
            one.extra_args = {"prediction": prediction}
        outputs = [o for _ in range(8) for o in generate(where, batch, some)]
        return Counter(tuple(o.outputs[0].token_ids) for o in outputs)

    reference = sample(plain, ())
    likely = [list(o) for o, _ in reference.most_common(4)]
    before = accepted_tokens(llm)
    drawn = sample(llm, itertools.cycle(likely))
    assert accepted_tokens(llm) - before > 200
    assert chi_square_p_value(reference, drawn) > 1e-4


def searching(**options):
    extra_args = {"beam_width": 4, **options}
    return SamplingParams(n=4, temperature=0.0, max_tokens=12, extra_args=extra_args)


def test_a_search_ignores_a_prediction(engine):
    llm = engine(block_size=32, max_model_len=512, max_num_seqs=64)
    source = {"prompt_token_ids": list(prompt(5, 40))}
    given = (searching(), searching(prediction=[5, 6, 7] * 9))
    plain, predicted = llm.generate([source] * 2, given, use_tqdm=False)
    assert [o.token_ids for o in predicted.outputs] == [o.token_ids for o in plain.outputs]
    assert not hasattr(predicted.outputs[0], "accepted_prediction_tokens")
    for wrong, shown in ((5, "5"), (b"abc", "b'abc'"), ("\ud800", r"'\\ud800'")):
        with pytest.raises(ValueError, match=f"prediction: got {shown}, allowed is .*text"):
            llm.generate([source], searching(prediction=wrong), use_tqdm=False)
