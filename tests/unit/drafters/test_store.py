from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.ngrams.backend import PythonBackend
from tests.unit.drafters.support import end, make_drafter, make_request
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngram_trie.store import TEXT_TOKENS, RequestStore, prompt_print
from vllm_trie.drafts.ngrams import NativeBackend

QUESTION = [1, 2, 3]
ANSWER = [10, 11, 12, 13, 14]


def add(store: RequestStore, salt: str | None, token_ids: np.ndarray, prompt: bytes = b"") -> None:
    store.add(salt, token_ids, prompt)
    store.take_in(1 << 30)


def answered(store_tokens: int = 1000, salt: str | None = None) -> object:
    """A drafter after two requests that said ANSWER."""
    drafter = make_drafter(store_tokens=store_tokens)
    for name in ("first", "second"):
        request = make_request(QUESTION + ANSWER, name, num_prompt_tokens=3, cache_salt=salt)
        drafter.propose([request])
        end(drafter, request)
    return drafter


def drafted(drafter: object, salt: str | None = None) -> list[int]:
    request = make_request([5, 10, 11], "third", num_prompt_tokens=1, cache_salt=salt)
    [tree] = drafter.propose([request])
    return tree.chain().token_ids.tolist()


def test_finished_outputs_are_drafted_from():
    assert drafted(answered())[:3] == [12, 13, 14]


def test_an_answer_that_repeats_at_length_is_expected_to_go_on():
    drafter = make_drafter(store_tokens=1000)
    answer = list(range(10, 50))
    end(drafter, make_request(QUESTION + answer, "first", num_prompt_tokens=3))

    def last_probability(num_repeated: int) -> float:
        text = [5, *answer[:num_repeated]]
        request = make_request(text, f"after {num_repeated}", num_prompt_tokens=1, chain_only=True)
        chain = drafter.propose([request])[0]
        assert chain.token_ids[:8].tolist() == answer[num_repeated : num_repeated + 8]
        return float(chain.probabilities[7])

    assert last_probability(8) > 0.5 > last_probability(4)


def test_the_whole_output_is_stored_whatever_was_drafted_before():
    drafter = make_drafter(store_tokens=1000)
    for num_seen in (0, 2):  # before the first draft, and while drafting paused
        whole = make_request(QUESTION + ANSWER, str(num_seen), num_prompt_tokens=3)
        if num_seen:
            seen = whole.token_ids[: 3 + num_seen]
            drafter.propose([make_request(seen, str(num_seen), num_prompt_tokens=3)])
        end(drafter, whole)
        whole.token_ids[:] = 0  # the engine's own array
    assert [text.token_ids.tolist() for text in drafter.store.texts()] == [ANSWER] * 2


def test_the_store_can_be_switched_off():
    assert drafted(answered(store_tokens=0))[:1] != [12]


@pytest.mark.parametrize(("first", "second"), [(None, "b"), ("a", None), ("a", "b")])
def test_requests_with_another_salt_learn_nothing(first, second):
    drafter = answered(salt=first)
    [with_store] = drafter.propose([make_request([5, 10, 11], "x", cache_salt=second)])
    [without] = make_drafter(store_tokens=0).propose([make_request([5, 10, 11], "x")])
    for name in ("token_ids", "parents", "probabilities"):
        np.testing.assert_array_equal(getattr(with_store, name), getattr(without, name))
    assert drafted(drafter, salt=first)[:3] == [12, 13, 14]


