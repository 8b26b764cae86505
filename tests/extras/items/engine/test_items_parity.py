"""Wide searches in large catalogues: Hugging Face's hypotheses, and nothing but items.

The suite runs a small version. A catalogue of a million items at width 400, which takes minutes:

    ITEMS_PARITY=1000000,400 ITEMS_ANSWERS=100000 \
        python -m pytest tests/extras/items/engine/test_items_parity.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.engine.beam.cases import prompt
from tests.engine.beam.oracle import constrained_search
from tests.engine.conftest import scheduler_of
from vllm_trie.extras.items import build_items, read_items
from vllm_trie.lab.tiny_model import model_path

NUM_ITEMS, WIDTH = map(int, os.environ.get("ITEMS_PARITY", "20000,50").split(","))
NUM_ANSWERS = int(os.environ.get("ITEMS_ANSWERS", "600"))
EOS = 0
CODES = 64
"""Tokens of each level: many items share beginnings."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + NUM_ITEMS // 500 + NUM_ANSWERS // 50)]


class Catalogue(NamedTuple):
    """Items as sorted rows, and none of the code under test.

    Attributes:
        rows: int32[items, width], -1 behind the last token; the row number is the id.
    """

    rows: np.ndarray

    def allowed(self, path: tuple[int, ...], eos: int | None) -> list[int]:
        """Return the tokens that may follow."""
        begin, end = 0, len(self.rows)
        for depth, token in enumerate(path):
            column = self.rows[begin:end, depth]
            begin, end = begin + np.searchsorted(column, [token, token + 1])
        if begin == end or len(path) == self.rows.shape[1]:
            return [eos] if begin < end and eos is not None else []
        tokens = np.unique(self.rows[begin:end, len(path)]).tolist()
        if tokens[0] < 0:
            tokens[0:1] = [] if eos is None else [eos]
        return tokens

    def tokens(self, number: int) -> list[int]:
        return [token for token in self.rows[number].tolist() if token >= 0]


def make(seed: int, low: int, high: int) -> Catalogue:
    rng = np.random.default_rng(seed)
    count = NUM_ITEMS + NUM_ITEMS // 2
    rows = 1 + rng.integers(CODES, size=(count, high)) + CODES * np.arange(high)
    rows[np.arange(high) >= rng.integers(low, high + 1, size=count)[:, None]] = -1
    rows = np.unique(rows.astype(np.int32), axis=0)
    chosen = np.sort(rng.choice(len(rows), NUM_ITEMS, replace=False))
    return Catalogue(rows[chosen])


@pytest.fixture(scope="module")
def catalogues():
    return {"equal": make(1, 5, 5), "mixed": make(2, 3, 8)}


@pytest.fixture(scope="module")
def paths(catalogues, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("catalogues")
    for name, catalogue in catalogues.items():
        np.save(folder / f"{name}.npy", catalogue.rows)
        build_items(folder / name, read_items(folder / f"{name}.npy"))
    return {name: str(folder / name) for name in catalogues}


def start(engine, paths, num_blocks):
    return engine(
        max_num_seqs=2 * WIDTH + 16,
        max_model_len=512,
        block_size=32,
        max_num_batched_tokens=2 * WIDTH + 48,  # prompts come in chunks
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=num_blocks,
        additional_config={"vllm_trie": {"items": paths}},
    )


def params(width: int, name: str, items_end: str):
    from vllm import SamplingParams

    extra_args = {"beam_width": width, "items": name, "items_end": items_end}
    return SamplingParams(
        n=width, temperature=0.0, max_tokens=16, detokenize=False, extra_args=extra_args
    )


def test_equals_hugging_face_at_large_sizes(engine, paths, catalogues):
    """Two wide searches with ordinary requests, chunks of prompts and preempted rows."""
    from vllm import SamplingParams

    cases = [(prompt(7, 200), "equal", "complete"), (prompt(8, 160), "mixed", "eos")]
    ordinary = [{"prompt_token_ids": list(prompt(30 + i, 60 + 10 * i))} for i in range(10)]
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    # Little more than one search needs: rows and ordinary requests take blocks from one another.
    llm = start(engine, paths, WIDTH + 40)
    alone = llm.generate(ordinary, greedy, use_tqdm=False)
    results = llm.generate(
        ordinary + [{"prompt_token_ids": list(case[0])} for case in cases],
        [greedy] * len(ordinary) + [params(WIDTH, *case[1:]) for case in cases],
        use_tqdm=False,
    )
    assert scheduler_of(llm).beam_counters.beams_preempted
    for before, after in zip(alone, results, strict=False):
        assert list(before.outputs[0].token_ids) == list(after.outputs[0].token_ids)
    for (token_ids, name, items_end), result in zip(cases, results[len(ordinary) :], strict=True):
        catalogue = catalogues[name]
        eos = EOS if items_end == "eos" else None
        longest = catalogue.rows.shape[1] + (eos is not None)
        expected = constrained_search(
            str(model_path()), token_ids, WIDTH, longest,
            lambda path, c=catalogue, e=eos: c.allowed(path, e), eos,
        )  # fmt: skip
        assert len(expected) == WIDTH
        assert [list(output.token_ids) for output in result.outputs] == [
            e.token_ids for e in expected
        ]
        scores = [output.score for output in result.outputs]
        assert scores == pytest.approx([hypothesis.score for hypothesis in expected], abs=1e-4)


def test_every_answer_is_an_item(engine, paths, catalogues):
    llm = start(engine, paths, None)
    rng = np.random.default_rng(3)
    left = NUM_ANSWERS
    while left > 0:
        kinds = [("equal", "complete"), ("mixed", "eos"), ("mixed", "complete")] * 2
        prompts = [
            {"prompt_token_ids": rng.integers(1, 2047, size=rng.integers(5, 120)).tolist()}
            for _ in kinds
        ]
        results = llm.generate(prompts, [params(WIDTH, *kind) for kind in kinds], use_tqdm=False)
        for (name, items_end), result in zip(kinds, results, strict=True):
            tokens_of = {output.item: list(output.token_ids) for output in result.outputs}
            assert len(tokens_of) == WIDTH
            left -= WIDTH
            for number, tokens in tokens_of.items():
                end = [EOS] if items_end == "eos" else []
                assert tokens == catalogues[name].tokens(number) + end
