"""Every method's output is plain vLLM's, whatever it proposes: with room and with little of it."""

import pytest
from vllm import SamplingParams

from tests.engine.compare import check_same_outputs, generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.lab.local_engine import verifier_of
from vllm_trie.lab.tiny_model import medusa_path

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
COUNT = 12
HEADS = {"model": str(medusa_path())}
METHODS = {
    "lookahead": speculation("lookahead_trie", 64),
    "medusa": speculation("medusa_dynamic", 32, **HEADS),
    "union": speculation("trie_union", 32, drafters=["ngram_trie", "medusa"], **HEADS),
}
# Every accepted token is the window's work.
WINDOW_ONLY = {"window only": speculation("lookahead_trie", 64, pool_from_text=False)}


@pytest.mark.parametrize("name", METHODS | WINDOW_ONLY)
def test_greedy(engine, expected, name):
    """One request at a time, and eight."""
    llm = engine(**(METHODS | WINDOW_ONLY)[name])
    least = 0.01 if name == "union" else 0.2
    for count, batch_size in ((4, 1), (COUNT, 8)):
        assert check_same_outputs(llm, expected[:count], GREEDY, batch_size) > least
    assert not any(verifier_of(llm).guard.failures.values())


@pytest.mark.parametrize("name", METHODS)
def test_seeded_and_mixed_batch(engine, name):
    """Requests of several kinds side by side, some seeded and one without drafts."""
    kinds = [
        SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True),
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=9, max_tokens=40),
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.2, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=40, extra_args={"speculation": False}),
    ]
    params = [kinds[i % len(kinds)] for i in range(COUNT)]
    reference = generate(engine(), prompts(COUNT), params)
    assert check_same_outputs(engine(**METHODS[name]), reference, params) > 0.03
