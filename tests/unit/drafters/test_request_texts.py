"""Indexes of running requests: shared prompts, bounded work, bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from tests.unit.drafters.support import end, make_context
from vllm_trie.drafts import DraftRequest, request_texts
from vllm_trie.drafts.ngram_trie.drafter import BLEND, NgramTrieDrafter
from vllm_trie.drafts.ngram_trie.options import NgramTrieOptions
from vllm_trie.drafts.ngrams import NativeBackend
from vllm_trie.drafts.request_texts import RequestTexts
from vllm_trie.tree import TokenTree


def make_request(
    request_id: str, prompt: Sequence[int], output: Sequence[int] = (), sample_of: str | None = None
) -> DraftRequest:
    text = np.array([*prompt, *output], dtype=np.int32)
    return DraftRequest(request_id, text, len(prompt), 16, 16, sample_of=sample_of)


def shape(tree: TokenTree) -> tuple[list[int], list[int], list[float]]:
    probabilities = [] if tree.probabilities is None else tree.probabilities.tolist()
    return tree.token_ids.tolist(), tree.parents.tolist(), probabilities


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 60),
)
def test_twins_agree_on_samples_that_come_and_go(prompt, events, is_sample, max_order, step_tokens):
    """Each event gives one of five requests a token, or ends it where the token is 4."""
    options = NgramTrieOptions(max_context_len=max_order, store_tokens=0, recycle=False)
    drafters = [
        NgramTrieDrafter(options, make_context(), backend(BLEND))
        for backend in (NativeBackend, PythonBackend)
    ]
    outputs: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_texts, "STEP_TOKENS", step_tokens)
        for number, token in events:
            if token == 4 and number in outputs:
                del outputs[number]
                for drafter in drafters:
                    end(drafter, f"{number}")
                continue
            outputs.setdefault(number, []).append(token)
            requests = [
                make_request(f"{n}", prompt, output, "parent" if is_sample else None)
                for n, output in outputs.items()
            ]
            compiled, readable = (drafter.propose(requests) for drafter in drafters)
            assert list(map(shape, compiled)) == list(map(shape, readable))
            for drafter in drafters:
                longest = sum(len(output) for output in outputs.values())
                count = 1 if is_sample else len(outputs)
                assert drafter._texts.num_tokens <= count * len(prompt) + longest
    for drafter in drafters:
        for number in outputs:
            end(drafter, f"{number}")
        assert drafter._texts.num_tokens == 0
        assert not drafter._texts._prompts


def test_equal_ids_do_not_share_different_prompts():
    texts = RequestTexts(NativeBackend(BLEND), 4, 1000)
    one, other = texts.update(
        [make_request("0_x", [1, 2, 3], [], "x"), make_request("1_x", [1, 2, 4], [], "x")]
    )
    assert one.own is not other.own
    salted = make_request("2_x", [1, 2, 3], [], "x")
    salted.cache_salt = "tenant"
    assert texts.update([salted])[0].own is not one.own


def test_long_prompts_take_several_steps_and_short_ones_do_not_wait(monkeypatch):
    monkeypatch.setattr(request_texts, "STEP_TOKENS", 100)
    texts = RequestTexts(NativeBackend(BLEND), 4, 10_000)
    long = make_request("long", list(range(250)))
    short = make_request("short", list(range(40)))
    sizes = []
    for _ in range(4):
        indexed = texts.update([long, short])
        assert indexed[1].num_indexed in (40, 0)  # at once, and then nothing is new
        sizes.append(texts.num_tokens)
    assert sizes == [100, 200, 290, 290]


def test_text_beyond_the_limit_is_not_indexed():
    texts = RequestTexts(NativeBackend(BLEND), 4, max_tokens=50)
    texts.update([make_request("a", list(range(30)))])
    texts.update([make_request("b", list(range(30)))])
    assert texts.num_tokens == 50
    texts.release("a")
    assert texts.num_tokens == 20
    (whole,) = texts.update([make_request("b", list(range(30)))])
    assert whole.num_indexed > 0
    assert texts.num_tokens == 30
    texts.release("b")
    texts.update([make_request("0_x", list(range(40)), list(range(30)), "x")])
    assert texts.num_tokens == 50


def test_texts_go_on_from_their_ends_where_they_are_indexed_and_there_is_room():
    texts = RequestTexts(NativeBackend(BLEND), 4, max_tokens=20)
    request = make_request("a", [1, 2, 3, 4], [5])
    assert texts.ends([request], 1) is None
    texts.update([request])
    [end] = texts.ends([request], 15)
    assert (end.first, end.tokens.tolist(), end.num_indexed) == (1, [2, 3, 4, 5], 4)
    assert texts.ends([request], 16) is None
    assert texts.ends([make_request("a", [1, 2, 3, 4], [6])], 1) is None, "another text"