PROMPT, REPLY = list(range(100, 140)), [10, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def first_draft(drafter: object, prompt: list[int], salt: str | None) -> list[int]:
    """The chain after the first token of an answer that begins as REPLY does."""
    text = [*prompt, REPLY[0]]
    request = make_request(text, "later", num_prompt_tokens=len(prompt), cache_salt=salt)
    [tree] = drafter.propose([request])
    end(drafter, request)
    return tree.chain().token_ids.tolist()


def answered_before(prompt: list[int], salt: str | None) -> object:
    """A drafter after one request that said REPLY, and others that began like it."""
    drafter = make_drafter(store_tokens=1000)
    texts = [(prompt, REPLY), *([([9], [REPLY[0], 50, 51 + i]) for i in range(4)])]
    for i, (before, output) in enumerate(texts):
        request = make_request([*before, *output], str(i), len(before), cache_salt=salt)
        end(drafter, request)
    return drafter


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_repeated_prompt_finds_its_answer_from_the_first_token_on(salt):
    assert first_draft(answered_before(PROMPT, salt), PROMPT, salt)[:10] == REPLY[1:]
    # The end of the prompt decides; another prompt finds what most answers say.
    assert first_draft(answered_before(PROMPT, salt), [3, *PROMPT], salt)[:10] == REPLY[1:]
    assert first_draft(answered_before(PROMPT, salt), [*PROMPT, 3], salt)[0] == 50


@pytest.mark.parametrize(("first", "second"), [(None, "b"), ("a", None), ("a", "b")])
def test_prompts_of_another_salt_are_not_recognized(first, second):
    """Neither drafts nor fingerprints show who guesses a prompt that it was asked before."""
    drafter = answered_before(PROMPT, first)
    store = drafter.store
    store.take_in(1000)
    prompt = np.array(PROMPT, dtype=np.int32)
    prints = {text.prompt for text in store.texts()}
    assert prompt_print(first, prompt) in prints
    assert prompt_print(second, prompt) not in prints
    # Even who knows the fingerprint gets no answer under another salt.
    assert store.answer(first, prompt_print(first, prompt)) >= 0
    assert store.answer(second, prompt_print(first, prompt)) == -1
    assert 10 not in first_draft(drafter, PROMPT, second)[1:]


def test_a_sessions_answer_is_that_to_its_last_prompt():
    drafter = make_drafter(store_tokens=1000)
    longer = [*PROMPT, *REPLY, 9]
    drafter.propose([make_request([*PROMPT, 50], "session", len(PROMPT))])
    end(drafter, make_request([*longer, *range(60, 80)], "session", len(longer)))
    drafter.store.take_in(1000)
    [text] = drafter.store.texts()
    assert text.prompt == prompt_print(None, np.array(longer, np.int32))


def test_a_text_that_was_evicted_is_no_answer():
    store = RequestStore(PythonBackend(BLEND), max_order=8, max_tokens=40 + 2 * TEXT_TOKENS)
    for start, prompt in enumerate((b"question", b"question", b"another")):
        assert store.answer(None, b"question") == start - 1, "the latest, also once others are gone"
        add(store, None, np.arange(20, dtype=np.int32) + 40 * start, prompt)
    assert store.answer(None, b"question") == 1
    add(store, None, np.arange(20, dtype=np.int32), b"")
    assert store.answer(None, b"question") == -1
    assert store.answer(None, b"another") >= 0
    store.clear()
    assert store.answer(None, b"another") == -1


def test_texts_come_and_go_a_bounded_number_of_tokens_at_a_time():
    """In the end the index is as if they had come at once, whatever was asked meanwhile.

    There is room for 45 tokens of three texts.
    """
    texts = [np.arange(start, start + 20, dtype=np.int32) % 7 for start in range(4)]
    store = RequestStore(NativeBackend(BLEND), max_order=4, max_tokens=45 + 3 * TEXT_TOKENS)
    for text in texts:
        store.add(None, text)
    assert len(store.texts()) == 2, "of those that nobody takes in the last ones wait"
    for text in texts[:2]:
        store.add(None, text)
    sizes = []
    for _ in range(8):
        before = 0 if store.index(None) is None else store.index(None).num_tokens
        store.take_in(6)
        sizes.append(store.index(None).num_tokens - before)
        assert len(store.texts()) == 2
    assert sizes == [6] * 6 + [4, 0]
    for _ in range(3):
        add(store, None, texts[3])
    expected = NativeBackend(BLEND).new_index(4)
    for text in (texts[3][:5], texts[3], texts[3]):
        expected.add_text(text)
    assert store.num_tokens == expected.num_tokens == store.index(None).num_tokens
    assert store.index(None).num_nodes == expected.num_nodes


def test_prompts_are_not_stored():
    drafter = answered()
    [tree] = drafter.propose([make_request([5, 1, 2], "third", num_prompt_tokens=1)])
    assert 3 not in tree.token_ids


def test_the_least_recently_used_text_goes_first():
    store = RequestStore(PythonBackend(BLEND), max_order=4, max_tokens=30 + 3 * TEXT_TOKENS)
    for start in (0, 100, 200):
        add(store, "salt", np.arange(start, start + 10, dtype=np.int32))
    store.mark_used("salt", 0)
    store.mark_used("other", 1)
    store.mark_used("salt", 77)
    add(store, None, np.arange(10, dtype=np.int32))
    index = store.index("salt")
    assert store.num_tokens == 30
    assert index.num_tokens == 20
    indexed = {t for text in index.texts.values() for t in text}
    assert indexed == {*range(10), *range(200, 210)}


def test_a_match_counts_as_use():
    drafter = make_drafter(store_tokens=10 + 2 * TEXT_TOKENS)
    for i, answer in enumerate(([10, 11, 12, 13, 14], [20, 21, 22, 23, 24])):
        end(drafter, make_request([i, *answer], str(i), num_prompt_tokens=1))
    drafter.propose([make_request([5, 10, 11, 12], "x", num_prompt_tokens=4)])
    end(drafter, make_request([2, 30, 31, 32, 33, 34], "y", num_prompt_tokens=1))
    [old] = drafter.propose([make_request([5, 10, 11], "u", num_prompt_tokens=3)])
    [gone] = drafter.propose([make_request([5, 20, 21], "v", num_prompt_tokens=3)])
    assert 12 in old.token_ids
    assert 22 not in gone.token_ids


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 20)), max_size=30))
def test_the_bound_holds(additions):
    store = RequestStore(PythonBackend(BLEND), max_order=2, max_tokens=25)
    for salt, size in additions:
        add(store, salt, np.arange(size, dtype=np.int32))
        held = [store.index(salt) for salt in (None, "a", "b")]
        sizes = [index.num_tokens for index in held if index]
        assert store.num_tokens == sum(sizes)
        assert 0 not in sizes, "an index of a salt that has no text"
        num_texts = len(store.texts())
        assert store.num_tokens <= 25
        assert num_texts <= 1 or store.num_tokens + TEXT_TOKENS * num_texts <= 25
        assert size == 0 or store.index(salt) is not None


def test_of_a_text_too_long_the_end_is_kept():
    store = RequestStore(PythonBackend(BLEND), max_order=2, max_tokens=5)
    add(store, None, np.arange(20, dtype=np.int32))
    index = store.index(None)
    assert list(index.texts[0]) == [15, 16, 17, 18, 19]


def test_texts_that_are_there_are_not_restored_again():
    store, copy = (RequestStore(PythonBackend(BLEND), 4, 100) for _ in range(2))
    for _ in range(2):
        add(store, None, np.arange(10, dtype=np.int32))
    for _ in range(2):
        for _ in range(2):
            copy.restore(store.texts())  # both, and nothing the second time
            copy.take_in(100)
        assert copy.num_tokens == 20
        copy.clear()


def test_the_other_of_two_equal_texts_is_not_restored_either():
    store = RequestStore(PythonBackend(BLEND), 4, 25 + 2 * TEXT_TOKENS)
    text = np.arange(10, dtype=np.int32)
    add(store, None, text)
    add(store, None, text)
    published = store.texts()[1:]
    add(store, None, text[:9] + 50)  # one of the two goes
    store.restore(published)
    assert len(store.texts()) == 2
