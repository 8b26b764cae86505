"""Trees on models with quantized weights, which vLLM's CPU kernels multiply."""

import pytest
import torch
from vllm import SamplingParams

from tests.engine.compare import accepted_tokens, generate, margins, speculation, tell_oracle
from tests.engine.prompts import prompts
from tests.engine.quantized import write_quantized
from vllm_trie.lab.tiny_model import medusa_path, model_path

COUNT, NUM_TOKENS = 8, 50
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
)

INT8_DTYPE = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"

pytestmark = pytest.mark.usefixtures("test_drafters")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # vLLM takes weights of 4 bits in 16-bit floating point only, and on CPUs with AMX those of 8.
    [("int8", INT8_DTYPE), ("gptq", "bfloat16"), ("awq", "bfloat16")],
)
def test_greedy(engine, tmp_path_factory, kind, dtype):
    options = {
        "model": write_quantized(tmp_path_factory.mktemp(kind), kind),
        "tokenizer": str(model_path()),
        "dtype": dtype,
    }
    expected = generate(engine(**options), prompts(COUNT), GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in expected}) > COUNT // 2
    tell_oracle(expected)
    # The states that heads read have one dtype, however 4 bits are packed.
    heads = {"medusa_dynamic": {"model": str(medusa_path())}} if kind != "awq" else {}
    for method, more in {"test_oracle": {}, **heads}.items():
        llm = engine(**speculation(method, 16, **more), **options)
        margin_of = margins(expected, generate(llm, prompts(COUNT), GREEDY))
        assert margin_of.count(None) > COUNT // 2
        assert all(margin is None or margin < 0.15 for margin in margin_of)
        assert accepted_tokens(llm) > 0.2 * COUNT * NUM_TOKENS
