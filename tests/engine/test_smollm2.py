"""A real model: drafts leave outputs as they are, and searches equal Hugging Face's."""

from itertools import compress

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.engine.beam.cases import check_case, request_of
from tests.engine.beam.oracle import Case, constrained_search
from tests.engine.compare import accepted_tokens, differences, generate, speculation
from tests.extras.items.unit.catalogues import PlainTrie, random_items, write
from vllm_trie.lab import smollm2
from vllm_trie.lab.tiny_model.chat_prompts import chat_tokens

LETTER = (
    "Dear Ms. Keller, thank you for your order of three garden chairs. The chairs left our house "
    "on Monday and will reach you within five days. If a chair is damaged, send it back at our "
    "cost. With kind regards, Tom Brandt, Brandt & Sons."
)
MESSAGES = (
    f"Repeat this letter word by word: {LETTER}",
    f"Rewrite this letter for Mr. Olsen: {LETTER}",
    f"{LETTER}\n\nWhen did the chairs leave, and who wrote the letter?",
    "Write a Python class Stack with the methods push, pop and peek, each with a docstring.",
    "Count from one to twenty in words.",
    "Why is the sky blue?",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=7, max_tokens=20),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=11, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, max_tokens=20),
)
HEADS = str(smollm2.medusa_path())
ITEMS = random_items(1, 2_000, 0, (3, 3), branching=300)


@pytest.fixture(scope="module")
def chats(smollm2_folder):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    return [{"prompt_token_ids": chat_tokens(tokenizer, message)} for message in MESSAGES]


@pytest.fixture(scope="module")
def start(_engines, smollm2_folder):
    return lambda **options: _engines(model=smollm2_folder, max_num_seqs=24, **options)


@pytest.fixture(scope="module")
def expected(start, chats):
    """Plain vLLM's outputs, of each chat with greedy decoding and with one of all kinds."""
    params = [GREEDY] * len(chats) + [KINDS[i % 4] for i in range(len(chats))]
    return params, generate(start(), [*chats, *chats], params)


@pytest.fixture
def smollm2_engine(start, engine):
    """As `engine`, which checks the blocks after each test."""
    return start


def test_a_mixed_batch_is_that_of_plain_vllm(smollm2_engine, chats, expected):
    params, outputs = expected
    union = speculation("trie_union", 12, drafters=["ngram_trie", "medusa"], model=HEADS)
    llm = smollm2_engine(**union)
    before = accepted_tokens(llm)
    assert differences(outputs, generate(llm, [*chats, *chats], params)) == []
    assert accepted_tokens(llm) > before + len(params)


def test_chains_are_those_of_plain_vllm(smollm2_engine, chats, expected):
    """vLLM verifies them, and its samples of chains have other random numbers: greedily only."""
    params, outputs = expected
    llm = smollm2_engine(**speculation("ngram_trie", 8, verification="chain"))
    is_greedy = [sampling.temperature == 0.0 for sampling in params]
    chosen = list(compress(zip([*chats, *chats], params, outputs, strict=True), is_greedy))
    prompts, params, outputs = zip(*chosen, strict=True)
    assert differences(outputs, generate(llm, prompts, list(params))) == []


def test_beams_equal_hugging_face(smollm2_engine, smollm2_folder, chats):
    cases = [
        Case(tuple(chat["prompt_token_ids"]), width, early_stopping, penalty, 16)
        for chat, width, early_stopping, penalty in (
            (chats[1], 4, False, 1.0),
            (chats[4], 9, True, 0.6),
            (chats[5], 3, "never", 2.0),
        )
    ]
    requests = [request_of(case) for case in cases]
    prompts, params = zip(*requests, (chats[0], GREEDY), strict=True)
    results = smollm2_engine().generate(list(prompts), list(params), use_tqdm=False)
    for case, result in zip(cases, results, strict=False):
        check_case(smollm2_folder, case, result)


def test_searches_in_a_catalogue_equal_hugging_face(
    smollm2_engine, smollm2_folder, chats, tmp_path_factory
):
    catalogue = write(tmp_path_factory.mktemp("catalogue") / "items", ITEMS)
    llm = smollm2_engine(additional_config={"vllm_trie": {"items": {"things": str(catalogue)}}})
    width, plain = 8, PlainTrie(ITEMS)
    params = SamplingParams(
        n=width, temperature=0.0, max_tokens=3, extra_args={"beam_width": width, "items": "things"}
    )
    for chat, result in zip(chats, generate(llm, chats, params), strict=True):
        expected = constrained_search(
            smollm2_folder,
            chat["prompt_token_ids"],
            width,
            3,
            lambda path: plain.allowed(path, None),
            None,
        )
        assert [list(output.token_ids) for output in result.outputs] == [
            e.token_ids for e in expected
        ]
        assert [output.item for output in result.outputs] == [
            ITEMS[tuple(e.token_ids)] for e in expected
        ]
